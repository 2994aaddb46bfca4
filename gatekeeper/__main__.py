"""The command `gatekeeper`, and `python -m gatekeeper`: both begin here."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Run the command; returns its exit code.

    Imports nothing before it can catch a Ctrl-C: that ends the process without a word. Imports make
    a hundred thousand objects that are no garbage: looking at them takes a seventh of the start.
    """
    gc.set_threshold(100_000)
    try:
        from gatekeeper.cli import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
