"""A bundle's records: deduplicated by id, and sorted by key, then time, then arrival, without a loop over records.

A record is a duplicate if its key has consumed its id before, or if the same key and id arrived earlier in the
same bundle (MillWheel §6.1.1). Fingerprints and the Bloom filter only select candidates; the ids themselves decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import ConcatenatedValues, PythonValues, Values
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.letters import RetriedLetter
from millpond.executor.interval.soft_state import SoftState
from millpond.statestore.errors import check
from millpond.statestore.rows.record_ids import fingerprints
from millpond.statestore.rows.row import one_array

_DIGIT_BITS: Final = 16

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The concatenated deliveries of a bundle, column by column, in order of arrival.

    Attributes:
        ids: ids of outside records; ``None`` when no record has one.
        streams: the stream of each delivery.
        counts: the number of records of each delivery.
    """

    keys: pa.StringArray
    at: npt.NDArray[np.int64]
    values: Values
    ids: pa.BinaryArray | None
    streams: Sequence[str]
    counts: Sequence[int]

    @staticmethod
    def of(deliveries: Sequence[Deliveries], *, with_ids: bool) -> Arrivals:
        """Concatenate deliveries, any of which may be empty."""
        some: list[Deliveries] = []
        keys, streams, counts, has_ids = [], [], [], False
        for delivery in deliveries:
            count = len(delivery.at)
            if count:
                check(
                    len(delivery.keys) == count == len(delivery.values),
                    "the columns of a delivery have one length",
                    stream=delivery.stream,
                )
                check(not delivery.keys.null_count, "delivered records have keys", stream=delivery.stream)
                some.append(delivery)
                keys.append(_as(delivery.keys, pa.string()))
                streams.append(delivery.stream)
                counts.append(count)
                has_ids |= delivery.ids is not None
        if not some:
            none = pa.array([], pa.string())
            return Arrivals(
                keys=none, at=np.empty(0, np.int64), values=PythonValues([]), ids=None, streams=(), counts=()
            )
        is_one = len(some) == 1
        return Arrivals(
            keys=keys[0] if is_one else pa.concat_arrays(keys),
            at=some[0].at if is_one else np.concatenate([part.at for part in some]),
            values=some[0].values if is_one else ConcatenatedValues([part.values for part in some]),
            ids=_ids(some) if with_ids and has_ids else None,
            streams=streams,
            counts=counts,
        )

    def streams_of(self, sources: npt.NDArray[np.int64]) -> Sequence[str]:
        if len(self.streams) <= 1:
            return [*self.streams] * len(sources)
        names = np.repeat(np.array(self.streams, dtype=object), self.counts)
        stream_names: list[str] = names[sources].tolist()
        return stream_names


