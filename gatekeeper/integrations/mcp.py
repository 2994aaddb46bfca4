"""Tools for agents over the Model Context Protocol: `may_i_fetch`, `fetch` and `explain`.

`gatekeeper mcp` serves them; `build` makes the server round a session of your own.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import html
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, Protocol

import aiohttp
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, Field

from gatekeeper import urls
from gatekeeper.config import Config
from gatekeeper.decision import Decision, Verdict, refuse
from gatekeeper.errors import (
    ConfigError,
    Deferred,
    Denied,
    GatekeeperError,
    LeaseTimeout,
    SidecarError,
)
from gatekeeper.middleware import Gate
from gatekeeper.pacing.waiting import ClockView
from gatekeeper.remote.client import RemoteGatekeeper
from gatekeeper.session import plain_session, polite_session, session_gate
from gatekeeper.storage.base import Storage

__all__ = [
    "AgentGate",
    "ExplainedURL",
    "FetchedPage",
    "Permission",
    "as_text",
    "build",
    "serving",
]

MAX_BYTES: Final = 5_000_000
"""The most of one body that is ever read, whatever a call asks for."""
USUAL_BYTES: Final = 100_000
MOST_FETCHES: Final = 64
"""Calls of `fetch` that may be under way at once."""
WAIT: Final = 60.0
"""Seconds for a call: turns, those of redirects as well, and the network together."""
_ASKING: Final = 2.0
"""Seconds for asking what held a call up."""
_LOOKED_AT: Final = 1024
"""Bytes at the beginning of a body that tell whether it is text."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
_INSTRUCTIONS = (
    "Fetches web pages as their sites ask for: each robots.txt is obeyed, and its pace. Ask "
    "may_i_fetch before planning to read many pages of a site. A page that is denied stays denied; "
    "one that is deferred may be asked for again at retry_at, not sooner."
)


class Permission(BaseModel):
    """What `may_i_fetch` answers; also what stands beside the text of a refused `fetch`."""

    url: str
    """The one that was judged: of a redirect, where it led."""
    allowed: bool
    verdict: str
    """allow, deny or defer."""
    reason: str
    why: str
    """One line for people: the verdict, and the line of robots.txt that decided."""
    user_agent: str
    """The name whose rules apply."""
    line: int | None
    """Of robots.txt: the one that decided."""
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


