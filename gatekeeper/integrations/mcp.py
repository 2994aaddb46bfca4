"""Tools for agents over the Model Context Protocol: `may_i_fetch`, `fetch` and `explain`.

`gatekeeper mcp` serves them; `build` makes the server round a session of your own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Annotated, Any, Final, Literal

import aiohttp
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from gatekeeper import urls
from gatekeeper.config import Config
from gatekeeper.decision import Decision, Verdict
from gatekeeper.errors import Deferred, Denied, GatekeeperError
from gatekeeper.session import polite_session, session_gate
from gatekeeper.storage.base import Storage

__all__ = ["ExplainedURL", "FetchedPage", "Permission", "as_text", "build", "serving"]

MAX_BYTES: Final = 5_000_000
"""The most of one body that is ever read, whatever a call asks for."""
USUAL_BYTES: Final = 100_000
WAIT: Final = 60.0
"""Seconds for a call of `fetch`: its turn, its redirects' turns and the network together."""
_INSTRUCTIONS = (
    "Fetches web pages as their sites ask for: each robots.txt is obeyed, and its pace. Ask "
    "may_i_fetch before planning to read many pages of a site. A page that is denied stays denied; "
    "one that is deferred may be asked for again at retry_at, not sooner."
)


class Permission(BaseModel):
    """What `may_i_fetch` answers."""

    allowed: bool
    verdict: str
    """allow, deny or defer."""
    reason: str
    why: str
    """One line for people: the verdict, and the line of robots.txt that decided."""
    retry_at: str | None
    """Of a deferral: when to ask again (RFC 3339)."""


class ExplainedURL(BaseModel):
    """What `explain` answers."""

    answer: Permission
    rule: str | None
    """The line of robots.txt that decided, as it stands there."""
    line: int | None
    crawl_delay: float | None
    """Seconds that the site asks for between two requests."""
    robots_status: int | None
    fetched_at: str | None
    clocks: list[str]
    """What the host waits for, and why."""


class FetchedPage(BaseModel):
    """What `fetch` answers."""

    url: str
    """The last one, after redirects."""
    status: int
    content_type: str
    content: str
    size: int
    """Bytes that were read."""
    truncated: bool
    """The body goes on: ask with a larger max_bytes for more."""


def _answer(decision: Decision) -> Permission:
    return Permission(
        allowed=decision.verdict is Verdict.ALLOW,
        verdict=decision.verdict.value,
        reason=decision.reason.value,
        why=decision.explain(),
        retry_at=None if decision.retry_at is None else decision.retry_at.isoformat(),
    )


@asynccontextmanager
async def serving(
    user_agent: str,
    *,
    config: Config | None = None,
    storage: Storage | None = None,
    wait: float = WAIT,
    **session: Any,
) -> AsyncIterator[MCPServer[Any]]:
    """The server over a polite session of its own, which is one gate for all that is asked."""
    async with polite_session(user_agent, config=config, storage=storage, **session) as polite:
        yield build(polite, wait=wait)


def build(session: aiohttp.ClientSession, *, wait: float = WAIT) -> MCPServer[Any]:
    """The server over a `polite_session`. `wait`: seconds that a call of `fetch` may take."""
    gate = session_gate(session)
    server: MCPServer[Any] = MCPServer("gatekeeper", instructions=_INSTRUCTIONS)

    async def may_i_fetch(url: str) -> Permission:
        """Whether robots.txt lets this URL be fetched now, and which line of it decided."""
        with _told():
            return _answer(await gate.check(url))

    async def explain(url: str) -> ExplainedURL:
        """Why this URL may be fetched or not, how often its host may be asked, and what its host
        waits for at this moment."""
        with _told():
            decision = await gate.check(url)
            clocks = await gate.why(urls.parse(url).host)
        rule = decision.rule
        return ExplainedURL(
            answer=_answer(decision),
            rule=None if rule is None else rule.text[:500],
            line=None if rule is None else rule.line,
            crawl_delay=decision.crawl_delay,
            robots_status=decision.robots_status,
            fetched_at=None if decision.fetched_at is None else decision.fetched_at.isoformat(),
            clocks=[str(clock) for clock in clocks],
        )

    async def fetch(
        url: str,
        max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = USUAL_BYTES,
        form: Literal["text", "markdown", "raw"] = "markdown",
    ) -> FetchedPage:
        """Fetch a page in its host's turn, redirects included. A page that robots.txt denies is
        not fetched; one whose turn does not come in time is an error that says when it may."""
        with _told():
            try:
                async with asyncio.timeout(wait):
                    return await _fetch(session, url, max_bytes, form)
            except TimeoutError as error:
                if isinstance(error, GatekeeperError):
                    raise
                text = f"{urls.mask(url)} did not come within {wait:g} s: its turn, or its server"
                raise ToolError(text) from None

    for tool in (may_i_fetch, explain, fetch):
        server.add_tool(tool, structured_output=True)
    return server


