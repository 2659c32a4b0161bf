"""Bloom filter of seen record ids: "never seen", for certain, or "maybe" (MillWheel §6.1.1).

Nearly every record id is new, and a Bloom filter proves it without reading the
store. The filter is soft state: it is never stored, and rebuilt from the
``record_ids`` of the row files. Reading the row files decides a "maybe".

The page index of a row file has a filter of the file's keys, which is stored (`BlockFilter.to_bytes`):
fingerprints and bit patterns are part of the format.

Whole columns are hashed and tested at once. A block is 64 bytes, four pairs of
words; an id sets three bits in one word of each pair, and so touches one cache
line instead of twenty. For the same rate of false positives such blocks need more bits
than scattered bits do (`_SPREAD`). pybloom-live computes the scattered size and holds
the bits.

How long record ids are kept: for as long as a sender may repeat the record (MillWheel §6.1.1).

An id goes when the slack has passed twice: on the wall clock since the record first arrived, and in event time
since the record's own time. Event time alone forgets too early: one record from a clock that is hours fast moves the
low watermark past all honest ones, and a late record is behind it on arrival. The wall clock alone forgets
too early when the pipeline stands still while its senders wait.

Arrivals are stored in whole minutes, rounded up, so that a file has few distinct ones, which compress to a
byte each at most. An id without an arrival counts as having arrived when it is first compacted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pybloom_live import BloomFilter

from millpond.statestore.check import check
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.fingerprint import Fingerprints, fingerprints, mix
from millpond.statestore.rows.row import RECORD_ID_TYPE, TIMESTAMP
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros

Ids: TypeAlias = pa.Array | pa.ChunkedArray | Fingerprints
"""A column of ids, or their `fingerprints` where the caller has computed them."""

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]

_GROWTH: Final = 4
_ERROR_RATE_MIN: Final = 1e-8
_PAIRS: Final = 4
_BLOCK_BITS: Final = 2 * 64 * _PAIRS
# Multiple of the scattered size that gives an error rate of 10 to the minus key; a test derives it.
_SPREAD: Final = {2: 1.2, 3: 1.2, 4: 1.2, 5: 1.3, 6: 1.5, 7: 1.75, 8: 2.15}


class RecordIdFilter:
    """A growing set of ids without false negatives and with few false positives.

    Memory is about 8 bytes per id at the default rate, allocated as ids arrive:
    filters of growing size and falling error rate, whose rates sum up to
    ``error_rate``. Past ``capacity_max`` ids the size stays and the rate rises,
    which costs reads but never correctness.

    Args:
        capacity: number of ids that the first filter is sized for.
        error_rate: greatest share of unseen ids that are reported as "maybe", from 1e-6 to 1e-2.
        capacity_max: number of ids after which no memory is added.

    Example:
        >>> seen = RecordIdFilter()
        >>> seen.add(pa.array([b"a", b"b"]))
        >>> seen.might_contain(pa.array([b"b", b"c"])).tolist()
        [True, False]
    """

    def __init__(
        self, capacity: int = 16_384, error_rate: float = 1e-6, *, capacity_max: int = 16_777_216
    ) -> None:
        if not 1e-6 <= error_rate <= 1e-2:
            raise InvalidError("the error rate must lie between 1e-6 and 1e-2", error_rate=error_rate)
        if capacity <= 0 or capacity_max <= 0:
            raise InvalidError("the capacity must be positive", capacity=capacity, capacity_max=capacity_max)
        self._first_capacity = capacity
        self._capacity_max = capacity_max
        self._error_rate = error_rate
        self._filters: list[BlockFilter] = []

    @property
    def count(self) -> int:
        """How many ids have been added; an id that was added twice counts twice."""
        return sum(part.count for part in self._filters)

    @property
    def capacity(self) -> int:
        """How many ids the allocated memory is sized for."""
        return sum(part.capacity for part in self._filters)

    @property
    def size_bytes(self) -> int:
        """Allocated memory in bytes."""
        return sum(part.size_bytes for part in self._filters)

    def add(self, ids: Ids) -> None:
        """Add the ids to the set."""
        rest = _fingerprints_of(ids)
        while len(rest):
            part = self._part_with_room(len(rest))
            taken = part.room if self.capacity < self._capacity_max else len(rest)
            part.add(rest[:taken])
            rest = rest[taken:]

    def might_contain(self, ids: Ids) -> _Mask:
        """One flag per id: false if it has never been added, true if it may have been."""
        wanted = _fingerprints_of(ids)
        hits = np.zeros(len(wanted), dtype=np.bool_)
        for part in reversed(self._filters):
            (unknown,) = np.nonzero(~hits)
            hits[unknown] = part.might_contain(wanted[unknown])
        return hits

    def _part_with_room(self, ids: int) -> BlockFilter:
        if not self._filters:
            self._grow(max(self._first_capacity, ids))
        elif self._filters[-1].room <= 0 and self.capacity < self._capacity_max:
            self._grow(max(self._filters[-1].capacity * _GROWTH, ids))
        return self._filters[-1]

    def _grow(self, capacity: int) -> None:
        left = self._capacity_max - self.capacity
        error_rate = self._error_rate / 2 ** (len(self._filters) + 1)
        self._filters.append(BlockFilter.empty(min(capacity, left), max(error_rate, _ERROR_RATE_MIN)))


class BlockFilter:
    """One Bloom filter of fixed size.

    Args:
        words: its bits, in whole blocks, which it keeps.
        capacity: number of ids that it is sized for; of one that is only asked, 0.

    Example:
        >>> keys = BlockFilter.empty(100, 0.01)
        >>> keys.add(fingerprints(pa.array(["a", "b"])))
        >>> BlockFilter.from_bytes(keys.to_bytes()).might_contain(fingerprints(pa.array(["b", "c"]))).tolist()
        [True, False]
    """

    def __init__(self, words: npt.NDArray[np.uint64], capacity: int = 0) -> None:
        self.capacity: Final[int] = capacity
        self.count: int = 0
        self._words = words
        self._blocks = np.uint64(len(words) // (2 * _PAIRS))

    @staticmethod
    def empty(capacity: int, error_rate: float) -> BlockFilter:
        """A filter for so many ids.

        Args:
            capacity: number of ids.
            error_rate: share of unseen ids that are reported as "maybe" when it is full, from 1e-8 to 1e-2.
        """
        # The library allocates the bits; blocks use all that make a whole one.
        bits = BloomFilter(_scattered_capacity(capacity, error_rate), error_rate)
        octets = bits.num_bits // _BLOCK_BITS * _BLOCK_BITS // 8
        return BlockFilter(np.frombuffer(bits.bitarray, np.uint8, octets).view(np.uint64), capacity)

    def to_bytes(self) -> bytes:
        """The bits, for `from_bytes`: little-endian words."""
        return self._words.astype("<u8", copy=False).tobytes()

    @staticmethod
    def from_bytes(bits: bytes) -> BlockFilter:
        """The filter of `to_bytes`, to be asked and not added to.

        Raises:
            ValueError: the bits are no whole blocks.
        """
        if not bits or len(bits) * 8 % _BLOCK_BITS:
            raise ValueError(f"{len(bits)} bytes are no filter")
        return BlockFilter(np.frombuffer(bits, "<u8").astype(np.uint64, copy=False))

    @property
    def room(self) -> int:
        """How many more ids it is sized for."""
        return self.capacity - self.count

    @property
    def size_bytes(self) -> int:
        """Memory in bytes."""
        return int(self._words.nbytes)

    def add(self, ids: Fingerprints) -> None:
        """Add ids by their fingerprints."""
        blocks, patterns = self._block_of(ids), _patterns_of(ids)
        for pair in range(_PAIRS):
            np.bitwise_or.at(self._words, _word_of(ids, blocks, pair), _PATTERNS[patterns[:, pair]])
        self.count += len(ids)

    def might_contain(self, ids: Fingerprints) -> _Mask:
        """One flag per fingerprint: false if it has never been added, true if it may have been."""
        result = np.zeros(len(ids), dtype=np.bool_)
        blocks, patterns = self._block_of(ids), _patterns_of(ids)
        left: _Index | slice = slice(None)
        for pair in range(_PAIRS):
            # Most unseen ids miss in their first word, so the other words are rarely read.
            bits = _PATTERNS[patterns[left, pair]]
            hits = self._words[_word_of(ids[left], blocks[left], pair)] & bits == bits
            left = np.flatnonzero(hits) if isinstance(left, slice) else left[hits]
        result[left] = True
        return result

    def _block_of(self, ids: Fingerprints) -> Fingerprints:
        """The first word of each id's block, chosen by the high half of its fingerprint."""
        return (((ids >> np.uint64(32)) * self._blocks) >> np.uint64(32)) * np.uint64(2 * _PAIRS)


