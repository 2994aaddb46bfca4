"""`gatekeeper config check` and `config show`: what is in force, and where it came from."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from gatekeeper.cli.common import NAME, OK, check_place, json_text, load
from gatekeeper.cli.settings import Setting, Settings
from gatekeeper.config import agent_doubt, agent_named, without_credentials
from gatekeeper.errors import ConfigError

__all__ = ["EXAMPLE", "add_arguments", "run"]


EXAMPLE = f"{NAME} config show --config gatekeeper.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `config`."""
    parser.add_argument(
        "action",
        choices=("check", "show"),
        help="check: only say whether it is right; show: every value and its origin",
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 if the configuration is right; a wrong one raises ConfigError (exit 2)."""
    settings = load(args)
    verify(settings)
    if args.action == "check":
        _say_checked(settings, as_json=args.json)
    elif args.json:
        _show_json(settings)
    else:
        _show(settings)
    return OK


def verify(settings: Settings) -> None:
    """What only the parts that use a setting can judge. Raises ConfigError."""
    from gatekeeper.sidecar.reload import check_config  # noqa: PLC0415

    check_config(settings.config, settings.identity())
    check_place(settings)


def _say_checked(settings: Settings, *, as_json: bool) -> None:
    if (doubt := agent_doubt(settings.identity())) is not None:
        print(f"{NAME}: {doubt}", file=sys.stderr)
    if as_json:
        print('{"ok":true}')
    else:
        print(f"{settings.path or 'no file, the defaults'}: all right")


def _show_json(settings: Settings) -> None:
    values: dict[str, Any] = {
        one.name: {"value": _shown(one), "source": one.source} for one in settings
    }
    print(msgspec.json.format(json_text(values), indent=2))


def _show(settings: Settings) -> None:
    section = ""
    for one in settings:
        head, _, field = one.name.rpartition(".")
        if head != section:
            section = head
            print(f"\n[{section}]")
        value = json_text(_shown(one)) if one.value is not None else "(not set)"
        notes = [] if one.source == "default" else [one.source]
        notes.extend(_meaning(one, settings))
        said = f"    # {'; '.join(notes)}" if notes else ""
        print(f"{field} = {value}{said}")


def _shown(one: Setting) -> object:
    """The value without what is secret."""
    if one.name == "fleet.url" and isinstance(one.value, str):
        return without_credentials(one.value)
    return one.value


def _meaning(one: Setting, settings: Settings) -> list[str]:
    """What follows from a value and does not show in it."""
    if one.name == "user_agent":
        identity = settings.identity()
        seen = [f"sites see {identity}"] if one.value is None else []
        return [*seen, f"rules are chosen for {agent_named(identity)}"]
    if one.name == "storage.path" and one.value is None:
        from gatekeeper.sidecar.process import state_path  # noqa: PLC0415

        try:
            return [f"nothing is kept, but by `{NAME} serve`: {state_path()}"]
        except ConfigError:
            return ["nothing is kept"]  # a user without a home
    return []
