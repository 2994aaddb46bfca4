"""The pages about the current state: overview, hosts, one host, waiting requests, settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import msgspec

from gatekeeper.clock import utc
from gatekeeper.fetching.records import Moment
from gatekeeper.pacing.waiters import HELD_UP, STATES
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, badge, markup, number, row
from gatekeeper.sidecar.pages.recent_decisions import NAMES
from gatekeeper.sidecar.pages.shell import Page, Visitor

if TYPE_CHECKING:
    from gatekeeper.client.wire import HostBody
    from gatekeeper.gate.parts import AuditStatus
    from gatekeeper.pacing.waiters import ClockView
    from gatekeeper.sidecar.pages.state import LeaseView, Overview
    from gatekeeper.sidecar.routes.hosts import HostList, HostQuery
    from gatekeeper.sidecar.routes.operators import ConfigBody, LeaseList, LeaseQuery
    from gatekeeper.sidecar.routing import PageQuery
    from gatekeeper.sidecar.service import Service

REFRESH: Final = 3.0
_BADGES: Final = {
    "free": "idle",
    "waiting": "ok",
    "busy": "ok",
    "deferred": "bad",
    "blocked": "bad",
    "paused": "warn",
    "parsed": "ok",
    "unavailable": "idle",
    "unreachable": "bad",
    "stale": "warn",
    "override": "warn",
}


def state_badge(state: str | None) -> Html:
    """Return the badge for the state of a host or of a file."""
    return badge(_BADGES.get(state or "", "idle"), state or "none")


# --- overview ---------------------------------------------------------------------------------


_VERDICTS: Final = ("allow", "deny", "defer")
_CAUSES: Final = {"file": "its robots.txt could not be fetched: "}
"""How the cause of a hold-up begins, by its kind."""


def overview_page(service: Service, overview: Overview) -> Page:
    """The overview: first what needs attention, then numbers and charts."""
    up = html.duration((overview.now - overview.started_at).total_seconds())
    body = [
        _attention(overview),
        markup('<section class="cards" aria-label="Numbers">{}</section>', _cards(overview)),
        _charts(),
        _recent_table(service),
        html.paragraph(f"{overview.user_agent}, version {overview.version}, up {up}"),
    ]
    scripts = ("vendor/uPlot.iife.min.js", "charts.js")
    return Page("Overview", "", body, REFRESH, scripts, ("vendor/uPlot.min.css",))


def _attention(overview: Overview) -> Html:
    warnings = list(_warnings(overview))
    if not warnings:
        return html.paragraph(badge("ok", "Nothing needs attention."), class_="fine")
    return html.items(warnings, class_="look", label="Needs attention")


def _warnings(overview: Overview) -> Iterator[Child]:
    if not overview.ready:
        yield badge("bad", f"Not ready: {overview.state}")
    if not overview.reload.ok:
        text = ": the previous settings are in force; see the log"
        yield [badge("bad", "The last reload failed"), text]
    if overview.reload.needs_restart:
        names = ", ".join(overview.reload.needs_restart)
        yield [badge("warn", "A restart is needed"), " for ", html.link("config", names)]
    if overview.fleet is not None and overview.fleet.get("state") != "connected":
        state, why = overview.fleet.get("state"), overview.fleet.get("recovery")
        yield [badge("bad", f"The store of the fleet is {state}"), f": {why}" if why else ""]
    for host in overview.held_up:
        yield [_host_link(host.host), " ", _holdup(host, overview.now)]
    counts = {state: overview.host_states[state] for state in HELD_UP}
    if sum(counts.values()) > len(overview.held_up):
        links = [_hosts_link(state, count) for state, count in counts.items() if count]
        yield ["All: ", _listed(links)]
    if overview.oldest_wait is not None and overview.oldest_wait > 60:
        said = f"A request has waited for {html.duration(overview.oldest_wait)}"
        link = _host_link(overview.oldest_wait_host or "")
        yield [badge("warn", said), " for ", link, "; ", html.link("waiting", "see who waits")]
    if overview.overdue:
        leases = "lease is" if overview.overdue == 1 else "leases are"
        over = badge("warn", f"{number(overview.overdue)} {leases} nearly over")
        yield [over, " and not reported: ", html.link("waiting?state=held", "see them")]
    if overview.rates["robots_failed"]:
        failed = int(overview.rates["robots_failed"])
        fetches = "fetch" if failed == 1 else "fetches"
        yield badge("warn", f"{number(failed)} robots.txt {fetches} failed in the last 10 s")


def _holdup(host: HostBody, now: datetime) -> Child:
    """Return the state of a host that is held up, until when, and why."""
    shown = next((view for view in host.clocks if str(view) == host.why), None)
    cause = None if shown is None else f": {_CAUSES.get(shown.kind, '')}{shown.cause}"
    waiting = f"; {number(host.waiting)} waiting" if host.waiting else None
    return [state_badge(host.state), _until(host, now), cause, waiting]


def _until(host: HostBody, now: datetime) -> Child:
    if host.next_at is None:
        return " until it is resumed" if host.state == "paused" else None
    day = "" if host.next_at.date() == now.date() else f"{host.next_at:%Y-%m-%d} "
    at = html.moment(host.next_at, f"{day}{host.next_at:%H:%M} UTC")
    return [" until ", at, " (", html.age(host.next_at, now), ")"]


def _host_link(host: str) -> Html:
    return html.link(f"hosts/{quote(host, safe='')}", host)


def _hosts_link(state: str, count: int) -> Html:
    return html.link(f"hosts?state={state}", f"{number(count)} {state}")


def _listed(parts: Iterable[Child]) -> list[Child]:
    """Return the parts with commas between them; none of them is broken between two lines."""
    whole: list[Child] = []
    for part in parts:
        whole += [", " if whole else None, markup('<span class="whole">{}</span>', part)]
    return whole


def _cards(seen: Overview) -> Iterator[Html]:
    rates = [seen.rates[name] for name in _VERDICTS]
    known = [rate for rate in rates if rate is not None]
    verdicts = _counted(dict(zip(_VERDICTS, rates, strict=True)))
    yield _card("Decisions per second", sum(known) if known else None, verdicts, "live")
    hosts = {state: count for state, count in seen.host_states.items() if state != "waiting"}
    counting = [] if seen.hosts_complete else ["still counting"]
    yield _card("Hosts", seen.hosts, [*_counted(hosts), *counting], "hosts")
    oldest = (
        [] if seen.oldest_wait is None else [f"the oldest for {html.duration(seen.oldest_wait)}"]
    )
    yield _card("Waiting requests", seen.waiting, oldest, "waiting?state=waiting")
    late = _counted({"nearly over": seen.overdue, "expired": seen.expired})
    yield _card("Leases out", seen.leases, late, "waiting?state=held")
    failed = _counted({"failed": seen.robots_failed})
    yield _card("robots.txt fetched", seen.robots_ok, failed)
    if seen.cache_share is not None:
        yield _card("From memory", f"{100 * seen.cache_share:.1f} %")
    if seen.fleet is not None:
        yield _card("Members of the fleet", seen.fleet.get("members"), [seen.fleet.get("state")])


def _counted(counts: Mapping[str, float | None]) -> list[str]:
    return [f"{html.short_number(count)} {name}" for name, count in counts.items() if count]


def _card(
    name: str, value: float | str | None, more: Iterable[Child] = (), link: str | None = None
) -> Html:
    if isinstance(value, str):
        text, exact = value, value
    else:
        text, exact = html.short_number(value), number(value)
    return markup(
        '<div class="card"><h2>{}</h2><p class="value"{}>{}</p><p class="more">{}</p></div>',
        html.link(link, name) if link else name,
        html.attributes(title=None if text == exact else exact),
        text,
        _listed(more),
    )


_CHARTS: Final = {
    "Decisions per second": ("Decisions", {name: name for name in _VERDICTS}),
    "Wait for a lease, seconds": ("Wait", {"wait_p50": "median", "wait_p95": "95th percentile"}),
    "robots.txt fetches per 10 s": (
        "Fetches",
        {"robots_ok": "successful", "robots_failed": "failed"},
    ),
}
"""The titles of the charts, their names in the legend, and the values of `/v1/series` that each
shows, with their labels."""


def _charts() -> Html:
    """Return the charts and their common legend, which shows the values at the cursor.

    Without JavaScript they stay hidden.
    """
    legend, charts = [], []
    for title, (short, series) in _CHARTS.items():
        values = [
            markup(
                '<span class="whole"><i class="line"></i> {} <b data-value="{}">-</b></span> ',
                label,
                name,
            )
            for name, label in series.items()
        ]
        legend.append(markup("<p>{}: {}</p>", short, values))
        own = html.attributes(
            class_="chart", role="img", tabindex="0", aria_label=f"{title}: see the table below"
        )
        charts.append(
            markup("<figure><figcaption>{}</figcaption><div{}></div></figure>", title, own)
        )
    return markup(
        '<section id="charts" data-keep="charts" hidden><h2>The last hour</h2>'
        '<div class="legend"><p><time id="moment">No values yet</time></p>{}</div>'
        '<div class="charts">{}</div></section>',
        legend,
        charts,
    )


def _recent_table(service: Service) -> Html:
    """Return the last two minutes as a table, for readers who can't see the charts."""
    body = service.operators.series.body()
    rows = [
        row(
            html.moment(utc(at), f"{utc(at):%H:%M:%S}"),
            *(html.num(number(body.values[name][n])) for name in NAMES),
        )
        for n, at in list(enumerate(body.times))[-1:-13:-1]
    ]
    return html.details(
        "The last two minutes as a table",
        html.table(
            "The last two minutes",
            ("until (UTC)", *(html.num_head(name.replace("_", " ")) for name in NAMES)),
            rows,
            empty="The first numbers appear ten seconds after the start.",
        ),
    )


