"""Changes that fix what `lint` finds.

Only unambiguous problems are fixed. Most fixes preserve every verdict of every dialect, and are
applied only if that can be verified (`_KEEPING`). The others give a line that is currently ignored
the only meaning that it can have (`_RESTORING`). Everything else is left to the author.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from urllib.parse import quote

from gatekeeper.robots import signals, timing
from gatekeeper.robots.groups import records_of
from gatekeeper.robots.model import Finding, Rule
from gatekeeper.robots.parser import LIMIT, Dialect, line_numbers, to_octets
from gatekeeper.robots.patterns import decoded, rfc_pattern
from gatekeeper.robots.policy import RobotsTxt
from gatekeeper.sites import lint
from gatekeeper.sites.columns import BAD_ESCAPE, NOT_ASCII, ODD_ENDS, WHOLE_FILE, parts_of


def _misspelt(text: str) -> list[str] | None:
    parts = parts_of(text)
    meant = lint.spelling(text[slice(*parts.field)].lower())
    if meant is None or not _accepts(meant, text[slice(*parts.value)]):
        return None
    return [text[: parts.field[0]] + meant.capitalize() + text[parts.field[1] :]]


def _accepts(field: str, value: str) -> bool:
    """Return True if the field accepts the value, so that no other field can have been meant."""
    if field in {"allow", "disallow"}:
        return not value or value.startswith(("/", "*"))
    if field == "user-agent":
        return lint.TOKEN.match(value) is not None
    if field == "crawl-delay":
        return timing.parse_crawl_delay(value) is not None
    return field == "sitemap" and signals.absolute_url(value) is not None


def _with_colon(text: str) -> list[str] | None:
    field = lint.field_without_colon(text)
    if field is None:
        return None
    start = parts_of(text).line[0]
    end = start + len(field)
    rest = text[end:].lstrip(" \t" + lint.NOT_A_COLON)
    if not _accepts(field, rest.partition("#")[0].strip(" \t")):
        return None
    return [f"{text[:end]}: {rest}"]


def _without_odd_blanks(text: str) -> list[str] | None:
    parts = parts_of(text)
    start, end = parts.value
    bare = ODD_ENDS.sub("", text[start:end])
    if text[slice(*parts.field)].lower() != "user-agent" or not lint.TOKEN.match(bare):
        return None
    return [text[:start] + bare + text[end:]]


def _agents_apart(text: str) -> list[str] | None:
    parts = parts_of(text)
    start, end = parts.value
    names = [name.strip(" \t") for name in lint.AGENT_SEPARATOR.split(text[start:end])]
    if not all(lint.TOKEN.match(name) for name in names):
        return None
    first, *others = names
    field = text[slice(*parts.field)]
    return [text[:start] + first + text[end:], *(f"{field}: {name}" for name in others)]


def _escaped(found: re.Pattern[str], escape: _Escape, text: str) -> list[str]:
    start, end = parts_of(text).value
    return [text[:start] + found.sub(escape, text[start:end]) + text[end:]]


_Escape = str | Callable[[re.Match[str]], str]
_Fix = Callable[[str], list[str] | None]
"""Returns the lines that replace a line, or None if the fix would be ambiguous."""
_RESTORING: dict[str, _Fix] = {
    "misspelt-field": _misspelt,
    "no-colon": _with_colon,
    "odd-blank": _without_odd_blanks,
    "agent-list": _agents_apart,
}
_KEEPING: dict[str, _Fix] = {
    "unescaped-non-ascii": partial(_escaped, NOT_ASCII, lambda found: quote(found[0])),
    "bad-escape": partial(_escaped, BAD_ESCAPE, "%25"),
    "missing-blank-line": lambda text: ["", text],
    "duplicate-rule": lambda _: [],
}

FIXABLE = frozenset({*_RESTORING, *_KEEPING, *WHOLE_FILE})
"""Codes of findings that can be fixed."""
_ROUNDS = 12
"""Maximum number of passes. One fix may uncover the next: a misspelt agent and the blank line
before it."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_MARKS = (b"\xef\xbb\xbf", b"\xef\xbb", b"\xef")


