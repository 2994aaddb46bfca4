"""A certificate renewed at the same path is presented from the next connection on."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.security import Certificates


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(tmp_path: Path, authority: trustme.CA) -> ServerConfig:
    names = {name: str(tmp_path / name) for name in ("tls_cert", "tls_key", "tls_client_ca")}
    issue(authority, ServerConfig(**names), "old.test")
    authority.cert_pem.write_to_path(names["tls_client_ca"])
    return ServerConfig(**names)


def issue(authority: trustme.CA, server: ServerConfig, name: str) -> None:
    assert server.tls_cert is not None
    assert server.tls_key is not None
    pair = authority.issue_cert(name)
    pair.cert_chain_pems[0].write_to_path(server.tls_cert)
    pair.private_key_pem.write_to_path(server.tls_key)


def shown(
    certificates: Certificates, authority: trustme.CA, own: trustme.LeafCert | None = None
) -> str:
    """Return the name in the certificate that a client is presented, without a network.

    `own` is the client's certificate.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    authority.configure_trust(context)
    if own is not None:
        own.configure_cert(context)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    assert certificates.context is not None
    ours = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    theirs = context.wrap_bio(to_client, to_server)
    for one in (theirs, ours, theirs, ours):
        try:
            one.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found: Any = theirs.getpeercert()
    return str(found["subjectAltName"][0][1])


def test_a_renewed_certificate_is_used_for_new_connections(
    server: ServerConfig, authority: trustme.CA
) -> None:
    certificates = Certificates(server)
    assert shown(certificates, authority) == "old.test"
    assert certificates.renewal(server) is None

    issue(authority, server, "new.test")
    new = certificates.renewal(server)
    assert new is not None
    assert certificates.apply(new) == ["server.tls_cert", "server.tls_key"]
    assert shown(certificates, authority) == "new.test"
    assert certificates.renewal(server) is None


def test_a_certificate_that_does_not_match_its_key_is_refused_and_the_old_one_stays(
    server: ServerConfig, authority: trustme.CA
) -> None:
    certificates = Certificates(server)
    assert server.tls_cert is not None
    stranger = authority.issue_cert("new.test")
    stranger.cert_chain_pems[0].write_to_path(server.tls_cert)

    with pytest.raises(ConfigError, match="tls_"):
        certificates.renewal(server)
    assert shown(certificates, authority) == "old.test"


def said(server: ServerConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        Certificates(server)
    return str(caught.value)


def test_a_key_of_another_certificate_is_refused_with_the_reason(
    server: ServerConfig, authority: trustme.CA
) -> None:
    assert server.tls_key is not None
    authority.issue_cert("other.test").private_key_pem.write_to_path(server.tls_key)
    told = said(server)
    assert f"tls_key {server.tls_key} is not the key of the certificate in tls_cert" in told
    assert "_ssl.c" not in told


def test_swapped_certificate_and_key_files_are_recognised(server: ServerConfig) -> None:
    turned = ServerConfig(tls_cert=server.tls_key, tls_key=server.tls_cert)
    assert said(turned).endswith(": swap them")


@pytest.mark.parametrize(
    ("setting", "text", "told"),
    [
        ("tls_cert", "hello", 'holds no certificate in PEM, which has a line "-----BEGIN CERT'),
        ("tls_key", "hello", "holds no private key in PEM"),
        ("tls_client_ca", "", "holds no certificate in PEM"),
        ("tls_cert", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----", "damaged or cut"),
        ("tls_client_ca", "-----BEGIN CERTIFICATE-----\nx", "damaged or cut short"),
    ],
)
def test_a_file_that_is_no_certificate_or_key_is_named(
    server: ServerConfig, setting: str, text: str, told: str
) -> None:
    path = Path(getattr(server, setting))
    path.write_text(text)
    problem = said(server)
    assert told in problem
    assert f"{setting} {path}" in problem or f"{path}, " in problem
    assert "_ssl.c" not in problem


def test_an_encrypted_key_is_refused_without_a_prompt(server: ServerConfig) -> None:
    """OpenSSL would prompt for a passphrase at the terminal, and the service would hang."""
    assert server.tls_key is not None
    path = Path(server.tls_key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert f"tls_key {path} is encrypted; give a key without a passphrase" in said(server)


def test_another_authority_for_clients_needs_a_restart(server: ServerConfig) -> None:
    certificates = Certificates(server)
    assert server.tls_client_ca is not None
    trustme.CA().cert_pem.write_to_path(server.tls_client_ca)
    new = certificates.renewal(server)

    assert new is not None
    assert certificates.apply(new) == ["server.tls_client_ca"]


def test_a_renewed_certificate_keeps_the_client_authorities(
    server: ServerConfig, authority: trustme.CA
) -> None:
    certificates, other = Certificates(server), trustme.CA()
    assert server.tls_client_ca is not None
    issue(authority, server, "new.test")
    comment = "# Autorité, not of ASCII\n".encode()
    Path(server.tls_client_ca).write_bytes(comment + other.cert_pem.bytes())
    for name in ("new.test", "newer.test"):
        issue(authority, server, name)
        new = certificates.renewal(server)
        assert new is not None
        certificates.apply(new)
        assert shown(certificates, authority, authority.issue_cert("client.test")) == name
        with pytest.raises(ssl.SSLError):
            shown(certificates, authority, other.issue_cert("client.test"))
    restarted = Certificates(server)
    assert shown(restarted, authority, other.issue_cert("client.test")) == "newer.test"


def test_a_checked_certificate_is_used_without_reading_its_file_again(
    server: ServerConfig, authority: trustme.CA
) -> None:
    certificates = Certificates(server)
    issue(authority, server, "new.test")
    new = certificates.renewal(server)
    assert new is not None
    for path in (server.tls_cert, server.tls_key, server.tls_client_ca):
        Path(str(path)).unlink()
    assert certificates.apply(new) == ["server.tls_cert", "server.tls_key"]
    assert shown(certificates, authority) == "new.test"
