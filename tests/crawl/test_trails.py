"""Redirect chains: which chain a URL belongs to, and which chains wait for another."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest

from gatekeeper.crawl.manifest import Entry, RedirectChains, Result

AT = datetime(2027, 1, 2, tzinfo=UTC)


def entry(url: str, *hops: str, outcome: Result = Result.FETCHED, **more: Any) -> Entry:
    return Entry(
        url=url,
        outcome=outcome,
        at=AT,
        redirects=tuple((302, hop) for hop in hops),
        final_url=hops[-1] if hops else None,
        **more,
    )


def begun(*urls: str, max_chain: int = 10) -> RedirectChains:
    chains = RedirectChains(max_chain)
    for url in urls:
        chains.begin(url)
    return chains


def test_a_url_is_known_once_it_is_given_or_redirected_to() -> None:
    chains = begun("a")
    chains.extend("a", "b")
    assert ("a" in chains, "b" in chains, "c" in chains) == (True, True, False)


@pytest.mark.parametrize("outcome", list(Result))
def test_every_hop_has_the_outcome_of_its_chain(outcome: Result) -> None:
    chains = begun("a")
    chains.extend("a", "b")
    assert chains.outcome("b") is None
    chains.end(entry("a", "b", outcome=outcome))
    assert (chains.outcome("a"), chains.outcome("b")) == (outcome, outcome)


def test_a_chain_that_joins_another_has_its_outcome_and_its_later_hops() -> None:
    chains = begun("a", "b")
    chains.extend("b", "c")
    assert chains.follow(entry("a", "b", status=301)) is None
    (told,) = chains.end(entry("b", "c", status=200, size=5, file="x"))
    assert told == entry("a", "b", "c", status=301)
    assert (told.size, told.file) == (None, None)


def test_a_chain_that_joins_another_in_the_middle_has_the_hops_after_that() -> None:
    chains = begun("a", "b")
    chains.extend("b", "c")
    chains.extend("b", "d")
    assert chains.follow(entry("a", "c")) is None
    (told,) = chains.end(entry("b", "c", "d"))
    assert told.redirects == ((302, "c"), (302, "d"))


def test_a_chain_that_joins_a_failed_chain_fails() -> None:
    chains = begun("a", "b")
    chains.follow(entry("a", "b", status=301))
    (told,) = chains.end(entry("b", outcome=Result.FAILED, error="reset", status=503))
    assert (told.outcome, told.error, told.status) == (Result.FAILED, "reset", 503)


def test_a_redirect_loop_fails_in_the_chain_that_closes_it() -> None:
    chains = begun("a", "b", "c")
    assert chains.follow(entry("a", "b")) is None
    assert chains.follow(entry("b", "c")) is None
    assert chains.follow(entry("c", "a")) == "redirect loop, back to a"
    (b,) = chains.end(entry("c", outcome=Result.FAILED, error="redirect loop"))
    (a,) = chains.end(b)
    assert (a.url, a.outcome) == ("a", Result.FAILED)


@pytest.mark.parametrize("backwards", [True, False])
def test_joined_chains_have_the_bound_of_a_single_chain(backwards: bool) -> None:
    names = [str(number) for number in range(8)]
    chains = begun(*names, max_chain=3)
    pairs = list(itertools.pairwise(names))
    waiting = []
    for url, hop in reversed(pairs) if backwards else pairs:
        if chains.follow(entry(url, hop)) is not None:
            waiting.append(entry(url, outcome=Result.FAILED, error="more than 3 redirects"))
    waiting.append(entry(names[-1], size=1))
    outcomes = {}
    while waiting:
        ended = waiting.pop()
        outcomes[ended.url] = ended.outcome
        waiting += chains.end(ended)
    assert [outcomes[name] for name in names] == [Result.FAILED] * 4 + [Result.FETCHED] * 4


def test_a_denied_url_may_be_part_of_a_later_chain() -> None:
    chains = begun("b")
    chains.end(entry("b", outcome=Result.DENIED))
    chains.begin("a")
    chains.extend("a", "b")
    assert chains.outcome("b") is None
    chains.end(entry("a", "b"))
    assert chains.outcome("b") is Result.FETCHED
