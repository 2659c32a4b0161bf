"""Grouping: a bundle's records sorted by key, then time, then arrival, without a Python loop over records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
