"""The pages about the current state: overview, hosts, one host, waiting requests, settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from gatekeeper import urls
from gatekeeper.client.wire import HostBody
from gatekeeper.clock import utc
from gatekeeper.config import host_named
from gatekeeper.pacing.waiters import HELD_UP, STATES, ClockView
from gatekeeper.sidecar.pages import html
from gatekeeper.sidecar.pages.html import Child, Html, Row, badge, card, element, link, number, row
from gatekeeper.sidecar.pages.recent_decisions import NAMES
from gatekeeper.sidecar.pages.shell import Page, Visitor, post_form
from gatekeeper.sidecar.pages.state import LeaseView, Overview
from gatekeeper.sidecar.routes.hosts import HostQuery, host_list, host_of
from gatekeeper.sidecar.routes.operators import LeaseQuery, config_body, lease_list, overview_of
from gatekeeper.sidecar.routing import Call, PageQuery, Problem
from gatekeeper.sidecar.service import Service

REFRESH: Final = 3.0

# --- overview ---------------------------------------------------------------------------------


_VERDICTS: Final = ("allow", "deny", "defer")
_CAUSES: Final = {"file": "its robots.txt could not be fetched: "}
"""How the cause of a hold-up begins, by its kind."""


async def overview(service: Service, call: Call, visitor: Visitor) -> Page:
    """The overview of the service."""
    return overview_page(service, await overview_of(service))


def overview_page(service: Service, overview: Overview) -> Page:
    """The overview: first what needs attention, then numbers and charts."""
    up = html.duration((overview.now - overview.started_at).total_seconds())
    body = [
        _attention(overview),
        html.cards(_cards(overview)),
        element("section", id="charts", data_keep="charts", hidden=True),  # see charts.js
        _recent_table(service),
        html.paragraph(f"{overview.user_agent}, version {overview.version}, up {up}"),
    ]
    files = ("vendor/uPlot.min.css", "vendor/uPlot.iife.min.js", "charts.js")
    return Page("Overview", body, REFRESH, files)


def _attention(overview: Overview) -> Html:
    warnings = list(_warnings(overview))
    if not warnings:
        return html.paragraph(badge("ok", "Nothing needs attention."), class_="fine")
    return html.items(warnings, class_="look", aria_label="Needs attention")


def _warnings(overview: Overview) -> Iterator[Child]:
    if not overview.ready:
        yield badge("bad", f"Not ready: {overview.state}")
    if not overview.reload.ok:
        text = ": the previous settings are in force; see the log"
        yield [badge("bad", "The last reload failed"), text]
    if overview.reload.needs_restart:
        names = ", ".join(overview.reload.needs_restart)
        yield [badge("warn", "A restart is needed"), " for ", link("config", names)]
    if overview.fleet is not None and overview.fleet.get("state") != "connected":
        state, why = overview.fleet.get("state"), overview.fleet.get("recovery")
        yield [badge("bad", f"The store of the fleet is {state}"), f": {why}" if why else ""]
    for host in overview.held_up:
        yield [_host_link(host.host), " ", _holdup(host, overview.now)]
    counts = {state: overview.host_states[state] for state in HELD_UP}
    if sum(counts.values()) > len(overview.held_up):
        shown = {state: f"{number(count)} {state}" for state, count in counts.items() if count}
        links = [link(f"hosts?state={state}", text) for state, text in shown.items()]
        yield ["All: ", html.listed(links)]
    if overview.oldest_wait is not None and overview.oldest_wait > 60:
        said = badge("warn", f"A request has waited for {html.duration(overview.oldest_wait)}")
        whom = _host_link(overview.oldest_wait_host or "")
        yield [said, " for ", whom, "; ", link("waiting", "see who waits")]
    if overview.overdue:
        leases = "lease is" if overview.overdue == 1 else "leases are"
        over = badge("warn", f"{number(overview.overdue)} {leases} nearly over")
        yield [over, " and not reported: ", link("waiting?state=held", "see them")]
    if overview.rates["robots_failed"]:
        failed = int(overview.rates["robots_failed"])
        fetches = "fetch" if failed == 1 else "fetches"
        yield badge("warn", f"{number(failed)} robots.txt {fetches} failed in the last 10 s")


def _holdup(host: HostBody, now: datetime) -> Child:
    """Return the state of a host that is held up, until when, and why."""
    shown = next((view for view in host.clocks if str(view) == host.why), None)
    cause = None if shown is None else f": {_CAUSES.get(shown.kind, '')}{shown.cause}"
    waiting = f"; {number(host.waiting)} waiting" if host.waiting else None
    return [html.state_badge(host.state), _until(host, now), cause, waiting]


def _until(host: HostBody, now: datetime) -> Child:
    if host.next_at is None:
        return " until it is resumed" if host.state == "paused" else None
    day = "" if host.next_at.date() == now.date() else f"{host.next_at:%Y-%m-%d} "
    at = html.moment(host.next_at, f"{day}{host.next_at:%H:%M} UTC")
    return [" until ", at, " (", html.age(host.next_at, now), ")"]


def _host_link(host: str) -> Html:
    return link(f"hosts/{quote(host, safe='')}", host)


def _cards(seen: Overview) -> Iterator[Html]:
    rates = {name: seen.rates[name] for name in _VERDICTS}
    known = [rate for rate in rates.values() if rate is not None]
    total = sum(known) if known else None
    yield card(link("live", "Decisions per second"), total, *_counted(rates))
    hosts = {state: count for state, count in seen.host_states.items() if state != "waiting"}
    counting = None if seen.hosts_complete else "still counting"
    yield card(link("hosts", "Hosts"), seen.hosts, *_counted(hosts), counting)
    wait = seen.oldest_wait
    oldest = None if wait is None else f"the oldest for {html.duration(wait)}"
    yield card(link("waiting?state=waiting", "Waiting requests"), seen.waiting, oldest)
    late = _counted({"nearly over": seen.overdue, "expired": seen.expired})
    yield card(link("waiting?state=held", "Leases out"), seen.leases, *late)
    yield card("robots.txt fetched", seen.robots_ok, *_counted({"failed": seen.robots_failed}))
    if seen.cache_share is not None:
        yield card("From memory", f"{100 * seen.cache_share:.1f} %")
    if seen.fleet is not None:
        yield card("Members of the fleet", seen.fleet.get("members"), seen.fleet.get("state"))


def _counted(counts: Mapping[str, float | None]) -> list[str]:
    return [f"{html.short_number(count)} {name}" for name, count in counts.items() if count]


def _recent_table(service: Service) -> Html:
    """Return the last two minutes as a table, for readers who can't see the charts."""
    body = service.operators.series.body()
    rows = [
        row(html.moment(utc(at), f"{utc(at):%H:%M:%S}"), *(body.values[name][n] for name in NAMES))
        for n, at in list(enumerate(body.times))[:-13:-1]
    ]
    columns = ", ".join(["until (UTC)", *(f"{name.replace('_', ' ')}:num" for name in NAMES)])
    empty = "The first numbers appear ten seconds after the start."
    table = html.table("The last two minutes", columns, rows, empty=empty)
    return html.details("The last two minutes as a table", table)


