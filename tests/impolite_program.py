"""A crawler without manners, in a process of its own, for the benchmark of manners.

It asks for no robots.txt, follows every redirect, and keeps nothing.
"""

from __future__ import annotations

import contextlib
import sys
import urllib.request
from pathlib import Path


def main(folder: Path) -> None:
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in (folder / "urls.txt").read_text("utf-8").split():
        with contextlib.suppress(OSError), without_proxy.open(url) as response:
            response.read()


if __name__ == "__main__":
    main(Path(sys.argv[2]))
