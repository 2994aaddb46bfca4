"""Where records stand: hot ones ready to answer, cold ones packed small. Bounded by bytes.

A record asked about is hot. Beyond `cache.hot_records`, or two thirds of
`cache.max_bytes`, the one least recently asked for goes cold: its moments and its text as
one string of octets. Cold ones are dropped, least recently asked first, beyond the rest of
the bytes. One that can't be had now is a promise not to ask again too soon, so it is
dropped only where a storage has it. Without a storage such promises have `max_bytes` for
themselves, which is a million dead origins; beyond that the oldest is given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import cachetools
import msgspec

from gatekeeper.config import Config
from gatekeeper.fetching.outcomes import OURS, Outcome
from gatekeeper.fetching.records import Answer, Record
from gatekeeper.fetching.texts import Text, Texts, inflate

__all__ = ["Shelf"]

_OUTCOMES: Final = tuple(Outcome)
_CODES: Final = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_ENTRY: Final = 160
"""Bytes of bookkeeping that a cold record costs: its key, its place in a dictionary."""
_RECORD: Final = 1_200
_TEXT: Final = 1_800
_PER_OCTET: Final = 3
"""A hot record is counted as `_RECORD`, and with a text as `_TEXT` and so many times its
octets more: parsed, packed, and compiled for an agent. Measured over real files."""
_SHARED_FROM: Final = 512
"""Octets of packed text from which cold records share identical ones. Below, a copy inside
the record costs less than what it takes to keep count of a shared one."""


class _PackedAnswer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    outcome: int
    status: int | None
    wall: float
    hops: tuple[str, ...]
    took: int
    etag: str | None
    last_modified: str | None


class _Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record as it is written down; outcomes as their place in the table.

    Monotonic moments and durations are whole milliseconds: half the octets of a float.
    """

    outcome: int
    status: int | None
    wall: float
    took: int
    fresh_until: int
    expires: int
    text: bytes | None
    hops: tuple[str, ...] = ()
    etag: str | None = None
    last_modified: str | None = None
    unreachable_since: int | None = None
    step: int = 0
    page_ok: int | None = None
    good: _PackedAnswer | None = None
    """None: the current answer is the good one, or there is none."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Packed)

_Cold = bytes | tuple[bytes, bytes]
"""A packed record with its text inside, or beside it where several share that text."""


class _Hot(cachetools.LRUCache[str, Record]):
    """The hot records; what leaves for want of room is handed on, not lost."""

    def __init__(self, maxsize: int, on_leave: Callable[[Record], None]) -> None:
        super().__init__(maxsize, getsizeof=lambda record: min(_weight(record), maxsize))
        self._on_leave = on_leave

    def popitem(self) -> tuple[str, Record]:
        origin, record = super().popitem()
        self._on_leave(record)
        return origin, record


class Shelf:
    """Every record in memory. `warm` is the part that the gate reads by itself."""

    def __init__(
        self,
        config: Config,
        *,
        stored: bool,
        uptime: Callable[[float], float] = float,
        on_evict: Callable[[str], object] | None = None,
        warm: dict[str, Record] | None = None,
        on_warm: Callable[[float], object] | None = None,
    ) -> None:
        """`on_warm` is told until when each record that is put into `warm` is fresh."""
        self.warm: dict[str, Record] = {} if warm is None else warm
        self._on_warm = on_warm
        self.texts = Texts(config)
        self.evicted = 0
        """Cold records dropped so far."""
        self._config = config
        self._stored = stored
        self._uptime = uptime
        self._on_evict = on_evict
        self._hot = _Hot(max(1, config.cache.max_bytes * 2 // 3), self._cool)
        self._cold: dict[str, _Cold] = {}
        """In the order in which they went cold, which is the order of last use: asking
        about one takes it out."""
        self._promises: dict[str, _Cold] = {}
        self._shared: dict[bytes, tuple[bytes, int]] = {}
        """Packed text -> (that very object, how many cold records hold it)."""
        self._void_until = float("-inf")
        """Refusals of the guard until then (wall seconds) are as if they were not known."""
        self._cold_bytes = 0
        self._promise_bytes = 0

    def __len__(self) -> int:
        return len(self._hot) + len(self._cold) + len(self._promises)

    @property
    def hot(self) -> int:
        """Records ready to answer."""
        return len(self._hot)

    @property
    def bytes(self) -> int:
        """An estimate of what the records cost."""
        return int(self._hot.currsize) + self._cold_bytes + self._promise_bytes

    def get(self, origin: str) -> Record | None:
        """The record, made hot; None if there is none."""
        record = self._hot.get(origin)
        if record is None and (origin in self._cold or origin in self._promises):
            record = self._thaw(origin)
            if record is not None:
                self.put(record)
        return record

    def put(self, record: Record) -> None:
        """Keep it, in place of what was there."""
        origin = record.origin
        self._take_cold(origin)
        if self.warm.get(origin) is not record:
            self._chill(origin)
        if record.policy_only:
            self.warm[origin] = record
            if self._on_warm is not None:
                self._on_warm(record.fresh_until)
        self._hot[origin] = record
        while len(self._hot) > self._config.cache.hot_records:
            self._hot.popitem()

    def drop(self, origin: str) -> None:
        """Forget it."""
        self._chill(origin)
        self._hot.pop(origin, None)
        self._take_cold(origin)

    def void_refusals(self, wall: float) -> None:
        """Forget every file that our guard refused to fetch until then: it may think otherwise."""
        self._void_until = wall
        for origin, record in list(self._hot.items()):
            if record.current.outcome in OURS:
                self.drop(origin)

    def _chill(self, origin: str) -> None:
        record = self.warm.pop(origin, None)
        if record is not None:
            record.retire()

    def _cool(self, record: Record) -> None:
        """A record leaves the hot ones: nobody but the cold ones has it from here on."""
        self._chill(record.origin)
        packed = self._pack(record)
        if record.reachable or self._stored:
            self._cold[record.origin] = packed
            self._cold_bytes += _size(packed)
        else:
            self._promises[record.origin] = packed
            self._promise_bytes += _size(packed)
        if self._on_evict is not None:
            self._on_evict(record.origin)
        bound = self._config.cache.max_bytes
        while self._cold and self._cold_bytes > bound // 3:
            self._drop_oldest(self._cold)
        while self._promises and self._promise_bytes > bound:
            self._drop_oldest(self._promises)

    def _drop_oldest(self, tier: dict[str, _Cold]) -> None:
        # Some at once: finding the first key of a dictionary passes over all that were
        # taken out before it, which one by one would cost the square.
        for origin in list(itertools.islice(tier, len(tier) // 64 + 1)):
            self._take_cold(origin)
            self.evicted += 1

    def _take_cold(self, origin: str) -> _Packed | None:
        packed = self._cold.pop(origin, None)
        if packed is not None:
            self._cold_bytes -= _size(packed)
        elif (packed := self._promises.pop(origin, None)) is not None:
            self._promise_bytes -= _size(packed)
        else:
            return None
        if isinstance(packed, bytes):
            return _DECODER.decode(packed)
        head, text = packed
        held, count = self._shared[text]
        if count > 1:
            self._shared[text] = (held, count - 1)
        else:
            del self._shared[text]
            self._cold_bytes -= len(text)
        return msgspec.structs.replace(_DECODER.decode(head), text=text)

    def _pack(self, record: Record) -> _Cold:
        text = None if record.text is None else record.text.packed()
        if text is None or len(text) < _SHARED_FROM:
            return _encoded(_packed(record, text))
        held, count = self._shared.get(text, (text, 0))
        if not count:
            self._cold_bytes += len(text)
        self._shared[held] = (held, count + 1)
        return _encoded(_packed(record, None)), held

    def _thaw(self, origin: str) -> Record | None:
        packed = self._take_cold(origin)
        if packed is None:
            return None
        if packed.wall <= self._void_until and _OUTCOMES[packed.outcome] in OURS:
            return None
        text: Text | None = None
        if packed.text is not None:
            text = self.texts.of(inflate(packed.text), packed.text)
        current = Answer(
            _OUTCOMES[packed.outcome],
            packed.status,
            packed.wall,
            packed.hops,
            packed.took / 1000,
            packed.etag,
            packed.last_modified,
        )
        good: Answer | None = current if current.outcome.good else None
        if packed.good is not None:
            old = packed.good
            good = Answer(
                _OUTCOMES[old.outcome],
                old.status,
                old.wall,
                old.hops,
                old.took / 1000,
                old.etag,
                old.last_modified,
            )
        return Record(
            origin,
            self._config,
            current=current,
            good=good,
            text=text,
            fresh_until=packed.fresh_until / 1000,
            expires=packed.expires / 1000,
            unreachable_since=_seconds(packed.unreachable_since),
            step=packed.step,
            page_ok=_seconds(packed.page_ok),
            uptime=self._uptime,
        )


def _packed(record: Record, text: bytes | None) -> _Packed:
    current, good = record.current, record.good
    return _Packed(
        outcome=_CODES[current.outcome],
        status=current.status,
        wall=current.wall,
        took=round(current.took * 1000),
        fresh_until=int(record.fresh_until * 1000),
        expires=int(record.expires * 1000),
        text=text,
        hops=current.hops,
        etag=current.etag,
        last_modified=current.last_modified,
        unreachable_since=_milliseconds(record.unreachable_since),
        step=record.step,
        page_ok=_milliseconds(record.page_ok),
        good=None if good is None or good is current else _packed_answer(good),
    )


def _encoded(packed: _Packed) -> bytes:
    # The encoder's own result keeps the buffer it grew in, half as large again as needed.
    return bytes(memoryview(_ENCODER.encode(packed)))


def _packed_answer(answer: Answer) -> _PackedAnswer:
    return _PackedAnswer(
        _CODES[answer.outcome],
        answer.status,
        answer.wall,
        answer.hops,
        round(answer.took * 1000),
        answer.etag,
        answer.last_modified,
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _weight(record: Record) -> int:
    return _RECORD + (0 if record.text is None else _TEXT + _PER_OCTET * record.text.size)


def _size(packed: _Cold) -> int:
    """Bytes of a cold record, a shared text not counted."""
    return _ENTRY + len(packed if isinstance(packed, bytes) else packed[0])
