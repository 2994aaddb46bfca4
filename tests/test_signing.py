"""Signed requests (RFC 9421, Web Bot Auth): made here, checked by another library."""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from http_message_signatures import (
    HTTPMessageSignaturesException,
    HTTPMessageVerifier,
    InvalidSignature,
    MappingKeyResolver,
    algorithms,
)

from gatekeeper import Config, ConfigError, Gatekeeper
from gatekeeper.cli import main
from gatekeeper.clock import SystemClock, VirtualClock
from gatekeeper.config import IdentityConfig
from gatekeeper.session import plain_session, polite_session
from gatekeeper.signing import (
    PublicKey,
    SignatureAgent,
    Signer,
    SigningKey,
    key_directory,
    new_key,
    read_public,
    read_signing_key,
    signature_agent,
    signature_base,
)
from tests.internet import FakeInternet
from tests.internet.wire import Request

AGENT = "examplebot/1.0 (+https://bot.example)"
DIRECTORY = "https://bot.example"
OPEN = {"allow": ["127.0.0.0/8", "::1/128", "*.test"]}


def unbase64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "bot.pem"
    new_key(path)
    return path


def verify(message: Any, *keys: PublicKey) -> Any:
    """By the library http-message-signatures; raises what it raises. The one result."""
    known = {
        key.keyid: ed25519.Ed25519PublicKey.from_public_bytes(unbase64url(key.x)) for key in keys
    }
    verifier = HTTPMessageVerifier(
        signature_algorithm=algorithms.ED25519,
        key_resolver=MappingKeyResolver(public_keys=known, private_keys={}),
    )
    (result,) = verifier.verify(message, expect_tag="web-bot-auth")
    return result


def message(
    headers: Mapping[str, str], url: str = "https://example.org/a?b=c", method: str = "GET"
) -> SimpleNamespace:
    return SimpleNamespace(method=method, url=url, headers=dict(headers))


def as_sent(request: Request) -> SimpleNamespace:
    return message(request.headers, request.url, request.method)


def signer(path: Path, **settings: Any) -> Signer:
    config = IdentityConfig(key=str(path), **{"directory": DIRECTORY, **settings})
    made = Signer.of(config, SystemClock())
    assert made is not None
    return made


# --- vectors ---------------------------------------------------------------------------------

# RFC 9421 appendix B.1.4, the key that RFC and drafts sign with. It is no secret.
TEST_D, TEST_X = (
    "n4Ni-HpISpVObnQMW0wOhCKROaIKqKtW_2ZYb2p9KcU",
    "JrQLj5P_89iXES9-vFgrIy29clF9CC_oPPsw3c5D0bs",
)
TEST_KEY = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(unbase64url(TEST_D)))


def test_the_thumbprint_of_the_test_key() -> None:
    assert TEST_KEY.public == PublicKey(TEST_X, "poqkLGiymh_W0uP6PZFw-dvez3QJT5SolqXBCW38r0U")


def test_the_key_of_rfc_8037_appendix_a_3_has_its_thumbprint() -> None:
    """The thumbprint of the RFC's own example key."""
    x = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    assert PublicKey.of(unbase64url(x)).keyid == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_the_request_of_rfc_9421_appendix_b_2_6_has_its_signature() -> None:
    parameters = (
        '("date" "@method" "@path" "@authority" "content-type" "content-length")'
        ';created=1618884473;keyid="test-key-ed25519"'
    )
    base = signature_base(
        [
            ('"date"', "Tue, 20 Apr 2021 02:07:55 GMT"),
            ('"@method"', "POST"),
            ('"@path"', "/foo"),
            ('"@authority"', "example.com"),
            ('"content-type"', "application/json"),
            ('"content-length"', "18"),
        ],
        parameters,
    )
    assert base64.b64encode(TEST_KEY.sign(base.encode())).decode() == (
        "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
    )


def test_the_drafts_request_with_signature_agent_has_its_signature() -> None:
    """draft-ietf-webbotauth-httpsig-protocol, appendix E.2: the request, and both its headers."""
    nonce = (
        "n9p433xm+NJ3ph3upfBIGmsuwHw387YV7Q/F+6BSpGCVjYCqQw6rznNA8PVVLySrAWsv0hQtFioQb6E1YsauiA=="
    )
    made = Signer(
        TEST_KEY,
        agent=SignatureAgent(
            'agent2="https://signature-agent.test"',
            '"signature-agent";key="agent2"',
            '"https://signature-agent.test"',
        ),
        components=["@authority"],
        lifetime=4889289600 - 1735689600,
        wall=lambda: 1735689600.7,
        nonce=lambda: base64.b64decode(nonce),
    ).headers("GET", "https://example.com/path/to/resource")
    assert made["Signature-Input"].partition("=")[2] == (
        '("@authority" "signature-agent";key="agent2");created=1735689600'
        ';keyid="poqkLGiymh_W0uP6PZFw-dvez3QJT5SolqXBCW38r0U";alg="ed25519";expires=4889289600'
        f';nonce="{nonce}";tag="web-bot-auth"'
    )
    assert made["Signature"].partition("=")[2] == (
        ":RdNFx5Bj6au3YgAMQL/RzmUlZE8QZLIaXGRpw985hWnwPfMxT228NMk6ehRS1PSl4e8PhbNZACSanGdhEwYCCg==:"
    )


