"""Detection of failures of our own uplink, as opposed to the sites'."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatekeeper.fetching.faults import (
    MIN_FAILED_SITES,
    MIN_RECENT_SITES,
    RECENT_SECONDS,
    WINDOW_SECONDS,
    LocalFaults,
    site_of,
)


def origin(number: int | str) -> str:
    return f"https://o{number}.test"


class Book:
    """Counts undone records and notes changes."""

    def __init__(self) -> None:
        self.undone: list[str] = []
        self.changes: list[bool] = []
        self.doubts = 0
        self.faults = LocalFaults(
            random.Random(1), on_change=self.changes.append, on_doubt=self.doubt
        )

    def doubt(self) -> None:
        self.doubts += 1

    def undo_of(self, name: str) -> Callable[[], None]:
        return lambda: self.undone.append(name)

    def fail(self, name: str, *, began: float, now: float, at: tuple[str, ...] = ()) -> bool:
        return self.faults.failed(name, began=began, now=now, undo=self.undo_of(name), addresses=at)

    def fail_many(
        self, count: int = MIN_FAILED_SITES, *, began: float = 0.0, now: float = 1.0
    ) -> bool:
        return [self.fail(origin(n), began=began, now=now) for n in range(count)][-1]


def test_failures_of_many_sites_without_an_answer_are_a_local_fault() -> None:
    book = Book()
    verdicts = [book.fail(origin(i), began=0.0, now=1.0) for i in range(MIN_FAILED_SITES)]
    assert verdicts == [False] * (MIN_FAILED_SITES - 1) + [True]
    assert book.faults.active
    assert len(book.undone) == MIN_FAILED_SITES
    assert book.changes == [True]


class Unlisted(dict[str, float]):
    """A collection that can't be iterated over."""

    def items(self) -> NoReturn:
        raise AssertionError("all of them were looked at, which stops the loop for 10 ms")

    values = items


def test_an_answer_costs_the_same_however_many_origins_answered() -> None:
    faults = Book().faults
    faults.answered(origin("first"), 0.0)  # at the start an answer has to be reported
    faults.answered_at = Unlisted()
    for number in range(25_000):
        faults.answered(origin(number), float(number))
        if number >= 2_000:
            faults.answered(origin(number % 2_000), float(number))
        assert len(faults.answered_at) <= 10_000
    kept = {*faults.answered_at}
    assert {origin(number) for number in (*range(2_000), *range(18_000, 25_000))} <= kept
    assert origin(2_001) not in kept


def test_repeated_failures_of_one_origin_count_once() -> None:
    book = Book()
    assert not any(book.fail(origin("same"), began=0.0, now=0.1 * i) for i in range(100))


@pytest.mark.parametrize("count", [25, 200, 2000])
def test_failures_of_many_names_of_one_site_count_once(count: int) -> None:
    book = Book()
    names = [f"https://n{i}.shop.example.test" for i in range(count)]
    assert not any(book.fail(name, began=0.0, now=1.0) for name in names)


@pytest.mark.parametrize("count", [25, 200, 2000])
def test_failures_of_many_domains_at_one_address_count_once(count: int) -> None:
    book = Book()
    at = ("203.0.113.7",)
    assert not any(book.fail(origin(i), began=0.0, now=1.0, at=at) for i in range(count))


def test_failures_of_many_names_count_once_per_machine() -> None:
    book = Book()
    for i in range(300):
        at = (f"203.0.113.{i % 19}", f"2001:db8::{i % 19}")
        assert not book.fail(origin(i), began=0.0, now=1.0, at=at)


def test_addresses_of_one_domain_count_as_one_site() -> None:
    book = Book()
    for i in range(100):
        name = f"https://n{i}.example.test"
        assert not book.fail(name, began=0.0, now=1.0, at=(f"203.0.113.{i}",))


def test_a_site_is_a_registered_domain_or_an_address() -> None:
    assert site_of("https://www.example.co.uk:444") in {"example.co.uk", "co.uk"}
    assert site_of("https://a.b.example.com") == site_of("http://example.com:81") == "example.com"
    assert site_of("http://203.0.113.7:81") == "203.0.113.7"
    assert site_of("http://[2001:DB8::1]:81") == "2001:db8::1"


def test_failures_spread_over_time_are_no_local_fault() -> None:
    book = Book()
    assert not any(
        book.fail(origin(i), began=i * WINDOW_SECONDS, now=i * WINDOW_SECONDS + 1)
        for i in range(3 * MIN_FAILED_SITES)
    )
    assert not book.undone


