"""Names as an operator gives them: hosts in the one form that `urls` gives them, and agents."""

from __future__ import annotations

from gatekeeper import urls
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.masking import printable
from gatekeeper.robots import product_token

__all__ = ["agent_doubt", "agent_named", "host_named", "match_named"]

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


def agent_named(text: str) -> str:
    """The product token of who we say we are. Raises ConfigError for what can't be one.

    >>> agent_named("examplebot/1.0 (+https://example.org/bot)")
    'examplebot'
    """
    if not isinstance(text, str):
        raise TypeError(f"user_agent must be str, not {type(text).__name__}")
    # It is sent as a header, where a line's end begins another one, and only ASCII is sure
    # to arrive as it was meant.
    if not text.isascii() or not text.isprintable():
        problem = "holds a character that is no printable ASCII"
    elif "*" in (token := product_token(text)):
        problem = "holds `*`, which means everybody in robots.txt"
    elif not token:
        problem = "holds no product token"
    else:
        return token
    raise ConfigError(
        f"user_agent: {printable(text, 120)!r} {problem}; "
        'say who you are, such as "examplebot/1.0 (+https://example.org/bot)"'
    )


def agent_doubt(text: str) -> str | None:
    """What its owner may not expect of a name that `agent_named` takes; None: nothing.

    >>> agent_doubt("my bot")
    "user agent 'my bot': rules are chosen for 'my'"
    """
    token = agent_named(text)
    rest = text.strip().partition(token)[2]
    # A version and a comment follow a product (RFC 9110 10.1.5); digits in a token are common
    # though RFC-10 has none, but a number alone names nobody.
    cut = text.startswith(token) and rest and not rest.lstrip().startswith(("(", "/"))
    if not cut and any(char.isalpha() for char in token):
        return None
    return f"user agent {printable(text, 120)!r}: rules are chosen for {token!r}"


def _refused(text: str, problem: str) -> ConfigError:
    return ConfigError(f"{printable(text, 120)!r} is no host: {problem}; {_REMEDY}")