# --- hosts ------------------------------------------------------------------------------------

_COLUMNS: Final = (
    ("host", "Host"),
    ("state", "State"),
    (None, "robots.txt"),
    ("interval", "Interval"),
    ("in_flight", "In flight"),
    ("waiting", "Waiting"),
    ("next", "Due in"),
    ("status", "Last status"),
    ("allowed", "Allowed"),
    ("denied", "Denied"),
)


def hosts_page(service: Service, query: HostQuery, listed: HostList) -> Page:
    """A page of hosts. Its URL contains the filter, so that it can be shared."""
    now = utc(service.clock.wall())
    more = None if listed.complete else " so far; the scan goes on"
    body = [
        html.search_form(
            "hosts",
            html.field("Part of the name", "q", query.q, type="search"),
            html.hidden("state", query.state),
            html.hidden("sort", query.sort),
            button="Filter",
        ),
        _state_links("hosts", query, {state: state for state in ("any", *STATES)}),
        html.paragraph(f"{number(listed.total)} hosts", more, aria_live="polite"),
        html.table(
            "Hosts",
            [_head(column, text, query) for column, text in _COLUMNS],
            [_host_row(host, now) for host in listed.hosts],
            empty=_no_hosts(query),
        ),
        _pager("hosts", query, listed.pages),
    ]
    return Page("Hosts", "hosts", body, REFRESH)


