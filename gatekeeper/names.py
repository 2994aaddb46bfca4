"""Hosts as an operator names them, brought to the one form that `urls` gives them."""

from __future__ import annotations

from gatekeeper import urls
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.masking import printable

__all__ = ["host_named", "match_named"]

_REMEDY = "name it as in a.example, 192.0.2.1 or 2001:db8::1, or give a URL of it"


def host_named(text: str) -> str:
    """The host that is meant: a name, an address, or any URL of it. Raises ConfigError.

    >>> host_named("MÜNCHEN.example."), host_named("https://[2001:DB8::1]:8443/x")
    ('xn--mnchen-3ya.example', '2001:db8::1')
    """
    if "://" in text:
        url = text
    elif any(mark in text for mark in "/?#@\\"):
        raise _refused(text, "more than a host")
    elif text.count(":") > 1 and "[" not in text:
        url = f"http://[{text}]/"
    else:
        url = f"http://{text}/"
    try:
        host = urls.parse(url).host
    except InvalidURL as error:
        raise _refused(text, error.problem) from error
    if "*" in host:
        raise _refused(text, "a pattern, where one host is needed")
    return host


def match_named(text: str) -> str:
    """The same for `[[host]] match`, which may also be `*` or begin with `*.`.

    >>> match_named("*.Example.ORG.")
    '*.example.org'
    """
    if text == "*":
        return text
    if text.startswith("*."):
        return f"*.{host_named(text[2:])}"
    if "*" in text:
        raise _refused(text, "a `*` that is neither alone nor in front, as in *.example.org")
    return host_named(text)


def _refused(text: str, problem: str) -> ConfigError:
    return ConfigError(f"{printable(text, 120)!r} is no host: {problem}; {_REMEDY}")
