"""HTML markup into which texts of sites and clients can't inject any (T12).

`tag` escapes everything except its own results. Control characters that change the direction of a
text, or control a terminal, are shown as their code. The module also has the parts that pages
share: tables, forms, badges, numbers and times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Final


class Html(str):
    """Markup that `tag` has made."""

    __slots__ = ()


if TYPE_CHECKING:
    Child = Html | str | int | float | Iterable["Child"] | None
else:
    Child = object

_TEXTS: Final = (str, int, float)
_VOID: Final = frozenset({"br", "col", "hr", "input", "link", "meta"})
_CONTROL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROLS: Final = re.compile(f"[{_CONTROL}]")
_SPECIAL: Final = re.compile(f"[&<>\"'{_CONTROL}]")


def escaped(text: str) -> Html:
    """Return markup that displays a text as it is.

    >>> escaped("<b>" + chr(0x202E))
    '&lt;b&gt;\\\\u202e'
    """
    if _SPECIAL.search(text) is None:  # the common case
        return Html(text)
    return Html(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", escape(text)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return an element with its children, escaped unless they are markup; None is left out.

    Attributes: `class_` is `class`, `data_x` is `data-x`. An attribute that is True has no value;
    False and None are left out.

    >>> tag("td", "a<b", tag("br"), class_="name", hidden=False)
    '<td class="name">a&lt;b<br></td>'
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        named = key.rstrip("_").replace("_", "-")
        parts.append(f" {named}" if value is True else f' {named}="{escaped(str(value))}"')
    parts.append(">")
    if name in _VOID:
        return Html("".join(parts))
    _add(parts, children)
    parts.append(f"</{name}>")
    return Html("".join(parts))


def _add(parts: list[str], children: Iterable[Child]) -> None:
    for child in children:
        if type(child) is Html:
            parts.append(child)
        elif isinstance(child, _TEXTS):
            parts.append(escaped(str(child)))
        elif child is not None:
            _add(parts, child)


# --- forms and badges -------------------------------------------------------------------------


def field(label: str, name: str, value: str, **attributes: str | float | bool | None) -> Html:
    """Return an input with its label; the attributes are those of the input."""
    return tag("label", f"{label} ", tag("input", name=name, value=value, **attributes))


def hidden(name: str, value: str) -> Html:
    """Return a hidden input."""
    return tag("input", type="hidden", name=name, value=value)


def search_form(action: str, *fields: Child, button: str, id_: str | None = None) -> Html:
    """Return a form that requests a page (GET)."""
    return tag(
        "form",
        fields,
        tag("button", button),
        method="get",
        action=action,
        role="search",
        id=id_,
    )


def details(summary: str, *children: Child, **attributes: str | None) -> Html:
    """Return a `details` element: a summary, and content that is shown when it is clicked."""
    return tag("details", tag("summary", summary), children, **attributes)


_ICONS: Final = {"ok": "●", "warn": "▲", "bad": "■", "idle": "○"}


def badge(kind: str, text: str, *, id_: str | None = None) -> Html:
    """Return a state as a word with a symbol, so that it does not depend on its colour alone."""
    return tag(
        "span",
        tag("span", _ICONS[kind], aria_hidden="true"),
        " ",
        text,
        class_=f"badge {kind}",
        id=id_,
    )


# --- tables -----------------------------------------------------------------------------------


def table(
    caption: str,
    heads: Sequence[Child],
    rows: Iterable[Html],
    *,
    empty: Child = None,
    id_: str | None = None,
) -> Html:
    """Return a table that can be scrolled horizontally if it is too wide.

    `heads` are cells or texts. `empty` is shown instead of a table without rows; `id_` is the id of
    the table body.
    """
    body = list(rows)
    if not body and empty is not None:
        return tag("p", empty, class_="empty")
    cells = [one if isinstance(one, Html) else tag("th", one, scope="col") for one in heads]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", cells)),
            tag("tbody", body, id=id_),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def num_head(text: str) -> Html:
    """Return a header cell for a column of numbers."""
    return tag("th", text, scope="col", class_="num")


def row(*cells: Child, class_: str | None = None, id_: str | None = None) -> Html:
    """Return a table row; cells that are not `td` or `th` elements become `td`."""
    made = [one if _is_cell(one) else tag("td", one) for one in cells]
    return tag("tr", made, class_=class_, id=id_)


def _is_cell(one: Child) -> bool:
    return isinstance(one, Html) and one.startswith(("<td", "<th"))


def num(value: Child, **attributes: str | None) -> Html:
    """Return a cell with a number, or an empty cell for None."""
    if value is None and not attributes:
        return _NO_NUMBER
    return tag("td", value, class_="num", **attributes)


_NO_NUMBER: Final = tag("td", class_="num")


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
    for size, unit, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    if whole >= 60:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
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
    return tag("time", text or whole, datetime=iso, title=None if text is None else whole)


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
