"""`gatekeeper config`: checks the configuration, or prints each value with its source."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import msgspec

from gatekeeper.cli import check_folder, load
from gatekeeper.cli.settings import Setting, Settings
from gatekeeper.config import agent_named
from gatekeeper.errors import ConfigError
from gatekeeper.robots.parser import token_warning
from gatekeeper.terminal import NAME, OK, json_text

EXAMPLE = f"{NAME} config show --config gatekeeper.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `config`."""
    parser.add_argument(
        "action",
        choices=("check", "show"),
        help="check: only validate; show: print every value and its source",
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 if the configuration is valid; otherwise raise ConfigError (exit 2)."""
    settings = load(args)
    verify(settings)
    if args.action == "check":
        _print_checked(settings, as_json=args.json)
    elif args.json:
        _show_json(settings)
    else:
        _show(settings)
    return OK


def verify(settings: Settings) -> None:
    """Make the checks that only the code which uses a setting can make. Raises ConfigError."""
    from gatekeeper.sidecar.reload import check_config  # noqa: PLC0415

    check_config(settings.config, settings.identity())
    check_folder(settings)


def _print_checked(settings: Settings, *, as_json: bool) -> None:
    if (warning := token_warning(settings.identity())) is not None:
        print(f"{NAME}: {warning}", file=sys.stderr)
    from gatekeeper.pacing.host_settings import described, end_of  # noqa: PLC0415 - loads asyncio

    for rule in settings.config.host:
        if end_of(rule) <= time.time():
            over = f"[[host]] match={rule.match!r} has ended, and is not in force"
            print(f"{NAME}: {over}: {described(rule)}", file=sys.stderr)
    if as_json:
        print('{"ok":true}')
    else:
        print(f"{settings.path or 'no file, the defaults'}: all right")


def _show_json(settings: Settings) -> None:
    values: dict[str, Any] = {
        setting.name: {"value": _masked_value(setting), "source": setting.source}
        for setting in settings
    }
    print(msgspec.json.format(json_text(values), indent=2))


def _show(settings: Settings) -> None:
    section = ""
    for setting in settings:
        head, _, field = setting.name.rpartition(".")
        if head != section:
            section = head
            print(f"\n[{section}]")
        value = json_text(_masked_value(setting)) if setting.value is not None else "(not set)"
        notes = [] if setting.source == "default" else [setting.source]
        notes.extend(_notes(setting, settings))
        comment = f"    # {'; '.join(notes)}" if notes else ""
        print(f"{field} = {value}{comment}")


def _masked_value(setting: Setting) -> object:
    """Return the value without secrets."""
    from gatekeeper.sidecar.routes.operators import masked  # noqa: PLC0415

    return masked(msgspec.to_builtins(setting.value))


def _notes(setting: Setting, settings: Settings) -> list[str]:
    """Return notes about consequences of a value that it does not show."""
    if setting.name == "user_agent":
        identity = settings.identity()
        notes = [f"sites see {identity}"] if setting.value is None else []
        return [*notes, f"rules are selected for {agent_named(identity)}"]
    if setting.name == "storage.path" and setting.value is None:
        from gatekeeper.sidecar.process import state_path  # noqa: PLC0415

        try:
            return [f"nothing is stored, except by `{NAME} serve`: {state_path()}"]
        except ConfigError:
            return ["nothing is stored"]  # a user without a home
    return []