def _no_hosts(query: HostQuery) -> Child:
    if query.q or query.state != "any" or query.page > 1:
        return ["No host matches. ", html.link("hosts", "Show all")]
    example = "curl -sG .../v1/check --data-urlencode url=https://example.org/"
    return ["No hosts yet. Ask about a URL: ", html.code(example)]


def _head(column: str | None, text: str, query: HostQuery) -> Html:
    if column is None:
        return html.head(text)
    current = query.sort.lstrip("-") == column
    down = query.sort.startswith("-")
    # The first click sorts numbers from the greatest down, but names from the first up.
    sort = column if (current and down) or (not current and column == "host") else f"-{column}"
    sign = (" ▼" if down else " ▲") if current else ""
    address = _address("hosts", query, sort=sort, page=1)
    return html.head(
        markup('<a href="{}">{}<span aria-hidden="true">{}</span></a>', address, text, sign),
        class_=None if column in ("host", "state") else "num",
        aria_sort=("descending" if down else "ascending") if current else None,
    )


def _host_row(host: HostBody, now: datetime) -> Html:
    """Return the row of a host. Zero and missing values are empty cells.

    Rows are most of what a browser has to draw, and the other values stand out more.
    """
    interval = None if host.interval is None else html.duration(host.interval)
    return row(
        html.row_head(_host_link(host.host), class_="name"),
        state_badge(host.state),
        host.robots and [state_badge(host.robots), " ", html.age(host.robots_fetched_at, now)],
        html.num(interval, title=host.interval_source),
        html.num(host.in_flight or None),
        html.num(host.waiting or None),
        html.num(_due(host, now)),
        html.num(host.last_status),
        html.num(host.allowed or None),
        html.num(host.denied or None),
        id_=f"host-{host.host}",
    )


