"""Findings about a file: errors of its author, and constructs that may not mean what they seem to.

Every check is a single pass over lines or rules, so a hostile file costs no more than a multiple of
its size. `CODES` documents each code. Messages quote only short parts of the file, in printable
form.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from gatekeeper.robots import signals, timing
from gatekeeper.robots.groups import names_of
from gatekeeper.robots.model import Finding, Group, Rule, Severity
from gatekeeper.robots.parser import KNOWN_FIELDS, Dialect, to_octets, to_unicode
from gatekeeper.robots.patterns import decoded, is_robots_txt, rfc_pattern, squeeze
from gatekeeper.robots.policy import RobotsTxt
from gatekeeper.sites.columns import (
    BAD_ESCAPE,
    FILE_FIELDS,
    ODD_BLANK,
    ODD_END,
    ODD_ENDS,
    REGEX_SYNTAX,
    REGEX_SYNTAX_V2,
    SECOND_RECORD,
    TextLine,
    iter_lines,
    located,
)

MAX_FINDINGS = 1_000
"""Maximum number of findings per file; more are of no use."""


class Code(msgspec.Struct, frozen=True):
    """The meaning of a code in one sentence, its severity, and the part of the line."""

    severity: Severity
    meaning: str
    part: str
    """The name of a field of `Parts`."""


_TABLE = """
# The file as a whole.
error html line: The file is an HTML page, not a robots.txt.
error truncated line 2.5: The file is longer than crawlers read; its end is lost.
warning too-many: There are more findings than are listed.
info bom: The file begins with a byte order mark, which some crawlers trip over.
warning encoding 2.3: The file is not sent as plain UTF-8.
info empty 1994: The file has no records; every robot is welcome everywhere.
warning no-group: The file has no user-agent line, so no rule is obeyed.
# Lines.
warning control line 3: A control character makes the line unreadable; it is ignored.
warning not-utf8 line 2.3: The line contains octets that are not valid UTF-8.
warning no-colon line 2.2: The line is not a record: no colon follows a field.
error odd-blank value 2.2: A character that looks like a blank, or is invisible, is read as a
    letter.
error several-records value 2.2: A second record in a line is part of the first one's value.
info unknown-field field 2.2.4: The field is unknown and ignored.
error misspelt-field field 2.2.4: The field is a misspelling of a known one and is ignored.
error rule-outside-group 2.2.1: A rule before any user-agent line is ignored.
warning record-outside-group: The record belongs in a group, but is in none: it has no effect.
# User-agent lines.
error empty-agent 2.2.1: A user-agent line without a name matches nobody.
info odd-agent value 2.2: The name is not a plain product token of letters, `_` and `-`.
error agent-list value 2.2.1: A user-agent line names one agent, by its product token; write a line
    for each.
info repeated-agent 2.2.1: The agent already has a group; the two are merged.
warning several-star-groups 1994: Only one group for `*` is allowed; some robots read the first.
info named-group-exempts 2.2.1: A robot that is named obeys its own groups alone, so rules for `*`
    do not apply to it.
info group-without-rules 2.1: The group has no rules and allows everything.
info missing-blank-line 1994: A group begins without a blank line before it; older parsers need one.
warning blank-inside-group line 1994: A blank line divides the group; for older parsers it ends
    there.
warning joined-groups 2.2.4: Only a rule ends a group: the agents above this line also obey the
    rules below the next user-agent line.
# Rules.
warning blank-in-value value 2.2: A blank inside the path counts as %20.
warning hash-in-path line 2.2.3: A `#` begins a comment, even without a blank before it.
info unescaped-non-ascii value 2.2.2: Non-ASCII characters should be percent-encoded; not every
    robot does it.
warning bad-escape value 2.2.2: A `%` does not begin an escape; write %25.
warning regular-expression value 2.2.3: Rules are not regular expressions: only `*` and a final `$`
    are special.
info dollar-inside value 2.2.3: A `$` before the end is an ordinary character.
warning literal-star value: In the dialect of this group a `*` is an ordinary character (1994
    standard, 1996 draft section 3.2.2).