def test_the_drafts_request_without_signature_agent_has_its_signature() -> None:
    parameters = (
        '("@authority");created=1735689600;keyid="poqkLGiymh_W0uP6PZFw-dvez3QJT5SolqXBCW38r0U"'
        ';alg="ed25519";expires=4889289600;nonce="zIW8+cdmA3vdYagbxojpONwa/l0EKJ/O3/wD486VvsQjO/'
        'RxPaSt6ZxvQaMcQzNnqKN/mQ6hpGiFro2L2qkz5A==";tag="web-bot-auth"'
    )
    base = signature_base([('"@authority"', "example.com")], parameters)
    assert base64.b64encode(TEST_KEY.sign(base.encode())).decode() == (
        "QKN4fTdIYfh82fvoZCQiQA1weuozfCS/Led2zTMbewMMqH8PI2Wsy/5c4ao6B6D09nraNQdBNOADg8aM1MqfCg=="
    )


# --- what another library says ---------------------------------------------------------------

_ALL = ["@authority", "@target-uri", "@method", "@path", "@query"]


@pytest.mark.parametrize("form", ["dictionary", "string"])
@pytest.mark.parametrize(
    "url",
    [
        *("https://example.org", "https://EXAMPLE.org:443/a?b=c", "http://example.org:8080/?"),
        *("https://münchen.example/%7Ea/ä?ü", "https://[2001:db8::1]:8443/x", "http://a.test/a?"),
    ],
)
def test_another_library_accepts_what_we_sign(key_file: Path, form: str, url: str) -> None:
    made = signer(key_file, signature_agent=form, components=tuple(_ALL))
    from gatekeeper import urls

    sent = urls.parse(url).url
    result = verify(message(made.headers("GET", url), sent), made.public)
    assert result.parameters["keyid"] == made.public.keyid
    assert len(base64.b64decode(result.parameters["nonce"])) == 64
    assert result.parameters["expires"] - result.parameters["created"] == 60


def test_every_part_that_is_changed_is_noticed(key_file: Path) -> None:
    made = signer(key_file)
    headers = made.headers("GET", "https://example.org/a?b=c")
    verify(message(headers), made.public)
    changed = [
        message(headers, method="POST"),
        message(headers, url="https://example.org/b?b=c"),
        message(headers, url="https://example.net/a?b=c"),
        message(headers, url="https://example.org:8443/a?b=c"),
        message({**headers, "Signature-Agent": 'sig1="https://evil.example"'}),
        message({k: v for k, v in headers.items() if k != "Signature-Agent"}),
        message({k: v for k, v in headers.items() if k != "Signature"}),
    ]
    given = headers["Signature-Input"]
    for before, after in (
        ('"@method" ', ""),
        ('"@path" ', ""),
        ('"@authority"', '"@query"'),
        ("created=", "created=1"),
        ("expires=", "expires=9"),
        ('nonce="', 'nonce="A'),
        (';tag="web-bot-auth"', ""),
        ('tag="web-bot-auth"', 'tag="another"'),
        (made.public.keyid, "." + made.public.keyid[1:]),
        ('alg="ed25519"', 'alg="rsa-pss-sha512"'),
    ):
        assert before in given
        changed.append(message({**headers, "Signature-Input": given.replace(before, after, 1)}))
    octets = bytearray(base64.b64decode(headers["Signature"][6:-1]))
    octets[7] ^= 1
    broken = f"sig1=:{base64.b64encode(octets).decode()}:"
    changed.append(message({**headers, "Signature": broken}))
    for one in changed:
        with pytest.raises((InvalidSignature, HTTPMessageSignaturesException)):
            verify(one, made.public)


