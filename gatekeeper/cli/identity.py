"""`gatekeeper identity new|show|directory|page`: the signing key, and the pages to publish."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Final

from gatekeeper import signing
from gatekeeper.cli import CommandParser, load
from gatekeeper.clock import SystemClock
from gatekeeper.config import Config, IdentityConfig
from gatekeeper.errors import ConfigError
from gatekeeper.robots import product_token
from gatekeeper.sidecar.pages.html import Html, code, items, link, markup
from gatekeeper.sites.texts import write_output
from gatekeeper.terminal import NAME, OK, identity_of, json_text, warn_if_anonymous

EXAMPLE = f"{NAME} identity new bot.pem"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `identity`."""
    parser.add_argument(
        "action",
        choices=("new", "show", "directory", "page"),
        help="new: make a key; show: the identity that requests show; directory: the file of keys "
        f"to publish at {signing.DIRECTORY_PATH}; page: the page that its User-Agent links to",
    )
    parser.option("file FILE", "new: the file to create (never overwritten)", nargs="?")
    parser.option("-o --output FILE", "output file (default: stdout)")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 2 if a key can't be made or read, or if settings are missing."""
    if (args.action == "new") != (args.file is not None):
        args.parser.error("`new` needs a file for the key; the other actions use [identity] key")
    if args.action in {"new", "show"} and args.output is not None:
        args.parser.error("-o is for `directory` and `page`")
    if args.action == "new":
        return _new(args)
    config = load(args).config
    if args.action == "show":
        return _show(config, as_json=args.json)
    if args.action == "directory":
        text = json_text(signing.key_directory(_published(config.identity))) + "\n"
    else:
        warn_if_anonymous(config)
        text = bot_page(config)
    write_output(args.output, text)
    return OK


def _new(args: argparse.Namespace) -> int:
    try:
        key = signing.new_key(args.file).public
    except FileExistsError as error:
        raise ConfigError(
            f"{args.file}: the file exists already; a key is never replaced"
        ) from error
    if args.json:
        print(json_text({"file": args.file, **key.jwk}))
    else:
        print(f"{args.file}: created a key with the id {key.keyid}, readable only by you")
        print("publish it (`identity directory`), then set it as [identity] key", file=sys.stderr)
    return OK


def _published(config: IdentityConfig) -> list[signing.PublicKey]:
    """Return the signing key, then the other published keys. Raises ConfigError."""
    files = [*([config.key] if config.key is not None else []), *config.also]
    if not files:
        raise ConfigError(f"identity.key is not set; `{NAME} identity new FILE` makes one")
    return [signing.read_public(file) for file in files]


def _show(settings: Config, *, as_json: bool) -> int:
    config, agent = settings.identity, identity_of(settings)
    keys = _published(config)
    signer = signing.Signer.of(config, SystemClock())
    example = signer.headers("GET", "https://example.org/") if signer is not None else {}
    if as_json:
        report = {"user_agent": agent, "keys": [key.keyid for key in keys]}
        print(json_text(report | {"directory": config.directory, "example": example}))
        return OK
    print(f"User-Agent: {agent}")
    for number, key in enumerate(keys):
        signs = number == 0 and signer is not None
        print(f"key {key.keyid}: {'signs' if signs else 'published, does not sign'}")
    print("a request for https://example.org/ would have these header fields:")
    for name, value in example.items():
        print(f"  {name}: {value}")
    if config.directory is not None:
        print(f"serve the file of `{NAME} identity directory` as {signing.DIRECTORY_TYPE}")
    return OK


# --- the page --------------------------------------------------------------------------------

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>About {}</title>
</head>
<body>
<h1>About {}</h1>
<p>{}</p>
<p>It identifies itself as {} in every request.</p>
{}<h2>How to keep it out</h2>
<p>It reads robots.txt before anything else, and obeys it (RFC 9309). This keeps it out of a folder,
or with <code>Disallow: /</code> of everything:</p>
<pre>User-agent: {}
Disallow: /private/</pre>
<p>It also keeps the pace that <code>Crawl-delay</code> asks for, and pauses after <code>429</code>
and <code>Retry-After</code>.</p>
{}</body>
</html>
"""


_KEYS: Final = """<h2>Its keys</h2>
<p>Requests are signed (RFC 9421, Web Bot Auth) with one of these keys:</p>
{}
"""


def bot_page(config: Config) -> str:
    """Return the page about the bot as HTML without scripts or external resources."""
    agent = identity_of(config)
    name, about = product_token(agent), config.identity.about or "It fetches web pages."
    address = config.fetch.from_address
    contact = markup("<h2>Contact</h2>\n<p>{}</p>\n", link(f"mailto:{address}", address or ""))
    more: list[Html] = []
    if config.identity.addresses:
        more.append(markup("<h2>Its addresses</h2>\n{}\n", _codes(config.identity.addresses)))
    if config.identity.key is not None or config.identity.also:
        keys = _codes(key.keyid for key in _published(config.identity))
        more.append(markup(_KEYS, keys))
        if (where := config.identity.directory) is not None:
            more.append(markup("<p>They are published at {}.</p>\n", link(where, where)))
    shown = contact if address else None
    return markup(_PAGE, name, name, about, code(agent), shown, name, more)


def _codes(texts: Iterable[str]) -> Html:
    return items(map(code, texts))
