"""Columns of findings, and the changes that fix them.

Only unambiguous problems are fixed. Most fixes preserve every verdict of every dialect, and are
applied only if that can be verified (`_KEEPING`). The others give a line that is currently ignored
the only meaning that it can have (`_RESTORING`). Everything else is left to the author.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

from gatekeeper.robots import signals, timing
from gatekeeper.robots.model import Rule
from gatekeeper.robots.parser import (
    LIMIT,
    Dialect,
    RobotsTxt,
    line_numbers,
    to_octets,
    to_unicode,
)
from gatekeeper.robots.patterns import decoded, rfc_pattern
from gatekeeper.robots.policy import records_of
from gatekeeper.sites import lint
from gatekeeper.sites.lint import Finding

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class _Parts(NamedTuple):
    """Positions of the parts of a line: (start, end), counting from 0."""

    line: tuple[int, int]
    """The line without surrounding blanks."""
    record: tuple[int, int]
    """Field and value, without a comment."""
    field: tuple[int, int]
    value: tuple[int, int]


def _parts(text: str) -> _Parts:
    record = text.partition("#")[0]
    head, colon, rest = record.partition(":")
    whole = _stripped(text, 0, len(text))
    if not colon:
        inner = _stripped(text, 0, len(record))
        return _Parts(whole, inner, inner, (inner[1], inner[1]))
    field = _stripped(text, 0, len(head))
    value = _stripped(text, len(head) + 1, len(head) + 1 + len(rest))
    end = value[1] if value[1] > value[0] else len(head) + 1
    return _Parts(whole, (field[0], end), field, value)


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start] in " \t":
        start += 1
    while end > start and text[end - 1] in " \t":
        end -= 1
    return start, end


_PART_OF_LINE = {
    "no-colon": "line",
    "blank-inside-group": "line",
    "html": "line",
    "truncated": "line",
    "unknown-field": "field",
    "misspelt-field": "field",
    "odd-agent": "value",
    "agent-list": "value",
    "robots-txt-rule": "value",
    "unmatchable-rule": "value",
    "experimental-version": "value",
    "newer-version": "value",
    "unknown-usage-label": "value",
}
"""The part of the line that a code concerns. Codes that begin with `bad-` concern the value, all
other codes the whole record."""
_IN_VALUE: dict[str, re.Pattern[str]] = {
    "odd-blank": lint.ODD_BLANK,
    "blank-in-value": re.compile(r"[ \t]+"),
    "unescaped-non-ascii": _NOT_ASCII,
    "bad-escape": lint.BAD_ESCAPE,
    "several-records": lint.SECOND_RECORD,
    "dollar-inside": re.compile(r"\$(?!\Z)"),
    "literal-star": re.compile(r"\*"),
    "regular-expression": lint.REGEX_SYNTAX,
}
"""What is searched for in the value, by code."""
_IN_LINE = {
    "hash-in-path": re.compile("#"),
    "control": re.compile(r"[\x00-\x08\x0b-\x1f]"),
    "not-utf8": re.compile("\ufffd+"),
}
"""What is searched for in the whole line, by code."""
_WHOLE_FILE = frozenset({"bom", "encoding"})
"""Codes that concern octets before the first line, or the encoding of all lines."""


def located(findings: Iterable[Finding], text: str) -> tuple[Finding, ...]:
    """Return the findings with their columns. `text` is the decoded file, octets in a str."""
    lines = text.split("\n")
    return tuple(
        _with_columns(finding, to_unicode(lines[finding.line - 1]))
        if 0 < finding.line <= len(lines)
        else finding
        for finding in findings
    )


def _with_columns(finding: Finding, text: str) -> Finding:
    start, end = _span(finding.code, text)
    return msgspec.structs.replace(finding, column=start + 1, end_column=end + 1)


def _span(code: str, text: str) -> tuple[int, int]:
    """Return start and end of the finding in the line, counting from 0."""
    if code in _WHOLE_FILE:
        return 0, 0
    if code in _IN_LINE:
        found = _IN_LINE[code].search(text)
        return found.span() if found else (0, len(text))
    parts = _parts(text)
    start, end = parts.value
    value = text[start:end]
    if code in _IN_VALUE:
        found = _IN_VALUE[code].search(value)
        return (start + found.start(), start + found.end()) if found else parts.value
    part = "value" if code.startswith("bad-") else _PART_OF_LINE.get(code, "record")
    where: tuple[int, int] = getattr(parts, part)
    return where if where[1] > where[0] else parts.record


# --- changes ---------------------------------------------------------------------------------


class Repair(msgspec.Struct, frozen=True):
    """The result of fixing a file."""

    body: bytes
    """The fixed file; the given one if nothing was changed."""
    applied: tuple[Finding, ...]
    """The findings that were fixed."""


def _misspelt(text: str) -> list[str] | None:
    parts = _parts(text)
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
    start = _parts(text).line[0]
    end = start + len(field)
    rest = text[end:].lstrip(" \t" + lint.NOT_A_COLON)
    if not _accepts(field, rest.partition("#")[0].strip(" \t")):
        return None
    return [f"{text[:end]}: {rest}"]


def _without_odd_blanks(text: str) -> list[str] | None:
    parts = _parts(text)
    start, end = parts.value
    bare = lint.ODD_ENDS.sub("", text[start:end])
    if text[slice(*parts.field)].lower() != "user-agent" or not lint.TOKEN.match(bare):
        return None
    return [text[:start] + bare + text[end:]]


def _agents_apart(text: str) -> list[str] | None:
    parts = _parts(text)
    start, end = parts.value
    names = [name.strip(" \t") for name in lint.AGENT_SEPARATOR.split(text[start:end])]
    if not all(lint.TOKEN.match(name) for name in names):
        return None
    first, *others = names
    field = text[slice(*parts.field)]
    return [text[:start] + first + text[end:], *(f"{field}: {name}" for name in others)]


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{octet:02X}" for octet in found[0].encode())


def _escaped(text: str) -> list[str] | None:
    start, end = _parts(text).value
    value = _NOT_ASCII.sub(_percent, text[start:end])
    return [text[:start] + value + text[end:]]


def _percent_escaped(text: str) -> list[str] | None:
    start, end = _parts(text).value
    return [text[:start] + lint.BAD_ESCAPE.sub("%25", text[start:end]) + text[end:]]


_Fix = Callable[[str], list[str] | None]
"""Returns the lines that replace a line, or None if the fix would be ambiguous."""
_RESTORING: dict[str, _Fix] = {
    "misspelt-field": _misspelt,
    "no-colon": _with_colon,
    "odd-blank": _without_odd_blanks,
    "agent-list": _agents_apart,
}
_KEEPING: dict[str, _Fix] = {
    "unescaped-non-ascii": _escaped,
    "bad-escape": _percent_escaped,
    "missing-blank-line": lambda text: ["", text],
    "duplicate-rule": lambda _: [],
}

FIXABLE = frozenset({*_RESTORING, *_KEEPING, *_WHOLE_FILE})
"""Codes of findings that can be fixed."""
_ROUNDS = 12
"""Maximum number of passes. One fix may uncover the next: a misspelt agent and the blank line
before it."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_MARKS = (b"\xef\xbb\xbf", b"\xef\xbb", b"\xef")


