"""Makes audit records for the tests of their readers: right ones, and wrong ones on purpose."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema

from gatekeeper import __version__
from gatekeeper.audit.chain import (
    CLOSED,
    NO_DIGEST,
    OPEN,
    SEAL,
    SegmentName,
    chain_name,
    digest_of,
    encode_line,
    seal_fields,
    text_path,
    time_text,
)
from gatekeeper.robots import RobotsTxt
from gatekeeper.signing import SigningKey
from tests.documents.blocks import ROOT

SCHEMA = json.loads((ROOT / "docs" / "audit.schema.json").read_text("utf-8"))

BEGIN = 1_769_860_800.0
"""The time at which records begin: 2026-01-31, 12:00 UTC."""
AGENT = "examplebot"
ROBOTS = "User-agent: *\nDisallow: /private\nAllow: /private/door\nCrawl-delay: 10\n"


class Maker:
    """One chain. Time moves only when `wait` is called."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "web",
        pid: int = 42,
        at: float = BEGIN,
        key: SigningKey | None = None,
        urls: str = "full",
        salt: str | None = None,
        version: str = __version__,
        settings: dict[str, Any] | None = None,
        chains: tuple[dict[str, Any], ...] = (),
        start: bool = True,
    ) -> None:
        self.folder, self.key, self.now, self.m = folder, key, at, 1000.0
        self.name = chain_name(host, pid, at)
        self.number, self.n, self.prev, self.first = 1, 0, NO_DIGEST, 1
        self.texts: dict[str, str | None] = {}
        self.leases = 0
        self.batch = 1  # lines that are written together
        self.waiting: list[bytes] = []
        folder.mkdir(exist_ok=True)
        if start:
            self.line(
                "start",
                gatekeeper=version,
                user_agent=f"{AGENT}/1.0",
                token=AGENT,
                host=host,
                pid=pid,
                boot="b",
                config="0" * 64,
                settings=settings or {"robots": {"dialect": "auto"}, "pacing": {}, "fetch": {}},
                urls=urls,
                salt=salt,
                chains=list(chains),
            )

    @property
    def path(self) -> Path:
        return self.folder / str(SegmentName(self.name, self.number))

    def wait(self, seconds: float, *, wall: float | None = None) -> Maker:
        """Let time pass; `wall`: what the wall clock shows of it."""
        self.now += seconds if wall is None else wall
        self.m += seconds
        return self

    def line(self, kind: str, **fields: Any) -> int:
        """Write a line, and return its number."""
        self.n += 1
        raw = encode_line(self.n, self.prev, time_text(self.now), self.m, kind, fields)
        self.waiting.append(raw + b"\n")
        if len(self.waiting) >= self.batch:
            self.save()
        self.prev = digest_of(raw)
        return self.n

    def save(self) -> None:
        """Write the lines that wait."""
        with self.path.open("ab") as file:
            file.write(b"".join(self.waiting))
        self.waiting = []

    # --- what a gate does -----------------------------------------------------------------------

    def robots(self, origin: str, body: str | None = ROBOTS, **fields: Any) -> int:
        """A file that was read; None: there is none."""
        digest = None
        if body is not None:
            digest = digest_of(body.encode())
            path = self.folder / text_path(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(body.encode(), mtime=0))
        self.texts[origin] = body
        given: dict[str, Any] = {
            "origin": origin,
            "source": "network",
            "outcome": "no_file" if body is None else "rules",
            "status": 404 if body is None else 200,
            "hops": [],
            "validators": None,
            "fetched_at": time_text(self.now),
            "expires_at": time_text(self.now + 86_400),
            "size": None if body is None else len(body),
            "text": digest,
            "since": None,
        }
        return self.line("robots", **(given | fields))

    def ruling(self, url: str, agent: str = AGENT) -> dict[str, Any]:
        """What a gate says about a URL."""
        origin = "/".join(url.split("/")[:3])
        body = self.texts.get(origin)
        if body is None:
            return {"verdict": "allow", "reason": "no_file", "line": None, "text": None}
        match = RobotsTxt.parse(body).policy(agent).match(url)
        return {
            "verdict": "allow" if match.allowed else "deny",
            "reason": "no_rule" if match.rule is None else "rule",
            "line": None if match.rule is None else match.rule.line,
            "text": digest_of(body.encode()),
        }

    def grant(self, url: str, interval: float = 10.0, **fields: Any) -> str:
        """The grant of a lease; its id."""
        self.leases += 1
        lease = f"L{self.leases}"
        host = url.split("/")[2]
        given: dict[str, Any] = {
            "lease": lease,
            "url": url,
            "agent": AGENT,
            "robots": False,
            "decision": f"D{self.leases}",
            **{k: v for k, v in self.ruling(url).items() if k != "verdict"},
            "scopes": [
                {"scope": host, "interval": interval, "source": "crawl_delay", "since": None}
            ],
        }
        self.line("grant", **(given | fields))
        return lease

    def outcome(self, lease: str, **fields: Any) -> int:
        """The outcome of a lease whose request began now."""
        given: dict[str, Any] = {
            "lease": lease,
            "start": time_text(self.now),
            "head": time_text(self.now),
            "end": time_text(self.now),
            "status": 200,
            "retry_after": None,
            "size": 1000,
            "signed": False,
            "signals": {},
        }
        return self.line("outcome", **(given | fields))

    def page(self, url: str, interval: float = 10.0, **fields: Any) -> None:
        """A page that was fetched."""
        self.outcome(self.grant(url, interval, **fields))

    def refused(self, url: str, kind: str = "refused", **fields: Any) -> int:
        """A refusal."""
        given = {"url": url, "agent": AGENT, **self.ruling(url)}
        whole = {
            "url": given["url"],
            "agent": AGENT,
            "verdict": given["verdict"],
            "decision": "D0",
            "reason": given["reason"],
            "line": given["line"],
            "text": given["text"],
            "retry_at": None,
        }
        return self.line(kind, **(whole | fields))

    def override(self, match: str, robots: str, *, ended: bool = False, **fields: Any) -> int:
        """A rule of the operator."""
        given = {
            "match": match,
            "by": "ann",
            "reason": "agreed by mail",
            "until": None,
            "rule": None if ended else {"match": match, "robots": robots},
            "source": "call",
            "ended": ended,
        }
        return self.line("override", **(given | fields))

    def block(self, scope: str, seconds: float, **fields: Any) -> int:
        """A block that begins now."""
        given = {
            "scope": scope,
            "by": None,
            "reason": "429",
            "since": time_text(self.now),
            "until": time_text(self.now + seconds),
        }
        return self.line("block", **(given | fields))

    def seal(self, reason: str = "size", *, compressed: bool = True) -> int:
        """The end of a segment; the next one begins."""
        place = self.key, self.name, self.n + 1, self.prev
        n = self.line("seal", **seal_fields(*place, self.first, reason))
        self.save()
        closed = self.path
        self.number, self.first = self.number + 1, self.n + 1
        if compressed:
            closed.with_name(closed.name.removesuffix(OPEN) + CLOSED).write_bytes(
                gzip.compress(closed.read_bytes(), mtime=0)
            )
            closed.unlink()
        return n

    def close(self) -> None:
        """The end of the chain."""
        self.line("end", reason="closed")
        self.seal("end")

    def last(self) -> dict[str, Any]:
        """What the start of another chain says of this one."""
        return {"segment": self.path.name, "n": self.n, "digest": self.prev}


def rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of a segment, compressed or not."""
    zipped = path.suffix == ".gz"
    octets = gzip.decompress(path.read_bytes()) if zipped else path.read_bytes()
    lines = change(octets.split(b"\n")[:-1])
    octets = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(octets, mtime=0) if zipped else octets)


def changed(raw: bytes, **fields: Any) -> bytes:
    """A line with other fields, and everything else as it was."""
    return json.dumps(json.loads(raw) | fields, separators=(",", ":")).encode()


# --- the schema -----------------------------------------------------------------------------------


def lines_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Every line of a folder."""
    for path in sorted(folder.iterdir()):
        name = SegmentName.parse(path.name)
        if name is None or name.suffix == SEAL:
            continue
        octets = path.read_bytes()
        octets = gzip.decompress(octets) if path.suffix == ".gz" else octets
        yield from map(json.loads, octets.splitlines())


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of one kind of line."""
    name = SCHEMA["discriminator"]["mapping"][kind].rpartition("/")[2]
    found: dict[str, Any] = SCHEMA["$defs"][name] | {"$defs": SCHEMA["$defs"]}
    return found


def check_schema(folder: Path) -> set[str]:
    """Check every line against the schema, and that it has no other fields; return their kinds."""
    kinds = set()
    for line in lines_in(folder):
        schema = schema_of(line["kind"])
        jsonschema.Draft202012Validator(schema).validate(line)
        assert set(line) <= set(schema["properties"]), line
        kinds.add(line["kind"])
    return kinds
