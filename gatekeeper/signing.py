"""`Signer`: signs requests with a key that the crawler's site publishes (Web Bot Auth).

HTTP message signatures (RFC 9421) in the profile of draft-ietf-webbotauth-httpsig-protocol-01: an
Ed25519 key, its thumbprint as `keyid`, the tag `web-bot-auth`, and a header Signature-Agent that
names where the key is published. A signature is made when the request has its lease, so that
`created` is when it is sent, and is valid for `identity.lifetime` seconds.

Keys never leave this module: no message, `repr` or log contains one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from gatekeeper import urls
from gatekeeper.config import read_file
from gatekeeper.errors import ConfigError, InvalidURL, needs_extra

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

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

    from gatekeeper.clock import Clock
    from gatekeeper.config import IdentityConfig

DIRECTORY_PATH = "/.well-known/http-message-signatures-directory"
"""The path at which verifiers look for the keys of an origin."""
DIRECTORY_TYPE = "application/http-message-signatures-directory+json"
"""The media type that the directory has to be served with."""
TAG = "web-bot-auth"
LABEL = "sig1"
"""The signature's label in all three headers."""
_NONCE_BYTES = 64
"""Bytes of a nonce, as in the drafts' test vectors."""


class PublicKey(NamedTuple):
    """The public half of a key."""

    x: str
    """The Ed25519 point, in base64url."""
    keyid: str
    """Its JWK thumbprint (RFC 7638, RFC 8037 appendix A.3)."""

    @classmethod
    def of(cls, raw: bytes) -> PublicKey:
        """Make one from the 32 bytes of the key."""
        x = _base64url(raw)
        required = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": x}, separators=(",", ":"))
        return cls(x, _base64url(hashlib.sha256(required.encode()).digest()))

    @property
    def jwk(self) -> dict[str, str]:
        """The key as an entry of a directory (RFC 7517)."""
        return {"kty": "OKP", "crv": "Ed25519", "kid": self.keyid, "x": self.x, "use": "sig"}