def _as(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = one_array(column)
    return array if array.type == kind else array.cast(kind)


def _ids(deliveries: list[Deliveries]) -> pa.BinaryArray | None:
    columns = [
        pa.nulls(len(part.at), pa.binary()) if part.ids is None else _as(part.ids, pa.binary())
        for part in deliveries
    ]
    ids = columns[0] if len(columns) == 1 else pa.concat_arrays(columns)
    return None if ids.null_count == len(ids) else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCodes:
    """Each record's key as an index into the distinct ``keys``, which are unordered."""

    codes: _Index
    keys: pa.StringArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The sorted keys of a bundle, and the range of each key's records.

    Attributes:
        keys: the keys with records and the additional keys, sorted by their UTF-8 bytes.
        bounds: the records of key *i* are at ``bounds[i]`` up to ``bounds[i + 1]``.
        sources: for each record in that order, its position on arrival.
        admitted: the same keys with all records except duplicates; ``None`` if the grouping has them all.
    """

    keys: list[str]
    key_column: pa.StringArray
    bounds: _Index
    sources: _Index
    admitted: Grouping | None = None


def encode_keys(keys: pa.StringArray) -> KeyCodes:
    encoded = keys.dictionary_encode()
    return KeyCodes(codes=encoded.indices.to_numpy().astype(np.int64), keys=encoded.dictionary)


def group(
    encoded: KeyCodes, at: _Index, kept: _Index | None = None, others: pa.StringArray | None = None
) -> Grouping:
    """Sort records by key, time and arrival: those ``kept``, or all; ``others`` are keys to include without records."""
    codes, keys, arrived = encoded.codes, encoded.keys, len(encoded.keys)
    if others is not None and len(others):
        keys = pa.concat_arrays([keys, others.filter(pc.invert(pc.is_in(others, keys)))])
    if kept is not None:
        codes, at = codes[kept], at[kept]
    counts = np.bincount(codes, minlength=len(keys))
    order = pc.sort_indices(keys).to_numpy().astype(np.int64)
    wanted = counts > 0
    if not wanted.all():
        # A key with only duplicates gets no turn, unless it is among the others.
        wanted[arrived:] = True
        if others is not None and not wanted.all():
            wanted |= pc.is_in(keys, others).to_numpy(zero_copy_only=False)
        order = order[wanted[order]]
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(order))
    indices = _by_key_and_time(rank[codes], at)
    column = keys.take(pa.array(order))
    return Grouping(
        keys=column.to_pylist(),
        key_column=column,
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[order])]),
        sources=indices if kept is None else kept[indices],
    )


def chosen_of(grouping: Grouping, places: _Index) -> Grouping:
    """Return the grouping of some of its keys."""
    lengths = np.diff(grouping.bounds)
    is_chosen = np.zeros(len(grouping.keys), np.bool_)
    is_chosen[places] = True
    return Grouping(
        keys=[grouping.keys[place] for place in places.tolist()],
        key_column=grouping.key_column.take(pa.array(places)),
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[places])]),
        sources=grouping.sources[np.repeat(is_chosen, lengths)],
    )


def sample_keys(grouping: Grouping, count: int) -> tuple[str, ...]:
    """Return keys at even distances in a bundle's work; a key's share is its number of records plus one."""
    keys = grouping.keys
    if not keys:
        return ()
    work = grouping.bounds[1:] + np.arange(1, len(keys) + 1)
    at = (2 * np.arange(count) + 1) * (work[-1] / (2 * count))
    return tuple(map(keys.__getitem__, np.searchsorted(work, at, side="right").tolist()))


def _by_key_and_time(ranks: _Index, at: _Index) -> _Index:
    """Return the indices sorted by (rank, time, index)."""
    count = len(ranks)
    if count < 2:
        return np.arange(count, dtype=np.int64)
    if _rises(at):
        return _stable_order(ranks)
    if _rises(ranks) and bool(((at[1:] >= at[:-1]) | (ranks[1:] > ranks[:-1])).all()):
        return np.arange(count, dtype=np.int64)
    by_time = _stable_order(at)
    return by_time[_stable_order(ranks[by_time])]


def _stable_order(column: _Index) -> _Index:
    """Return the indices sorted by (value, index)."""
    count = len(column)
    if _rises(column):
        return np.arange(count, dtype=np.int64)
    # Numpy sorts integers of 16 bits by radix, ten times as fast as larger ones: one pass for each 16 bits.
    least = int(column.min())
    digits = (column - least).view(np.uint64)
    order = np.argsort(digits.astype(np.uint16), kind="stable")
    for shift in range(_DIGIT_BITS, (int(column.max()) - least).bit_length(), _DIGIT_BITS):
        digit = (digits >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def _rises(column: _Index) -> bool:
    return bool((column[1:] >= column[:-1]).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The records of a bundle without duplicates.

    Attributes:
        kept: the arrival indices of the remaining records, ascending; ``None`` if all remain.
        fingerprints: the fingerprints of the remaining ids; ``None`` if no record has an id.
    """

    kept: _Index | None = None
    duplicates: int = 0
    fingerprints: npt.NDArray[np.uint64] | None = None


def admit(arrivals: Arrivals, keys: KeyCodes, soft_state: SoftState) -> Admission:
    ids = arrivals.ids
    if ids is None:
        return Admission()
    valid: _Index | None = None
    if ids.null_count:
        valid = np.flatnonzero(pc.is_valid(ids).to_numpy(zero_copy_only=False))
        ids = ids.drop_null()
    identified = _Identified(ids, keys.codes if valid is None else keys.codes[valid], keys.keys)
    duplicate = identified.duplicates(soft_state)
    if not duplicate.any():
        return Admission(fingerprints=identified.fingerprints)
    dropped = np.flatnonzero(duplicate) if valid is None else valid[duplicate]
    keep = np.ones(len(arrivals.at), np.bool_)
    keep[dropped] = False
    return Admission(
        kept=np.flatnonzero(keep),
        duplicates=len(dropped),
        fingerprints=identified.fingerprints[~duplicate],
    )


class _Identified:
    def __init__(self, ids: pa.BinaryArray, codes: _Index, keys: pa.StringArray) -> None:
        self._ids = ids
        self._codes = codes
        self._keys = keys
        self.fingerprints = fingerprints(ids)

    def duplicates(self, soft_state: SoftState) -> _Mask:
        repeated = self._repeated()
        soft_state.ids.prepare(soft_state.files)
        # The filter has false hits but no misses, so only its hits need the exact ids from files.
        doubtful = np.flatnonzero(soft_state.ids.may_be_known(self.fingerprints) & ~repeated)
        if len(doubtful):
            keys, ids = self._pairs(doubtful)
            repeated[doubtful] = soft_state.ids.consumed(soft_state.files, keys, ids)
        return repeated

    def _repeated(self) -> _Mask:
        repeated = np.zeros(len(self.fingerprints), np.bool_)
        ordered = np.sort(self.fingerprints)
        doubtful_prints = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(doubtful_prints):
            doubtful = np.flatnonzero(np.isin(self.fingerprints, doubtful_prints))
            seen: set[tuple[str, bytes]] = set()
            for index, pair in zip(doubtful.tolist(), zip(*self._pairs(doubtful), strict=True), strict=True):
                repeated[index] = pair in seen
                seen.add(pair)
        return repeated

    def _pairs(self, indices: _Index) -> tuple[list[str], list[bytes]]:
        keys = self._keys.take(pa.array(self._codes[indices]))
        return keys.to_pylist(), self._ids.take(pa.array(indices)).to_pylist()


def unseen_ids(letters: Sequence[RetriedLetter]) -> Deliveries | None:
    """Return the ids of dead letters whose records never reached the code, as the last records to arrive.

    Their rows must check and keep these ids like any record's. The values are empty because the code gets the records
    themselves with the other letters.
    """
    unseen = [letter for letter in letters if letter.unseen_id is not None]
    if not unseen:
        return None
    return Deliveries(
        stream="",
        keys=pa.array([letter.key for letter in unseen], pa.string()),
        at=np.array([letter.at for letter in unseen], np.int64),
        values=PythonValues([None] * len(unseen)),
        ids=pa.array([letter.unseen_id for letter in unseen], pa.binary()),
    )


def admitted_letters(
    letters: Sequence[RetriedLetter], unseen: Deliveries, admission: Admission, arrived: int
) -> tuple[_Mask, list[RetriedLetter]]:
    """Return a mask of the admitted records that are only ids of letters, and the letters without duplicates.

    ``unseen`` are the last of the ``arrived`` records.
    """
    first = arrived - len(unseen.at)
    admitted = np.arange(arrived) if admission.kept is None else admission.kept
    are_ids = admitted >= first
    positions, known = count_from(first), set(admitted[are_ids].tolist())
    return are_ids, [one for one in letters if one.unseen_id is None or next(positions) in known]
