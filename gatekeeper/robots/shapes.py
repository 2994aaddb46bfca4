"""The rules of RFC 9309 by shape: plain prefixes, exact paths, wildcard patterns."""

from __future__ import annotations

import re

from gatekeeper.robots import normal
from gatekeeper.robots.glance import PLAIN
from gatekeeper.robots.patterns import squeeze

__all__ = ["SortedRules"]

_PECULIAR = re.compile(rf"[^{re.escape(PLAIN)}\n]").search
"""What a value may hold that is more, or less, than a prefix in its normal form."""
_LIKE_AN_ESCAPE = re.compile(r"\*[0-9A-F%]").search
"""A piece behind a star may be found from within an escape on; `%` may stand for a digit."""
_BEGINS_IN_ESCAPE = re.compile(r"\*[0-9A-F]").search
"""The same for values in their normal form."""
_CHANGED = re.compile("%3A|%2F").search
_SPECIAL = re.compile("[*?]").search
_TWOFOLD = re.compile("[/:]|%3A|%2F").search
"""What RFC-25 speaks of."""


class SortedRules:
    """The rules of a set by shape, each pattern with its *entry*.

    An entry is one number: octets, whether the rule allows, and how far from the end of the
    set it stands, from the high bits to the low ones. So the greatest entry is the longest
    match, of equal ones an Allow (RFC-18), of these the first in the file.
    """

    def __init__(self, found: list[tuple[str, str]]) -> None:
        """`found`: of each rule whether it is a `dis`allow, and its value."""
        self.count = len(found)
        self.shift = shift = (len(found) + 1).bit_length()
        """Bits of an entry that say where the rule stands; the next one up: it allows."""
        self.prefixes = {"": 1 << shift}  # no rule: allowed (RFC-19)
        self.exact: dict[str, int] = {}
        """Paths that a `$` ends (RFC-28)."""
        self.wild: dict[str, int] = {}
        self.escapes = False
        """An escape stands in some pattern: no path may be compared as it comes."""
        self.twofold = False
        """Some pattern with a `?` has a `:` or `/` that may meet the query of a path (RFC-25)."""
        self.inherit = False
        """A prefix is longer than it looks: its stars at the end count (RFC-17)."""
        values = [value for _, value in found]
        joined = "\n".join(values)
        self.like_escapes = _LIKE_AN_ESCAPE(joined) is not None
        """Some piece may be found from within an escape on: see `normal.rfc_path`."""
        if _PECULIAR(joined) is None:
            self._take_prefixes(found)
            return
        if " " in joined or "\t" in joined:
            joined = "\n".join([value.rstrip(" \t") for value in values])
        if not normal.is_plain(joined.replace("\n", "")):
            joined = normal.rfc_patterns(joined)
        self.escapes = "%" in joined
        self._take(found, joined)

    def _take_prefixes(self, found: list[tuple[str, str]]) -> None:
        """Take rules that are plain prefixes, all of them."""
        prefixes = self.prefixes
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        for dis, value in found:
            place -= 1
            if value[:1] == "/":
                entry = len(value) * octet + place
                if not dis:
                    entry += allow
                if prefixes.get(value, 0) < entry:
                    prefixes[value] = entry

    def _take(self, found: list[tuple[str, str]], joined: str) -> None:
        """Take rules of any kind; their values in normal form, one a line."""
        prefixes, exact, wild = self.prefixes, self.exact, self.wild
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        queries = "?" in joined
        values = joined.split("\n")
        # Several stars mean what one means, but each is an octet of the rule's length.
        keys = squeeze(joined).split("\n") if "**" in joined else values
        begins_in_escape = _BEGINS_IN_ESCAPE(joined) is not None
        for (dis, _), value, short in zip(found, values, keys, strict=True):
            place -= 1
            if value[:1] != "/" and value[:1] != "*":
                continue  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
            forms: tuple[str, ...] = (short,)
            length = len(value)
            if queries and "?" in value and self._meets_query(value):
                length = len(normal.query_form(value))
                form = normal.query_form(short)
                if form != short:
                    # Whatever matches a path as it stands matches it in this form, too, unless
                    # what changes may be met by something that does not change.
                    unsure = begins_in_escape or _CHANGED(value, 0, value.index("?"))
                    forms = (short, form) if unsure else (form,)
            entry = length * octet + place if dis else length * octet + place + allow
            for key in forms:
                into = prefixes
                if "*" in key:
                    if key[-1] == "*":
                        key = key[:-1]  # noqa: PLW2901 - it says what every end says
                    if "*" in key:
                        into = wild
                    else:
                        self.inherit = True
                elif key[-1] == "$":
                    into, key = exact, key[:-1]  # noqa: PLW2901
                if into.get(key, 0) < entry:
                    into[key] = entry

    def _meets_query(self, value: str) -> bool:
        """The query of a path may meet what stands behind the first star or question mark."""
        found = _SPECIAL(value)
        if found is None or _TWOFOLD(value, found.start()) is None:
            return False
        self.twofold = True
        return True
