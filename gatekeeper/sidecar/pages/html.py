"""HTML markup into which texts of sites and clients can't inject any (T12).

`markup` escapes everything except its own results. Control characters that change the direction of
a text, or control a terminal, are shown as their code. The module also has the parts that pages
share: tables, forms, badges, numbers and times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Final, LiteralString, NamedTuple


class Html(str):
    """Markup that `markup` has made."""

    __slots__ = ()


if TYPE_CHECKING:
    Child = Html | str | int | float | Iterable["Child"] | None
else:
    Child = object

Attribute = str | float | bool | None
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def escaped(text: str) -> Html:
    """Return markup that displays a text as it is.

    >>> escaped("<b>" + chr(0x202E))
    '&lt;b&gt;\\\\u202e'
    """
    return Html(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", escape(text)))


def markup(text: LiteralString, /, *parts: Child) -> Html:
    """Return `text` with a part in place of each `{}`, escaped unless it is markup.

    A part may be a sequence of parts; None is left out.

    >>> markup('<td class="{}">{}</td>', "name", ["a<b", markup("<br>"), None])
    '<td class="name">a&lt;b<br></td>'
    """
    return Html(text.format(*map(_markup_of, parts)))


def _markup_of(part: Child) -> Html:
    if isinstance(part, Html):
        return part
    if isinstance(part, str | int | float):
        return escaped(str(part))
    return Html("" if part is None else "".join(map(_markup_of, part)))


def attributes(**values: Attribute) -> Html:
    """Return attributes for a tag, each after a space.

    `class_` is `class`, `data_x` is `data-x`. An attribute that is True has no value; False and
    None are left out.

    >>> attributes(class_="name", data_x="<", required=True, hidden=False)
    ' class="name" data-x="&lt;" required'
    """
    found = []
    for key, value in values.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            found.append(f" {name}")
        elif value is not None and value is not False:
            found.append(f' {name}="{escaped(str(value))}"')
    return Html("".join(found))


def element(name: LiteralString, /, *children: Child, **own: Attribute) -> Html:
    """Return an element with its content and its attributes, see `attributes`.

    >>> element("td", "a<b", [1, None], class_="name")
    '<td class="name">a&lt;b1</td>'
    """
    return markup("<{}{}>{}</{}>", name, attributes(**own), children, name)


def code(text: str | None) -> Html | None:
    """Return a text as code; None for None."""
    return None if text is None else element("code", text)


def link(url: str, text: str, **own: Attribute) -> Html:
    """Return a link with a text."""
    return element("a", text, href=url, **own)


def items(children: Iterable[Child], **own: Attribute) -> Html:
    """Return a list of items."""
    return element("ul", [element("li", one) for one in children], **own)


def paragraph(*children: Child, class_: str = "note", **own: Attribute) -> Html:
    """Return a paragraph, of a class of `app.css`."""
    return element("p", children, class_=class_, **own)


# --- forms and badges -------------------------------------------------------------------------


def field(label: str, name: str, value: str, **own: Attribute) -> Html:
    """Return an input with its label; the attributes are those of the input."""
    return markup("<label>{} <input{}></label>", label, attributes(name=name, value=value, **own))


def search(label: str, name: str, value: str) -> Html:
    """Return an input for a part of a name, as long as the queries of lists accept."""
    return field(label, name, value, type="search", maxlength=253)


def choice(label: str, name: str, chosen: str, values: Iterable[str]) -> Html:
    """Return a list to choose a value from, with its label; an empty value is shown as "any"."""
    options = [element("option", one or "any", value=one, selected=one == chosen) for one in values]
    return element("label", label, " ", element("select", options, name=name))


def hidden(name: str, value: str) -> Html:
    """Return a hidden input."""
    return markup('<input type="hidden" name="{}" value="{}">', name, value)


def search_form(action: str, *fields: Child, button: str, id_: str | None = None) -> Html:
    """Return a form that requests a page (GET)."""
    inner = fields, element("button", button)
    return element("form", inner, method="get", action=action, role="search", id=id_)


def details(summary: str, *children: Child, **own: Attribute) -> Html:
    """Return a `details` element: a summary, and content that is shown when it is clicked."""
    return element("details", element("summary", summary), children, **own)


_ICONS: Final = {"ok": "●", "warn": "▲", "bad": "■", "idle": "○"}


def badge(kind: str, text: str, *, id_: str | None = None) -> Html:
    """Return a state as a word with a symbol, so that it does not depend on its colour alone."""
    icon = element("span", _ICONS[kind], aria_hidden="true")
    return element("span", icon, " ", text, class_=f"badge {kind}", id=id_)


_STATES: Final = {
    "ok": ("allow", "waiting", "busy", "parsed"),
    "warn": ("defer", "paused", "stale", "override"),
    "bad": ("deny", "deferred", "blocked", "unreachable"),
}
"""The kinds of badges, each with the verdicts and states that have it; the others are "idle"."""


def state_badge(state: str | None) -> Html:
    """Return the badge for a verdict, or for the state of a host or of a file."""
    kind = next((kind for kind, states in _STATES.items() if state in states), "idle")
    return badge(kind, state or "none")


# --- tables and cards -------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a table: its cells, and the attributes of its element."""

    cells: tuple[Child, ...]
    own: dict[str, Attribute]