def _permission(decision: Decision) -> Permission:
    return Permission(
        url=decision.url,
        allowed=decision.verdict is Verdict.ALLOW,
        verdict=decision.verdict.value,
        reason=decision.reason.value,
        why=decision.explain(),
        user_agent=decision.user_agent,
        line=None if decision.rule is None else decision.rule.line,
        retry_at=None if decision.retry_at is None else decision.retry_at.isoformat(),
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
    """The server over one gate for all that is asked: a polite session's own or, with `gate`, a
    sidecar's at that address (see `RemoteGatekeeper`; `token` is its bearer token).

    `user_agent` is who fetches; None, with a sidecar alone, is whoever the sidecar is. Raises
    ConfigError where nobody knows. `wait`: seconds that a call may take.
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
        # aiohttp's total time would count the wait for a turn as well; `wait` is ours.
        session.setdefault("timeout", _TIMEOUT)
        async with plain_session(
            remote.user_agent, config=config, middlewares=middlewares, **session
        ) as plain:
            yield build(plain, remote, wait=wait)


def build(
    session: aiohttp.ClientSession, gate: AgentGate | None = None, *, wait: float = WAIT
) -> MCPServer[Any]:
    """The server over a `polite_session`, or over any guarded session whose middleware is that of
    the `gate`. `wait`: seconds that a call may take."""
    tools = _Tools(session, gate or session_gate(session), wait)
    server: MCPServer[Any] = MCPServer("gatekeeper", instructions=_INSTRUCTIONS)
    for tool in (tools.may_i_fetch, tools.explain, tools.fetch):
        server.add_tool(tool, structured_output=True)
    return server


class AgentGate(Gate, Protocol):
    """A gate that tells the clocks of a host as well: `Gatekeeper` and `RemoteGatekeeper` do."""

    async def why(self, host: str) -> Sequence[ClockView]:
        """Every clock of the host, each with where it came from."""


class _Tools:
    """The three tools, over one session and its gate. A refusal is a result that is an error: text
    for the model, and the decision behind it as a `Permission`."""

    def __init__(self, session: aiohttp.ClientSession, gate: AgentGate, wait: float) -> None:
        self._session = session
        self._gate = gate
        self._wait = wait
        self._fetching = 0

    async def may_i_fetch(self, url: str) -> Annotated[CallToolResult, Permission]:
        """Whether robots.txt lets this URL be fetched now, and which line of it decided."""

        async def answer() -> Permission:
            return _permission(await self._gate.check(url))

        return await self._result(url, answer())

    async def explain(self, url: str) -> Annotated[CallToolResult, ExplainedURL]:
        """Why this URL may be fetched or not, how often its host may be asked, and what its host
        waits for at this moment."""

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
                fetched_at=None if decision.fetched_at is None else decision.fetched_at.isoformat(),
                clocks=[str(clock) for clock in clocks],
            )

        return await self._result(url, answer())

    async def fetch(
        self,
        url: str,
        max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = USUAL_BYTES,
        form: Literal["text", "markdown", "raw"] = "markdown",
    ) -> Annotated[CallToolResult, FetchedPage]:
        """Fetch a page in its host's turn, redirects included. A page that robots.txt denies is
        not fetched; one whose turn does not come in time is an error that says when it may."""
        if self._fetching >= MOST_FETCHES:
            return _error(f"{MOST_FETCHES} pages are being fetched: wait for one of them")
        self._fetching += 1
        try:
            return await self._result(url, self._page(url, max_bytes, form))
        finally:
            self._fetching -= 1

    async def _result(self, url: str, work: Coroutine[Any, Any, BaseModel]) -> CallToolResult:
        """What came of the work, within `wait` seconds."""
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
            return _error(await self._late(url))
        except (GatekeeperError, aiohttp.ClientError, _NoText) as error:
            return _error(str(error) or type(error).__name__)
        text = TextContent(type="text", text=found.model_dump_json())
        return CallToolResult(content=[text], structured_content=found.model_dump(mode="json"))

    async def _late(self, url: str) -> str:
        """What to say of a call that took too long: what its host waits for, too."""
        text = f"{urls.mask(url)} did not come within {self._wait:g} s: its turn, or its server"
        with contextlib.suppress(GatekeeperError, TimeoutError):
            async with asyncio.timeout(_ASKING):
                for clock in await self._gate.why(urls.parse(url).host):
                    text += f"; {clock}"
        return text

    async def _page(self, url: str, most: int, form: str) -> FetchedPage:
        await self._refuse_at_once(url)
        async with self._session.get(url) as response:
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
        encoding = _encoding(response)
        if b"\0" in body[:_LOOKED_AT] and not encoding.startswith("utf-16"):
            raise _NoText(f"{response.url} is no text ({kind}): it can't be shown")
        text = body.decode(encoding, errors="replace")
        if form != "raw" and ("html" in kind or kind == "application/xhtml+xml"):
            # Some seconds for the longest: other calls go on meanwhile.
            text = await asyncio.to_thread(as_text, text, markdown=form == "markdown")
        return FetchedPage(
            url=str(response.url),
            status=response.status,
            content_type=kind,
            content=text,
            size=len(body),
            truncated=truncated,
        )

    async def _refuse_at_once(self, url: str) -> None:
        """Raises Denied, before anything is sent, for what is denied now (aiohttp would take
        credentials out of a URL before the gate saw them), and LeaseTimeout where the host is not
        due within `wait` seconds: an agent can do something else until then."""
        refuse(await self._gate.check(url))
        latest = datetime.now(UTC) + timedelta(seconds=self._wait)
        clocks: Sequence[ClockView] = ()
        with contextlib.suppress(SidecarError):  # the lease will say what is wrong
            clocks = await self._gate.why(urls.parse(url).host)
        for clock in clocks:
            if clock.kind == "pause" or (
                clock.kind in ("block", "next") and clock.until is not None and clock.until > latest
            ):
                raise LeaseTimeout(url, f"{urls.mask(url)}: {clock}", retry_at=clock.until)


class _NoText(Exception):
    """What came is nothing that can be shown as text."""


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
"""Those of web pages: others that Python knows fail, or take very long for a long text."""


def _encoding(response: aiohttp.ClientResponse) -> str:
    try:
        name = codecs.lookup(response.charset or "utf-8").name
    except LookupError:
        return "utf-8"
    return name if _ENCODINGS.fullmatch(name) else "utf-8"


_HIDDEN = frozenset(
    {"script", "style", "noscript", "template", "svg", "title", "textarea", "iframe"}
)
"""Elements of which people read nothing, or nothing of the page's."""
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "fieldset"),
        *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li"),
        *("main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    )
)
_NAME = re.compile(r"/?[A-Za-z][^\s/>]*")
_IN_TAG = re.compile(r"""[>"']""")
_ATTRIBUTE = re.compile(r"""([^\s=>/"']+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?""")
_LONG_NUMBER = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{8,});?")
"""No character has such a number, and `html.unescape` fails for the longest of them."""
_KEPT = str.maketrans({"\n": "\x00", " ": "\x01", "\t": "\x01"})
_SHOWN = str.maketrans({"\x00": "\n", "\x01": " "})
"""In `pre` white space counts: it stands aside while that of the rest is folded."""


