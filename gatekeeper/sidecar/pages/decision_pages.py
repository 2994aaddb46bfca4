"""The pages that explain decisions: one URL, the live stream, and the history of a robots.txt."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Annotated, Final, NamedTuple
from urllib.parse import urlencode

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import Explanation
from gatekeeper.clock import utc
from gatekeeper.decision import Decision, Reason
from gatekeeper.errors import GatekeeperError, InvalidURL
from gatekeeper.robots.parser import to_octets
from gatekeeper.robots.patterns import rfc_path, rfc_pattern
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, Row, badge, code, element, number, row
from gatekeeper.sidecar.pages.shell import Page, Visitor
from gatekeeper.sidecar.routes import check
from gatekeeper.sidecar.routes.operators import EventQuery
from gatekeeper.sidecar.routing import Call
from gatekeeper.sidecar.service import Service

_MAX_LINES: Final = 400
"""Maximum lines of a text to show."""
_MAX_ROWS: Final = 200
"""Maximum rows of a comparison of two texts."""
_MAX_COMPARED: Final = 500
"""Maximum URLs whose verdicts are compared between two versions."""

# --- explain ----------------------------------------------------------------------------------


class ExplainQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `/ui/explain`."""

    url: Annotated[str, msgspec.Meta(max_length=65_536)] = ""
    user_agent: Annotated[str, msgspec.Meta(max_length=512)] = ""


async def explain_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """Why a URL is allowed, denied or deferred, and a form to try another text of the file."""
    query = call.parameters(ExplainQuery)
    what_if: Child = None
    if not query.url:
        said = "Enter a URL: the answer names the deciding line of robots.txt and the other "
        answer = html.paragraph(said, "matching rules.", class_="empty")
    else:
        try:
            question = check.CheckQuery(query.url, query.user_agent or None)
            explained = await check.explanation(service, question, call)
            answer = await asyncio.to_thread(decision_section, service, explained)
            what_if = _what_if(explained)
        except GatekeeperError as error:
            answer = html.paragraph(badge("bad", "Invalid question"), f" {error}", class_="lead")
    url = html.field("URL", "url", query.url, type="text", required=True, class_="wide")
    agent, ours = query.user_agent, service.gate.user_agent
    name = html.field("User agent", "user_agent", agent, placeholder=ours, maxlength=512)
    form = html.search_form("explain", url, name, button="Explain", id_="question")
    return Page("Explain", [form, answer, what_if], files=("explain.js",))


def decision_section(service: Service, explained: Explanation) -> Html:
    """Return a decision and everything that led to it.

    A text of half a megabyte takes a tenth of a second: call this from a worker thread.
    """
    decision = explained.decision
    verdict = html.state_badge(decision.verdict.value)
    return element(
        "div",
        html.paragraph(verdict, " ", _reason(decision), class_="lead", aria_live="polite"),
        [element("h2", "How the file was fetched"), _fetch_section(service, explained)],
        [element("h2", "Matching rules"), _candidates(explained)],
        [element("h2", "The text"), _text(explained, _group_lines(service, explained))],
        id="story",
    )