# --- hosts ------------------------------------------------------------------------------------

_COLUMNS: Final = {
    "Host": ("host", "name"),
    "State": ("state", ""),
    "robots.txt": (None, ""),
    "Interval": ("interval", "num"),
    "In flight": ("in_flight", "num"),
    "Waiting": ("waiting", "num"),
    "Due in": ("next", "num"),
    "Last status": ("status", "num"),
    "Allowed": ("allowed", "num"),
    "Denied": ("denied", "num"),
}
"""The columns, each with the name to sort by and the class of its cells."""


async def hosts_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """A page of hosts. Its URL contains the filter, so that it can be shared."""
    query, now = call.parameters(HostQuery), utc(service.clock.wall())
    listed = await host_list(service, query)
    more = "" if listed.complete else " so far; the scan goes on"
    columns: dict[str, str] = {
        _head(text, *column, query): column[1] for text, column in _COLUMNS.items()
    }
    rows = [_host_row(host, now) for host in listed.hosts]
    search = html.search("Part of the name", "q", query.q)
    kept = html.hidden("state", query.state), html.hidden("sort", query.sort)
    body = [
        html.search_form("hosts", search, kept, button="Filter"),
        _state_links("hosts", query, {state: state for state in ("any", *STATES)}),
        html.paragraph(f"{number(listed.total)} hosts{more}", aria_live="polite"),
        html.table("Hosts", columns, rows, empty=_no_hosts(query)),
        _pager("hosts", query, listed.pages),
    ]
    return Page("Hosts", body, REFRESH)