error unmatchable-rule value 2.2.2: No URL can match the rule.
warning unreachable-rule: Another rule always decides before this one.
info duplicate-rule 2.2.2: The group already has the same rule.
info robots-txt-rule value 2.2.2: /robots.txt may always be fetched.
warning lone-allow 2.2.2: The group has only Allow rules, which forbid nothing; a whitelist also
    needs a `Disallow: /`.
# Robot-version.
warning misplaced-version V2: Robot-version counts only directly after the user-agent lines.
warning bad-version value V2: The version is not of the form 2.0 and is ignored.
warning repeated-version V2: Only the first Robot-version of a group counts.
warning experimental-version value V2: An odd minor version is experimental; robots skip the group.
warning newer-version value V2: The version is newer than any that exists.
# Timing and the rest.
warning bad-crawl-delay value: Crawl-delay must be a plain number of seconds (no standard; RFC 9309
    section 2.2.4).
warning bad-request-rate value V2: Request-rate must be `documents/time[s|m|h] [hhmm-hhmm]`.
warning bad-visit-time value V2: Visit-time must be `hhmm-hhmm` in UTC.
error bad-sitemap value: Sitemap must be an absolute URL (sitemaps.org).
error bad-license value: License must be an absolute URL (RSL 1.0).
warning bad-host value: Host must be the name of a host (Yandex).
warning bad-clean-param value: Clean-param must be `name[&name...] [path]` (Yandex).
warning bad-content-usage value: A preference is lost; write `train-ai=n, search=y`
    (draft-ietf-aipref-vocab).
warning unknown-usage-label value: The label is not in the vocabulary and is ignored
    (draft-ietf-aipref-vocab).
warning bad-content-signal value: A signal is lost; write `search=yes, ai-train=no`
    (draft-romm-aipref-contentsignals).
"""
"""Severity, code, the part of the line that it concerns (if that is not the whole record), the
section of RFC 9309 or another source that says so, and meaning of each kind of finding."""
_ROW = re.compile(r"^(\w+) ([a-z0-9-]+)(?: (line|field|value))?(?: (\S+))?: (.+)\.$", re.MULTILINE)
_SOURCES = {"1994": "1994 standard", "V2": "2.0 draft"}


def _code(severity: str, part: str, source: str, meaning: str) -> Code:
    said = f" ({_SOURCES.get(source, f'RFC 9309 section {source}')})" if source else ""
    return Code(Severity(severity), f"{meaning}{said}.", part or "record")


CODES: dict[str, Code] = {
    code: _code(severity, *rest)
    for severity, code, *rest in _ROW.findall(_TABLE.replace("\n    ", " "))
}


def _found(line: int, code: str, detail: str = "", severity: Severity | None = None) -> Finding:
    """Return a finding with the meaning of its code and an optional detail."""
    entry = CODES[code]
    message = f"{entry.meaning} {detail}" if detail else entry.meaning
    return Finding(line, code, severity or entry.severity, message)


AGENT_SEPARATOR = re.compile("[,;|]")
TOKEN = re.compile(r"[A-Za-z_-]+\Z|\*\Z")
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.[0-9]{1,9})?\Z")

_BULLET = re.compile("\\A[-*\u2022\u00b7][ \\t]++")
"""Matches the bullet of a list before a field."""

NOT_A_COLON = "=;\uff1a"
"""Characters that are written in place of a colon."""
_FIELD_AND_VALUE = re.compile(
    rf"[ \t]*+([A-Za-z-]++)(?:[ \t]*+[{NOT_A_COLON}]|[ \t]++(?=[/*]|[^ \t]++[ \t]*+(?:#|\Z)))"
)
_BARE_PATH = re.compile(r"[ \t]*+/[^/*]")
_MATCHES_A_ROBOT = re.compile(r"[A-Za-z0-9_-]|\*(?:[ \t]|\Z)")
"""Matches the beginning of a user-agent value that the name of some robot can equal (RFC-15)."""
# Misspellings that differ by more than one character, but occur in real files.
_MISSPELLINGS = {
    "agent": "user-agent",
    "dissalow": "disallow",
    "dissallows": "disallow",
    "disallowed": "disallow",
    "allowed": "allow",
    "user agents": "user-agent",
    "deny": "disallow",
    "hosts": "host",
}
_MIN_LENGTH = 5
"""Minimum length of a field name for `_is_one_typo`: one changed character makes a shorter one
too many other words."""


def quoted(text: str) -> str:
    """Return the beginning of a text in printable form."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _listed(agents: Sequence[str]) -> str:
    """Return at most three of the agents, `*` first, and the number of the others."""
    agents = sorted(dict.fromkeys(agents), key=lambda agent: agent != "*")
    others = [f"{len(agents) - 3} more"] if len(agents) > 3 else []
    return ", ".join([*map(quoted, agents[:3]), *others])


