"""
Deduplication of outside records by their ids, a whole bundle at once (MillWheel §6.1.1).

A record is a duplicate when its key has consumed its id before, or when the same key and
id came earlier in the same bundle. Fingerprints and the filter only choose where to look;
ids themselves decide.
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
from millpond.statestore.rows.bloom import fingerprints

__all__ = ["Admission", "admit"]

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """
    Which records count.

    Attributes:
        kept: their positions on arrival, rising; ``None``: all.
        duplicates: how many do not.
        fingerprints: fingerprints of the ids of those that count; ``None``: no record has an id.
    """

    kept: _Index | None = None
    duplicates: int = 0
    fingerprints: npt.NDArray[np.uint64] | None = None


def admit(arrivals: Arrivals, keys: KeyCodes, soft_state: SoftState) -> Admission:
    """
    Leave out the records that have been consumed before.

    Raises:
        DataError: a file that settles a doubt is missing or its bytes are wrong.
    """
    if arrivals.ids is None:
        return Admission()
    places = None if not arrivals.ids.null_count else _valid_places(arrivals.ids)
    identified = _Identified(
        ids=arrivals.ids if places is None else arrivals.ids.drop_null(),
        codes=keys.codes if places is None else keys.codes[places],
        keys=keys.keys,
    )
    duplicate = identified.duplicates(soft_state)
    fingerprints = identified.fingerprints[~duplicate] if duplicate.any() else identified.fingerprints
    if not duplicate.any():
        return Admission(fingerprints=fingerprints)
    dropped = np.flatnonzero(duplicate) if places is None else places[duplicate]
    keep = np.ones(len(arrivals), np.bool_)
    keep[dropped] = False
    return Admission(kept=np.flatnonzero(keep), duplicates=len(dropped), fingerprints=fingerprints)


def _valid_places(ids: pa.BinaryArray) -> _Index:
    return np.flatnonzero(pc.is_valid(ids).to_numpy(zero_copy_only=False))


class _Identified:
    """
    The records of a bundle that have ids.
    """

    def __init__(self, ids: pa.BinaryArray, codes: _Index, keys: pa.StringArray) -> None:
        self._ids = ids
        self._codes = codes
        self._keys = keys
        self.fingerprints = fingerprints(ids)

    def duplicates(self, soft_state: SoftState) -> _Mask:
        """
        Which of them do not count.
        """
        repeated = self._repeated()
        soft_state.ids.prepare(soft_state.files)
        doubtful = np.flatnonzero(soft_state.ids.may_be_known(self.fingerprints) & ~repeated)
        if len(doubtful):
            keys, ids = self._pairs(doubtful)
            repeated[doubtful] = soft_state.ids.consumed(soft_state.files, keys, ids)
        return repeated

    def _repeated(self) -> _Mask:
        """
        Which of them repeat a key and id of this very bundle.
        """
        repeated = np.zeros(len(self.fingerprints), np.bool_)
        ordered = np.sort(self.fingerprints)
        doubtful_prints = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(doubtful_prints):
            doubtful = np.flatnonzero(np.isin(self.fingerprints, doubtful_prints))
            repeated[doubtful] = _not_first(*self._pairs(doubtful))
        return repeated

    def _pairs(self, places: _Index) -> tuple[list[str], list[bytes]]:
        keys = self._keys.take(pa.array(self._codes[places]))
        return keys.to_pylist(), self._ids.take(pa.array(places)).to_pylist()


def _not_first(keys: list[str], ids: list[bytes]) -> _Mask:
    seen: set[tuple[str, bytes]] = set()
    found = np.zeros(len(keys), np.bool_)
    for place, pair in enumerate(zip(keys, ids, strict=True)):
        found[place] = pair in seen
        seen.add(pair)
    return found