def _word_of(ids: Fingerprints, blocks: Fingerprints, pair: int) -> _Index:
    """The word of the pair that each id uses, chosen by a low bit of its fingerprint."""
    half = (ids >> np.uint64(pair)) & np.uint64(1)
    return (blocks + (half + np.uint64(2 * pair))).view(np.int64)


def _patterns_of(ids: Fingerprints) -> npt.NDArray[np.uint16]:
    """For each id the indices of its four bit patterns, from a second hash."""
    return mix(ids ^ _SECOND).view(np.uint16).reshape(-1, _PAIRS)


def _fingerprints_of(ids: Ids) -> Fingerprints:
    if not isinstance(ids, np.ndarray):
        return fingerprints(ids)
    check(ids.dtype == np.uint64, "fingerprints are 64-bit", dtype=ids.dtype)
    return ids


def _scattered_capacity(capacity: int, error_rate: float) -> int:
    spread = float(np.interp(-math.log10(error_rate), list(_SPREAD), list(_SPREAD.values())))
    return max(math.ceil(capacity * spread), _BLOCK_BITS)


def _patterns() -> npt.NDArray[np.uint64]:
    """A table of words with three bits set."""
    drawn = mix(np.arange(1, 65_537, dtype=np.uint64))
    first, second, third = (drawn >> np.uint64(shift) for shift in (0, 6, 12))
    one, low_bits = np.uint64(1), np.uint64(63)
    words: npt.NDArray[np.uint64] = (
        (one << (first & low_bits)) | (one << (second & low_bits)) | (one << (third & low_bits))
    )
    return words


