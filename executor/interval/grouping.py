"""Grouping: a bundle's records sorted by key, then time, then arrival, without a Python loop over records.

Deduplication of outside records by their ids, a whole bundle at once (MillWheel §6.1.1).

A record is a duplicate if its key has consumed its id before, or if the same key and id arrived earlier in the
same bundle. Fingerprints and the Bloom filter only select candidates; the ids themselves decide.

The ids of dead letters whose records never reached the code: they are checked, and kept, as those of any record.

For that they are among the arrivals of the bundle, last and with no value; the records themselves are given to the code
with the other letters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.bundle import Arrivals, Deliveries
from millpond.executor.interval.letters import RetriedLetter
from millpond.executor.interval.soft_state import SoftState
from millpond.statestore.rows.record_ids import fingerprints

_PACKED_BITS: Final = 63

_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCodes:
    """Each record's key as a small integer.

    Attributes:
        codes: for each record, the index of its key in ``keys``.
        keys: the distinct keys, unordered.
    """

    codes: _Index
    keys: pa.StringArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The sorted keys of a bundle, and the range of each key's records.

    Attributes:
        keys: the keys with records and the additional keys, sorted by their UTF-8 bytes.
        key_column: the keys in Arrow.
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
    """The distinct keys, and each record's index among them."""
    encoded = keys.dictionary_encode()
    return KeyCodes(codes=encoded.indices.to_numpy().astype(np.int64), keys=encoded.dictionary)


def group(
    encoded: KeyCodes, at: _Index, kept: _Index | None = None, others: Collection[str] = ()
) -> Grouping:
    """Sort records by key, time and arrival.

    Args:
        encoded: the keys of all records that arrived.
        at: their event times.
        kept: the indices of the records to sort, ascending; ``None``: all.
        others: keys to include even without records.
    """
    codes, keys = encoded.codes, _with_others(encoded.keys, others)
    if kept is not None:
        codes, at = codes[kept], at[kept]
    counts = np.bincount(codes, minlength=len(keys))
    order = pc.sort_indices(keys).to_numpy().astype(np.int64)
    # A key with only duplicates gets no turn, unless it is among ``others``.
    order = order[_is_wanted(keys, counts, others)[order]]
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


def sample_keys(grouping: Grouping, count: int) -> tuple[str, ...]:
    """Keys at even distances in a bundle's work, of which each key has as much as it has records, and one more.

    Example:
        >>> encoded = encode_keys(pa.array(["a", "b", "b", "b", "b", "b", "b"]))
        >>> sample_keys(group(encoded, np.zeros(7, np.int64)), 3)
        ('a', 'b', 'b')
    """
    if not grouping.keys:
        return ()
    work = grouping.bounds[1:] + np.arange(1, len(grouping.keys) + 1)
    at = (2 * np.arange(count) + 1) * (work[-1] / (2 * count))
    return tuple(grouping.keys[index] for index in np.searchsorted(work, at, side="right").tolist())


def _with_others(keys: pa.StringArray, others: Collection[str]) -> pa.StringArray:
    if not others:
        return keys
    named = pa.array(list(others), pa.string())
    new = named.filter(pc.invert(pc.is_in(named, keys)))
    return pa.concat_arrays([keys, new])


def _is_wanted(keys: pa.StringArray, counts: _Index, others: Collection[str]) -> npt.NDArray[np.bool_]:
    wanted: npt.NDArray[np.bool_] = counts > 0
    if others and not wanted.all():
        named = pc.is_in(keys, pa.array(list(others), pa.string()))
        wanted |= named.to_numpy(zero_copy_only=False)
    return wanted


def _by_key_and_time(ranks: _Index, at: _Index) -> _Index:
    """The indices sorted by (rank, time, index)."""
    count = len(ranks)
    if _rises(at):
        return _stable_order(ranks)
    if _rises(ranks) and _rises_within(ranks, at):
        return np.arange(count, dtype=np.int64)
    by_time = _stable_order(at)
    return by_time[_stable_order(ranks[by_time])]


def _stable_order(column: _Index) -> _Index:
    """The indices sorted by (value, index).

    Packing both into one integer lets numpy sort without indirection, several times faster.
    """
    count = len(column)
    if _rises(column):
        return np.arange(count, dtype=np.int64)
    least, greatest = int(column.min()), int(column.max())
    index_bits = count.bit_length()
    if (greatest - least).bit_length() + index_bits >= _PACKED_BITS:
        return np.argsort(column, kind="stable").astype(np.int64)
    packed = ((column - least) << np.int64(index_bits)) | np.arange(count, dtype=np.int64)
    packed.sort()
    return packed & np.int64((1 << index_bits) - 1)


def _rises(column: _Index) -> bool:
    return bool((column[1:] >= column[:-1]).all())


def _rises_within(ranks: _Index, at: _Index) -> bool:
    return bool(((at[1:] >= at[:-1]) | (ranks[1:] > ranks[:-1])).all())