def _no_hosts(query: HostQuery) -> Child:
    if query.q or query.state != "any" or query.page > 1:
        return ["No host matches. ", link("hosts", "Show all")]
    example = "curl -sG .../v1/check --data-urlencode url=https://example.org/"
    return ["No hosts yet. Ask about a URL: ", html.code(example)]


def _head(text: str, column: str | None, kind: str, query: HostQuery) -> Html:
    if column is None:
        return html.head(text, kind)
    current, down = query.sort.lstrip("-") == column, query.sort.startswith("-")
    # The first click sorts numbers from the greatest down, but names from the first up.
    upward = down if current else column == "host"
    address = _address("hosts", query, sort=column if upward else f"-{column}", page=1)
    sign, order = (" ▼", "descending") if down else (" ▲", "ascending")
    mark = element("span", sign if current else None, aria_hidden="true")
    sorts = element("a", text, mark, href=address)
    return html.head(sorts, kind, aria_sort=order if current else None)


def _host_row(host: HostBody, now: datetime) -> Row:
    """Return the row of a host. Zero and missing values are empty cells.

    Rows are most of what a browser has to draw, and the other values stand out more.
    """
    interval = None
    if host.interval is not None:
        seconds = html.duration(host.interval)
        interval = element("span", seconds, title=host.interval_source)
    return row(
        _host_link(host.host),
        html.state_badge(host.state),
        host.robots and [html.state_badge(host.robots), " ", html.age(host.robots_fetched_at, now)],
        interval,
        host.in_flight or None,
        host.waiting or None,
        _due(host, now),
        host.last_status,
        host.allowed or None,
        host.denied or None,
        id_=f"host-{host.host}",
    )


def _due(host: HostBody, now: datetime) -> Child:
    if host.state == "paused":
        return "when resumed"
    if host.next_at is None:
        return {"busy": "after the lease", "free": "now"}.get(host.state, "not known")
    left = (host.next_at - now).total_seconds()
    return "now" if left <= 0 else html.moment(host.next_at, html.duration(math.ceil(left)))


def _address(path: str, query: PageQuery, **changes: Any) -> str:
    """Return the URL of the page with other filters; default values are left out."""
    chosen = msgspec.to_builtins(msgspec.structs.replace(query, **changes))
    return f"{path}?{urlencode(chosen)}" if chosen else path


def _state_links(path: str, query: HostQuery | LeaseQuery, states: Mapping[str, str]) -> Html:
    """Return links to the same page for each state; `states` maps values to their labels."""
    links = []
    for state, text in states.items():
        here = "true" if state == query.state else None
        links.append(link(_address(path, query, state=state, page=1), text, aria_current=here))
    return element("nav", links, class_="chips", aria_label="State")


