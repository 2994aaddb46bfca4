"""`POST /v1/explain` decides as the gate would if the site had this text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.internet import FakeInternet

TEXTS = {
    "rules": "User-agent: *\nDisallow: /private\nCrawl-delay: 3\n",
    "nothing": "",
    "comments": "# nothing is said here\n",
    "another agent": "User-agent: otherbot\nDisallow: /\n",
    "a page": "<!DOCTYPE html><html><body>Not found</body></html>",
    "a page with rules": "<html><pre>User-agent: *<br>Disallow: /private</pre></html>",
    "delays": "User-agent: *\nCrawl-delay: 9\n\nUser-agent: testbot\nDisallow: /private\n",
    "no text": "\x00\x01",
}
SAME = ("verdict", "reason", "state", "rule", "user_agent", "crawl_delay", "conflict", "origin")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", ["/private/x", "/open", "/robots.txt"])
async def test_a_given_text_decides_as_if_it_had_been_fetched(
    serve: Any, internet: FakeInternet, text: str, path: str
) -> None:
    internet.site("a.test").robots(TEXTS[text])
    service = await serve()
    url = f"http://a.test{path}"
    agent = "testbot/2.0 (+https://a.example/bot)"
    asked = {"url": url, "user_agent": agent}
    _, real = await service.get("/v1/explain", params=asked)
    status, supposed = await service.post("/v1/explain", {**asked, "robots_txt": TEXTS[text]})

    assert status == 200
    for name in SAME:
        assert supposed["decision"].get(name) == real["decision"].get(name), name
    assert supposed["candidates"] == real["candidates"]


@pytest.mark.parametrize("question", [{"user_agent": "///"}, {"url": "///"}])
async def test_a_bad_question_is_400(serve: Any, question: dict[str, str]) -> None:
    service = await serve()
    asked = {"url": "http://a.test/", "user_agent": "bot", "robots_txt": "", **question}
    assert (await service.post("/v1/explain", asked))[0] == 400
