"""Hosts of many kinds for a crawl: their robots.txt, their behaviour, and the allowed pages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from gatekeeper.testing import Breach, Manners, Seen, answers, judge
from tests.internet import Behaviour, Drip, FakeInternet, Page, redirect

AGENT = "examplebot/1.0 (+https://example.org/bot)"
WALL = datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC).timestamp()

MANNERS = (
    Manners(),
    Manners(delay=0.5, denied=("/private",)),
    Manners(delay=2.0, denied=("/private",)),
    Manners(delay=5.0, denied=("/private", "/x")),
    Manners(delay=12.5),
    Manners(delay=0.0, denied=("/private",)),
    Manners(rates=((1, 3, None),)),
    Manners(rates=((10, 60, None),), delay=2.0),
    # From two requests a second to one in twenty, 40 s after the crawl started, and back.
    Manners(rates=((1, 20, ("1414", "1415")), (2, 1, None)), denied=("/private",)),
    Manners(visits=(("1416", "1450"),), delay=1.0, denied=("/private",)),
    # Closes in the middle of the crawl, and opens again.
    Manners(visits=(("1400", "1414"), ("1430", "1459")), delay=9.9),
    Manners(visits=(("1400", "1413"), ("1415", "1415"), ("1417", "1459")), delay=0.7),
)


@dataclass
class World:
    """Hosts of a fake internet. `seeds` are to be fetched; `welcome` are the allowed ones."""

    internet: FakeInternet
    hosts: int
    manners: dict[str, Manners] = field(default_factory=dict)
    seeds: list[str] = field(default_factory=list)
    welcome: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for number in range(self.hosts):
            self.internet.site(self.name(number))
            self.manners[self.url(number)] = MANNERS[number % len(MANNERS)]
        for build in (self._robots, self._pages, self._redirects):
            for number in range(self.hosts):
                build(number)

    def name(self, number: int) -> str:
        """Return the host with this number, modulo their count."""
        return f"h{number % self.hosts}.test"

    def url(self, number: int, path: str = "") -> str:
        """Return a URL of the host with this number."""
        return f"http://{self.name(number)}{path}"

    def _on(self, number: int, path: str, *acts: Behaviour, seed: bool = True) -> None:
        """Add an allowed page."""
        self.internet.sites[self.name(number)].on(path, *acts)
        self.welcome.add(self.url(number, path))
        if seed:
            self.seeds.append(self.url(number, path))

    def _robots(self, number: int) -> None:
        site = self.internet.sites[self.name(number)]
        text = self.manners[self.url(number)].text()
        match number % 17:
            case 1:
                site.on("/robots.txt", redirect("/rules.txt", 301)).page("/rules.txt", text)
            case 2:  # to a file of another host
                site.on("/robots.txt", redirect(self.url(number + 5, f"/of{number}.txt")))
                self.internet.sites[self.name(number + 5)].page(f"/of{number}.txt", text)
            case 3:  # to another host's own robots.txt, whose rules it takes over
                site.on("/robots.txt", redirect(self.url(number + 1, "/robots.txt")))
                self.manners[self.url(number)] = self.manners[self.url(number + 1)]
            case 5:
                site.on("/robots.txt", Page("later", 429, {"Retry-After": "20"}), Page(text))
            case 6:
                site.on("/robots.txt", Page("oops", 500), Page(text))
            case 7:
                site.on("/robots.txt", Page("oops", 503), Page(text))
            case 8:
                site.on("/robots.txt", Page(text, delay=4.0))
            case 9:
                site.on("/robots.txt", Page("none", 404, close=True))
                self.manners[self.url(number)] = Manners()
            case _:
                site.on("/robots.txt", Page(text, close=True))

    def _pages(self, number: int) -> None:
        # Most connections are closed, so that most requests resolve the name again.
        self._on(number, "/a", Page("a", close=True))
        self._on(number, "/b", Page("b", close=number % 2 == 0))
        match number % 7:
            case 0:
                self._on(number, "/slow", Page("slow", delay=3.0, close=True))
            case 1:
                self._on(number, "/drip", Drip("dripping", size=2, every=0.9))
            case 2:
                refusal = Page("no", 429, {"Retry-After": "30"}, close=True)
                self._on(number, "/often", refusal, Page("now"))
            case 3:
                until = {"Retry-After": "Mon, 21 Sep 2026 14:16:00 GMT"}
                self._on(number, "/down", Page("no", 503, until), Page("up"))
            case 4:
                self._on(number, "/often", Page("no", 429, close=True), Page("now", close=True))
        for path in self.manners[self.url(number)].denied:
            self.seeds.append(self.url(number, path + "/secret"))

    def _redirects(self, number: int) -> None:
        site = self.internet.sites[self.name(number)]

        def lead(path: str, to: str) -> None:
            site.on(path, redirect(to))
            self.seeds.append(self.url(number, path))

        match number % 5:
            case 0:
                lead("/near", "/nearby")
                self._on(number, "/nearby", Page("near", close=True), seed=False)
            case 1:
                lead("/far", self.url(number + 3, f"/from{number}"))
                self._on(number + 3, f"/from{number}", Page("far", close=True), seed=False)
            case 2:  # to a disallowed path, if that host has one
                lead("/astray", self.url(number + 1, f"/private/{number}"))
                if not self.manners[self.url(number + 1)].denied:
                    self._on(number + 1, f"/private/{number}", Page("found"), seed=False)
            case 3:  # two hosts that redirect to each other
                lead("/ring", self.url(number + 5, f"/ring{number}"))
                lead("/gnir", self.url(number - 5, f"/gnir{number}"))
                self._on(number + 5, f"/ring{number}", Page("ring", close=True), seed=False)
                self._on(number - 5, f"/gnir{number}", Page("gnir", close=True), seed=False)
            case 4:  # another origin of the same host: a file of its own, one clock
                other = f"{self.name(number)}:8080"
                text = Manners(denied=("/shut",)).text()
                door = self.internet.site(other).robots(text).page("/open", "open", close=True)
                self.manners[f"http://{other}"] = Manners(denied=("/shut",))
                lead("/port", f"{door.url}/open")
                lead("/shut", f"{door.url}/shut")
                self.welcome.add(f"{door.url}/open")

    def log(self, lost: Collection[int] = ()) -> list[Seen]:
        """Return the requests. `lost`: indices of those whose responses could not be recorded: they
        count as unanswered."""
        return [
            replace(request, answered=None, answer=b"") if number in lost else request
            for number, request in enumerate(self.internet.requests)
        ]

    def breaches(self, lost: Collection[int] = ()) -> list[Breach]:
        """Return what the judge finds in the log."""
        return judge(self.log(lost), self.manners, wall=WALL)

    def known(self) -> set[str]:
        """Return the robots.txt URLs that were answered with a file or a 4xx, not a redirect."""
        direct = [r for r in self.internet.requests if not 300 <= (r.status or 0) < 400]
        return {f"{origin}/robots.txt" for origin in answers(direct)}

    def fetched(self) -> list[str]:
        """Return the pages answered with 200, sorted."""
        return sorted(
            request.url
            for request in self.internet.requests
            if request.status == 200 and not request.target.endswith(".txt")
        )
