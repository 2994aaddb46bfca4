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
    "html": Code(_ERROR, "The file is an HTML page, not a robots.txt."),
    "truncated": Code(
        _ERROR, "The file is longer than crawlers read; its end is lost (RFC 9309 section 2.5)."
    ),
    "too-many": Code(_WARNING, "There are more findings than are listed."),
    "bom": Code(_INFO, "The file begins with a byte order mark, which some crawlers trip over."),
    "encoding": Code(
        _WARNING, "The file is not in UTF-8 and had to be transcoded (RFC 9309 section 2.3)."
    ),
    "empty": Code(
        _INFO, "The file says nothing; every robot is welcome everywhere (1994 standard)."
    ),
    "no-group": Code(_WARNING, "No user-agent line stands in the file, so no rule is obeyed."),
    # Lines.
    "control": Code(
        _WARNING, "A control character spoils the line; it is not read (RFC 9309 section 3)."
    ),
    "not-utf8": Code(_WARNING, "The line holds octets that are no UTF-8 (RFC 9309 section 2.3)."),
    "no-colon": Code(
        _WARNING, "The line is no record: no colon stands behind a field (RFC 9309 section 2.2)."
    ),
    "odd-blank": Code(
        _ERROR,
        "A character that only looks like a blank, or like nothing, is read as a letter "
        "(RFC 9309 section 2.2).",
    ),
    "unknown-field": Code(_INFO, "The field is unknown and ignored (RFC 9309 section 2.2.4)."),
    "misspelt-field": Code(
        _ERROR, "The field is a known one misspelt, and is ignored (RFC 9309 section 2.2.4)."
    ),
    "rule-outside-group": Code(
        _ERROR, "A rule before any user-agent line is ignored (RFC 9309 section 2.2.1)."
    ),
    "record-outside-group": Code(
        _WARNING, "The record belongs to a group, and stands in none: it counts for nobody."
    ),
    # User-agent lines.
    "empty-agent": Code(
        _ERROR, "A user-agent line without a name matches nobody (RFC 9309 section 2.2.1)."
    ),
    "odd-agent": Code(
        _INFO, "The name is no plain product token of letters, `_` and `-` (RFC 9309 section 2.2)."
    ),
    "agent-list": Code(
        _ERROR,
        "A user-agent line names one agent; write a line for each (RFC 9309 section 2.2.1).",
    ),
    "repeated-agent": Code(
        _INFO, "The agent has another group already; they add up (RFC 9309 section 2.2.1)."
    ),
    "several-star-groups": Code(
        _WARNING, "Only one group for `*` is allowed; some robots read the first (1994 standard)."
    ),
    "group-without-rules": Code(
        _INFO, "The group has no rules and allows everything (RFC 9309 section 2.1)."
    ),
    "missing-blank-line": Code(
        _INFO,
        "A group begins without a blank line before it; old readers want one (1994 standard).",
    ),
    "blank-inside-group": Code(
        _WARNING, "A blank line parts a group; for old readers it ends there (1994 standard)."
    ),
    "content-usage-between-agents": Code(
        _WARNING,
        "Readers of the newer draft begin a new group after Content-Usage "
        "(draft-ietf-aipref-attach).",
    ),
    # Rules.
    "blank-in-value": Code(
        _WARNING, "A blank inside the path counts as %20 (RFC 9309 section 2.2)."
    ),
    "unescaped-non-ascii": Code(
        _INFO,
        "Characters outside ASCII belong percent-encoded; not every robot does it "
        "(RFC 9309 section 2.2.2).",
    ),
    "bad-escape": Code(
        _WARNING, "A `%` that begins no escape; write %25 (RFC 9309 section 2.2.2)."
    ),
    "regular-expression": Code(
        _WARNING,
        "Rules are no regular expressions: only `*` and a final `$` are special "
        "(RFC 9309 section 2.2.3).",
    ),
    "dollar-inside": Code(
        _INFO, "A `$` before the end is an ordinary character (RFC 9309 section 2.2.3)."
    ),
    "literal-star": Code(
        _WARNING,
        "In the dialect of this group a `*` is an ordinary character (1994 standard, "
        "1996 draft section 3.2.2).",
    ),
    "unmatchable-rule": Code(_ERROR, "No URL can match the rule (RFC 9309 section 2.2.2)."),
    "unreachable-rule": Code(_WARNING, "Another rule always decides before this one."),
    "duplicate-rule": Code(
        _INFO, "The group holds the same rule already (RFC 9309 section 2.2.2)."
    ),
    "robots-txt-rule": Code(_INFO, "/robots.txt may always be fetched (RFC 9309 section 2.2.2)."),
    "lone-allow": Code(
        _WARNING,
        "The group only allows, which forbids nothing; a whitelist also needs a "
        "`Disallow: /` (RFC 9309 section 2.2.2).",
    ),
    # Robot-version.
    "misplaced-version": Code(
        _WARNING, "Robot-version counts only right behind the user-agent lines (2.0 draft)."
    ),
    "bad-version": Code(_WARNING, "The version is not of the form 2.0 and is ignored (2.0 draft)."),
    "repeated-version": Code(
        _WARNING, "Only the first Robot-version of a group counts (2.0 draft)."
    ),
    "experimental-version": Code(
        _WARNING, "An odd minor version is experimental; robots skip the group (2.0 draft)."
    ),
    "newer-version": Code(_WARNING, "The version is newer than any there is (2.0 draft)."),
    # Timing and the rest.
    "bad-crawl-delay": Code(
        _WARNING,
        "Crawl-delay wants a plain number of seconds (no standard; RFC 9309 section 2.2.4).",
    ),
    "bad-request-rate": Code(
        _WARNING, "Request-rate wants `documents/time[s|m|h] [hhmm-hhmm]` (2.0 draft)."
    ),
    "bad-visit-time": Code(_WARNING, "Visit-time wants `hhmm-hhmm` in UTC (2.0 draft)."),
    "bad-sitemap": Code(_ERROR, "Sitemap wants an absolute URL (sitemaps.org)."),
    "bad-license": Code(_ERROR, "License wants an absolute URL (RSL 1.0)."),
    "bad-host": Code(_WARNING, "Host wants the name of a host (Yandex)."),
    "bad-clean-param": Code(_WARNING, "Clean-param wants `name[&name...] [path]` (Yandex)."),
    "bad-content-usage": Code(
        _WARNING,
        "The preferences decide nothing; write `train-ai=n, search=y` (draft-ietf-aipref-vocab).",
    ),
    "unknown-usage-label": Code(
        _WARNING, "The vocabulary does not know the label; it is ignored (draft-ietf-aipref-vocab)."
    ),
    "bad-content-signal": Code(
        _WARNING,
        "The signals decide nothing; write `search=yes, ai-train=no` "
        "(draft-romm-aipref-contentsignals).",
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
