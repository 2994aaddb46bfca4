"""Our own uplink's failure, told from the sites'."""

from __future__ import annotations

import random

from gatekeeper.fetching.faults import LEAST, WINDOW, LocalFaults


class Book:
    """Counts what is undone."""

    def __init__(self) -> None:
        self.undone: list[str] = []
        self.faults = LocalFaults(random.Random(1))

    def fail(self, origin: str, *, began: float, now: float) -> bool:
        return self.faults.failed(
            origin, began=began, now=now, undo=lambda: self.undone.append(origin)
        )


def test_many_failures_at_once_and_no_answer_are_our_own_fault() -> None:
    book = Book()
    verdicts = [book.fail(f"o{i}", began=0.0, now=1.0) for i in range(LEAST)]
    assert verdicts == [False] * (LEAST - 1) + [True]
    assert book.faults.active
    assert len(book.undone) == LEAST


def test_one_origin_failing_often_is_one_origin() -> None:
    book = Book()
    assert not any(book.fail("same", began=0.0, now=0.1 * i) for i in range(100))


def test_failures_spread_over_time_are_the_sites_own() -> None:
    book = Book()
    assert not any(
        book.fail(f"o{i}", began=i * WINDOW, now=i * WINDOW + 1) for i in range(3 * LEAST)
    )


def test_an_answer_while_they_failed_clears_them_all() -> None:
    book = Book()
    for i in range(LEAST - 1):
        book.fail(f"o{i}", began=0.0, now=1.0)
    book.faults.answered("living", 1.5)
    # These began before the answer came: the network was there while they failed.
    assert not any(book.fail(f"p{i}", began=0.0, now=9.0) for i in range(3 * LEAST))
    assert book.undone == []


def test_failures_that_began_after_the_last_answer_count() -> None:
    book = Book()
    book.faults.answered("living", 1.0)
    assert any(book.fail(f"o{i}", began=2.0, now=3.0) for i in range(LEAST))


def test_a_small_share_of_failures_is_nothing_unusual() -> None:
    book = Book()
    for i in range(100):
        book.faults.answered(f"up{i}", 1.0)
    assert not any(book.fail(f"o{i}", began=2.0, now=3.0) for i in range(25))


def test_during_a_fault_only_probes_get_through_and_ever_fewer() -> None:
    book = Book()
    for i in range(LEAST):
        book.fail(f"o{i}", began=0.0, now=1.0)
    faults = book.faults
    assert not faults.may_ask(1.1)
    pauses = []
    now = 1.0
    for _ in range(8):
        due = faults.retry_at(now)
        pauses.append(due - now)
        assert faults.may_ask(due)
        assert not faults.may_ask(due), "one probe at a time"
        assert book.fail("probe", began=due, now=due)
        now = due
    assert pauses[:6] == sorted(pauses[:6])
    assert max(pauses) <= 60 * 1.2


def test_any_answer_ends_the_fault() -> None:
    book = Book()
    for i in range(LEAST):
        book.fail(f"o{i}", began=0.0, now=1.0)
    book.faults.answered("o3", 5.0)
    assert not book.faults.active
    assert book.faults.may_ask(5.0)
    assert book.faults.count == 1


def test_suspects_are_probed_by_turns() -> None:
    book = Book()
    for i in range(LEAST):
        book.fail(f"o{i}", began=0.0, now=1.0)
    asked = {book.faults.next_suspect() for _ in range(LEAST)}
    assert len(asked) == LEAST


def test_time_stands_still_during_a_fault() -> None:
    book = Book()
    assert book.faults.uptime(0.5) == 0.5
    for i in range(LEAST):
        book.fail(f"o{i}", began=0.0, now=1.0)
    assert book.faults.uptime(100.0) == 1.0
    book.faults.answered("living", 101.0)
    assert book.faults.uptime(111.0) == 11.0
