"""Rows read back from committed files, and decoded only when their key is first needed.

A new owner reads its rows once, for their timers (MillWheel §6.2). Most of them stay unused for a while, and decoding
a million rows into Python objects takes longer than reading them, so `ColdRows` keeps them in Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import FormerState, StateLayout, StoredState
from millpond.executor.computation.timers import Timer, Timers
from millpond.executor.time.clocks import parse_timer_clock
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.files import LARGE_BYTES, read_row_files
from millpond.statestore.rows.merge import take_rows
from millpond.statestore.rows.row import STATE_VERSION, has_state, with_texts
from millpond.statestore.rows.state_schema import StateCells, cells_of, state_columns_among
from millpond.statestore.types import Objects

_PLAIN: Final = StateLayout()


@dataclass(frozen=True, slots=True)
class FileKeys:
    """A file, the range of keys it may hold (``None``: unknown), and its size."""

    path: str
    min_key: str | None
    max_key: str | None
    size_bytes: int = 0

    def may_hold_any(self, low: str, high: str) -> bool:
        """Return False if no key in ``low..high`` is in the file."""
        return (self.max_key is None or low <= self.max_key) and (
            self.min_key is None or self.min_key <= high
        )


def large_among(files: Iterable[FileKeys]) -> frozenset[str]:
    return frozenset(file.path for file in files if file.size_bytes >= LARGE_BYTES)


class RowReader:
    """Reads row updates from files in an object store; a missing or damaged file is a `DataError`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def read(
        self,
        paths: Sequence[str],
        columns: Sequence[str],
        *,
        keys: Iterable[str] | None = None,
        interval: Interval | None = None,
        large: Collection[str] = (),
        keep: Callable[[pa.Table], pa.Table] | None = None,
    ) -> pa.Table:
        """Return row updates as `read_row_files` does; states with a schema stay in their columns."""
        return read_row_files(
            self._objects,
            paths,
            columns,
            keys=keys,
            interval=interval,
            large=large,
            keep=keep,
            keeps_cells=True,
        )


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows as Python objects: keys, a state for each, and the timers of the keys that have any.

    Of changes, ``timers`` has the keys whose timers were set or deleted, ``same_state`` those whose state stays.
    """

    keys: list[str]
    states: list[StoredState | None]
    timers: dict[str, Timers]
    same_state: frozenset[str] = frozenset()


def load_rows(merged: pa.Table, layout: StateLayout = _PLAIN) -> LoadedRows:
    """Decode merged rows, one per key, into Python objects; states of earlier code come with their version."""
    keys = merged.column("key").to_pylist()
    return LoadedRows(keys, _load_states(merged, layout), _load_timers(keys, merged.column("timers")))


def load_changes(combined: pa.Table, layout: StateLayout = _PLAIN) -> LoadedRows:
    """Decode combined row updates, one per key, into Python objects; nulls keep their meaning of "unchanged"."""
    keys = combined.column("key").to_pylist()
    deleted = combined.column("deleted")
    has_timers = combined.column("timers").is_valid()
    timers = _load_timers(keys, combined.column("timers"))
    for key in combined.column("key").filter(pc.or_(has_timers, deleted)).to_pylist():
        timers.setdefault(key, ())
    same_state = (
        combined.column("key").filter(pc.invert(pc.or_(pa.array(has_state(combined)), deleted))).to_pylist()
    )
    return LoadedRows(keys, _load_states(combined, layout), timers, frozenset(same_state))


def _load_states(rows: pa.Table, layout: StateLayout) -> list[StoredState | None]:
    rows, cells = _split_cells(rows, layout.column)
    states: list[StoredState | None] = rows.column("state").to_pylist()
    if rows.column("state_bytes").null_count < rows.num_rows:
        blobs = rows.column("state_bytes").to_pylist()
        states = [blob if text is None else text for text, blob in zip(states, blobs, strict=True)]
    if cells is not None:
        states = [text if own is None else own for text, own in zip(states, cells, strict=True)]
    stored, state_version = rows.column(STATE_VERSION), layout.version
    if stored.null_count == rows.num_rows and not state_version:
        return states
    versions = pc.fill_null(stored, 0).to_numpy()
    newest = int(versions.max(initial=0))
    if newest > state_version:
        raise InvalidError(
            "newer code wrote the computation's states: run that code",
            stored=newest,
            state_version=state_version,
        )
    for index in np.flatnonzero(versions != state_version).tolist():
        state = states[index]
        if isinstance(state, str | bytes | tuple):
            states[index] = FormerState(state, int(versions[index]))
    return states


def _split_cells(rows: pa.Table, column: pa.Field | None) -> tuple[pa.Table, list[StateCells | None] | None]:
    """Return the cells of states of today's schema, and rows in which what has another schema is text."""
    cells = None
    if column is not None and column.name in rows.column_names:
        own = rows.column(column.name).combine_chunks()
        cells = cells_of(own) if own.null_count < len(own) else None
        rows = rows.drop_columns([column.name])
    return with_texts(rows), cells


