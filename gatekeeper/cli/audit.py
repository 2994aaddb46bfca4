"""`gatekeeper audit verify|show|report|erase`: reads the audit record of a gate."""

from __future__ import annotations

import argparse
from pathlib import Path

from gatekeeper import __version__
from gatekeeper.cli import number_type
from gatekeeper.errors import ConfigError
from gatekeeper.terminal import DENIED, NAME, OK, json_text

EXAMPLE = f"{NAME} audit verify /var/lib/gatekeeper/audit --key bot.pub.pem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit`."""
    parser.add_argument(
        "action",
        choices=("verify", "show", "report", "erase"),
        help="verify: check chains, seals, decisions and starts; show: what happened to a URL, a "
        "host, a lease or a decision; report: one page for people; erase: replace the lines of a "
        "host by their digests",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of the record (audit.folder)")
    parser.add_argument(
        "more",
        nargs="*",
        metavar="DIR|WHAT",
        help="verify: the folders of the other members of a fleet; show: a URL, a host, or the id "
        "of a lease or a decision; erase: a host",
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        action="append",
        default=[],
        help="verify: every seal has to be signed with this key, in PEM (repeatable)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="SECONDS",
        type=number_type(float, "a number of seconds, 0 or more", lambda number: 0 <= number < 1e9),
        default=0.1,
        help="verify: how far the clocks of two processes may differ (default: 0.1)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="report: the file to write")
    parser.add_argument("--by", metavar="NAME", help="erase: who erases")
    parser.add_argument("--reason", metavar="TEXT", help="erase: why")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 1 if something differs or nothing is found; 2 if the folder can't be read."""
    if args.action == "verify":
        return _verify(args)
    raise ConfigError(f"{args.action}: not yet")


def _verify(args: argparse.Namespace) -> int:
    from gatekeeper.audit.verify import lines_of, verify  # noqa: PLC0415 - not needed by `--help`
    from gatekeeper.signing import read_public  # noqa: PLC0415

    keys = [read_public(one) for one in args.key]
    folders = [Path(one) for one in (args.folder, *args.more)]
    result = verify(folders, version=__version__, keys=keys, tolerance=args.tolerance)
    if args.json:
        print(json_text(result))
    else:
        for line in lines_of(result):
            print(line)
    return OK if result.ok else DENIED
