"""Coverage-guided fuzzing of the one reader of URLs. Linux only, not part of pytest.

    pip install atheris
    python tests/fuzz/fuzz_urls.py -max_total_time=600 -max_len=400 -timeout=10

Further arguments are libFuzzer's, as in fuzz_robots.py. yarl and idna are instrumented as well:
it is their errors that must not come through.

Promises that are checked: nothing but InvalidURL leaves `parse`, `split`, `path_of`, `join` and
`sendable`, whatever the text; `mask` and `split_ordinary` raise nothing; what was
read reads the same again, the second time, and by every reader; no message shows what stands
between a `:` and an `@`.
"""

from __future__ import annotations

import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["gatekeeper.urls", "gatekeeper.urls", "yarl", "idna"]):
    import idna  # noqa: F401 - instrumented
    from yarl import URL

    from gatekeeper import urls
    from gatekeeper.errors import InvalidURL

_BASES = tuple(
    map(urls.parse, ("https://example.com/a/b?c", "http://[::1]:8080", "http://a.example/a/"))
)
_PREFIXES = ("", "http://", "https://example.com", "http:/", "//", "http://xn--", "http://[")
_SECRET = "S3CRET"
_DICTIONARY = (
    *("http://", "https://", "http:", "//", "xn--", "XN--", "@", "%40", ":80", "[::1]", "%25"),
    *("/../", "/./", "%2e", "\\", "ß", "ς", "Ⅷ", "ſ", "①", "。", "．", "＠", "\u200b", "\xad", "İ"),
    *("0x", "127.0.0.1", "-", "_", "..", "?", "#", f"a:{_SECRET}@", "ｘｎ－－", "١", "\U000e0001"),
)


def check_text(raw: str) -> None:
    """Every reader of one text."""
    shown = urls.mask(raw)
    assert shown.isprintable()
    ordinary = urls.split_ordinary(raw)
    target = _reads(urls.parse, raw)
    _reads(urls.path_of, raw)
    if target is None:
        assert ordinary is None
        assert _reads(urls.split, raw) is None, "one reader refuses it, another one does not"
        return
    found = target.origin, target.path
    assert ordinary in {None, found}
    assert urls.split(raw) == found
    assert urls.split(raw) == found, "the second time it is read in another way"
    assert urls.path_of(raw) == target.path
    assert urls.parse(target.url).url == target.url
    assert urls.host_of(target.origin) == target.host
    if target.userinfo and raw.rfind(_SECRET) < raw.rfind("@"):
        assert _SECRET not in shown


def check_reference(base: urls.Target, reference: str) -> None:
    """A reference found at a base."""
    target = _reads(lambda text: urls.join(base, text), reference)
    if target is not None:
        assert urls.parse(target.url).url == target.url


def check_sent(raw: str) -> None:
    """The same text as yarl takes it when told to leave it alone."""
    try:
        url = URL(raw, encoded=True)
    except (ValueError, IndexError):
        return
    text = _reads(urls.sendable, url)
    if text is not None:
        assert " " not in url.raw_path_qs


def _reads(read, given):
    """What it makes of it; None where it raises the one error that it may."""
    try:
        return read(given)
    except InvalidURL as error:
        message = str(error)
    assert message.isprintable()
    return None


def test_one_input(octets: bytes) -> None:
    """One input of the fuzzer."""
    data = atheris.FuzzedDataProvider(octets)
    which = data.ConsumeIntInRange(0, 3)
    base = _BASES[data.ConsumeIntInRange(0, len(_BASES) - 1)]
    prefix = _PREFIXES[data.ConsumeIntInRange(0, len(_PREFIXES) - 1)]
    # Half of the time any characters at all, half of the time UTF-8: the dictionary is that.
    if data.ConsumeBool():
        rest = data.ConsumeUnicode(data.remaining_bytes())
    else:
        rest = data.ConsumeBytes(data.remaining_bytes()).decode(errors="replace")
    raw = prefix + rest
    if which == 0:
        check_text(raw)
    elif which == 1:
        check_reference(base, raw)
    elif which == 2:
        check_sent(raw)
    else:
        check_reference(base, raw)
        check_text(raw)


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