def _pager(path: str, query: PageQuery, pages: int, *, at: str = "") -> Html | None:
    """Return the links to other pages of a table; `at` is the place in the page to show."""
    if pages <= 1:
        return None
    named = {"First": 1, "Previous": query.page - 1, "Next": query.page + 1, "Last": pages}
    links = [
        [link(_address(path, query, page=page) + at, text), " "]
        for text, page in named.items()
        if 1 <= page <= pages and page != query.page
    ]
    here = f"Page {number(query.page)} of {number(pages)} "
    return element("nav", here, links, class_="pager", aria_label="Pages of the table")


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


async def host_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """The page of one host: its state and the actions, its clocks and their sources, its files,
    and a page of its waiting requests and leases."""
    name, query = host_named(call.params["host"]), call.parameters(PageQuery)
    leases = LeaseQuery(page=query.page, per_page=query.per_page)
    listed = lease_list(service, leases, name=name)
    host, now = await host_of(service, name), utc(service.clock.wall())
    none = html.paragraph("No clock is running: a request may start now.", class_="empty")
    clocks = html.items(map(_sentence, host.clocks), class_="clocks")
    body = [
        html.paragraph(_status(host, now), class_="lead"),
        _actions(service, host, visitor),
        [element("h2", "Clocks"), clocks if host.clocks else none],
        _fleet_holds(host, now),
        [element("h2", "robots.txt"), _origins(service, host.host, now)],
        element("h2", "Waiting requests and leases", id="leases"),
        _leases_table(listed.leases, visitor, now, of_one_host=True),
        _pager(quote(host.host, safe=""), query, listed.pages, at="#leases"),
    ]
    return Page(host.host, body, REFRESH)


def _fleet_holds(host: HostBody, now: datetime) -> Child:
    """Return what the members of a fleet hold of a host; None without a fleet."""
    if host.fleet is None:
        return None
    rows = []
    for scope in host.fleet:
        known = {
            f"{number(scope.waiting)} waiting": scope.waiting,
            f"blocked: {scope.block_reason}": scope.blocked_until,
            "paused": scope.paused,
            f"{number(scope.day_pages)} pages today": scope.day_pages,
        }
        notes = ", ".join(text for text, there in known.items() if there)
        held = [[f"{one.member}: since ", html.age(one.since, now)] for one in scope.holds]
        holds = html.items(held) if held else None
        rows.append([element("strong", scope.scope), notes and f": {notes}", holds])
    return [element("h2", "Held by members of the fleet"), html.items(rows, class_="clocks")]


def _status(host: HostBody, now: datetime) -> Child:
    if host.state in HELD_UP:
        return _holdup(host, now)
    told: Child = "A request may start now."
    if host.next_at is not None and host.next_at > now:
        told = ["The next request may start ", html.age(host.next_at, now), "."]
    elif host.state == "busy":
        told = f"{host.in_flight} in flight; the next may start when one ends or is answered."
    return [html.state_badge(host.state), " ", told]


def _sentence(view: ClockView) -> Child:
    seconds = "" if view.seconds is None else html.duration(view.seconds)
    text = _SENTENCES.get(view.kind, view.kind).format(seconds=seconds)
    until = view.until if view.kind == "override" else None
    end = "" if until is None else f" (until {until:%Y-%m-%dT%H:%M:%SZ})"
    return [
        [element("strong", view.scope), f" {text}: {view.cause}{end}"],
        element("em", " This one applies.") if view.decides else None,
        element("em", " pacing.max_interval limits it.") if view.clamped else None,
    ]


