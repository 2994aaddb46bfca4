"""For the tests of crawlers: a gate without a network, a virtual clock, and a judge of logs."""

from gatekeeper.testing import scripted
from gatekeeper.testing.scripted import *  # noqa: F403 - every public name, and no other

__all__: list[str] = []
__all__ += scripted.__all__
