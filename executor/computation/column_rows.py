"""Rows of a step of the library as columns: a bundle of all keys at once, without an object for a key.

The engine keeps such rows in place of encoded states and timers, and asks for a key's row in its stored form whenever
the key needs a separate turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timers
from millpond.executor.computation.values import Values
from millpond.executor.time.clocks import Clocks

_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The encoded states of keys, in their order, and the timers of each."""

    states: list[StoredState | None]
    timers: Mapping[str, Timers]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChange:
    """The effects of a bundle on its keys in columns, before `ColumnRows.apply`. Keys with turns are not among them.

    Attributes:
        places: the places of these keys among the bundle's; the rest has an entry for each.
        states: the encoded states after the bundle; null for a key without one.
        state_column: the row's column for the states.
        timers: all timers of the keys whose timers changed; null for the others.
        holds: the output time that each key holds.
        changed: the keys whose rows have changed.
        deleted: the keys that have no row any more.
        productions: all productions, in the order of the keys, of which ``owners`` has the entries.
        fired: the number of timers that fired.
        counters: the counts that turns would have added to the computation's counters.
        former: the argument of `ColumnRows.undo`.
        after: the data of `ColumnRows.apply`.
    """

    places: _Index
    states: pa.Array
    timers: pa.Array
    holds: pa.Array
    changed: npt.NDArray[np.bool_]
    deleted: npt.NDArray[np.bool_]
    productions: pa.StructArray
    owners: _Index
    fired: int
    counters: Mapping[str, int]
    former: Any
    after: Any
    state_column: str = "state"


@dataclass(frozen=True, slots=True)
class KeyedRecords:
    """The records of a bundle by key, for `ColumnRows.change`.

    Attributes:
        keys: the keys with records or due timers, in order; ``key_column`` has the same.
        bounds: the records of key *i* are ``sources[bounds[i]:bounds[i + 1]]``.
        sources: the places of the records in ``at`` and among the values.
        added: the result of `ColumnRows.added` for the values.
        elsewhere: the keys with rows that are not in the columns.
    """

    keys: Sequence[str]
    key_column: pa.StringArray
    bounds: _Index
    at: _Index
    sources: _Index
    added: Any
    elsewhere: Collection[str]


class ColumnRows(ABC):
    """The rows of some keys of one interval.

    Attributes:
        next_at: the time of the earliest timer; ``None`` without rows.
        held_at: the earliest output time that a row holds.
        size_bytes: the memory, by estimate.
        keys: the keys with rows.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def next_at(self) -> int | None: ...

    @property
    @abstractmethod
    def held_at(self) -> int | None: ...

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @property
    @abstractmethod
    def keys(self) -> list[str]: ...

    @abstractmethod
    def due_keys(self, watermark: int) -> pa.StringArray:
        """Return the keys with a timer that is due."""

    @abstractmethod
    def among(self, keys: Sequence[str]) -> list[str]:
        """Return the keys with a row here."""

    @abstractmethod
    def take(self, keys: Sequence[str]) -> StoredRows:
        """Remove the rows of keys that are all here, and return them in their stored form."""

    @abstractmethod
    def take_up(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Sequence[Timers]
    ) -> list[str]:
        """Take up stored rows, and return their keys; others are not for columns."""

    @abstractmethod
    def added(self, values: Values, times: _Index) -> Any | None:
        """Prepare values of records at these times for `change`; return ``None`` if the columns cannot hold them."""

    @abstractmethod
    def change(self, records: KeyedRecords, clocks: Clocks) -> ColumnChange | None:
        """Return the effects of a bundle; ``None``, without an effect, if all keys need separate turns."""

    @abstractmethod
    def apply(self, change: ColumnChange) -> None:
        """Apply the last `change`; meanwhile other keys may have been taken."""

    @abstractmethod
    def undo(self, keys: Sequence[str], former: Any) -> StoredRows:
        """Remove the rows of a change's keys, and return them as they were before it, in their stored form."""


@runtime_checkable
class KeepsColumnRows(Protocol):
    """A computation whose rows can be columns."""

    def column_rows(self, streams: Mapping[str, str]) -> ColumnRows | None:
        """Return empty rows for an interval; ``None`` if the step's settings need turns of single keys.

        ``streams`` has the full name of each stream that the computation produces to.
        """
