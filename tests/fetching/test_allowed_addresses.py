"""The tables of addresses, names and ports: each boundary, and the values next to it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.config import Config, GuardConfig
from gatekeeper.fetching.allowed_addresses import (
    BAD_PORTS,
    IPV4_TABLE,
    IPV6_TABLE,
    Guard,
    Kind,
    address_kind,
    is_inner_name,
)

EDGES: list[tuple[str, Kind | None]] = [
    ("0.0.0.0", Kind.THIS_NETWORK),
    ("0.255.255.255", Kind.THIS_NETWORK),
    ("1.0.0.0", None),
    ("9.255.255.255", None),
    ("10.0.0.0", Kind.PRIVATE),
    ("10.255.255.255", Kind.PRIVATE),
    ("11.0.0.0", None),
    ("100.63.255.255", None),
    ("100.64.0.0", Kind.SHARED),
    ("100.127.255.255", Kind.SHARED),
    ("100.128.0.0", None),
    ("126.255.255.255", None),
    ("127.0.0.0", Kind.LOOPBACK),
    ("127.255.255.255", Kind.LOOPBACK),
    ("128.0.0.0", None),
    ("168.63.129.15", None),
    ("168.63.129.16", Kind.PLATFORM),
    ("168.63.129.17", None),
    ("169.253.255.255", None),
    ("169.254.0.0", Kind.LINK_LOCAL),
    ("169.254.169.254", Kind.LINK_LOCAL),
    ("169.254.255.255", Kind.LINK_LOCAL),
    ("169.255.0.0", None),
    ("172.15.255.255", None),
    ("172.16.0.0", Kind.PRIVATE),
    ("172.31.255.255", Kind.PRIVATE),
    ("172.32.0.0", None),
    ("191.255.255.255", None),
    ("192.0.0.0", Kind.PROTOCOL),
    ("192.0.0.255", Kind.PROTOCOL),
    ("192.0.1.0", None),
    ("192.0.1.255", None),
    ("192.0.2.0", Kind.DOCUMENTATION),
    ("192.0.2.255", Kind.DOCUMENTATION),
    ("192.0.3.0", None),
    ("192.88.98.255", None),
    ("192.88.99.0", Kind.TRANSITION),
    ("192.88.99.255", Kind.TRANSITION),
    ("192.88.100.0", None),
    ("192.167.255.255", None),
    ("192.168.0.0", Kind.PRIVATE),
    ("192.168.255.255", Kind.PRIVATE),
    ("192.169.0.0", None),
    ("198.17.255.255", None),
    ("198.18.0.0", Kind.BENCHMARKING),
    ("198.19.255.255", Kind.BENCHMARKING),
    ("198.20.0.0", None),
    ("198.51.99.255", None),
    ("198.51.100.0", Kind.DOCUMENTATION),
    ("198.51.100.255", Kind.DOCUMENTATION),
    ("198.51.101.0", None),
    ("203.0.112.255", None),
    ("203.0.113.0", Kind.DOCUMENTATION),
    ("203.0.113.255", Kind.DOCUMENTATION),
    ("203.0.114.0", None),
    ("223.255.255.255", None),
    ("224.0.0.0", Kind.MULTICAST),
    ("239.255.255.255", Kind.MULTICAST),
    ("240.0.0.0", Kind.RESERVED),
    ("255.255.255.255", Kind.RESERVED),
    ("::", Kind.THIS_NETWORK),
    ("::1", Kind.LOOPBACK),
    ("::2", Kind.TRANSITION),
    ("::ffff:ffff", Kind.TRANSITION),
    ("::1:0:0", Kind.RESERVED),
    ("::ffff:0:0:0", Kind.TRANSITION),
    ("::ffff:0:ffff:ffff", Kind.TRANSITION),
    ("::ffff:1:0:0", Kind.RESERVED),
    ("64:ff9b:0:ffff:ffff:ffff:ffff:ffff", Kind.RESERVED),
    ("64:ff9b:1::", Kind.TRANSITION),
    ("64:ff9b:1:ffff:ffff:ffff:ffff:ffff", Kind.TRANSITION),
    ("64:ff9b:2::", Kind.RESERVED),
    ("100::", Kind.PROTOCOL),
    ("100::ffff:ffff:ffff:ffff", Kind.PROTOCOL),
    ("100:0:0:1::", Kind.RESERVED),
    ("1fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.RESERVED),
    ("2000::", None),
    ("2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("2001::", Kind.TRANSITION),
    ("2001:0:ffff:ffff:ffff:ffff:ffff:ffff", Kind.TRANSITION),
    ("2001:1::", Kind.PROTOCOL),
    ("2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.PROTOCOL),
    ("2001:200::", None),
    ("2001:db7:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("2001:db8::", Kind.DOCUMENTATION),
    ("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", Kind.DOCUMENTATION),
    ("2001:db9::", None),
    ("2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("2002::", Kind.TRANSITION),
    ("2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.TRANSITION),
    ("2003::", None),
    ("2606:4700::1111", None),
    ("3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("3fff::", Kind.DOCUMENTATION),
    ("3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.DOCUMENTATION),
    ("3fff:1000::", None),
    ("3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", None),
    ("4000::", Kind.RESERVED),
    ("5f00::1", Kind.RESERVED),
    ("fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.RESERVED),
    ("fc00::", Kind.PRIVATE),
    ("fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.PRIVATE),
    ("fe00::", Kind.RESERVED),
    ("fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.RESERVED),
    ("fe80::", Kind.LINK_LOCAL),
    ("febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.LINK_LOCAL),
    ("fec0::", Kind.PRIVATE),
    ("feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.PRIVATE),
    ("ff00::", Kind.MULTICAST),
    ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", Kind.MULTICAST),
]


@pytest.mark.parametrize(("address", "kind"), EDGES)
def test_each_boundary_of_the_address_table_is_judged_right(
    address: str, kind: Kind | None
) -> None:
    refusal = Guard().refuses_address(address, 80)
    assert (refusal and refusal.kind) == kind


def naive_kind(ip: IPv4Address | IPv6Address) -> Kind | None:
    holding = [
        (net.prefixlen, kind)
        for cidr, kind in (IPV4_TABLE if ip.version == 4 else IPV6_TABLE)
        if ip in (net := ip_network(cidr))
    ]
    if not holding:
        return None if ip.version == 4 else Kind.RESERVED
    return max(holding)[1]


@given(st.ip_addresses())
def test_the_flattened_table_says_what_the_ranges_say(ip: IPv4Address | IPv6Address) -> None:
    assert address_kind(ip) == naive_kind(ip)


@given(st.ip_addresses(v=4))
def test_a_mapped_address_is_judged_as_the_one_it_carries(ip: IPv4Address) -> None:
    guard = Guard()
    plain = guard.refuses_address(ip, 80)
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        carried = guard.refuses_address(IPv6Address(int(IPv6Address(prefix)) + int(ip)), 80)
        assert (plain and plain.kind) == (carried and carried.kind)


@pytest.mark.parametrize("address", ["64:ff9b::808:808", "64:ff9b::a00:1", "64:ff9b::"])
def test_nat64_may_be_denied_whole(address: str) -> None:
    guard = Guard(Config(guard=GuardConfig(nat64="deny")))
    assert guard.refuses_address(address, 80).kind is Kind.NAT64


def test_an_address_beside_the_nat64_range_is_not_unwrapped() -> None:
    assert Guard().refuses_address("64:ff9b::1:808:808", 80).kind is Kind.RESERVED


@pytest.mark.parametrize("ip", ["1.1.1.1", "2606:4700::1111"])
def test_addresses_as_text_and_as_objects_are_judged_alike(ip: str) -> None:
    guard = Guard()
    assert guard.refuses_address(ip, 443) is None
    assert guard.refuses_address(ip_address(ip), 443) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "1.1.1.1 ",
        "1.1.1.01",
        "١.1.1.1",
        "[::1]",
        "2606:4700::1111%eth0",
        "1.1.1.1%1",
    ],
)
def test_text_that_is_no_canonical_address_is_refused(text: str) -> None:
    assert Guard().refuses_address(text, 80).kind is Kind.MALFORMED


def test_a_zone_does_not_hide_a_link_local_address() -> None:
    assert Guard().refuses_address("fe80::1%eth0", 80).kind is Kind.LINK_LOCAL


@pytest.mark.parametrize("port", [-1, 0, 22, 25, 6000, 6669, 10080, 65_536])
def test_ports_of_other_protocols_are_refused(port: int) -> None:
    assert Guard().refuses_address("1.1.1.1", port).kind is Kind.PORT


@pytest.mark.parametrize("port", [80, 443, 8080, 6664, 6670, 65_535])
def test_other_ports_are_open(port: int) -> None:
    assert Guard().refuses_address("1.1.1.1", port) is None


def test_the_operator_may_name_the_only_ports() -> None:
    guard = Guard(Config(guard=GuardConfig(ports=(443, 25))))
    open_ports = [port for port in (0, 25, 80, 443) if not guard.refuses_address("1.1.1.1", port)]
    assert open_ports == [25, 443]
    assert guard.refuses_url("http://example.com/").kind is Kind.PORT
    assert guard.refuses_url("https://example.com/") is None


def test_every_bad_port_is_a_port_number() -> None:
    assert all(0 <= port < 65_536 for port in BAD_PORTS)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("notlocalhost.com", False),
        ("local", True),
        ("printer.local", True),
        ("printer.locals", False),
        ("home.arpa", True),
        ("router.home.arpa", True),
        ("1.0.0.127.in-addr.arpa", False),
        ("xhome.arpa", False),
        ("metadata.google.internal", True),
        ("internal.example", False),
        ("redis", True),
        ("abc.onion", True),
        ("example.com", False),
    ],
)
def test_names_of_inner_networks_are_told_from_public_ones(name: str, inner: bool) -> None:
    assert is_inner_name(name) is inner


_octets = st.one_of(
    st.integers(0, 300).map(str), st.sampled_from(["00", "01", "0x7f", "", "٣", " 1"])
)
_texts = st.one_of(
    st.lists(_octets, min_size=3, max_size=5).map(".".join),
    st.ip_addresses().map(str),
    st.text(st.sampled_from("0123456789.:%abcx\n"), max_size=16),
)


@given(_texts, st.sampled_from(["", "\n", ".", "%eth0", "%0"]))
def test_an_address_is_read_as_ipaddress_reads_it(text: str, tail: str) -> None:
    guard, text = Guard(Config()), text + tail
    plain, percent, _ = text.partition("%")
    try:
        ip = ip_address(plain)
    except ValueError:
        ip = None
    if ip is None or (percent and not ip.is_link_local):
        expected = Kind.MALFORMED
    else:
        refusal = guard.refuses_address(ip, 80)
        expected = None if refusal is None else refusal.kind
    got = guard.refuses_address(text, 80)
    assert (None if got is None else got.kind) is expected