def check_agent(line: TextLine) -> Iterator[Finding]:
    """Check that a user-agent line names a product token or `*`."""
    number, value = line.number, line.value
    if not value:
        yield _found(number, "empty-agent")
    elif ODD_BLANK.search(value):
        yield _found(number, "odd-blank", quoted(value))
    elif SECOND_RECORD.search(value):
        return
    elif AGENT_SEPARATOR.search(value):
        yield _found(number, "agent-list", quoted(value))
    elif not _MATCHES_A_ROBOT.match(value):
        yield _found(number, "odd-agent", f"{quoted(value)} matches no robot.", Severity.ERROR)
    elif not TOKEN.match(value):
        yield _found(number, "odd-agent", quoted(value))


def field_without_colon(text: str) -> str | None:
    """Return the known field with which a line without a colon after it begins, or None.

    After the field comes a value, or a character that is written in place of a colon.

    >>> field_without_colon("Disallow /x"), field_without_colon("Allow me to explain: ...")
    ('disallow', None)
    >>> field_without_colon("Disallow = /x")
    'disallow'
    """
    found = _FIELD_AND_VALUE.match(text)
    field = found[1].lower() if found else ""
    return field if field in KNOWN_FIELDS else None


def check_version(line: int, value: str) -> Iterator[Finding]:
    """Check a correctly placed Robot-version (the 2.0 draft, V2-08 to V2-12)."""
    found = _VERSION.match(value)
    major = int(found[1]) if found else 0
    if found is None or major == 0:
        yield _found(line, "bad-version", quoted(value))
    elif int(found[2]) % 2:
        yield _found(line, "experimental-version")
    elif major > 2:
        yield _found(line, "newer-version")


def spelling(field: str) -> str | None:
    """Return the known field that was probably meant, or None (RFC 9309 section 2.2.4, RFC-45).

    The field is a common misspelling or differs from the known one by a single typing error.

    >>> spelling("dissallow"), spelling("user agent"), spelling("x-robots")
    ('disallow', 'user-agent', None)
    """
    if field.startswith((";", "/", "!", "'", "%", "<")):
        return None  # its author meant a comment
    field = _BULLET.sub("", ODD_ENDS.sub("", field))
    meant = field if field in KNOWN_FIELDS else _MISSPELLINGS.get(field)
    long = (name for name in KNOWN_FIELDS if len(name) >= _MIN_LENGTH)
    return meant or next((name for name in long if _is_one_typo(field, name)), None)


def _is_one_typo(a: str, b: str) -> bool:
    """Return True if one character is missing, added or wrong, or two adjacent ones are swapped."""
    if abs(len(a) - len(b)) > 1:
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return (
        a[i + 1 :] == b[i:]
        or a[i:] == b[i + 1 :]
        or a[i + 1 :] == b[i + 1 :]
        or (a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :])
    )


_CUT_BY_HASH = re.compile(r"[^#]*+(?<![ \t])#(?![ \t#])")
"""Matches a line whose comment begins without blanks around its sign."""
_DOT_SEGMENT = re.compile(r"[^*?]*/\.\.?/")
_EVERYTHING = frozenset({"", "/", "*", "/*"})