class _told:
    """Our errors in the words that an agent can go by."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise a ToolError in the place of what we or the network raised."""
        if isinstance(error, Deferred):
            raise ToolError(f"deferred: {error}") from error
        if isinstance(error, Denied):
            raise ToolError(f"denied: {error}") from error
        if isinstance(error, GatekeeperError | aiohttp.ClientError):
            raise ToolError(str(error) or type(error).__name__) from error


async def _fetch(session: aiohttp.ClientSession, url: str, most: int, form: str) -> FetchedPage:
    async with session.get(url) as response:
        body = bytearray()
        async for part in response.content.iter_chunked(65_536):
            body += part
            if len(body) > most:
                break
        truncated = len(body) > most
        if truncated:
            del body[most:]
            response.close()  # no more of it is wanted
        kind = response.content_type
        text = body.decode(_charset(response), errors="replace")
        if form != "raw" and ("html" in kind or kind == "application/xhtml+xml"):
            text = as_text(text, markdown=form == "markdown")
        return FetchedPage(
            url=str(response.url),
            status=response.status,
            content_type=kind,
            content=text,
            size=len(body),
            truncated=truncated,
        )


def _charset(response: aiohttp.ClientResponse) -> str:
    named = response.charset or "utf-8"
    try:
        "".encode(named)
    except LookupError:
        return "utf-8"
    return named


_SKIPPED = frozenset({"script", "style", "noscript", "template", "svg", "head"})
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "fieldset"),
        *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li"),
        *("main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    )
)
_DEEPEST = 200
"""Elements within each other that are told apart."""


class _PageText(HTMLParser):
    """What of a page people read; linear in its size."""

    def __init__(self, *, markdown: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._markdown = markdown
        self._skipped = 0
        self._links: list[str] = []
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a block, a heading, an item or a link."""
        if tag in _SKIPPED:
            self._skipped += 1
        elif tag in _BLOCKS:
            self.parts.append("\n")
            if self._markdown and tag[0] == "h" and tag[1:].isdigit():
                self.parts.append("#" * int(tag[1:]) + " ")
            elif self._markdown and tag == "li":
                self.parts.append("- ")
        elif self._markdown and tag == "a" and len(self._links) < _DEEPEST:
            self._links.append(dict(attrs).get("href") or "")
            self.parts.append("[")

    def handle_endtag(self, tag: str) -> None:
        """End it."""
        if tag in _SKIPPED:
            self._skipped = max(0, self._skipped - 1)
        elif tag in _BLOCKS:
            self.parts.append("\n")
        elif self._markdown and tag == "a" and self._links:
            self.parts.append(f"]({self._links.pop()})")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if not self._skipped:
            self.parts.append(re.sub(r"\s+", " ", data))


def as_text(html: str, *, markdown: bool = False) -> str:
    """The text of a page, without scripts and styles; with headings, lists and links in Markdown.

    >>> as_text("<h1>A</h1><p>b <a href='/c'>c</a></p><script>d()</script>", markdown=True)
    '# A\\n\\nb [c](/c)'
    """
    parser = _PageText(markdown=markdown)
    parser.feed(html)
    parser.close()
    lines = [line.strip() for line in "".join(parser.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