_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The records of a bundle without duplicates.

    Attributes:
        kept: the arrival indices of the remaining records, ascending; ``None`` if all remain.
        duplicates: the number of duplicates.
        fingerprints: the fingerprints of the remaining ids; ``None`` if no record has an id.
    """

    kept: _Index | None = None
    duplicates: int = 0
    fingerprints: npt.NDArray[np.uint64] | None = None


def admit(arrivals: Arrivals, keys: KeyCodes, soft_state: SoftState) -> Admission:
    """Drop the records that have been consumed before.

    Raises:
        DataError: a file that is needed to settle a candidate is missing or damaged.
    """
    if arrivals.ids is None:
        return Admission()
    indices = None if not arrivals.ids.null_count else _valid_indices(arrivals.ids)
    identified = _Identified(
        ids=arrivals.ids if indices is None else arrivals.ids.drop_null(),
        codes=keys.codes if indices is None else keys.codes[indices],
        keys=keys.keys,
    )
    duplicate = identified.duplicates(soft_state)
    fingerprints = identified.fingerprints[~duplicate] if duplicate.any() else identified.fingerprints
    if not duplicate.any():
        return Admission(fingerprints=fingerprints)
    dropped = np.flatnonzero(duplicate) if indices is None else indices[duplicate]
    keep = np.ones(len(arrivals), np.bool_)
    keep[dropped] = False
    return Admission(kept=np.flatnonzero(keep), duplicates=len(dropped), fingerprints=fingerprints)


def _valid_indices(ids: pa.BinaryArray) -> _Index:
    return np.flatnonzero(pc.is_valid(ids).to_numpy(zero_copy_only=False))


class _Identified:
    """The records of a bundle that have ids."""

    def __init__(self, ids: pa.BinaryArray, codes: _Index, keys: pa.StringArray) -> None:
        self._ids = ids
        self._codes = codes
        self._keys = keys
        self.fingerprints = fingerprints(ids)

    def duplicates(self, soft_state: SoftState) -> _Mask:
        """Which of them are duplicates."""
        repeated = self._repeated()
        soft_state.ids.prepare(soft_state.files)
        doubtful = np.flatnonzero(soft_state.ids.may_be_known(self.fingerprints) & ~repeated)
        if len(doubtful):
            keys, ids = self._pairs(doubtful)
            repeated[doubtful] = soft_state.ids.consumed(soft_state.files, keys, ids)
        return repeated

    def _repeated(self) -> _Mask:
        """Which of them repeat a key and id of the same bundle."""
        repeated = np.zeros(len(self.fingerprints), np.bool_)
        ordered = np.sort(self.fingerprints)
        doubtful_prints = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(doubtful_prints):
            doubtful = np.flatnonzero(np.isin(self.fingerprints, doubtful_prints))
            repeated[doubtful] = _not_first(*self._pairs(doubtful))
        return repeated

    def _pairs(self, indices: _Index) -> tuple[list[str], list[bytes]]:
        keys = self._keys.take(pa.array(self._codes[indices]))
        return keys.to_pylist(), self._ids.take(pa.array(indices)).to_pylist()


def _not_first(keys: list[str], ids: list[bytes]) -> _Mask:
    seen: set[tuple[str, bytes]] = set()
    known = np.zeros(len(keys), np.bool_)
    for index, pair in enumerate(zip(keys, ids, strict=True)):
        known[index] = pair in seen
        seen.add(pair)
    return known


def unseen_ids(letters: Sequence[RetriedLetter]) -> list[Deliveries]:
    """The ids of letters as records that no code gets."""
    unseen = [letter for letter in letters if letter.unseen_id is not None]
    if not unseen:
        return []
    ids = Deliveries(
        stream="",
        keys=pa.array([letter.key for letter in unseen], pa.string()),
        at=np.array([letter.at for letter in unseen], np.int64),
        values=PythonValues([None] * len(unseen)),
        ids=pa.array([letter.unseen_id for letter in unseen], pa.binary()),
    )
    return [ids]


def are_ids(ids: Sequence[Deliveries], admission: Admission, arrived: int) -> npt.NDArray[np.bool_]:
    """Which of the admitted records are only the ids of letters.

    Args:
        ids: what `unseen_ids` returned, the last of the arrivals.
        admission: what was admitted.
        arrived: how many records arrived, these included.
    """
    if not ids:
        return np.zeros(arrived if admission.kept is None else len(admission.kept), np.bool_)
    first = arrived - sum(len(part.at) for part in ids)
    admitted = np.arange(arrived) if admission.kept is None else admission.kept
    are_of_letters: npt.NDArray[np.bool_] = admitted >= first
    return are_of_letters


def without_duplicates(
    letters: Sequence[RetriedLetter], ids: Sequence[Deliveries], admission: Admission, arrived: int
) -> Sequence[RetriedLetter]:
    """The letters without those whose ids have been consumed meanwhile."""
    if not ids or admission.kept is None:
        return letters
    first = arrived - sum(len(part.at) for part in ids)
    admitted = set(admission.kept.tolist())
    kept, position = [], first
    for letter in letters:
        if letter.unseen_id is None:
            kept.append(letter)
            continue
        if position in admitted:
            kept.append(letter)
        position += 1
    return kept
