"""The guard's policy: refused addresses, names, ports and URLs, and the operator's exceptions.

The table of addresses is our own, and denies by default in IPv6. `ipaddress.is_global` and similar
properties are not used: they differ between Python 3.11 and 3.13, and count multicast addresses
as global. Sources: the IANA special-purpose registries (as of 2026-11-20), the WHATWG Fetch
standard for ports, and the RFCs named beside the entries.

Nothing here uses the network; the module `guard` enforces the policy for every request.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from gatekeeper import urls
from gatekeeper.config import Config, GuardConfig, as_config
from gatekeeper.decision import BLOCKED_NOTE
from gatekeeper.errors import ConfigError, InvalidURL
from gatekeeper.split_dict import SplitDict


class Kind(StrEnum):
    """Why the guard refuses: for the log and the counters, never for a client (T2)."""

    MALFORMED = "malformed"
    """Not an http or https URL, or not a canonical address."""
    USERINFO = "userinfo"
    """RFC 9110 section 4.2.4: credentials in a URL from an untrusted source."""
    PORT = "port"
    NAME = "name"
    """A name of the inner network, or one that public name servers don't know."""
    THIS_NETWORK = "this_network"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    SHARED = "shared"
    """Carrier-grade NAT; one cloud's metadata service has an address there too."""
    LINK_LOCAL = "link_local"
    """Includes 169.254.169.254, where most clouds serve credentials."""
    PLATFORM = "platform"
    """An address that looks public but belongs to the hosting platform."""
    PROTOCOL = "protocol"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    TRANSITION = "transition"
    """IPv6 tunnelled or translated to an IPv4 address that can't be judged reliably."""
    NAT64 = "nat64"
    """64:ff9b::/96 under guard.nat64 = "deny"."""
    MULTICAST = "multicast"
    RESERVED = "reserved"
    """Not allocated for public use."""
    OPERATOR = "operator"
    """On the operator's deny list."""
    SELF = "self"
    """One of our own listeners (T3)."""


IPV4_TABLE: tuple[tuple[str, Kind | None], ...] = (
    ("0.0.0.0/0", None),
    ("0.0.0.0/8", Kind.THIS_NETWORK),  # RFC 791; Linux connects 0.0.0.0 to itself
    ("10.0.0.0/8", Kind.PRIVATE),  # RFC 1918
    ("100.64.0.0/10", Kind.SHARED),  # RFC 6598
    ("127.0.0.0/8", Kind.LOOPBACK),  # RFC 1122
    ("168.63.129.16/32", Kind.PLATFORM),  # Azure's wire server
    ("169.254.0.0/16", Kind.LINK_LOCAL),  # RFC 3927
    ("172.16.0.0/12", Kind.PRIVATE),  # RFC 1918
    ("192.0.0.0/24", Kind.PROTOCOL),  # RFC 6890
    ("192.0.2.0/24", Kind.DOCUMENTATION),  # RFC 5737
    ("192.88.99.0/24", Kind.TRANSITION),  # RFC 7526: 6to4 relays, deprecated
    ("192.168.0.0/16", Kind.PRIVATE),  # RFC 1918
    ("198.18.0.0/15", Kind.BENCHMARKING),  # RFC 2544
    ("198.51.100.0/24", Kind.DOCUMENTATION),  # RFC 5737
    ("203.0.113.0/24", Kind.DOCUMENTATION),  # RFC 5737
    ("224.0.0.0/4", Kind.MULTICAST),  # RFC 5771
    ("240.0.0.0/4", Kind.RESERVED),  # RFC 1112, broadcast included
)

IPV6_TABLE: tuple[tuple[str, Kind | None], ...] = (
    ("::/0", Kind.RESERVED),
    ("::/96", Kind.TRANSITION),  # RFC 4291: IPv4-compatible, deprecated
    ("::/128", Kind.THIS_NETWORK),
    ("::1/128", Kind.LOOPBACK),
    ("::ffff:0:0:0/96", Kind.TRANSITION),  # RFC 2765: IPv4-translated
    ("64:ff9b:1::/48", Kind.TRANSITION),  # RFC 8215: local-use NAT64
    ("100::/64", Kind.PROTOCOL),  # RFC 6666: discard-only
    ("2000::/3", None),  # RFC 4291: the only block of global unicast, except the following
    ("2001::/23", Kind.PROTOCOL),  # RFC 2928: IETF assignments, ORCHIDs among them
    ("2001::/32", Kind.TRANSITION),  # RFC 4380: Teredo
    ("2001:db8::/32", Kind.DOCUMENTATION),  # RFC 3849
    ("2002::/16", Kind.TRANSITION),  # RFC 3056: 6to4
    ("3fff::/20", Kind.DOCUMENTATION),  # RFC 9637
    ("fc00::/7", Kind.PRIVATE),  # RFC 4193; AWS keeps metadata at fd00:ec2::254
    ("fe80::/10", Kind.LINK_LOCAL),  # RFC 4291
    ("fec0::/10", Kind.PRIVATE),  # RFC 3879: site-local, deprecated
    ("ff00::/8", Kind.MULTICAST),  # RFC 4291
)
"""None means public. Of two ranges that contain an address the narrower one decides."""

NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: DNS64 translates public IPv4 addresses so

INNER_NAMES: tuple[str, ...] = (
    ".alt",  # RFC 9476
    ".home.arpa",  # RFC 8375
    ".internal",  # ICANN, 2024; every cloud's metadata host
    ".invalid",  # RFC 6761
    ".local",  # RFC 6762; also used for the services of clusters
    ".localdomain",  # in the /etc/hosts of some distributions
    ".localhost",  # RFC 6761
    ".onion",  # RFC 7686
)
"""These names and their subdomains are refused, and so is every name with a single label: a search
domain would complete it to a name of the inner network."""

# fmt: off
BAD_PORTS: frozenset[int] = frozenset({
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95,
    101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179,
    389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601,
    636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566,
    6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
})
"""The "bad ports" of WHATWG Fetch, and 0: ports of protocols for which an HTTP request could be
mistaken."""
# fmt: on


_MAX_ADDRESSES = 4_096  # cached addresses in parsed form
MAX_CACHED_ORIGINS = 50_000  # cached verdicts by origin
_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network


def _ranges(table: tuple[tuple[str, Kind | None], ...]) -> list[tuple[int, int, Kind | None]]:
    """Return the first and last address of each range, and its kind; narrow ones first."""
    networks = [(ip_network(cidr), kind) for cidr, kind in table]
    networks.sort(key=lambda entry: -entry[0].prefixlen)
    return [(int(one[0]), int(one[-1]), kind) for one, kind in networks]


_RANGES: Final = {4: _ranges(IPV4_TABLE), 6: _ranges(IPV6_TABLE)}


def address_kind(ip: _Address) -> Kind | None:
    """Return why the table refuses an address, or None if it is public.

    >>> address_kind(IPv4Address("169.254.169.254"))
    <Kind.LINK_LOCAL: 'link_local'>
    >>> address_kind(IPv6Address("2606:4700::1111")) is None
    True
    """
    number = int(ip)
    return next(kind for first, last, kind in _RANGES[ip.version] if first <= number <= last)


def is_inner_name(host: str) -> bool:
    """Return True if a normalized name (lower case, no final dot) belongs to the inner network.

    >>> is_inner_name("metadata.google.internal"), is_inner_name("internal.example.com")
    (True, False)
    """
    return "." not in host or f".{host}".endswith(INNER_NAMES)


NEEDS_RANGE = frozenset({Kind.LINK_LOCAL, Kind.LOOPBACK, Kind.THIS_NETWORK, Kind.TRANSITION})
"""Kinds of addresses that a name in `guard.allow` does not open; only a CIDR range does."""

_NO_REMEDY = frozenset({Kind.MALFORMED, Kind.USERINFO, Kind.OPERATOR, Kind.SELF})
_REMEDIES = {
    Kind.PORT: "; guard.ports can list it",
    Kind.NAME: "; if it is your own, let the name itself in with guard.allow (--allow-address)",
}


USERINFO_NOTE = (
    "the guard refuses credentials in a URL (user:password@host): take them out; where the site "
    "needs them, send them in a header"
)
PORT_NOTE = (
    "the guard refuses port {}: no web pages are served there, or guard.ports leaves it out; "
    "guard.ports lists the ports that may be asked"
)
NO_PORT_NOTE = "the guard refuses port {}: ports are 1 to 65535; correct the URL"
ADDRESS_NOTE = (
    "the guard refuses addresses that are not public, that guard.deny lists, or where gatekeeper "
    "listens; guard.allow (--allow-address) lets your own network in: list the address or its range"
)
NAME_NOTE = (
    "the guard refuses names of an inner network (localhost, .internal, a single label ...) unless "
    "guard.allow (--allow-address) lists the name itself, not its range, and guard.deny does not"
)
NO_NAME_NOTE = (
    "the guard refuses a host name with a part of more than 63 characters, or of more than 253 in "
    "all: DNS has no such names; correct the URL"
)
"""These are a decision's `note` if the URL's text shows why it is refused: the same text for every
such URL, whether anything answers there or not (T2)."""


