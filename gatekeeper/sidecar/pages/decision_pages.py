"""The pages that explain decisions: one URL, the live stream, and the history of a robots.txt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlencode

from gatekeeper import urls
from gatekeeper.clock import utc
from gatekeeper.robots.parser import to_octets
from gatekeeper.robots.patterns import rfc_path, rfc_pattern
from gatekeeper.sidecar.pages.feeds import GivenDecision
from gatekeeper.sidecar.pages.html import (
    Child,
    Html,
    age,
    badge,
    details,
    field,
    moment,
    num,
    num_head,
    number,
    row,
    search_form,
    table,
    tag,
)
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
_LIVE_ROWS: Final = 50
"""Decisions on the Live page before new ones arrive."""
_MAX_ROWS: Final = 200
"""Maximum rows of a comparison of two texts."""
_VERDICTS: Final = {"allow": "ok", "deny": "bad", "defer": "warn"}


def verdict_badge(verdict: str) -> Html:
    """Return the badge for a verdict."""
    return badge(_VERDICTS.get(verdict, "idle"), verdict)


# --- explain ----------------------------------------------------------------------------------


def explain_page(
    service: Service,
    url: str,
    agent: str,
    explained: Explanation | None,
    error: str | None,
    group: Collection[int] = (),
) -> Page:
    """Why a URL is allowed, denied or deferred, and a form to try another text of the file.

    `group` is the result of `group_lines`.
    """
    body: list[Child] = [
        search_form(
            "explain",
            field("URL", "url", url, type="text", required=True, class_="wide"),
            field("User agent", "user_agent", agent, placeholder=service.gate.user_agent),
            button="Explain",
            id_="question",
        )
    ]
    if error is not None:
        body.append(tag("p", badge("bad", "Invalid question"), " ", error, class_="lead"))
    if explained is not None:
        body.append(tag("div", decision_section(service, explained, group), id="story"))
        body.append(_what_if(explained))
    elif error is None:
        body.append(
            tag(
                "p",
                "Enter a URL: the answer names the deciding line of robots.txt and "
                "the other matching rules.",
                class_="empty",
            )
        )
    return Page("Explain", "explain", body, None, ("explain.js",))


def decision_section(service: Service, explained: Explanation, group: Collection[int]) -> Child:
    """Return a decision and everything that led to it; `group` is the result of `group_lines`."""
    decision = explained.decision
    return [
        tag(
            "p",
            verdict_badge(decision.verdict.value),
            " ",
            _reason(decision),
            class_="lead",
            aria_live="polite",
        ),
        tag("h2", "How the URL is read"),
        _canonical(explained),
        tag("h2", "How the file was fetched"),
        _fetch_section(service, explained),
        tag("h2", "Matching rules"),
        _candidates(explained),
        tag("h2", "The text"),
        _text(explained, group),
    ]


def _reason(decision: Decision) -> Child:
    rule = decision.rule
    return [
        tag("strong", decision.reason.value.replace("_", " ")),
        f" for {decision.user_agent}",
        [": line ", str(rule.line), " ", tag("code", rule.text[:300])]
        if rule is not None
        else None,
        [" - ", decision.note] if decision.note else None,
        [". Ask again at ", moment(decision.retry_at)] if decision.retry_at is not None else None,
        " The declared dialect and RFC 9309 disagree about it; robots.conflicts decides."
        if decision.conflict
        else None,
    ]


def _canonical(explained: Explanation) -> Html:
    """Return the URL and the rule's pattern, as written and as they are compared."""
    decision = explained.decision
    forms = [("as asked", decision.url)]
    if decision.origin:
        target = urls.parse(decision.url)
        forms += [
            ("in normal form", target.url),
            ("origin", target.origin),
            ("path that is matched", target.path),
            ("path in normal form (RFC 9309)", rfc_path(target.path)),
        ]
    if decision.rule is not None:
        value = decision.rule.value
        forms.append(("pattern of the rule", value))
        forms.append(("pattern in normal form (RFC 9309)", normal_form(value) or value))
    rows = [
        row(tag("th", name, scope="row"), tag("td", tag("code", text[:2000]), class_="url"))
        for n, (name, text) in enumerate(forms)
        if "normal form" not in name or text != forms[n - 1][1]
    ]
    return table("Forms of the URL", ("Form", "Text"), rows)