def test_another_key_s_signature_is_noticed(key_file: Path, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other.pem").public
    made = signer(key_file)
    with pytest.raises(InvalidSignature):
        verify(message(made.headers("GET", "https://example.org/a?b=c")), other)


def test_no_two_signatures_are_the_same(key_file: Path) -> None:
    made = signer(key_file)
    signatures = {made.headers("GET", "https://example.org/")["Signature"] for _ in range(20)}
    assert len(signatures) == 20


async def test_created_is_the_time_of_the_clock(key_file: Path) -> None:
    clock = VirtualClock()
    made = Signer.of(IdentityConfig(key=str(key_file), directory=DIRECTORY, lifetime=300), clock)
    assert made is not None
    now = int(clock.wall())
    given = made.headers("GET", "https://example.org/")["Signature-Input"]
    assert f";created={now};" in given
    assert f";expires={now + 300};" in given


# --- everything that leaves is signed --------------------------------------------------------


def gate_config(key: Path | None, **settings: Any) -> Config:
    identity = {} if key is None else {"key": str(key), "directory": DIRECTORY}
    return Config.from_dict(
        {
            "guard": OPEN,
            "pacing": {"default_interval": 0.01},
            "identity": identity,
            **settings,
        }
    )


async def test_robots_txt_every_hop_and_every_page_is_signed(
    internet: FakeInternet, key_file: Path
) -> None:
    public = read_public(key_file)
    internet.site("a.test").redirect("/robots.txt", "/real.txt").on(
        "/real.txt", b"User-agent: *\nDisallow: /no\n"
    ).redirect("/go?x=1", "http://b.test/there").redirect("/go", "http://b.test/there")
    internet.site("b.test").robots("User-agent: *\nDisallow: /no\n").page("/there", "here")
    async with polite_session(
        AGENT, config=gate_config(key_file), resolver=internet.resolver
    ) as session:
        async with session.get("http://a.test/go?x=1") as response:
            assert await response.text() == "here"
        async with session.post("http://b.test/there", data=b"x") as response:
            await response.read()
    asked = [(r.host, r.method, r.path) for r in internet.requests]
    assert asked == [
        ("a.test", "GET", "/robots.txt"),
        ("a.test", "GET", "/real.txt"),
        ("a.test", "GET", "/go"),
        ("b.test", "GET", "/robots.txt"),
        ("b.test", "GET", "/there"),
        ("b.test", "POST", "/there"),
    ]
    nonces = set()
    for request in internet.requests:
        assert request.headers.getall("Signature-Agent") == ['sig1="https://bot.example"']
        result = verify(as_sent(request), public)
        assert {str(name) for name in result.covered_components} >= {'"@authority"', '"@method"'}
        nonces.add(result.parameters["nonce"])
    assert len(nonces) == len(asked)


async def test_requests_of_a_plain_and_of_a_foreign_session_are_signed(
    internet: FakeInternet, key_file: Path
) -> None:
    public = read_public(key_file)
    internet.site("a.test").robots("").page("/a").page("/b")
    config = gate_config(key_file)
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        async with (
            plain_session(AGENT, config=config, resolver=internet.resolver) as session,
            gate.lease("http://a.test/a") as lease,
            session.get(lease.url) as response,
        ):
            assert response.status == 200
        theirs = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=internet.resolver),
            middlewares=(gate.middleware,),
        )
        async with theirs, theirs.get("http://a.test/b") as response:
            assert response.status == 200
    assert [request.path for request in internet.requests] == ["/robots.txt", "/a", "/b"]
    for request in internet.requests:
        verify(as_sent(request), public)


async def test_a_session_beside_a_sidecar_signs_each_hop_by_the_signer_s_middleware(
    internet: FakeInternet, key_file: Path
) -> None:
    """What a crawler does whose gate has no key."""
    internet.site("a.test").robots("").redirect("/a", "http://b.test/b")
    internet.site("b.test").robots("").page("/b")
    async with Gatekeeper(AGENT, config=gate_config(None), resolver=internet.resolver) as gate:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=internet.resolver),
            middlewares=(gate.middleware, signer(key_file).middleware),
        )
        async with session, session.get("http://a.test/a") as response:
            assert response.status == 200
    pages = [one for one in internet.requests if one.path != "/robots.txt"]
    assert [(one.host, one.path) for one in pages] == [("a.test", "/a"), ("b.test", "/b")]
    for request in pages:
        verify(as_sent(request), read_public(key_file))


async def test_robots_txt_over_a_session_of_others_is_signed(
    internet: FakeInternet, key_file: Path
) -> None:
    internet.site("a.test").robots("")
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=internet.resolver)) as lent,
        Gatekeeper(AGENT, config=gate_config(key_file), session=lent) as gate,
    ):
        assert await gate.allowed("http://a.test/x")
    (request,) = internet.requests
    verify(as_sent(request), read_public(key_file))