def check_groups(groups: Sequence[Group]) -> Iterator[Finding]:
    """Check all groups of a file in one pass."""
    seen: dict[str, int] = {}
    stars = (each.line for each in groups if "*" in each.agents and any(map(_denies, each.rules)))
    star_line = next(stars, 0)
    for group in groups:
        for agent in dict.fromkeys(agent.lower() for agent in group.agents if agent):
            first = seen.setdefault(agent, group.line)
            if first == group.line:
                continue
            if agent == "*" and group.dialect is not Dialect.RFC9309:
                yield _found(group.line, "several-star-groups", f"The first is in line {first}.")
            else:
                yield _found(group.line, "repeated-agent", f"{quoted(agent)} in line {first}.")
        yield from _check_group(group, star_line)
    yield from _check_exempt(groups)


def _check_group(group: Group, star_line: int) -> Iterator[Finding]:
    """Check one group. `star_line` is the line of a group for `*` that forbids something, or 0."""
    detail = ""
    if star_line and "*" not in group.agents:
        detail = f"Its robots do not obey the rules for `*` in line {star_line} either."
    if not group.rules:
        severity = Severity.WARNING if detail else None
        yield _found(group.line, "group-without-rules", detail, severity)
        return
    for rule in group.rules:
        if rule.value:
            yield from _check_value(rule, group.dialect)
    rules = [rule for rule in group.rules if rule.value]
    if rules and _is_whitelist(group.rules):
        yield _found(rules[0].line, "lone-allow", detail)
    if group.dialect in {Dialect.R1996, Dialect.V2}:
        yield from _check_order(rules, group.dialect)
    else:
        yield from _check_longest(rules)


def _is_whitelist(rules: Sequence[Rule]) -> bool:
    # `Allow: /` alone is not meant as a whitelist: it says explicitly that everything is allowed.
    return all(_allows(rule) and squeeze(rule.value) not in _EVERYTHING for rule in rules)


def _check_exempt(groups: Sequence[Group]) -> Iterator[Finding]:
    """Report each named robot whose groups do not deny what a rule for `*` denies.

    If either is denied everything, the exception is made on purpose. A rule is compared with equal
    patterns and with those that it begins with, at most about `_MAX_COMPARED` times.
    """
    groups = [group for group in groups if group.dialect is Dialect.RFC9309]
    stars = [rule for group in groups if "*" in group.agents for rule in group.rules]
    wanted = [(rule, _meaning(rule)) for rule in stars if _denies(rule)]
    wanted = [each for each in wanted if each[1][:1] in {"/", "*"}]
    if not wanted or any(meaning == "/" for _, meaning in wanted):
        return
    denies = {
        each.line: {_meaning(rule) for rule in each.rules if _denies(rule)} for each in groups
    }
    whitelists = {group.line for group in groups if _is_whitelist(group.rules)}
    left = _MAX_COMPARED
    for lines, agents in _robots_together(groups).items():
        if whitelists.issuperset(lines):
            continue  # reported with a warning
        left -= sum(len(denies[line]) for line in lines)
        if left < 0:
            return
        denied = set().union(*(denies[line] for line in lines))
        if "/" in denied:
            continue
        lengths = sorted({len(meaning) for meaning in denied if not meaning.endswith("$")})
        left -= len(wanted) * (1 + len(lengths))
        if left < 0:
            return
        lost = [
            f"{quoted(f'{rule.field}: {rule.value}')} in line {rule.line}"
            for rule, meaning in wanted
            if meaning not in denied
            and not any(meaning[:length] in denied for length in lengths if length < len(meaning))
        ]
        if lost:
            lost[3:] = [f"{len(lost) - 3} more"] if len(lost) > 3 else []
            detail = f"Not obeyed by {_listed(agents)}: {', '.join(lost)}."
            yield _found(lines[0], "named-group-exempts", detail)


def _robots_together(groups: Sequence[Group]) -> dict[tuple[int, ...], list[str]]:
    """Return the named agents by the lines of the groups that they obey: all that name them."""
    lines: dict[str, list[int]] = {}
    spellings: dict[str, str] = {}
    for group in groups:
        for agent in group.agents:
            name = next(reversed(names_of(agent.lower())), "*")
            if name != "*" and group.line not in lines.setdefault(name, [])[-1:]:
                lines[name].append(group.line)
                spellings.setdefault(name, agent)
    together: dict[tuple[int, ...], list[str]] = {}
    for name, obeyed in lines.items():
        together.setdefault(tuple(obeyed), []).append(spellings[name])
    return together