def normal_form(value: str) -> str | None:
    """Return a rule's pattern as RFC 9309 compares it, or None if it is written that way.

    >>> normal_form("/caf%c3%a9/%7euser"), normal_form("/plain*$")
    ('/caf%C3%A9/~user', None)
    """
    normal = rfc_pattern(to_octets(value))
    return None if normal == value else normal


def _note(value: str) -> Child:
    """Return the normal form of a pattern, if it differs from the pattern."""
    normal = normal_form(value)
    return None if normal is None else [" reads ", tag("code", normal[:500])]


def _fetch_section(service: Service, explained: Explanation) -> Html:
    fetch, now = explained.fetch, utc(service.clock.wall())
    if fetch is None:
        return tag("p", "Nothing was fetched for this answer.", class_="empty")
    size = "no text" if fetch.size is None else f"{number(fetch.size)} bytes"
    return tag(
        "p",
        f"Status {fetch.status if fetch.status is not None else 'none'}, {size}",
        ", cut at the limit" if fetch.truncated else None,
        [", sent as ", tag("code", fetch.ignored_coding), " (no content coding: ignored)"]
        if fetch.ignored_coding
        else None,
        [", fetched ", age(fetch.fetched_at, now)] if fetch.fetched_at is not None else None,
        [", refreshed ", age(fetch.expires_at, now)] if fetch.expires_at is not None else None,
        [", via ", ", ".join(fetch.hops)] if fetch.hops else None,
        ".",
    )


def _candidates(explained: Explanation) -> Html:
    deciding_rule = explained.decision.rule
    rows = []
    for one in explained.candidates[:200]:
        first = deciding_rule is not None and one.line == deciding_rule.line
        rows.append(
            row(
                tag("th", badge("ok", "decides") if first else badge("idle", "loses"), scope="row"),
                num(one.line),
                one.field,
                tag("td", tag("code", one.value[:500]), _note(one.value), class_="url"),
                num(one.length),
                class_="decides" if first else "loses",
            )
        )
    return table(
        "Rules that match, by their length",
        ("Part", num_head("Line"), "Field", "Pattern", num_head("Length")),
        rows,
        empty="No rule matches.",
    )