_SECOND: Final = np.uint64(0xA0761D6478BD642F)
_PATTERNS: Final = _patterns()


ID_SLACK_US: Final = 3 * 3_600_000_000
"""How long a sender may repeat a record, unless its injector says otherwise: three hours."""

_MINUTE_US: Final = 60_000_000


def arrival_us(wall_time: WallTimeMicros) -> WallTimeMicros:
    """The arrival that is stored for ids that are consumed at ``wall_time``: never earlier, and less than a minute later.

    Example:
        >>> arrival_us(WallTimeMicros(60_000_001))
        120000000
    """
    return WallTimeMicros(-(-wall_time // _MINUTE_US) * _MINUTE_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRetention:
    """The record ids that a compaction keeps: those that satisfy either bound.

    Attributes:
        at_from: ids of records of this event time and later ones.
        arrived_from: ids of records that arrived at this wall time or later.
        unknown_arrived_at: the arrival of ids that have none.
    """

    at_from: EventTimeMicros
    arrived_from: WallTimeMicros
    unknown_arrived_at: WallTimeMicros

    @staticmethod
    def of(watermark: EventTimeMicros, wall_time: WallTimeMicros, slack_us: int) -> IdRetention:
        """What to keep at a low watermark and a wall time.

        Args:
            watermark: the computation's input low watermark. Before the first and after the last one nothing tells how
                old a repetition may be, so everything is kept.
            wall_time: now.
            slack_us: how long a sender may repeat a record.
        """
        is_known = watermark not in {TIME_MIN_US, TIME_MAX_US}
        return IdRetention(
            at_from=EventTimeMicros(max(watermark - slack_us, TIME_MIN_US)) if is_known else TIME_MIN_US,
            arrived_from=WallTimeMicros(max(wall_time - slack_us, TIME_MIN_US)),
            unknown_arrived_at=arrival_us(wall_time),
        )

    def keeps(self, ids: pa.StructArray) -> npt.NDArray[np.bool_]:
        """Which of the ids, of `RECORD_ID_TYPE`, are kept."""
        kept: npt.NDArray[np.bool_] = (_micros(ids, "at") >= self.at_from) | (
            _micros(ids, "arrived_at") >= self.arrived_from
        )
        return kept

    def with_arrivals(self, ids: pa.StructArray) -> pa.StructArray:
        """The same ids; those without an arrival have arrived now."""
        arrived_at = ids.field("arrived_at")
        if not arrived_at.null_count:
            return ids
        stamped = pc.fill_null(arrived_at, pa.scalar(self.unknown_arrived_at).cast(TIMESTAMP))
        return pa.StructArray.from_arrays(
            [ids.field("id"), ids.field("at"), stamped], fields=list(RECORD_ID_TYPE)
        )


def _micros(ids: pa.StructArray, name: str) -> npt.NDArray[np.int64]:
    # What is not known is taken for recent.
    micros = ids.field(name).view(pa.int64())
    known = pc.fill_null(micros, TIME_MAX_US) if micros.null_count else micros
    times: npt.NDArray[np.int64] = known.to_numpy()
    return times
