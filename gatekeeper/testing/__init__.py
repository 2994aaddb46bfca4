"""For the tests of crawlers: a gate without a network, a virtual clock, and a judge of logs."""

from gatekeeper.testing.scripted import (
    Breach,
    Manners,
    ScriptedGate,
    ScriptedRobots,
    Seen,
    answers,
    drive,
    judge,
    scripted_gate,
    virtual_clock,
)

__all__ = [
    "Breach",
    "Manners",
    "ScriptedGate",
    "ScriptedRobots",
    "Seen",
    "answers",
    "drive",
    "judge",
    "scripted_gate",
    "virtual_clock",
]