def _due(host: HostBody, now: datetime) -> Child:
    if host.state == "paused":
        return "when resumed"
    if host.next_at is None:
        return {"busy": "after the lease", "free": "now"}.get(host.state, "not known")
    left = (host.next_at - now).total_seconds()
    return "now" if left <= 0 else html.moment(host.next_at, html.duration(math.ceil(left)))


def _address(path: str, query: msgspec.Struct, **changes: Any) -> str:
    """Return the URL of the page with other filters; default values are left out."""
    values = msgspec.structs.asdict(query) | changes
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(query)
        if field.default is not msgspec.NODEFAULT
    }
    chosen = {
        name: value
        for name, value in values.items()
        if value is not None and value != defaults.get(name)
    }
    return f"{path}?{urlencode(chosen)}" if chosen else path


def _state_links(path: str, query: HostQuery | LeaseQuery, states: Mapping[str, str]) -> Html:
    """Return links to the same page for each state; `states` maps values to their labels."""
    links = []
    for state, text in states.items():
        here = "true" if state == query.state else None
        href = _address(path, query, state=state, page=1)
        own = html.attributes(href=href, aria_current=here)
        links.append(markup("<a{}>{}</a>", own, text))
    return markup('<nav class="chips" aria-label="State">{}</nav>', links)


def _pager(path: str, query: PageQuery, pages: int, *, at: str = "") -> Html | None:
    """Return the links to other pages of a table; `at` is the place in the page to show."""
    if pages <= 1:
        return None
    links: list[Child] = []
    pages_by_name = {"First": 1, "Previous": query.page - 1, "Next": query.page + 1, "Last": pages}
    for text, page in pages_by_name.items():
        if 1 <= page <= pages and page != query.page:
            links += [html.link(_address(path, query, page=page) + at, text), " "]
    return markup(
        '<nav class="pager" aria-label="Pages of the table">Page {} of {} {}</nav>',
        number(query.page),
        number(pages),
        links,
    )


# --- one host ---------------------------------------------------------------------------------

_SENTENCES: Final = {
    "interval": "has an interval of {seconds}",
    "next": "is due in {seconds}",
    "block": "is blocked for {seconds}",
    "override": "has an override",
    "pause": "is paused until an operator resumes it",
    "budget": "has a daily budget, whose day ends in {seconds}",
    "probe": "is tested",
    "back-off": "has refused requests before",
    "in_flight": "has requests in flight",
    "file": "defers every URL, as its robots.txt could not be fetched",
    "visit-time": "defers every URL outside its Visit-time",
    "storage": "gets no lease, as that can't be saved",
    "fleet": "gets no lease from this member of the fleet",
}


def host_page(
    service: Service, host: HostBody, query: PageQuery, listed: LeaseList, visitor: Visitor
) -> Page:
    """The page of one host: its state and the actions, its clocks and their sources, its files,
    and a page of its waiting requests and leases."""
    now = utc(service.clock.wall())
    none = html.paragraph("No clock is running: a request may start now.", class_="empty")
    clocks = html.items(map(_sentence, host.clocks), class_="clocks")
    body = [
        html.paragraph(_status(host, now), class_="lead"),
        _actions(service, host, visitor),
        markup("<h2>Clocks</h2>{}", clocks if host.clocks else none),
        _fleet_holds(host, now),
        markup("<h2>robots.txt</h2>{}", _origins(service, host.host, now)),
        markup('<h2 id="leases">Waiting requests and leases</h2>'),
        _leases_table(listed.leases, visitor, now, of_one_host=True),
        _pager(quote(host.host, safe=""), query, listed.pages, at="#leases"),
    ]
    return Page(host.host, f"hosts/{quote(host.host, safe='')}", body, REFRESH)