def test_an_answer_clears_the_failures_that_began_before_it() -> None:
    book = Book()
    book.fail_many(MIN_FAILED_SITES - 1)
    book.faults.answered(origin("living"), 1.5)
    assert not book.faults.doubtful
    # These began before the answer arrived: the network worked while they failed.
    assert not any(
        book.fail(origin(f"p{i}"), began=0.0, now=9.0) for i in range(3 * MIN_FAILED_SITES)
    )
    assert book.undone == []


def test_failures_that_began_after_the_last_answer_count() -> None:
    book = Book()
    book.faults.answered(origin("living"), 1.0)
    assert book.fail_many(began=2.0, now=3.0)


def test_a_small_share_of_failing_sites_is_no_local_fault() -> None:
    book = Book()
    for i in range(100):
        book.faults.answered(f"https://up{i}.test", 1.0)
    assert not book.fail_many(25, began=2.0, now=3.0)


def test_many_names_of_one_living_site_do_not_hide_a_local_fault() -> None:
    # One site that answers under 300 names must not mask that all others fail.
    book = Book()
    for i in range(300):
        book.faults.answered(f"https://up{i}.example.test", 1.0)
    assert book.fail_many(began=2.0, now=3.0)


def test_any_answer_ends_a_local_fault() -> None:
    book = Book()
    book.fail_many()
    book.faults.answered(origin(3), 5.0)
    assert not book.faults.active
    assert book.changes == [True, False]
    assert book.faults.may_ask(origin(4), 5.0)
    assert not book.faults.unanswered
    assert book.faults.count == 1


def test_a_local_fault_undoes_recorded_failures_latest_first() -> None:
    book = Book()
    for step in range(3):
        book.faults.failed(origin(0), began=0.0, now=0.1 * step, undo=book.undo_of(f"step {step}"))
    for i in range(1, MIN_FAILED_SITES):
        book.fail(origin(i), began=0.0, now=1.0)
    assert book.undone[:3] == ["step 2", "step 1", "step 0"]


def test_a_local_fault_is_declared_only_after_a_pause_for_an_answer() -> None:
    # Between two answers of one busy host a whole list of names can fail.
    book = Book()
    book.faults.answered(origin("living"), 1.0)
    assert not book.fail_many(MIN_FAILED_SITES + 5, began=1.01, now=1.1)
    assert book.doubts == 1
    pause = book.faults.pause(1.1)
    assert pause is not None
    book.faults.answered(origin("living"), 1.2)
    assert book.faults.next_probes(1.1 + pause) == []
    assert book.changes == []


def test_a_local_fault_is_declared_at_the_end_of_the_pause() -> None:
    book = Book()
    book.faults.answered(origin("living"), 1.0)
    book.fail_many(MIN_FAILED_SITES + 5, began=1.01, now=1.1)
    pause = book.faults.pause(1.1)
    assert pause is not None
    assert pause <= 1.0
    book.faults.next_probes(1.1 + pause)
    assert book.faults.active
    assert len(book.undone) == MIN_FAILED_SITES + 5


def test_a_false_alarm_is_not_declared_a_second_time() -> None:
    # A host answers every 1.5 seconds, and names that fail immediately are tried all the time.
    book, now, answered = Book(), 0.0, -1.0
    for tick in range(600):
        now = tick / 10
        if now - answered >= 1.5:
            book.faults.answered(origin("living"), now)
            answered = now
        pause = book.faults.pause(now)
        if pause == 0.0:
            book.faults.next_probes(now)
        for number in range(MIN_FAILED_SITES):
            book.fail(f"https://dead{number}.test", began=now + 0.01, now=now + 0.05)
    assert book.faults.count == 1


# -- a few that answered recently


def answer_from(book: Book, count: int, now: float = 0.0) -> None:
    for i in range(count):
        book.faults.answered(origin(i), now)


def test_failures_of_all_three_sites_that_answered_lately_are_a_local_fault() -> None:
    book = Book()
    answer_from(book, MIN_RECENT_SITES)
    verdicts = [book.fail(origin(i), began=1.0, now=2.0) for i in range(MIN_RECENT_SITES)]
    assert verdicts == [False] * (MIN_RECENT_SITES - 1) + [True]


def test_other_sites_that_answered_lately_are_probed_before_a_local_fault() -> None:
    book = Book()
    answer_from(book, MIN_RECENT_SITES + 2)
    assert not any(book.fail(origin(i), began=1.0, now=2.0) for i in range(MIN_RECENT_SITES))
    assert book.doubts == 1
    assert book.faults.pause(2.0) == 0.0
    assert book.faults.next_probes(2.0) == [origin(MIN_RECENT_SITES), origin(MIN_RECENT_SITES + 1)]
    assert book.faults.pause(2.0) is None, "they are being asked"
    assert not book.fail(origin(MIN_RECENT_SITES), began=2.0, now=3.0)
    assert book.fail(origin(MIN_RECENT_SITES + 1), began=2.0, now=3.0), "none of them answers"


