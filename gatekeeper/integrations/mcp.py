"""Tools for agents over the Model Context Protocol: `may_i_fetch`, `fetch`, `explain`, `sitemaps`.

`gatekeeper mcp` serves them; `build` creates a server for a session of your own.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import html
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, Protocol

import aiohttp
from cachetools import TTLCache

from gatekeeper import __version__, urls
from gatekeeper.client.client import RemoteGatekeeper
from gatekeeper.config import Config
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import (
    ConfigError,
    Deferred,
    Denied,
    GatekeeperError,
    LeaseTimeout,
    SidecarError,
    needs_extra,
)
from gatekeeper.gate.lease_base import refuse_page
from gatekeeper.gate.protocols import Gate
from gatekeeper.pacing.waiters import ClockView
from gatekeeper.session.polite import plain_session, polite_session, session_gate
from gatekeeper.sitemaps import Sitemaps, parse_since
from gatekeeper.storage.base import Storage

with needs_extra("mcp", __name__):
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.prompts import Prompt
    from mcp.types import CallToolResult, TextContent, ToolAnnotations
    from pydantic import BaseModel, Field

__all__ = ["AgentGate", "ExplainedURL", "FetchedPage", "ListedPage", "Permission", "SiteList"]
__all__ += ["as_text", "build", "serving"]

KEPT_SECONDS: Final = 300.0
"""How long the text of a page is kept, so that the rest of it can be read without a request."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of all texts that are kept."""
MAX_FINDINGS: Final = 20
"""Maximum number of findings in one result of `sitemaps`."""
MOST_FETCHES: Final = 64
"""Maximum number of concurrent calls of `fetch`."""
WAIT: Final = 60.0
"""Timeout of a call in seconds, including the waits for leases (those of redirects as well)."""
PROGRESS_SECONDS: Final = 2.0
"""Seconds between two notifications of progress."""
_WHY_SECONDS: Final = 2.0
"""Timeout in seconds for finding out what delayed a call."""
_EXAMINED_BYTES: Final = 1024
"""Number of bytes at the start of a body that are examined to detect binary data."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
_INSTRUCTIONS = (
    "Fetches web pages as their sites ask for: each robots.txt is obeyed, and its pace. Ask "
    "may_i_fetch before planning to read many pages of a site, and sitemaps for what a site has. A "
    "page that is denied stays denied; one that is deferred may be asked for again at retry_at, "
    "not sooner. The rest of a long page is read with start_index, without another request."
)
_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=True)
"""No tool changes anything, and each requests URLs of the open web."""


class Permission(BaseModel):
    """The result of `may_i_fetch`, and the structured content of a refused `fetch`."""

    url: str
    """The URL that was decided; the target of the redirect if one was refused."""
    allowed: bool
    verdict: str
    """allow, deny or defer."""
    reason: str
    why: str
    """One line for people: the verdict, and the line of robots.txt that decided."""
    user_agent: str
    """The product token whose rules apply."""
    line: int | None
    """The number of the line of robots.txt that decided."""
    retry_at: str | None
    """When to ask again after a deferral (RFC 3339)."""


class ExplainedURL(BaseModel):
    """The result of `explain`."""

    answer: Permission
    rule: str | None
    """The text of the line of robots.txt that decided."""
    line: int | None
    crawl_delay: float | None
    """Seconds that the site asks for between two requests."""
    robots_status: int | None
    fetched_at: str | None
    clocks: list[str]
    """What the host waits for, and why."""


class FetchedPage(BaseModel):
    """The result of `fetch`."""

    url: str
    """The final URL, after redirects."""
    status: int
    content_type: str
    content: str
    start_index: int
    """The index of the first character of `content` in the text of the page."""
    truncated: int
    """Number of characters after `content`: call with start_index + len(content) for more."""
    size: int
    """Number of bytes that were read."""
    complete: bool
    """False if the body is longer than max_bytes: the text ends there."""


class ListedPage(BaseModel):
    """One page that a site lists."""

    url: str
    lastmod: str | None
    """When it was last modified (RFC 3339), if that is known."""


class SiteList(BaseModel):
    """The result of `sitemaps`."""

    pages: list[ListedPage]
    more: bool
    """Whether there are more pages than `max_entries`."""
    findings: list[str]
    """What is wrong with the sitemaps, and which could not be read."""


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _permission(decision: Decision) -> Permission:
    return Permission(
        url=decision.url,
        allowed=decision.verdict is Verdict.ALLOW,
        verdict=decision.verdict.value,
        reason=decision.reason.value,
        why=decision.explain(),
        user_agent=decision.user_agent,
        line=None if decision.rule is None else decision.rule.line,
        retry_at=_iso(decision.retry_at),
    )


@asynccontextmanager
async def serving(
    user_agent: str | None,
    *,
    config: Config | None = None,
    storage: Storage | None = None,
    gate: str | None = None,
    token: str | None = None,
    wait: float = WAIT,
    **session: Any,
) -> AsyncIterator[MCPServer[Any]]:
    """Create a server and its gate: that of a polite session or, with `gate`, the sidecar at that
    address (see `RemoteGatekeeper`; `token` is its bearer token).

    `user_agent` is the identity to fetch as. With a sidecar it may be None, to use the sidecar's.
    Raises ConfigError if neither is known. `wait`: the timeout of a call in seconds.
    """
    if gate is None:
        if user_agent is None:
            raise ConfigError("user_agent=None needs a sidecar that says who it is: name one")
        async with polite_session(user_agent, config=config, storage=storage, **session) as polite:
            yield build(polite, wait=wait)
        return
    async with RemoteGatekeeper(gate, user_agent, token=token, config=config) as remote:
        if remote.user_agent is None:
            raise ConfigError(f"{gate} does not say who it is: start it first, or give a name")
        middlewares = (*session.pop("middlewares", ()), remote.middleware)
        # aiohttp's total timeout would include the wait for a lease; `wait` limits both.
        session.setdefault("timeout", _TIMEOUT)
        async with plain_session(
            remote.user_agent, config=config, middlewares=middlewares, **session
        ) as plain:
            yield build(plain, remote, wait=wait)


def build(
    session: aiohttp.ClientSession,
    gate: AgentGate | None = None,
    *,
    wait: float = WAIT,
    timer: Callable[[], float] = time.monotonic,
) -> MCPServer[Any]:
    """Create a server for a `polite_session`, or for a guarded session with the middleware of
    `gate`. `wait`: the timeout of a call in seconds. `timer` is for tests: it says when the kept
    texts of pages expire."""
    tools = _Tools(session, gate or session_gate(session), wait, timer)
    server = MCPServer[Any]("gatekeeper", version=__version__, instructions=_INSTRUCTIONS)
    for tool in (tools.may_i_fetch, tools.explain, tools.fetch, tools.sitemaps):
        server.add_tool(tool, annotations=_READS, structured_output=True)
    server.add_prompt(Prompt.from_function(tools.read_page, "fetch"))
    return server


class AgentGate(Gate, Protocol):
    """A gate with the methods `why` and `sitemaps`, such as `Gatekeeper` and `RemoteGatekeeper`."""

    async def why(self, host: str) -> Sequence[ClockView]:
        """Return every clock of the host, each with its origin."""

    def sitemaps(
        self, origin: str, *, since: datetime | None, guess: bool, max_entries: int | None
    ) -> Sitemaps:
        """Iterate over the pages that the origin's sitemaps list."""


