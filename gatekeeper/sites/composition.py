"""Merge several texts for one host into one file (`compose`), or compare two files by verdict
(`diff`).

A host has one robots.txt, to which several people may contribute. In RFC 9309 a named agent obeys
only its own group (section 2.2.1), so texts cannot simply be concatenated: a group for `ExampleBot`
in one of them would remove that agent from every `*` group of the others. `compose` writes the
complete group of each agent, and refuses contradictions that the authors have to resolve.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations
from typing import NamedTuple

import msgspec

from gatekeeper.robots.groups import WORD_END, agent_lines, group_starts, names_of
from gatekeeper.robots.model import Rule
from gatekeeper.robots.parser import LIMIT, Spans, to_octets, to_unicode
from gatekeeper.robots.patterns import rfc_pattern
from gatekeeper.robots.policy import RobotsTxt
from gatekeeper.robots.signals import split_content_usage
from gatekeeper.sites.columns import FILE_FIELDS
from gatekeeper.sites.witness import (
    Budget,
    Part,
    RankedRule,
    Reading,
    Readings,
    RuleTable,
    SearchGivenUp,
    answers,
    find_path,
    likely_paths,
    ranked,
)

MAX_PROBLEMS = 100
"""Maximum number of problems that are reported."""
MAX_CHANGES = 10_000
"""Maximum number of changes that `diff` returns; if there are more, the result is not
`complete`."""


class Fragment(msgspec.Struct, frozen=True):
    """One of the texts that are merged into a file.

    A comment before its first record may name its owner and the paths that it may mention: `#
    compose: owner=NAME prefix=/x/`.
    """

    name: str
    """Name used in messages and comments, usually the path of the file."""
    body: bytes | str
    """The text of the fragment."""


class FragmentLine(msgspec.Struct, frozen=True):
    """A line of a fragment."""

    name: str
    line: int
    """Line number, counting from 1; 0 for the fragment as a whole."""
    text: str = ""

    def __str__(self) -> str:
        place = f"{self.name}:{self.line}" if self.line else self.name
        return f"{place} ({self.text.strip()})" if self.text else place


class ComposeProblem(msgspec.Struct, frozen=True):
    """A reason why no file is written.

    `code` is one of: `header` (an invalid `# compose:` line), `truncated` (a fragment larger than
    crawlers read), `version` (Robot-version: its rule sets cannot be merged), `agents` (two names
    that robots cannot distinguish), `outside` (a rule that matches outside the fragment's prefix),
    `conflict` (lines of two fragments that decide one URL differently), `undecided` (the search for
    a conflict was given up), `size`, `too-many`.
    """

    code: str
    """One word for the kind of problem: see above."""
    message: str
    """The complete message, including the places."""
    places: tuple[FragmentLine, ...] = ()
    """The lines concerned."""
    url: str | None = None
    """A path for which the problem occurs, if any."""
    agent: str | None = None
    """The agent concerned, if any; `*` means every robot that no fragment names."""


class Composed(msgspec.Struct, frozen=True):
    """The result of `compose`: the text of a file, or problems."""

    text: str | None
    """The text of the file; None if there are problems."""
    problems: tuple[ComposeProblem, ...] = ()
    """Why there is no text."""


class _Problems:
    """Collects problems, at most `MAX_PROBLEMS`."""

    def __init__(self) -> None:
        self.found: list[ComposeProblem] = []

    @property
    def full(self) -> bool:
        """Whether no further problem is listed."""
        return len(self.found) > MAX_PROBLEMS

    def add(self, code: str, message: str, *places: FragmentLine, **about: str | None) -> None:
        """Add a problem, with its places before the message. `about`: its `url` and `agent`."""
        if len(self.found) < MAX_PROBLEMS:
            text = f"{' and '.join(map(str, places))}: {message}" if places else message
            self.found.append(ComposeProblem(code, text, places, **about))
        elif len(self.found) == MAX_PROBLEMS:
            self.found.append(ComposeProblem("too-many", "there are more problems than are listed"))


# --- agents ----------------------------------------------------------------------------------

_PRODUCT_TOKEN = re.compile(r"[^\s/;,()]+\Z")
"""Matches a possible product token: `parser.product_token` returns nothing else."""
_IDENTIFIER = re.compile(r"[A-Za-z_-]*")


def named_agents(robots: RobotsTxt) -> dict[str, str]:
    """Return the agents that a file names, in file order: lower-case name to name as written.

    >>> named_agents(RobotsTxt.parse("User-agent: ExampleBot/2.1\\nUser-agent: *\\nDisallow:"))
    {'examplebot': 'ExampleBot', '*': '*'}
    """
    found: dict[str, str] = {}
    for value in chain.from_iterable(group.agents for group in robots.groups):
        written = WORD_END.split(value, maxsplit=1)[0]
        if not _PRODUCT_TOKEN.match(written):
            written = _IDENTIFIER.match(value)[0]  # type: ignore[index] # it always matches
        if written:
            found.setdefault(written.lower(), written)
    return found


def _all_names(robots: RobotsTxt) -> set[str]:
    """Return every name for which an agent obeys a group of its own; `bot` also obeys a group for
    `Bot2`."""
    values = {value for _, _, value in agent_lines(robots.lines.lower())}
    return {name for value in values for name in names_of(value) if _PRODUCT_TOKEN.match(name)}


# --- fragments -------------------------------------------------------------------------------

_HEADER = re.compile(r"[ \t]*#[ \t]*compose:(.*)", re.IGNORECASE)
_SETTING = re.compile(r"(owner|prefix)=(\S+)\Z")
_PREFIX = re.compile(r"/[^*$?#\s]*\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f]").search
_RULES = frozenset({"allow", "disallow"})


class _Record(msgspec.Struct, frozen=True):
    """A record of a fragment. All text is octets in a str."""

    number: int
    start: int
    """Offset in the text."""
    field: str
    """The field as written."""
    value: str
    comment: str
    """The comment after the value."""
    above: tuple[str, ...]
    """The comment lines before the record."""

    @property
    def kind(self) -> str:
        """The field in lower case."""
        return self.field.lower()

    @property
    def record(self) -> str:
        """The line as it is written to the file."""
        return f"{self.field}: {_utf8(self.value)}".rstrip(" ")


def _utf8(value: str) -> str:
    """Return the value with invalid UTF-8 escaped, which is equivalent (RFC 9309 section 2.2.2,
    RFC-22)."""
    try:
        value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return "".join(char if char < "\x80" else f"%{ord(char):02X}" for char in value)
    return value


class _Source:
    """A parsed fragment."""

    def __init__(self, fragment: Fragment, problems: _Problems) -> None:
        self.name = fragment.name
        self.robots = RobotsTxt.parse(fragment.body)
        self.owner = self.prefix = ""
        self.head: list[str] = []
        """Comments that belong to no record."""
        self.lines: list[_Record] = []
        self.grouped: list[_Record] = []
        """The rules and records that belong to a group."""
        self.before_groups: list[_Record] = []
        """The records before the first user-agent line. Of these only Content-Signal has a meaning:
        for the whole file (SIG-12)."""
        self.anywhere: list[_Record] = []
        """The records that belong to no group, such as Sitemap."""
        self.introductions: dict[str, list[str]] = {}
        """The comments at the user-agent lines of an agent."""
        self._texts = self.robots.lines.split("\n")
        self.readings = Readings(self.robots)
        self._read(problems)
        self._sort()
        self._starts = [line.start for line in self.grouped]
        self._by_spans: dict[Spans, tuple[_Record, ...]] = {}
        if self.robots.truncated:
            problems.add("truncated", "longer than the 500 KiB that crawlers read", self.at(0))
        versions = [line for line in self.lines if line.kind == "robot-version"]
        if versions:
            message = "Robot-version declares a rule set of its own, which can't be merged"
            problems.add("version", message, self.at(versions[0].number))

    def at(self, line: int) -> FragmentLine:
        """Return a line of this fragment."""
        return FragmentLine(self.name, line, to_unicode(self._texts[line - 1]) if line else "")

    def _read(self, problems: _Problems) -> None:
        above: list[str] = []
        offset = 0
        for number, raw in enumerate(self._texts, 1):
            start, offset = offset, offset + len(raw) + 1
            record, mark, comment = raw.partition("#")
            field, colon, value = (part.strip(" \t") for part in record.partition(":"))
            if colon and field:
                comment = comment.strip(" \t")
                self.lines.append(_Record(number, start, field, value, comment, tuple(above)))
                above = []
            elif mark and not field:
                header = _HEADER.match(raw)
                if header is not None:
                    self._header(to_unicode(header[1]), number, problems)
                elif not _CONTROL(raw):  # a line with a control character is read as a comment
                    above.append(raw.strip(" \t"))
            elif not field and not self.lines:
                self.head += above  # separated from the first record by a blank line
                above = []
        self.head += above

    def _header(self, text: str, number: int, problems: _Problems) -> None:
        if self.lines or self.owner or self.prefix:
            message = "`# compose:` may occur only once, before the first record"
            problems.add("header", message, self.at(number))
            return
        for word in text.split() or [""]:
            found = _SETTING.match(word)
            if found is None:
                message = f"{word!r} is neither owner=NAME nor prefix=/PATH"
                problems.add("header", message, self.at(number))
            elif found[1] == "owner":
                self.owner = found[2]
            elif _PREFIX.match(found[2]):
                self.prefix = rfc_pattern(to_octets(found[2]))
            else:
                message = "a prefix is the beginning of a path, without `*`, `$`, `?` and `#`"
                problems.add("header", message, self.at(number))

    def for_agent(self, agent: str) -> tuple[_Record, ...]:
        """Return the rules and records of the groups that the agent obeys, in file order.

        Agents with the same lines get the same tuple.
        """
        reading = self.readings.of(agent)
        spans = () if reading is None else reading.spans
        if spans not in self._by_spans:
            starts, found = self._starts, list[_Record]()
            for low, high in spans:
                found += self.grouped[bisect_left(starts, low) : bisect_left(starts, high)]
            self._by_spans[spans] = tuple(found)  # of no records there is one tuple
        return self._by_spans[spans]

    def _sort(self) -> None:
        starts = group_starts(self.robots.lines)
        first = starts[0] if starts else len(self.robots.lines) + 1
        for line in self.lines:
            if line.kind in FILE_FIELDS:
                self.anywhere.append(line)
            elif line.start < first:
                self.before_groups.append(line)
            elif line.kind != "user-agent":
                self.grouped.append(line)
            elif line.above or line.comment:
                comments = self.introductions.setdefault(WORD_END.split(line.value)[0].lower(), [])
                comments += [*line.above, *([f"# {line.comment}"] if line.comment else [])]


# --- compose ---------------------------------------------------------------------------------


def compose(fragments: Iterable[Fragment]) -> Composed:
    """Merge several texts into one file in which each agent has one group.

    A named agent gets the rules of every fragment: those for its name, or those for `*` from a
    fragment that does not name it. Comments, Sitemap and other records are copied, with the name of
    their fragment. The same fragments in the same order give the same text.

    The result has problems instead of a text if a fragment has rules outside its prefix, if two
    fragments decide one URL differently, or if the file would be longer than crawlers read.

    >>> cart = "# compose: prefix=/shop/\\nUser-agent: *\\nDisallow: /shop/cart"
    >>> shop = Fragment("shop.txt", cart)
    >>> blog = Fragment("blog.txt", "User-agent: ExampleBot\\nDisallow: /drafts")
    >>> print(compose([shop, blog]).text)
    # Composed of:
    #   shop.txt (prefix /shop/)
    #   blog.txt
    <BLANKLINE>
    User-agent: *
    # shop.txt
    Disallow: /shop/cart
    <BLANKLINE>
    User-agent: ExampleBot
    # shop.txt
    Disallow: /shop/cart
    # blog.txt
    Disallow: /drafts
    <BLANKLINE>
    """
    problems = _Problems()
    sources = [_Source(fragment, problems) for fragment in fragments]
    agents: dict[str, str] = {}
    for source in sources:
        for name, written in named_agents(source.robots).items():
            agents.setdefault(name, written)
        _check_names(source, problems)
    budget = Budget()
    for source in sources:
        _check_prefix(source, budget, problems)
    _check_conflicts(sources, ["*", *(name for name in agents if name != "*")], problems)
    text = None
    if not problems.found:
        text = _Writer(sources, agents).text()
        _check_text(text, sources, problems)
    return Composed(None if problems.found else text, tuple(problems.found))


class _Writer:
    """Writes the file. The text is octets in a str until the end."""

    def __init__(self, sources: Sequence[_Source], agents: dict[str, str]) -> None:
        self._sources = sources
        self._agents = agents
        self._commented: set[tuple[str, int]] = set()
        """Lines whose comments were written. They are written once, even if several groups have the
        line."""

    def text(self) -> str:
        """Return the whole file."""
        blocks = [self._head(), self._records((s, s.before_groups) for s in self._sources)]
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(self._agents, key=lambda name: name != "*"):  # `*` first
            key = tuple(id(source.for_agent(name)) for source in self._sources)
            groups.setdefault(key, []).append(name)
        size = 0
        for names in groups.values():
            blocks.append(self._group(names))
            size += sum(map(len, blocks[-1]))
            if size > LIMIT:
                break  # `_check_text` refuses it
        blocks.append(self._records((s, s.anywhere) for s in self._sources))
        return to_unicode("\n\n".join("\n".join(block) for block in blocks if block) + "\n")

    def _head(self) -> list[str]:
        lines = ["# Composed of:"]
        for source in self._sources:
            details = [f"owner {to_octets(source.owner)}"] if source.owner else []
            details += [f"prefix {source.prefix}"] if source.prefix else []
            lines.append(f"#   {_label(source)}" + (f" ({', '.join(details)})" if details else ""))
        for source in self._sources:
            if source.head:
                lines += ["#", f"# {_label(source)}", *source.head]
        return lines

    def _group(self, names: Sequence[str]) -> list[str]:
        block: list[str] = []
        for source in self._sources:
            comments = [line for name in names for line in source.introductions.get(name, ())]
            block += [f"# {_label(source)}", *comments] if comments else []
        block += [f"User-agent: {self._agents[name]}" for name in names]
        body = self._records((source, source.for_agent(names[0])) for source in self._sources)
        if not any(line.partition(":")[0].lower() in _RULES for line in body):
            # Without a rule the next user-agent line would join the group (RFC 9309 section 2.1,
            # RFC-02).
            body.append("Disallow:")
        return block + body

    def _records(self, columns: Iterable[tuple[_Source, Sequence[_Record]]]) -> list[str]:
        block: list[str] = []
        written: set[tuple[str, str]] = set()
        for source, lines in columns:
            label = [f"# {_label(source)}"]
            for line in lines:
                if (line.kind, line.value) in written:
                    continue
                written.add((line.kind, line.value))
                block += label + self._with_comments(source, line)
                label = []
        return block

    def _with_comments(self, source: _Source, line: _Record) -> list[str]:
        if (source.name, line.number) in self._commented:
            return [line.record]
        self._commented.add((source.name, line.number))
        return [*line.above, f"{line.record}  # {line.comment}" if line.comment else line.record]


def _label(source: _Source) -> str:
    """Return the name of a fragment for comments, on a single line."""
    return to_octets("".join(char if char.isprintable() else "?" for char in source.name))


def _check_names(source: _Source, problems: _Problems) -> None:
    for line in source.lines:
        if line.kind == "user-agent" and not line.value.isascii():
            message = "no robot has a name that is not ASCII (RFC 9309 section 2.2.1); remove it"
            problems.add("agents", message, source.at(line.number))


def _check_prefix(source: _Source, budget: Budget, problems: _Problems) -> None:
    """Check that no rule of the fragment matches a path outside its prefix."""
    prefix = ranked(0, True, source.prefix)
    if prefix is None:
        return
    seen: dict[str, tuple[str | None, bool]] = {}
    # By pattern: a path outside the prefix, if any, and whether the search for it finished.
    for line in source.grouped:
        path = split_content_usage(line.value)[0] if line.kind == "content-usage" else line.value
        rule = ranked(1, True, path) if line.kind in {*_RULES, "content-usage"} else None
        if rule is None or rule.head.startswith(prefix.head):
            continue
        if rule.pattern not in seen:
            parts = [(RuleTable([rule]), rule), (RuleTable([prefix]), None)]
            try:
                seen[rule.pattern] = find_path(parts, budget), True
            except SearchGivenUp:
                seen[rule.pattern] = None, False
        url, known = seen[rule.pattern]
        if not known:
            message = f"the search for a match outside the prefix {source.prefix} was given up"
            problems.add("undecided", message, source.at(line.number))
        elif url is not None:
            message = f"matches {url}, outside the fragment's prefix {source.prefix}"
            problems.add("outside", message, source.at(line.number), url=url)


_Question = tuple[str, _Source, int, _Source, int]
"""An agent, and two opposed lines of two fragments: do they decide the same URL?"""


def _check_conflicts(
    sources: Sequence[_Source], agents: Iterable[str], problems: _Problems
) -> None:
    """Check that no URL is decided differently by lines of two fragments."""
    reported: set[tuple[object, ...]] = set()
    for question, url, stopped in answers(_questions(sources, agents), Budget(share=2)):
        agent, one, line, other, number = question
        if problems.full:
            return
        if question[1:] in reported:
            continue
        reported.add(question[1:])
        message = f"they decide {url} differently"
        if url is None:
            message = "the search for a URL that they decide differently was given up"
        if agent != "*":
            message += f" for {agent}"
        if stopped:
            message += "; the lines after these were not compared"
        code = "undecided" if url is None else "conflict"
        problems.add(code, message, one.at(line), other.at(number), url=url, agent=agent)


def _questions(
    sources: Sequence[_Source], agents: Iterable[str]
) -> Iterator[tuple[_Question, Sequence[Part]]]:
    for one, other in combinations(sources, 2):
        compared: set[tuple[Spans, Spans]] = set()
        for agent in agents:
            mine, theirs = one.readings.of(agent), other.readings.of(agent)
            if mine is None or theirs is None or (mine.spans, theirs.spans) in compared:
                continue
            compared.add((mine.spans, theirs.spans))
            for rule, against in _opposed(mine, theirs):
                lines = mine.lines[rule.number].line, theirs.lines[against.number].line
                question = agent, one, lines[0], other, lines[1]
                yield question, ((mine, rule), (theirs, against))


def _opposed(one: Reading, other: Reading) -> Iterator[tuple[RankedRule, RankedRule]]:
    """Yield the pairs of rules, one of each reading, of which one allows what the other may
    deny."""
    for rule in one.table.rules:
        for against in other.table.candidates(rule.head):
            if rule.allow != against.allow:
                yield rule, against


def _check_text(text: str, sources: Sequence[_Source], problems: _Problems) -> None:
    """Check that the file is short enough and gives every agent the rules of the fragments."""
    size = len(text.encode())
    if size > LIMIT:
        problems.add("size", f"{size} octets; crawlers read {LIMIT} (RFC 9309 section 2.5)")
        return
    readings = Readings(RobotsTxt.parse(text))
    names = set().union(*(_all_names(source.robots) for source in sources))
    for name in sorted(names):
        composed = readings.of(name)
        given = (source.readings.of(name) for source in sources)
        expected = frozenset(
            chain.from_iterable(each.table.meaning for each in given if each is not None)
        )
        if composed is None or composed.table.meaning != expected:
            message = f"robots called {name!r} would read another agent's group as their own; "
            problems.add("agents", message + "write the names without digits", agent=name)


# --- diff ------------------------------------------------------------------------------------


class Ruling(msgspec.Struct, frozen=True):
    """The verdict of one file about a URL."""

    allowed: bool
    """Whether the URL may be fetched."""
    rule: Rule | None
    """The deciding line; None if no rule matched."""


class Change(msgspec.Struct, frozen=True):
    """A URL that one file allows and the other denies."""

    agents: tuple[str, ...]
    """The agents concerned, which all obey the same lines in both files. `*` means every robot that
    neither file names."""
    url: str
    """The URL as given, or a path that these two lines decide differently."""
    old: Ruling
    """The verdict of the old file."""
    new: Ruling
    """The verdict of the new file."""


class Difference(msgspec.Struct, frozen=True):
    """The result of `diff`."""

    changes: tuple[Change, ...]
    """The URLs whose verdict changes."""
    complete: bool
    """Whether every pair of lines that decides some URL differently is among the changes. If not, a
    search was given up, or a rule set has another dialect than RFC 9309."""
    unsearched: tuple[tuple[Rule | None, Rule | None], ...] = ()
    """Lines of both files for which the search was given up, at most 100."""
    stopped: bool = False
    """Whether the search ended at the first of them: nothing that follows it was compared."""


def diff(
    old: RobotsTxt, new: RobotsTxt, *, agents: Iterable[str] | None = None, urls: Iterable[str] = ()
) -> Difference:
    """Return the verdicts that differ between two files, with both deciding lines.

    `agents` defaults to all agents that either file names, and `*` for all others. `urls` are
    always compared; in addition one path is found for each pair of lines that decides some URL
    differently. Raises InvalidURL for a malformed URL.

    >>> old = RobotsTxt.parse("User-agent: *\\nDisallow: /a")
    >>> new = RobotsTxt.parse("User-agent: *\\nDisallow: /a\\nAllow: /a/b")
    >>> [(c.agents, c.url, c.old.rule.line, c.new.rule.line) for c in diff(old, new).changes]
    [(('*',), '/a/b', 2, 3)]
    """
    if agents is None:
        agents = dict.fromkeys([*named_agents(old), *named_agents(new), "*"])
    given = list(urls)
    readings = Readings(old), Readings(new)
    groups: dict[object, list[str]] = {}
    for agent in agents:
        sides = [each.of(agent) for each in readings]
        spans = tuple(side and side.spans for side in sides)
        groups.setdefault(agent if None in spans else spans, []).append(agent)
    compared = [
        _Comparison(tuple(members), (old, new), *(each.of(members[0]) for each in readings))
        for members in groups.values()
    ]
    complete = all(each.exact for each in compared)
    changes: dict[tuple[int, int], Change] = {}
    for place, each in enumerate(compared):
        changes |= {(place, -1 - n): change for n, change in enumerate(each.given(given))}
    unsearched: list[tuple[Rule | None, Rule | None]] = []
    stopped = False
    for (key, names, rulings), url, ends in answers(_pairs(compared), Budget(share=2)):
        stopped |= ends
        if url is None:
            unsearched.append((rulings[0].rule, rulings[1].rule))
        elif url not in given:
            changes[key] = Change(names, url, *rulings)
        if len(changes) > MAX_CHANGES or len(unsearched) >= _MAX_UNSEARCHED:
            break
    complete = complete and not unsearched and len(changes) <= MAX_CHANGES
    found = [changes[key] for key in sorted(changes)][:MAX_CHANGES]
    return Difference(tuple(found), complete, tuple(unsearched), stopped)


_MAX_UNSEARCHED = 100
_Pair = tuple[tuple[int, int], tuple[str, ...], tuple[Ruling, Ruling]]
"""The place of a change in the result, its agents, and what two lines say."""


def _pairs(compared: Sequence[_Comparison]) -> Iterator[tuple[_Pair, Sequence[Part]]]:
    for place, each in enumerate(compared):
        old, new = each.old, each.new
        if old is not None and new is not None:
            for number, (before, after) in enumerate(_unequal(old, new)):
                rulings = _by(old, before), _by(new, after)
                yield ((place, number), each.agents, rulings), ((old, before), (new, after))


class _Comparison(NamedTuple):
    """Two files for agents that obey the same lines."""

    agents: tuple[str, ...]
    files: tuple[RobotsTxt, RobotsTxt]
    old: Reading | None
    new: Reading | None

    @property
    def exact(self) -> bool:
        """Whether a search finds every difference."""
        return self.files[0] == self.files[1] or None not in (self.old, self.new)

    def given(self, urls: Iterable[str]) -> Iterator[Change]:
        """Yield the changes about these URLs; without a search, about likely paths as well."""
        urls = list(urls)
        if self.old is None or self.new is None:
            urls += self._likely()
        if not urls:
            return  # a policy reads its whole file
        policies = [robots.policy(self.agents[0]) for robots in self.files]
        for url in dict.fromkeys(urls):
            old, new = (policy.match(url) for policy in policies)
            if old.allowed != new.allowed:
                rulings = (Ruling(match.allowed, match.rule) for match in (old, new))
                yield Change(self.agents, url, *rulings)

    def _likely(self) -> Iterator[str]:
        for robots in self.files:
            for rule in chain.from_iterable(group.rules for group in robots.groups):
                yield from likely_paths(to_octets(rule.value))


def _by(reading: Reading, rule: RankedRule | None) -> Ruling:
    return Ruling(rule is None or rule.allow, reading.line_of(rule))


def _unequal(old: Reading, new: Reading) -> Iterator[tuple[RankedRule | None, RankedRule | None]]:
    """Yield the pairs of rules, one of each file, that may decide some URL differently.

    One of the two rules is missing in the other file: if both files had both rules, each rule would
    match the URL in either file, and the one with precedence would decide in both.
    """
    common = old.table.meaning & new.table.meaning
    for rule in old.table.rules:
        gone = (rule.allow, rule.pattern) not in common
        if gone and not rule.allow:
            yield rule, None
        for against in new.table.candidates(rule.head):
            if rule.allow != against.allow and (
                gone or (against.allow, against.pattern) not in common
            ):
                yield rule, against
    for rule in new.table.rules:
        if not rule.allow and (rule.allow, rule.pattern) not in common:
            yield None, rule
