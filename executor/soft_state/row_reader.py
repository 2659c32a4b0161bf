"""Reads the rows of an interval back from committed files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.stored_state import FormerState, StoredState
from millpond.executor.computation.timer import Timer, Timers
from millpond.executor.event_time.clocks import parse_timer_clock
from millpond.executor.soft_state.known_files import FileKeys, large_among
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.row import STATE_VERSION
from millpond.statestore.types import Objects


class RowReader(Protocol):
    """Reads row updates from files."""

    def read(
        self,
        paths: Sequence[str],
        columns: Sequence[str],
        *,
        keys: Iterable[str] | None = None,
        interval: Interval | None = None,
        large: Collection[str] = (),
    ) -> pa.Table:
        """The updates in the files, of ``keys`` and within ``interval`` only; the ``large`` ones are read in parts.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        ...

    def scan(
        self,
        file: FileKeys,
        columns: Sequence[str],
        interval: Interval,
        keep: Callable[[pa.Table], pa.Table],
    ) -> pa.Table:
        """What ``keep`` leaves of the updates of a file, which it gets part by part if the file is large.

        Raises:
            DataError: the file is missing or its bytes are wrong.
        """
        ...


class StoreRowReader:
    """`RowReader` over an object store.

    Args:
        objects: the table's root.
    """

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
    ) -> pa.Table:
        """The updates in the files, of ``keys`` and within ``interval`` only; the ``large`` ones are read in parts."""
        return read_row_files(self._objects, paths, columns, keys=keys, interval=interval, large=large)

    def scan(
        self,
        file: FileKeys,
        columns: Sequence[str],
        interval: Interval,
        keep: Callable[[pa.Table], pa.Table],
    ) -> pa.Table:
        """What ``keep`` leaves of the updates of a file, which it gets part by part if the file is large."""
        large = large_among([file])
        return read_row_files(self._objects, [file.path], columns, interval=interval, large=large, keep=keep)


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows as Python objects: keys, a state for each, and the timers of the keys that have any."""

    keys: list[str]
    states: list[StoredState | None]
    timers: dict[str, Timers]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """What row updates change.

    Attributes:
        keys: the keys that were updated.
        states: their new states; ``None``: deleted, unless the key is in ``same_state``.
        timers: all timers of the keys whose timers were set or deleted.
        same_state: the keys whose state did not change.
    """

    keys: list[str]
    states: list[StoredState | None]
    timers: dict[str, Timers]
    same_state: frozenset[str]


def load_rows(merged: pa.Table, state_version: int = 0) -> LoadedRows:
    """Decode merged rows into Python objects, a column at a time.

    Args:
        merged: one row per key.
        state_version: that of the computation's code; states of earlier ones come with their version.

    Raises:
        InvalidError: newer code wrote a state.
    """
    keys = merged.column("key").to_pylist()
    return LoadedRows(keys, _load_states(merged, state_version), _load_timers(keys, merged.column("timers")))


def load_changes(combined: pa.Table, state_version: int = 0) -> RowChanges:
    """Decode combined row updates into Python objects; nulls keep their meaning of "unchanged".

    Args:
        combined: one update per key.
        state_version: as for `load_rows`.

    Raises:
        InvalidError: newer code wrote a state.
    """
    keys = combined.column("key").to_pylist()
    deleted = combined.column("deleted")
    has_state = pc.or_(combined.column("state").is_valid(), combined.column("state_bytes").is_valid())
    has_timers = combined.column("timers").is_valid()
    timers = _load_timers(keys, combined.column("timers"))
    for key in combined.column("key").filter(pc.or_(has_timers, deleted)).to_pylist():
        timers.setdefault(key, ())
    same_state = pc.invert(pc.or_(has_state, deleted))
    return RowChanges(
        keys=keys,
        states=_load_states(combined, state_version),
        timers=timers,
        same_state=frozenset(combined.column("key").filter(same_state).to_pylist()),
    )


def _load_states(rows: pa.Table, state_version: int) -> list[StoredState | None]:
    states: list[StoredState | None] = rows.column("state").to_pylist()
    if rows.column("state_bytes").null_count < rows.num_rows:
        blobs = rows.column("state_bytes").to_pylist()
        states = [blob if text is None else text for text, blob in zip(states, blobs, strict=True)]
    stored = rows.column(STATE_VERSION)
    if stored.null_count == rows.num_rows and not state_version:
        return states
    return _with_versions(states, pc.fill_null(stored, 0).to_numpy(), state_version)


def _with_versions(
    states: list[StoredState | None], versions: npt.NDArray[np.int32], state_version: int
) -> list[StoredState | None]:
    """The states, with their version where that is not the computation's."""
    newest = int(versions.max(initial=0))
    if newest > state_version:
        raise InvalidError(
            "newer code wrote the computation's states: run that code",
            stored=newest,
            state_version=state_version,
        )
    for index in np.flatnonzero(versions != state_version).tolist():
        state = states[index]
        if isinstance(state, str | bytes):
            states[index] = FormerState(state, int(versions[index]))
    return states


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
