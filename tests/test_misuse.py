"""Mistakes of a caller that no type checker looked at: each is told in one line."""

from __future__ import annotations

from typing import Any

import pytest
from yarl import URL

from gatekeeper import Gatekeeper, RemoteGatekeeper


@pytest.mark.parametrize("raw", [None, b"http://a.test/", URL("http://a.test/"), 3])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_what_is_no_text_is_a_mistake_told_by_its_type(raw: Any, far: bool) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        for question in (gate.allowed(raw), gate.check(raw), gate.acquire(raw)):
            with pytest.raises(TypeError, match=f"url must be str, not {type(raw).__name__}"):
                await question
        with pytest.raises(TypeError, match="url must be str"):
            gate.peek(raw)


@pytest.mark.parametrize("name", [None, b"examplebot"])
def test_a_name_that_is_no_text_is_a_mistake_told_by_its_type(name: Any) -> None:
    with pytest.raises(TypeError, match=f"user_agent must be str, not {type(name).__name__}"):
        Gatekeeper(name)


@pytest.mark.parametrize("name", ["report", "renew", "give_back", "end", "decision", "expires_at"])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_a_lease_that_was_not_entered_says_so(name: str, far: bool) -> None:
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        with pytest.raises(AttributeError, match=r"enter it first: async with gate\.lease"):
            getattr(gate.lease("http://a.test/"), name)


@pytest.mark.parametrize("raw", ["http://a.test/", b"http://b.test/"])
@pytest.mark.parametrize("far", [False, True], ids=["embedded", "remote"])
async def test_one_url_where_a_list_is_meant_is_told(raw: Any, far: bool) -> None:
    """Each of its characters was answered as a URL."""
    async with RemoteGatekeeper("http://127.0.0.1:1") if far else Gatekeeper("examplebot") as gate:
        with pytest.raises(TypeError, match=r"urls must be a list of URLs, not one .*give \[url\]"):
            await gate.check_all(raw)
        with pytest.raises(TypeError, match="urls must be a list of URLs, not one"):
            await anext(gate.check_many(raw))
        with pytest.raises(TypeError, match=r"urls must be a list of URLs, or .*not int"):
            await gate.check_all(3)  # type: ignore[arg-type]