@dataclass(eq=False)
class _Tools:
    """The tools and the prompt, for one session and its gate. A refusal is returned as an error
    result: a text for the model, and the decision as a `Permission`."""

    _session: aiohttp.ClientSession
    _gate: AgentGate
    _wait: float
    _timer: Callable[[], float]

    def __post_init__(self) -> None:
        self._kept: TTLCache[tuple[str, str, int], FetchedPage] = TTLCache(
            KEPT_BYTES, KEPT_SECONDS, self._timer, lambda page: sys.getsizeof(page.content)
        )
        """Whole pages, for the calls that read on."""
        self._fetching = asyncio.Semaphore(MOST_FETCHES)

    async def may_i_fetch(
        self, url: str, context: Context[Any]
    ) -> Annotated[CallToolResult, Permission]:
        """Check whether robots.txt allows this URL to be fetched now, and which line decided."""

        async def answer() -> Permission:
            return _permission(await self._gate.check(url))

        return await self._result(url, answer(), context)

    async def explain(
        self, url: str, context: Context[Any]
    ) -> Annotated[CallToolResult, ExplainedURL]:
        """Explain why this URL may be fetched or not, how often its host may be requested, and what
        the host currently waits for."""

        async def answer() -> ExplainedURL:
            decision = await self._gate.check(url)
            clocks = await self._gate.why(urls.parse(url).host)
            rule = decision.rule
            return ExplainedURL(
                answer=_permission(decision),
                rule=None if rule is None else rule.text[:500],
                line=None if rule is None else rule.line,
                crawl_delay=decision.crawl_delay,
                robots_status=decision.robots_status,
                fetched_at=_iso(decision.fetched_at),
                clocks=[str(clock) for clock in clocks],
            )

        return await self._result(url, answer(), context)

    async def fetch(
        self,
        url: str,
        context: Context[Any],
        start_index: Annotated[int, Field(ge=0)] = 0,
        max_length: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000,
        form: Literal["text", "markdown", "raw"] = "markdown",
        max_bytes: Annotated[int, Field(ge=1, le=5_000_000)] = 1_000_000,
    ) -> Annotated[CallToolResult, FetchedPage]:
        """Fetch a page when its host is due, following redirects. A page that robots.txt denies is
        not fetched. If its host is not due in time, the error says when to ask again. `truncated`
        is the number of characters after `content`: read on with `start_index`, which sends no
        request within five minutes."""

        async def answer() -> FetchedPage:
            page = await self._page(url, form, max_bytes, read_on=start_index > 0)
            size = len(page.content)
            if start_index > size:
                raise _NoPage(f"start_index {start_index}: the text has {size} characters")
            content = page.content[start_index : start_index + max_length]
            left = size - start_index - len(content)
            part = {"content": content, "start_index": start_index, "truncated": left}
            return page.model_copy(update=part)

        return await self._result(url, answer(), context)

    async def sitemaps(
        self,
        origin: str,
        context: Context[Any],
        since: str | None = None,
        guess: bool = True,
        max_entries: Annotated[int, Field(ge=1, le=1_000)] = 100,
    ) -> Annotated[CallToolResult, SiteList]:
        """List the pages that a site's sitemaps name, in their order: those that its robots.txt
        names, and with `guess` /sitemap.xml. `origin` may be any URL of the site. `since`, such as
        2026-11-01, leaves out what was certainly not modified since. Each file is requested when
        its host is due, so a large site may need `since`, or a smaller `max_entries`."""

        async def answer() -> SiteList:
            when = None if since is None else parse_since(since)
            found = self._gate.sitemaps(
                origin, since=when, guess=guess, max_entries=max_entries + 1
            )
            async with contextlib.aclosing(found):
                pages = [ListedPage(url=one.url, lastmod=_iso(one.lastmod)) async for one in found]
            findings = [f"{one.source}: {one.message}" for one in found.findings[:MAX_FINDINGS]]
            more = len(pages) > max_entries
            return SiteList(pages=pages[:max_entries], more=more, findings=findings)

        return await self._result(origin, answer(), context)

    async def read_page(self, url: str, context: Context[Any]) -> str:
        """Fetch a page politely, and put its text into the conversation."""
        found: Any = await self.fetch(url, context)
        if found.is_error:
            return f"{url} was not fetched: {found.content[0].text}"
        page = FetchedPage.model_validate(found.structured_content)
        left = f"\n\n({page.truncated} more characters)" if page.truncated else ""
        return f"The text of {page.url}:\n\n{page.content}{left}"

    async def _result(
        self, url: str, work: Coroutine[Any, Any, BaseModel], context: Context[Any]
    ) -> CallToolResult:
        """Run the work within `wait` seconds, and convert its result or error. The client is told
        meanwhile what the host waits for, if it asked for progress."""
        telling = asyncio.create_task(self._tell(url, context))
        try:
            async with asyncio.timeout(self._wait):
                found = await work
        except Denied as error:
            word = "deferred" if isinstance(error, Deferred) else "denied"
            return _error(f"{word}: {error}", _permission(error.decision))
        except TimeoutError as error:
            if isinstance(error, LeaseTimeout):
                again = "" if error.retry_at is None else f"; ask again at {error.retry_at:%FT%TZ}"
                return _error(f"deferred: {error}{again}")
            late = f"{urls.mask(url)} did not come within {self._wait:g} s: host not due, or slow"
            return _error("; ".join((late, *await self._clocks(url))))
        except (GatekeeperError, aiohttp.ClientError, _NoPage) as error:
            return _error(str(error) or type(error).__name__)
        finally:
            telling.cancel()
        text = TextContent(type="text", text=found.model_dump_json())
        return CallToolResult(content=[text], structured_content=found.model_dump(mode="json"))

    async def _tell(self, url: str, context: Context[Any]) -> None:
        """Report the seconds so far, of how many, and what the host waits for."""
        seconds = 0.0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            seconds += PROGRESS_SECONDS
            clocks = await self._clocks(url)
            await context.report_progress(seconds, self._wait, "; ".join(clocks) or "reading")

    async def _clocks(self, url: str) -> list[str]:
        """Return what the URL's host waits for, as far as that is found out in time."""
        with contextlib.suppress(GatekeeperError, TimeoutError):
            async with asyncio.timeout(_WHY_SECONDS):
                return [str(clock) for clock in await self._gate.why(urls.parse(url).host)]
        return []

    async def _page(self, url: str, form: str, max_bytes: int, *, read_on: bool) -> FetchedPage:
        """Return the whole page: with `read_on` the one that is kept, if it still is."""
        key = url, form, max_bytes
        page = self._kept.get(key) if read_on else None
        if page is None:
            if self._fetching.locked():
                raise _NoPage(f"{MOST_FETCHES} pages are being fetched: wait for one of them")
            async with self._fetching:
                page = await self._fetched(url, form, max_bytes)
            with contextlib.suppress(ValueError):  # it is too large to be kept
                self._kept[key] = page
        return page

    async def _fetched(self, url: str, form: str, max_bytes: int) -> FetchedPage:
        await self._refuse_at_once(url)
        async with self._session.get(url) as response:
            try:
                body = await response.content.readexactly(max_bytes + 1)
                response.close()  # the rest is not needed
            except asyncio.IncompleteReadError as error:
                body = error.partial
            complete, body = len(body) <= max_bytes, body[:max_bytes]
        kind = response.content_type
        encoding = _encoding(response)
        if b"\0" in body[:_EXAMINED_BYTES] and not encoding.startswith("utf-16"):
            raise _NoPage(f"{response.url} is no text ({kind}): it can't be shown")
        text = body.decode(encoding, errors="replace")
        if form != "raw" and ("html" in kind or kind == "application/xhtml+xml"):
            # A long page takes some seconds, so the conversion runs in a thread.
            text = await asyncio.to_thread(as_text, text, markdown=form == "markdown")
        return FetchedPage(
            url=str(response.url),
            status=response.status,
            content_type=kind,
            content=text,
            start_index=0,
            truncated=0,
            size=len(body),
            complete=complete,
        )

    async def _refuse_at_once(self, url: str) -> None:
        """Raise Denied, before anything is sent, for a URL that is denied (aiohttp would remove
        credentials from a URL before the gate sees them), and LeaseTimeout if the host is not due
        within `wait` seconds, so that the agent can do something else until then."""
        refuse_page(self._gate, await self._gate.check(url))
        latest = datetime.now(UTC) + timedelta(seconds=self._wait)
        clocks: Sequence[ClockView] = ()
        with contextlib.suppress(SidecarError):  # acquiring the lease raises the error
            clocks = await self._gate.why(urls.parse(url).host)
        for clock in clocks:
            late = clock.kind in ("block", "next") and (clock.until or latest) > latest
            if late or clock.kind == "pause":
                raise LeaseTimeout(url, f"{urls.mask(url)}: {clock}", retry_at=clock.until)