def repaired(body: bytes, *, ignore: Collection[str] = (), dialect: str = "auto") -> Repair:
    """Fix every finding that has an unambiguous fix. `ignore` contains codes that are left
    unchanged.

    Unchanged lines keep every octet; a new line gets the line end of the line that it replaces. A
    file beyond the size limit is returned unchanged, and no fix makes a file longer than that.

    >>> repaired(b"User agent: *\\nDissallow: /x\\nDisallow /y # all\\n").body
    b'User-agent: *\\nDisallow: /x\\nDisallow: /y # all\\n'
    """
    applied: list[Finding] = []
    for _ in range(_ROUNDS):
        robots = RobotsTxt.parse(body, dialect=dialect)
        if robots.truncated:
            break
        findings = [
            finding
            for finding in lint.findings(robots, limit=sys.maxsize)
            if finding.code in FIXABLE and finding.code not in ignore
        ]
        fixed, done = _Pass(body, robots).apply(findings)
        if not done or len(fixed) > LIMIT:
            break
        body = fixed
        applied += done
    return Repair(body, tuple(applied))


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

    def apply(self, findings: Iterable[Finding]) -> tuple[bytes, list[Finding]]:
        """Return the fixed file and the findings that were fixed."""
        findings = list(findings)
        done = [finding for finding in findings if finding.code in _WHOLE_FILE]
        if done:  # alone: afterwards every line may be decoded differently
            without = self._without_bom()
            if not without.startswith(_MARKS[-1]):  # it would be read as another mark
                return without, done
        if self._robots.bom not in {"", "utf-8"}:
            return self._body, []  # its octets are not those of the lines that were read
        # A restored line may move the limits of groups, so what keeps verdicts waits for the next
        # pass.
        done = []
        for kind in (_RESTORING, _KEEPING):
            if not done:
                done = self._changed(finding for finding in findings if finding.code in kind)
        return b"".join(self._lines), done

    def _changed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Fix what can be fixed, each line at most once, and return these findings."""
        done: list[Finding] = []
        changed: set[int] = set()
        for finding in findings:
            if finding.line in changed or not 0 < finding.line <= len(self._lines):
                continue
            if self._change(finding):
                changed.add(finding.line)
                done.append(finding)
        return done

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
        return _meanings(new[0][slice(*_parts(new[0]).value)]) == _meanings(rule.value)


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
