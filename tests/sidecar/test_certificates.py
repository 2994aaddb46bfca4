"""A certificate that is renewed at the same path is shown from the next connection on."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.certificates import Certificates


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


def shown(certificates: Certificates, authority: trustme.CA) -> str:
    """The name in the certificate that a client is shown, without a network."""
    context = ssl.create_default_context()
    context.check_hostname = False
    authority.configure_trust(context)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    assert certificates.context is not None
    ours = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    theirs = context.wrap_bio(to_client, to_server)
    for one in (theirs, ours, theirs):
        try:
            one.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found: Any = theirs.getpeercert()
    return str(found["subjectAltName"][0][1])


def test_a_renewed_certificate_is_shown(server: ServerConfig, authority: trustme.CA) -> None:
    certificates = Certificates(server)
    assert shown(certificates, authority) == "old.test"
    assert certificates.renewal(server) is None

    issue(authority, server, "new.test")
    new = certificates.renewal(server)
    assert new is not None
    assert certificates.take_over(new) == (["server.tls_cert", "server.tls_key"], [])
    assert shown(certificates, authority) == "new.test"
    assert certificates.renewal(server) is None


def test_one_that_does_not_fit_its_key_is_refused_and_the_old_one_stays(
    server: ServerConfig, authority: trustme.CA
) -> None:
    certificates = Certificates(server)
    assert server.tls_cert is not None
    stranger = authority.issue_cert("new.test")
    stranger.cert_chain_pems[0].write_to_path(server.tls_cert)

    with pytest.raises(ConfigError, match="tls_"):
        certificates.renewal(server)
    assert shown(certificates, authority) == "old.test"


def test_another_authority_for_clients_needs_a_restart(server: ServerConfig) -> None:
    certificates = Certificates(server)
    assert server.tls_client_ca is not None
    trustme.CA().cert_pem.write_to_path(server.tls_client_ca)
    new = certificates.renewal(server)

    assert new is not None
    assert certificates.take_over(new) == ([], ["server.tls_client_ca"])