class _NoPage(Exception):
    """There is nothing to show, and why."""


def _error(text: str, permission: Permission | None = None) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content=None if permission is None else permission.model_dump(mode="json"),
        is_error=True,
    )


_ENCODINGS = re.compile(
    r"utf-(8|16|16-le|16-be)|ascii|latin-1|iso8859-[0-9]+|cp(125[0-8]|866|874|932|949|950)|koi8-[ru]"
    r"|gb(2312|k|18030)|big5(hkscs)?|euc_(jp|kr)|shift_jis|iso2022_jp|mac-roman|mac-cyrillic"
)
"""Encodings that web pages use. Others that Python supports may fail, or take very long."""


def _encoding(response: aiohttp.ClientResponse) -> str:
    name = "utf-8"
    with contextlib.suppress(LookupError):
        name = codecs.lookup(response.charset or name).name
    return name if _ENCODINGS.fullmatch(name) else "utf-8"


_HIDDEN = frozenset(
    {"script", "style", "noscript", "template", "svg", "title", "textarea", "iframe"}
)
"""Elements whose content is not visible as text of the page."""
_BLOCK_NAMES = (
    "address article aside blockquote br dd div dl dt fieldset figure footer form h1 h2 h3 h4 h5 "
    "h6 header hr li main nav ol p pre section table td th tr ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
"""Elements that start and end on a line of their own."""
_MARKS = {f"h{level}": "#" * level + " " for level in range(1, 7)} | {"li": "- "}
"""What precedes the text of an element in Markdown."""
_TOKEN = re.compile(
    r"""(?P<text>[^<]++|<(?![!?]|/?[A-Za-z]))
    |<!(?=--)(?>.*?-->|.*)|<[!?][^>]*+>?
    |<(?P<name>/?[A-Za-z][^\s/>]*+)
    (?P<attributes>(?:[^>"']++|(?<==)(?:"[^"]*+"?|'[^']*+'?)|["'])*+)(?P<end>>?)""",
    re.DOTALL | re.VERBOSE,
)
"""Text, a comment, another declaration, or a tag. Markup that does not end takes the rest."""
_ATTRIBUTE = re.compile(r"""([^\s=>/"']+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?""")
_LONG_NUMBER = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{8,});?")
"""Character references that are too large for any character; `html.unescape` fails for the longest.
"""
_PRESERVED = str.maketrans({"\n": "\x00", " ": "\x01", "\t": "\x01"})
_RESTORED = str.maketrans({"\x00": "\n", "\x01": " "})
"""White space in `pre` is significant: it is replaced by other characters while that of the other
text is collapsed."""