def _fleet_holds(host: HostBody, now: datetime) -> Child:
    """Return what the members of a fleet hold of a host; None without a fleet."""
    if host.fleet is None:
        return None
    rows = []
    for scope in host.fleet:
        notes = [f"{number(scope.waiting)} waiting"] if scope.waiting else []
        if scope.blocked_until is not None:
            notes.append(f"blocked: {scope.block_reason}")
        notes += ["paused"] if scope.paused else []
        notes += [f"{number(scope.day_pages)} pages today"] if scope.day_pages else []
        text = f": {', '.join(notes)}" if notes else ""
        held = [[f"{one.member}: since ", html.age(one.since, now)] for one in scope.holds]
        holds = html.items(held) if held else None
        rows.append(markup("<strong>{}</strong>{}{}", scope.scope, text, holds))
    return [markup("<h2>Held by members of the fleet</h2>"), html.items(rows, class_="clocks")]


def _status(host: HostBody, now: datetime) -> Child:
    if host.state in HELD_UP:
        return _holdup(host, now)
    told: Child = "A request may start now."
    if host.next_at is not None and host.next_at > now:
        told = ["The next request may start ", html.age(host.next_at, now), "."]
    elif host.state == "busy":
        told = f"{host.in_flight} in flight; the next may start when one ends or is answered."
    return [state_badge(host.state), " ", told]


def _sentence(view: ClockView) -> Child:
    seconds = "" if view.seconds is None else html.duration(view.seconds)
    text = _SENTENCES.get(view.kind, view.kind).format(seconds=seconds)
    until = view.until if view.kind == "override" else None
    end = "" if until is None else f" (until {until:%Y-%m-%dT%H:%M:%SZ})"
    return [
        markup("<strong>{}</strong> {}: {}{}", view.scope, text, view.cause, end),
        markup("<em> This one applies.</em>") if view.decides else None,
        markup("<em> pacing.max_interval limits it.</em>") if view.clamped else None,
    ]


def _origins(service: Service, host: str, now: datetime) -> Html:
    rows = []
    clock = service.clock
    for origin in service.operators.origins(host):
        record = service.gate.parts.directory.recall(origin)
        if record is None:
            rows.append(row(html.row_head(origin), state_badge(None), *([None] * 5)))
            continue
        standing = record.standing(Moment(clock.monotonic(), clock.wall()))
        text = standing.robots
        explain, history = urlencode({"url": origin + "/"}), urlencode({"origin": origin})
        links = [
            html.link(f"../explain?{explain}", "explain"),
            " ",
            html.link(f"../history?{history}", "history"),
        ]
        findings = 0
        if text is not None:
            findings = bool(service.gate.parts.directory.coding(origin)) + len(text.findings)
        rows.append(
            row(
                html.row_head(origin),
                [
                    state_badge(standing.state.value),
                    None if text is not None else f" {standing.reason.value.replace('_', ' ')}",
                ],
                html.num("-" if standing.status is None else standing.status),
                html.age(utc(standing.fetched_at), now),
                html.age(utc(standing.expires_at), now),
                [
                    "-" if text is None else f"{number(text.size)} bytes",
                    f", {findings} findings" if findings else None,
                    [" via ", standing.hops[-1]] if standing.hops else None,
                ],
                links,
            )
        )
    return html.table(
        "Origins and their files",
        ("Origin", "State", html.num_head("Status"), "Fetched", "Expires", "Text", "More"),
        rows,
        empty="No robots.txt of this host is in memory.",
    )