def _load_timers(keys: list[str], column: pa.ChunkedArray) -> dict[str, Timers]:
    lists = column.combine_chunks()
    flat = lists.flatten()
    if not len(flat):
        return {}
    tags, names, at, output_at = flat.flatten()
    domains, percentiles, holds = zip(*map(parse_timer_clock, names.to_pylist()), strict=True)
    columns = (
        tags.to_pylist(),
        domains,
        at.cast(pa.int64()).to_pylist(),
        output_at.cast(pa.int64()).to_pylist(),
        percentiles,
        holds,
    )
    timers = map(Timer._make, zip(*columns, strict=True))
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_pylist()
    return {
        key: (next(timers),) if count == 1 else tuple(islice(timers, count))
        for key, count in zip(keys, counts, strict=True)
        if count
    }


_COLUMNS: Final = ("key", "state", "state_bytes", STATE_VERSION, "timers")
# The memory of taken rows is released once at most one row in so many is left.
_COMPACT: Final = 2


class ColdRows:
    """Merged rows in Arrow, one per key, that are taken out one by one.

    ``weights`` is the estimated cost of each row in the cache, in bytes.
    """

    def __init__(
        self, merged: pa.Table, weights: npt.NDArray[np.int64], layout: StateLayout = _PLAIN
    ) -> None:
        self._layout = layout
        self._table = merged.select([*_COLUMNS, *state_columns_among(merged.column_names)])
        self._weights = weights
        self._indices = dict(zip(merged.column("key").to_pylist(), range(merged.num_rows), strict=True))

    def __len__(self) -> int:
        return len(self._indices)

    def among(self, keys: Iterable[str]) -> list[str]:
        indices = self._indices
        return [key for key in keys if key in indices]

    @property
    def keys(self) -> list[str]:
        return list(self._indices)

    @property
    def weights(self) -> npt.NDArray[np.int64]:
        weights: npt.NDArray[np.int64] = self._weights[list(self._indices.values())]
        return weights

    def take(self, keys: Sequence[str]) -> tuple[LoadedRows, int]:
        """Remove and return the rows of keys that are all here, with their total weight."""
        indices = list(map(self._indices.__getitem__, keys))
        rows = pa.array(indices, pa.int64())
        table = self._table
        taken = pa.table({name: take_rows(table.column(name), rows) for name in table.column_names})
        return load_rows(taken, self._layout), self.drop(keys)

    def drop(self, keys: Iterable[str]) -> int:
        """Remove the rows of keys that are all here, and return their total weight."""
        weight = int(self._weights[list(map(self._indices.pop, keys))].sum())
        if len(self._indices) * _COMPACT <= self._table.num_rows:
            kept = np.zeros(self._table.num_rows, np.bool_)
            kept[list(self._indices.values())] = True
            # A filter works chunk by chunk: all states together may be more than one array holds.
            self._table, self._weights = self._table.filter(pa.array(kept)), self._weights[kept]
            left = self._table.column("key").to_pylist()
            self._indices = dict(zip(left, range(self._table.num_rows), strict=True))
        return weight