def row(*cells: Child, **own: Attribute) -> Row:
    """Return a row. The first cell is its header, unless that is empty; numbers are formatted."""
    return Row(cells, own)


def table(
    caption: str,
    columns: str | Mapping[str, str],
    rows: Iterable[Row],
    *,
    empty: Child = None,
    id_: str | None = None,
) -> Html:
    """Return a table that can be scrolled horizontally if it is too wide.

    `columns` are the headings with the class of their cells, as in "Name, Bytes:num, URL:url":
    "num" is for numbers, "url" for long texts, which may break anywhere. A mapping of headings to
    classes may have the results of `head` in place of texts. `empty` is shown instead of a table
    without rows; `id_` is the id of the table body.
    """
    if isinstance(columns, str):
        parts = (one.partition(":") for one in columns.split(", "))
        columns = {text: kind for text, _, kind in parts}
    body = [_row(one, columns.values()) for one in rows]
    if not body and empty is not None:
        return paragraph(empty, class_="empty")
    heads = [text if isinstance(text, Html) else head(text, kind) for text, kind in columns.items()]
    top = element("caption", caption), element("thead", element("tr", heads))
    return scrolled(caption, element("table", top, element("tbody", body, id=id_)))


def section(title: str, columns: str, rows: Iterable[Row], *, empty: Child = None) -> Html:
    """Return a table below a heading, see `table`."""
    return markup("{}{}", element("h2", title), table(title, columns, rows, empty=empty))


def _row(one: Row, kinds: Iterable[str]) -> Html:
    cells: list[Html] = []
    for kind, child in zip(kinds, one.cells, strict=True):
        shown = number(child) if isinstance(child, int | float) else child
        if not cells and child:
            cells.append(element("th", shown, scope="row", class_=kind or None))
        else:
            cells.append(element("td", shown, class_=kind or None))
    return element("tr", cells, **one.own)


def head(child: Child, kind: str, **own: Attribute) -> Html:
    """Return the header cell of a column."""
    return element("th", child, scope="col", class_="num" if kind == "num" else None, **own)


def scrolled(label: str, *children: Child) -> Html:
    """Return a region that can be scrolled horizontally if it is too wide."""
    return element("div", children, class_="scroll", tabindex=0, role="region", aria_label=label)


def cards(children: Iterable[Html]) -> Html:
    """Return a section of cards."""
    return element("section", children, class_="cards", aria_label="Numbers")


def card(name: Child, value: float | str | None, *more: Child) -> Html:
    """Return a card with a number, and smaller texts below it; a long number is in its title."""
    text, exact = value, value
    if not isinstance(value, str):
        text, exact = short_number(value), number(value)
    shown = paragraph(text, class_="value", title=None if text == exact else exact)
    below = paragraph(listed(more), class_="more")
    return element("div", element("h2", name), shown, below, class_="card")


def listed(parts: Iterable[Child]) -> list[Child]:
    """Return the parts with commas between them, without None. No part is broken between two
    lines."""
    whole: list[Child] = []
    for part in parts:
        if part is not None:
            whole += [", " if whole else None, element("span", part, class_="whole")]
    return whole


# --- numbers and times ------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format seconds for people, in two units at most.

    >>> duration(0.25), duration(7), duration(3700), duration(200_000)
    ('250 ms', '7 s', '1 h 1 min', '2 d 7 h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, below, small in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def age(at: datetime | None, now: datetime) -> Html | None:
    """Return how long ago a time is, or in how long; the time itself is in the title."""
    if at is None:
        return None
    seconds = (now - at).total_seconds()
    if abs(seconds) < 1:
        return moment(at, "now")
    whole = float(round(seconds))
    return moment(at, f"{duration(whole)} ago" if whole > 0 else f"in {duration(-whole)}")


def moment(at: datetime, text: str | None = None) -> Html:
    """Return a `time` element: the time in UTC, or `text` with the time in the title."""
    whole = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    iso = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    title = None if text is None else whole
    return element("time", text or whole, datetime=iso, title=title)


def short_number(value: float | None) -> str:
    """Format a number in nine characters at most; None is a dash.

    >>> short_number(1234567), short_number(12_345_678), short_number(2.5e12), short_number(None)
    ('1,234,567', '12.3 M', '2,500 G', '-')
    """
    if value is None or abs(value) < 1e7:
        return number(value)
    size, unit = (1e9, "G") if abs(value) >= 1e10 else (1e6, "M")
    return f"{number(value / size)} {unit}"


def number(value: float | None) -> str:
    """Format a number for people; None is a dash.

    >>> number(1234567), number(58.53), number(0.123), number(None)
    ('1,234,567', '58.5', '0.12', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
