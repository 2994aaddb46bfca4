"""Mistakes of a caller that no type checker looked at: TypeErrors that name the remedy.

`masking.not_text` is the one about what is asked as a URL.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["refuse_one_text", "wrong_report"]


def refuse_one_text(urls: Iterable[str]) -> None:
    """Raise TypeError for a text, of which each character would be a URL, and what can't be read
    one by one.

    >>> refuse_one_text("https://example.org/")
    Traceback (most recent call last):
    TypeError: urls must be a list of URLs, not one str: give [url], or ask check(url)
    """
    if isinstance(urls, str | bytes | bytearray):
        kind = type(urls).__name__
        raise TypeError(
            f"urls must be a list of URLs, not one {kind}: give [url], or ask check(url)"
        )
    if not isinstance(urls, Iterable):
        raise TypeError(
            f"urls must be a list of URLs, or another iterable, not {type(urls).__name__}"
        )


_WHOLE = frozenset({type(None), int})
_NUMBER = _WHOLE | {float}
_FIELD = _NUMBER | {str}


def wrong_report(
    status: object, elapsed: object, retry_after: object, size: object
) -> TypeError | None:
    """What is wrong with the types of a report; None: nothing is.

    >>> wrong_report("200", None, None, None)
    TypeError("status must be an int such as 200, not the str '200': give int(status)")
    """
    # By class first: each request has a report, and nearly all are right.
    if (
        status.__class__ in _WHOLE
        and elapsed.__class__ in _NUMBER
        and size.__class__ in _WHOLE
        and retry_after.__class__ in _FIELD
    ):
        return None
    if not (status is None or _is(status, int)):
        return _wrong("status", status, "an int such as 200", "int")
    if not (elapsed is None or _is(elapsed, int, float)):
        return _wrong("elapsed", elapsed, "seconds such as 0.25", "float")
    if not (size is None or _is(size, int)):
        return _wrong("size", size, "bytes such as 1024", "int")
    if not (retry_after is None or _is(retry_after, int, float, str)):
        return _wrong(
            "retry_after", retry_after, "seconds such as 120, or the Retry-After field", "str"
        )
    return None


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str, kind: str) -> TypeError:
    shown = f"{value!r}"[:40]
    text = f"{name} must be {wanted}, not the {type(value).__name__} {shown}"
    return TypeError(f"{text}: give {kind}({name})" if isinstance(value, str | bytes) else text)
