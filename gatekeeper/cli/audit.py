"""`gatekeeper audit verify|show|report|erase`: reads the audit record of a gate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gatekeeper import __version__
from gatekeeper.cli import CommandParser, load, number_type
from gatekeeper.signing import read_public, read_signing_key
from gatekeeper.terminal import DENIED, NAME, OK, json_text

EXAMPLE = f"{NAME} audit verify /var/lib/gatekeeper/audit --key bot.pub.pem"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `audit`."""
    parser.add_argument(
        "action",
        choices=("verify", "show", "report", "erase"),
        help="verify: check chains, seals, decisions and starts; show: what happened to a URL, a "
        "host, a lease or a decision; report: one page for people; erase: replace the lines of a "
        "host by their digests",
    )
    parser.option("folder DIR", "the folder of the record (audit.folder)")
    parser.option(
        "more DIR|WHAT",
        "verify, report: the folders of a fleet's other members; show: a URL, a host, or the "
        "id of a lease or a decision; erase: a host",
        nargs="*",
        default=(),  # else it would be required
    )
    parser.option(
        "--key FILE...",
        "verify, report: every seal has to be signed with this key, in PEM (repeatable)",
    )
    parser.option(
        "--tolerance SECONDS",
        "verify, report: how far the clocks of two processes may differ (default: 0.1)",
        type=number_type(float, "a number of seconds, 0 or more", lambda number: 0 <= number < 1e9),
    )
    parser.option("-o --output FILE", "report: the file to write")
    parser.option("--by NAME", "erase: who erases")
    parser.option("--reason TEXT", "erase: why")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if something differs, nothing is found, or something could not be erased; 2 if a
    folder or a key can't be read."""
    if args.action in ("show", "erase") and len(args.more) != 1:
        args.parser.error(f"`{args.action}` needs a folder and one {_WHAT[args.action]}")
    for name, actions in _ONLY.items():
        if args.action not in actions and getattr(args, name) not in (None, []):
            where = " and ".join(f"`{one}`" for one in actions)
            args.parser.error(f"`{args.action}` has no --{name}: it is for {where}")
    if args.action == "erase" and not (args.by and args.reason):
        args.parser.error("`erase` needs --by and --reason: they stand in the record")
    action = {"verify": _verify, "show": _show, "report": _report, "erase": _erase}[args.action]
    return action(args)


_WHAT = {"show": "URL, host or id", "erase": "host"}
_ONLY = {
    "key": ("verify", "report"),
    "tolerance": ("verify", "report"),
    "output": ("report",),
    "by": ("erase",),
    "reason": ("erase",),
}
"""The actions that have an option."""


def _checks(args: argparse.Namespace) -> dict[str, Any]:
    folders = [Path(one) for one in (args.folder, *args.more)]
    keys = [read_public(one) for one in args.key]
    tolerance = 0.1 if args.tolerance is None else args.tolerance
    return {"folders": folders, "version": __version__, "keys": keys, "tolerance": tolerance}


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _verify(args: argparse.Namespace) -> int:
    from gatekeeper.audit.verify import lines_of, verify  # noqa: PLC0415 - not needed by `--help`

    result = verify(**_checks(args))
    _print([json_text(result)] if args.json else lines_of(result))
    return OK if result.ok else DENIED


def _show(args: argparse.Namespace) -> int:
    from gatekeeper.audit.show import lines_about  # noqa: PLC0415

    found = False
    for one in lines_about([Path(args.folder)], args.more[0]):
        found = True
        if args.json:
            print(json_text(one))
        else:
            print(f"{one.time}  {one.file}: line {one.n}")
            _print(f"  {word}" for word in one.words)
    if not found:
        print(f"{NAME}: the record has nothing about {args.more[0]!r}", file=sys.stderr)
    return OK if found else DENIED


def _report(args: argparse.Namespace) -> int:
    from gatekeeper.audit.report import report_of  # noqa: PLC0415
    from gatekeeper.audit.verify import Verification  # noqa: PLC0415
    from gatekeeper.sidecar.pages.audit_report import report_page  # noqa: PLC0415
    from gatekeeper.sites.texts import write_output  # noqa: PLC0415

    report = report_of(Verification(**_checks(args)))
    write_output(args.output, json_text(report) + "\n" if args.json else report_page(report))
    return OK if report.verified.ok else DENIED


def _erase(args: argparse.Namespace) -> int:
    from gatekeeper.audit.erase import erase, lines_of  # noqa: PLC0415

    file = load(args).config.identity.key
    result = erase(
        Path(args.folder),
        args.more[0],
        by=args.by,
        reason=args.reason,
        key=None if file is None else read_signing_key(file),
    )
    _print([json_text(result)] if args.json else lines_of(result))
    return DENIED if result.left or result.erasure is None else OK