_ACTIONS: Final = {
    "refresh": (
        "Fetch robots.txt again",
        "This takes the host's next lease: one page fewer is fetched in that time. The old file "
        "stays in force until then.",
    ),
    "pause": (
        "Pause",
        "No request to this host starts until it is resumed, even after a restart. Waiting "
        "requests keep waiting; leases that are out continue.",
    ),
    "resume": ("Resume", "Requests start again as the clocks allow. A block remains."),
    "block": (
        "Block",
        "No request starts for this time, even after a restart. 0 lifts the current block.",
    ),
}
"""The actions on a host: their titles and their consequences."""


def _actions(service: Service, host: HostBody, visitor: Visitor) -> Html:
    if "admin" not in visitor.roles:
        said = "Your token has no admin role: you can only look."
        return html.paragraph(said, class_="empty")
    fields = (
        html.field("Seconds", "seconds", "600", type="number", min=0, required=True),
        html.field("Reason", "reason", "operator", maxlength=200),
    )
    paused = host.state == "paused"
    # What was typed is kept until the set of actions changes.
    return markup(
        '<div class="actions" data-keep="{}">{}</div>',
        f"actions {paused}",
        [
            _action(service, visitor, host.host, "refresh", "{}"),
            _action(service, visitor, host.host, "resume" if paused else "pause", "{}"),
            _action(service, visitor, host.host, "block", '{"seconds": 600}', *fields),
        ],
    )


def _action(
    service: Service, visitor: Visitor, host: str, action: str, body: str, *fields: Html
) -> Html:
    text, consequence = _ACTIONS[action]
    path = f"hosts/{quote(host, safe='')}/{action}"
    json = "-H 'Content-Type: application/json'"
    curl = f"curl -X POST {_base_url(service)}/v1/{path} {json} -d '{body}'"
    return html.details(
        text,
        markup("<p>{}</p><p>{}</p>", consequence, html.code(curl)),
        _action_form(visitor, f"../{path}", f"{text} now", fields),
        class_="action",
        id=f"action-{action}",
    )


def _action_form(visitor: Visitor, action: str, button: str, fields: Child = None) -> Html:
    """Return a form that changes something; it carries the secret of this visitor's pages."""
    return markup(
        '<form method="post" action="{}">{}{}<button class="act">{}</button></form>',
        action,
        html.hidden("form", visitor.form),
        fields,
        button,
    )


def _base_url(service: Service) -> str:
    server = service.config.server
    if server.socket is not None:
        return "--unix-socket " + server.socket + " http://localhost"
    scheme = "https" if server.tls_cert is not None else "http"
    host = f"[{server.host}]" if ":" in server.host else server.host
    return f"{scheme}://{host}:{server.port}"


# --- leases and waiters -----------------------------------------------------------------------


def waiting_page(service: Service, query: LeaseQuery, listed: LeaseList, visitor: Visitor) -> Page:
    """Waiting requests and held leases: for what, since when, and until when."""
    now = utc(service.clock.wall())
    states = {"any": "all", "waiting": f"waiting {listed.waiting}", "held": f"held {listed.held}"}
    body = [
        html.search_form(
            "waiting",
            html.field("Part of the host", "host", query.host, type="search"),
            html.field("Client", "client", query.client or "", type="search"),
            html.hidden("state", query.state),
            button="Filter",
        ),
        _state_links("waiting", query, states),
        html.paragraph(f"{number(listed.total)} in total", aria_live="polite"),
        _leases_table(listed.leases, visitor, now),
        _pager("waiting", query, listed.pages),
    ]
    return Page("Waiting", "waiting", body, REFRESH)


def _leases_table(
    leases: list[LeaseView], visitor: Visitor, now: datetime, *, of_one_host: bool = False
) -> Html:
    host = () if of_one_host else ("Host",)
    return html.table(
        "Leases and waiting requests",
        ("State", *host, "URL", "Client", "Since", "Ends", "Expected", "Action"),
        [_lease_row(lease, visitor, now, of_one_host) for lease in leases],
        empty="No request is waiting, and no lease is out.",
    )