class _PageText:
    """Extracts the visible text of a page.

    Each character is examined a bounded number of times, whatever the page contains; `html.parser`
    takes a minute for 80 kB of `<a `.
    """

    def __init__(self, *, markdown: bool) -> None:
        self._markdown = markdown
        self._link: tuple[int, str] | None = None
        """The index of the open link's first part, and its target; links can't be nested."""
        self._unclosed: set[str] = set()
        """Elements without an end tag in the rest of the text, which is not searched again."""
        self._pre = False
        self.parts: list[str] = []

    def feed(self, text: str) -> None:
        """Process a whole page."""
        text = text.replace("\x00", "\ufffd").replace("\x01", "\ufffd")
        at = 0
        while (token := _TOKEN.match(text, at)) is not None:
            at = token.end()
            name = (token["name"] or "").lower()
            if token["text"]:
                self._data(token["text"])
            elif name and not token["end"]:
                return  # browsers do not show markup that does not end
            elif name[:1] == "/":
                self._close(name[1:])
            elif name in _HIDDEN and token["attributes"][-1:] != "/":
                at = self._skip(name, text, at)
            elif name:
                self._open(name, token["attributes"])

    def _skip(self, name: str, text: str, at: int) -> int:
        """Return the position after a hidden element; without an end tag it hides nothing (except
        scripts and styles)."""
        if name in self._unclosed:
            return at
        found = re.compile(rf"</{name}(?=[\s/>])[^>]*+>?", re.IGNORECASE).search(text, at)
        if found is not None:
            return found.end()
        self._unclosed.add(name)
        return len(text) if name in ("script", "style") else at

    def _open(self, name: str, attributes: str) -> None:
        if name in _BLOCKS:
            self.parts.append("\n")
        if name == "pre" and not self._pre:
            self._pre = True
            self.parts.append("```\x00" if self._markdown else "")
        elif self._markdown and name in _MARKS:
            self.parts.append(_MARKS[name])
        elif self._markdown and name == "a":
            self._end_link()
            self._link = (len(self.parts), _attribute(attributes, "href"))
            self.parts.append("")

    def _close(self, name: str) -> None:
        if name == "pre" and self._pre:
            self._pre = False
            self.parts.append("\x00```" if self._markdown else "")
        if name in _BLOCKS:
            self.parts.append("\n")
        elif name == "a":
            self._end_link()

    def _end_link(self) -> None:
        place, target = self._link or (0, "")
        self._link = None
        if target and any(part.strip() for part in self.parts[place:]):
            self.parts[place] = "["
            self.parts.append(f"]({target})")

    def _data(self, text: str) -> None:
        if "&" in text:
            text = html.unescape(_LONG_NUMBER.sub("\ufffd", text))
        self.parts.append(text.translate(_PRESERVED) if self._pre else re.sub(r"\s+", " ", text))


def _attribute(text: str, name: str) -> str:
    for found in _ATTRIBUTE.finditer(text):
        if found[1].lower() == name:
            value = found[2] or found[3] or found[4] or ""
            return re.sub(r"\s+", "", html.unescape(_LONG_NUMBER.sub("\ufffd", value)))
    return ""


def as_text(page: str, *, markdown: bool = False) -> str:
    """Return the text of an HTML page, without scripts and styles. With `markdown`, headings,
    lists, links and preformatted text are marked up. Takes time linear in the size of the page.

    >>> as_text("<h1>A</h1><p>b <a href='/c'>c</a></p><script>d()</script>", markdown=True)
    '# A\\n\\nb [c](/c)'
    """
    reader = _PageText(markdown=markdown)
    reader.feed(page)
    lines = [line.strip() for line in "".join(reader.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip().translate(_RESTORED)
