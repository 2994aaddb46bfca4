"""The report of an audit record: one page for people who are no programmers.

It is a file of its own, without scripts or anything from elsewhere, in the form of the other pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gatekeeper.audit.report import AuditReport, HostRow, OverrideRow
from gatekeeper.errors import counted
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, Row, badge, card, code, element, number, row
from gatekeeper.sidecar.pages.shell import asset, document

_STYLE: Final = """
svg { width: 100%; height: 14rem; display: block; margin-top: .8em; }
svg .one { fill: var(--one); } svg .two { fill: var(--two); }
.axis { display: flex; flex-wrap: wrap; justify-content: space-between; }
.axis { margin: .3em 0 0; color: var(--soft); }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.key.one { background: var(--one); } .key.two { background: var(--two); }
.more .whole { white-space: normal; }
@media print { .scroll { overflow: visible; } }
"""


_WORDS: Final = {
    "rule": "a line of robots.txt decided",
    "no_rule": "robots.txt has no line about the page, so it may be fetched",
    "no_file": "the site has no robots.txt, so its pages may be fetched",
    "empty_file": "robots.txt is empty, so its pages may be fetched",
    "operator": "a rule that a person set decided, see below",
    "outside_visit_time": "robots.txt allows visits at other hours only",
    "access_restricted": "the site showed its robots.txt only to those who log in",
    "server_error": "robots.txt could not be read, because the server failed",
    "rate_limited": "the site said that requests came too often",
    "timeout": "the site did not answer in time",
    "connect_failed": "no connection to the site came about",
    "dns_nxdomain": "there is no host of that name",
    "dns_failure": "the name of the site could not be looked up",
    "tls": "the site's certificate was refused",
    "host_blocked": "the site had asked for a break, or a person had",
    "host_paused": "a person had paused the site",
    "storage": "the crawler could not write its own files",
    "long_unreachable": "robots.txt could not be read for very long, while pages were served",
    "budget": "the crawler's own limit for a day was reached",
    "blocked": "the crawler may not ask this address",
}
"""Common reasons in plain words."""
_NO_SIGNALS: Final = "No response carried a signal about use, licences or payment."


def report_page(report: AuditReport) -> str:
    """Return the report as an HTML document."""
    verified = report.verified
    title = f"What was fetched, {_day(verified.first)} to {_day(verified.last)}"
    style = element("style", Html(asset("app.css").decode() + _STYLE))
    body = [
        *_head(report),
        *_over_time(report),
        *_hosts(report),
        _reasons("Refused, by reason", report.refused, "Nothing was refused."),
        _reasons("Fetched, by reason", report.allowed, "No page was fetched."),
        _counts(
            "What became of each robots.txt", "Outcome", report.files, "No robots.txt was read."
        ),
        _counts("How the sites answered", "Status", report.statuses, "There was no response."),
        _overrides(report.overrides),
        _counts("What sites said about use", "Signal", report.signals, _NO_SIGNALS),
        *_proof(report),
    ]
    main = element("main", element("h1", title), body, id="main")
    return document(title, style, element("body", main))


def _day(time: str | None) -> str:
    return "?" if time is None else time[:10]


def _head(report: AuditReport) -> Iterable[Child]:
    verified = report.verified
    rows = [*report.hosts, report.others]
    requests, robots = sum(one.requests for one in rows), sum(one.robots for one in rows)
    refused = sum(report.refused.values())
    found = "nothing differs"
    if not verified.ok:
        found = f"{counted(verified.found, 'difference')}, see below"
    said = badge("ok" if verified.ok else "bad", f"The record was verified: {found}.")
    yield html.paragraph(said, class_="lead")
    names = ", ".join(report.user_agents) or "an unknown crawler"
    span = (
        f"from {verified.first} to {verified.last} (UTC)" if verified.first else "so far: nothing"
    )
    text = f"This is what {names} did {span}, by the record that it wrote while it did so."
    yield html.paragraph(text, class_="lead")
    yield html.cards(
        [
            card("Hosts", len(report.hosts) + report.other_hosts, "that were asked, or refused"),
            card("Requests", requests, f"{number(robots)} of them for robots.txt"),
            card("Refused", refused, "requests that were not sent"),
            card("Blocks", report.blocks, "times a host was left alone for a while"),
            card("Overrides", len(report.overrides), "rules that a person set"),
        ]
    )


# --- the chart ------------------------------------------------------------------------------------


def _over_time(report: AuditReport) -> Iterable[Child]:
    if not report.times:
        return
    span, most = html.duration(report.interval), max(sent + no for _, sent, no in report.times) or 1
    bars: list[Html] = []
    for place, (_, sent, refused) in enumerate(report.times):
        bars.append(_bar("one", place, most - sent, sent))
        bars.append(_bar("two", place, most - sent - refused, refused))
    box = f"0 0 {len(report.times)} {most}"
    label = f"Requests and refusals per {span}: at most {number(most)}; see the table below"
    own = {"viewBox": box, "preserveAspectRatio": "none", "role": "img", "aria_label": label}
    one, two = (element("span", class_=f"key {kind}") for kind in ("one", "two"))
    text = [f"Per {span}: ", one, " sent, ", two, f" refused; at most {number(most)}"]
    axis = [element("span", report.times[at][0]) for at in (0, -1)]
    yield element("h2", "Over time")
    yield element(
        "figure",
        element("figcaption", text),
        element("svg", bars, **own),
        element("p", axis, class_="axis"),
    )
    rows = (row(*one) for one in report.times if any(one[1:]))
    columns = "From, Sent:num, Refused:num"
    yield html.details("The chart as a table", html.table("Over time", columns, rows))


def _bar(kind: str, x: int, y: int, height: int) -> Html:
    return element("rect", class_=kind, x=x, y=y, width=0.9, height=height)


# --- tables ---------------------------------------------------------------------------------------


def _hosts(report: AuditReport) -> Iterable[Child]:
    yield element("h2", "The hosts, and their pace")
    yield html.paragraph(
        "The shortest time between two requests stands beside the time that was asked for then, by "
        "the site's robots.txt or by the crawler's own settings."
    )
    columns = (
        "Host, Requests:num, Refused:num, No success:num, Shortest gap:num, Asked for:num, By:url, "
        "Blocks:num, Bytes:num"
    )
    rows = [_host_row(one, code(one.host or "(no host)")) for one in report.hosts]
    if report.other_hosts:
        rows.append(_host_row(report.others, f"{number(report.other_hosts)} other hosts"))
    yield html.table("The hosts, and their pace", columns, rows, empty="No host was asked.")


def _host_row(one: HostRow, name: Child) -> Row:
    gaps = _gap(one.shortest), _gap(one.interval)
    counts = one.requests, one.refused, one.failed
    return row(name, *counts, *gaps, one.asked[:200], one.blocks, one.bytes)


def _gap(seconds: float | None) -> str:
    """Return seconds to the millisecond: a gap is compared with what was asked for."""
    return "-" if seconds is None else f"{seconds:,.3f}".rstrip("0").rstrip(".") + " s"


def _reasons(title: str, counts: Mapping[str, int], empty: str) -> Html:
    rows = (
        row(text, _WORDS.get(text.split(": ")[-1], ""), count) for text, count in counts.items()
    )
    return html.section(title, "Reason, In words, Number:num", rows, empty=empty)


def _counts(title: str, head: str, counts: Mapping[str, int], empty: str) -> Html:
    rows = (row(text, count) for text, count in counts.items())
    return html.section(title, f"{head}, Number:num", rows, empty=empty)


def _overrides(overrides: Sequence[OverrideRow]) -> Html:
    rows = []
    for one in overrides:
        who = one.by or "not said", (one.reason or "not said")[:300]
        span = one.since, one.until or "no end", one.ended or "-"
        rows.append(row(code(one.match), one.rule, *who, *span))
    title = "Overrides: rules that people set"
    columns = "Hosts, Rule:url, Who, Why:url, Since, Until, Ended"
    return html.section(title, columns, rows, empty="Nobody overrode a robots.txt.")


def _proof(report: AuditReport) -> Iterable[Child]:
    verified = report.verified
    yield element("h2", "What this proves")
    yield html.items(verified.boundary)
    yield html.paragraph(
        f"Checked: {counted(verified.lines, 'line')}, {counted(verified.decisions, 'decision')}, "
        f"{counted(verified.starts, 'interval')}, {counted(verified.texts, 'text')} and "
        f"{counted(verified.seals, 'seal')}, with gatekeeper {verified.version}. Clocks of two "
        f"processes may differ by {verified.tolerance:g} s."
    )
    left_out = {
        **{f"decisions not made again: {k}": v for k, v in verified.decisions_not_checked.items()},
        **({"lines that were erased": verified.erased} if verified.erased else {}),
        **({"lines that were left out": verified.omitted} if verified.omitted else {}),
    }
    if left_out:
        yield _counts("Not checked", "Lines", left_out, "")
    checked = "checked" if verified.signatures_checked else "not checked"
    rows = []
    for one in verified.chains[:200]:
        signed = "no" if one.key is None else f"by {one.key}, {checked}"
        rows.append(row(code(one.chain), one.sealed, one.sealed_at or "-", signed, one.behind))
    columns = "Chain, Sealed up to:num, At, Signed:url, Lines behind:num"
    yield html.section("The chains", columns, rows)
    if verified.differences:
        yield element("h2", "What differs")
        yield html.items(map(str, verified.differences))
