"""Soft state: the rows, timers and record ids of an interval that one process remembers (MillWheel §6.2).

It can be rebuilt from committed files at any time, and must agree with them. `SoftState.synchronise` gets the
committed files before each bundle, reads what other processes committed, and undoes what this process did without a
commit. That alone makes a retried, speculated or moved task safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import ColumnChange, ColumnRows
from millpond.executor.computation.state import StateLayout, StoredState
from millpond.executor.computation.timers import TimerQueue, Timers
from millpond.executor.interval.eviction import EvictionPolicy, UseStatistics, window_aware
from millpond.executor.interval.known_files import KeysOfFiles, KnownIds
from millpond.executor.interval.row_cache import (
    CacheUndo,
    MemoryBudget,
    RowCache,
    summarise_rows,
    timers_weight,
    waiting_weight,
)
from millpond.executor.interval.row_reader import (
    FileKeys,
    LoadedRows,
    RowReader,
    large_among,
    load_changes,
    load_rows,
)
from millpond.executor.time.clocks import PercentileTimes
from millpond.statestore.errors import check
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates, merge_updates
from millpond.statestore.rows.row import ID_COLUMNS, ROW_SCHEMA, TimeDomain
from millpond.statestore.system import collector_paused
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

# Default memory budget of a process.
BUDGET_BYTES: Final = 512 * 2**20

# Of an interval's limit, at most a quarter each is for the newest ids and for the filter of all ids, and a sixteenth
# for keys of files. Rows have the rest, but at least a quarter.
_IDS_SHARE: Final = 4
_KEYS_SHARE: Final = 16
_ROWS_SHARE: Final = 4

# The columns that a new owner reads of more rows than memory holds (MillWheel §6.2).
_TIMER_COLUMNS: Final = ("key", "timers", "superstep", "sequencer", "commit_number", "deleted")

# A new owner keeps all rows if their files, which are compressed, take less than this part of its limit: the process
# may be given more intervals.
_TIMERS_FIRST: Final = 2

# In so many parts rows leave the columns when memory is short.
_LEAVING_PARTS: Final = 8

# Bundles that may be adopted between two calls of `SoftState.synchronise`.
_TENTATIVE_MAX: Final = 64


class KnownFiles:
    """The files that soft state has read or adopted.

    A file with later supersteps only is new, and a file that can only repeat known rows is a rewrite (OPTIMIZE, a
    compaction). If the list of files changes for any other reason, all rows must be read again.

    Everything committed up to ``superstep`` has been read.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileKeys] = {}
        self.superstep: int = 0

    @property
    def all(self) -> list[FileKeys]:
        return list(self._files.values())

    def adopt(self, file: RowFile) -> None:
        self._files[file.path] = FileKeys(file.path, file.min_key, file.max_key, file.size_bytes)

    def disown(self, path: str) -> None:
        self._files.pop(path, None)

    def confirm(self, superstep: int) -> None:
        self.superstep = max(self.superstep, superstep)

    def are(self, files: Sequence[LiveFile]) -> bool:
        return len(files) == len(self._files) > 0 and all(file.path in self._files for file in files)

    def unread_in(self, files: Sequence[LiveFile]) -> list[LiveFile] | None:
        """Return the committed files still to read, or ``None`` if all must be read from the start."""
        if not self._files:
            return None
        added = [file for file in files if file.path not in self._files]
        rewrites, unread = [], []
        for file in added:
            oldest, newest = file.min_superstep, file.max_superstep
            if oldest is not None and oldest > self.superstep:
                unread.append(file)
            # The file of a superstep, with its interval and first superstep, is no rewrite.
            elif (
                newest is not None
                and newest <= self.superstep
                and ("interval" not in file.tags or oldest is None)
            ):
                rewrites.append(file)
        # If a file vanished without a rewrite, or one holds both old and new rows, all must be read again.
        has_lost_files = len(files) - len(added) < len(self._files) and not rewrites
        return None if has_lost_files or len(rewrites) + len(unread) < len(added) else unread

    def take_in(self, files: Sequence[LiveFile], unread: Sequence[LiveFile]) -> None:
        """Replace the known files by ``files``; the caller reads the rows of ``unread`` next."""
        self._files = {
            file.path: FileKeys(file.path, file.min_key, file.max_key, file.size_bytes) for file in files
        }
        if unread:
            self.confirm(max(file.max_superstep or 0 for file in unread))