def test_one_probed_site_that_answers_rules_a_local_fault_out() -> None:
    book = Book()
    answer_from(book, MIN_RECENT_SITES + 2)
    for i in range(MIN_RECENT_SITES):
        book.fail(origin(i), began=1.0, now=2.0)
    book.faults.next_probes(2.0)
    book.fail(origin(MIN_RECENT_SITES), began=2.0, now=2.5)
    book.faults.answered(origin(MIN_RECENT_SITES + 1), 3.0)
    assert not book.faults.doubtful
    assert book.undone == []


def test_three_names_of_one_site_that_answered_lately_count_once() -> None:
    book = Book()
    names = [f"https://n{i}.example.test" for i in range(10)]
    for name in names:
        book.faults.answered(name, 0.0)
    assert not any(book.fail(name, began=1.0, now=2.0) for name in names)


def test_sites_that_answered_long_ago_count_like_unknown_ones() -> None:
    book = Book()
    answer_from(book, 10)
    late = RECENT_SECONDS + 1.0
    assert not any(book.fail(origin(i), began=late, now=late + 1) for i in range(10))


def test_failures_without_a_known_reason_are_probed_and_are_no_evidence() -> None:
    book = Book()
    answer_from(book, MIN_RECENT_SITES)
    for i in range(MIN_RECENT_SITES):
        book.faults.failed(
            origin(i), began=1.0, now=2.0, undo=book.undo_of(origin(i)), evidence=False
        )
    assert not book.faults.active
    assert book.faults.next_probes(2.0) == [origin(i) for i in range(MIN_RECENT_SITES)]
    for i in range(MIN_RECENT_SITES):  # they refuse, say
        book.faults.probe_inconclusive(origin(i), 3.0)
    assert not book.faults.active
    assert not book.faults.doubtful
    assert book.faults.next_probes(3.0) == []


def test_a_local_fault_undoes_failures_that_are_no_evidence() -> None:
    book = Book()
    answer_from(book, MIN_RECENT_SITES)
    for i in range(MIN_RECENT_SITES):
        book.faults.failed(
            origin(i), began=1.0, now=2.0, undo=book.undo_of(origin(i)), evidence=False
        )
    for i in range(MIN_RECENT_SITES):
        book.faults.failed(origin(i), began=2.0, now=3.0)
    assert book.faults.active
    assert sorted(book.undone) == [origin(i) for i in range(MIN_RECENT_SITES)]


def test_a_failure_outside_the_window_is_no_evidence_although_its_site_still_gives_no_answer() -> (
    None
):
    book = Book()
    book.faults.answered(origin("living"), 0.0)
    for i in range(2 * MIN_FAILED_SITES):
        now = 100.0 + i * 0.8 * WINDOW_SECONDS
        for n in range(i):
            book.faults.failed(origin(n), began=now - 1.0, now=now, evidence=False)
        assert not book.fail(origin(i), began=now - 1.0, now=now)


# -- during a fault


def test_during_a_local_fault_only_origins_that_answered_may_be_asked() -> None:
    book = Book()
    book.faults.answered(origin("living"), 0.5)
    book.faults.answered(origin("gone"), 0.5)
    book.fail_many(began=1.0, now=2.0)
    book.fail(origin("gone"), began=2.0, now=3.0)
    assert book.faults.active
    assert book.faults.may_ask(origin("living"), 3.0)
    assert not book.faults.may_ask(origin("gone"), 3.0)
    assert not book.faults.may_ask(origin(0), 3.0)
    assert not book.faults.may_ask(origin("new"), 3.0)
    assert book.faults.unanswered == {
        "ogone.test",
        *(f"o{n}.test" for n in range(MIN_FAILED_SITES)),
    }


def probes(book: Book, *, until: float, now: float = 1.0) -> list[tuple[float, list[str]]]:
    """Return every probe until that moment, none of which is answered."""
    sent = []
    while (pause := book.faults.pause(now)) is not None and now + pause < until:
        now += pause
        asked = book.faults.next_probes(now)
        sent.append((now, asked))
        for name in asked:
            book.fail(name, began=now, now=now)
    return sent


def test_failed_origins_are_probed_in_rotation_at_growing_intervals() -> None:
    book = Book()
    book.fail_many()
    sent = probes(book, until=4000.0)
    assert all(len(asked) == 1 for _, asked in sent)
    assert {asked[0] for _, asked in sent} == {origin(n) for n in range(MIN_FAILED_SITES)}
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(sent)]
    assert gaps[:5] == sorted(gaps[:5])
    assert 40.0 < gaps[-1] <= 60 * 1.2


