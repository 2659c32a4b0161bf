"""The states of an interval's keys as columns of their schema, for code that takes a bundle as one table.

They stand in place of the cached rows of keys that have no timers, so a bundle makes no object for a key's state. States
lie in chunks that never change: a bundle appends one with the states that it set, and each key knows its place. A key
that needs a turn of its own gets its row back in its stored form, and later bundles take it up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import (
    ColumnChange,
    ColumnRows,
    KeyedRecords,
    StoredRows,
)
from millpond.executor.computation.key_numbers import KeyNumbers
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timers
from millpond.executor.computation.values import Values
from millpond.executor.time.clocks import Clocks
from millpond.statestore.rows.merge import values_where
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.state_schema import SchemaCodec, cells_of, struct_of

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_Former: TypeAlias = pa.StructArray

# Fewer dead states are not worth a copy of the others.
_DEAD_MIN: Final = 1_024
_NOWHERE: Final = -1
_CHUNK_BYTES_MAX: Final = 2**30
# Of the keys that leave at once, so that their states fit into one array.
_LEAVING: Final = 8_192


class StateColumns(ColumnRows):
    """The states of keys of one interval that have no timers."""

    def __init__(self, codec: SchemaCodec) -> None:
        self._column = codec.column
        self._keys: KeyNumbers = KeyNumbers()
        self._places: _Index = np.empty(0, np.int64)
        self._count = 0
        self._chunks: list[pa.StructArray] = []

    # ------------------------------------------------------------- rows of keys

    def __len__(self) -> int:
        return self._count

    @property
    def next_at(self) -> int | None:
        return None

    @property
    def held_at(self) -> int | None:
        return None

    @property
    def size_bytes(self) -> int:
        chunks = sum(int(chunk.nbytes) for chunk in self._chunks)
        return chunks + self._keys.size_bytes + self._places.nbytes

    @property
    def keys(self) -> list[str]:
        keys: list[str] = self._keys.names(np.flatnonzero(self._places >= 0)).to_pylist()
        return keys

    def due_keys(self, watermark: int) -> pa.StringArray:  # noqa: ARG002 - no key has a timer
        return pa.array([], pa.string())

    def among(self, keys: Sequence[str]) -> list[str]:
        return self._keys.among(keys, self._places >= 0)

    def take(self, keys: Sequence[str]) -> StoredRows:
        numbers = self._numbers_of(keys)
        states: list[StoredState | None] = []
        for start in range(0, len(numbers), _LEAVING):
            states += cells_of(self.states_of(numbers[start : start + _LEAVING]))
        self._remove(numbers)
        return StoredRows(states, {})

    def take_up(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Sequence[Timers]
    ) -> list[str]:
        rows = [
            (key, state)
            for key, state, own in zip(keys, states, timers, strict=True)
            if type(state) is tuple and not own
        ]
        if rows:
            numbers = self._numbers_of([key for key, _ in rows])
            self._put(numbers, struct_of([state for _, state in rows], self._column.type))
        return [key for key, _ in rows]

    def numbers_of(self, keys: Sequence[str]) -> _Index:
        """Return the numbers of keys, which stay theirs until `apply`."""
        self._forget_keys_without_states()
        return self._numbers_of(keys)

    def states_of(self, numbers: _Index) -> pa.StructArray:
        """Return the states of keys; null for a key without one."""
        return self._states_at(self._places[numbers])

    # ------------------------------------------------------------- a bundle

    def added(self, values: Values, times: _Index) -> Any | None:  # noqa: ARG002 - the code reads the values
        return None

    def change(self, records: KeyedRecords, clocks: Clocks) -> ColumnChange | None:  # noqa: ARG002 - the code makes it
        return None

    def changed(
        self,
        numbers: _Index,
        places: _Index,
        before: pa.StructArray,
        after: pa.StructArray,
        productions: pa.StructArray,
        owners: _Index,
    ) -> ColumnChange:
        """Return the change from the states ``before``, which `states_of` returned, to those ``after`` a bundle."""
        changed = _differing(before, after)
        is_null = after.is_null().to_numpy(zero_copy_only=False)
        count = len(numbers)
        return ColumnChange(
            places=places,
            states=after if changed.all() else values_where(after, changed),
            state_column=self._column.name,
            timers=pa.nulls(count, ROW_SCHEMA.field("timers").type),
            holds=pa.nulls(count, ROW_SCHEMA.field("hold").type),
            changed=changed,
            deleted=changed & is_null,
            productions=productions,
            owners=owners,
            fired=0,
            counters={},
            former=before,
            after=(numbers, changed, after),
        )

    def apply(self, change: ColumnChange) -> None:
        numbers, changed, after = change.after
        if changed.all():
            self._put(numbers, after)
        elif changed.any():
            self._put(numbers[changed], after.filter(pa.array(changed)))

    def undo(self, keys: Sequence[str], former: _Former) -> StoredRows:
        self._remove(self._numbers_of(keys))
        return StoredRows(list(cells_of(former)), {})

    # ------------------------------------------------------------- numbers and places

    def _numbers_of(self, keys: Sequence[str]) -> _Index:
        numbers = self._keys.of(keys)
        if len(self._places) < len(self._keys):
            size = max(len(self._keys), 2 * len(self._places))
            self._places = np.concatenate(
                [self._places, np.full(size - len(self._places), _NOWHERE, np.int64)]
            )
        return numbers

    def _put(self, numbers: _Index, states: pa.StructArray) -> None:
        """Give keys these states, or none where they are null."""
        self._remove(numbers)
        if states.null_count:
            valid = states.is_valid()
            numbers, states = numbers[valid.to_numpy(zero_copy_only=False)], states.filter(valid)
        if not len(states):
            return
        total = sum(map(len, self._chunks))
        self._places[numbers] = total + np.arange(len(states))
        self._count += len(states)
        self._chunks.append(states)
        if total + len(states) > 2 * self._count + _DEAD_MIN:
            self._drop_dead()
        # Chunks of falling sizes are few, and each state is copied a few times in all.
        while len(self._chunks) > 1 and _are_to_join(*self._chunks[-2:]):
            self._chunks[-2:] = [pa.concat_arrays(self._chunks[-2:])]

    def _remove(self, numbers: _Index) -> None:
        self._count -= int((self._places[numbers] >= 0).sum())
        self._places[numbers] = _NOWHERE

    def _drop_dead(self) -> None:
        live = np.flatnonzero(self._places >= 0)
        at = self._places[live]
        is_live = np.zeros(sum(map(len, self._chunks)), np.bool_)
        is_live[at] = True
        self._places[live] = (np.cumsum(is_live) - 1)[at]
        kept, start = [], 0
        for chunk in self._chunks:
            kept.append(chunk.filter(pa.array(is_live[start : start + len(chunk)])))
            start += len(chunk)
        self._chunks = [chunk for chunk in kept if len(chunk)]

    def _forget_keys_without_states(self) -> None:
        if self._keys.has_many_besides(self._count):
            live = np.flatnonzero(self._places >= 0)
            self._keys.keep(live)
            self._places = self._places[live]

    def _states_at(self, places: _Index) -> pa.StructArray:
        kind = self._column.type
        ends = np.cumsum([len(chunk) for chunk in self._chunks], dtype=np.int64)
        chunk_of = np.searchsorted(ends, places, side="right")
        is_here = places >= 0
        pieces, found = [], []
        for number in np.unique(chunk_of[is_here]).tolist():
            chunk = self._chunks[number]
            own = np.flatnonzero(is_here & (chunk_of == number))
            pieces.append(chunk.take(pa.array(places[own] - (int(ends[number]) - len(chunk)))))
            found.append(own)
        if not pieces:
            return pa.nulls(len(places), kind)
        if len(pieces) == 1 and len(found[0]) == len(places):
            return pieces[0]
        rows = np.full(len(places), _NOWHERE, np.int64)
        rows[np.concatenate(found)] = np.arange(sum(map(len, found)))
        return pa.concat_arrays(pieces).take(pa.array(rows, mask=~is_here))


class AddedColumns(StateColumns):
    """The addends of a bundle to a `CombiningState`; `SoftState` keeps none, so no key has a row here."""

    def numbers_of(self, keys: Sequence[str]) -> _Index:
        return np.arange(len(keys))

    def states_of(self, numbers: _Index) -> pa.StructArray:
        return pa.nulls(len(numbers), self._column.type)


def _are_to_join(older: pa.StructArray, newer: pa.StructArray) -> bool:
    # The offsets of Arrow's text have 32 bits, and the states of an interval may be larger.
    return 2 * len(newer) > len(older) and older.nbytes + newer.nbytes <= _CHUNK_BYTES_MAX


def _differing(one: pa.StructArray, other: pa.StructArray) -> _Mask:
    """Return where states differ, as their cells would: all NaN are one, and -0.0 is 0.0."""
    differs = _is_null(one) ^ _is_null(other)
    if one.null_count == len(one):
        # Of new keys, and of sums that are only added to, no field needs a look.
        return differs
    for left, right in zip(one.flatten(), other.flatten(), strict=True):
        differs |= _differing_cells(left, right)
    return differs


def _differing_cells(left: pa.Array, right: pa.Array) -> _Mask:
    if pa.types.is_nested(left.type):
        rows = [cells_of(pa.StructArray.from_arrays([part], names=["part"])) for part in (left, right)]
        return np.fromiter(map(ne, *rows), np.bool_, len(left))
    differs = _is_null(left) ^ _is_null(right)
    unequal = pc.fill_null(pc.not_equal(left, right), False).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(left.type):
        both_nan = pc.fill_null(pc.and_(pc.is_nan(left), pc.is_nan(right)), False)
        unequal = unequal & ~both_nan.to_numpy(zero_copy_only=False)
    found: _Mask = differs | unequal
    return found


def _is_null(column: pa.Array) -> _Mask:
    is_null: _Mask = column.is_null().to_numpy(zero_copy_only=False)
    return is_null
