"""What is kept of one origin: its record, the text of its file, and both as storage keeps them.

A `Record` has two slots: `current`, what the latest attempt came to, and `good`, the last
answer that was a file or a definite absence. A failure never overwrites the good one. Each
distinct text is kept once, however many origins serve it, packed with a zlib dictionary of the
words that robots.txt files are made of.

Records are confined to the event loop. Their lifetimes are monotonic seconds; wall seconds are
kept beside them for what is shown and stored. How old a stored record is says its stamp: on the
same start of the machine no wall clock that was set meanwhile makes it older or younger.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from gatekeeper import speedups
from gatekeeper.clock import Clock, Stamp, stamp
from gatekeeper.config import Config, FetchConfig
from gatekeeper.decision import Reason, State, Verdict
from gatekeeper.fetching.outcomes import DAY, OURS, Holds, Outcome, holds_meanwhile, readable
from gatekeeper.robots import Policy, RobotsTxt
from gatekeeper.robots.flat import FlatRules
from gatekeeper.robots.timing import RobotsInterval
from gatekeeper.split_dict import SplitDict
from gatekeeper.storage.base import OriginRecord, pack_body, unpack_body

_FIELDS = "host clean-param license noindex request-rate visit-time robot-version crawl-delay"

_AGENTS = """
AdsBot-Google AhrefsBot Amazonbot anthropic-ai Applebot Applebot-Extended Baiduspider Bingbot
Bytespider CCBot ChatGPT-User Claude-Web ClaudeBot cohere-ai DotBot DuckDuckBot FacebookBot
facebookexternalhit Google-Extended Googlebot Googlebot-Image Googlebot-Mobile Googlebot-News
GPTBot ia_archiver Mediapartners-Google meta-externalagent MJ12bot msnbot OAI-SearchBot omgili
PerplexityBot PetalBot Scrapy SemrushBot Slurp Teoma Twitterbot wget Yandex YandexBot
"""

_ALLOWED = """
/core/*.css$ /core/*.css? /core/*.gif /core/*.jpeg /core/*.jpg /core/*.js$ /core/*.js?
/core/*.png /core/*.svg /profiles/*.css$ /misc/*.js$ /modules/*.js? /themes/*.png
/wp-content/uploads/ /ads.txt /sitemap.xml
"""

_DISALLOWED = """
/*.php$ /*.pdf$ /*/print/ /*?*sort= /*?*ls=*&ls=* /*?utm_source= /?q=admin/ /?s= /CHANGELOG.txt
/INSTALL.mysql.txt /LICENSE.txt /README.txt /a/downloads/-/* /account/ /administrator/
/ajax/ /api/ /app/ /assets/ /author/ /blogs/*+* /cache/ /carts /catalog/product_compare/
/catalogsearch/ /category/ /cgi-bin/ /checkout/ /checkouts/ /collections/*sort_by* /comments/
/components/ /contact/ /cron.php /css/ /customer/ /download/ /en/ /error/ /feed/ /files/
/filter/tips /forum/ /images/ /img/ /includes/ /index.php/admin/ /install.php /js/ /language/
/lib/ /login/ /logout/ /mail/ /media/ /members/ /modules/ /news/ /node/add/ /orders /page/
/plugins/ /policies/ /preview/ /print/ /private/ /products/ /profiles/ /readme.html
/register/ /review/ /scripts/ /share/ /static/ /tag/ /templates/ /test/ /themes/ /tmp/
/trackback/ /update.php /user/login/ /user/logout/ /user/password/ /user/register/ /users/
/web.config /wishlist/ /wp-admin/ /wp-content/plugins/ /wp-includes/ /wp-json/ /wp-login.php
/xmlrpc.php /comment/reply/ /admin/ /search/ /search? /search /cart /*?
"""

_LAST = (
    "# robots.txt for https://www.example.com/\r\n# Directories\n# Files\n# Paths (clean URLs)\n"
    "Content-Signal: search=yes,ai-train=no\nAllow: /wp-admin/admin-ajax.php\r\n"
    "Sitemap: https://www.example.com/sitemap_index.xml\nSitemap: http://www."
    "\n\nsitemap: https://www./sitemap.xml\n\nUser-Agent: *\nCrawl-Delay: 10\n"
    "Crawl-delay: 1\n\nDisallow:\n\nAllow: /\n\nUser-agent: *\nDisallow: /\n"
)


def _primer() -> bytes:
    lines = [f"{field}: " for field in _FIELDS.split()]
    lines += [f"User-agent: {agent}" for agent in _AGENTS.split()]
    lines += [f"Allow: {path}" for path in _ALLOWED.split()]
    lines += [f"Disallow: {path}" for path in _DISALLOWED.split()]
    return "\n".join(lines).encode() + b"\n" + _LAST.encode()


PRIMER: Final = _primer()


_MAX_AWAKE: Final = 1_000
"""Texts that are awake: each is some ten objects for the garbage collector to walk."""
_AWAKE: Final = 1_500
_PER_OCTET: Final = 3
"""What a text costs more while it is awake: so many bytes, and so many an octet."""
_CHANCES: Final = 8
"""Texts in use that are passed over in search of one that may rest."""
LARGE: Final = 65_536
"""Octets of a text from which it is parsed, packed and chosen from in a thread."""
_KEY: Final = (1 << 60) - 1
"""A number up to here takes the fewest bytes for its bits."""


_AS_IT_IS: Final = 2_048
"""Octets of a body up to which a text at rest has it as it is: to pack it takes too long."""
_SMALL: Final = 4_096
"""Octets of a body up to which a window of 8 KiB holds it and the dictionary."""
_QUICKLY: Final = zlib.compressobj(1, zlib.DEFLATED, -13, 4, zlib.Z_DEFAULT_STRATEGY, PRIMER)
"""Has read the dictionary, and is copied for each small body: a tenth larger than by the slowest
level, in two thirds of its time."""


def deflate(body: bytes) -> bytes:
    """A body as it is kept in memory while nobody asks: a quarter of what it was."""
    if len(body) <= _SMALL:
        packer = _QUICKLY.copy()
    else:
        level = 6 if len(body) >= LARGE else 1  # a thread does the one, the loop the other
        packer = zlib.compressobj(level, zlib.DEFLATED, -15, 8, zlib.Z_DEFAULT_STRATEGY, PRIMER)
    return packer.compress(body) + packer.flush()


def inflate(packed: bytes) -> bytes:
    """The body again."""
    unpacker = zlib.decompressobj(-15, PRIMER)
    return unpacker.decompress(packed) + unpacker.flush()


class FileText(msgspec.Struct, gc=False, eq=False):
    """One distinct text. Made by `FileTexts`.

    It is *awake*, parsed and with the policies chosen so far, or *at rest*: packed, and with no
    more than what answers plain questions of the gate's own agent. The garbage collector never
    looks at it, and at rest there is nothing else that it would look at. The octets are kept as
    they were fetched while it is awake: the parsed text would give most of them back, but not all.
    """

    size: int
    """Octets of the body."""
    how: tuple[str, int]
    """The dialect it is read in, and how many octets of it."""
    parsed: RobotsTxt | None
    """None: it is at rest."""
    kept: bytes | None = None
    """The body packed; or else ..."""
    plain: bytes = b""
    """... as it is, which at rest only a short one is."""
    policy: Policy | None = None
    """That of the first agent that asked, and ..."""
    others: dict[str, Policy] | None = None
    """... those of others, by product token."""
    ready: Policy | FlatRules | None = None
    """What answers about plain paths for the gate's own agent; None: it has to be woken."""
    interval: RobotsInterval | None = None
    """What the text asks for, for the gate's own agent, where that is the same at any hour."""
    used: bool = False
    """It was asked for since that was last looked at."""
    key: int = 0
    """What it is found by among the texts in use."""
    users: int = 0
    """How many records in memory hold it."""

    @property
    def robots(self) -> RobotsTxt:
        """The text parsed, which is done for this one look where it is at rest."""
        if self.parsed is not None:
            return self.parsed
        dialect, limit = self.how
        return RobotsTxt.parse(readable(self.body()), dialect=dialect, limit=limit)

    def rest(self) -> None:
        """Keep the body alone, packed unless it is short; the rules of the gate's own agent stay
        in the form that takes least."""
        ready = self.ready
        if self.size > _AS_IT_IS:
            self.packed()
        if isinstance(ready, Policy):
            self.ready = ready.flat() if speedups.ON else None
        self.parsed = self.policy = self.others = None

    def packed(self) -> bytes:
        """The body as it is kept while nobody asks; packed once."""
        if self.kept is None:
            self.kept, self.plain = deflate(self.plain), b""
        return self.kept

    def body(self) -> bytes:
        """The octets as they were fetched."""
        return self.plain if self.kept is None else inflate(self.kept)

    def same_as(self, body: bytes) -> bool:
        """Whether that is the body."""
        return len(body) == self.size and self.body() == body

    def policy_for(self, agent: str) -> Policy | None:
        """What was chosen for that product token, if it was."""
        self.used = True
        first = self.policy
        if first is not None and first.agent == agent:
            return first
        return None if self.others is None else self.others.get(agent)

    def keep_policy(self, policy: Policy, most: int) -> None:
        """Keep a policy while awake; the oldest goes beyond so many."""
        if self.parsed is None:
            return
        if self.policy is None or self.policy.agent == policy.agent:
            self.policy = policy
            return
        others = self.others
        if others is None:
            others = self.others = {}
        others[policy.agent] = policy
        while len(others) >= most:
            first = next(iter(others))
            self.policy = others.pop(first)


class FileTexts:
    """Every text in use, found by its body: one for however many origins serve it.

    A text is in use from the first `hold` to the last `release`. Those that were asked for last
    are awake, `_MAX_AWAKE` of them at most, and an eighth of `cache.max_bytes` by an estimate.
    """

    def __init__(self, config: Config) -> None:
        self._how = config.robots.dialect, config.fetch.max_body
        self._texts: SplitDict[int, FileText] = SplitDict()
        self._awake: deque[FileText] = deque()
        self._most_bytes = config.cache.max_bytes // 8
        self.awake_bytes: int = 0
        """An estimate of what being awake costs, beside what a text at rest does."""
        self._dead = 0
        """Texts that nobody holds any more since the list of those awake was cleared of them."""

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, body: bytes, packed: bytes | None = None) -> FileText:
        """The text with that body: parsed now unless it is in use already, or comes packed."""
        found = self.find(body)
        if found is not None:
            return found
        if packed is None:
            return self.read(body)
        return FileText(len(body), self._how, None, packed, key=hash(body) & _KEY)

    def find(self, body: bytes) -> FileText | None:
        """The text with that body, if it is in use."""
        text = self._texts.get(hash(body) & _KEY)
        # Of two bodies with one key only the first is ever found.
        return text if text is not None and text.same_as(body) else None

    def read(self, body: bytes) -> FileText:
        """Parse a body; touches nothing shared, so it may run in a thread."""
        dialect, limit = self._how
        robots = RobotsTxt.parse(readable(body), dialect=dialect, limit=limit)
        text = FileText(len(body), self._how, robots, plain=body, key=hash(body) & _KEY)
        if len(body) >= LARGE:
            text.packed()  # later it would be felt
        return text

    def hold(self, text: FileText) -> None:
        """One more record has it."""
        text.users += 1
        if text.users == 1:
            if text.key not in self._texts:
                self._texts[text.key] = text
            if text.parsed is not None:
                self._take_in(text)

    def release(self, text: FileText) -> None:
        """One record less has it."""
        text.users -= 1
        if text.users > 0:
            return
        if self._texts.get(text.key) is text:
            del self._texts[text.key]
        self._dead += 1
        if self._dead > len(self._awake) // 2:  # they go by themselves, once nobody lists them
            self._awake = deque([each for each in self._awake if each.users > 0])
            self.awake_bytes = sum(map(_awake_weight, self._awake))
            self._dead = 0

    def wake(self, text: FileText, robots: RobotsTxt) -> None:
        """It is awake from now on; `robots` is what it was parsed to."""
        if text.parsed is None:
            text.parsed = robots
            if text.users:
                self._take_in(text)

    def _take_in(self, text: FileText) -> None:
        """Keep it awake, and let others rest for it."""
        awake = self._awake
        awake.append(text)
        self.awake_bytes += _awake_weight(text)
        chances = _CHANCES
        while len(awake) > _MAX_AWAKE or (self.awake_bytes > self._most_bytes and len(awake) > 1):
            oldest = awake.popleft()
            if oldest.users and oldest.used and chances:
                chances -= 1
                oldest.used = False
                awake.append(oldest)
                continue
            self.awake_bytes -= _awake_weight(oldest)
            if oldest.users:
                oldest.rest()


def _awake_weight(text: FileText) -> int:
    return _AWAKE + _PER_OCTET * text.size


NO_TEXT: Final = RobotsTxt.parse(b"")
"""What an origin without a file says: nothing, so everything is welcome."""


class TwoClocks(Protocol):
    """What tells the time by both clocks: a `Clock`, or a `Moment`."""

    def monotonic(self) -> float:
        """Seconds of the clock that never jumps."""

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A moment as both clocks tell it, in seconds. It stands in for a clock that stands still."""

    now: float
    """Monotonic."""
    wall_time: float
    """Since 1970-01-01 UTC."""

    def monotonic(self) -> float:
        """`now`."""
        return self.now

    def wall(self) -> float:
        """`wall_time`."""
        return self.wall_time


class OriginAnswer(msgspec.Struct, frozen=True, gc=False):
    """One answer of an origin, or the lack of one."""

    outcome: Outcome
    status: int | None
    wall: float
    """Wall seconds when it came, or was last revalidated."""
    hops: tuple[str, ...] = ()
    took: float = 0.0
    etag: str | None = None
    last_modified: str | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a record reads at one moment."""

    verdict: Verdict | None
    """None: ask the policy of `robots`."""
    speaks: bool
    """A text speaks, or the lack of one does; else nothing may."""
    text: FileText | None = None
    """The one that speaks, if there is one."""
    state: State
    reason: Reason
    """Where the policy is asked: the reason to give if no rule matched."""
    status: int | None
    """HTTP status of the latest attempt."""
    fetched_at: float
    """Wall seconds when the text that speaks was fetched or revalidated."""
    expires_at: float
    """Wall seconds when what is known here ends."""
    retry_at: float | None
    """Wall seconds; with DEFER alone."""
    hops: tuple[str, ...] = ()
    took: float | None = None
    """Seconds that the last successful retrieval took."""

    @property
    def robots(self) -> RobotsTxt | None:
        """The text that speaks; the empty one where there is none; None where nothing may."""
        if not self.speaks:
            return None
        return NO_TEXT if self.text is None else self.text.robots


class _RecordHead(msgspec.Struct, gc=False, eq=False):
    origin: str
    config: FetchConfig


class _RecordInUse(_RecordHead, kw_only=True, gc=False, eq=False):
    """What each question reads, side by side in memory: among hundreds of thousands of origins no
    processor cache holds it."""

    asked: int = 0
    """Questions lately: whoever looks for what is asked about least sets it back."""
    seen: int = 0
    """The era of the question asked last; see `DecisionCache.often`."""
    ready: int = 0
    """For the gate's own agent the text alone decides, for as long as the record is `warm`, and
    that is the number of the operator's latest word (`Decider.forget`):
    guard and operator say nothing of the origin, and no hours are named."""
    rules: FlatRules | None = None
    """`text.ready`, without a look at the text; None: look there."""
    cached: dict[str, Any] | None = None
    """What the decision cache keeps of this record, by agent; lost as `ready` is."""
    warm: bool = False
    """It is in memory, and answers by the policy of its text alone; a timer ends that when its
    `fresh_until` has come."""

    def retire(self) -> None:
        """It is no longer warm: whoever still holds it has to look at the clock."""
        self.warm, self.ready, self.rules = False, 0, None
        self.drop_cached()

    def drop_cached(self) -> None:
        """Its decisions are not kept any more."""
        cached, self.cached = self.cached, None
        for origin in (cached or {}).values():
            origin.retire()


class Record(_RecordInUse, kw_only=True, gc=False, eq=False):
    """What is kept of one origin. Read it between awaits only: it may be replaced.

    The garbage collector never looks at it: nothing that it holds leads back to it.
    """

    current: OriginAnswer
    good: OriginAnswer | None = None
    text: FileText | None = None
    """The text of `good`, None where it has none."""
    fresh_until: float
    """Monotonic moment of soft expiry: until then nothing is asked."""
    expires: float
    """Monotonic: hard expiry of a good answer, else the moment of the next attempt."""
    unreachable_since: float | None = None
    """When the first failure in a row was, in seconds of `uptime`."""
    step: int = 0
    page_ok: float | None = None
    """Monotonic moment when a page was last reported 2xx or 3xx."""
    uptime: Callable[[float], float] = float
    """Turns a monotonic moment into seconds in which nothing was wrong with our own network."""
    voids: int = 0
    """See `RecordCache.void_refusals`: how often it was called before this was kept."""

    @property
    def robots(self) -> RobotsTxt | None:
        """The text that speaks until `fresh_until`; None while the file can't be had."""
        if not self.current.outcome.good:
            return None
        return NO_TEXT if self.text is None else self.text.robots

    @property
    def reachable(self) -> bool:
        """The latest attempt brought a file or a definite absence."""
        return self.current.outcome.good

    @property
    def policy_only(self) -> bool:
        """Until `fresh_until` the policy of `robots` alone gives the answer."""
        outcome = self.current.outcome
        return outcome.good and outcome.row.verdict is not Verdict.DENY

    def outlive(self, moment: float) -> None:
        """Let it answer until that monotonic moment at least, without being asked for anew."""
        self.fresh_until = max(self.fresh_until, moment)
        self.expires = max(self.expires, moment)

    def unreachable_for(self, now: float) -> float:
        """Seconds since the first failure in a row; 0 while the file can be had."""
        since = self.unreachable_since
        return 0.0 if since is None else max(0.0, self.uptime(now) - since)

    def holds(self, now: float) -> Holds:
        """What answers at that monotonic moment while the latest attempt is a failure."""
        if not self.current.outcome.row.lapses:
            return Holds.NOTHING
        return holds_meanwhile(
            self.config,
            unreachable_for=self.unreachable_for(now),
            has_last_good=self.good is not None,
            page_ok_ago=None if self.page_ok is None else now - self.page_ok,
        )

    def usable(self, now: float) -> bool:
        """It can answer at that monotonic moment without asking first."""
        if now < self.expires:
            return True
        return not self.reachable and self.holds(now) is not Holds.NOTHING

    def standing(self, clock: TwoClocks) -> Standing:
        """How the record reads now, or at that moment."""
        now = clock.monotonic()
        offset = clock.wall() - now
        if self.current.outcome.good:
            return self._speaks(self.current, offset, stale=False)
        holds = self.holds(now)
        if holds is Holds.LAST_GOOD and self.good is not None:
            return self._speaks(self.good, offset, stale=True)
        row = self.current.outcome.row
        welcome = holds is Holds.WELCOME
        retry_at = self.expires + offset
        return Standing(
            verdict=Verdict.ALLOW if welcome else row.verdict,
            speaks=welcome,
            state=State.UNREACHABLE,
            reason=Reason.LONG_UNREACHABLE if welcome else row.reason,
            status=self.current.status,
            fetched_at=self.current.wall,
            expires_at=retry_at,
            retry_at=None if welcome or row.verdict is not Verdict.DEFER else retry_at,
            hops=self.current.hops,
            took=None if self.good is None else self.good.took,
        )

    def _speaks(self, answer: OriginAnswer, offset: float, *, stale: bool) -> Standing:
        row = answer.outcome.row
        return Standing(
            verdict=row.verdict,
            speaks=True,
            text=self.text,
            state=State.STALE if stale else row.state,
            reason=row.reason,
            status=self.current.status,
            fetched_at=answer.wall,
            expires_at=self.expires + offset,
            retry_at=None,
            hops=answer.hops,
            took=answer.took,
        )

    def __repr__(self) -> str:
        return f"Record({self.origin!r}, {self.current.outcome.row.name}, step={self.step})"


_FORGOTTEN: Final = "forgotten"
_SKEW: Final = 60.0
"""Seconds that a stored moment may lie in the future before the clock is doubted."""


def tombstone(origin: str) -> OriginRecord:
    """What is stored of an origin of which nothing is to be known any more."""
    return OriginRecord(
        origin=origin,
        outcome=_FORGOTTEN,
        state=State.UNREACHABLE,
        fetched_at=0.0,
        soft_expires_at=0.0,
        expires_at=0.0,
    )


def to_stored(record: Record, clock: Clock) -> OriginRecord:
    """The record with its moments in wall seconds, as the clock stands now."""
    made = stamp(clock)
    offset = made.wall - clock.monotonic()
    current, good = record.current, record.good
    down_for = record.unreachable_for(clock.monotonic())
    body, body_hash = (None, None) if record.text is None else pack_body(record.text.body())
    return OriginRecord(
        origin=record.origin,
        outcome=current.outcome.row.name,
        state=current.outcome.row.state,
        status=current.status,
        fetched_at=current.wall,
        soft_expires_at=record.fresh_until + offset,
        expires_at=record.expires + offset,
        first_unreachable_at=None if record.reachable else made.wall - down_for,
        ladder_step=record.step,
        hops=current.hops,
        etag=None if good is None else good.etag,
        last_modified=None if good is None else good.last_modified,
        good_outcome=None if good is None else good.outcome.row.name,
        good_status=None if good is None else good.status,
        good_fetched_at=None if good is None else good.wall,
        good_hops=() if good is None else good.hops,
        body=body,
        body_hash=body_hash,
        took=None if good is None else good.took,
        last_page_ok_at=None if record.page_ok is None else record.page_ok + offset,
        made_at=made.wall,
        boot_id=made.boot_id,
        boot_at=made.boot_at,
    )


def from_stored(
    stored: OriginRecord,
    *,
    config: Config,
    clock: Clock,
    texts: FileTexts,
    uptime: Callable[[float], float],
    read: FileText | None = None,
) -> Record | None:
    """The record again; None for a tombstone. `read`: its text, if that was read already.

    Raises ValueError or zlib.error for one that is damaged: a text that is lost must not
    be taken for an empty one, which would be a welcome.
    """
    if stored.outcome == _FORGOTTEN:
        return None
    now = clock.monotonic()
    then, doubtful = _wall_of(stored, clock)
    soft, hard = stored.soft_expires_at - then, stored.expires_at - then
    current = OriginAnswer(
        Outcome.named(stored.outcome),
        stored.status,
        stored.fetched_at,
        stored.hops,
        stored.took or 0.0,
        stored.etag,
        stored.last_modified,
    )
    good = _good_of(stored, current)
    if current.outcome.good and doubtful:
        soft = hard = 0.0
    if current.outcome in OURS:
        # The guard's verdict, not the site's word: this process may have another guard.allow.
        soft = hard = 0.0
    cap = config.cache.max_ttl if current.outcome.good else DAY
    return Record(
        stored.origin,
        config.fetch,
        current=current,
        good=good,
        text=_text_of(stored, good, texts, read),
        fresh_until=now + min(soft, cap),
        expires=now + min(hard, cap),
        unreachable_since=_ago(stored.first_unreachable_at, then, uptime(now)),
        step=stored.ladder_step,
        page_ok=_ago(stored.last_page_ok_at, then, now),
        uptime=uptime,
    )


def _wall_of(stored: OriginRecord, clock: Clock) -> tuple[float, bool]:
    """What a wall clock that nobody had set since would show now; and whether that is a guess.

    A guess it is where the wall clock decides and stands before the record: it was set back.
    How old the record is nobody knows then, so a good one has expired, and a pause on the
    ladder begins anew.
    """
    wall = clock.wall()
    if stored.made_at is None:
        doubtful = stored.fetched_at > wall + _SKEW
        return (stored.fetched_at if doubtful else wall), doubtful
    made = Stamp(stored.made_at, stored.boot_id, stored.boot_at)
    doubtful = not made.counted(clock) and made.wall > wall + _SKEW
    return made.wall + made.age(clock), doubtful


def _good_of(stored: OriginRecord, current: OriginAnswer) -> OriginAnswer | None:
    if current.outcome.good:
        return current
    if stored.good_outcome is None or stored.good_fetched_at is None:
        return None
    outcome = Outcome.named(stored.good_outcome)
    if not outcome.good:
        return None
    return OriginAnswer(
        outcome,
        stored.good_status,
        stored.good_fetched_at,
        stored.good_hops,
        stored.took or 0.0,
        stored.etag,
        stored.last_modified,
    )


def _text_of(
    stored: OriginRecord, good: OriginAnswer | None, texts: FileTexts, read: FileText | None
) -> FileText | None:
    if good is None or not good.outcome.has_text:
        return None
    if stored.body is None:
        if good.outcome is Outcome.EMPTY:  # 204: there was no body
            return None
        raise ValueError("the text is missing")
    return read or texts.of(unpack_body(stored.body))


def _ago(then: float | None, wall: float, now: float) -> float | None:
    """A wall moment as a monotonic one; a moment in the future counts as now."""
    return None if then is None else now - max(0.0, wall - then)