def _lease_row(one: LeaseView, visitor: Visitor, now: datetime, of_one_host: bool) -> Html:
    link = _host_link(one.host)
    place: Child = None
    if one.state == "waiting":
        when = "after an event" if one.expected_at is None else html.age(one.expected_at, now)
        place = [f"number {one.place}, ", when]
    return row(
        html.row_head(badge("ok" if one.state == "held" else "warn", one.state)),
        *(() if of_one_host else (link,)),
        html.text_cell(one.url),
        one.client,
        html.age(one.since, now),
        html.age(one.expires_at, now),
        place,
        _drop(one, visitor, "../" if of_one_host else "./"),
        id_=f"lease-{one.id}" if one.id else None,
    )


def _drop(lease: LeaseView, visitor: Visitor, root: str) -> Child:
    if lease.id is None or "admin" not in visitor.roles:
        return None
    consequence = (
        "Its client may still send the request: drop it only if the client is gone. It counts as "
        "used, and the host's next request may start."
    )
    action = f"{root}leases/{quote(lease.id, safe='')}/drop"
    form = _action_form(visitor, action, "Drop this lease now")
    return html.details("Drop", markup("<p>{}</p>", consequence), form, class_="action")


# --- the audit record -------------------------------------------------------------------------


def audit_page(record: AuditStatus | None) -> Page:
    """The state of the audit record, and how to get a report. `record`: None if it is off."""
    if record is None:
        badges: Child = [badge("warn", "off"), " audit.folder is not set: nothing is recorded."]
        return Page("Audit record", "audit", html.paragraph(badges, class_="lead"))
    state: Child = [badge("ok", "on"), " Each request is written before it may be sent."]
    if record.failing is not None:
        then = "no request starts" if record.refuses else "requests go on, and are missing in it"
        state = [badge("bad", "failing"), f" {record.failing}: {then}."]
    sealed = "not yet"
    if record.sealed_at is not None:
        by = "signed" if record.signed else "not signed"
        sealed = f"line {number(record.sealed_line or 0)} at {record.sealed_at}, {by}"
    rows: dict[str, Child] = {
        "Folder": html.code(record.folder),
        "Chain": html.code(record.chain),
        "Lines of the chain": number(record.lines),
        "Last seal of the chain": sealed,
        "Segments in the folder": f"{number(record.segments)} ({number(record.size)} bytes)",
    }
    folder = shlex.quote(record.folder)
    commands = [
        html.code(f"gatekeeper audit report {folder} -o report.html"),
        html.code(f"gatekeeper audit verify {folder}"),
        html.code(f"gatekeeper audit show {folder} HOST"),
    ]
    said = "On this machine, as a user who may read the folder:"
    return Page(
        "Audit record",
        "audit",
        [
            html.paragraph(state, class_="lead"),
            html.table(
                "State of the audit record",
                ("What", "Value"),
                [row(html.row_head(name), html.text_cell(value)) for name, value in rows.items()],
            ),
            markup("<h2>Report, check, search</h2>{}", html.paragraph(said)),
            html.items(commands),
        ],
        15.0,
    )


# --- settings ---------------------------------------------------------------------------------


def config_page(config: ConfigBody) -> Page:
    """The effective settings, section by section."""
    sections: dict[str, list[Html]] = {}
    for setting in config.settings:
        section, _, name = setting.name.rpartition(".")
        value = "not set" if setting.value is None else msgspec.json.encode(setting.value).decode()
        changed = setting.source != "default"
        marks = [
            badge("warn", "waits for a restart") if setting.pending else None,
            "a restart" if setting.needs_restart else "a reload",
        ]
        sections.setdefault(section, []).append(
            row(
                html.row_head(html.code(name)),
                html.text_cell(html.code(value)),
                markup("<em>{}</em>", setting.source) if changed else setting.source,
                marks,
                class_="set" if changed else None,
            )
        )
    said = "Values other than the defaults stand out. The last column says what applies a change "
    body: list[Child] = [html.paragraph(said, "of the file.")]
    heads = ("Setting", "Value", "From", "Changed by")
    for section, rows in sections.items():
        body.append(markup("<h2>{}</h2>", f"[{section}]" if section else "General"))
        body.append(html.table(f"Settings of {section or 'all'}", heads, rows))
    return Page("Config", "config", body, 15.0)