class SigningKey:
    """An Ed25519 private key, which shows nothing but its `keyid`."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Any) -> None:
        """`key`: an Ed25519PrivateKey of the package cryptography."""
        self._key = key
        self.public: PublicKey = PublicKey.of(key.public_key().public_bytes_raw())
        """The public key, which may be published."""

    def sign(self, data: bytes) -> bytes:
        """Return the signature, 64 bytes; it is deterministic (RFC 8032)."""
        signature: bytes = self._key.sign(data)
        return signature

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.keyid}>"

    def __reduce__(self) -> str:
        raise TypeError("a SigningKey can't be pickled: it would leave this process")


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# --- key files -------------------------------------------------------------------------------


def _cryptography() -> tuple[Any, Any]:
    """Import the needed modules of cryptography. Raises ConfigError if it is not installed."""
    with needs_extra("sign", "identity.key"):
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    return serialization, ed25519


def new_key(path: str | Path) -> SigningKey:
    """Make a key, and write it to a new file that only its owner can read.

    The file is PEM, as OpenSSL writes it. Raises FileExistsError if the file exists, another
    OSError if it can't be written, and ConfigError without the extra `sign`.
    """
    serialization, ed25519 = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
    return SigningKey(key)


def read_signing_key(path: str | Path) -> SigningKey:
    """Read the key in a PEM file. Raises ConfigError, which names the file and not the key."""
    serialization, ed25519 = _cryptography()
    text = _read(path, secret=True)
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError) as error:
        # Without their message, which might quote the file.
        raise ConfigError(f"{path}: not a private key in PEM without a passphrase") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path}: not an Ed25519 key; `gatekeeper identity new` makes one")
    return SigningKey(key)


def read_public(path: str | Path) -> PublicKey:
    """Read the public half of the key in a PEM file, which may hold only the public key."""
    if b"PRIVATE KEY" in _read(path, secret=False):
        return read_signing_key(path).public
    serialization, ed25519 = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(path, secret=False))
    except ValueError as error:
        raise ConfigError(f"{path}: not a key in PEM") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ConfigError(f"{path}: not an Ed25519 key; `gatekeeper identity new` makes one")
    return PublicKey.of(key.public_bytes_raw())


def _read(path: str | Path, *, secret: bool) -> bytes:
    try:
        text, mode = read_file(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); `gatekeeper identity new` makes a key"
        ) from error
    if secret and os.name == "posix" and mode & 0o077:
        raise ConfigError(
            f"{path}: others can read or change this key (mode {mode:04o}): chmod 600 it, "
            "and make a new one if they may have done so"
        )
    return text


def key_directory(keys: Iterable[PublicKey]) -> dict[str, Any]:
    """Return the directory to publish (JWKS, RFC 7517 section 5), with each key once."""
    return {"keys": [key.jwk for key in dict.fromkeys(keys)]}


# --- signing ---------------------------------------------------------------------------------


class SignatureAgent(NamedTuple):
    """The header Signature-Agent, and the component that covers it."""

    header: str
    component: str
    """Its identifier in the list of components."""
    covered: str
    """The part of the header that is signed."""


def signature_agent(directory: str, form: str) -> SignatureAgent:
    """Make the header for the URL of a key directory; `form` is "dictionary" or "string".

    An origin, or the URL of its well-known path, means the directory at that path; any other URL is
    a JWK Set itself (`type=jwks_uri`). Raises ConfigError.

    >>> signature_agent("https://bot.example/", "dictionary").header
    'sig1="https://bot.example"'
    >>> signature_agent("https://bot.example/keys.json", "dictionary").header
    'sig1="https://bot.example/keys.json";type=jwks_uri'
    """
    try:
        target = urls.parse(directory)
    except InvalidURL as error:
        raise ConfigError(f"identity.directory: {error}") from error
    if target.scheme != "https" or target.userinfo or urlsplit(directory).fragment:
        raise ConfigError(
            f"identity.directory: {urls.mask(directory)} must be an https URL without credentials "
            "and fragment; give the origin that publishes your keys, such as https://bot.example.org"
        )
    if target.path in {"/", DIRECTORY_PATH}:
        value = f'"{target.origin}"'
    elif form == "string":
        raise ConfigError(
            'identity.signature_agent: "string" can only name an origin, whose keys are at '
            f"{DIRECTORY_PATH}; shorten identity.directory to {target.origin}"
        )
    else:
        value = f'"{target.url}";type=jwks_uri'
    if form == "string":
        return SignatureAgent(value, '"signature-agent"', value)
    # RFC 9421 section 2.1.2: the one member of the dictionary.
    return SignatureAgent(f"{LABEL}={value}", f'"signature-agent";key="{LABEL}"', value)


class Signer:
    """Signs requests by the settings of `[identity]`. It has no state and can be shared.

    >>> config = IdentityConfig(key="bot.pem", directory="https://bot.example")  # doctest: +SKIP
    >>> Signer.of(config, SystemClock()).headers("GET", "https://example.org/")  # doctest: +SKIP
    """

    __slots__ = ("_agent", "_components", "_key", "_lifetime", "_nonce", "_wall")

    def __init__(
        self,
        key: SigningKey,
        *,
        agent: SignatureAgent,
        components: Iterable[str],
        lifetime: float,
        wall: Callable[[], float],
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(_NONCE_BYTES),
    ) -> None:
        """`components`: those that are signed beside the agent; `lifetime`: seconds for which a
        signature is valid; `wall`: returns POSIX seconds; `nonce`: returns random bytes."""
        self._key = key
        self._agent = agent
        self._components = tuple(components)
        self._lifetime = int(lifetime)
        self._wall = wall
        self._nonce = nonce

    @classmethod
    def of(cls, config: IdentityConfig, clock: Clock) -> Signer | None:
        """Make a signer from the settings; None if no key is set. Raises ConfigError."""
        if config.key is None:
            return None
        if config.directory is None:
            raise ConfigError(
                "identity.directory is not set: who checks a signature has to know where "
                "identity.key is published; give the origin, such as https://bot.example.org"
            )
        return cls(
            read_signing_key(config.key),
            agent=signature_agent(config.directory, config.signature_agent),
            components=config.components,
            lifetime=config.lifetime,
            wall=clock.wall,
        )

    @property
    def public(self) -> PublicKey:
        """The public half of the signing key."""
        return self._key.public

    def headers(self, method: str, url: str) -> dict[str, str]:
        """Return the header fields that sign a request; call it just before the request is sent.

        The request's Host header must be that of the URL. Raises InvalidURL.
        """
        target = urls.parse(url)
        return self._signed(method, target.scheme, target.origin.partition("//")[2], target.path)

    def sign(self, request: ClientRequest) -> None:
        """Sign an aiohttp request, replacing an earlier signature of this signer."""
        url = request.url
        authority = _authority(request.headers.get("Host", ""), url.scheme)
        path = url.raw_path_qs or "/"
        request.headers.update(self._signed(request.method, url.scheme, authority, path))

    async def middleware(
        self, request: ClientRequest, handler: ClientHandlerType
    ) -> ClientResponse:
        """Sign a request, as an aiohttp client middleware; make it the innermost one.

        A gate's own middleware signs already, if its configuration has a key.
        """
        self.sign(request)
        return await handler(request)

    def _signed(self, method: str, scheme: str, authority: str, path: str) -> dict[str, str]:
        bare, _, query = path.partition("?")
        values = {
            "@method": method.upper(),
            "@authority": authority,
            "@target-uri": f"{scheme}://{authority}{path}",
            "@path": bare or "/",
            "@query": "?" + query,
        }
        lines = [(f'"{name}"', values[name]) for name in self._components]
        lines.append((self._agent.component, self._agent.covered))
        created = int(self._wall())
        nonce = base64.b64encode(self._nonce()).decode()
        parameters = (
            f"({' '.join(name for name, _ in lines)});created={created}"
            f';keyid="{self._key.public.keyid}";alg="ed25519"'
            f';expires={created + self._lifetime};nonce="{nonce}";tag="{TAG}"'
        )
        base = signature_base(lines, parameters)
        signature = base64.b64encode(self._key.sign(base.encode())).decode()
        return {
            "Signature-Agent": self._agent.header,
            "Signature-Input": f"{LABEL}={parameters}",
            "Signature": f"{LABEL}=:{signature}:",
        }


def signature_base(components: Iterable[tuple[str, str]], parameters: str) -> str:
    """Return the text that is signed (RFC 9421 section 2.5): each component's identifier and value,
    and the signature's parameters."""
    lines = [f"{identifier}: {value}" for identifier, value in components]
    return "\n".join([*lines, f'"@signature-params": {parameters}'])


_DEFAULT_PORT = {"http": ":80", "https": ":443"}


def _authority(host: str, scheme: str) -> str:
    """Return the authority as signed (RFC 9421 section 2.2.3): lower case, no default port."""
    return host.lower().removesuffix(_DEFAULT_PORT.get(scheme, ""))
