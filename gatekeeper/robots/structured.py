"""Structured Field Values (RFC 9651): lists and dictionaries, read strictly.

Content-Usage (SIG-02) and Robots-Tag (SIG-21) are written in them. The format has no
recovery on purpose: a field either parses whole or counts for nothing, which is the
FieldError of both readers here. Reading is one pass from left to right.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import TypeAlias

import msgspec

__all__ = ["BareItem", "FieldError", "Item", "Token", "parse_dictionary", "parse_list"]


class FieldError(ValueError):
    """The text is no such field."""


class Token(str):
    """A bare word, as opposed to a quoted string."""

    __slots__ = ()


BareItem: TypeAlias = "int | float | str | Token | bytes | bool | datetime"


class Item(msgspec.Struct, frozen=True):
    """A value with its parameters; an inner list has a tuple of items for its value."""

    value: BareItem | tuple[Item, ...]
    params: dict[str, BareItem]


_KEY = re.compile(r"[a-z*][a-z0-9_\-.*]*+")
_TOKEN = re.compile(r"[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*+")
_NUMBER = re.compile(r"-?(?:([0-9]{1,12})\.([0-9]{1,3})|([0-9]{1,15}))(?![0-9.])")
_STRING = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*+)"')
_BYTES = re.compile(r":([A-Za-z0-9+/=]*+):")
_DISPLAY = re.compile(r'%"((?:[ !#$&-~]|%[0-9a-f]{2})*+)"')
_ESCAPED = re.compile(r"\\(.)")
_OWS = re.compile(r"[ \t]*+")
_SP = re.compile(r" *+")


def parse_dictionary(text: str) -> dict[str, Item]:
    """Members by key; of a key given twice the last stands. Raises FieldError.

    >>> parse_dictionary("train-ai=n, search=y;x")["search"].value
    'y'
    """
    members: dict[str, Item] = {}
    reader = _Reader(text)
    while not reader.ended():
        key = reader.take(_KEY)[0]
        members[key] = reader.member() if reader.skip("=") else Item(True, reader.params())
        reader.next_member()
    return members


def parse_list(text: str) -> list[Item]:
    """Members in order. Raises FieldError.

    >>> [item.value for item in parse_list("a, 1;q=0.5, (b c)")][:2]
    ['a', 1]
    """
    members: list[Item] = []
    reader = _Reader(text)
    while not reader.ended():
        members.append(reader.member())
        reader.next_member()
    return members


class _Reader:
    __slots__ = ("at", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip(" ")
        self.at = 0

    def ended(self) -> bool:
        return self.at >= len(self.text)

    def skip(self, char: str) -> bool:
        if self.text.startswith(char, self.at):
            self.at += 1
            return True
        return False

    def take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise FieldError(f"unexpected text at {self.at}")
        self.at = found.end()
        return found

    def next_member(self) -> None:
        """Past the comma to the next member; a comma at the very end is an error."""
        self.take(_OWS)
        if self.ended():
            return
        if not self.skip(","):
            raise FieldError(f"a comma is missing at {self.at}")
        self.take(_OWS)
        if self.ended():
            raise FieldError("a comma at the end")

    def member(self) -> Item:
        return self.inner_list() if self.skip("(") else self.item()

    def inner_list(self) -> Item:
        items: list[Item] = []
        while True:
            blanks = self.take(_SP)[0]
            if self.skip(")"):
                return Item(tuple(items), self.params())
            if items and not blanks:
                raise FieldError(f"a blank is missing at {self.at}")
            items.append(self.item())

    def item(self) -> Item:
        value = self.bare()
        return Item(value, self.params())

    def params(self) -> dict[str, BareItem]:
        params: dict[str, BareItem] = {}
        while self.skip(";"):
            self.take(_SP)
            key = self.take(_KEY)[0]
            params[key] = self.bare() if self.skip("=") else True
        return params

    def bare(self) -> BareItem:
        char = self.text[self.at : self.at + 1]
        if char.isalpha() or char == "*":
            return Token(self.take(_TOKEN)[0])
        if char == '"':
            return _ESCAPED.sub(r"\1", self.take(_STRING)[1])
        if char == ":":
            return _octets(self.take(_BYTES)[1])
        if char == "?":
            return self.take(_BOOLEAN)[0] == "?1"
        if char == "@":
            self.at += 1
            return _moment(self.number())
        if char == "%":
            return _unescaped(self.take(_DISPLAY)[1])
        return self.number()

    def number(self) -> int | float:
        found = self.take(_NUMBER)
        return float(found[0]) if found[2] else int(found[0])


_BOOLEAN = re.compile(r"\?[01]")


def _octets(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error as error:
        raise FieldError("no base64") from error


def _moment(number: int | float) -> datetime:
    if isinstance(number, float):
        raise FieldError("a date is a whole number")
    try:
        return datetime.fromtimestamp(number, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise FieldError("a date that no calendar holds") from error


def _unescaped(text: str) -> str:
    octets = re.sub(rb"%([0-9a-f]{2})", lambda m: bytes.fromhex(m[1].decode()), text.encode())
    try:
        return octets.decode()
    except UnicodeDecodeError as error:
        raise FieldError("no UTF-8") from error
