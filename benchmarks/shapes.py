"""Hostile files of 500 KiB: each is the worst case for one way of parsing or matching."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from benchmarks.corpus import AGENT

__all__ = ["LIMIT", "SHAPES", "Shape", "drawn"]

LIMIT = 512_000
_HOST = "https://www.site.example"
_LONG = 2_000
"""Length of the long URLs, which servers and browsers accept."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A file, and the URLs that are slowest with it."""

    name: str
    body: bytes
    paths: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the paths of this shape, and those slow for any shape, as absolute URLs."""
        common = ("/", "/" + "a" * _LONG, "/index.html?q=1", "/%41" + "%2F%E4" * (_LONG // 6))
        return tuple(_HOST + path for path in (*self.paths, *common))


_MAKERS: dict[str, Callable[[], Shape]] = {}


def _shape(name: str) -> Callable[[Callable[[], tuple[str, tuple[str, ...]]]], None]:
    def keep(make: Callable[[], tuple[str, tuple[str, ...]]]) -> None:
        def built() -> Shape:
            text, paths = make()
            return Shape(name, text.encode("utf-8")[:LIMIT], paths)

        _MAKERS[name] = built

    return keep


def _full(head: str, lines: Iterable[str]) -> str:
    """Return as many lines as fit within the limit."""
    parts, size = [head], len(head)
    for line in lines:
        size += len(line) + 1
        if size > LIMIT:
            break
        parts.append(line)
    return "\n".join(parts) + "\n"


def _group(lines: Iterable[str]) -> str:
    return _full("User-agent: *", lines)


@_shape("20,000 plain rules")
def _() -> tuple[str, tuple[str, ...]]:
    rng = random.Random(1)
    paths = [f"/{rng.randrange(10**9):x}" for _ in range(20_000)]
    return _group(f"Disallow: {path}" for path in paths), (paths[7] + "/x", paths[-1])


@_shape("20,000 rules, half with wildcards")
def _() -> tuple[str, tuple[str, ...]]:
    rng = random.Random(2)
    rules = [
        f"/{rng.randrange(10**6):x}" + ("*" + f"{rng.randrange(10**4):x}") * (index % 2)
        for index in range(20_000)
    ]
    return _group(f"Disallow: {rule}" for rule in rules), (rules[1].replace("*", "/y/"),)


@_shape("10,000 groups")
def _() -> tuple[str, tuple[str, ...]]:
    blocks = (f"User-agent: b{index}\nDisallow: /{index}\n" for index in range(10_000))
    return _full("", blocks) + "User-agent: *\nDisallow: /x\n", ("/x",)


@_shape("10,000 groups, all of our agent")
def _() -> tuple[str, tuple[str, ...]]:
    blocks = (f"User-agent: {AGENT}\nDisallow: /{index}\n" for index in range(10_000))
    return _full("", blocks), ("/9999", "/44")


@_shape("5,000 agents over 10,000 rules")
def _() -> tuple[str, tuple[str, ...]]:
    agents = "\n".join(f"User-agent: agent{index}" for index in range(5_000))
    rules = (f"Disallow: /{index}/x" for index in range(10_000))
    return _full(f"{agents}\nUser-agent: *", rules), ("/9999/x", "/44/x")


@_shape("30,000 agents, one rule")
def _() -> tuple[str, tuple[str, ...]]:
    agents = (f"User-agent:a{index:x}" for index in range(30_000))
    return _full("", agents) + "User-agent: *\nDisallow: /x\n", ("/x",)


@_shape("/a*a*...*b a thousand times")
def _() -> tuple[str, tuple[str, ...]]:
    rule = "Disallow: /" + "a*" * 240 + "b"
    return _group(rule for _ in range(1_000)), ("/" + "a" * 1_900 + "/", "/" + "a" * 1_900 + "b")


@_shape("/a*a*...*b, each another one")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /{'a*' * 240}b{index}" for index in range(1_100))
    return _group(rules), ("/" + "a" * 1_900 + "b", "/" + "ab" * 950)


@_shape("400,000 stars in one rule")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow: /{'*' * 400_000}x$\n", ("/" + "x" * _LONG,)


@_shape("200,000 times *a in one rule")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow: /{'*a' * 200_000}$\n", ("/" + "a" * _LONG,)


@_shape("no line end at all")
def _() -> tuple[str, tuple[str, ...]]:
    return "Disallow: /" + "a" * LIMIT, ("/a",)


@_shape("one rule of 500 kB")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow: /{'a' * 500_000}\n", ("/" + "a" * _LONG,)


@_shape("one rule of 160,000 escapes")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow: /{'%c3%A9%41' * 55_000}\n", ("/" + "%c3%A9A" * 280,)


@_shape("35,000 rules with escapes")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Allow:/%{index % 256:02x}%{index // 256 % 256:02X}" for index in range(35_000))
    return _group(rules), ("/%41%00", "/A%00")


@_shape("each rule a prefix of the next")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"{'Allow' if n % 2 else 'Disallow'}: /{'a' * n}" for n in range(1_000))
    return _group(rules), ("/" + "a" * 990 + "b",)


@_shape("40,000 wildcards that all hit")
def _() -> tuple[str, tuple[str, ...]]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    rules = (
        f"Allow:/*{letters[index % 26]}*{letters[index // 26 % 26]}" for index in range(40_000)
    )
    return _group(rules), ("/" + letters * 76, "/" + letters[::-1] * 76)


@_shape("25,000 wildcards, every piece there, the order wrong")
def _() -> tuple[str, tuple[str, ...]]:
    rng = random.Random(3)
    pieces = [f"{index:02x}" for index in range(256)]
    rules = (f"Allow:/*{'*'.join(rng.sample(pieces, 4))}$" for _ in range(25_000))
    return _group(rules), ("/" + "".join(pieces) * 3 + "/", "/" + "".join(reversed(pieces)) * 3)


@_shape("1,000 long pieces that nearly hit")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /*{'a' * 490}{index:x}" for index in range(1_000))
    return _group(rules), ("/" + "a" * _LONG, "/" + ("a" * 489 + "b") * 4)


@_shape("1,000 nearly periodic pieces")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /*{'a' * 240}b{'a' * 240}{index:x}" for index in range(1_000))
    return _group(rules), ("/" + ("a" * 240 + "b") * 8 + "a" * 100, "/" + "a" * _LONG)


@_shape("40,000 rules that end in $")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Allow:/*{index:x}$" for index in range(40_000))
    return _group(rules), ("/" + "f" * _LONG, "/9c3f")


@_shape("45,000 times the same rule")
def _() -> tuple[str, tuple[str, ...]]:
    return _group("Allow:/*a" for _ in range(46_000)), ("/" + "b" * _LONG,)


@_shape("draft 2.0: 20,000 classes")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /*[a-z]{index:x}[!0-9]?" for index in range(20_000))
    return _full("User-agent: *\nRobot-version: 2.0", rules), ("/" + "a1b2" * 480,)


@_shape("draft 2.0: one class of 400,000")
def _() -> tuple[str, tuple[str, ...]]:
    head = "User-agent: *\nRobot-version: 2.0\n"
    return f"{head}Disallow: /*[{'a-c' * 130_000}]x\n", ("/" + "ay" * 950,)


@_shape("draft 2.0: 150,000 times ?*")
def _() -> tuple[str, tuple[str, ...]]:
    head = "User-agent: *\nRobot-version: 2.0\n"
    return f"{head}Disallow: /{'?*' * 150_000}b\n", ("/" + "a" * _LONG,)


@_shape("draft 2.0: [a]*[b] a thousand times")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /{'[ab]*' * 90}{index:x}" for index in range(1_000))
    return _full("User-agent: *\nRobot-version: 2.0", rules), ("/" + "ab" * 900,)


@_shape("500,000 line ends")
def _() -> tuple[str, tuple[str, ...]]:
    return "User-agent: *\nDisallow: /x\n" + "\r" * 480_000, ("/x",)


@_shape("250,000 colons")
def _() -> tuple[str, tuple[str, ...]]:
    return "User-agent: *\n" + ":\n" * 250_000, ("/x",)


@_shape("draft 2.0: 160,000 short lines between two agents")
def _() -> tuple[str, tuple[str, ...]]:
    head = "User-agent: *\nRobot-version: 2.0\nDisallow: /x\n"
    return head + "x:\n" * 160_000 + "User-agent: b\nDisallow: /\n", ("/x",)


@_shape("500 kB of blanks before a colon")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow{' ' * 500_000}x: /\n", ("/x",)


@_shape("comment marks only")
def _() -> tuple[str, tuple[str, ...]]:
    return "User-agent: *\nDisallow: /x " + "#" * 500_000, ("/x",)


@_shape("100,000 unknown fields")
def _() -> tuple[str, tuple[str, ...]]:
    return _group(f"x{index % 1000}:y" for index in range(100_000)), ("/x",)


@_shape("30,000 misspelt fields")
def _() -> tuple[str, tuple[str, ...]]:
    return _group("Disalow: /x" if n % 2 else "Useragent: y" for n in range(30_000)), ("/x",)


@_shape("25,000 rates and windows")
def _() -> tuple[str, tuple[str, ...]]:
    lines = (
        f"Request-rate: {n + 1}/10m 0100-0{n % 10}00" if n % 2 else f"Visit-time: 0{n % 10}00-0959"
        for n in range(25_000)
    )
    return _group(lines), ("/x",)


@_shape("numbers of 120,000 digits")
def _() -> tuple[str, tuple[str, ...]]:
    digits = "9" * 120_000
    lines = (f"Crawl-delay: {digits}", f"Request-rate: {digits}/{digits}", f"Visit-time: {digits}")
    return _group(lines), ("/x",)


@_shape("20,000 sitemaps")
def _() -> tuple[str, tuple[str, ...]]:
    return _group(f"Sitemap: https://a.example/{n}" for n in range(20_000)), ("/x",)


@_shape("15,000 usage preferences")
def _() -> tuple[str, tuple[str, ...]]:
    return _group(f"Content-Usage: /{n}* train-ai=n" for n in range(15_000)), ("/4*",)


@_shape("random octets")
def _() -> tuple[str, tuple[str, ...]]:
    return random.Random(4).randbytes(LIMIT).decode("latin-1"), ("/x",)


@_shape("every control and line separator")
def _() -> tuple[str, tuple[str, ...]]:
    unit = "Disallow: /\x00\x0b\x0c\x1c\x85\u2028\ufeffx\r"
    return "User-agent: *\n" + unit * 20_000, ("/x",)


@_shape("deep in dots: /a/../a/..")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /{'a/../' * 90}{index}" for index in range(1_000))
    return _group(rules), ("/" + "a/../" * 380,)


_TEN_LETTERS = "/" + "abcdefgh" * 250
_V2 = "User-agent: *\nRobot-version: 2.0"


def _ab(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("ab", k=length))


def _rules(
    name: str, *paths: str, head: str = "User-agent: *"
) -> Callable[[Callable[[int], str]], None]:
    """Return a shape whose lines are made from their numbers, until the file is full."""

    def keep(line: Callable[[int], str]) -> None:
        _shape(name)(lambda: (_full(head, map(line, count())), paths))

    return keep


@_rules("pieces of random a and b", "/" + "ab" * 1_000)
def _(number: int) -> str:
    rng = random.Random(number)
    return f"Disallow: /*{_ab(rng, rng.randint(1, 40))}*q"


@_rules("two pieces of random a and b, and $", "/" + "ab" * 1_000)
def _(number: int) -> str:
    rng = random.Random(number)
    return f"Disallow: /*{_ab(rng, rng.randint(1, 20))}*{_ab(rng, rng.randint(1, 20))}$"


@_rules("three pieces of random a and b", "/" + "ab" * 1_000)
def _(number: int) -> str:
    rng = random.Random(number)
    return f"Disallow: /*{_ab(rng, rng.randint(1, 9))}*{_ab(rng, rng.randint(1, 9))}*{_ab(rng, 9)}"


@_shape("300 times a...ab a...a, few enough to be tried in turn")
def _() -> tuple[str, tuple[str, ...]]:
    rules = (f"Disallow: /*{'a' * (15 + n % 9)}b{'a' * (15 + n % 7)}" for n in range(300))
    return _group(rules), ("/" + "a" * _LONG,)


@_shape("one long piece that is nearly there, behind another")
def _() -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\nDisallow: /*{'x' * 8_000}*ab{'a' * 7_900}*c\n", ("/" + "a" * _LONG,)


@_rules("two heads, then numbers")
def _(number: int) -> str:
    return f"Disallow: /{'ab'[number % 2]}*{number:x}*{number % 97}"


@_rules("two numbers, the last one at the end")
def _(number: int) -> str:
    return f"Disallow: /*{number:x}*{number % 97}$"


@_rules("six of eight letters in every order", _TEN_LETTERS)
def _(number: int) -> str:
    return "Allow:/*" + "*".join(random.Random(number).sample("abcdefgh", 6))


@_rules("a* and b* and c*, all ways to 600", "/" + "a" * 700 + "b" + "c" * 700)
def _(number: int) -> str:
    return f"Disallow: /*{'a*' * (number % 600)}b*{'c*' * (600 - number % 600)}d"


@_rules("one long piece in every rule", "/category/" + "1/" * 900)
def _(number: int) -> str:
    return f"Disallow: /*/category/*/{number}/"


@_rules("escapes, wildcards and numbers")
def _(number: int) -> str:
    return f"Allow:/*%e3%8{number % 10}{number:x}*%2f"


@_rules("escapes behind a question mark", "/?a=/%3A" * 250)
def _(number: int) -> str:
    return f"Allow:/*?{number:x}=/%3a*"


@_rules("escapes before and behind a question mark", "/%3A?a=/%3A" * 180)
def _(number: int) -> str:
    return f"Allow:/*%3a{number:x}?/%2f*"


@_rules("whole URLs")
def _(number: int) -> str:
    return f"Disallow:http://a{number:x}/"


@_rules("draft 2.0: distinct classes", "/" + "ax1" * 600, head=_V2)
def _(number: int) -> str:
    a, b, c = number % 26, number // 26 % 26, number // 676 % 10
    return f"Disallow: /*[{chr(97 + a)}{chr(97 + b)}{c}]x?[!{number % 10}]"


@_rules("draft 2.0: question marks", head=_V2)
def _(number: int) -> str:
    return f"Disallow: /*{'?' * (number % 300)}*?a"


@_rules("draft 2.0: a thousand question marks a rule", head=_V2)
def _(number: int) -> str:
    return f"Disallow: /*[ab]{'?' * 1_000}[a-f]*{number}"


@_rules("draft 2.0: short patterns", head=_V2)
def _(number: int) -> str:
    return f"Allow:*{'?' * (number % 7)}[a-{chr(98 + number % 20)}]{number % 5}*"


@_rules("draft 2.0: short patterns with escapes", "/%61" * 500, head=_V2)
def _(number: int) -> str:
    return f"Allow:*%{number % 256:02x}[a]{number}*"


@_rules("draft 2.0: 10,000 patterns, as many as are taken", "/%61" * 500, head=_V2)
def _(number: int) -> str:
    return f"Allow:*%{number % 256:02x}[a]{number}*" if number < 9_999 else "#" * 100


@_rules("draft 2.0: plain values", head=_V2)
def _(number: int) -> str:
    return f"Disallow: /p{number}/{number}"


@_rules("draft 2.0: plain values with escapes", "/%61" * 500, head=_V2)
def _(number: int) -> str:
    return f"Disallow: /%{number % 256:02x}a%2f{number:x}"


@_rules("draft 2.0: stars", head=_V2)
def _(number: int) -> str:
    return f"Disallow: *a*{number}*b"


@_rules("draft 2.0: lone percents", "/%61" * 500, head=_V2)
def _(number: int) -> str:
    return f"Disallow: /*%{number:x}%%g%"


@_rules("draft 2.0: versions again and again", head="")
def _(number: int) -> str:
    return "User-agent: *\nRobot-version: 2.0\nDisallow: /*\n"


@_rules("escapes after a question mark and between stars", "/?a=%3A/%E4" * 180)
def _(number: int) -> str:
    return f"Disallow: /*?%3a*%2F{number % 10}*%{number % 256:02x}*{number:x}"


@_rules("escapes of two octets, each another one", "/%41%e4" * 280)
def _(number: int) -> str:
    return f"Disallow: /%{number % 256:02x}%{number // 256 % 256:02X}%{number % 251:02X}"


@_rules("usage of numbered paths")
def _(number: int) -> str:
    return f"Content-Usage: /{number}* train-ai=n, search=y"


@_rules("usage of 1,000 paths again and again")
def _(number: int) -> str:
    return f"Content-Usage: /*{number % 1_000:03} train-ai=n, search=y"


@_rules("signals, line after line")
def _(number: int) -> str:
    return f"Content-Signal: a{number}=no"


@_rules("delays")
def _(number: int) -> str:
    return f"Crawl-delay: {number}"


@_rules("comments for people")
def _(number: int) -> str:
    return f"Comment: {number}"


def _one(field: str, value: str) -> tuple[str, tuple[str, ...]]:
    return f"User-agent: *\n{field}: {value}\n", ("/x",)


_shape("one usage of 50,000 labels")(
    lambda: _one("Content-Usage", ", ".join(f"a{n}=y" for n in range(50_000)))
)
_shape("one usage of 230,000 inner values")(
    lambda: _one("Content-Usage", f"train-ai=({'a ' * 230_000})")
)
_shape("one usage of 230,000 parameters")(
    lambda: _one("Content-Usage", "train-ai=n" + ";a" * 230_000)
)
_shape("one signal of 57,000 names")(
    lambda: _one("Content-Signal", ",".join(f"a{n}=y" for n in range(57_000)))
)
_shape("one signal of commas")(lambda: _one("Content-Signal", "," * 480_000))
_shape("one rule of dollar signs")(lambda: _one("Disallow", "/" + "$" * 480_000))
_shape("one rule of percent signs")(lambda: _one("Disallow", "/*" + "%$" * 240_000))
_shape("lines of a control character")(lambda: _one("Disallow", "/" + "\n\1" * 240_000))


@_rules("Visit-times")
def _(number: int) -> str:
    return f"Visit-time: {number % 24:02}{number % 60:02}-{number % 23:02}{number % 59:02}"


@_rules("Request-rates")
def _(number: int) -> str:
    return f"Request-rate: 1/{number + 1} 0100-02{number % 60:02}"


def drawn(seed: int) -> Shape:
    """Draw a hostile file at random: lines of one kind, from pieces that repeat and overlap.

    The same seed gives the same file.
    """
    rng = random.Random(seed)
    letters = rng.choice(["ab", "abc", "0123456789abcdef", "a/", "a?=&", "a:/?", "xyz-_."])
    atoms = [
        *letters,
        *rng.sample(["*", "*", "%2f", "%3A", "%41", "%e4", "?", "$", "[a-c]", "\\a"], 4),
    ]
    weights = [rng.random() for _ in atoms]
    least, most = sorted((rng.randint(1, 12), rng.choice([2, 5, 12, 40, 400])))
    fields = rng.choice([("Allow",), ("Disallow",), ("Allow", "Disallow"), ("Content-Usage",)])
    numbered = rng.random() < 0.5
    head = rng.choice(["User-agent: *", "User-agent: *", _V2])

    def lines() -> Iterator[str]:
        for number in count():
            value = "".join(rng.choices(atoms, weights, k=rng.randint(least, most)))
            value = f"/{value}{number:x}" if numbered else f"/{value}"
            yield f"{fields[number % len(fields)]}:{value}" + " n=y" * (len(fields[0]) > 8)

    plain = [atom for atom in atoms if atom not in {"*", "[a-c]"}]
    paths = ["/" + "".join(rng.choices(plain, k=length)) for length in (60, 700, _LONG)]
    return Shape(f"drawn {seed}", _full(head, lines()).encode()[:LIMIT], tuple(paths))


SHAPES: dict[str, Callable[[], Shape]] = _MAKERS