def remedy(kind: Kind) -> str:
    """Return the end of a log line that says how to allow it, or "" if that is impossible.

    >>> remedy(Kind.LOOPBACK)
    '; if it is your own network, let it in with guard.allow (--allow-address)'
    """
    network = "; if it is your own network, let it in with guard.allow (--allow-address)"
    return "" if kind in _NO_REMEDY else _REMEDIES.get(kind, network)


_log = logging.getLogger("gatekeeper.guard")

MAX_LOGGED = 1_024  # a refusal is logged again after so many others
_KIND_TEXTS = {
    Kind.MALFORMED: "not a canonical address",
    Kind.SELF: "our own listener",
    Kind.OPERATOR: "on the deny list",
}
_MAX_LABEL, _MAX_NAME = 63, 253  # RFC 1035 section 2.3.4


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the guard refuses. Its `str()` is one constant word, which tells a client nothing (T2).

    `kind` classifies the refusal; `detail` is for the operator's log only. `note` is public: it
    depends on the URL's text alone, and is constant for all look-ups, so that no client learns
    the address of a name, or whether anything answers there.

    >>> str(Guard(Config()).refuses_url("http://127.0.0.1/"))
    'blocked'
    """

    kind: Kind
    """What was wrong with the URL or the address."""
    detail: str
    """For the operator's log only."""
    note: str = BLOCKED_NOTE
    """For everybody, such as the remedy."""

    def __str__(self) -> str:
        return "blocked"


@dataclass(frozen=True, slots=True)
class GuardStats:
    """A guard's mode and counters."""

    mode: str
    """"full", or "url-only" if connections through proxies are not judged."""
    refused: Mapping[str, int]
    """Refusals by kind, including addresses removed from the answers of name servers."""
    dialled: int
    """Connections that were allowed."""


_NOT_JUDGED: Final = Refusal(Kind.MALFORMED, "not judged yet")


