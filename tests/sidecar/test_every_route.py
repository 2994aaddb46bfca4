"""Checks of every route: methods, unknown parameters and fields, hosts, unusual framing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.routing import ANY
from tests.sidecar.conftest import sent

QUESTIONS = {
    "/v1/check": "url=http://a.test/page",
    "/v1/explain": "url=http://a.test/page",
    "/v1/fetch": "url=http://a.test/page",
    "/v1/robots": "origin=http://a.test",
    "/v1/history": "origin=http://a.test",
    "/v1/sitemaps": "origin=http://a.test",
}
ASKED = [route for route in ROUTES if route.method != ANY]
UNDER_V1 = [route for route in ASKED if route.path.startswith("/v1/")]
READ = [route for route in ASKED if route.method == "GET" and not route.path.endswith("/events")]
VARYING = {
    *("date", "x-request-id", "content-length", "last-modified", "x-gatekeeper-decision-id"),
    "transfer-encoding",  # of a body that a HEAD does not get (RFC 9110 section 9.3.2)
}
JSON = {"Content-Type": "application/json"}


def path_of(route: Any) -> str:
    found = route.path.replace("{host}", "a.test").replace("{id}", "A" * 20)
    return re.sub(r"\{[^}]*\}", "x", found)


def name_of(route: Any) -> str:
    return f"{route.method} {route.path}"


def target_of(route: Any) -> str:
    query = QUESTIONS.get(route.path) if route.method == "GET" else None
    return path_of(route) + (f"?{query}" if query else "")


@pytest.fixture
def site(internet: Any) -> Any:
    return internet.site("a.test").robots("User-agent: *\nDisallow: /no\n").page("/page", "text")


@pytest.mark.parametrize("route", READ, ids=name_of)
async def test_head_has_the_head_of_get(serve: Any, site: Any, route: Any) -> None:
    service, heads = await serve(), []
    for method in ("GET", "HEAD"):
        async with service.session.request(
            method, service.base + target_of(route), allow_redirects=False
        ) as response:
            names = {
                key: value for key, value in response.headers.items() if key.lower() not in VARYING
            }
            heads.append((response.status, names))
            body = await response.read()
    assert heads[0] == heads[1]
    assert body == b""


@pytest.mark.parametrize("path", ["/v1/events", "/ui/events"])
async def test_a_head_request_for_a_stream_ends(serve: Any, path: str) -> None:
    service, heads = await serve(), []
    for method in ("HEAD", "GET"):
        async with service.session.request(method, service.base + path) as response:
            heads.append((response.status, response.content_type))
            if method == "HEAD":
                assert await response.read() == b""
    assert heads[0] == heads[1] == (200, "text/event-stream")


@pytest.mark.parametrize("path", sorted({route.path for route in ASKED}))
async def test_a_method_that_a_path_does_not_take_is_405_and_names_the_others(
    serve: Any, path: str
) -> None:
    service = await serve()
    takes = {route.method for route in ASKED if route.path == path}
    takes |= {"HEAD"} if "GET" in takes else set()
    where = service.base + path_of(next(route for route in ASKED if route.path == path))
    for method in {"OPTIONS", "PUT", "PATCH", "HEAD", "GET", "POST", "DELETE"} - takes:
        async with service.session.request(method, where) as response:
            assert response.status == 405, method
            assert response.headers["Allow"] == ", ".join(sorted(takes))
            assert response.content_type == "application/problem+json"


@pytest.mark.parametrize("route", UNDER_V1, ids=name_of)
async def test_an_unknown_parameter_is_refused(serve: Any, site: Any, route: Any) -> None:
    service = await serve()
    where = target_of(route)
    where += ("&" if "?" in where else "?") + "nonsense=1"
    async with service.session.request(
        route.method, service.base + where, data="{}", headers=JSON
    ) as response:
        said = await response.json(content_type=None)
    assert (response.status, response.content_type) == (400, "application/problem+json")
    assert "unknown field `nonsense`" in said["detail"]


@pytest.mark.parametrize("route", [one for one in ASKED if one.body is not None], ids=name_of)
async def test_an_unknown_field_is_refused(serve: Any, site: Any, route: Any) -> None:
    service = await serve()
    status, said = await service.post(path_of(route), {"nonsense": 1})
    assert status == 400
    assert "unknown field `nonsense`" in said["detail"]
    assert {"type", "title", "status", "detail"} <= said.keys()


async def test_an_unknown_parameter_is_refused_on_the_inline_path(serve: Any, site: Any) -> None:
    service, body = await serve(), {"urls": ["http://a.test/page"]}
    for query, expected in (("", 200), ("", 200), ("?x=1", 400), ("?", 200)):
        assert (await service.post(f"/v1/check{query}", body))[0] == expected
    for query, expected in (("", 201), ("?x=1", 400)):
        found = await service.post(f"/v1/leases{query}", {"url": "http://a.test/page"})
        assert found[0] == expected


# --- framing ---------------------------------------------------------------------------------


HEAD = "POST {} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    ],
)
@pytest.mark.parametrize("path", ["/v1/check", "/v1/leases", "/healthz", "/nowhere"])
async def test_a_body_with_two_lengths_is_refused(serve: Any, path: str, framing: str) -> None:
    service = await serve()
    answer = await sent(
        service.base, f"{HEAD.format(path)}{framing}\r\n0\r\n\r\n".encode() + SMUGGLED
    )
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert answer.count(b"HTTP/1.") == 1, "nothing behind it is read as a request"
    said = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert {"type", "title", "status", "detail"} <= said.keys()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_long_is_413_and_what_follows_it_is_answered(
    serve: Any, chunked: bool
) -> None:
    service = await serve(max_body=2_000)
    body = SMUGGLED * 1_000
    if chunked:
        framing = f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode()
        framed = framing + body + b"\r\n0\r\n\r\n"
    else:
        framed = f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    last = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = await sent(service.base, HEAD.format("/v1/check").encode() + framed + last)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert statuses == [b"413", b"200"]
    said = json.loads(answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0])
    assert said["detail"] == "the body may have 2000 bytes at most"


@pytest.mark.parametrize("host", ["a", "evil.example", "", "[::1", "b:99999", "x@y"])
async def test_probes_answer_for_any_host_header(serve: Any, host: str) -> None:
    service = await serve()
    for path in ("/healthz", "/readyz"):
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        assert (await sent(service.base, request.encode())).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "path", ["/v1/hosts", "/v1/check?url=http://a.test/no", "/ui/", "/ui/sign-in"]
)
@pytest.mark.parametrize(
    ("target", "host", "accepted"),
    [
        ("", "127.0.0.1", True),
        ("", "evil.example", False),
        ("http://127.0.0.1", "127.0.0.1", True),
        ("http://127.0.0.1", "evil.example", True),
        ("HTTP://127.0.0.1:80", "evil.example", True),
        ("http://127.0.0.1", "", True),
        ("http://evil.example", "127.0.0.1", False),
        ("http://127.0.0.1.evil.example:80", "127.0.0.1", False),
        ("http://x@127.0.0.1", "127.0.0.1", False),
        ("https://evil.example", "127.0.0.1", False),
    ],
)
async def test_t4_the_host_in_an_absolute_target_counts_and_not_the_host_header(
    serve: Any, site: Any, path: str, target: str, host: str, accepted: bool
) -> None:
    """RFC 9112 section 3.2.2: a server ignores Host where the target is a whole URL."""
    service = await serve()
    for _ in range(2):  # the second one may be answered inline
        request = f"GET {target}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        answer = await sent(service.base, request.encode())
        if accepted:
            assert answer.startswith(b"HTTP/1.1 200 ")
        else:
            assert answer.split(b" ", 2)[1] in (b"400", b"403")


async def test_t7_forward_auth_judges_the_host_of_a_whole_url(serve: Any, site: Any) -> None:
    service = await serve(forward_auth=True, forward_auth_hosts=("gate.test",))
    statuses = []
    for target, host in (("http://gate.test", "evil.test"), ("http://evil.test", "gate.test")):
        request = f"GET {target}/v1/forward-auth HTTP/1.1\r\nHost: {host}\r\n"
        request += "X-Original-URL: http://a.test/page\r\nConnection: close\r\n\r\n"
        statuses.append(b"does not list this Host" in await sent(service.base, request.encode()))
    assert statuses == [False, True]


@pytest.mark.parametrize("port", ["65536", "99999"])
async def test_a_url_with_an_impossible_port_is_invalid(
    serve: Any, internet: Any, port: str
) -> None:
    url = f"http://a.test:{port}/page"
    service = await serve()
    status, said = await service.post("/v1/check", {"urls": [url]})
    assert [(one["reason"], one["verdict"]) for one in said["decisions"]] == [
        ("invalid_url", "deny")
    ]
    assert f"there is no port {port}; 65535 is the last" in said["decisions"][0]["note"]
    assert (await service.post("/v1/leases", {"url": url}))[0] == 400
    for path in ("/v1/check?url=", "/v1/fetch?url=", "/v1/explain?url=", "/v1/robots?origin="):
        status, said = await service.get(path + url.removesuffix("/page"))
        assert (status, said["type"]) == (400, "urn:gatekeeper:problem:invalid-url")