@dataclass(slots=True)
class _Tentative:
    """A bundle of this process that is not known to be committed."""

    undo: CacheUndo
    updates: pa.Table
    in_columns: tuple[Sequence[str], Any] | None = None
    path: str | None = None
    superstep: int = 0


class SoftState:
    """Rows, timers and record ids of one interval.

    ``memory`` is the budget of all intervals of the process. With ``keeps_records``, records may wait in the rows.
    States of code before the version of ``layout`` are kept with their version.
    """

    timers: TimerQueue
    ids: KnownIds

    def __init__(
        self,
        interval: Interval,
        reader: RowReader,
        memory: MemoryBudget | None = None,
        *,
        policy: EvictionPolicy = window_aware,
        keeps_records: bool = False,
        layout: StateLayout = StateLayout(),  # noqa: B008 - immutable
    ) -> None:
        self._layout = layout
        self._interval = interval
        self._reader = reader
        self._memory = MemoryBudget(BUDGET_BYTES) if memory is None else memory
        self._policy = policy
        self._weigh = waiting_weight if keeps_records else timers_weight
        self._make_columns: Callable[[], ColumnRows | None] = lambda: None
        self.reset()

    def keep_in_columns(self, make: Callable[[], ColumnRows | None]) -> None:
        """Keep rows in columns of the code's, which ``make`` returns empty, if it returns any."""
        self._leave_columns()
        self._make_columns = make
        self._columns = make()

    def reset(self) -> None:
        """Drop everything; the next `synchronise` reads all files."""
        self._columns = self._make_columns()
        self._cache = RowCache(self._rows_limit_bytes, self._policy, self._weigh, self._layout)
        self.timers = TimerQueue()
        self.ids = KnownIds(self._interval, self._reader, lambda: self._limit_bytes() // _IDS_SHARE)
        self._files = KnownFiles()
        self._keys_of_files = KeysOfFiles(lambda: self._limit_bytes() // _KEYS_SHARE)
        self._tentative: list[_Tentative] = []
        self._clocks = (0, 0)
        self._statistics = UseStatistics()
        self._is_over_budget()

    def _limit_bytes(self) -> int:
        return self._memory.limit_of(self._interval)

    def _rows_limit_bytes(self) -> int:
        limit = self._limit_bytes()
        return max(limit - self._lookup_bytes(), limit // _ROWS_SHARE)

    def _lookup_bytes(self) -> int:
        size_bytes = self._keys_of_files.size_bytes + self._cache.filter_bytes
        return (
            size_bytes + self.ids.size_bytes + self.ids.filter_bytes if self.ids.is_prepared else size_bytes
        )

    def _is_over_budget(self) -> bool:
        """Report the used memory, and return True if rows must be evicted."""
        lookup_bytes, used_bytes = self._lookup_bytes(), self.used_bytes
        limit = self._memory.report(self._interval, used_bytes + lookup_bytes)
        return used_bytes > max(limit - lookup_bytes, limit // _ROWS_SHARE)

    def leave(self) -> None:
        self._memory.leave(self._interval)

    @property
    def files(self) -> list[FileKeys]:
        return self._files.all

    @property
    def used_bytes(self) -> int:
        in_columns = 0 if self._columns is None else self._columns.size_bytes
        return self._cache.used_bytes + in_columns

    # ------------------------------------------------------------- following the store

    def synchronise(self, files: Sequence[LiveFile]) -> None:
        """Follow the committed files: read the new ones, and undo bundles that they lack."""
        try:
            self._resolve_tentative({file.path for file in files})
            with collector_paused():
                self._follow(files)
        except BaseException:
            # Half-applied files would make later bundles read wrong state.
            self.reset()
            raise

    def confirm(self, file: RowFile | None) -> None:
        """Record that the last adopted bundle was committed, and that no other process has changed anything.

        `synchronise` would find the same, at a cost that grows with the number of files. ``file`` is the bundle's
        file; ``None`` when it changed nothing.
        """
        self._resolve_tentative(set() if file is None else {file.path})

    def _resolve_tentative(self, committed: set[str]) -> None:
        # Newest first: each undo restores the rows after the bundle before.
        while self._tentative and self._tentative[-1].path not in committed:
            self._undo(self._tentative.pop())
        for bundle in self._tentative:
            if bundle.path is not None:
                self._files.confirm(bundle.superstep)
        self._tentative.clear()

    def _undo(self, bundle: _Tentative) -> None:
        undos = [bundle.undo]
        if bundle.in_columns is not None and self._columns is not None:
            keys, former = bundle.in_columns
            rows = self._columns.undo(keys, former)
            # They come back in their stored form; the next bundle in columns takes them up.
            undos.append(self._cache.overwritten(keys, rows.states, rows.timers))
        for undo in undos:
            self._cache.undo(undo)
            self.timers.put(undo.timers)
        if bundle.path is not None:
            # The file exists but was not committed, so neither its rows nor its ids count.
            self._files.disown(bundle.path)
            self._keys_of_files.drop(bundle.path)
            self.ids.drop(bundle.path)

    def _follow(self, files: Sequence[LiveFile]) -> None:
        if self._files.are(files):
            return
        unread = self._files.unread_in(files)
        if unread is None:
            self._rebuild(files)
            return
        self._files.take_in(files, unread)
        paths = {file.path for file in files}
        self.ids.keep_only(paths)
        self._keys_of_files.keep_only(paths)
        if unread:
            self._catch_up(unread)

    def _rebuild(self, files: Sequence[LiveFile]) -> None:
        self.reset()
        self._files.take_in(files, files)
        if not files or self._layout.adds:
            # No code reads these rows, and none has timers.
            return
        if _TIMERS_FIRST * sum(file.size_bytes for file in files) > self._limit_bytes():
            summary = summarise_rows(merge_updates(self._timers_of_files(files)))
        else:
            paths = [file.path for file in files]
            merged = merge_updates(self._reader.read(paths, MERGE_COLUMNS, interval=self._interval))
            summary = summarise_rows(merged)
            self._cache.fill(merged, summary)
        self.timers.fill(summary.event, summary.wall, summary.hold)
        self._is_over_budget()

    def _timers_of_files(self, files: Sequence[LiveFile]) -> pa.Table:
        """Read only the timers of more rows than memory holds; a state is read when its key is first needed."""
        self._cache.start_without_rows(sum(file.num_records or 0 for file in files))
        table = pa.concat_tables([self._timers_in(file) for file in self._files.all])
        for field in ROW_SCHEMA:
            if field.name in MERGE_COLUMNS and field.name not in _TIMER_COLUMNS:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return table.select(MERGE_COLUMNS)

    def _timers_in(self, file: FileKeys) -> pa.Table:
        large = large_among([file])

        def keep(updates: pa.Table) -> pa.Table:
            keys = updates.column("key")
            # The rows are dropped, so the cache must know that these keys may have one.
            self._cache.remember(keys)
            if not large:
                self._keys_of_files.add(file.path, keys)
            is_deleted = pc.fill_null(updates.column("deleted"), False)
            return updates.filter(pc.or_(updates.column("timers").is_valid(), is_deleted))

        return self._reader.read([file.path], _TIMER_COLUMNS, interval=self._interval, large=large, keep=keep)

    def _catch_up(self, unread: Sequence[LiveFile]) -> None:
        if self._layout.adds:
            if self.ids.is_prepared:
                paths = [file.path for file in unread]
                self.ids.add_updates(self._reader.read(paths, ID_COLUMNS, interval=self._interval))
            return
        columns = [*MERGE_COLUMNS, "record_ids"] if self.ids.is_prepared else MERGE_COLUMNS
        updates = self._reader.read([file.path for file in unread], columns, interval=self._interval)
        if self.ids.is_prepared:
            self.ids.add_updates(updates)
        changes = load_changes(combine_updates(updates), self._layout)
        keys, states, timers = changes.keys, changes.states, changes.timers
        self._leave_columns(keys)
        if self._cache.is_complete:
            self._cache.replace_cold([key for key in keys if key in timers and key not in changes.same_state])
        self._cache.warm(keys)
        if changes.same_state:
            old = self._cache.states_of(keys)
            same = changes.same_state
            states = [was if key in same else now for key, was, now in zip(keys, old, states, strict=True)]
        self.timers.put(timers)
        if not self._cache.is_complete:
            # An evicted row stays in the files: an update alone is not the whole row.
            self._cache.remember(keys)
            cached = [index for index, key in enumerate(keys) if key in self._cache]
            keys, states = [keys[index] for index in cached], [states[index] for index in cached]
            timers = {key: timers[key] for key in keys if key in timers}
        self._cache.put(keys, states, timers)
        self.shrink()

    # ------------------------------------------------------------- serving a bundle

    def begin(self) -> None:
        """Prepare for a bundle: undo the last one if it was processed but never adopted."""
        if self._tentative and self._tentative[-1].path is None:
            self._undo(self._tentative.pop())

    def due_keys(
        self,
        event_us: EventTimeMicros,
        wall_us: WallTimeMicros,
        percentile_watermarks: PercentileTimes | None = None,
    ) -> pa.StringArray:
        """Return the keys with a timer that fires at this low watermark, wall time or percentile watermark."""
        due = pa.array(self.timers.due_keys(event_us, wall_us, percentile_watermarks), pa.string())
        if self._columns is None:
            return due
        # No key is in both, because a row is either in the columns or in the cache.
        in_columns = self._columns.due_keys(event_us)
        return pa.concat_arrays([due, in_columns]) if len(due) else in_columns

    def next_event_timer(self) -> int | None:
        return _earlier(
            self.timers.next_at(TimeDomain.EVENT), None if self._columns is None else self._columns.next_at
        )

    def hold(self) -> int | None:
        """Return the earliest output time of any timer or hold; ``None`` without one."""
        return _earlier(self.timers.hold(), None if self._columns is None else self._columns.held_at)

    def holds(self, percentiles: PercentileTimes) -> PercentileTimes:
        """Return the earliest output time by percentile, as `TimerQueue.holds`."""
        if percentiles:
            self._leave_columns()
        return self.timers.holds(percentiles)

    @property
    def columns(self) -> ColumnRows | None:
        """The columns of rows; ``None`` without any, and while rows may only be in files."""
        return self._columns if self._cache.is_complete else None

    def not_in_columns(self, keys: Sequence[str], *, takes_up: bool) -> Collection[str]:
        """Return the keys with a row elsewhere, after the columns have taken up what they can, if they shall."""
        columns, cache = self._columns, self._cache
        cache.warm(keys)
        cached = cache.among(keys)
        if columns is None or not cached or not takes_up:
            return set(cached)
        taken = columns.take_up(cached, cache.states_of(cached), cache.timers_of(cached))
        if taken:
            cache.forget(taken)
            self.timers.put(dict.fromkeys(taken, ()))
        return set(cached) - set(taken)

    def _leave_columns(self, keys: Sequence[str] | None = None) -> None:
        """Give rows that are in columns, those of ``keys`` or all, their stored form."""
        columns = self._columns
        if columns is None or not len(columns):
            return
        leaving = columns.keys if keys is None else columns.among(keys)
        if leaving:
            rows = columns.take(leaving)
            self._cache.load(
                LoadedRows(leaving, rows.states, {key: own for key, own in rows.timers.items() if own})
            )
            self.timers.put(rows.timers)
            # Those that leave after the first eviction are not known to have rows.
            self._cache.remember(leaving)

    def load(self, keys: Sequence[str]) -> list[StoredState | None]:
        """Return the states of the keys, read from files where they are not cached; ``None`` for no state."""
        if self._layout.adds:
            return [None] * len(keys)
        self._leave_columns(keys)
        cache = self._cache
        cache.warm(keys)
        if not cache.is_complete and (absent := cache.absent(keys)):
            files = self._keys_of_files.files_with(self._files.all, absent)
            paths, large = [file.path for file in files], large_among(files)
            updates = self._reader.read(
                paths, MERGE_COLUMNS, keys=absent, interval=self._interval, large=large
            )
            cache.load(load_rows(merge_updates(updates), self._layout))
        return cache.states_of(keys)

    def timers_of(self, keys: Sequence[str]) -> list[Timers]:
        return self._cache.timers_of(keys)

    def apply(
        self,
        updates: pa.Table,
        keys: Sequence[str],
        states: Sequence[StoredState | None],
        timers: Mapping[str, Timers],
        fingerprints: npt.NDArray[np.uint64] | None,
        clocks: tuple[int, int],
        in_columns: tuple[Sequence[str], ColumnChange] | None = None,
    ) -> None:
        """Apply a bundle's outcome tentatively, until `adopt` and `synchronise` resolve whether it was committed.

        ``keys`` and ``states`` are all of the bundle's but those ``in_columns``, ``timers`` only the changed ones,
        ``fingerprints`` the consumed ids', ``clocks`` the low watermark and the wall time.
        """
        if self._layout.adds:
            check(not timers, "rows of a combining state have no timers")
            keys, states, in_columns = (), (), None
        former = None
        if in_columns is not None and self._columns is not None:
            changed_keys, change = in_columns
            self._columns.apply(change)
            former = changed_keys, change.former
        cache = self._cache
        self._clocks = clocks
        # Uses matter only for eviction, so nothing is learned while all rows fit.
        if not cache.is_complete:
            self._statistics.record_uses(keys, self._wait_of, clocks)
        undo = cache.put(keys, states, timers)
        if keys:
            cache.uses.record(keys[0], clocks)
        if timers:
            self.timers.put(timers)
        if not cache.is_complete:
            self._statistics.follow(keys, self._wait_of, clocks)
        if fingerprints is not None:
            self.ids.add(fingerprints)
        self._tentative.append(_Tentative(undo, updates, former))
        self.shrink()

    def adopt(self, file: RowFile | None) -> None:
        """Record that the last bundle's updates were written to ``file``; ``None`` if there were none.

        The next `synchronise` finds out if the file was committed.
        """
        if file is None:
            return
        check(
            bool(self._tentative) and self._tentative[-1].path is None,
            "a file is adopted once, after its bundle",
            path=file.path,
        )
        bundle = self._tentative[-1]
        bundle.path, bundle.superstep = file.path, file.superstep
        if self.ids.is_prepared:
            self.ids.keep(file.path, bundle.updates)
        if not self._cache.is_complete:
            self._keys_of_files.add(file.path, bundle.updates.column("key"))
        # The updates are in the file now, and would otherwise stay in memory until the next commit.
        bundle.updates = bundle.updates.slice(0, 0)
        self._files.adopt(file)
        check(len(self._tentative) <= _TENTATIVE_MAX, "soft state is synchronised every few bundles")

    def _wait_of(self, key: str) -> float:
        return self.timers.wait_of(key, *self._clocks)

    def shrink(self) -> None:
        if not self._is_over_budget():
            return
        in_columns = [] if self._columns is None else self._columns.keys
        # Rows take several times as much memory in their stored form, so each part is evicted before the next one.
        part = len(in_columns) // _LEAVING_PARTS + 1
        expectations = self._statistics.expectations(self._clocks)
        for start in range(0, max(len(in_columns), 1), part):
            self._leave_columns(in_columns[start : start + part])
            self._cache.evict(self.timers.waits(*self._clocks), self._clocks, expectations)
        self._is_over_budget()


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((at for at in (one, other) if at is not None), default=None)
