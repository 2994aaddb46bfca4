"""What the guard refuses by default, as data: addresses, names and ports.

The table is our own, and it denies by default in IPv6. `ipaddress.is_global` and its kin
are never asked: their answers differ between Python 3.11 and 3.13, and all of them count
multicast among the global addresses. Sources: the IANA special-purpose registries (as of
`TABLE_VERSION`), the WHATWG Fetch standard for ports, the RFCs named beside each entry.
"""

from __future__ import annotations

from bisect import bisect_right
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

__all__ = [
    "ADDRESS_NOTE",
    "BAD_PORTS",
    "INNER_NAMES",
    "IPV4_TABLE",
    "IPV6_TABLE",
    "NAME_NOTE",
    "NAT64",
    "NEEDS_RANGE",
    "PORT_NOTE",
    "TABLE_VERSION",
    "USERINFO_NOTE",
    "Kind",
    "address_kind",
    "inner_name",
    "ipv4_within",
    "remedy",
]

TABLE_VERSION = "2026-11-20"
"""The day on which the tables were last compared with the registries."""


class Kind(StrEnum):
    """Why the guard refuses: for the log and the counters, never for a client (T2)."""

    MALFORMED = "malformed"
    """No http or https URL, or no address at all."""
    USERINFO = "userinfo"
    """RFC 9110 section 4.2.4: credentials in a URL from an untrusted source."""
    PORT = "port"
    NAME = "name"
    """A name of the inner network, or one that no public name service knows."""
    THIS_NETWORK = "this_network"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    SHARED = "shared"
    """Carrier-grade NAT; a cloud's metadata service lives there too."""
    LINK_LOCAL = "link_local"
    """169.254.169.254 among them, where most clouds keep credentials."""
    PLATFORM = "platform"
    """A public-looking address that the hosting platform answers."""
    PROTOCOL = "protocol"
    DOCUMENTATION = "documentation"
    BENCHMARKING = "benchmarking"
    TRANSITION = "transition"
    """IPv6 that tunnels or translates to an IPv4 address we can't judge reliably."""
    NAT64 = "nat64"
    """64:ff9b::/96 under guard.nat64 = "deny"."""
    MULTICAST = "multicast"
    RESERVED = "reserved"
    """Not allocated to anybody who could run a public site."""
    OPERATOR = "operator"
    """On the operator's deny list."""
    SELF = "self"
    """One of our own listeners (T3)."""


