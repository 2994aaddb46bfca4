"""Authorities that the operator trusts, and what a deferral says about a failed handshake."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from gatekeeper import Gatekeeper, polite_session
from gatekeeper.config import Config, FetchConfig, GuardConfig, PacingConfig, StorageConfig
from gatekeeper.decision import Reason, Verdict
from gatekeeper.errors import ConfigError, Deferred
from gatekeeper.fetching.tls import trusted_by
from gatekeeper.integrations.httpx import PoliteTransport
from gatekeeper.session import guarded_connector
from tests.internet import FakeInternet
from tests.internet.certs import authority, client_context

AGENT = "testbot/1.0"
PAGE = "https://a.test/page"


def config(storage: str | None = None, **fetch: Any) -> Config:
    return Config(
        fetch=FetchConfig(**fetch),
        guard=GuardConfig(allow=("127.0.0.0/8", "*.test")),
        pacing=PacingConfig(default_interval=0.0),
        storage=StorageConfig(path=storage),
    )


@pytest.fixture
def ca_file(tmp_path: Path) -> str:
    path = tmp_path / "authority.pem"
    path.write_bytes("# Zertifikate für uns\n".encode() + authority().cert_pem.bytes())
    return str(path)


@pytest.fixture
def ca_dir(tmp_path: Path) -> str:
    """A directory as Kubernetes mounts one: links into a hidden directory, and other files."""
    folder = tmp_path / "authorities.d"
    data = folder / "..2026_11_28"
    data.mkdir(parents=True)
    (data / "ca.crt").write_bytes(authority().cert_pem.bytes())
    (folder / "..data").symlink_to(data.name)
    (folder / "ca.crt").symlink_to("..data/ca.crt")
    (folder / "README").write_text("nothing that is trusted")
    return str(folder)


@pytest.fixture(params=["ca_file", "ca_dir"])
def trusting(request: pytest.FixtureRequest) -> dict[str, str]:
    return {request.param: request.getfixturevalue(request.param)}


async def test_a_private_authority_counts_for_robots_txt_and_for_pages(
    internet: FakeInternet, trusting: dict[str, str]
) -> None:
    site = internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/page", "text")
    async with polite_session(
        AGENT, config=config(**trusting), resolver=internet.resolver
    ) as session:
        async with session.get(PAGE) as response:
            assert await response.text() == "text"
        assert [one.scheme for one in site.requests] == ["https", "https"]
        assert len(internet.connections) == 1


async def test_a_guarded_connector_trusts_the_private_authority_unless_given_a_context(
    internet: FakeInternet, ca_file: str
) -> None:
    internet.site("a.test").page("/page", "text")

    async def got(**options: Any) -> int:
        connector = guarded_connector(
            config(ca_file=ca_file), resolver=internet.resolver, **options
        )
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(PAGE) as response,
        ):
            return response.status

    assert await got() == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await got(ssl=ssl.create_default_context())


def test_the_authorities_of_the_system_stay_trusted(ca_file: str) -> None:
    context = trusted_by(FetchConfig(ca_file=ca_file))
    assert isinstance(context, ssl.SSLContext)
    usual = ssl.create_default_context().cert_store_stats()["x509_ca"]
    assert context.cert_store_stats()["x509_ca"] == usual + 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert trusted_by(FetchConfig()) is True


@pytest.mark.parametrize(
    ("tls", "words", "setting"),
    [
        ("good", "unable to get local issuer certificate", "fetch.ca_file"),
        ("expired", "certificate has expired", 'fetch.tls_errors = "accept"'),
        ("wrong-name", "certificate is not valid for 'a.test'", 'fetch.tls_errors = "accept"'),
        ("none", "wrong version number", None),
    ],
)
async def test_a_deferral_names_the_cause_and_the_setting_that_helps(
    internet: FakeInternet, ca_file: str, tls: Any, words: str, setting: str | None
) -> None:
    internet.site("a.test", address=internet.address(), tls=tls).robots("")
    trusted = {} if tls == "good" else {"ca_file": ca_file}
    async with Gatekeeper(AGENT, config=config(**trusted), resolver=internet.resolver) as gate:
        for _ in range(2):  # the second one from the cache
            decision = await gate.check(PAGE)
            assert (decision.verdict, decision.reason) == (Verdict.DEFER, Reason.TLS)
            note = decision.note or ""
            assert words in note.lower().replace("hostname mismatch, ", "")
            assert ("fetch." in note) == (setting is not None)
            assert setting is None or setting in note
            assert note in decision.explain()


async def test_the_context_of_an_adapter_is_not_the_gates_and_the_note_says_what_helps(
    internet: FakeInternet, ca_file: str
) -> None:
    internet.site("a.test").robots("").page("/page", "text")
    for fetch in ({}, {"ca_file": ca_file}):
        async with (
            Gatekeeper(AGENT, config=config(**fetch), resolver=internet.resolver) as gate,
            httpx.AsyncClient(transport=PoliteTransport(gate, verify=client_context())) as client,
        ):
            if fetch:
                assert (await client.get(PAGE)).text == "text"
            else:
                with pytest.raises(Deferred) as caught:
                    await client.get(PAGE)
                assert "fetch.ca_file" in str(caught.value)


async def test_after_a_restart_with_the_authority_the_site_is_asked_again_at_once(
    internet: FakeInternet, tmp_path: Path, ca_file: str
) -> None:
    """The failure was a verdict of our own, and could be waited for for a day."""
    internet.site("a.test").robots("")
    state = str(tmp_path / "state.sqlite")
    async with Gatekeeper(AGENT, config=config(state), resolver=internet.resolver) as gate:
        assert (await gate.check(PAGE)).reason is Reason.TLS
    trusting = config(state, ca_file=ca_file)
    async with Gatekeeper(AGENT, config=trusting, resolver=internet.resolver) as gate:
        assert (await gate.check(PAGE)).verdict is Verdict.ALLOW


def test_a_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.mkdir()
    text.write_text("-----BEGIN PRIVATE KEY-----\n")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    many = tmp_path / "many"
    many.mkdir()
    for number in range(1001):
        (many / f"{number}").touch()
    for setting, path, why in (
        ("ca_file", text, "holds no certificate in PEM"),
        ("ca_file", broken, "can't be read"),
        ("ca_dir", empty, "holds a certificate in PEM"),
        ("ca_dir", many, "more than 1000 files"),
        ("ca_dir", text, "Not a directory"),
        ("ca_dir", tmp_path / "absent", "No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=rf"fetch\.{setting}: .*{why}") as caught:
            Gatekeeper(AGENT, config=config(**{setting: str(path)}))
        assert str(path) in str(caught.value)
