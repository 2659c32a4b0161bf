"""Keys by their numbers, which are places in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.rows.record_ids import Fingerprints, fingerprints, mix

_Index = npt.NDArray[np.int64]

# Keys come from strangers, who must not know which of them share slots: Python salts its hashes in each process.
_SALT: Final = np.uint64(hash("slots") & (1 << 64) - 1)
_FREE: Final = -1
_SLOTS_MIN: Final = 64
# With so many slots taken, a search that succeeds looks at 1.75 of them on average.
_FULL: Final = 0.6
# Names without rows are worth cleaning beyond this number and this part of those with rows.
_IDLE_MIN: Final = 64
_IDLE_PARTS: Final = 4
# What a name in a dict of Python's takes besides its text.
_OBJECT_BYTES: Final = 200


class KeyNumbers:
    """Keys by their numbers: a key keeps its number until `keep`.

    Names and numbers are in a hash table of arrays: 40 to 60 bytes a key, a third of what a dict of Python's takes, and
    a bundle's keys are found all at once. Keys with one fingerprint are compared; all but the first are in a dict.

    Example:
        >>> keys = KeyNumbers()
        >>> keys.of(["b", "a"]).tolist(), keys.of(["a", "c"]).tolist(), keys.names(np.array([2, 0])).to_pylist()
        ([0, 1], [1, 2], ['c', 'b'])
    """

    def __init__(self) -> None:
        self._start(0)

    def _start(self, count: int) -> None:
        self._count = 0
        # One at least, because a free slot's number is looked up as well.
        self._hashes: Fingerprints = np.zeros(max(count, 1), np.uint64)
        self._ends: _Index = np.zeros(count + 1, np.int64)
        self._data: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._slots: npt.NDArray[np.int32] = np.full(_SLOTS_MIN, _FREE, np.int32)
        self._alike: dict[str, int] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        arrays = self._hashes.nbytes + self._ends.nbytes + self._data.nbytes + self._slots.nbytes
        return arrays + _OBJECT_BYTES * len(self._alike)

    def of(self, keys: pa.StringArray | Sequence[str]) -> _Index:
        """Return the numbers of different keys; a key without a number gets the next one."""
        names, hashes, found = self._find(keys)
        new = np.flatnonzero(found < 0)
        if len(new):
            found[new] = self._add(names.take(pa.array(new)), hashes[new])
        return found

    def among(self, keys: Sequence[str], has_row: npt.NDArray[np.bool_]) -> list[str]:
        """Return the keys with a number and a row."""
        _, _, found = self._find(keys)
        is_here = found >= 0
        is_here[is_here] = has_row[found[is_here]]
        return [keys[place] for place in np.flatnonzero(is_here).tolist()]

    def names(self, numbers: _Index) -> pa.StringArray:
        texts = pa.LargeStringArray.from_buffers(
            self._count, pa.py_buffer(self._ends[: self._count + 1]), pa.py_buffer(self._data)
        )
        return texts.take(pa.array(numbers)).cast(pa.string())

    def has_many_besides(self, count: int) -> bool:
        """Return True if many keys are not among the ``count`` that have rows, so that they should go."""
        return self._count > count + count // _IDLE_PARTS + _IDLE_MIN

    def keep(self, numbers: _Index) -> None:
        """Forget all other keys; each of these gets its place among them as its number."""
        names = self.names(numbers)
        self._start(len(names))
        self.of(names)

    def _find(self, keys: pa.StringArray | Sequence[str]) -> tuple[pa.StringArray, Fingerprints, _Index]:
        """Return the keys, their fingerprints, and their numbers, -1 for a key without one."""
        names = keys if isinstance(keys, pa.StringArray) else pa.array(keys, pa.string())
        hashes = mix(fingerprints(names) ^ _SALT)
        found = np.full(len(hashes), -1, np.int64)
        left, at = np.arange(len(hashes)), self._first_slots(hashes)
        while len(left):
            numbers = self._slots[at]
            is_taken = numbers != _FREE
            is_equal = (self._hashes[numbers] == hashes[left]) & is_taken
            found[left[is_equal]] = numbers[is_equal]
            goes_on = is_taken & ~is_equal
            left, at = left[goes_on], self._next_slots(at[goes_on])
        known = np.flatnonzero(found >= 0)
        if len(known):
            # A fingerprint is never a proof.
            mine = names if len(known) == len(names) else names.take(pa.array(known))
            is_other = pc.not_equal(self.names(found[known]), mine)
            for place in known[is_other.to_numpy(zero_copy_only=False)].tolist():
                found[place] = self._alike.get(names[place].as_py(), -1)
        return names, hashes, found

    def _add(self, names: pa.StringArray, hashes: Fingerprints) -> _Index:
        first, count = self._count, self._count + len(names)
        numbers = np.arange(first, count)
        _, offsets, data = names.buffers()
        ends = np.frombuffer(offsets, np.int32, len(names) + 1, 4 * names.offset).astype(np.int64)
        length = int(self._ends[first])
        self._hashes = _grown(self._hashes, first, count)
        self._ends = _grown(self._ends, first + 1, count + 1)
        self._data = _grown(self._data, length, length + int(ends[-1] - ends[0]))
        self._hashes[first:count] = hashes
        self._ends[first + 1 : count + 1] = length + ends[1:] - ends[0]
        if ends[-1] > ends[0]:
            self._data[length : int(self._ends[count])] = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
        self._count = count
        if count > _FULL * len(self._slots):
            slots = 1 << int(count / _FULL).bit_length()
            self._slots = np.full(slots, _FREE, np.int32)
            numbers_in_slots = np.delete(np.arange(first), list(self._alike.values()))
            self._place(numbers_in_slots)
        for place in self._place(numbers).tolist():
            self._alike[names[place - first].as_py()] = place
        return numbers

    def _place(self, numbers: _Index) -> _Index:
        """Give numbers slots; return those whose fingerprints another number has."""
        alike: list[_Index] = []
        hashes = self._hashes
        left, at = numbers, self._first_slots(hashes[numbers])
        while len(left):
            is_free = self._slots[at] == _FREE
            # Of several numbers for one slot the last one gets it.
            self._slots[at[is_free]] = left[is_free]
            holders = self._slots[at].astype(np.int64)
            is_alike = (hashes[holders] == hashes[left]) & (holders != left)
            alike.append(left[is_alike])
            goes_on = (holders != left) & ~is_alike
            left, at = left[goes_on], self._next_slots(at[goes_on])
        return np.concatenate(alike) if alike else np.empty(0, np.int64)

    def _first_slots(self, hashes: Fingerprints) -> _Index:
        slots: _Index = (hashes & np.uint64(len(self._slots) - 1)).astype(np.int64)
        return slots

    def _next_slots(self, at: _Index) -> _Index:
        return (at + 1) & (len(self._slots) - 1)


def _grown(array: npt.NDArray[Any], used: int, size: int) -> npt.NDArray[Any]:
    """Return the array if it has this size, or else a larger copy of its used part."""
    if len(array) >= size:
        return array
    grown = np.empty(max(size, len(array) + len(array) // 4), array.dtype)
    grown[:used] = array[:used]
    return grown
