"""The pages that explain decisions: one URL, the live stream, and the history of a robots.txt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlencode

from gatekeeper import urls
from gatekeeper.clock import utc
from gatekeeper.decision import Reason
from gatekeeper.robots.parser import to_octets
from gatekeeper.robots.patterns import rfc_path, rfc_pattern
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, Row, badge, code, markup, number, row
from gatekeeper.sidecar.pages.shell import Page
from gatekeeper.sidecar.routes.check import as_read

if TYPE_CHECKING:
    from gatekeeper.client.wire import Explanation
    from gatekeeper.decision import Decision
    from gatekeeper.sidecar.routes.operators import EventQuery
    from gatekeeper.sidecar.service import Service
    from gatekeeper.storage.base import HistoryEntry

_MAX_LINES: Final = 400
"""Maximum lines of a text to show."""
_MAX_ROWS: Final = 200
"""Maximum rows of a comparison of two texts."""

# --- explain ----------------------------------------------------------------------------------


def explain_page(
    service: Service, url: str, agent: str, explained: Explanation | None, answer: Child
) -> Page:
    """Why a URL is allowed, denied or deferred, and a form to try another text of the file.

    `answer` is the result of `decision_section`, or says why there is none.
    """
    fields = (
        html.field("URL", "url", url, type="text", required=True, class_="wide"),
        html.field(
            "User agent", "user_agent", agent, placeholder=service.gate.user_agent, maxlength=512
        ),
    )
    form = html.search_form("explain", *fields, button="Explain", id_="question")
    if not url:
        said = "Enter a URL: the answer names the deciding line of robots.txt and the other "
        answer = html.paragraph(said, "matching rules.", class_="empty")
    body: Child = [form, answer, None if explained is None else _what_if(explained)]
    return Page("Explain", body, files=("explain.js",))


def decision_section(service: Service, explained: Explanation) -> Html:
    """Return a decision and everything that led to it.

    A text of half a megabyte takes a tenth of a second: call this from a worker thread.
    """
    decision = explained.decision
    verdict = html.state_badge(decision.verdict.value)
    return markup(
        '<div id="story">{}<h2>How the file was fetched</h2>{}<h2>Matching rules</h2>{}'
        "<h2>The text</h2>{}</div>",
        html.paragraph(verdict, " ", _reason(decision), class_="lead", aria_live="polite"),
        _fetch_section(service, explained),
        _candidates(explained),
        _text(explained, _group_lines(service, explained)),
    )


def _reason(decision: Decision) -> Child:
    rule = decision.rule
    conflict = " The declared dialect and RFC 9309 disagree about it; robots.conflicts decides."
    return [
        markup("<strong>{}</strong> for {}", _words(decision.reason), decision.user_agent),
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
    return markup(
        "<p>Status {}, {}{}{}{}{}{}.</p>",
        "none" if fetch.status is None else fetch.status,
        size,
        ", cut at the limit" if fetch.truncated else None,
        [", sent as ", code(coding), " (no content coding: ignored)"] if coding else None,
        [", fetched ", html.age(fetched, now)] if fetched is not None else None,
        [", refreshed ", html.age(expires, now)] if expires is not None else None,
        [", via ", ", ".join(fetch.hops)] if fetch.hops else None,
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
    columns = html.columns("Part, Line:num, Field, Pattern:url, Length:num")
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
        note = markup('<span class="mark"> ◀ {}{}</span>', mark, _note(values.get(n, "")))
        own = html.attributes(value=str(n), class_=classes or None)
        items.append(markup("<li{}>{}{}</li>", own, code(line[:2000] or " "), mark and note))
    part = ""
    if len(lines) > _MAX_LINES:
        part = f"Lines {first + 1} to {first + len(shown)} of {number(len(lines))}. "
    return html.scrolled(
        "Text of the robots.txt",
        html.paragraph(f"{part}A bar marks the group that applies to the agent."),
        markup('<ol class="text" start="{}">{}</ol>', first + 1, items),
    )


def _group_lines(service: Service, explained: Explanation) -> set[int]:
    """Return the lines of the groups that have matching rules or that name the agent."""
    text = as_read(service, (explained.robots_txt or "").encode("utf-8", "replace"))
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
    return html.details(
        "Try another text",
        html.paragraph(said, "answer is affected."),
        markup('<label for="what-if">Text of robots.txt</label>'),
        markup(
            '<textarea id="what-if" rows="16" spellcheck="false" class="wide">{}</textarea>',
            (explained.robots_txt or "")[:600_000],
        ),
        class_="what-if",
        data_keep="what-if",
    )


# --- live -------------------------------------------------------------------------------------


def live_page(query: EventQuery) -> Page:
    """The stream of decisions, which `live.js` shows."""
    columns = html.columns("Time, Verdict, URL, Reason, Line:num, Client")
    verdicts = ("any", "allow", "deny", "defer")
    body = [
        html.search_form(
            "live",
            html.choice("Verdict", "verdict", query.verdict, verdicts),
            html.search("Part of the origin", "host", query.host),
            html.search("Client", "client", query.client),
            html.choice("Reason", "reason", query.reason, ("", *sorted(Reason))),
            button="Filter",
        ),
        markup(
            '<p class="controls"><button id="pause" type="button" hidden>Pause</button> '
            '<span id="live-state" role="status">This page needs JavaScript.</span> '
            '<span id="dropped"></span></p>'
        ),
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


def _equal_runs(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return the runs of equal lines in the shortest edit script; none if it is too long.

    Each is its start and end in `old`, and how far it is ahead of the same run in `new`.
    """
    # For each diagonal the furthest line of `old`, and the runs that lead there.
    furthest: dict[int, tuple[int, _Runs | None]] = {1: (0, None)}
    for edits in range(_MAX_EDITS + 1):
        for k in range(-edits, edits + 1, 2):
            if k == -edits or (k != edits and furthest[k - 1][0] < furthest[k + 1][0]):
                start, runs = furthest[k + 1]
            else:
                start, runs = furthest[k - 1][0] + 1, furthest[k - 1][1]
            x = start
            while x < len(old) and x - k < len(new) and old[x] == new[x - k]:
                x += 1
            furthest[k] = x, runs if x == start else _Runs(runs, (start, x, k))
            if x >= len(old) and x - k >= len(new):
                found, runs = [], furthest[k][1]
                while runs is not None:
                    found.append(runs.last)
                    runs = runs.before
                return found[::-1]
    return []


