"""Reads the rows of an interval back from committed files.

Cold rows: rows that stay in Arrow, as read, until they are needed.

A new owner reads its rows once, for their timers (MillWheel §6.2). Most of them stay unused for a
while, and decoding a million rows into Python objects takes longer than reading them. So a row is
decoded when its key is first needed.

The committed files that soft state has read, and what to read when the list of files changes.

Soft state knows the files that it has read and the superstep that they reach. A file that
holds only later supersteps is new; one that can only repeat known rows is a rewrite
(OPTIMIZE, a compaction). If a change has any other cause, all rows are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import FormerState, StoredState
from millpond.executor.computation.timers import Timer, Timers
from millpond.executor.time.clocks import parse_timer_clock
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import LARGE_BYTES, RowFile, read_row_files
from millpond.statestore.rows.merge import take_rows
from millpond.statestore.rows.row import STATE_VERSION
from millpond.statestore.types import Objects


@dataclass(frozen=True, slots=True)
class FileKeys:
    """A file, the range of keys it may hold, ``None`` when unknown, and its length."""

    path: str
    min_key: str | None
    max_key: str | None
    size_bytes: int = 0

    def may_hold_any(self, low: str, high: str) -> bool:
        """Whether a key in ``low..high`` may be in the file."""
        return (self.max_key is None or low <= self.max_key) and (
            self.min_key is None or self.min_key <= high
        )


def large_among(files: Iterable[FileKeys]) -> frozenset[str]:
    """The paths of those of the files that may be worth reading in parts."""
    return frozenset(file.path for file in files if file.size_bytes >= LARGE_BYTES)


class KnownFiles:
    """The files that soft state has read or adopted.

    Attributes:
        position: the last one that is known to be committed.
        superstep: all that was committed up to this superstep has been read.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileKeys] = {}
        self.position: str | None = None
        self.superstep: int = 0

    @property
    def all(self) -> list[FileKeys]:
        """The files, including those that are only adopted."""
        return list(self._files.values())

    def adopt(self, file: RowFile) -> None:
        """Add a file that may never be committed."""
        self._files[file.path] = FileKeys(file.path, file.min_key, file.max_key, file.size_bytes)

    def disown(self, path: str) -> None:
        """Remove an adopted file that was never committed."""
        self._files.pop(path, None)

    def confirm(self, path: str, superstep: int) -> None:
        """Note that an adopted file has been committed."""
        self.position = path
        self.superstep = max(self.superstep, superstep)

    def are(self, files: Sequence[LiveFile]) -> bool:
        """Whether these are exactly the known files, so that there is nothing to do."""
        return len(files) == len(self._files) > 0 and all(file.path in self._files for file in files)

    def unread_in(self, files: Sequence[LiveFile]) -> list[LiveFile] | None:
        """The committed files that must be read to be up to date; ``None`` if all must be read from the start."""
        if not self._files:
            return None
        added = [file for file in files if file.path not in self._files]
        rewrites = [file for file in added if self._is_rewrite(file)]
        unread = [file for file in added if self._is_unread(file)]
        # If a file vanished without a rewrite, or one holds both old and new rows, all must be read again.
        has_lost_files = len(files) - len(added) < len(self._files) and not rewrites
        return None if has_lost_files or len(rewrites) + len(unread) < len(added) else unread

    def take_in(self, files: Sequence[LiveFile], unread: Sequence[LiveFile]) -> None:
        """Replace the known files by ``files``; ``unread`` are those whose rows the caller reads next."""
        self._files = {
            file.path: FileKeys(file.path, file.min_key, file.max_key, file.size_bytes) for file in files
        }
        if unread:
            newest = max(file.max_superstep or 0 for file in unread)
            self.confirm(unread[-1].path, newest)

    def _is_rewrite(self, file: LiveFile) -> bool:
        written_by_a_superstep = "interval" in file.tags and file.min_superstep is not None
        newest = file.max_superstep
        return not written_by_a_superstep and newest is not None and newest <= self.superstep

    def _is_unread(self, file: LiveFile) -> bool:
        return file.min_superstep is not None and file.min_superstep > self.superstep


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


_COLUMNS: Final = ("key", "state", "state_bytes", STATE_VERSION, "timers")
_COMPACT: Final = 2
"""When at most one in so many rows is left, the memory of the others is released."""


class ColdRows:
    """Rows that are taken out one by one.

    Args:
        merged: one row per key.
        weights: what each row would cost in the cache.
        state_version: that of the computation's code.
    """

    def __init__(self, merged: pa.Table, weights: npt.NDArray[np.int64], state_version: int = 0) -> None:
        self._state_version = state_version
        self._table = merged.select(_COLUMNS)
        self._weights = weights
        self._indices = dict(zip(merged.column("key").to_pylist(), range(merged.num_rows), strict=True))

    def __len__(self) -> int:
        return len(self._indices)

    def among(self, keys: Iterable[str]) -> list[str]:
        """The subset of the keys whose rows are here."""
        indices = self._indices
        return [key for key in keys if key in indices]

    @property
    def keys(self) -> list[str]:
        """The keys of all rows that are here."""
        return list(self._indices)

    @property
    def weights(self) -> npt.NDArray[np.int64]:
        """What the row of each of `keys` would cost in the cache."""
        weights: npt.NDArray[np.int64] = self._weights[list(self._indices.values())]
        return weights

    def take(self, keys: Sequence[str]) -> tuple[LoadedRows, int]:
        """Remove and return the rows of keys that are all here, with their total weight."""
        indices = list(map(self._indices.pop, keys))
        rows = pa.array(indices, pa.int64())
        columns = {name: take_rows(self._table.column(name), rows) for name in _COLUMNS}
        taken = load_rows(pa.table(columns), self._state_version)
        weight = int(self._weights[indices].sum())
        self._compact()
        return taken, weight

    def drop(self, keys: Iterable[str]) -> int:
        """Remove the rows of keys that are all here, and return their total weight."""
        indices = list(map(self._indices.pop, keys))
        weight = int(self._weights[indices].sum())
        self._compact()
        return weight

    def _compact(self) -> None:
        if len(self._indices) * _COMPACT > self._table.num_rows:
            return
        kept = np.zeros(self._table.num_rows, np.bool_)
        kept[list(self._indices.values())] = True
        # A filter works chunk by chunk: all states together may be more than one array holds.
        self._table, self._weights = self._table.filter(pa.array(kept)), self._weights[kept]
        self._indices = dict(
            zip(self._table.column("key").to_pylist(), range(self._table.num_rows), strict=True)
        )
