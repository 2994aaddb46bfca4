"""TLS: which authorities are trusted, and why a secure connection could not be made."""

from __future__ import annotations

import ssl
from itertools import islice
from pathlib import Path
from typing import Final

import aiohttp

from gatekeeper.config import FetchConfig, read_file
from gatekeeper.errors import ConfigError, causes

_MAX_FILES: Final = 1000
"""Files of `fetch.ca_dir` that may be read."""
_MARK: Final = "CERTIFICATE-----"
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's verification errors whose cause is an authority that is not trusted (openssl-verify):
no issuer found, a self-signed certificate, or one that can't be traced to an authority."""
_MAX_TEXT: Final = 300


def trusted_by(config: FetchConfig) -> ssl.SSLContext | bool:
    """Return the TLS context that also trusts `fetch.ca_file` and `fetch.ca_dir`, for a connector.

    Return True, aiohttp's own context, if neither is set. Raises ConfigError.
    """
    if config.ca_file is None and config.ca_dir is None:
        return True
    context = ssl.create_default_context()
    context.set_alpn_protocols(("http/1.1",))  # as aiohttp's own does
    if config.ca_file is not None and not _add(context, "fetch.ca_file", Path(config.ca_file)):
        raise ConfigError(f"fetch.ca_file: {config.ca_file} holds no {_WANTED}")
    if config.ca_dir is not None:
        found = [_add(context, "fetch.ca_dir", path) for path in _files_in(config.ca_dir)]
        if not any(found):
            raise ConfigError(f"fetch.ca_dir: no file in {config.ca_dir} holds a {_WANTED}")
    return context


_WANTED: Final = f'certificate in PEM, with a line "-----BEGIN {_MARK}"'


def _files_in(folder: str) -> list[Path]:
    """Return the files of a directory whose names do not begin with a dot. Raises ConfigError."""
    try:
        # Mounted secrets of Kubernetes are links, beside hidden directories.
        files = (one for one in Path(folder).iterdir() if one.name[0] != "." and one.is_file())
        found = list(islice(files, _MAX_FILES + 1))
    except OSError as error:
        remedy = "give a directory with certificates in PEM"
        raise ConfigError(f"fetch.ca_dir: {folder}: {error.strerror}; {remedy}") from error
    if len(found) > _MAX_FILES:
        raise ConfigError(f"fetch.ca_dir: {folder}: more than {_MAX_FILES} files; join some")
    return sorted(found)


def _add(context: ssl.SSLContext, setting: str, path: Path) -> bool:
    """Trust the certificates of a file. Return False if it has none. Raises ConfigError."""
    try:
        pem = read_file(path)[0].decode("latin-1")
        if _MARK not in pem:
            return False
        context.load_verify_locations(cadata=pem.encode("ascii", "replace").decode())
    except OSError as error:  # ssl.SSLError is one
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(
            f"{setting}: {path} can't be read ({why}); give a file of certificates in PEM"
        ) from error
    return True


def failure_text(error: BaseException) -> str:
    """Return the words for a failed request: OpenSSL's, with what helps, if TLS was the reason.

    They hold nothing that the site wrote, only its name, so that clients may see those about TLS.
    """
    for cause in causes(error):
        # aiohttp's errors are such errors as well, but do not hold what OpenSSL said.
        if isinstance(cause, aiohttp.ClientError) or not isinstance(cause, ssl.SSLError):
            continue
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = cause.verify_message.removesuffix(".")
            if cause.verify_code in _UNKNOWN_ISSUER:
                text += "; fetch.ca_file and fetch.ca_dir name further authorities to trust"
            else:
                text += '; fetch.tls_errors = "accept" reads robots.txt nevertheless'
            return f"OpenSSL: {text}"[:_MAX_TEXT]
        if cause.reason:
            return f"OpenSSL: {cause.reason.replace('_', ' ').lower()}"[:_MAX_TEXT]
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