_MAX_COMPARED = 500_000


def _meaning(rule: Rule) -> str:
    """Return the pattern in normal form; two that match the same paths are equal."""
    pattern = squeeze(rfc_pattern(to_octets(rule.value)))
    if pattern[:1] == "*" and pattern[1:2] != "/":
        pattern = f"/{pattern}"  # every path begins with a slash
    return pattern if pattern.endswith("$") else pattern.rstrip("*")


def _check_value(rule: Rule, dialect: Dialect) -> Iterator[Finding]:
    value = rule.value
    if (" " in value or "\t" in value) and not SECOND_RECORD.search(value):
        yield _found(rule.line, "blank-in-value", quoted(value))
    if "#" in rule.text and dialect is not Dialect.V2 and _CUT_BY_HASH.match(rule.text):
        yield _found(rule.line, "hash-in-path", f"Only {quoted(value)} is read; write %23.")
    if not value.isascii():
        code = "odd-blank" if ODD_END.search(value) else "unescaped-non-ascii"
        yield _found(rule.line, code, quoted(value))
    if "%" in value and BAD_ESCAPE.search(value):
        yield _found(rule.line, "bad-escape", quoted(value))
    if (REGEX_SYNTAX_V2 if dialect is Dialect.V2 else REGEX_SYNTAX).search(value):
        yield _found(rule.line, "regular-expression", quoted(value))
    if is_robots_txt(value):
        yield _found(rule.line, "robots-txt-rule")
    if reason := _unmatchable(value, dialect):
        yield _found(rule.line, "unmatchable-rule", reason)
    elif dialect is Dialect.RFC9309 and "$" in value[:-1]:
        yield _found(rule.line, "dollar-inside", quoted(value))
    elif dialect in {Dialect.R1994, Dialect.R1996} and "*" in value:
        yield _found(rule.line, "literal-star", quoted(value))


def _unmatchable(value: str, dialect: Dialect) -> str:
    """Return the reason why no path can match, or the empty string."""
    if "://" in value and value.lower().startswith(("http://", "https://", "//")):
        return "A rule is a path; leave out scheme and host."
    begins = {Dialect.RFC9309: ("/", "*"), Dialect.V2: tuple("/*?[\\")}.get(dialect, ("/",))
    if not value.startswith(begins):
        remedy = " `/*` before it matches it anywhere." if dialect is Dialect.RFC9309 else ""
        return f"Every path begins with a slash, {quoted(value)} does not.{remedy}"
    # Robots resolve dot segments before they compare. After a `?` or a `*` dot segments may remain.
    if "/." in value and _DOT_SEGMENT.match(value):
        return "Robots resolve `.` and `..` in a URL before they compare."
    return ""


def _check_longest(rules: Sequence[Rule]) -> Iterator[Finding]:
    """Check the rules of RFC 9309, and of 1994, which has only Disallow: their order has no
    meaning.

    Rules that match the same paths differ at most in trailing stars, and in a slash before a first
    star. The longest of them decides, and of equally long ones an Allow (RFC 9309 section 2.2.2,
    RFC-17, RFC-18).
    """
    deciding: dict[str, tuple[tuple[int, bool], Rule]] = {}
    for rule in rules:
        pattern = rfc_pattern(to_octets(rule.value))
        rank = len(pattern), _allows(rule)  # each of several stars counts
        key = _meaning(rule)
        other_rank, other = deciding.setdefault(key, (rank, rule))
        if other is rule:
            continue
        if _allows(other) == _allows(rule):
            yield _found(rule.line, "duplicate-rule", f"It repeats line {other.line}.")
        else:
            winner, loser = (rule, other) if rank > other_rank else (other, rule)
            yield _found(loser.line, "unreachable-rule", f"Line {winner.line} decides.")
        if rank > other_rank:
            deciding[key] = rank, rule