def _reason(decision: Decision) -> Child:
    rule = decision.rule
    conflict = " The declared dialect and RFC 9309 disagree about it; robots.conflicts decides."
    return [
        [element("strong", _words(decision.reason)), f" for {decision.user_agent}"],
        None if rule is None else [f": line {rule.line} ", code(rule.text[:300])],
        [" - ", decision.note] if decision.note else None,
        None if decision.retry_at is None else [". Ask again at ", html.moment(decision.retry_at)],
        conflict if decision.conflict else None,
        _url_as_read(decision),
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _url_as_read(decision: Decision) -> Child:
    """Return the URL as rules are compared with it (RFC 9309), if it was asked in another form."""
    if not decision.origin:
        return None
    url = decision.origin + rfc_path(urls.parse(decision.url).path)
    return None if url == decision.url else [" The URL is read as ", code(url[:2000]), "."]


def _note(value: str) -> Child:
    """Return the form in which RFC 9309 compares a rule's pattern, if it is written differently."""
    normal = rfc_pattern(to_octets(value))
    return None if normal == value else [" reads ", code(normal[:500])]


def _fetch_section(service: Service, explained: Explanation) -> Html:
    fetch, now = explained.fetch, utc(service.clock.wall())
    if fetch is None:
        return html.paragraph("Nothing was fetched for this answer.", class_="empty")
    size = "no text" if fetch.size is None else f"{number(fetch.size)} bytes"
    coding, fetched, expires = fetch.ignored_coding, fetch.fetched_at, fetch.expires_at
    return element(
        "p",
        f"Status {'none' if fetch.status is None else fetch.status}, {size}",
        ", cut at the limit" if fetch.truncated else None,
        [", sent as ", code(coding), " (no content coding: ignored)"] if coding else None,
        [", fetched ", html.age(fetched, now)] if fetched is not None else None,
        [", refreshed ", html.age(expires, now)] if expires is not None else None,
        [", via ", ", ".join(fetch.hops)] if fetch.hops else None,
        ".",
    )


def _candidates(explained: Explanation) -> Html:
    deciding_rule = explained.decision.rule
    rows = []
    for one in explained.candidates[:200]:
        first = deciding_rule is not None and one.line == deciding_rule.line
        mark = "decides" if first else "loses"
        part, pattern = badge("ok" if first else "idle", mark), code(one.value[:500])
        cells = part, one.line, one.field, [pattern, _note(one.value)], one.length
        rows.append(row(*cells, class_=mark))
    columns = "Part, Line:num, Field, Pattern:url, Length:num"
    return html.table("Rules that match, by their length", columns, rows, empty="No rule matches.")


def _text(explained: Explanation, group: Collection[int]) -> Html:
    if explained.robots_txt is None:
        return html.paragraph("There is no text.", class_="empty")
    lines = explained.robots_txt.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    decided = explained.decision.rule.line if explained.decision.rule is not None else 0
    values = {one.line: one.value for one in explained.candidates}
    first = max(0, min(decided - _MAX_LINES // 2, len(lines) - _MAX_LINES))
    shown = lines[first : first + _MAX_LINES]
    items = []
    for n, line in enumerate(shown, first + 1):
        mark = "decides" if n == decided else "loses" if n in values else None
        classes = " ".join(filter(None, (mark, "group" if n in group else None)))
        note = mark and element("span", f" ◀ {mark}", _note(values.get(n, "")), class_="mark")
        content = code(line[:2000] or " "), note
        items.append(element("li", content, value=n, class_=classes or None))
    part = ""
    if len(lines) > _MAX_LINES:
        part = f"Lines {first + 1} to {first + len(shown)} of {number(len(lines))}. "
    return html.scrolled(
        "Text of the robots.txt",
        html.paragraph(f"{part}A bar marks the group that applies to the agent."),
        element("ol", items, class_="text", start=first + 1),
    )


def _group_lines(service: Service, explained: Explanation) -> set[int]:
    """Return the lines of the groups that have matching rules or that name the agent."""
    text = check.as_read(service, (explained.robots_txt or "").encode("utf-8", "replace"))
    matching = {one.line for one in explained.candidates}
    agent = explained.decision.user_agent.lower()
    lines_of_groups: set[int] = set()
    for group in text.groups:
        lines = {group.line, *(one.line for one in (*group.rules, *group.records))}
        if lines & matching or agent in {name.lower() for name in group.agents}:
            lines_of_groups |= set(range(min(lines), max(lines) + 1))
    return lines_of_groups


def _what_if(explained: Explanation) -> Html:
    said = "Edit the text: the answer above changes as you type. Nothing is stored, and no other "
    label = element("label", "Text of robots.txt", for_="what-if")
    text = (explained.robots_txt or "")[:600_000]
    area = element("textarea", text, id="what-if", rows=16, spellcheck="false", class_="wide")
    content = html.paragraph(said, "answer is affected."), label, area
    return html.details("Try another text", content, class_="what-if", data_keep="what-if")


# --- live -------------------------------------------------------------------------------------


async def live_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """The stream of decisions, which `live.js` shows."""
    query = call.parameters(EventQuery)
    columns = "Time, Verdict, URL, Reason, Line:num, Client"
    fields = (
        html.choice("Verdict", "verdict", query.verdict, ("any", "allow", "deny", "defer")),
        html.search("Part of the origin", "host", query.host),
        html.search("Client", "client", query.client),
        html.choice("Reason", "reason", query.reason, ("", *sorted(Reason))),
    )
    pause = element("button", "Pause", id="pause", type="button", hidden=True)
    state = element("span", "This page needs JavaScript.", id="live-state", role="status")
    dropped = element("span", id="dropped")
    body = [
        html.search_form("live", fields, button="Filter"),
        html.paragraph(pause, " ", state, " ", dropped, class_="controls"),
        html.table("The latest decisions", columns, (), id_="decisions"),
    ]
    return Page("Live", body, files=("live.js",))


# --- history ----------------------------------------------------------------------------------


class TextChange(NamedTuple):
    """A section of a comparison: lines of the old text and the lines that replace them."""

    same: bool
    old: list[str]
    new: list[str]


_MAX_EDITS: Final = 100
"""Maximum number of differing lines; texts that differ more are shown as replaced as a whole."""


def line_changes(old: Sequence[str], new: Sequence[str]) -> list[TextChange]:
    """Compare two texts by Myers' algorithm (1986), with a limit, since a site chooses both.

    >>> [(one.same, one.old, one.new) for one in line_changes(["a", "b", "c"], ["a", "x", "c"])]
    [(True, ['a'], ['a']), (False, ['b'], ['x']), (True, ['c'], ['c'])]
    """
    changes: list[TextChange] = []
    old_at = new_at = 0
    for start, end, k in [*_equal_runs(old, new), (len(old), len(old), len(old) - len(new))]:
        changes += (
            TextChange(False, list(old[old_at:start]), list(new[new_at : start - k])),
            TextChange(True, list(old[start:end]), list(new[start - k : end - k])),
        )
        old_at, new_at = end, end - k
    return [one for one in changes if one.old or one.new]


def _equal_runs(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
    """Return the runs of equal lines in the shortest edit script; none if it is too long.

    Each is its start and end in `old`, and how far it is ahead of the same run in `new`.
    """
    # For each diagonal the furthest line of `old`, and the runs that lead there.
    furthest: dict[int, tuple[int, tuple[tuple[int, int, int], ...]]] = {1: (0, ())}
    for edits in range(_MAX_EDITS + 1):
        for k in range(-edits, edits + 1, 2):
            if k == -edits or (k != edits and furthest[k - 1][0] < furthest[k + 1][0]):
                start, runs = furthest[k + 1]
            else:
                start, runs = furthest[k - 1][0] + 1, furthest[k - 1][1]
            x = start
            while x < len(old) and x - k < len(new) and old[x] == new[x - k]:
                x += 1
            furthest[k] = x, runs if x == start else (*runs, (start, x, k))
            if x >= len(old) and x - k >= len(new):
                return furthest[k][1]
    return ()


class HistoryPageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `/ui/history`; `old` and `new` are indexes in the list of versions."""

    origin: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    old: Annotated[int, msgspec.Meta(ge=0)] | None = None
    new: Annotated[int, msgspec.Meta(ge=0)] | None = None


async def history_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """The versions of a robots.txt, and the differences between two of them."""
    query, example = call.parameters(HistoryPageQuery), "https://example.org"
    origin = query.origin
    found: Child = html.paragraph(f"Enter an origin, such as {example}.", class_="empty")
    try:
        if origin:
            origin = urls.parse(origin).origin
            found = await _versions(service, origin, query.old, query.new)
    except InvalidURL as error:
        found = html.paragraph(badge("bad", "Invalid origin"), f" {error}", class_="lead")
    own: dict[str, html.Attribute] = {"placeholder": example, "required": True, "maxlength": 2048}
    asked = html.field("Origin", "origin", origin, class_="wide", **own)
    return Page("History", [html.search_form("history", asked, button="Show"), found])


async def _versions(service: Service, origin: str, old: int | None, new: int | None) -> list[Html]:
    """Return the table of the versions of a file, and the comparison of two: if none are named,
    of the latest with the one before."""
    now, rows = utc(service.clock.wall()), []
    entries = await service.gate.history(origin)
    for n, entry in list(enumerate(entries))[:-201:-1]:
        version = entry.body_hash.hex()[:12] or "no file"
        seen = [html.age(utc(at), now) for at in (entry.first_seen, entry.last_seen)]
        two = urlencode({"origin": origin, "old": n - 1, "new": n})
        compare = html.link(f"history?{two}", "with the previous one") if n else "the first"
        outcome = _words(entry.outcome)
        rows.append(row(version, *seen, outcome, entry.status, entry.size, compare))
    columns = "Version, First seen, Last seen, Outcome, Status:num, Bytes:num, Compare"
    empty = "No version of this file is stored. History needs a storage (storage.path)."
    table = html.table("Versions, the latest first", columns, rows, empty=empty)
    new = len(entries) - 1 if new is None else new
    old = new - 1 if old is None else old
    if not (0 <= old < len(entries) and 0 <= new < len(entries) and old != new):
        return [table]
    hashes = entries[old].body_hash, entries[new].body_hash
    bodies = [(one and await check.text_of(service, one)) or b"" for one in hashes]
    asked = service.operators.feed.urls_of(origin, _MAX_COMPARED)
    # Comparing two texts of half a megabyte takes a fifth of a second.
    return [table, *await asyncio.to_thread(_comparison, service, bodies, asked)]


def _comparison(service: Service, bodies: list[bytes], asked: list[str]) -> list[Html]:
    """Return what differs between two texts: the verdicts about the URLs, and the lines."""
    texts = [check.as_read(service, body) for body in bodies]
    before, after = (text.policy(service.gate.user_agent) for text in texts)
    verdicts = [(url, before.allowed(url), after.allowed(url)) for url in asked]
    rows = [
        row(url[:2048], *(html.state_badge("allow" if one else "deny") for one in (old, new)))
        for url, old, new in verdicts
        if old != new
    ]
    columns, none = "URL:url, Before, After", f"None of {number(len(asked))} recently asked URLs."
    changed = html.section("Which verdicts changed", columns, rows[:200], empty=none)
    changes = line_changes(*(body.decode("utf-8", "replace").splitlines() for body in bodies))
    rows, columns = list(_diff_rows(changes)), "Change, Old:url, New:url"
    return [changed, html.section("What changed in the text", columns, rows, empty="Nothing.")]


def _diff_rows(changes: list[TextChange]) -> Iterator[Row]:
    """Yield the rows of a comparison, `_MAX_ROWS` at most."""
    rows = chain.from_iterable(map(_change_rows, changes))
    yield from islice(rows, _MAX_ROWS)
    if next(rows, None) is not None:
        yield row("", "... and more", "... and more")


def _change_rows(change: TextChange) -> Iterator[Row]:
    if not change.same:
        for old, new in zip_longest(change.old, change.new):
            mark = "new" if old is None else "gone" if new is None else "changed"
            yield row(mark, _line(old), _line(new), class_=mark)
        return
    lines = change.old
    if len(lines) > 6:
        lines = [*lines[:3], f"... {len(lines) - 6} lines that are the same ...", *lines[-3:]]
    for line in lines:
        yield row("", _line(line), _line(line), class_="same")


def _line(text: str | None) -> Html | None:
    return None if text is None else code(text[:1000])
