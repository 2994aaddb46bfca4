"""Coverage-guided fuzzing of everything that reads hostile text. Linux only, not part of pytest.

    pip install atheris
    python tests/fuzz/fuzz_robots.py -max_total_time=600 -max_len=4096 -timeout=10

Further arguments are libFuzzer's; a directory named first is the corpus and is added to. A
finding ends the run with a traceback and a `crash-...` file; run that file again with
`python tests/fuzz/fuzz_robots.py crash-...`.

Promises that are checked: nothing in a file makes parsing, deciding or linting raise; both
ways of asking (`allowed`, `match`) agree, and the deciding rule is in the file; what
survives a pickle answers the same; no line and no header field makes its reader raise.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from datetime import UTC, datetime

import atheris

with atheris.instrument_imports(include=["gatekeeper.robots", "gatekeeper.urls"]):
    from gatekeeper import urls
    from gatekeeper.errors import InvalidURL
    from gatekeeper.page_rules import page_signals
    from gatekeeper.robots import RobotsTxt, signals, timing

_DIALECTS = ("auto", "rfc9309", "1994", "1996", "2.0")
_NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)
_DICTIONARY = (
    *("User-agent: ", "Disallow: ", "Allow: ", "Robot-version: 2.0\n", "Robot-version: 1.0\n"),
    *("Crawl-delay: ", "Request-rate: 1/10m 1300-1659\n", "Visit-time: 2200-0159\n", "*", "$"),
    *("Content-Usage: /a train-ai=n\n", "Content-Signal: search=no\n", "[a-z]", "[!", "\\", "%2F"),
    *("\r\n", "\r", "\ufeff", "# ", "http://", "@", ":80", "/../", "%2e", "unavailable_after: "),
)


def check_file(data: atheris.FuzzedDataProvider) -> None:
    dialect = _DIALECTS[data.ConsumeIntInRange(0, len(_DIALECTS) - 1)]
    semantics = "precedence" if data.ConsumeBool() else "order"
    path = "/" + data.ConsumeUnicodeNoSurrogates(data.ConsumeIntInRange(0, 60))
    body = data.ConsumeBytes(data.remaining_bytes())
    robots = RobotsTxt.parse(body, dialect=dialect)
    lines = robots.text.split("\n")
    try:
        path = urls.split("http://example.com" + path)[1]
    except InvalidURL:
        path = "/a/b?c"
    again = pickle.loads(pickle.dumps(robots))
    assert again == robots
    for agent in ("a", "b-c", "*"):
        policy = robots.policy(agent, v2_semantics=semantics)
        match = policy.match(path)
        assert match.allowed == policy.allowed(path), "allowed and match disagree"
        assert match.allowed == again.policy(agent, v2_semantics=semantics).allowed(path)
        if match.rule is not None:
            assert lines[match.rule.line - 1] == match.rule.text, "the rule is not in the file"
            assert match.candidates, "a rule decided that is no candidate"
        policy.interval(_NOW, 1.0)
        assert policy.next_visit(_NOW) >= _NOW
        policy.content_usage(path)
        policy.comments, policy.content_signal, policy.crawl_delay  # noqa: B018
    for finding in robots.findings:
        assert 0 <= finding.line <= len(lines) + 1
        assert finding.message.isprintable()
    robots.groups, robots.sitemaps, robots.licenses, robots.hosts  # noqa: B018
    robots.clean_params, robots.extensions  # noqa: B018


def check_values(data: atheris.FuzzedDataProvider) -> None:
    text = data.ConsumeUnicode(data.remaining_bytes())
    signals.parse_preferences(signals.split_content_usage(text)[1])
    signals.parse_content_signal(text)
    signals.parse_clean_param(text)
    signals.parse_host(text)
    timing.parse_crawl_delay(text)
    timing.parse_request_rate(text)
    timing.parse_visit_time(text)
    names = ("X-Robots-Tag", "Robots-Tag", "Content-Usage", "Link", "tdm-policy")
    page_signals(dict.fromkeys(names, text), "bot", url="https://example.com/")
    assert urls.mask(text).isprintable()


def test_one_input(octets: bytes) -> None:
    data = atheris.FuzzedDataProvider(octets)
    check = (check_file, check_file, check_values)[data.ConsumeIntInRange(0, 2)]
    check(data)


def main() -> None:
    """Run libFuzzer until it finds something or its time is up."""
    with tempfile.NamedTemporaryFile("w", suffix=".dict") as words:
        for word in _DICTIONARY:
            octets = "".join(f"\\x{octet:02x}" for octet in word.encode())
            words.write(f'"{octets}"\n')
        words.flush()
        atheris.Setup([*sys.argv, f"-dict={words.name}"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