def test_origins_that_answered_lately_are_probed_first_every_few_seconds() -> None:
    book = Book()
    answer_from(book, 2)
    book.faults.answered(origin("best"), 0.5)
    for i in range(100, 100 + MIN_FAILED_SITES):
        book.fail(origin(i), began=0.6, now=1.0)
    sent = probes(book, until=600.0)
    assert origin("best") in sent[0][1]
    assert sent[0][0] <= 1.0 + 1.2
    assert all(b - a <= 2.4 + 1e-9 for (a, _), (b, _) in itertools.pairwise(sent))
    assert {name for _, asked in sent for name in asked} == {
        *(origin(0), origin(1), origin("best"))
    }


def test_a_new_origin_is_probed_soon_and_once_the_latest_first() -> None:
    book = Book()
    book.fail_many()
    probes(book, until=500.0)
    for i in range(1000, 1100):
        assert not book.faults.may_ask(origin(i), 500.0)
    sent = probes(book, until=560.0, now=500.0)
    assert sent[0][0] <= 500.0 + 2.4
    assert sent[0][1][0] == origin(1099)
    asked = [name for _, some in sent for name in some]
    assert {origin(i) for i in range(1000, 1100)} <= set(asked)
    assert all(asked.count(origin(i)) == 1 for i in range(1000, 1100))
    for i in range(1000, 1100):
        assert not book.faults.may_ask(origin(i), 560.0)
    assert len(probes(book, until=620.0, now=560.0)) < 20, "nobody new: ever fewer again"


def test_uptime_does_not_grow_during_a_local_fault() -> None:
    book = Book()
    assert book.faults.uptime(0.5) == 0.5
    book.fail_many()
    assert book.faults.uptime(100.0) == 1.0
    book.faults.answered(origin("living"), 101.0)
    assert book.faults.uptime(111.0) == 11.0


# -- invariants

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["failed", "no_answer", "answered", "probe_inconclusive", "next_probes", "may_ask"]
        ),
        st.integers(0, 60),
        st.floats(0.0, 4.0),
        st.floats(0.0, 12.0),
    ),
    max_size=120,
)


def take(book: Book, step: str, number: int, now: float, began: float) -> None:
    faults, name = book.faults, origin(number)
    if step == "failed":
        book.fail(name, began=began, now=now)
    elif step == "no_answer":
        faults.failed(name, began=began, now=now, undo=book.undo_of(name), evidence=False)
    elif step == "answered":
        faults.answered(name, now)
    elif step == "probe_inconclusive":
        faults.probe_inconclusive(name, now)
    elif step == "next_probes":
        faults.next_probes(now)
    else:
        faults.may_ask(name, now)


@given(STEPS, st.integers(0, 60))
def test_any_answer_ends_a_local_fault_and_clears_all_failures(
    steps: list[tuple[str, int, float, float]], last: int
) -> None:
    book, now = Book(), 100.0
    for step, number, passed, took in steps:
        now += passed
        take(book, step, number, now, now - took)
        assert book.changes == [bool(n % 2 == 0) for n in range(len(book.changes))]
        assert book.faults.active is (len(book.changes) % 2 == 1)
    book.faults.answered(origin(last), now)
    assert not book.faults.active
    assert not book.faults.doubtful
    assert book.faults.may_ask(origin(0), now)
    # Attempts in flight at that moment failed because of their sites.
    assert not any(book.fail(origin(i), began=now, now=now + 9.0) for i in range(100))


@given(STEPS)
def test_failures_while_other_sites_answer_are_never_a_local_fault(
    steps: list[tuple[str, int, float, float]],
) -> None:
    book, now = Book(), 100.0
    for step, number, passed, _ in steps:
        now += passed
        book.faults.answered(origin("living"), now)
        take(book, step, number, now + 0.01, now)
        assert not book.faults.active


@given(
    st.lists(
        st.sampled_from(["no_answer", "probe_inconclusive", "next_probes", "answered"]),
        max_size=200,
    )
)
def test_failures_that_are_no_evidence_never_make_a_local_fault(steps: list[str]) -> None:
    # Refused connections and unknown names are reported like this, or not at all.
    book = Book()
    answer_from(book, 40)
    for number, step in enumerate(steps):
        take(book, step, number % 60, 1.0 + number / 10, 1.0 + number / 10)
        assert not book.faults.active


@given(st.sets(st.integers(0, 5000), min_size=MIN_FAILED_SITES, max_size=80), st.randoms())
def test_failures_of_twenty_sites_without_an_answer_are_always_a_local_fault(
    numbers: set[int], rng: random.Random
) -> None:
    book = Book()
    told = [book.fail(origin(n), began=0.0, now=rng.uniform(1.0, 9.0)) for n in sorted(numbers)]
    assert told.index(True) == MIN_FAILED_SITES - 1