class _PageText:
    """What of a page people read.

    It looks at each character a fixed number of times, whatever a site writes: `html.parser` takes
    a minute for 80 kB of `<a `.
    """

    def __init__(self, *, markdown: bool) -> None:
        self._markdown = markdown
        self._link: tuple[int, str] | None = None
        """Where the link begins that is open, and where it leads: links don't stand in links."""
        self._unclosed: set[str] = set()
        """Elements of which no end is left in the text: it is not looked for again."""
        self._pre = False
        self.parts: list[str] = []

    def feed(self, text: str) -> None:
        """Read a whole page."""
        text = text.replace("\x00", "\ufffd").replace("\x01", "\ufffd")
        at = 0
        while (mark := text.find("<", at)) >= 0:
            self._data(text[at:mark])
            at = self._markup(text, mark)
            if at < 0:
                return  # markup that does not end: browsers show nothing of it
        self._data(text[at:])

    def _markup(self, text: str, mark: int) -> int:
        """Read what begins with `<`; where the text goes on, -1: nowhere."""
        if text.startswith("<!--", mark):
            end = text.find("-->", mark + 2)
            return -1 if end < 0 else end + 3
        if text.startswith(("<!", "<?"), mark):
            return text.find(">", mark) + 1 or -1
        found = _NAME.match(text, mark + 1)
        if found is None:
            self._data("<")
            return mark + 1
        end = _end_of_tag(text, found.end())
        if end < 0:
            return -1
        name = found[0].lower()
        if name[0] == "/":
            self._close(name[1:])
        elif name in _HIDDEN and text[end - 2] != "/":
            return self._skip(name, text, end)
        else:
            self._open(name, text[found.end() : end - 1])
        return end

    def _skip(self, name: str, text: str, at: int) -> int:
        """Behind the end of a hidden element; without one it hides nothing."""
        if name in self._unclosed:
            return at
        found = re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE).search(text, at)
        if found is not None:
            return text.find(">", found.end()) + 1 or -1
        self._unclosed.add(name)
        return -1 if name in ("script", "style") else at

    def _open(self, name: str, attributes: str) -> None:
        if name in _BLOCKS:
            self.parts.append("\n")
        if not self._markdown:
            self._pre = self._pre or name == "pre"
        elif name in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.parts.append("#" * int(name[1]) + " ")
        elif name == "li":
            self.parts.append("- ")
        elif name == "pre" and not self._pre:
            self._pre = True
            self.parts.append("```\x00")
        elif name == "a":
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
        if self._link is None:
            return
        place, target = self._link
        self._link = None
        if target and any(part.strip() for part in self.parts[place:]):
            self.parts[place] = "["
            self.parts.append(f"]({target})")

    def _data(self, text: str) -> None:
        if not text:
            return
        if "&" in text:
            text = html.unescape(_LONG_NUMBER.sub("\ufffd", text))
        self.parts.append(text.translate(_KEPT) if self._pre else re.sub(r"\s+", " ", text))


def _end_of_tag(text: str, at: int) -> int:
    """Behind the `>` of a tag, past those in quoted values; -1: it has none."""
    while (found := _IN_TAG.search(text, at)) is not None:
        if found[0] == ">":
            return found.end()
        at = found.end()
        if text[found.start() - 1] == "=":
            at = text.find(found[0], at) + 1
            if not at:
                return -1
    return -1


def _attribute(text: str, name: str) -> str:
    for found in _ATTRIBUTE.finditer(text):
        if found[1].lower() == name:
            value = found[2] or found[3] or found[4] or ""
            return re.sub(r"\s+", "", html.unescape(_LONG_NUMBER.sub("\ufffd", value)))
    return ""


def as_text(page: str, *, markdown: bool = False) -> str:
    """The text of an HTML page, without scripts and styles; in Markdown with its headings, lists,
    links and preformatted text. Linear in the size of the page.

    >>> as_text("<h1>A</h1><p>b <a href='/c'>c</a></p><script>d()</script>", markdown=True)
    '# A\\n\\nb [c](/c)'
    """
    reader = _PageText(markdown=markdown)
    reader.feed(page)
    lines = [line.strip() for line in "".join(reader.parts).split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip().translate(_SHOWN)
