"""The judge finds each kind of breach, and nothing in a correct log."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gatekeeper.testing import Manners, judge

WALL = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
A = "http://a.test"


@dataclass
class Line:
    """Return one line of a made-up log, answered and ended immediately by default."""

    at: float
    target: str
    status: int | None = 200
    host: str = "a.test"
    scheme: str = "http"
    headers: dict[str, str] = field(default_factory=dict)
    answered: float | None = -1.0
    ended: float | None = -1.0

    def __post_init__(self) -> None:
        self.answered = self.at if self.answered == -1.0 else self.answered
        self.ended = self.answered if self.ended == -1.0 else self.ended

    def answer_header(self, name: str) -> str | None:
        return self.headers.get(name)


ROBOTS = Line(0.0, "/robots.txt")


def kinds(*log: Line, wall: float = WALL, **manners: Manners) -> list[str]:
    by_origin = {f"http://{name}.test": one for name, one in manners.items()}
    return [breach.kind for breach in judge(log, by_origin, wall=wall)]


def test_the_judge_finds_no_breach_in_a_polite_visit() -> None:
    log = (ROBOTS, Line(10.0, "/x"), Line(20.0, "/y"))
    assert kinds(*log, a=Manners(delay=10, denied=("/no",))) == []


def test_the_judge_counts_each_host_by_itself() -> None:
    assert kinds(ROBOTS, Line(0.1, "/robots.txt", host="b.test")) == []


def test_the_judge_counts_all_ports_of_a_host_together() -> None:
    assert kinds(ROBOTS, Line(0.1, "/robots.txt", host="a.test:8080")) == ["early"]


@pytest.mark.parametrize("second", [9.9, 0.0])
def test_a_request_too_early_after_the_last_start_is_a_breach(second: float) -> None:
    assert kinds(ROBOTS, Line(second, "/x"), a=Manners(delay=10)) == ["early"]


def test_a_request_too_early_after_a_response_head_is_a_breach() -> None:
    log = (ROBOTS, Line(10.0, "/slow", answered=14.0), Line(23.0, "/y"))
    assert kinds(*log, a=Manners(delay=10)) == ["early"]


def test_the_interval_is_not_counted_from_the_end_of_a_body() -> None:
    log = (ROBOTS, Line(10.0, "/slow", answered=11.0, ended=19.0), Line(21.0, "/y"))
    assert kinds(*log, a=Manners(delay=10)) == []


def test_before_the_file_is_read_the_usual_interval_counts() -> None:
    log = (Line(0.0, "/robots.txt", status=503, headers={"Retry-After": "0"}), ROBOTS)
    assert kinds(*log) == ["early"]
    assert kinds(log[0], Line(1.0, "/robots.txt"), a=Manners(delay=10)) == []


def test_a_request_too_early_after_an_older_one_is_a_breach() -> None:
    log = (ROBOTS, Line(5.0, "/a", answered=30.0), Line(15.0, "/b"), Line(32.0, "/c"))
    assert kinds(*log, a=Manners(delay=5, limit=9)) == ["early", "early"]
    assert kinds(*log, a=Manners(delay=0, limit=9)) == []


def test_rates_hold_in_their_hours() -> None:
    slow = Manners(rates=((1, 60, ("1414", "1415")), (1, 2, None)))
    assert kinds(ROBOTS, Line(2.0, "/x"), Line(4.0, "/y"), a=slow) == []
    assert kinds(ROBOTS, Line(45.0, "/x"), Line(80.0, "/y"), a=slow) == ["early", "early"]


def test_too_many_requests_in_flight_are_a_breach() -> None:
    log = (ROBOTS, Line(1.0, "/x", ended=5.0), Line(3.0, "/y"))
    assert kinds(*log) == ["crowd"]
    assert kinds(*log, a=Manners(limit=2)) == []


def test_a_request_that_never_ended_counts_as_in_flight() -> None:
    assert kinds(ROBOTS, Line(1.0, "/x", ended=None), Line(9.0, "/y")) == ["crowd"]


@pytest.mark.parametrize(
    ("headers", "free_at"),
    [
        ({"Retry-After": "30"}, 31.0),
        ({"Retry-After": "Mon, 21 Sep 2026 14:14:00 GMT"}, 40.0),
        ({}, 61.0),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_request_inside_a_block_is_a_breach(
    status: int, headers: dict[str, str], free_at: float
) -> None:
    turned_away = Line(1.0, "/x", status=status, headers=headers)
    assert kinds(ROBOTS, turned_away, Line(free_at - 0.1, "/x")) == ["block"]
    assert kinds(ROBOTS, turned_away, Line(free_at, "/x")) == []


def test_a_block_holds_for_robots_txt_and_other_ports() -> None:
    turned_away = Line(1.0, "/x", status=429, headers={"Retry-After": "30"})
    log = (ROBOTS, turned_away, Line(9.0, "/robots.txt", host="a.test:8080"))
    assert kinds(*log) == ["block"]


def test_a_request_outside_the_visit_times_is_a_breach() -> None:
    site = Manners(visits=(("1430", "1445"),))
    assert kinds(ROBOTS, Line(10.0, "/x"), a=site) == ["window"]
    assert kinds(ROBOTS, Line(1000.0, "/x"), Line(1959.9, "/y"), a=site) == []
    assert kinds(ROBOTS, Line(1960.0, "/x"), a=site) == ["window"]


def test_visit_times_may_go_past_midnight() -> None:
    site = Manners(visits=(("2300", "0100"),))
    assert kinds(ROBOTS, Line(10.0, "/x"), a=site, wall=WALL + 10 * 3600) == []


def test_a_request_for_a_denied_path_is_a_breach() -> None:
    assert kinds(ROBOTS, Line(2.0, "/no/x"), a=Manners(denied=("/no",))) == ["denied"]


def test_a_page_requested_before_its_robots_txt_is_a_breach() -> None:
    assert kinds(Line(0.0, "/x"), Line(2.0, "/robots.txt")) == ["unasked"]


def test_a_page_requested_before_robots_txt_is_answered_is_a_breach() -> None:
    log = (Line(0.0, "/robots.txt", answered=5.0), Line(2.0, "/x", answered=3.0))
    assert kinds(*log, a=Manners(limit=2, default=0)) == ["unasked"]


@pytest.mark.parametrize("status", [429, 500, None])
def test_a_page_requested_after_an_unreachable_robots_txt_is_a_breach(status: int | None) -> None:
    robots = Line(0.0, "/robots.txt", status=status, headers={"Retry-After": "0"})
    assert kinds(robots, Line(2.0, "/x")) == ["unasked"]


def test_a_page_requested_after_a_missing_robots_txt_is_no_breach() -> None:
    assert kinds(Line(0.0, "/robots.txt", status=404), Line(2.0, "/x")) == []


def test_a_page_requested_after_the_robots_txt_of_another_port_is_a_breach() -> None:
    assert kinds(ROBOTS, Line(2.0, "/x", host="a.test:8080")) == ["unasked"]


def test_a_robots_txt_that_leads_elsewhere_is_answered_there() -> None:
    moved = Line(0.0, "/robots.txt", status=301, headers={"Location": "http://b.test/r.txt"})
    there = Line(3.0, "/r.txt", host="b.test")
    assert kinds(moved, there, Line(4.0, "/x")) == []
    assert kinds(moved, there, Line(2.0, "/x")) == ["unasked"]
    assert kinds(moved, Line(4.0, "/x")) == ["unasked"]


def test_a_redirected_robots_txt_may_be_requested_again_before_it_was_read() -> None:
    slow, moved = Manners(delay=10.0), {"Location": "http://b.test/r.txt"}
    first = Line(0.0, "/robots.txt", status=301, headers=moved)
    there = Line(3.0, "/r.txt", host="b.test")
    again = Line(5.0, "/robots.txt", status=301, headers=moved)
    unanswered = Line(5.0, "/robots.txt", status=0)
    for request in (again, unanswered):
        assert kinds(first, there, request, a=slow) == []
    assert kinds(first, there, Line(5.0, "/x"), a=slow) == ["early"]


def test_the_target_of_a_redirected_robots_txt_has_a_clock_and_needs_no_permission() -> None:
    moved = Line(0.0, "/robots.txt", status=301, headers={"Location": "/private/r.txt"})
    private = Manners(denied=("/private",))
    assert kinds(moved, Line(1.0, "/private/r.txt"), a=private) == []
    assert kinds(moved, Line(0.9, "/private/r.txt"), a=private) == ["early"]


def test_a_hop_to_a_host_that_denies_it_or_was_not_asked_is_a_breach() -> None:
    led = Line(2.0, "/go", status=302, headers={"Location": "http://b.test/no"})
    there = Line(4.0, "/no", host="b.test")
    asked = Line(1.0, "/robots.txt", host="b.test")
    assert kinds(ROBOTS, led, there) == ["hop"]
    assert kinds(ROBOTS, led, asked, there, b=Manners(denied=("/no",))) == ["hop"]
    assert kinds(ROBOTS, led, asked, there) == []


def test_the_text_of_a_breach_says_what_happened() -> None:
    (breach,) = judge((ROBOTS, Line(0.5, "/x")), {}, wall=WALL)
    assert str(breach) == (
        "0.500 early: http://a.test/x: 0.500 s after /robots.txt, 1 s were asked for"
    )


def test_manners_write_their_rules_as_robots_txt() -> None:
    manners = Manners(
        delay=2.5, rates=((1, 7, ("0600", "0845")),), visits=(("0100", "0200"),), denied=("/no",)
    )
    assert manners.text().splitlines() == [
        "User-agent: *",
        "Crawl-delay: 2.5",
        "Request-rate: 1/7s 0600-0845",
        "Visit-time: 0100-0200",
        "Disallow: /no",
        "Allow: /",
    ]