class _Runs(NamedTuple):
    before: _Runs | None
    last: tuple[int, int, int]


class VersionDiff(NamedTuple):
    """The differences between two versions of a file."""

    changes: list[TextChange]
    verdicts: list[tuple[str, bool, bool]]
    """Recently asked URLs whose verdict differs, with the verdicts before and after."""
    asked: int
    """Recently asked URLs that were compared."""


def history_page(
    service: Service,
    origin: str,
    entries: list[HistoryEntry],
    versions: VersionDiff | None,
    error: str | None,
) -> Page:
    """The versions of a robots.txt, and the differences between two of them."""
    now = utc(service.clock.wall())
    example = "https://example.org"
    origin_field = html.field(
        "Origin",
        "origin",
        origin,
        required=True,
        class_="wide",
        placeholder=example,
        maxlength=2048,
    )
    body: list[Child] = [html.search_form("history", origin_field, button="Show")]
    if error is not None:
        body.append(html.paragraph(badge("bad", "Invalid origin"), " ", error, class_="lead"))
    elif origin:
        rows = [
            row(
                entry.body_hash.hex()[:12] or "no file",
                html.age(utc(entry.first_seen), now),
                html.age(utc(entry.last_seen), now),
                _words(entry.outcome),
                entry.status,
                entry.size,
                _compare_link(origin, n),
            )
            for n, entry in list(enumerate(entries))[:-201:-1]
        ]
        columns = html.columns(
            "Version, First seen, Last seen, Outcome, Status:num, Bytes:num, Compare"
        )
        empty = "No version of this file is stored. History needs a storage (storage.path)."
        body.append(html.table("Versions, the latest first", columns, rows, empty=empty))
        if versions is not None:
            body += _comparison(versions)
    else:
        body.append(html.paragraph(f"Enter an origin, such as {example}.", class_="empty"))
    return Page("History", body)


def _compare_link(origin: str, n: int) -> Child:
    if n == 0:
        return "the first"
    query = urlencode({"origin": origin, "old": n - 1, "new": n})
    return html.link(f"history?{query}", "with the previous one")


def _comparison(versions: VersionDiff) -> Iterator[Html]:
    yield html.section(
        "Which verdicts changed",
        html.columns("URL:url, Before, After"),
        (
            row(url[:2048], *(html.state_badge("allow" if one else "deny") for one in verdicts))
            for url, *verdicts in versions.verdicts[:200]
        ),
        empty=f"None of {number(versions.asked)} recently asked URLs.",
    )
    columns = html.columns("Change, Old:url, New:url")
    yield html.section("What changed in the text", columns, _diff_rows(versions), empty="Nothing.")


def _diff_rows(versions: VersionDiff) -> Iterator[Row]:
    """Yield the rows of a comparison, `_MAX_ROWS` at most."""
    rows = chain.from_iterable(map(_change_rows, versions.changes))
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
