"""`gatekeeper config`: checks the configuration, or prints each value with its source."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from gatekeeper.cli import check_folder, load
from gatekeeper.cli.settings import Settings
from gatekeeper.config import agent_named, values_of
from gatekeeper.errors import ConfigError
from gatekeeper.robots.parser import token_warning
from gatekeeper.terminal import NAME, OK, identity_of, json_text

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

    check_config(settings.config, identity_of(settings.config))
    check_folder(settings)


def _print_checked(settings: Settings, *, as_json: bool) -> None:
    if (warning := token_warning(identity_of(settings.config))) is not None:
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
    values = {
        name: {"value": _masked(value), "source": settings.source(name)}
        for name, value in values_of(settings.config)
    }
    print(msgspec.json.format(json_text(values), indent=2))


def _show(settings: Settings) -> None:
    shown = ""
    for name, value in values_of(settings.config):
        section, _, field = name.rpartition(".")
        if section != shown:
            shown = section
            print(f"\n[{section}]")
        text = json_text(_masked(value)) if value is not None else "(not set)"
        source = settings.source(name)
        notes = [] if source == "default" else [source]
        notes.extend(_notes(name, value, settings))
        comment = f"    # {'; '.join(notes)}" if notes else ""
        print(f"{field} = {text}{comment}")


def _masked(value: object) -> object:
    """Return the value without secrets."""
    from gatekeeper.sidecar.routes.operators import masked  # noqa: PLC0415

    return masked(msgspec.to_builtins(value))


def _notes(name: str, value: object, settings: Settings) -> list[str]:
    """Return notes about consequences of a value that it does not show."""
    if name == "user_agent":
        identity = identity_of(settings.config)
        notes = [f"sites see {identity}"] if value is None else []
        return [*notes, f"rules are selected for {agent_named(identity)}"]
    if name == "storage.path" and value is None:
        from gatekeeper.sidecar.process import state_path  # noqa: PLC0415

        try:
            return [f"nothing is stored, except by `{NAME} serve`: {state_path()}"]
        except ConfigError:
            return ["nothing is stored"]  # a user without a home
    return []
