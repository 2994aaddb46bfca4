"""The token file: names, roles, permissions of the file (T6, T15)."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gatekeeper.config import ServerConfig
from gatekeeper.errors import ConfigError
from gatekeeper.sidecar.logs import DecisionLog
from gatekeeper.sidecar.routes.table import ROUTES
from gatekeeper.sidecar.routing import ANY, ANY_ROLE, Role
from gatekeeper.sidecar.security import Token, Tokens, read_tokens
from tests.internet import FakeInternet
from tests.sidecar.decision_log_support import write_log

ONE, TWO, THREE = "a" * 32, "b" * 40, "c" * 32
BY_ROLE = {role: f"{role.value:-<33}" for role in Role}
BARE = "t" * 33
INCLUDED = {
    Role.CHECK: {Role.CHECK},
    Role.CRAWL: {Role.CHECK, Role.CRAWL},
    Role.ADMIN: {Role.CHECK, Role.ADMIN},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """`write(*lines, mode=0o600)` writes a token file and returns its path."""

    def make(*lines: str, mode: int = 0o600) -> str:
        path = tmp_path / "tokens"
        path.write_text("\n".join(lines), encoding="utf-8")
        path.chmod(mode)
        return str(path)

    return make


def test_a_line_may_name_the_client_and_its_role(write: Callable[..., str]) -> None:
    tokens = read_tokens(
        write(
            "# who may do what",
            f"news:check:{ONE}",
            f"shop.crawler-2:check , crawl:{TWO}",
            f"ops:admin:{THREE}",
            BARE,
        )
    )
    assert tokens.tokens == (
        Token(ONE.encode(), "news", frozenset(INCLUDED[Role.CHECK])),
        Token(TWO.encode(), "shop.crawler-2", frozenset(INCLUDED[Role.CRAWL])),
        Token(THREE.encode(), "ops", frozenset(INCLUDED[Role.ADMIN])),
        Token(BARE.encode(), "token-4", ANY_ROLE),
    )


def test_a_client_may_have_two_tokens_while_it_changes_them(write: Callable[..., str]) -> None:
    tokens = read_tokens(write(*(f"c{n}:check:{n:032}" for n in range(5)), f"c0:crawl:{ONE}"))
    assert [tokens.match(f"Bearer {value}").name for value in (f"{0:032}", ONE)] == ["c0", "c0"]
    with pytest.raises(ConfigError, match="3 tokens of 'c0'; each client has one or two"):
        read_tokens(write(*(f"c0:check:{n:032}" for n in range(3))))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"news:{ONE}", "name:role:token"),
        (f"news:reader:{ONE}", "name:role:token"),
        (f"news:check,:{ONE}", "name:role:token"),
        (f"news::{ONE}", "name:role:token"),
        (f"news:check:{ONE}:{TWO}", "name:role:token"),
        ("news:check:", "name:role:token"),
        (f":check:{ONE}", "name begins with a letter"),
        (f"2:check:{ONE}", "name begins with a letter"),
        (f"a b:check:{ONE}", "name begins with a letter"),
        (f"{'n' * 65}:check:{ONE}", "name begins with a letter"),
        (f"token-1:check:{ONE}", "none of `token-N`"),
        (f"local:check:{ONE}", "none of `token-N`"),
        ("news:check:short", "32 characters"),
        (f"news:check:{ONE}\nshop:crawl:{ONE}", "twice"),
    ],
)
def test_a_line_that_cannot_be_read_is_told_without_the_token(
    write: Callable[..., str], line: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        read_tokens(write(line))
    assert ONE not in str(caught.value)
    assert TWO not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("short", "the token is shorter than 32 characters; make one with `openssl"),
        ("shop:crawl:short", "the token is shorter than 32 characters; make one with `openssl"),
        (f"shop:crawl:{ONE}", "a token that occurs twice, first in 2"),
        (f"news:check:{THREE}", "3 tokens of 'news'; each client has one or two"),
        ("shop:crawler:x", "write `token`, or `name:role:token`"),
        (f"local:crawl:{THREE}", "a client's name begins with a letter"),
    ],
)
def test_every_error_about_a_token_names_its_line(
    write: Callable[..., str], wrong: str, problem: str
) -> None:
    path = write("# tokens", f"news:check:{ONE}", "", f"news:check:{TWO}", wrong, BARE)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: line 5: {problem}")):
        read_tokens(path)


def test_a_token_too_many_is_named_by_its_line(write: Callable[..., str]) -> None:
    lines = [f"c{n}:check:{n:032}" for n in range(1001)]
    with pytest.raises(ConfigError, match="line 1001: more than 1000 tokens"):
        read_tokens(write(*lines))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o660])
def test_a_file_that_others_may_write_to_is_refused(write: Callable[..., str], mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"others may write to it \(mode {mode:04o}\)"):
        read_tokens(write(ONE, mode=mode))


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, 0), (0o400, 0), (0o700, 0), (0o640, 1), (0o604, 1), (0o444, 1)]
)
def test_a_token_file_that_others_may_read_is_warned_of(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture, mode: int, warned: int
) -> None:
    with caplog.at_level(logging.WARNING):
        read_tokens(write(ONE, mode=mode), warn=True)
    assert [("others may read it" in one.getMessage()) for one in caplog.records] == [True] * warned
    assert ONE not in caplog.text


def test_a_link_to_a_secret_is_judged_by_the_secret(write: Callable[..., str]) -> None:
    path = Path(write(ONE, mode=0o666))
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="others may write"):
        read_tokens(str(link))


async def test_a_reload_warns_of_a_token_file_that_others_may_read(
    serve: Any, write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sidecar.test_reload import reread

    service = (await serve(token_file=write(ONE, mode=0o644))).service
    with caplog.at_level(logging.WARNING):
        await reread(service)
    assert caplog.text.count("others may read it") == 1


# -- what each role may do

SHOWN = [route for route in ROUTES if not route.probe]


def test_every_route_except_probes_needs_a_role() -> None:
    assert all(route.needs for route in SHOWN)
    assert {(route.method, route.path) for route in SHOWN if Role.CHECK not in route.needs} == {
        ("POST", "/v1/leases"),
        ("POST", "/v1/leases/{id}/renew"),
        ("POST", "/v1/leases/{id}/report"),
        ("DELETE", "/v1/leases/{id}"),
        ("GET", "/v1/fetch"),
        ("GET", "/v1/sitemaps"),
        ("GET", "/v1/hosts"),
        ("GET", "/v1/hosts/{host}"),
        ("GET", "/v1/overview"),
        ("GET", "/v1/leases"),
        ("POST", "/v1/leases/{id}/drop"),
        ("GET", "/v1/decisions/{id}"),
        ("GET", "/v1/events"),
        ("GET", "/v1/series"),
        ("GET", "/v1/config"),
        *(("POST", f"/v1/hosts/{{host}}/{what}") for what in ("pause", "resume")),
        *(("POST", f"/v1/hosts/{{host}}/{what}") for what in ("refresh", "block", "override")),
        ("POST", "/v1/admin/reload"),
    }


def with_tokens(sidecar: Any) -> Any:
    """Give the service a token for each role, and one without a name."""
    service = sidecar.service
    named = [Token(v.encode(), r.value, frozenset(INCLUDED[r])) for r, v in BY_ROLE.items()]
    tokens = Tokens([*named, BARE.encode()])
    service.apply_config(service.config, tokens)
    return sidecar


@pytest.mark.parametrize("who", [*Role, None])
async def test_a_token_opens_the_routes_of_its_role_and_no_other(
    serve: Any, internet: FakeInternet, who: Role | None
) -> None:
    internet.site("a.test").robots("").page("/", "x")
    sidecar = with_tokens(await serve())
    roles = ANY_ROLE if who is None else INCLUDED[who]
    bearer = {"Authorization": f"Bearer {BARE if who is None else BY_ROLE[who]}"}
    for route in SHOWN:
        path = route.path.replace("{host}", "a.test").replace("{id}", "nobody")
        query = "" if route.query is None else "?url=http://a.test/"
        if "origin" in getattr(route.query, "__struct_fields__", ()):
            query = "?origin=http://a.test"
        async with sidecar.session.request(
            "GET" if route.method == ANY else route.method,
            sidecar.base + path + query,
            headers=bearer,
            json={} if route.method == "POST" else None,
        ) as response:
            document = await response.read()
            refused = response.status == 403 and b":problem:role" in document
            assert refused is roles.isdisjoint(route.needs), (route.path, document)
            if refused:
                assert 'error="insufficient_scope"' in response.headers["WWW-Authenticate"]
                assert json.loads(document)["detail"].startswith(f"the token of {who} is for ")


async def test_a_check_token_takes_no_lease_on_the_inline_path(
    serve: Any, internet: FakeInternet
) -> None:
    internet.site("a.test").robots("")
    sidecar, body = with_tokens(await serve()), {"url": "http://a.test/", "wait": 5}
    for role, status in ((Role.CRAWL, 201), (Role.CRAWL, 201), (Role.CHECK, 403), (None, 201)):
        token = BARE if role is None else BY_ROLE[role]
        bearer = {"Authorization": f"Bearer {token}"}
        told, lease = await sidecar.post("/v1/leases", body, headers=bearer)
        assert told == status
        if status == 201:
            await sidecar.post(f"/v1/leases/{lease['id']}/report", {}, headers=bearer)


async def test_the_contract_says_which_role_each_operation_needs(serve: Any) -> None:
    sidecar = with_tokens(await serve())
    bearer = {"Authorization": f"Bearer {BARE}"}
    _, contract = await sidecar.get("/openapi.json", headers=bearer)
    for route in SHOWN:
        told = contract["paths"][route.path][route.method.lower()]["security"]
        assert told == [{"token": [role]} for role in sorted(route.needs)]
    scheme = contract["components"]["securitySchemes"]["token"]
    assert all(f"`{role}`" in scheme["description"] for role in Role)


async def test_the_contract_names_no_token_where_none_is_asked_for(serve: Any) -> None:
    _, contract = await (await serve()).get("/openapi.json")
    assert "securitySchemes" not in contract["components"]
    operations = [one for path in contract["paths"].values() for one in path.values()]
    assert not [one["operationId"] for one in operations if "security" in one]


@pytest.mark.parametrize("form", ["json", "text"])
async def test_the_decision_log_names_the_client(
    serve: Any, internet: FakeInternet, form: str
) -> None:
    internet.site("a.test").robots("")
    sidecar = with_tokens(await serve())
    stream = io.StringIO()
    server = ServerConfig(log_decisions="all", log_format=form)  # type: ignore[arg-type]
    log = sidecar.service.log = DecisionLog(server, sidecar.service.clock, stream=stream)
    for _ in range(2):  # cold, then inline
        bearer = {"Authorization": f"Bearer {BY_ROLE[Role.CRAWL]}"}
        await sidecar.get("/v1/check", params={"url": "http://a.test/"}, headers=bearer)
    body = {"urls": ["http://a.test/", "http://a.test/2"]}
    await sidecar.post("/v1/check", body, headers={"Authorization": f"Bearer {BARE}"})
    write_log(log)
    lines = stream.getvalue().splitlines()

    names = (
        [json.loads(line)["client"] for line in lines]
        if form == "json"
        else [line.rpartition(" client=")[2] for line in lines]
    )
    assert names == ["crawl", "crawl", "token-4", "token-4"]