def _check_order(rules: Sequence[Rule], dialect: Dialect) -> Iterator[Finding]:
    """Check the rules of 1996 and 2.0, where the first match decides: a rule covered by an earlier
    one is unreachable.

    In 1996 that is a prefix of it (R96-18). In 2.0 only equal patterns, and patterns that match
    everything, are detected.
    """
    first: dict[str, Rule] = {}
    lengths: list[int] = []  # in ascending order; longer ones than a value need no look-up
    for rule in rules:
        covering: Iterable[str]
        if dialect is Dialect.V2:
            value = "*" if squeeze(rule.value) in {"*", "/*"} else rule.value
            covering = ("*", value)
        else:
            value = decoded(to_octets(rule.value))
            covering = (value[:length] for length in lengths[: bisect_right(lengths, len(value))])
        earlier = next((first[each] for each in covering if each in first), None)
        if earlier is None:
            first[value] = rule
            place = bisect_right(lengths, len(value))
            if lengths[place - 1 : place] != [len(value)]:
                lengths.insert(place, len(value))
        elif _allows(earlier) == _allows(rule) and earlier.value == rule.value:
            yield _found(rule.line, "duplicate-rule", f"It repeats line {earlier.line}.")
        else:
            yield _found(rule.line, "unreachable-rule", f"Line {earlier.line} decides.")


def _denies(rule: Rule) -> bool:
    return bool(rule.value) and not _allows(rule)


def _allows(rule: Rule) -> bool:
    return rule.field.lower() == "allow"


_NEEDS_NO_GROUP = FILE_FIELDS | {"content-signal"}
_OUTSIDE_GROUPS = _NEEDS_NO_GROUP | {"robot-version"}  # a Robot-version there is misplaced
_INDEXING = frozenset({"noindex", "nofollow"})
"""Fields that search engines once read."""
_HTML = re.compile(r"[\s\ufeff]*<(?:!doctype\s+html|html|head|body|\?xml)\b", re.IGNORECASE)
_NOT_IN_PAGES = frozenset({"several-records", "unknown-field", "no-colon", "empty", "no-group"})
"""Codes that are not reported for an HTML page: its lines are not records, and one finding about
that is enough."""


def findings(robots: RobotsTxt, *, limit: int = MAX_FINDINGS) -> tuple[Finding, ...]:
    """Return the findings about a file, at most `limit`, sorted by line.

    >>> from gatekeeper.robots import RobotsTxt
    >>> [(f.line, f.code) for f in findings(RobotsTxt.parse("User-agent: *\\nDissalow: /"))]
    [(1, 'group-without-rules'), (2, 'misspelt-field')]
    """
    text = robots.octets
    every = _every(robots, text)
    if _HTML.match(text):
        every = (one for one in every if one.code not in _NOT_IN_PAGES)
    found = sorted(islice(every, limit), key=lambda one: (one.line, one.code))
    if next(every, None) is not None:
        found.append(_found(0, "too-many"))
    lines = text.split("\n")
    return tuple(
        located(one, to_unicode(lines[one.line - 1]), CODES[one.code].part)
        if 0 < one.line <= len(lines)
        else one
        for one in found
    )


def coding_findings(coding: str) -> tuple[Finding, ...]:
    """Return the finding about a Content-Encoding that names no registered coding (RFC 9110 section
    8.4.1, HTTP-14), such as `utf-8`; none if it is empty."""
    if not coding:
        return ()
    detail = f"Its Content-Encoding {quoted(coding)} is no coding, and is ignored."
    return (_found(0, "encoding", detail),)


def _every(robots: RobotsTxt, text: str) -> Iterator[Finding]:
    """Yield every finding: first those of the file, then of its lines, then of its groups."""
    yield from _check_file(robots, text)
    reader = _LineChecks(robots.forced)
    for line in iter_lines(text):
        yield from reader.read(line)
    yield from reader.end()
    yield from check_groups(robots.groups)


