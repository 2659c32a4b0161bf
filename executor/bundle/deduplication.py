"""Deduplication of outside records by their ids, a whole bundle at once (MillWheel §6.1.1).

A record is a duplicate if its key has consumed its id before, or if the same key and id arrived earlier in the
same bundle. Fingerprints and the Bloom filter only select candidates; the ids themselves decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.bundle.arrivals import Arrivals
from millpond.executor.bundle.grouping import KeyCodes
from millpond.executor.soft_state.soft_state import SoftState
from millpond.statestore.rows.fingerprint import fingerprints

_Index = npt.NDArray[np.int64]
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
