"""The command `gatekeeper`, and `python -m gatekeeper`: both begin here."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; returns its exit code.

    Imports nothing before it can catch a Ctrl-C: that ends the process without a word.
    """
    try:
        from gatekeeper.cli import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
