"""The report of an audit record: one page for people who are no programmers.

It is a file of its own, without scripts or anything from elsewhere, in the form of the other pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gatekeeper.audit.reading import counted
from gatekeeper.audit.report import AuditReport, HostRow, OverrideRow
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, attributes, badge, markup, number, row
from gatekeeper.sidecar.pages.shell import asset

_WIDTH, _HEIGHT = 1000, 180
"""The chart's size, in its own units."""
_STYLE: Final = """
svg { width: 100%; height: auto; display: block; }
svg .one { fill: var(--one); } svg .two { fill: var(--two); }
.axis { display: flex; flex-wrap: wrap; justify-content: space-between; }
.axis { margin: .3em 0 0; color: var(--soft); }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.key.one { background: var(--one); } .key.two { background: var(--two); }
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


def report_page(report: AuditReport) -> str:
    """Return the report as an HTML document."""
    verified = report.verified
    title = f"What was fetched, {_day(verified.first)} to {_day(verified.last)}"
    style = Html(asset("app.css").decode() + _STYLE)
    return markup(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>{}</title><style>{}</style></head>'
        '<body><main id="main"><h1>{}</h1>{}</main></body></html>',
        title,
        style,
        title,
        [
            *_head(report),
            *_over_time(report),
            *_hosts(report),
            *_refusals(report),
            *_overrides(report.overrides),
            *_signals(report),
            *_proof(report),
        ],
    )


def _day(time: str | None) -> str:
    return "?" if time is None else time[:10]


def _head(report: AuditReport) -> Iterable[Child]:
    verified = report.verified
    rows = [*report.hosts, report.others]
    requests, robots = sum(one.requests for one in rows), sum(one.robots for one in rows)
    refused = sum(report.refused.values())
    if verified.ok:
        yield html.paragraph(
            badge("ok", "The record was verified: nothing differs."), class_="lead"
        )
    else:
        text = f"The record was verified: {counted(verified.found, 'difference')}, see below."
        yield html.paragraph(badge("bad", text), class_="lead")
    names = ", ".join(report.user_agents) or "an unknown crawler"
    yield html.paragraph(
        f"This is what {names} did from {verified.first} to {verified.last} (UTC), by the record "
        "that it wrote while it did so.",
        class_="lead",
    )
    yield markup(
        '<section class="cards" aria-label="Numbers">{}</section>',
        [
            _card("Hosts", len(report.hosts) + report.other_hosts, "that were asked, or refused"),
            _card("Requests", requests, f"{number(robots)} of them for robots.txt"),
            _card("Refused", refused, "requests that were not sent"),
            _card("Blocks", report.blocks, "times a host was left alone for a while"),
            _card("Overrides", len(report.overrides), "rules that a person set"),
        ],
    )


def _card(name: str, value: int, more: str) -> Html:
    return markup(
        '<div class="card"><h2>{}</h2><p class="value">{}</p><p class="more">{}</p></div>',
        name,
        number(value),
        more,
    )


# --- the chart ------------------------------------------------------------------------------------


def _over_time(report: AuditReport) -> Iterable[Child]:
    if not report.times:
        return
    span = html.duration(report.interval)
    most = max(one + two for _, one, two in report.times) or 1
    step = _WIDTH / len(report.times)
    bars: list[Html] = []
    for place, (_, sent, refused) in enumerate(report.times):
        high, top = (_HEIGHT * part / most for part in (sent, refused))
        bars.append(_bar("one", place * step, _HEIGHT - high, step, high))
        bars.append(_bar("two", place * step, _HEIGHT - high - top, step, top))
    box = f"0 -16 {_WIDTH} {_HEIGHT + 16}"
    label = f"Requests and refusals per {span}: at most {number(most)}; see the table below"
    yield markup("<h2>Over time</h2>")
    yield markup(
        "<figure><figcaption>Per {}: {} sent, {} refused; at most {}</figcaption>"
        '<svg{}>{}</svg><p class="axis"><span>{}</span><span>{}</span></p></figure>',
        span,
        markup('<span class="key one"></span>'),
        markup('<span class="key two"></span>'),
        number(most),
        attributes(viewBox=box, role="img", aria_label=label),
        bars,
        report.times[0][0],
        report.times[-1][0],
    )
    rows = (
        row(time, html.num(number(sent)), html.num(number(refused)))
        for time, sent, refused in report.times
        if sent or refused
    )
    heads = ("From", html.num_head("Sent"), html.num_head("Refused"))
    yield html.details("The chart as a table", html.table("Over time", heads, rows))


def _bar(kind: str, x: float, y: float, width: float, height: float) -> Html:
    own = attributes(
        class_=kind,
        x=f"{x:.2f}",
        y=f"{y:.2f}",
        width=f"{max(width * 0.9, 0.5):.2f}",
        height=f"{height:.2f}",
    )
    return markup("<rect{}/>", own) if height else Html("")


# --- tables ---------------------------------------------------------------------------------------


def _hosts(report: AuditReport) -> Iterable[Child]:
    yield markup("<h2>The hosts, and their pace</h2>")
    yield html.paragraph(
        "The shortest time between two requests stands beside the time that was asked for then, by "
        "the site's robots.txt or by the crawler's own settings."
    )
    heads = [
        "Host",
        *map(html.num_head, ("Requests", "Refused", "No success", "Shortest gap", "Asked for")),
        "By",
        *map(html.num_head, ("Blocks", "Bytes")),
    ]
    rows = [
        _host_row(one, html.row_head(markup("<code>{}</code>", one.host or "(no host)")))
        for one in report.hosts
    ]
    if report.other_hosts:
        rows.append(
            _host_row(report.others, html.row_head(f"{number(report.other_hosts)} other hosts"))
        )
    yield html.table("The hosts, and their pace", heads, rows, empty="No host was asked.")


def _host_row(one: HostRow, head: Html) -> Html:
    return row(
        head,
        html.num(number(one.requests)),
        html.num(number(one.refused)),
        html.num(number(one.failed)),
        html.num(_gap(one.shortest)),
        html.num(_gap(one.interval)),
        html.text_cell(one.asked[:200]),
        html.num(number(one.blocks)),
        html.num(number(one.bytes)),
    )


def _gap(seconds: float | None) -> str:
    """Return seconds to the millisecond: a gap is compared with what was asked for."""
    return "-" if seconds is None else f"{seconds:,.3f}".rstrip("0").rstrip(".") + " s"


def _refusals(report: AuditReport) -> Iterable[Child]:
    yield markup("<h2>Refused, by reason</h2>")
    yield _reasons("Refused, by reason", report.refused, "Nothing was refused.")
    yield markup("<h2>Fetched, by reason</h2>")
    yield _reasons("Fetched, by reason", report.allowed, "No page was fetched.")
    yield markup("<h2>What became of each robots.txt</h2>")
    yield _counts("Outcomes of robots.txt", "Outcome", report.files, "No robots.txt was read.")
    yield markup("<h2>How the sites answered</h2>")
    yield _counts("Statuses", "Status", report.statuses, "There was no response.")


def _reasons(caption: str, counts: Mapping[str, int], empty: str) -> Html:
    rows = (
        row(html.row_head(text), _WORDS.get(text.split(": ")[-1], ""), html.num(number(count)))
        for text, count in counts.items()
    )
    return html.table(caption, ("Reason", "In words", html.num_head("Number")), rows, empty=empty)


def _counts(caption: str, head: str, counts: Mapping[str, int], empty: str) -> Html:
    rows = (row(html.row_head(text), html.num(number(count))) for text, count in counts.items())
    return html.table(caption, (head, html.num_head("Number")), rows, empty=empty)


def _signals(report: AuditReport) -> Iterable[Child]:
    yield markup("<h2>What sites said about use</h2>")
    empty = "No response carried a signal about use, licences or payment."
    yield _counts("Signals", "Signal", report.signals, empty)


def _overrides(overrides: Sequence[OverrideRow]) -> Iterable[Child]:
    yield markup("<h2>Overrides: rules that people set</h2>")
    heads = ("Hosts", "Rule", "Who", "Why", "Since", "Until", "Ended")
    rows = (
        row(
            html.row_head(markup("<code>{}</code>", one.match)),
            html.text_cell(one.rule),
            one.by or "not said",
            html.text_cell((one.reason or "not said")[:300]),
            one.since,
            one.until or "no end",
            one.ended or "-",
        )
        for one in overrides
    )
    yield html.table("Overrides", heads, rows, empty="Nobody overrode a robots.txt.")


def _proof(report: AuditReport) -> Iterable[Child]:
    verified = report.verified
    yield markup("<h2>What this proves</h2>")
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
        yield _counts("Not checked", "Not checked", left_out, "")
    rows = (
        row(
            html.row_head(markup("<code>{}</code>", one.chain)),
            html.num(number(one.sealed)),
            one.sealed_at or "-",
            html.text_cell(_signed(one.key, verified.signatures_checked)),
            html.num(number(one.behind)),
        )
        for one in itertools.islice(verified.chains, 200)
    )
    heads = ("Chain", html.num_head("Sealed up to"), "At", "Signed", html.num_head("Lines behind"))
    yield markup("<h2>The chains</h2>")
    yield html.table("The chains", heads, rows)
    if verified.differences:
        yield markup("<h2>What differs</h2>")
        yield html.items(str(one) for one in verified.differences)


def _signed(key: str | None, checked: bool) -> str:
    if key is None:
        return "no"
    return f"by {key}, {'checked' if checked else 'not checked'}"