def repaired(body: bytes, *, ignore: Collection[str] = (), dialect: str = "auto") -> bytes:
    """Return the file with every finding fixed that has an unambiguous fix. `ignore` contains codes
    that are left unchanged.

    Unchanged lines keep every octet; a new line gets the line end of the line that it replaces. A
    file beyond the size limit is returned unchanged, and no fix makes a file longer than that.

    >>> repaired(b"User agent: *\\nDissallow: /x\\nDisallow /y # all\\n")
    b'User-agent: *\\nDisallow: /x\\nDisallow: /y # all\\n'
    """
    for _ in range(_ROUNDS):
        robots = RobotsTxt.parse(body, dialect=dialect)
        if robots.truncated:
            break
        findings = [
            finding
            for finding in lint.findings(robots, limit=sys.maxsize)
            if finding.code in FIXABLE and finding.code not in ignore
        ]
        fixed = _Pass(body, robots).apply(findings)
        if fixed == body or len(fixed) > LIMIT:
            break
        body = fixed
    return body


class _Pass:
    """One pass over a file, which changes each line at most once."""

    def __init__(self, body: bytes, robots: RobotsTxt) -> None:
        self._body = body
        self._robots = robots
        self._lines = _LINE.findall(body)
        # A rule set of the 2.0 draft is no file of lines that mean the same in any order. A
        # Robot-version that has no effect may get one when a line before it is removed.
        forced = robots.forced not in {None, Dialect.RFC9309}
        self._versionless = not forced and "robot-version" not in robots.lines.lower()
        self._starts = _record_starts(robots.lines)
        self._rules: dict[int, Rule] = {}
        self._repeated: set[int] = set()
        """Line numbers of rules that repeat an earlier rule of their group."""
        for group in robots.groups:
            seen: set[tuple[str, ...]] = set()
            for rule in group.rules:
                meaning = rule.field.lower(), *_meanings(rule.value)
                if meaning in seen:
                    self._repeated.add(rule.line)
                seen.add(meaning)
                self._rules[rule.line] = rule

    def apply(self, findings: Sequence[Finding]) -> bytes:
        """Return the fixed file."""
        if any(finding.code in WHOLE_FILE for finding in findings):
            # Alone: afterwards every line may be decoded differently.
            without = self._without_bom()
            if not without.startswith(_MARKS[-1]):  # it would be read as another mark
                return without
        if self._robots.bom not in {"", "utf-8"}:
            return self._body  # its octets are not those of the lines that were read
        # A restored line may move the limits of groups, so what keeps verdicts waits for the next
        # pass.
        if not self._changed(findings, _RESTORING):
            self._changed(findings, _KEEPING)
        return b"".join(self._lines)

    def _changed(self, findings: Iterable[Finding], fixes: Mapping[str, _Fix]) -> bool:
        """Fix what can be fixed, each line at most once. Return True if anything was."""
        changed: set[int] = set()
        for finding in findings:
            if finding.line in changed or not 0 < finding.line <= len(self._lines):
                continue
            if finding.code in fixes and self._change(finding):
                changed.add(finding.line)
        return bool(changed)

    def _without_bom(self) -> bytes:
        if self._robots.bom != "utf-8":
            return self._robots.octets.encode("latin-1")
        return self._body.removeprefix(next(m for m in _MARKS if self._body.startswith(m)))

    def _change(self, finding: Finding) -> bool:
        """Fix a line, without changing the index of any other line. Return True if it was
        changed."""
        line = self._lines[finding.line - 1]
        raw = line.rstrip(b"\r\n")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return False
        new = (_RESTORING | _KEEPING)[finding.code](text)
        if new is None or new == [text]:
            return False
        if finding.code in _KEEPING and not self._keeps_verdicts(finding, new):
            return False
        ending = line[len(raw) :]
        joined = (ending or b"\n").join(each.encode() for each in new)
        self._lines[finding.line - 1] = joined + ending if new else b""
        return True

    def _keeps_verdicts(self, finding: Finding, new: list[str]) -> bool:
        """Return True if every verdict of every dialect stays the same."""
        if not self._versionless:
            return False
        if finding.code == "missing-blank-line":
            return finding.line in self._starts
        if finding.code == "duplicate-rule":
            return finding.line in self._repeated
        rule = self._rules.get(finding.line)
        if rule is None:
            return False
        return _meanings(new[0][slice(*parts_of(new[0]).value)]) == _meanings(rule.value)


def _record_starts(text: str) -> set[int]:
    """Return the line numbers at which a record begins in 1994 as well as in 1996: a blank line
    before them changes nothing."""
    of_1994, others = ({r.start for r in records_of(text, allow_ends=a)} for a in (False, True))
    return set(line_numbers(text, list(of_1994 & others)).values())


def _meanings(value: str) -> tuple[str, ...]:
    """Return what RFC 9309 and what the older dialects compare. Escapes in a value that is no path
    may belong to the host of a URL (R94-26), so it only equals itself."""
    octets = to_octets(value)
    return (rfc_pattern(octets), decoded(octets)) if octets[:1] in {"/", "*"} else (octets,)