IPV4_TABLE: tuple[tuple[str, Kind], ...] = (
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
"""Everything that is not here is public."""

IPV6_TABLE: tuple[tuple[str, Kind | None], ...] = (
    ("::/96", Kind.TRANSITION),  # RFC 4291: IPv4-compatible, deprecated
    ("::/128", Kind.THIS_NETWORK),
    ("::1/128", Kind.LOOPBACK),
    ("::ffff:0:0:0/96", Kind.TRANSITION),  # RFC 2765: IPv4-translated
    ("64:ff9b:1::/48", Kind.TRANSITION),  # RFC 8215: local-use NAT64
    ("100::/64", Kind.PROTOCOL),  # RFC 6666: discard-only
    ("2000::/3", None),  # RFC 4291: the one block of global unicast, less the following
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
"""None is public. Everything that is not here is RESERVED; of two that hold an address, the
narrower decides."""

MAPPED = IPv6Network("::ffff:0:0/96")  # RFC 4291: IPv4-mapped, the IPv4 address itself
NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: what DNS64 makes of a public IPv4 address

INNER_NAMES: tuple[str, ...] = (
    "alt",  # RFC 9476
    "home.arpa",  # RFC 8375
    "internal",  # ICANN, 2024; every cloud's metadata host
    "invalid",  # RFC 6761
    "local",  # RFC 6762; clusters name their services so
    "localdomain",  # what distributions write to /etc/hosts
    "localhost",  # RFC 6761
    "onion",  # RFC 7686
)
"""These names and all below them are refused, and so is every name of a single label: a
search domain would complete it with a name of the inner network."""

# fmt: off
BAD_PORTS: frozenset[int] = frozenset({
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95,
    101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179,
    389, 427, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601,
    636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566,
    6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
})
"""WHATWG Fetch, "bad port", and 0: other protocols that an HTTP request could be taken for."""
# fmt: on


def _flattened(
    table: tuple[tuple[str, Kind | None], ...],
    network: type[IPv4Network] | type[IPv6Network],
    default: Kind | None,
) -> tuple[list[int], list[Kind | None]]:
    """The table as a sorted list of where each stretch of one kind begins."""
    ranges = [(network(cidr), kind) for cidr, kind in table]
    edges = {0}
    for net, _ in ranges:
        edges |= {int(net.network_address), int(net.broadcast_address) + 1}
    narrowest_first = sorted(ranges, key=lambda entry: -entry[0].prefixlen)
    starts = sorted(edges)
    kinds: list[Kind | None] = []
    for start in starts:
        inside = (
            kind
            for net, kind in narrowest_first
            if int(net.network_address) <= start <= int(net.broadcast_address)
        )
        kinds.append(next(inside, default))
    return starts, kinds


_IPV4 = _flattened(IPV4_TABLE, IPv4Network, None)
_IPV6 = _flattened(IPV6_TABLE, IPv6Network, Kind.RESERVED)


def address_kind(ip: IPv4Address | IPv6Address) -> Kind | None:
    """Why an address is refused by the table; None for a public one.

    >>> address_kind(IPv4Address("169.254.169.254"))
    <Kind.LINK_LOCAL: 'link_local'>
    >>> address_kind(IPv6Address("2606:4700::1111")) is None
    True
    """
    starts, kinds = _IPV4 if isinstance(ip, IPv4Address) else _IPV6
    return kinds[bisect_right(starts, int(ip)) - 1]


def ipv4_within(ip: IPv6Address, *, nat64: bool) -> IPv4Address | None:
    """The IPv4 address that a mapped (and, if asked, a NAT64) address leads to.

    >>> ipv4_within(IPv6Address("64:ff9b::7f00:1"), nat64=True)
    IPv4Address('127.0.0.1')
    """
    if ip in MAPPED or (nat64 and ip in NAT64):
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return None


def inner_name(host: str) -> bool:
    """Whether a mapped name, without its root dot, belongs to the inner network.

    >>> inner_name("metadata.google.internal"), inner_name("internal.example.com")
    (True, False)
    """
    return "." not in host or host.endswith(_INNER_ENDS) or host in INNER_NAMES


_INNER_ENDS = tuple(f".{name}" for name in INNER_NAMES)


NEEDS_RANGE = frozenset({Kind.LINK_LOCAL, Kind.LOOPBACK, Kind.THIS_NETWORK, Kind.TRANSITION})
"""What a name in guard.allow does not open, whatever it resolves to; a CIDR range does."""

_UNHELPED = frozenset({Kind.MALFORMED, Kind.USERINFO, Kind.OPERATOR, Kind.SELF})


USERINFO_NOTE = (
    "the guard refuses credentials in a URL (user:password@host): take them out; where the site "
    "needs them, send them in a header"
)
PORT_NOTE = (
    "the guard refuses port {}: no web pages are served there, or guard.ports leaves it out; "
    "guard.ports lists the ports that may be asked"
)
ADDRESS_NOTE = (
    "the guard refuses addresses that are not public, or that guard.deny lists; guard.allow "
    "(--allow-address) lets your own network in: list the address or its range"
)
NAME_NOTE = (
    "the guard refuses names of an inner network (localhost, .internal, a single label ...); "
    "guard.allow (--allow-address) lets yours in: list the name itself, a range does not cover it"
)
"""What a decision's `note` says where the text of the URL shows why: the same words for every
URL of that form, whether anything is there or not (T2)."""


def remedy(kind: Kind) -> str:
    """What lets it in all the same, for the end of a log line; empty where nothing does.

    >>> remedy(Kind.LOOPBACK)
    '; if it is your own network, let it in with guard.allow (--allow-address)'
    """
    if kind in _UNHELPED:
        return ""
    if kind is Kind.PORT:
        return "; guard.ports can list it"
    if kind is Kind.NAME:
        return "; if it is your own, let the name itself in with guard.allow (--allow-address)"
    return "; if it is your own network, let it in with guard.allow (--allow-address)"
