"""Certificates for the fake internet, good and bad; made in the process, kept nowhere."""

from __future__ import annotations

import datetime
import ssl
from functools import cache
from pathlib import Path
from typing import Literal

import trustme

TLS = Literal["good", "self-signed", "expired", "wrong-name", "none"]
"""How a site does TLS; "none": its port 443 speaks plain HTTP."""

_PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@cache
def authority() -> trustme.CA:
    """The one that good certificates are issued by."""
    return trustme.CA()


@cache
def _stranger() -> trustme.CA:
    return trustme.CA(organization_name="nobody's friend")


@cache
def server_context(name: str, kind: TLS) -> ssl.SSLContext:
    """The server's context for a name (or a literal address)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer = _stranger() if kind == "self-signed" else authority()
    identity = "somebody-else.test" if kind == "wrong-name" else name
    if kind == "expired":
        certificate = issuer.issue_cert(
            identity, not_before=_PAST, not_after=_PAST + datetime.timedelta(days=30)
        )
    else:
        certificate = issuer.issue_cert(identity)
    certificate.configure_cert(context)
    return context


@cache
def client_context() -> ssl.SSLContext:
    """A client's context that trusts the fake internet's authority, and nothing else."""
    context = ssl.create_default_context()
    authority().configure_trust(context)
    return context


def issue_files(folder: Path | str, name: str = "127.0.0.1") -> tuple[str, str]:
    """The paths of a new good certificate for a name, and of its key."""
    certificate = authority().issue_cert(name)
    paths = str(Path(folder) / f"{name}.crt"), str(Path(folder) / f"{name}.key")
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    return paths