def _check_file(robots: RobotsTxt, text: str) -> Iterator[Finding]:
    """Check the file as a whole."""
    if robots.bom == "utf-8":
        yield _found(1, "bom")
    elif robots.bom:
        yield _found(1, "encoding", f"It had to be transcoded from {robots.bom}.")
    if robots.truncated:
        yield _found(text.count("\n") + 1, "truncated")
    if _HTML.match(text):
        yield _found(1, "html")


class _LineChecks:
    """Checks line by line."""

    def __init__(self, dialect: Dialect | None) -> None:
        self._blank_ends_record = dialect is not None and dialect is not Dialect.RFC9309
        """Whether blank lines end a record (the 1994 standard, R94-03)."""
        self._any_record = False
        self._any_agent = False
        self._any_for_group = False
        """Whether there is a record that belongs in a group. A file of Sitemap lines needs none."""
        self._in_group = False
        self._has_rule = False
        """Whether the group has a rule, so that the next user-agent line begins another group (RFC
        9309 section 2.1, RFC-02)."""
        self._record_open = False
        """Whether a user-agent line came after the last blank line: only then is a blank line
        missing."""
        self._blank_in_group = 0
        """Line number of the first blank line after the user-agent lines of a group without
        rules."""
        self._version_fits = False
        self._version_line = 0
        """Line number of the Robot-version of the current group."""
        self._agents: list[str] = []
        """The user-agent values of the group."""
        self._between = 0
        """Line number of what stands after the last user-agent line of a group without rules."""
        self._joined: list[tuple[int, str]] = []
        """Line numbers of what stands between user-agent lines of the group, and the agents above
        and below it; to be reported with the first rule that they share."""

    def read(self, line: TextLine) -> Iterator[Finding]:
        """Check one line and update the state for the following ones."""
        if line.spoilt:
            yield _found(line.number, "control", "", Severity.ERROR if line.field else None)
            self._between = self._between or line.number
            return
        if "\ufffd" in line.text:
            yield _found(line.number, "not-utf8")
        if line.field:
            yield from self._record(line)
        elif not line.text.strip(" \t"):
            self._blank_line(line.number)
        elif not line.text.lstrip(" \t").startswith("#"):  # a comment line is no boundary (R94-06)
            self._version_fits = False
            self._between = self._between or line.number
            yield from self._no_colon(line)

    def end(self) -> Iterator[Finding]:
        """Report what only the whole file shows."""
        yield from self._end_joined("the same records.")
        if not self._any_record:
            yield _found(0, "empty")
        elif self._any_for_group and not self._any_agent:
            yield _found(0, "no-group")

    def _blank_line(self, number: int) -> None:
        self._record_open = False
        self._version_fits = False  # DIA-04: after a blank line it no longer follows immediately
        if self._in_group and not self._has_rule:
            self._blank_in_group = self._blank_in_group or number
        if self._blank_ends_record:
            self._in_group = False

    def _record(self, line: TextLine) -> Iterator[Finding]:
        self._any_record = True
        self._any_for_group |= line.field not in _NEEDS_NO_GROUP
        second = SECOND_RECORD.search(line.value) if ":" in line.value else None
        if second and line.field in KNOWN_FIELDS and line.field != "comment":
            yield _found(line.number, "several-records", quoted(line.value[second.start() :]))
        if line.field == "user-agent":
            yield from self._agent(line)
        elif line.field in {"allow", "disallow"}:
            yield from self._rule(line)
        else:
            self._between = self._between or line.number
            yield from self._other(line)
            self._version_fits = False

    def _agent(self, line: TextLine) -> Iterator[Finding]:
        if not self._in_group or self._has_rule:
            if self._record_open:
                yield _found(line.number, "missing-blank-line")
            yield from self._end_joined("the same records.")
            self._has_rule = False
            self._version_line = 0
            self._agents.clear()
        elif (joint := self._between or self._blank_in_group) and len(self._joined) < MAX_FINDINGS:
            self._joined.append((joint, f"{_listed(self._agents)} and {quoted(line.value)}"))
        self._between = self._blank_in_group = 0
        self._agents.append(line.value)
        if self._version_line and self._record_open:  # V2-06: it must follow the last one
            yield _found(self._version_line, "misplaced-version")
            self._version_line = 0
        self._any_agent = self._in_group = self._version_fits = self._record_open = True
        yield from check_agent(line)

    def _rule(self, line: TextLine) -> Iterator[Finding]:
        self._version_fits = False
        if not self._in_group:
            yield _found(line.number, "rule-outside-group")
            return
        if self._blank_in_group and not self._has_rule:
            yield _found(self._blank_in_group, "blank-inside-group")
        yield from self._end_joined(f"{quoted(line.text.strip())} in line {line.number}.")
        self._has_rule = True
        self._blank_in_group = 0

    def _end_joined(self, shared: str) -> Iterator[Finding]:
        """Report the joined groups; `shared` is what all of their agents obey."""
        for number, agents in self._joined:
            yield _found(number, "joined-groups", f"{agents} obey {shared}")
        self._joined.clear()

    def _other(self, line: TextLine) -> Iterator[Finding]:
        if line.field not in KNOWN_FIELDS:
            meant = spelling(line.field)
            if meant is not None:
                yield _found(line.number, "misspelt-field", f"Did you mean {meant}?")
            elif field_without_colon(line.text):
                yield from self._no_colon(line)
            elif line.field in _INDEXING:
                detail = f"{quoted(line.field)}: search engines read X-Robots-Tag headers instead."
                yield _found(line.number, "unknown-field", detail, Severity.WARNING)
            else:
                yield _found(line.number, "unknown-field", quoted(line.field))
            return
        # A Content-Signal applies to the file only before the first group (SIG-12).
        if not self._in_group and (
            line.field not in _OUTSIDE_GROUPS
            or (line.field == "content-signal" and self._any_agent)
        ):
            yield _found(line.number, "record-outside-group")
        read = _READERS.get(line.field)
        if read is not None and read(line.value) is None:
            yield _found(line.number, f"bad-{line.field}", quoted(line.value))
        elif line.field == "content-usage":
            yield from self._content_usage(line.number, line.value)
        elif line.field == "robot-version":
            yield from self._robot_version(line.number, line.value)

    def _no_colon(self, line: TextLine) -> Iterator[Finding]:
        # After a known field, and where a path has none, a directive that robots should obey is
        # lost.
        lost = field_without_colon(line.text) or _BARE_PATH.match(line.text)
        error = Severity.ERROR if lost else None
        yield _found(line.number, "no-colon", quoted(line.text), error)

    def _content_usage(self, line: int, value: str) -> Iterator[Finding]:
        labels = signals.usage_labels(signals.split_content_usage(value)[1])
        if not labels or not any(labels.values()):
            yield _found(line, "bad-content-usage", quoted(value))
            return
        unusable = [label for label in labels if label in signals.CATEGORIES and not labels[label]]
        if unusable:
            yield _found(line, "bad-content-usage", quoted(", ".join(unusable)))
        unknown = [label for label in labels if label not in signals.CATEGORIES]
        if unknown:
            yield _found(line, "unknown-usage-label", quoted(", ".join(unknown)))

    def _robot_version(self, line: int, value: str) -> Iterator[Finding]:
        if self._version_fits:
            self._version_line = line
            yield from check_version(line, value)
        else:
            code = "repeated-version" if self._version_line else "misplaced-version"
            yield _found(line, code)


def _parse_signal(value: str) -> bool | None:
    """Return None if any pair of a Content-Signal is malformed, or there is none."""
    pairs = [pair for pair in dict.fromkeys(value.split(",")) if pair.strip(" \t")]
    return (bool(pairs) and all(map(signals.parse_content_signal, pairs))) or None


_READERS: dict[str, Callable[[str], object]] = {
    "sitemap": signals.absolute_url,
    "license": signals.absolute_url,
    "host": signals.parse_host,
    "clean-param": signals.parse_clean_param,
    "crawl-delay": timing.parse_crawl_delay,
    "request-rate": timing.parse_request_rate,
    "visit-time": timing.parse_visit_time,
    "content-signal": _parse_signal,
}
"""Functions that return None for an unusable value, by field."""
