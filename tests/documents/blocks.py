"""The fenced code blocks of the documents, and the programs that run them.

A block runs as printed. An HTML comment on the line before the block may change that:

    <!-- not run: WHY -->      for commands that a test can't run, such as installing from an index
    <!-- exit: 1 -->           for a shell block with this expected exit code
    <!-- needs: a, b -->       for a block that runs where these modules can be imported: one part
                               of `.ci/run` has them all

The Python blocks of a document run one after the other in one process, as a reader would type
them, with `await` at the top level. Shell blocks run separately with `sh -eu` in a directory with
`examples/`, `config.example.toml`, a `urls.txt` and a `robots.txt`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:<!-- (?P<note>[^>]*?) -->\n)?^(?P<indent> *)```(?P<kind>[a-z]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    document: str
    line: int
    kind: str
    text: str
    note: str

    @property
    def not_run(self) -> str | None:
        """The reason why the block is not run, or None."""
        head, _, why = self.note.partition(":")
        return why.strip() if head == "not run" else None

    @property
    def needs(self) -> list[str]:
        """The modules without which the block can't run."""
        head, _, names = self.note.partition(":")
        return [name.strip() for name in names.split(",")] if head == "needs" else []

    @property
    def can_run(self) -> bool:
        """Whether the block is one that a test runs, and what it needs is installed."""
        return self.not_run is None and all(map(find_spec, self.needs))

    @property
    def exit_code(self) -> int:
        """The expected exit code of a shell block."""
        head, _, code = self.note.partition(":")
        return int(code) if head == "exit" else 0

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[Path]:
    """Return the README, CONTRIBUTING and every page of `docs/`."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            str(path.relative_to(ROOT)),
            text.count("\n", 0, found.start("kind")) + 1,
            found["kind"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            (found["note"] or "").strip(),
        )
        for found in _FENCE.finditer(text)
    ]


SITE = '''
"""Names of the documents lead to the fake internet: nothing else is looked up."""
import json, os, socket

_real = socket.getaddrinfo

def told(name):
    return json.loads(os.environ[name])  # at each call: the process may have been forked

def getaddrinfo(host, port, *args, **options):
    name = host.decode() if isinstance(host, bytes) else host
    if name in told("FAKE_NAMES"):
        ports = told("FAKE_PORTS")
        return _real("127.0.0.1", ports.get(str(port), ports["80"]), *args, **options)
    if name in (None, "localhost") or name.replace(".", "").isdigit() or ":" in name:
        return _real(host, port, *args, **options)
    raise socket.gaierror(socket.EAI_NONAME, f"{name} is not in this test")

socket.getaddrinfo = getaddrinfo

# Scrapy's resolver tells the address alone, and dials the port of the URL.
socket.gethostbyname = lambda name: getaddrinfo(name, 80)[0][4][0]
_connect = socket.socket.connect_ex

def connect_ex(self, address):
    if isinstance(address, tuple) and address[0] == "127.0.0.1":
        address = (address[0], told("FAKE_PORTS").get(str(address[1]), address[1]))
    return _connect(self, address)

socket.socket.connect_ex = connect_ex
'''
"""`sitecustomize` of the processes."""

RUNNER = '''
"""Run Python blocks one after the other, with `await` at the top level."""
import ast, asyncio, inspect, json, sys, warnings

if sys.argv[2] == "strict":
    warnings.simplefilter("error")
from gatekeeper.fetching.guard import Guard
from msgspec.structs import replace

# The documents speak of public names; here they lead to loopback.
made = Guard.__init__

def make(self, config, *args, **options):
    guard = replace(config.guard, allow=(*config.guard.allow, "127.0.0.0/8"))
    made(self, replace(config, guard=guard), *args, **options)

Guard.__init__ = make

async def main() -> None:
    space = {"__name__": "__main__"}
    for name, text in json.load(open(sys.argv[1], encoding="utf-8")):
        code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, space)
        if inspect.iscoroutine(done):
            async with asyncio.timeout(30):
                await done

class Inner(asyncio.Runner):
    """`asyncio.run` of a block, which stands within ours."""

def run(coroutine, **options):
    import threading
    found = []
    def there():
        with asyncio.Runner() as runner:
            found.append(runner.run(coroutine))
    thread = threading.Thread(target=there)
    thread.start()
    thread.join(60)
    assert found, "asyncio.run did not end well"
    return found[0]

real = asyncio.run
asyncio.run = run
real(main())
'''
