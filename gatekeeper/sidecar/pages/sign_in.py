"""Who looks at a page: a token once, then a cookie that is signed, short-lived and no script's.

The signature's key is the token itself: a cookie holds after a restart, and no longer than its
token. Each form carries a word that only our own pages know (T4), made anew by each process.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

from aiohttp import web

from gatekeeper.clock import Clock
from gatekeeper.sidecar.exchange import ANY_ROLE, Problem, Role
from gatekeeper.sidecar.security import Admission, Token

__all__ = ["COOKIE", "IDLE", "LONGEST", "Sessions", "Visitor"]

COOKIE: Final = "gatekeeper_session"
IDLE: Final = 900
"""Seconds without a page after which a session is over."""
LONGEST: Final = 43_200
"""Seconds from the sign-in after which it is over at any rate."""


_MOMENT: Final = re.compile("[0-9]{1,12}")
"""Anything longer, which Python may refuse to read, is no moment of ours."""
_SECURE: Final = "tls-"


class Visitor(NamedTuple):
    """Somebody who may look."""

    name: str
    """As the client is called in the log, and where it is bounded."""
    roles: frozenset[Role]
    form: str
    """What each form has to carry."""
    cookie: str | None = None
    """The session's next cookie; None where there is no session."""
    secure: bool = False
    """It began over TLS, of a proxy say: its cookie goes over nothing else."""


class Sessions:
    """Knows visitors by what they show. Keeps nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def visitor(self, request: web.BaseRequest, admission: Admission) -> Visitor | None:
        """Who asks; None: he has to sign in first. Raises Problem 401 or 403."""
        admission.check_browser(request.headers)
        if "Authorization" in request.headers or not admission.tokens:
            name = admission.admit(request, ANY_ROLE)
            return Visitor(name, admission.roles(request.headers), self._form(name))
        text = request.cookies.get(COOKIE, "")
        name, began, until, nonce, signature = [*text.split("|"), "", "", "", "", ""][:5]
        now = self._clock.wall()
        if not (_MOMENT.fullmatch(began) and _MOMENT.fullmatch(until) and now < int(until)):
            return None
        for token in admission.tokens.of(name):
            signed = _signature(token, began, until, nonce)
            if hmac.compare_digest(signed.encode(), signature.encode("utf-8", "replace")):
                cookie = self._cookie(token, int(began), nonce)
                secure = nonce.startswith(_SECURE)
                return Visitor(token.name, token.roles, self._form(nonce), cookie, secure)
        return None

    def begin(self, token: Token, *, secure: bool = False) -> str:
        """The cookie of a session that begins; `secure`: over TLS."""
        nonce = (_SECURE if secure else "") + secrets.token_hex(16)
        return self._cookie(token, int(self._clock.wall()), nonce)

    def check_form(self, visitor: Visitor, fields: Mapping[str, str]) -> None:
        """Raises Problem 403 for a form that is none of our own pages'."""
        given = fields.get("form", "").encode("utf-8", "replace")
        if not hmac.compare_digest(visitor.form.encode(), given):
            raise Problem(403, "form", "this form is too old, or none of ours: load its page again")

    def _cookie(self, token: Token, began: int, nonce: str) -> str:
        until = str(min(int(self._clock.wall()) + IDLE, began + LONGEST))
        signature = _signature(token, str(began), until, nonce)
        return "|".join((token.name, str(began), until, nonce, signature))

    def _form(self, session: str) -> str:
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()


def _signature(token: Token, *parts: str) -> str:
    key = hashlib.blake2b(token.value, person=b"ui session").digest()
    return hmac.new(key, "|".join((token.name, *parts)).encode(), hashlib.sha256).hexdigest()
