"""The rules of RFC 9309 by shape: plain prefixes, exact paths, wildcard patterns."""

from __future__ import annotations

import re

from gatekeeper.robots import normal
from gatekeeper.robots.glance import PLAIN
from gatekeeper.robots.patterns import squeeze

__all__ = ["SortedRules"]

_PECULIAR = re.compile(rf"[^{re.escape(PLAIN)}]").search
"""What a value may hold that is more, or less, than a prefix in its normal form."""
_LIKE_AN_ESCAPE = re.compile(r"\*[0-9A-F%]").search
"""A piece behind a star may be found from within an escape on; `%` may stand for a digit."""
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
        joined = "".join([value for _, value in found])
        self.like_escapes = _LIKE_AN_ESCAPE(joined) is not None
        """Some piece may be found from within an escape on: see `normal.rfc_path`."""
        self._odd = not normal.is_plain(joined.replace("$", ""))
        self._take(found, peculiar=_PECULIAR(joined) is not None)

    def _take(self, found: list[tuple[str, str]], *, peculiar: bool) -> None:
        prefixes = self.prefixes
        octet, allow, place = 2 << self.shift, 1 << self.shift, self.count + 1
        for dis, value in found:
            place -= 1
            if peculiar and _PECULIAR(value):
                self._add(value, 0 if dis else allow, place)
            elif value[:1] == "/":
                entry = len(value) * octet + place
                if not dis:
                    entry += allow
                if prefixes.get(value, 0) < entry:
                    prefixes[value] = entry

    def _add(self, value: str, allow: int, place: int) -> None:
        """Take a rule that may be more than a plain prefix."""
        if value[-1] in " \t":
            value = value.rstrip(" \t")
        if value[:1] != "/" and value[:1] != "*":
            return  # an empty pattern has no effect (RFC-21), any other is none (RFC-32)
        if self._odd or "$" in value[:-1]:
            value = normal.rfc_pattern(value)
            self.escapes = self.escapes or "%" in value
        form = value
        # The query of a path may meet what stands behind the first star or question mark.
        if "?" in value and (found := _SPECIAL(value)) and _TWOFOLD(value, found.start()):
            self.twofold = True
            form = normal.query_form(value)
        entry = (len(form) << 1 + self.shift) + allow + place
        self._put(value, entry)
        if form != value:
            self._put(form, entry)

    def _put(self, value: str, entry: int) -> None:
        into = self.prefixes
        if "*" in value:
            value = squeeze(value).removesuffix("*")  # which says what every end says
            if "*" in value:
                into = self.wild
            else:
                self.inherit = True
        elif value[-1] == "$":
            into, value = self.exact, value[:-1]
        if into.get(value, 0) < entry:
            into[value] = entry