def _origins(service: Service, host: str, now: datetime) -> Html:
    directory, rows = service.gate.parts.directory, []
    for origin in service.operators.origins(host):
        record = directory.recall(origin)
        if record is None:
            rows.append(row(origin, html.state_badge(None), *[None] * 5))
            continue
        standing = record.standing(service.clock)
        text, size, reason = standing.robots, "-", ""
        if text is None:
            reason = f" {standing.reason.value.replace('_', ' ')}"
        else:
            findings = bool(directory.coding(origin)) + len(text.findings)
            size = f"{number(text.size)} bytes" + (f", {findings} findings" if findings else "")
        state = html.state_badge(standing.state.value), reason
        times = [html.age(utc(at), now) for at in (standing.fetched_at, standing.expires_at)]
        via = [" via ", standing.hops[-1]] if standing.hops else None
        explain = link(f"../explain?{urlencode({'url': origin + '/'})}", "explain")
        history = link(f"../history?{urlencode({'origin': origin})}", "history")
        more = explain, " ", history
        rows.append(row(origin, state, standing.status, *times, [size, via], more))
    columns = "Origin, State, Status:num, Fetched, Expires, Text, More"
    empty = "No robots.txt of this host is in memory."
    return html.table("Origins and their files", columns, rows, empty=empty)


_ACTIONS: Final = {
    "refresh": (
        "Fetch robots.txt again",
        "This takes the host's next lease: one page fewer is fetched in that time. The old file "
        "stays in force until then.",
        "{}",
    ),
    "pause": (
        "Pause",
        "No request to this host starts until it is resumed, even after a restart. Waiting "
        "requests keep waiting; leases that are out continue.",
        "{}",
    ),
    "resume": ("Resume", "Requests start again as the clocks allow. A block remains.", "{}"),
    "block": (
        "Block",
        "No request starts for this time, even after a restart. 0 lifts the current block.",
        '{"seconds": 600}',
    ),
}
"""The actions on a host: their titles, their consequences, and an example of their JSON."""
_BLOCK_FIELDS: Final = (
    html.field("Seconds", "seconds", "600", type="number", min=0, max=31_536_000, required=True),
    html.field("Reason", "reason", "operator", maxlength=200),
)


def _actions(service: Service, host: HostBody, visitor: Visitor) -> Html:
    if "admin" not in visitor.roles:
        said = "Your token has no admin role: you can only look."
        return html.paragraph(said, class_="empty")
    paused, made = host.state == "paused", []
    for action in ("refresh", "resume" if paused else "pause", "block"):
        title, consequence, body = _ACTIONS[action]
        path = f"hosts/{quote(host.host, safe='')}/{action}"
        json = f"-H 'Content-Type: application/json' -d '{body}'"
        curl = html.code(f"curl -X POST {_base_url(service)}/v1/{path} {json}")
        fields = _BLOCK_FIELDS if action == "block" else None
        form = post_form(f"../{path}", visitor, f"{title} now", fields)
        text = element("p", consequence), element("p", curl)
        made.append(html.details(title, text, form, class_="action", id=f"action-{action}"))
    # What was typed is kept until the set of actions changes.
    return element("div", made, class_="actions", data_keep=f"actions {paused}")


def _base_url(service: Service) -> str:
    server = service.config.server
    if server.socket is not None:
        return "--unix-socket " + server.socket + " http://localhost"
    scheme = "https" if server.tls_cert is not None else "http"
    return f"{scheme}://{urls.bracketed(server.host)}:{server.port}"


# --- leases and waiters -----------------------------------------------------------------------


async def waiting_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """Waiting requests and held leases: for what, since when, and until when."""
    query, now = call.parameters(LeaseQuery), utc(service.clock.wall())
    listed = lease_list(service, query)
    states = {"any": "all", "waiting": f"waiting {listed.waiting}", "held": f"held {listed.held}"}
    search = html.search("Part of the host", "host", query.host)
    client, state = html.search("Client", "client", query.client), html.hidden("state", query.state)
    body = [
        html.search_form("waiting", search, client, state, button="Filter"),
        _state_links("waiting", query, states),
        html.paragraph(f"{number(listed.total)} in total", aria_live="polite"),
        _leases_table(listed.leases, visitor, now),
        _pager("waiting", query, listed.pages),
    ]
    return Page("Waiting", body, REFRESH)


