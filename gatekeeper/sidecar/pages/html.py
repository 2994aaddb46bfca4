"""Markup, made so that a text of a site or a client can't become any (T12).

`tag` escapes everything but what it made itself. Controls that turn the direction of a text, or
steer a terminal, are shown by their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Final

__all__ = ["Child", "Html", "age", "duration", "moment", "number", "shown", "tag"]


class Html(str):
    """Markup: what `tag` made."""

    __slots__ = ()


if TYPE_CHECKING:
    Child = Html | str | int | float | Iterable["Child"] | None
else:
    Child = object

_TEXTS: Final = (str, int, float)
_VOID: Final = frozenset({"br", "col", "hr", "input", "link", "meta"})
_CONTROL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROLS: Final = re.compile(f"[{_CONTROL}]")
_ODD: Final = re.compile(f"[&<>\"'{_CONTROL}]")


def shown(text: str) -> Html:
    """A text as markup that shows it.

    >>> shown("<b>" + chr(0x202E))
    '&lt;b&gt;\\\\u202e'
    """
    if _ODD.search(text) is None:  # as most texts are
        return Html(text)
    return Html(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", escape(text)))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Attributes: `class_` is `class`, `data_x` is `data-x`; True has no value, False
    and None are left out.

    >>> tag("td", "a<b", tag("br"), class_="name", hidden=False)
    '<td class="name">a&lt;b<br></td>'
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        named = key.rstrip("_").replace("_", "-")
        parts.append(f" {named}" if value is True else f' {named}="{shown(str(value))}"')
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
            parts.append(shown(str(child)))
        elif child is not None:
            _add(parts, child)


def duration(seconds: float) -> str:
    """Seconds for people: two units at most.

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
    """How long ago, or in what time; the moment itself stands in the title."""
    if at is None:
        return None
    seconds = (now - at).total_seconds()
    if abs(seconds) < 1:
        return moment(at, "now")
    whole = float(round(seconds))
    return moment(at, f"{duration(whole)} ago" if whole > 0 else f"in {duration(-whole)}")


def moment(at: datetime, text: str | None = None) -> Html:
    """A moment in UTC."""
    whole = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    iso = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return tag("time", text or whole, datetime=iso, title=None if text is None else whole)


def number(value: float | None) -> str:
    """A number for people; a dash for none.

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