async def test_a_signature_is_made_after_the_wait(
    virtual_internet: FakeInternet, key_file: Path
) -> None:
    internet = virtual_internet
    clock = internet.clock
    internet.site("a.test").robots("User-agent: *\nCrawl-delay: 100\n").page("/a").page("/b")
    config = gate_config(key_file)

    async def crawl() -> None:
        async with polite_session(
            AGENT, config=config, resolver=internet.resolver, clock=clock
        ) as session:
            for path in ("/a", "/b"):
                async with session.get(f"http://a.test{path}") as response:
                    await response.read()

    start = clock.wall() - clock.monotonic()
    await internet.drive(crawl())
    for request in internet.requests:
        created = int(request.headers["Signature-Input"].split("created=")[1].split(";")[0])
        assert abs(created - (start + request.at)) <= 1
    assert internet.requests[-1].at - internet.requests[0].at >= 200


async def test_without_a_key_nothing_is_signed(internet: FakeInternet) -> None:
    internet.site("a.test").robots("").page("/a")
    config = Config.from_dict({"guard": OPEN, "pacing": {"default_interval": 0.01}})
    async with (
        polite_session(AGENT, config=config, resolver=internet.resolver) as session,
        session.get("http://a.test/a"),
    ):
        pass
    assert len(internet.requests) == 2
    assert not any("Signature" in request.headers for request in internet.requests)


# --- keys ------------------------------------------------------------------------------------


def test_a_new_key_is_its_owner_s_alone_and_replaces_nothing(key_file: Path) -> None:
    assert key_file.stat().st_mode & 0o777 == 0o600
    before = key_file.read_bytes()
    with pytest.raises(FileExistsError):
        new_key(key_file)
    assert key_file.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o601])
def test_a_key_that_others_can_reach_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_signing_key(key_file)
    with pytest.raises(ConfigError, match="chmod 600"):
        Gatekeeper(AGENT, config=gate_config(key_file))


def pem(key: Any, passphrase: bytes | None = None) -> bytes:
    how = (
        serialization.BestAvailableEncryption(passphrase)
        if passphrase
        else serialization.NoEncryption()
    )
    form = serialization.PrivateFormat.PKCS8
    text: bytes = key.private_bytes(serialization.Encoding.PEM, form, how)
    return text


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        pem(ec.generate_private_key(ec.SECP256R1())),
        pem(ed25519.Ed25519PrivateKey.generate(), b"secret"),
    ],
    ids=["empty", "nonsense", "broken", "another kind", "encrypted"],
)
def test_a_file_that_is_no_key_is_refused_without_showing_it(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        read_signing_key(path)
    assert str(path) in str(raised.value)
    for line in text.splitlines():
        assert len(line) < 8 or line.decode() not in str(raised.value)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gatekeeper identity new"):
        read_signing_key(tmp_path / "none.pem")


async def test_a_private_key_is_never_shown(
    key_file: Path,
    internet: FakeInternet,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    key = read_signing_key(key_file)
    secret = "".join(key_file.read_text().splitlines()[1:-1])
    internet.site("a.test").robots("")
    config = gate_config(key_file)
    async with Gatekeeper(AGENT, config=config, resolver=internet.resolver) as gate:
        await gate.allowed("http://a.test/")
        said = repr(gate) + repr(vars(gate)) + repr(config) + repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)
    assert secret not in said + caplog.text + "".join(capsys.readouterr())


def test_signatures_of_the_old_and_the_new_key_hold_while_both_are_published(
    key_file: Path, tmp_path: Path
) -> None:
    """Published beside each other, so that whoever has either file knows the signature."""
    following = tmp_path / "next.pem"
    new_key(following)
    old = signer(key_file, also=(str(following),))
    new = signer(following, also=(str(key_file),))
    published = key_directory([read_public(key_file), read_public(following)])
    known = [PublicKey(key["x"], key["kid"]) for key in published["keys"]]
    for made in (old, new):
        verify(message(made.headers("GET", "https://example.org/a?b=c")), *known)
    assert len(known) == 2


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "form", "header"),
    [
        ("https://Bot.Example:443/", "dictionary", 'sig1="https://bot.example"'),
        (
            "https://bot.example/.well-known/http-message-signatures-directory",
            "dictionary",
            'sig1="https://bot.example"',
        ),
        (
            "https://bot.example/keys.json?v=1",
            "dictionary",
            'sig1="https://bot.example/keys.json?v=1";type=jwks_uri',
        ),
        ("https://bot.example", "string", '"https://bot.example"'),
    ],
)
def test_signature_agent_is_written_as_the_drafts_have_it(
    directory: str, form: str, header: str
) -> None:
    assert signature_agent(directory, form).header == header