def _leases_table(
    leases: list[LeaseView], visitor: Visitor, now: datetime, *, of_one_host: bool = False
) -> Html:
    host = "" if of_one_host else "Host, "
    columns = f"State, {host}URL:url, Client, Since, Ends, Expected, Action"
    rows = [_lease_row(lease, visitor, now, of_one_host) for lease in leases]
    empty = "No request is waiting, and no lease is out."
    return html.table("Leases and waiting requests", columns, rows, empty=empty)


def _lease_row(one: LeaseView, visitor: Visitor, now: datetime, of_one_host: bool) -> Row:
    place: Child = None
    if one.state == "waiting":
        when = "after an event" if one.expected_at is None else html.age(one.expected_at, now)
        place = [f"number {one.place}, ", when]
    return row(
        badge("ok" if one.state == "held" else "warn", one.state),
        *(() if of_one_host else (_host_link(one.host),)),
        one.url,
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
    form = post_form(action, visitor, "Drop this lease now")
    return html.details("Drop", element("p", consequence), form, class_="action")


# --- the audit record -------------------------------------------------------------------------


async def audit_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """The state of the audit record, and how to get a report."""
    if service.gate.parts.audit is None:
        off: Child = [badge("warn", "off"), " audit.folder is not set: nothing is recorded."]
        return Page("Audit record", html.paragraph(off, class_="lead"))
    try:
        record = await service.gate.parts.audit.status()
    except OSError as error:
        raise Problem(503, "audit", f"the audit record can't be read: {error}") from error
    state: Child = [badge("ok", "on"), " Each request is written before it may be sent."]
    if record.failing is not None:
        then = "no request starts" if record.refuses else "requests go on, and are missing in it"
        state = [badge("bad", "failing"), f" {record.failing}: {then}."]
    sealed = "not yet"
    if record.sealed_at is not None:
        by = "signed" if record.signed else "not signed"
        sealed = f"line {number(record.sealed_line or 0)} at {record.sealed_at}, {by}"
    rows = [
        row("Folder", html.code(record.folder)),
        row("Chain", html.code(record.chain)),
        row("Lines of the chain", number(record.lines)),
        row("Last seal of the chain", sealed),
        row("Segments in the folder", f"{number(record.segments)} ({number(record.size)} bytes)"),
    ]
    folder = shlex.quote(record.folder)
    commands = f"report {folder} -o report.html", f"verify {folder}", f"show {folder} HOST"
    said = "On this machine, as a user who may read the folder:"
    body = [
        html.paragraph(state, class_="lead"),
        html.table("State of the audit record", "What, Value:url", rows),
        [element("h2", "Report, check, search"), html.paragraph(said)],
        html.items(html.code(f"gatekeeper audit {one}") for one in commands),
    ]
    return Page("Audit record", body, 15.0)


# --- settings ---------------------------------------------------------------------------------


async def config_page(service: Service, call: Call, visitor: Visitor) -> Page:
    """The effective settings, section by section."""
    sections: dict[str, list[Row]] = {}
    for setting in config_body(service).settings:
        section, _, name = setting.name.rpartition(".")
        value = "not set" if setting.value is None else msgspec.json.encode(setting.value).decode()
        changed = setting.source != "default"
        source = element("em", setting.source) if changed else setting.source
        waits = badge("warn", "waits for a restart") if setting.pending else None
        by = waits, "a restart" if setting.needs_restart else "a reload"
        shown = row(
            html.code(name), html.code(value), source, by, class_="set" if changed else None
        )
        sections.setdefault(f"[{section}]" if section else "General", []).append(shown)
    said = "Values other than the defaults stand out. The last column says what applies a change "
    columns = "Setting, Value:url, From, Changed by"
    tables = [html.section(title, columns, rows) for title, rows in sections.items()]
    return Page("Config", [html.paragraph(said, "of the file."), tables], 15.0)
