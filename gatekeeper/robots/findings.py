"""The words of the linter: `Finding`, and a table of every code that one can carry."""

from __future__ import annotations

import msgspec

from gatekeeper.robots.model import Severity

__all__ = ["CODES", "MAX_FINDINGS", "Code", "Finding", "Full", "Report"]

MAX_FINDINGS = 1_000
"""A file may have a million faults; more than this many help nobody."""


class Finding(msgspec.Struct, frozen=True):
    """Something about a file that its author should know.

    `line` counts from 1, and is 0 for the file as a whole; `code` is a key of `CODES`.
    """

    line: int
    code: str
    severity: Severity
    message: str


class Code(msgspec.Struct, frozen=True):
    """What a code means: one sentence for people, and how much it matters."""

    severity: Severity
    meaning: str


_INFO, _WARNING, _ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR

CODES: dict[str, Code] = {
    # The file as a whole.
    "html": Code(_ERROR, "The file is an HTML page, not a robots.txt (R96-26)."),
    "truncated": Code(_ERROR, "The file is longer than crawlers read; its end is lost (RFC-41)."),
    "too-many": Code(_WARNING, "There are more findings than are listed."),
    "bom": Code(_INFO, "The file begins with a byte order mark, which some crawlers trip over."),
    "encoding": Code(_WARNING, "The file is not in UTF-8 and had to be transcoded (RFC-44)."),
    "empty": Code(_INFO, "The file says nothing; every robot is welcome everywhere (R94-19)."),
    "no-group": Code(_WARNING, "No user-agent line stands in the file, so no rule is obeyed."),
    # Lines.
    "control": Code(_WARNING, "A control character spoils the line; it is not read (RFC-42)."),
    "not-utf8": Code(_WARNING, "The line holds octets that are no UTF-8 (RFC-33)."),
    "no-colon": Code(_WARNING, "The line is no record: there is no colon in it."),
    "unknown-field": Code(_INFO, "The field is unknown and ignored (R94-08, RFC-31)."),
    "misspelt-field": Code(_ERROR, "The field is a known one misspelt, and is ignored (RFC-45)."),
    "rule-outside-group": Code(_ERROR, "A rule before any user-agent line is ignored (RFC-26)."),
    "record-outside-group": Code(
        _WARNING, "The record belongs to a group, and stands in none: it counts for nobody."
    ),
    # User-agent lines.
    "empty-agent": Code(_ERROR, "A user-agent line without a name matches nobody (R94-10)."),
    "odd-agent": Code(
        _INFO, "The name is no plain product token of letters, `_` and `-` (RFC-03, RFC-15)."
    ),
    "repeated-agent": Code(_INFO, "The agent has another group already; they add up (RFC-12)."),
    "several-star-groups": Code(
        _WARNING, "Only one group for `*` is allowed; some robots read the first (R94-12)."
    ),
    "group-without-rules": Code(_INFO, "The group has no rules and allows everything (RFC-09)."),
    "missing-blank-line": Code(
        _INFO, "A group begins without a blank line before it; old readers want one (R94-14)."
    ),
    "blank-inside-group": Code(
        _WARNING, "A blank line parts a group; for old readers it ends there (R94-25, DIA-04)."
    ),
    "content-usage-between-agents": Code(
        _WARNING, "Readers of the newer draft begin a new group after Content-Usage (SIG-09)."
    ),
    # Rules.
    "blank-in-value": Code(_WARNING, "A blank inside the path counts as %20 (R94-29, RFC-42)."),
    "unescaped-non-ascii": Code(
        _INFO, "Characters outside ASCII belong percent-encoded; not every robot does it (RFC-22)."
    ),
    "bad-escape": Code(_WARNING, "A `%` that begins no escape; write %25 (RFC-23)."),
    "dollar-inside": Code(_INFO, "A `$` before the end is an ordinary character (RFC-28)."),
    "literal-star": Code(
        _WARNING, "In the dialect of this group a `*` is an ordinary character (R94-18, R96-21)."
    ),
    "unmatchable-rule": Code(_ERROR, "No URL can match the rule (RFC-32, URL-06)."),
    "unreachable-rule": Code(_WARNING, "Another rule always decides before this one."),
    "duplicate-rule": Code(_INFO, "The group holds the same rule already (RFC-46)."),
    "robots-txt-rule": Code(_INFO, "/robots.txt may always be fetched (RFC-20, R96-16)."),
    "lone-allow": Code(
        _WARNING,
        "The group only allows, which forbids nothing; a whitelist also needs a "
        "`Disallow: /` (V2-22).",
    ),
    # Robot-version.
    "misplaced-version": Code(
        _WARNING, "Robot-version counts only right behind the user-agent lines (V2-06)."
    ),
    "bad-version": Code(_WARNING, "The version is not of the form 2.0 and is ignored (V2-08)."),
    "repeated-version": Code(_WARNING, "Only the first Robot-version of a group counts (V2-07)."),
    "experimental-version": Code(
        _WARNING, "An odd minor version is experimental; robots skip the group (V2-09)."
    ),
    "newer-version": Code(_WARNING, "The version is newer than any there is (V2-12)."),
    # Timing and the rest.
    "bad-crawl-delay": Code(_WARNING, "Crawl-delay wants a plain number of seconds (VND-01)."),
    "bad-request-rate": Code(
        _WARNING, "Request-rate wants `documents/time[s|m|h] [hhmm-hhmm]` (V2-27)."
    ),
    "bad-visit-time": Code(_WARNING, "Visit-time wants `hhmm-hhmm` in UTC (V2-24, V2-26)."),
    "bad-sitemap": Code(_ERROR, "Sitemap wants an absolute URL (VND-13)."),
    "bad-license": Code(_ERROR, "License wants an absolute URL (SIG-15)."),
    "bad-host": Code(_WARNING, "Host wants the name of a host (VND-13)."),
    "bad-clean-param": Code(_WARNING, "Clean-param wants `name[&name...] [path]` (VND-12)."),
    "bad-content-usage": Code(
        _WARNING, "The preferences decide nothing; write `train-ai=n, search=y` (SIG-02, SIG-08)."
    ),
    "bad-content-signal": Code(
        _WARNING, "The signals decide nothing; write `search=yes, ai-train=no` (SIG-12)."
    ),
}


class Full(Exception):
    """The report holds as many findings as it may."""


class Report:
    """Findings as they come, `MAX_FINDINGS` of them at most."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def add(self, line: int, code: str, detail: str = "", severity: Severity | None = None) -> None:
        """Keep a finding: the meaning of its code, and what is particular here.

        Raises Full once there is no room left; what was kept stays.
        """
        if len(self.found) >= MAX_FINDINGS:
            raise Full
        entry = CODES[code]
        message = f"{entry.meaning} {detail}" if detail else entry.meaning
        self.found.append(Finding(line, code, severity or entry.severity, message))

    def result(self, *, cut: bool) -> tuple[Finding, ...]:
        """Everything by line; where it was cut, a last finding says so."""
        found = sorted(self.found, key=_place)
        if cut:
            entry = CODES["too-many"]
            found.append(Finding(0, "too-many", entry.severity, entry.meaning))
        return tuple(found)


def _place(finding: Finding) -> tuple[int, str]:
    return finding.line, finding.code
