"""Record ids: their fingerprints, a filter of seen ids, and how long a store keeps them (MillWheel §6.1.1)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pybloom_live import BloomFilter

from millpond.statestore.errors import InvalidError, check
from millpond.statestore.rows.row import RECORD_ID_TYPE, TIMESTAMP
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros

# One 64-bit fingerprint per id.
Fingerprints: TypeAlias = npt.NDArray[np.uint64]

_Lengths: TypeAlias = npt.NDArray[np.int64]

_WORD_BYTES: Final = 8
_LONG_BYTES: Final = 256
_SEED: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)
# The n-th mask keeps the first n bytes of a little-endian word.
_TAIL_MASKS: Final = np.array([(1 << 8 * kept) - 1 for kept in range(9)], dtype=np.uint64)


def fingerprints(ids: pa.Array | pa.ChunkedArray) -> Fingerprints:
    """Return the 64-bit fingerprints of a column of ids, binary or text of any Arrow layout, none of them null.

    A fingerprint depends only on the id's bytes: it is the same in every process and on every machine. Among n different
    ids a collision has a probability of about n²/2⁶⁵, so equal fingerprints are a reason to compare ids, never a proof.
    """
    if ids.null_count:
        raise InvalidError("a record id is null", nulls=ids.null_count)
    if isinstance(ids, pa.ChunkedArray):
        chunks = [_fingerprints(chunk) for chunk in ids.chunks]
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint64)
    return _fingerprints(ids)


def mix(values: Fingerprints) -> Fingerprints:
    """Spread each value over all 64 bits, one to one (Murmur's finaliser)."""
    mixed = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


def _fingerprints(ids: pa.Array) -> Fingerprints:
    if not (pa.types.is_binary(ids.type) or pa.types.is_string(ids.type)):
        ids = _as_binary(ids)
    _, offset_buffer, data_buffer = ids.buffers()
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    offsets = np.frombuffer(offset_buffer, np.int32)[ids.offset : ids.offset + len(ids) + 1].astype(np.int64)
    lengths, starts = np.diff(offsets), offsets[:-1]
    hashes: Fingerprints = _SEED + lengths.astype(np.uint64) * _MULTIPLIER
    if not len(lengths):
        return hashes
    longest = int(lengths.max())
    if longest == int(lengths.min()) <= _LONG_BYTES:
        words, begin = -(-longest // _WORD_BYTES), int(starts[0])
        padded = np.zeros((len(hashes), words * _WORD_BYTES), np.uint8)
        padded[:, :longest] = data[begin : begin + longest * len(hashes)].reshape(len(hashes), longest)
        columns = padded.view("<u8")
        for word in range(words):
            hashes[:] = _step(hashes, columns[:, word])
    else:
        _absorb_any(hashes, data, starts, lengths)
    return mix(hashes)


def _as_binary(ids: pa.Array) -> pa.BinaryArray:
    if isinstance(ids, pa.DictionaryArray):
        ids = ids.dictionary_decode()
    if pa.types.is_integer(ids.type) or pa.types.is_floating(ids.type):
        raise InvalidError("record ids are bytes or text", type=ids.type)
    try:
        return pc.cast(ids, pa.binary())
    except pa.ArrowException as error:
        raise InvalidError("record ids are bytes or text", type=ids.type) from error


def _absorb_any(
    hashes: Fingerprints, data: npt.NDArray[np.uint8], starts: _Lengths, lengths: _Lengths
) -> None:
    """Hash ids of different lengths: the n-th word of every id that is long enough, then the next word."""
    # A word may start at any byte; words beyond the last id read zeros.
    readable = np.concatenate([data, np.zeros(_WORD_BYTES, np.uint8)])
    words = np.ndarray(len(data) + 1, "<u8", readable.data, strides=(1,))
    at_once = lengths <= _LONG_BYTES
    for position in range(0, min(int(lengths.max()), _LONG_BYTES), _WORD_BYTES):
        (active,) = np.nonzero(at_once & (lengths > position))
        kept = np.minimum(lengths[active] - position, _WORD_BYTES)
        hashes[active] = _step(hashes[active], words[starts[active] + position] & _TAIL_MASKS[kept])
    for row in np.flatnonzero(~at_once):
        content = data[starts[row] : starts[row] + lengths[row]].tobytes()
        hashes[row] = int.from_bytes(hashlib.blake2b(content, digest_size=_WORD_BYTES).digest(), "little")


def _step(hashes: Fingerprints, words: Fingerprints) -> Fingerprints:
    mixed = (hashes ^ words) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(32))


Ids: TypeAlias = pa.Array | pa.ChunkedArray | Fingerprints

_Mask: TypeAlias = npt.NDArray[np.bool_]
_Index: TypeAlias = npt.NDArray[np.int64]

_GROWTH: Final = 4
_ERROR_RATE_MIN: Final = 1e-8
_PAIRS: Final = 4
_ADDED_AT_ONCE: Final = 4_096
_BLOCK_BITS: Final = 2 * 64 * _PAIRS
# Multiple of the scattered size that gives an error rate of 10 to the minus key; a test derives it.
_SPREAD: Final = {2: 1.2, 3: 1.2, 4: 1.2, 5: 1.3, 6: 1.5, 7: 1.75, 8: 2.15}


class RecordIdFilter:
    """A growing set of ids without false negatives and with few false positives.

    Nearly every record id is new, and the filter proves that without reading the store (MillWheel §6.1.1). It is soft
    state, rebuilt from the ``record_ids`` of the row files, which also decide each "maybe".

    Memory is about 8 bytes per id at the default rate, allocated as ids arrive: filters of growing size and falling
    error rate, whose rates add up to ``error_rate`` (from 1e-6 to 1e-2). Past ``capacity_max`` ids the size stays and
    the rate rises, which costs reads but never correctness.
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
        return sum(part.count for part in self._filters)

    @property
    def capacity(self) -> int:
        """The number of ids that the allocated memory is sized for."""
        return sum(part.capacity for part in self._filters)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self._filters)

    def add(self, ids: Ids) -> None:
        rest = _fingerprints_of(ids)
        while len(rest):
            last = self._filters[-1] if self._filters else None
            is_growing = self.capacity < self._capacity_max
            if last is None or (last.room <= 0 and is_growing):
                wanted = self._first_capacity if last is None else last.capacity * _GROWTH
                size = min(max(wanted, len(rest)), self._capacity_max - self.capacity)
                error_rate = max(self._error_rate / 2 ** (len(self._filters) + 1), _ERROR_RATE_MIN)
                self._filters.append(BlockFilter.empty(size, error_rate))
            part = self._filters[-1]
            taken = part.room if self.capacity < self._capacity_max else len(rest)
            part.add(rest[:taken])
            rest = rest[taken:]

    def might_contain(self, ids: Ids) -> _Mask:
        """Return one flag per id: false if it was never added, true if it may have been."""
        wanted = _fingerprints_of(ids)
        hits = np.zeros(len(wanted), dtype=np.bool_)
        for part in reversed(self._filters):
            (unknown,) = np.nonzero(~hits)
            hits[unknown] = part.might_contain(wanted[unknown])
        return hits


class BlockFilter:
    """One Bloom filter of fixed size.

    Whole columns are hashed and tested at once. A block is 64 bytes, four pairs of words; an id sets three bits in one
    word of each pair, and so touches one cache line instead of twenty. For the same error rate such blocks need more
    bits than scattered bits do (`_SPREAD`). pybloom-live computes the scattered size and holds the bits.

    Page indexes store filters of keys, so fingerprints and bit patterns are part of the format.
    """

    def __init__(self, words: npt.NDArray[np.uint64], capacity: int = 0) -> None:
        self.capacity: Final[int] = capacity
        self.count: int = 0
        self._words = words
        self._blocks = np.uint64(len(words) // (2 * _PAIRS))

    @staticmethod
    def empty(capacity: int, error_rate: float) -> BlockFilter:
        """Return a filter for ``capacity`` ids; when full, it has ``error_rate`` (1e-8 to 1e-2) false positives."""
        # The library allocates the bits; blocks use as many as make whole ones.
        spread = float(np.interp(-math.log10(error_rate), list(_SPREAD), list(_SPREAD.values())))
        bits = BloomFilter(max(math.ceil(capacity * spread), _BLOCK_BITS), error_rate)
        octets = bits.num_bits // _BLOCK_BITS * _BLOCK_BITS // 8
        return BlockFilter(np.frombuffer(bits.bitarray, np.uint8, octets).view(np.uint64), capacity)

    def to_bytes(self) -> bytes:
        return self._words.astype("<u8", copy=False).tobytes()

    @staticmethod
    def from_bytes(bits: bytes) -> BlockFilter:
        """Return the filter of `to_bytes`, to which nothing may be added."""
        if not bits or len(bits) * 8 % _BLOCK_BITS:
            raise ValueError(f"{len(bits)} bytes are no filter")
        return BlockFilter(np.frombuffer(bits, "<u8").astype(np.uint64, copy=False))

    @property
    def room(self) -> int:
        return self.capacity - self.count

    @property
    def size_bytes(self) -> int:
        return int(self._words.nbytes)

    def add(self, ids: Fingerprints) -> None:
        # In parts, because an id's cache line must still be there for its second pair: twice as fast in large filters.
        for begin in range(0, len(ids), _ADDED_AT_ONCE):
            part = ids[begin : begin + _ADDED_AT_ONCE]
            blocks, patterns = self._block_of(part), _patterns_of(part)
            for pair in range(_PAIRS):
                np.bitwise_or.at(self._words, _word_of(part, blocks, pair), _PATTERNS[patterns[:, pair]])
        self.count += len(ids)

    def might_contain(self, ids: Fingerprints) -> _Mask:
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
        return (((ids >> np.uint64(32)) * self._blocks) >> np.uint64(32)) * np.uint64(2 * _PAIRS)


def _word_of(ids: Fingerprints, blocks: Fingerprints, pair: int) -> _Index:
    half = (ids >> np.uint64(pair)) & np.uint64(1)
    return (blocks + (half + np.uint64(2 * pair))).view(np.int64)


def _patterns_of(ids: Fingerprints) -> npt.NDArray[np.uint16]:
    return mix(ids ^ _SECOND).view(np.uint16).reshape(-1, _PAIRS)


def _fingerprints_of(ids: Ids) -> Fingerprints:
    if not isinstance(ids, np.ndarray):
        return fingerprints(ids)
    check(ids.dtype == np.uint64, "fingerprints are 64-bit", dtype=ids.dtype)
    return ids


_SECOND: Final = np.uint64(0xA0761D6478BD642F)
_DRAWN: Final = mix(np.arange(1, 65_537, dtype=np.uint64))
# Three of the 64 bits of a word each.
_PATTERNS: Final[npt.NDArray[np.uint64]] = np.bitwise_or.reduce(
    [np.uint64(1) << ((_DRAWN >> np.uint64(shift)) & np.uint64(63)) for shift in (0, 6, 12)]
)


# The default time within which a sender may repeat a record: three hours.
ID_SLACK_US: Final = 3 * 3_600_000_000

_MINUTE_US: Final = 60_000_000


def arrival_us(wall_time: WallTimeMicros) -> WallTimeMicros:
    """Round an arrival up to the minute: few distinct arrivals compress to a byte each at most."""
    return WallTimeMicros(-(-wall_time // _MINUTE_US) * _MINUTE_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRetention:
    """The record ids that a compaction keeps: an id that satisfies either bound stays.

    An id goes when the slack has passed twice: on the wall clock since the record first arrived, and in event time since
    the record's own time. Event time alone forgets too early: one record from a clock that is hours fast moves the low
    watermark past all honest ones, and a late record is behind it on arrival. The wall clock alone forgets too early
    when the pipeline stands still while its senders wait. An id without an arrival counts as ``unknown_arrived_at``.
    """

    at_from: EventTimeMicros
    arrived_from: WallTimeMicros
    unknown_arrived_at: WallTimeMicros

    @staticmethod
    def of(watermark: EventTimeMicros, wall_time: WallTimeMicros, slack_us: int) -> IdRetention:
        # Before the first and after the last watermark nothing bounds the age of a repetition: keep all ids.
        is_known = watermark not in {TIME_MIN_US, TIME_MAX_US}
        return IdRetention(
            at_from=EventTimeMicros(max(watermark - slack_us, TIME_MIN_US)) if is_known else TIME_MIN_US,
            arrived_from=WallTimeMicros(max(wall_time - slack_us, TIME_MIN_US)),
            unknown_arrived_at=arrival_us(wall_time),
        )

    def keeps(self, ids: pa.StructArray) -> npt.NDArray[np.bool_]:
        """Return one flag per id, of `RECORD_ID_TYPE`: true if it stays."""
        is_recent = _micros(ids, "arrived_at") >= self.arrived_from
        kept: npt.NDArray[np.bool_] = is_recent | (_micros(ids, "at") >= self.at_from)
        return kept

    def with_arrivals(self, ids: pa.StructArray) -> pa.StructArray:
        """Return the same ids, stamping those without an arrival as having arrived now."""
        arrived_at = ids.field("arrived_at")
        if not arrived_at.null_count:
            return ids
        stamped = pc.fill_null(arrived_at, pa.scalar(self.unknown_arrived_at).cast(TIMESTAMP))
        return pa.StructArray.from_arrays(
            [ids.field("id"), ids.field("at"), stamped], fields=list(RECORD_ID_TYPE)
        )


def _micros(ids: pa.StructArray, name: str) -> npt.NDArray[np.int64]:
    # An unknown time counts as recent, so that its id stays.
    micros = ids.field(name).view(pa.int64())
    known = pc.fill_null(micros, TIME_MAX_US) if micros.null_count else micros
    times: npt.NDArray[np.int64] = known.to_numpy()
    return times
