"""The guard's judgement: `Guard` says which URLs and addresses may be dialled, and why not.

Nothing here touches the network; guard.py puts it where no request gets past.
"""

from __future__ import annotations

import functools
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

from yarl import URL

from gatekeeper import urls
from gatekeeper.config import Config, GuardConfig, as_config
from gatekeeper.decision import BLOCKED_NOTE
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.fetching.addresses import (
    ADDRESS_NOTE,
    BAD_PORTS,
    NAME_NOTE,
    NAT64,
    NEEDS_RANGE,
    PORT_NOTE,
    TABLE_VERSION,
    USERINFO_NOTE,
    Kind,
    address_kind,
    inner_name,
    ipv4_within,
    remedy,
)

__all__ = ["Guard", "GuardStats", "Refusal"]

_log = logging.getLogger("gatekeeper.guard")

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network

_MAX_REMEMBERED = 50_000  # origins whose verdict is kept; emptied when full
_MAX_ADDRESSES = 4_096  # addresses whose text needs not be read again
_ORDINARY = 8_000  # octets of a path that is not looked at twice
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_QUAD = re.compile(r"\.".join([_OCTET] * 4)).fullmatch
_ODD = re.compile(r"[^!-~]").search
_MAX_LOGGED = 1_024  # refusals that are logged once until so many others were
_REASONS = {
    Kind.MALFORMED: "no canonical address",
    Kind.SELF: "our own listener",
    Kind.OPERATOR: "on the deny list",
}
_MAX_LABEL, _MAX_NAME = 63, 253  # RFC 1035 section 2.3.4


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the guard said no. As text it is one constant word, which tells a client nothing (T2).

    `kind` is a named verdict; `detail` is for the operator's log alone. `note` may be told to
    anybody: it rests on the text of the URL, and is one constant for all that was looked up, so
    that no caller learns what a name leads to, or that anything is there.

    >>> str(Guard(Config()).refuses_url("http://127.0.0.1/"))
    'blocked'
    """

    kind: Kind
    detail: str
    note: str = BLOCKED_NOTE

    def __str__(self) -> str:
        return "blocked"


_UNKNOWN: Final = Refusal(Kind.MALFORMED, "not judged yet")


@dataclass(frozen=True, slots=True)
class GuardStats:
    """What a guard has done so far."""

    mode: str
    """"full", or "url-only" where proxies are let through unjudged."""
    table_version: str
    refused: Mapping[str, int]
    """Refusals by kind, answers of the name service that were dropped included."""
    dialled: int
    """Connections that were let through."""


class Guard:
    """Judges URLs and addresses by the operator's lists and our own tables.

    The operator's `deny` is stronger than his `allow`, and both are stronger than the tables.
    A CIDR range in `allow` opens addresses; a name (or `*.example.org`) opens that name, and
    what it resolves to: but never a link-local address, nor, unless the name is `localhost`
    itself, one of this machine. Our own listeners stay closed in any case (T3).

    >>> guard = Guard(Config())
    >>> guard.refuses_url("http://example.com/") is None
    True
    >>> guard.refuses_address("10.0.0.1", 80).kind
    <Kind.PRIVATE: 'private'>
    """

    def __init__(
        self, config: Config | None = None, *, is_local: Callable[[_Address], bool] | None = None
    ) -> None:
        """Raises ConfigError for an entry of guard.allow or guard.deny that can't be read.

        `is_local` says whether an address is one of this machine's; asked only about
        addresses at the port of a listener on all interfaces.
        """
        self.version = 0
        """Goes up when other settings are put in force."""
        self._is_local = is_local or _is_local
        self._listeners: set[tuple[_Address, int]] = set()
        self._verdicts: dict[str, Refusal | None] = {}
        self.passed: set[tuple[str, str]] = set()
        """Scheme and authority of what may be requested, whatever ordinary path follows."""
        self._logged: set[Refusal] = set()
        self._refused: Counter[str] = Counter()
        self._dialled = 0
        self.adjust(as_config(config).guard)
        self.next_id: Callable[[], str] = str
        """Names the decision of a refusal, where a gate stands behind the guard (T20)."""

    def adjust(self, settings: GuardConfig) -> None:
        """Judge by these settings from now on. Raises ConfigError, having changed nothing.

        Connections that were let through before are the connector's to give up.
        """
        allowed, allowed_names = _read_list(settings.allow, "guard.allow")
        denied, denied_names = _read_list(settings.deny, "guard.deny")
        self.mode = settings.mode
        self._ports = None if settings.ports is None else frozenset(settings.ports)
        self._unwrap_nat64 = settings.nat64 == "unwrap"
        self._allowed, self._allowed_names = allowed, allowed_names
        self._denied, self._denied_names = denied, denied_names
        self._verdicts.clear()
        self.passed.clear()
        self._logged.clear()
        self.version += 1

    def refuses_url(self, raw: str) -> Refusal | None:
        """Judge the text of a URL: scheme, userinfo, host, port. None: it may be visited.

        What a name resolves to is not known here; that is judged when it is dialled.
        """
        ordinary = urls.split_ordinary(raw)  # never with userinfo: those take the long road
        if ordinary is not None and (origin := ordinary[0]) in self._verdicts:
            refusal = self._verdicts[origin]
        else:
            refusal = self._judge_text(raw)
        return refusal if refusal is None else self._note(refusal)

    def refuses_request(self, url: URL) -> Refusal | None:
        """The same of a URL that is about to be requested, each time."""
        key = (url.scheme, url.raw_authority)
        path = url.raw_path_qs
        # A verdict is about the authority; of the rest only malformed text is refused.
        ordinary = len(path) < _ORDINARY and not _ODD(path)
        if ordinary and key in self.passed:
            return None
        # One that is spelt as its origin, and holds no credentials, was judged with it.
        if ordinary and self._verdicts.get(f"{key[0]}://{key[1]}", _UNKNOWN) is None:
            refusal = None
        else:
            refusal = self.refuses_url(str(url))
        if refusal is None and "@" not in key[1]:
            if len(self.passed) >= _MAX_REMEMBERED:
                self.passed.clear()
            self.passed.add(key)
        return refusal

    def refuses_target(self, target: urls.Target) -> Refusal | None:
        """The same of a URL that was read already, such as where a redirect leads.

        A Target's own `url` has lost its userinfo, so it must not be asked about as text.
        """
        refusal = self._judge_target(target)
        return refusal if refusal is None else self._note(refusal)

    def refuses_address(self, ip: str | IPv4Address | IPv6Address, port: int) -> Refusal | None:
        """Judge an address and port that are about to be dialled. None: it may be.

        Text that is no canonical address is refused, not raised.
        """
        refusal = self._judge_port(port, str(ip)) or self._judge_address(ip, port)
        return refusal if refusal is None else self._note(refusal)

    def listens_on(self, address: str | IPv4Address | IPv6Address, port: int) -> None:
        """Never dial this address and port: it is a listener of ours (T3).

        `address` is numeric, as a socket's own name has it; "" and the unspecified addresses
        mean every address of this machine. Raises ConfigError for anything else.
        """
        try:
            own = ip_address(str(address).partition("%")[0] or "::")
        except ValueError:
            raise ConfigError(f"{address!r} is no numeric address to listen on") from None
        self._listeners.add((_unmapped(own), port))
        self._verdicts.clear()
        self.passed.clear()

    def stats(self) -> GuardStats:
        """What was refused and what was dialled, counted since the guard was made."""
        return GuardStats(self.mode, TABLE_VERSION, dict(self._refused), self._dialled)

    # -- the URL stage

    def _judge_text(self, raw: str) -> Refusal | None:
        try:
            target = urls.parse(raw)
        except InvalidURL as error:
            return Refusal(Kind.MALFORMED, str(error))
        return self._judge_target(target)

    def _judge_target(self, target: urls.Target) -> Refusal | None:
        if target.userinfo:
            return Refusal(Kind.USERINFO, f"{target.origin}: credentials in the URL", USERINFO_NOTE)
        if target.origin not in self._verdicts:
            if len(self._verdicts) >= _MAX_REMEMBERED:
                self._verdicts.clear()
            self._verdicts[target.origin] = self._judge_origin(target)
        return self._verdicts[target.origin]

    def _judge_origin(self, target: urls.Target) -> Refusal | None:
        if refusal := self._judge_port(target.port, target.host):
            return refusal
        literal = _as_address(target.host)
        if literal is not None:
            return self._judge_address(literal, target.port)
        return self._judge_name(target.host)

    def _judge_port(self, port: int, host: str) -> Refusal | None:
        if self._ports is None:
            good = 0 < port < 65_536 and port not in BAD_PORTS
        else:
            good = 0 < port < 65_536 and port in self._ports
        if good:
            return None
        return Refusal(Kind.PORT, f"{host}: port {port}", PORT_NOTE.format(port))

    def _judge_name(self, host: str) -> Refusal | None:
        name = _folded(host)
        if len(name) > _MAX_NAME or any(not 0 < len(n) <= _MAX_LABEL for n in name.split(".")):
            return Refusal(Kind.MALFORMED, f"{name[:_MAX_NAME]}: no possible name")
        inner = inner_name(name)
        if _listed(name, self._denied_names):
            # The same words as without the list: what stands on it is nobody's business.
            note = NAME_NOTE if inner else BLOCKED_NOTE
            return Refusal(Kind.OPERATOR, f"{name}: on the deny list", note)
        if inner and not _listed(name, self._allowed_names):
            return Refusal(Kind.NAME, f"{name}: a name of the inner network", NAME_NOTE)
        return None

    # -- the address stage

    def _judge_address(self, ip: str | _Address, port: int, name: str = "") -> Refusal | None:
        """`name`: what resolved to the address, for the log."""
        parsed = _as_address(ip) if isinstance(ip, str) else ip
        kind = Kind.MALFORMED if parsed is None else self._kind_of(parsed, port, name)
        if kind is None:
            return None
        shown = f"{name} -> {ip} port {port}" if name else f"{ip} port {port}"
        if kind is Kind.MALFORMED:
            shown = f"{shown!r:.200}"
        why = _REASONS.get(kind, f"{kind} address")
        if kind in NEEDS_RANGE and _listed(_folded(name), self._allowed_names):
            why = f"{kind} address, which no name opens, but a CIDR range"
        return Refusal(kind, f"{shown}: {why}", BLOCKED_NOTE if name else ADDRESS_NOTE)

    def _kind_of(self, ip: _Address, port: int, name: str) -> Kind | None:
        """Why the address may not be dialled; None: it may be."""
        judged = _unmapped(ip, nat64=self._unwrap_nat64)
        if self._listeners and self._is_self(_unmapped(ip, nat64=True), port):
            return Kind.SELF
        if _within(ip, self._denied) or _within(judged, self._denied):
            return Kind.OPERATOR
        # The allow list is asked about the address that is really reached: `::/0` on it does
        # not open ::ffff:127.0.0.1.
        if _within(judged, self._allowed):
            return None
        if _listed(_folded(name), self._allowed_names):
            return _beyond_a_name(_unmapped(ip, nat64=True), _folded(name))
        if isinstance(judged, IPv6Address) and judged in NAT64:
            return Kind.NAT64
        return address_kind(judged)

    def _is_self(self, ip: _Address, port: int) -> bool:
        for own, own_port in self._listeners:
            if port != own_port:
                continue
            if ip == own or ip.is_unspecified:  # dialling 0.0.0.0 reaches this machine
                return True
            # A wildcard listener answers at every address of this machine, and `::` at those
            # of IPv4 as well.
            if own.is_unspecified and (own.version == 6 or ip.version == 4) and self._is_local(ip):
                return True
        return False

    # -- what the connector asks

    def refuses_name(self, name: str) -> Refusal | None:
        """Judge a name alone, as it is about to be looked up."""
        refusal = self._judge_name(name)
        return refusal if refusal is None else self._note(refusal)

    def refuses_answer(self, ip: str, port: int, name: str) -> Refusal | None:
        """Judge an address that a name resolved to, its port having been judged with the URL."""
        refusal = self._judge_address(ip, port, name if name != ip else "")
        return refusal if refusal is None else self._note(refusal)

    def dialled(self) -> None:
        """Count a connection that was let through."""
        self._dialled += 1

    def _note(self, refusal: Refusal) -> Refusal:
        """Count a refusal, and log it unless it was logged lately."""
        self._refused[refusal.kind] += 1
        if refusal not in self._logged:
            if len(self._logged) >= _MAX_LOGGED:
                self._logged.clear()
            self._logged.add(refusal)
            _log.warning("refused (%s): %s%s", refusal.kind, refusal.detail, remedy(refusal.kind))
        return refusal


# -- small parts


@functools.lru_cache(_MAX_ADDRESSES)
def _as_address(text: str) -> _Address | None:
    """A canonical address; a zone is taken off where it belongs, at link-local ones.

    Each is judged several times on its way to the socket, and read once.
    """
    plain, percent, _ = text.partition("%")
    if _QUAD(plain) and not percent:  # what every reader reads alike may be read in C
        return IPv4Address(socket.inet_aton(plain))
    if ":" not in plain and not plain[-1:].isdecimal():
        return None  # a name: without a colon every address ends with a digit
    try:
        ip = ip_address(plain)
    except ValueError:
        return None
    return None if percent and not ip.is_link_local else ip


def _unmapped(ip: _Address, *, nat64: bool = False) -> _Address:
    inner = ipv4_within(ip, nat64=nat64) if isinstance(ip, IPv6Address) else None
    return ip if inner is None else inner


def _beyond_a_name(ip: _Address, name: str) -> Kind | None:
    """Why a listed name does not open the address; None: it does.

    Whoever runs the zone of a listed name chooses its addresses. Link-local ones are where
    clouds keep credentials, and those of this machine have services that trust whoever
    reaches them; the forms that carry an IPv4 address inside may lead to either (T1).
    """
    kind = address_kind(ip)
    if kind is Kind.LOOPBACK and name == "localhost":
        return None
    return kind if kind in NEEDS_RANGE else None


def _within(ip: _Address, networks: tuple[_Network, ...]) -> bool:
    for network in networks:  # noqa: SIM110 - a generator would cost more than the look
        if ip in network:
            return True
    return False


def _folded(host: str) -> str:
    return host.lower().removesuffix(".")


def _listed(name: str, names: frozenset[str]) -> bool:
    """Whether a name is listed itself, or below a listed `*.parent`."""
    if not names:
        return False
    if name in names:
        return True
    labels = name.split(".")
    return any("*." + ".".join(labels[i:]) in names for i in range(1, len(labels)))


def _read_list(
    entries: tuple[str, ...], setting: str
) -> tuple[tuple[_Network, ...], frozenset[str]]:
    """CIDR ranges and single addresses apart from names. Raises ConfigError."""
    networks: list[_Network] = []
    names: set[str] = set()
    for entry in entries:
        try:
            networks.append(ip_network(entry))
            continue
        except ValueError as error:
            problem = str(error)
        star, bare = ("*.", entry[2:]) if entry.startswith("*.") else ("", entry)
        try:
            host = urls.parse(f"http://{bare}/").host
        except InvalidURL:
            host = ""
        if not host or "/" in bare or _as_address(host) is not None:
            raise ConfigError(f"{setting}: {problem}; write a CIDR range or a host name")
        names.add(star + host)
    return tuple(networks), frozenset(names)


def _is_local(ip: _Address) -> bool:
    """Whether an address is this machine's own: only such a one can be bound to."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True