def _text(explained: Explanation, group: Collection[int]) -> Html:
    if explained.robots_txt is None:
        return tag("p", "There is no text.", class_="empty")
    lines = explained.robots_txt.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    decided = explained.decision.rule.line if explained.decision.rule is not None else 0
    values = {one.line: one.value for one in explained.candidates}
    first = max(0, min(decided - _MAX_LINES // 2, len(lines) - _MAX_LINES))
    shown = lines[first : first + _MAX_LINES]
    items = []
    for n, line in enumerate(shown, first + 1):
        mark = "decides" if n == decided else "loses" if n in values else None
        items.append(
            tag(
                "li",
                tag("code", line[:2000] or " "),
                tag("span", f" ◀ {mark}", _note(values.get(n, "")), class_="mark")
                if mark
                else None,
                value=n,
                class_=" ".join(filter(None, (mark, "group" if n in group else None))) or None,
            )
        )
    note = (
        f"Lines {first + 1} to {first + len(shown)} of {number(len(lines))}. "
        if len(lines) > _MAX_LINES
        else ""
    )
    return tag(
        "div",
        tag("p", f"{note}A bar marks the group that applies to the agent.", class_="note"),
        tag("ol", items, class_="text", start=first + 1),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="Text of the robots.txt",
    )


def group_lines(service: Service, explained: Explanation) -> set[int]:
    """Return the lines of the groups that have matching rules or that name the agent.

    A text of half a megabyte takes a tenth of a second: call this from a worker thread.
    """

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
    return details(
        "Try another text",
        tag(
            "p",
            "Edit the text: the answer above changes as you type. Nothing is stored, "
            "and no other answer is affected.",
            class_="note",
        ),
        tag("label", "Text of robots.txt", for_="what-if"),
        tag(
            "textarea",
            (explained.robots_txt or "")[:600_000],
            id="what-if",
            rows=16,
            spellcheck="false",
            class_="wide",
        ),
        class_="what-if",
        data_keep="what-if",
    )


# --- live -------------------------------------------------------------------------------------


def live_page(service: Service, query: EventQuery) -> Page:
    """The stream of decisions; without JavaScript, the latest decisions."""
    feed = service.operators.feed
    latest = feed.since(0, None if query.narrow else _LIVE_ROWS)
    wanted = [one for one in reversed(latest) if query.wants(one)][:_LIVE_ROWS]
    verdicts = [
        tag("option", one, value=one, selected=one == query.verdict)
        for one in ("any", "allow", "deny", "defer")
    ]
    body = [
        search_form(
            "live",
            tag("label", "Verdict ", tag("select", verdicts, name="verdict")),
            field("Part of the origin", "host", query.host, type="search"),
            field("Client", "client", query.client, type="search"),
            field("Reason", "reason", query.reason, type="search"),
            button="Filter",
        ),
        tag(
            "p",
            tag("button", "Pause", id="pause", type="button", hidden=True),
            " ",
            tag("span", "The latest decisions.", id="live-state", role="status"),
            " ",
            tag("span", id="dropped"),
            class_="controls",
        ),
        table(
            "The latest decisions",
            ("Time", "Verdict", "URL", "Reason", "Line", "Client"),
            [_decision_row(one) for one in wanted],
            id_="decisions",
        ),
    ]
    return Page("Live", "live", body, None, ("live.js",))


def _decision_row(given: GivenDecision) -> Html:
    decision = given.decision
    rule = decision.rule
    at = utc(given.at)
    question = {"url": decision.url, "user_agent": decision.user_agent}
    return row(
        moment(at, f"{at:%H:%M:%S}"),
        verdict_badge(decision.verdict.value),
        tag(
            "td", tag("a", decision.url[:2048], href=f"explain?{urlencode(question)}"), class_="url"
        ),
        decision.reason.value,
        num("" if rule is None else rule.line),
        given.client,
    )


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
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle_old, middle_new = old[head : len(old) - tail], new[head : len(new) - tail]
    changes = [TextChange(True, list(old[:head]), list(new[:head]))]
    changes += _middle(middle_old, middle_new)
    changes.append(TextChange(True, list(old[len(old) - tail :]), list(new[len(new) - tail :])))
    return [one for one in changes if one.old or one.new]


def _middle(old: Sequence[str], new: Sequence[str]) -> list[TextChange]:
    path = _edits(old, new)
    if path is None:
        return [TextChange(False, list(old), list(new))]
    changes: list[TextChange] = []
    for same, left, right in path:
        if changes and changes[-1].same == same:
            changes[-1].old.extend(left)
            changes[-1].new.extend(right)
        else:
            changes.append(TextChange(same, left, right))
    return changes


def _edits(
    old: Sequence[str], new: Sequence[str]
) -> list[tuple[bool, list[str], list[str]]] | None:
    """Return the shortest edit script, step by step; None: it has more than `_MAX_EDITS` edits."""
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(_MAX_EDITS + 1):
        trace.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(old) and x - k < len(new) and old[x] == new[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(old) and x - k >= len(new):
                return _backtrack(trace, old, new)
    return None


def _backtrack(
    trace: list[dict[int, int]], old: Sequence[str], new: Sequence[str]
) -> list[tuple[bool, list[str], list[str]]]:
    steps: list[tuple[bool, list[str], list[str]]] = []
    x, y = len(old), len(new)
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k = trace[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        from_k = k + 1 if down else k - 1
        from_x = furthest[from_k] if edits else 0
        from_y = from_x - from_k if edits else 0
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            steps.append((True, [old[x]], [new[y]]))
        if edits:
            if down:
                steps.append((False, [], [new[from_y]]))
            else:
                steps.append((False, [old[from_x]], []))
            x, y = from_x, from_y
    return steps[::-1]


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
    body: list[Child] = [
        search_form(
            "history",
            field(
                "Origin",
                "origin",
                origin,
                required=True,
                class_="wide",
                placeholder="https://example.org",
            ),
            button="Show",
        )
    ]
    if error is not None:
        body.append(tag("p", badge("bad", "Invalid origin"), " ", error, class_="lead"))
    elif origin:
        rows = [
            row(
                tag("th", (entry.body_hash.hex()[:12] or "no file"), scope="row"),
                age(utc(entry.first_seen), now),
                age(utc(entry.last_seen), now),
                entry.outcome.replace("_", " "),
                num("-" if entry.status is None else entry.status),
                num(number(entry.size)),
                _compare_links(origin, entries, n),
            )
            for n, entry in reversed(list(enumerate(entries)))
        ]
        body.append(
            table(
                "Versions, the latest first",
                (
                    "Version",
                    "First seen",
                    "Last seen",
                    "Outcome",
                    num_head("Status"),
                    num_head("Bytes"),
                    "Compare",
                ),
                rows[:200],
                empty="No version of this file is stored. History needs a storage (storage.path).",
            )
        )
        if versions is not None:
            body += _comparison(versions)
    else:
        body.append(tag("p", "Enter an origin, such as https://example.org.", class_="empty"))
    return Page("History", "history", body)


def _compare_links(origin: str, entries: list[HistoryEntry], n: int) -> Child:
    if n == 0:
        return "the first"
    query = {"origin": origin, "old": n - 1, "new": n}
    return tag("a", "with the previous one", href=f"history?{urlencode(query)}")


def _comparison(versions: VersionDiff) -> Iterator[Html]:
    yield tag("h2", "Which verdicts changed")
    yield table(
        "Recently asked URLs whose verdict changed",
        ("URL", "Before", "After"),
        [
            row(
                tag("th", url[:2048], scope="row", class_="url"),
                verdict_badge("allow" if before else "deny"),
                verdict_badge("allow" if after else "deny"),
            )
            for url, before, after in versions.verdicts[:200]
        ],
        empty=f"None of {number(versions.asked)} recently asked URLs.",
    )
    yield tag("h2", "What changed in the text")
    yield table(
        "Old and new side by side",
        ("Change", "Old", "New"),
        _diff_rows(versions),
        empty="Nothing.",
    )


def _diff_rows(versions: VersionDiff) -> Iterator[Html]:
    """Yield the rows of a comparison, `_MAX_ROWS` at most."""
    rows = chain.from_iterable(map(_change_rows, versions.changes))
    yield from islice(rows, _MAX_ROWS)
    if next(rows, None) is not None:
        yield row("", "... and more", "... and more")


def _change_rows(change: TextChange) -> Iterator[Html]:
    if not change.same:
        for old, new in zip_longest(change.old, change.new):
            mark = "new" if old is None else "gone" if new is None else "changed"
            yield row(mark, _code(old), _code(new), class_=mark)
        return
    lines = change.old
    if len(lines) > 6:
        lines = [*lines[:3], f"... {len(lines) - 6} lines that are the same ...", *lines[-3:]]
    for line in lines:
        yield row("", _code(line), _code(line), class_="same")


def _code(line: str | None) -> Html:
    return tag("td", tag("code", line[:1000]) if line is not None else None, class_="url")