class Guard:
    """Judges URLs and addresses by the operator's lists and built-in tables.

    The operator's `deny` overrides `allow`, and both override the tables. A CIDR range in `allow`
    opens addresses; a name (or `*.example.org`) opens that name and the addresses that it resolves
    to, except link-local ones, and addresses of this machine unless the name is `localhost`. The
    process's own listeners are always refused (T3).

    >>> guard = Guard(Config())
    >>> guard.refuses_url("http://example.com/") is None
    True
    >>> guard.refuses_address("10.0.0.1", 80).kind
    <Kind.PRIVATE: 'private'>
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        is_local: Callable[[_Address], bool] | None = None,
    ) -> None:
        """Raises ConfigError for an invalid entry of guard.allow or guard.deny.

        `is_local` returns True for an address of this machine. It is called only for addresses
        with the port of a listener on all interfaces.
        """
        self.version: int = 0
        """Incremented when the settings change."""
        self._is_local = is_local or _is_local
        self._listeners: set[tuple[_Address, int]] = set()
        self._logged: set[Refusal] = set()
        self._refused: Counter[str] = Counter()
        self._dialled = 0
        self._verdicts: SplitDict[str, Refusal | None] = SplitDict()
        """Verdicts by origin. Each page is judged where it is asked for and where it is dialled."""
        self.adjust(as_config(config).guard)

    def adjust(self, settings: GuardConfig) -> None:
        """Apply changed settings. Raises ConfigError, in which case nothing was changed.

        The connector has to drop the connections that earlier settings allowed.
        """
        allowed, allowed_names = _read_list(settings.allow, "guard.allow")
        denied, denied_names = _read_list(settings.deny, "guard.deny")
        self.mode = settings.mode
        self._ports = None if settings.ports is None else frozenset(settings.ports)
        self._unwrap_nat64 = settings.nat64 == "unwrap"
        self._allowed, self._allowed_names = allowed, allowed_names
        self._denied, self._denied_names = denied, denied_names
        self._logged.clear()
        self._verdicts.clear()
        self.version += 1

    def refuses_url(self, raw: str) -> Refusal | None:
        """Judge the text of a URL: scheme, userinfo, host, port. Return None if it is allowed.

        The addresses of a name are not known yet; they are judged when they are dialled.
        """
        try:
            target = urls.parse(raw)
        except InvalidURL as error:
            note = f"the guard refuses what is no http or https URL: {error.problem}"
            return self._report(Refusal(Kind.MALFORMED, str(error), note))
        return self.refuses_target(target)

    def refuses_target(self, target: urls.Target) -> Refusal | None:
        """Judge a parsed URL, such as the target of a redirect. Return None if it is allowed.

        A Target's `url` lacks its userinfo, so it must not be judged by `refuses_url`.
        """
        if target.userinfo:
            detail = f"{target.origin}: credentials in the URL"
            return self._report(Refusal(Kind.USERINFO, detail, USERINFO_NOTE))
        refusal: Refusal | None = self._verdicts.get(target.origin, _NOT_JUDGED)
        if refusal is _NOT_JUDGED:
            self._verdicts.make_room(MAX_CACHED_ORIGINS)
            refusal = self._verdicts[target.origin] = self._judge_origin(target)
        return self._report(refusal)

    def passed(self, origin: str) -> bool:
        """Return True if it is known that every URL of an origin without userinfo may be
        requested."""
        return self._verdicts.get(origin, _NOT_JUDGED) is None

    def refuses_address(self, ip: str | IPv4Address | IPv6Address, port: int) -> Refusal | None:
        """Judge an address and port about to be dialled. Return None if it is allowed.

        A text that is not a canonical address is refused; no error is raised.
        """
        return self._report(self._judge_port(port, str(ip)) or self._judge_address(ip, port))

    def listens_on(self, address: str | IPv4Address | IPv6Address, port: int) -> None:
        """Refuse to dial this address and port, as it is a listener of this process (T3).

        `address` is numeric, as in a socket's name; "" and the unspecified addresses mean every
        address of this machine. Raises ConfigError for anything else.
        """
        try:
            own = ip_address(str(address).partition("%")[0] or "::")
        except ValueError:
            raise ConfigError(f"{address!r} is not a numeric address to listen on") from None
        self._listeners.add((_unmapped(own), port))
        self._verdicts.clear()

    def count(self, refused: Mapping[str, int]) -> None:
        """Add refusals by kind that a guard in another process made for this one."""
        self._refused.update(refused)

    def stats(self) -> GuardStats:
        """Return the counters of refusals and dials since the guard was created."""
        return GuardStats(self.mode, dict(self._refused), self._dialled)

    # -- the URL stage

    def _judge_origin(self, target: urls.Target) -> Refusal | None:
        if refusal := self._judge_port(target.port, target.host):
            return refusal
        if _parse_address(target.host) is not None:
            return self._judge_address(target.host, target.port)
        return self._judge_name(target.host)

    def _judge_port(self, port: int, host: str) -> Refusal | None:
        exists = 0 < port < 65_536
        if exists and (port not in BAD_PORTS if self._ports is None else port in self._ports):
            return None
        note = PORT_NOTE if exists else NO_PORT_NOTE
        return Refusal(Kind.PORT, f"{host}: port {port}", note.format(port))

    def _judge_name(self, host: str) -> Refusal | None:
        name = _normalized(host)
        labels = name.split(".")
        long = len(name) > _MAX_LABEL and max(map(len, labels)) > _MAX_LABEL
        if len(name) > _MAX_NAME or "" in labels or long:
            detail = f"{name[:_MAX_NAME]}: not a valid name"
            return Refusal(Kind.MALFORMED, detail, NO_NAME_NOTE)
        inner = is_inner_name(name)
        if _is_listed(name, self._denied_names):
            # The same note as without the list: its contents are private.
            note = NAME_NOTE if inner else BLOCKED_NOTE
            return Refusal(Kind.OPERATOR, f"{name}: on the deny list", note)
        if inner and not _is_listed(name, self._allowed_names):
            return Refusal(Kind.NAME, f"{name}: a name of the inner network", NAME_NOTE)
        return None

    # -- the address stage

    def _judge_address(self, ip: str | _Address, port: int, name: str = "") -> Refusal | None:
        """Judge an address; `name`: the name that resolved to it, if any."""
        parsed = _parse_address(ip) if isinstance(ip, str) else ip
        kind = Kind.MALFORMED if parsed is None else self._refused_kind(parsed, port, name)
        if kind is None:
            return None
        shown = f"{name} -> {ip} port {port}" if name else f"{ip} port {port}"
        if kind is Kind.MALFORMED:
            shown = f"{shown!r:.200}"
        why = _KIND_TEXTS.get(kind, f"{kind} address")
        if kind in NEEDS_RANGE and _is_listed(_normalized(name), self._allowed_names):
            why = f"{kind} address, which a name does not open: list a CIDR range"
        return Refusal(kind, f"{shown}: {why}", BLOCKED_NOTE if name else ADDRESS_NOTE)

    def _refused_kind(self, ip: _Address, port: int, name: str) -> Kind | None:
        """Return why an address is refused, or None if it is allowed."""
        judged = _unmapped(ip, nat64=self._unwrap_nat64)
        if self._listeners and self._is_own_listener(_unmapped(ip, nat64=True), port):
            return Kind.SELF
        if any(ip in network or judged in network for network in self._denied):
            return Kind.OPERATOR
        # The allow list applies to the address that is actually reached: an entry of `::/0`
        # does not open ::ffff:127.0.0.1.
        if any(judged in network for network in self._allowed):
            return None
        if _is_listed(_normalized(name), self._allowed_names):
            return _kind_not_opened_by_name(_unmapped(ip, nat64=True), _normalized(name))
        if isinstance(judged, IPv6Address) and judged in NAT64:
            return Kind.NAT64
        return address_kind(judged)

    def _is_own_listener(self, ip: _Address, port: int) -> bool:
        for own, own_port in self._listeners:
            if port != own_port:
                continue
            if ip == own or ip.is_unspecified:  # dialling 0.0.0.0 reaches this machine
                return True
            # A wildcard listener answers at every address of this machine; `::` at its IPv4
            # addresses as well.
            if own.is_unspecified and (own.version == 6 or ip.version == 4) and self._is_local(ip):
                return True
        return False

    # -- for the connector

    def refuses_name(self, name: str) -> Refusal | None:
        """Judge a name about to be resolved. Return None if it is allowed."""
        return self._report(self._judge_name(name))

    def refuses_answer(self, ip: str, port: int, name: str) -> Refusal | None:
        """Judge an address of a name. The port was judged with the URL."""
        return self._report(self._judge_address(ip, port, name if name != ip else ""))

    def dialled(self) -> None:
        """Count a connection that was allowed."""
        self._dialled += 1

    def _report(self, refusal: Refusal | None) -> Refusal | None:
        """Count a refusal, log it unless it was logged recently, and return it."""
        if refusal is None:
            return None
        self._refused[refusal.kind] += 1
        if refusal not in self._logged:
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged.add(refusal)
            _log.warning("refused (%s): %s%s", refusal.kind, refusal.detail, remedy(refusal.kind))
        return refusal


# -- helpers


@functools.lru_cache(_MAX_ADDRESSES)
def _parse_address(text: str) -> _Address | None:
    """Return a canonical address, or None. The zone of a link-local address is removed."""
    plain, percent, _ = text.partition("%")
    if ":" not in plain and not plain[-1:].isdecimal():
        return None  # a name: an address has a colon or ends with a digit
    try:
        ip = ip_address(plain)
    except ValueError:
        return None
    return None if percent and not ip.is_link_local else ip


def _unmapped(ip: _Address, *, nat64: bool = False) -> _Address:
    """Return the IPv4 address inside a mapped (or, with `nat64`, a NAT64) address, else `ip`."""
    if isinstance(ip, IPv6Address) and (ip.ipv4_mapped or (nat64 and ip in NAT64)):
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip


def _kind_not_opened_by_name(ip: _Address, name: str) -> Kind | None:
    """Return why a name on the allow list does not open an address, or None if it does.

    The owner of the name's zone chooses its addresses. At link-local ones clouds serve
    credentials, and services of this machine trust local clients; addresses with an embedded
    IPv4 address may lead to either (T1).
    """
    kind = address_kind(ip)
    if kind is Kind.LOOPBACK and name == "localhost":
        return None
    return kind if kind in NEEDS_RANGE else None


def _normalized(host: str) -> str:
    return host.lower().removesuffix(".")


def _is_listed(name: str, names: frozenset[str]) -> bool:
    """Return True if a name is listed, or is a subdomain of a listed `*.parent`."""
    if not names:
        return False
    parents = (f"*{name[at:]}" for at, one in enumerate(name) if one == ".")
    return name in names or any(parent in names for parent in parents)


def _read_list(
    entries: tuple[str, ...], setting: str
) -> tuple[tuple[_Network, ...], frozenset[str]]:
    """Split a list into CIDR ranges (with single addresses) and names. Raises ConfigError."""
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
        if not host or "/" in bare or _parse_address(host) is not None:
            raise ConfigError(f"{setting}: {problem}; write a CIDR range or a host name")
        names.add(star + host)
    return tuple(networks), frozenset(names)


def _is_local(ip: _Address) -> bool:
    """Return True for an address of this machine: only such an address can be bound."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True