@pytest.mark.parametrize(
    ("directory", "form"),
    [
        *(("http://bot.example", "dictionary"), ("https://u:p@bot.example", "dictionary")),
        *(("bot.example", "dictionary"), ("https://bot.example/keys.json", "string")),
        ("https://bot.example/#key", "dictionary"),
    ],
)
def test_a_directory_that_can_not_be_named_is_refused(directory: str, form: str) -> None:
    with pytest.raises(ConfigError, match=r"identity\.") as raised:
        signature_agent(directory, form)
    assert "u:p" not in str(raised.value)


def test_a_key_needs_a_directory(key_file: Path) -> None:
    config = Config.from_dict({"identity": {"key": str(key_file)}})
    with pytest.raises(ConfigError, match=r"identity\.directory is not set"):
        Gatekeeper(AGENT, config=config)


@pytest.mark.parametrize(
    "wrong",
    [{"components": ["@method"]}, {"components": ["@status"]}, {"lifetime": 1}, {"keys": "x"}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="identity"):
        Config.from_dict({"identity": wrong})


# --- the command -----------------------------------------------------------------------------


def configured(folder: Path, text: str) -> str:
    path = folder / "gatekeeper.toml"
    path.write_text(f'user_agent = "{AGENT}"\n{text}')
    return str(path)


def test_the_command_makes_a_key_and_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.pem", tmp_path / "two.pem"
    assert main(["identity", "new", str(one)]) == 0
    assert main(["identity", "new", str(two), "--json"]) == 0
    assert main(["identity", "new", str(two)]) == 2
    assert "never replaced" in capsys.readouterr().err
    config = configured(
        tmp_path, f'[identity]\nkey = "{one}"\nalso = ["{two}"]\ndirectory = "{DIRECTORY}"\n'
    )
    out = tmp_path / "directory.json"
    assert main(["identity", "directory", "--config", config, "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == {
        "keys": [read_public(one).jwk, read_public(two).jwk],
    }
    assert main(["identity", "show", "--config", config]) == 0
    said = capsys.readouterr().out
    assert f"key {read_public(one).keyid}: signs" in said
    assert f"key {read_public(two).keyid}: published, does not sign" in said
    assert 'Signature-Agent: sig1="https://bot.example"' in said
    assert main(["identity", "show", "--json", "--config", config]) == 0
    assert json.loads(capsys.readouterr().out)["user_agent"] == AGENT
    for path in (one, two):
        assert "PRIVATE" not in said
        assert path.read_text().splitlines()[1] not in said


def test_a_directory_may_be_made_of_public_keys_alone(
    tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    public = tmp_path / "public.pem"
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    config = configured(tmp_path, f'[identity]\nalso = ["{public}"]\n')
    assert main(["identity", "directory", "--config", config]) == 0
    assert json.loads(capsys.readouterr().out)["keys"] == [read_public(key_file).jwk]


def test_the_identity_page_says_who_crawls_and_how_to_deny_it(
    tmp_path: Path, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(
        tmp_path,
        '[fetch]\nfrom_address = "bot@bot.example"\n'
        f'[identity]\nkey = "{key_file}"\ndirectory = "{DIRECTORY}"\n'
        'about = "It reads <all> pages & more."\naddresses = ["192.0.2.0/28"]\n',
    )
    assert main(["identity", "page", "--config", config]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "It reads &lt;all&gt; pages &amp; more." in page
    assert "User-agent: examplebot\nDisallow: /private/" in page
    for text in ("mailto:bot@bot.example", "192.0.2.0/28", read_public(key_file).keyid, DIRECTORY):
        assert text in page
    assert "<script" not in page
    assert "src=" not in page


def test_the_identity_page_on_stdout_is_utf_8_as_it_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    config = configured(tmp_path, '[identity]\nabout = "It reads caf\\u00e9s."\n')
    assert main(["identity", "page", "--config", config]) == 0
    page = stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert '<meta charset="utf-8">' in page
    assert "It reads caf\u00e9s." in page


def test_the_identity_page_needs_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", "page", "--config", configured(tmp_path, "")]) == 0
    assert "Its keys" not in capsys.readouterr().out
    assert main(["identity", "directory", "--config", configured(tmp_path, "")]) == 2
    assert "identity.key is not set" in capsys.readouterr().err


@pytest.mark.parametrize("call", [["new"], ["show", "x"], ["new", "x", "-o", "y"], ["burn"]])
def test_identity_options_that_make_no_sense_are_refused(call: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["identity", *call])
    assert stop.value.code == 2
