"""Signed requests, by the name that programs import: see `gatekeeper.signing`."""

from gatekeeper.signing import (
    DIRECTORY_PATH,
    DIRECTORY_TYPE,
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

__all__ = [
    "DIRECTORY_PATH",
    "DIRECTORY_TYPE",
    "PublicKey",
    "SignatureAgent",
    "Signer",
    "SigningKey",
    "key_directory",
    "new_key",
    "read_public",
    "read_signing_key",
    "signature_agent",
    "signature_base",
]
