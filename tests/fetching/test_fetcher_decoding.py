"""Content-Encodings, valid and hostile."""

from __future__ import annotations

import gzip
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.fetching import fetcher
from gatekeeper.fetching.fetcher import BadEncoding, Decoder

TEXT = b"User-agent: *\nDisallow: /private\n" * 40
ROOM = 1_000_000


def decoded(encoding: str, data: bytes, *, piece: int = 7, room: int = ROOM) -> bytes:
    decoder = Decoder(encoding)
    out = bytearray()
    for at in range(0, len(data), piece):
        out += decoder.feed(data[at : at + piece], room - len(out))
    decoder.finish()
    return bytes(out)


def bare(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        pytest.param("", TEXT, id="none"),
        pytest.param("identity", TEXT, id="identity"),
        pytest.param("gzip", gzip.compress(TEXT), id="gzip"),
        pytest.param("X-GZIP", gzip.compress(TEXT), id="x-gzip"),
        pytest.param("deflate", zlib.compress(TEXT), id="zlib"),
        pytest.param("deflate", bare(TEXT), id="bare-deflate"),
        pytest.param(
            "gzip", gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:]), id="two-members"
        ),
        pytest.param("gzip", gzip.compress(TEXT) + b"\0" * 50, id="padded"),
    ],
)
def test_a_body_is_decoded_whatever_pieces_it_comes_in(encoding: str, data: bytes) -> None:
    assert decoded(encoding, data, piece=1) == TEXT
    assert decoded(encoding, data, piece=len(data)) == TEXT


@given(st.binary(max_size=2000), st.integers(1, 50))
def test_compressed_data_is_decoded_to_the_same_octets(data: bytes, piece: int) -> None:
    assert decoded("gzip", gzip.compress(data), piece=piece) == data
    assert decoded("deflate", zlib.compress(data), piece=piece) == data


@pytest.mark.parametrize(
    "encoding",
    ["br", "zstd", "X-Compress", "dcz", "gzip, br", "br, gzip", "utf-8, br", "gzip," * 5],
)
def test_an_encoding_never_asked_for_is_refused(encoding: str) -> None:
    with pytest.raises(BadEncoding):
        Decoder(encoding)


@pytest.mark.parametrize(
    ("encoding", "data", "unregistered"),
    [
        ("identity, gzip", gzip.compress(TEXT), ""),
        ("gzip,identity", gzip.compress(TEXT), ""),
        ("gzip, gzip", gzip.compress(gzip.compress(TEXT)), ""),
        ("gzip, deflate", zlib.compress(gzip.compress(TEXT)), ""),
        (" ,Deflate\t,, X-GZip ,", gzip.compress(bare(TEXT)), ""),
        ("deflate, gzip, gzip", gzip.compress(gzip.compress(zlib.compress(TEXT))), ""),
        ("utf-8, gzip", gzip.compress(TEXT), "utf-8"),
        ("gzip, 8bit", gzip.compress(TEXT), "8bit"),
        ("None", TEXT, "none"),
    ],
    ids=["identity", "last", "twice", "two", "blanks", "three", "utf-8", "8bit", "none"],
)
def test_a_list_of_encodings_is_decoded_from_its_end(
    encoding: str, data: bytes, unregistered: str
) -> None:
    assert decoded(encoding, data, piece=1) == TEXT
    assert decoded(encoding, data, piece=len(data)) == TEXT
    assert Decoder(encoding).unregistered == unregistered


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(TEXT),
        gzip.compress(gzip.compress(TEXT))[:-4],
        gzip.compress(gzip.compress(TEXT)[:-4]),
        zlib.compress(gzip.compress(TEXT)),
    ],
    ids=["one only", "cut outside", "cut inside", "another one"],
)
def test_each_coding_of_a_list_has_to_be_right(data: bytes) -> None:
    with pytest.raises(BadEncoding):
        decoded("gzip, gzip", data)


def test_the_output_of_each_coding_of_a_list_is_bounded() -> None:
    """Not only the text at the end: empty members inside would cost time without end."""
    for members, whole in ((20_000, True), (100_000, False)):
        inner = gzip.compress(b"") * members + gzip.compress(TEXT)
        data = gzip.compress(inner, 0)
        if whole:
            assert decoded("gzip, gzip", data, piece=65_536) == TEXT
        else:
            with pytest.raises(BadEncoding, match="more than 1048576 octets"):
                decoded("gzip, gzip", data, piece=65_536)


@pytest.mark.parametrize(
    "data",
    [TEXT, gzip.compress(TEXT)[:40], b"\x1f\x8b garbage", gzip.compress(TEXT)[:-4]],
    ids=["plain", "cut", "garbage", "without-its-end"],
)
def test_a_body_that_is_not_what_it_says_is_refused(data: bytes) -> None:
    with pytest.raises(BadEncoding):
        decoded("gzip", data)


def test_no_more_is_decoded_than_the_given_room() -> None:
    decoder = Decoder("gzip")
    assert decoder.feed(gzip.compress(TEXT), 10) == TEXT[:10]


def test_a_decompression_bomb_is_refused() -> None:
    bomb = gzip.compress(b"#" * 50_000_000)
    with pytest.raises(BadEncoding, match="bomb"):
        decoded("gzip", bomb, piece=1 << 16, room=512_001)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_text_that_repeats_itself_at_its_start_is_no_bomb(encoding: str) -> None:
    rules = "".join(f"Disallow: /{random.Random(n).getrandbits(64):x}\n" for n in range(1_000))
    text = b"User-agent: *\n" + b"\n" * 90_000 + rules.encode()
    data = gzip.compress(text) if encoding == "gzip" else zlib.compress(text)
    assert decoded(encoding, data, piece=1460, room=512_001) == text


def test_octets_after_the_end_of_gzip_data_are_ignored() -> None:
    data = gzip.compress(TEXT) + b"\0" * 100 + b"\x1f\x8b no member" * 20
    for piece in (1, 64, 100, len(data)):
        assert decoded("gzip", data, piece=piece) == TEXT


MEMBERS = {
    "empty": b"",
    "a letter": b"x",
    "just beyond what is tried first": bytes(range(46)),
    "some lines": TEXT[:100],
}


class Counting:
    """zlib, counting the octets it was given, as it copies its unused input."""

    MAX_WBITS, error = zlib.MAX_WBITS, zlib.error

    def __init__(self) -> None:
        self.given = 0

    def decompressobj(self, window: int) -> Any:
        inner, outer = zlib.decompressobj(window), self

        class Unpacker:
            def decompress(self, data: memoryview, room: int) -> bytes:
                outer.given += len(data)
                return inner.decompress(data, room)

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        return Unpacker()


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("piece", [1_000, 65_536, 1 << 20])
def test_many_members_cost_no_more_than_one_of_their_length(
    kind: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, most = gzip.compress(MEMBERS[kind]), 300_000
    data = member * (most // len(member)) + gzip.compress(TEXT)
    counting = Counting()
    monkeypatch.setattr(fetcher, "zlib", counting)
    text = decoded("gzip", data, piece=piece)

    assert text.endswith(TEXT)
    assert len(text) == len(MEMBERS[kind]) * (most // len(member)) + len(TEXT)
    # After the first member, whose rest is copied once, a small multiple of the input.
    assert counting.given <= 6 * len(data)
