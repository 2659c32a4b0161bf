"""Soft state: what one process remembers of an interval's rows (MillWheel §6.2).

Everything here can be rebuilt from committed files at any time, and must agree with them.
`SoftState.synchronise` gets the committed files before each bundle: it reads what other
processes committed, and undoes what this process did without a commit. That alone makes a
retried, speculated or moved task safe.

Which keys the files have that this process wrote or read last: a file that has none of those wanted is not read.

A file that a superstep wrote is read whole, and there are many of them. Their keys are mostly in the cache, so nearly
none is wanted from them. Large files have a filter of their keys of their own (`millpond.statestore.rows.page_index`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import TimerQueue, Timers
from millpond.executor.interval.eviction import EvictionPolicy, UseStatistics, window_aware
from millpond.executor.interval.known_ids import KnownIds
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
    KnownFiles,
    RowChanges,
    RowReader,
    large_among,
    load_changes,
    load_rows,
)
from millpond.statestore.errors import check
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates, merge_updates
from millpond.statestore.rows.record_ids import Fingerprints, fingerprints
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.system import collector_paused


class KeysOfFiles:
    """The fingerprints of the keys of some files, those noted last, within a bound of memory.

    Args:
        limit_bytes: how many bytes they may take together now; a key takes 8.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._keys: OrderedDict[str, Fingerprints] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes are kept."""
        return self._bytes

    def note(self, path: str, keys: pa.Array | pa.ChunkedArray) -> None:
        """Keep all keys of a file."""
        self.drop(path)
        self._keys[path] = np.sort(fingerprints(keys))
        self._bytes += self._keys[path].nbytes
        limit = self._limit_bytes()
        while self._bytes > limit and self._keys:
            self._bytes -= self._keys.popitem(last=False)[1].nbytes

    def drop(self, path: str) -> None:
        """Forget a file."""
        known = self._keys.pop(path, None)
        if known is not None:
            self._bytes -= known.nbytes

    def keep_only(self, paths: Collection[str]) -> None:
        """Forget all files but these."""
        for path in self._keys.keys() - paths:
            self.drop(path)

    def files_with(self, files: Sequence[FileKeys], keys: Sequence[str]) -> list[FileKeys]:
        """Those of the files that may have any of the keys: all whose keys are not known are among them."""
        low, high = min(keys), max(keys)
        in_range = [file for file in files if file.may_hold_any(low, high)]
        if not any(file.path in self._keys for file in in_range):
            return in_range
        wanted = fingerprints(pa.array(keys, pa.string()))
        return [file for file in in_range if self._may_have_any(file.path, wanted)]

    def _may_have_any(self, path: str, wanted: Fingerprints) -> bool:
        known = self._keys.get(path)
        if known is None:
            return True
        if not len(known):
            # After a split a file may have rows of the other part only.
            return False
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return bool((known[places] == wanted).any())


BUDGET_BYTES: Final = 512 * 2**20
"""Default memory budget of a process."""

_IDS_SHARE: Final = 4
_KEYS_SHARE: Final = 16
"""
Of what an interval may use, at most a quarter are newest ids, a quarter the filter of all ids, and a sixteenth keys of
files.
"""

_ROWS_SHARE: Final = 4
"""Rows have what the rest leaves, but at least a quarter."""

_TIMER_COLUMNS: Final = ("key", "timers", "superstep", "sequencer", "commit_number", "deleted")
"""What a new owner reads of more rows than memory holds (MillWheel §6.2)."""

_TIMERS_FIRST: Final = 2
"""
A new owner keeps all rows if they are less than this part of what it may use, as files, which are compressed: the
process may be given more intervals.
"""

_TENTATIVE_MAX: Final = 64
"""How many bundles may be adopted between two calls of `SoftState.synchronise`."""


@dataclass(slots=True)
class _Tentative:
    """A bundle of this process that is not known to be committed."""

    undo: CacheUndo
    updates: pa.Table
    path: str | None = None
    superstep: int = 0


class SoftState:
    """Rows, timers and record ids of one interval.

    Args:
        interval: the interval.
        reader: reads committed row updates.
        memory: the budget of all intervals of the process, for rows, newest ids and keys of files.
        policy: which rows to evict first.
        keeps_records: whether records may wait in the rows.
        state_version: that of the computation's code; states of earlier ones are kept with their version.
    """

    def __init__(
        self,
        interval: Interval,
        reader: RowReader,
        memory: MemoryBudget | None = None,
        *,
        policy: EvictionPolicy = window_aware,
        keeps_records: bool = False,
        state_version: int = 0,
    ) -> None:
        self._state_version = state_version
        self._interval = interval
        self._reader = reader
        self._memory = MemoryBudget(BUDGET_BYTES) if memory is None else memory
        self._policy = policy
        self._weigh = waiting_weight if keeps_records else timers_weight
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next `synchronise` reads all files."""
        self._cache = RowCache(self._rows_limit_bytes, self._policy, self._weigh, self._state_version)
        self._timers = TimerQueue()
        self._ids = KnownIds(self._interval, self._reader, lambda: self._limit_bytes() // _IDS_SHARE)
        self._files = KnownFiles()
        self._keys_of_files = KeysOfFiles(lambda: self._limit_bytes() // _KEYS_SHARE)
        self._tentative: list[_Tentative] = []
        self._clocks = (0, 0)
        self._statistics = UseStatistics()
        self._report()

    def _limit_bytes(self) -> int:
        return self._memory.limit_of(self._interval)

    def _rows_limit_bytes(self) -> int:
        limit = self._limit_bytes()
        return max(limit - self._lookup_bytes(), limit // _ROWS_SHARE)

    def _lookup_bytes(self) -> int:
        # What says which rows and ids there are.
        ids = self._ids.recent_bytes + self._ids.filter_bytes
        return ids + self._keys_of_files.size_bytes + self._cache.filter_bytes

    def _report(self) -> None:
        self._memory.report(self._interval, self._cache.used_bytes + self._lookup_bytes())

    def leave(self) -> None:
        """Give the memory budget back: the process drops this soft state."""
        self._memory.leave(self._interval)

    def shrink(self) -> None:
        """Evict rows if they are more than the interval may have now, though it has nothing to do."""
        self._evict()

    @property
    def position(self) -> str | None:
        """The last file applied, committed or only adopted; ``None`` before the first."""
        adopted = [bundle.path for bundle in self._tentative if bundle.path is not None]
        return adopted[-1] if adopted else self._files.position

    @property
    def timers(self) -> TimerQueue:
        """The next timers of each key."""
        return self._timers

    @property
    def ids(self) -> KnownIds:
        """The consumed record ids."""
        return self._ids

    @property
    def files(self) -> list[FileKeys]:
        """The files that hold the interval's rows, including adopted ones."""
        return self._files.all

    @property
    def used_bytes(self) -> int:
        """An estimate of what the cached rows occupy."""
        return self._cache.used_bytes

    # ------------------------------------------------------------- following the store

    def synchronise(self, files: Sequence[LiveFile]) -> None:
        """Follow the committed files: read what is new in them, and undo what they lack.

        Args:
            files: all live files that may hold the interval's rows.

        Raises:
            DataError: a file is missing or its bytes are wrong; the soft state is then empty.
        """
        try:
            self._settle_tentative({file.path for file in files})
            with collector_paused():
                self._follow(files)
        except BaseException:
            self.reset()
            raise

    def confirm(self, file: RowFile | None) -> None:
        """Note that the last adopted bundle was committed, and that no other process has changed anything.

        `synchronise` would find the same, at a cost that grows with the number of files.

        Args:
            file: the bundle's file; ``None`` when it changed nothing.
        """
        self._settle_tentative(set() if file is None else {file.path})

    def _settle_tentative(self, committed: set[str]) -> None:
        while self._tentative and self._tentative[-1].path not in committed:
            self._undo(self._tentative.pop())
        for bundle in self._tentative:
            if bundle.path is not None:
                self._files.confirm(bundle.path, bundle.superstep)
        self._tentative.clear()

    def _undo(self, bundle: _Tentative) -> None:
        self._cache.undo(bundle.undo)
        self._timers.put(bundle.undo.timers)
        if bundle.path is not None:
            self._files.disown(bundle.path)
            self._keys_of_files.drop(bundle.path)
            self._ids.drop(bundle.path)

    def _follow(self, files: Sequence[LiveFile]) -> None:
        if self._files.are(files):
            return
        unread = self._files.unread_in(files)
        if unread is None:
            self._rebuild(files)
            return
        self._files.take_in(files, unread)
        self._ids.keep_only(self._files.all)
        self._keys_of_files.keep_only({file.path for file in self._files.all})
        if unread:
            self._catch_up(unread)

    def _rebuild(self, files: Sequence[LiveFile]) -> None:
        self.reset()
        self._files.take_in(files, files)
        if not files:
            return
        if _TIMERS_FIRST * sum(file.size_bytes for file in files) > self._limit_bytes():
            merged = merge_updates(self._timers_of(files))
            summary = summarise_rows(merged)
        else:
            paths = [file.path for file in files]
            merged = merge_updates(self._reader.read(paths, MERGE_COLUMNS, interval=self._interval))
            summary = summarise_rows(merged)
            self._cache.fill(merged, summary)
        self._timers.fill(summary.event, summary.wall, summary.hold, summary.percentiles)
        self._report()

    def _timers_of(self, files: Sequence[LiveFile]) -> pa.Table:
        """The updates of timers, of more rows than memory holds: a state is read when its key first comes.

        Of each part of a file all but the timers is forgotten again; the cache is told which keys there are.
        """
        self._cache.start_without_rows(sum(file.num_records or 0 for file in files))
        table = pa.concat_tables([self._timers_in(file) for file in self._files.all])
        unread = {name: ROW_SCHEMA.field(name) for name in MERGE_COLUMNS if name not in _TIMER_COLUMNS}
        for field in unread.values():
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return table.select(MERGE_COLUMNS)

    def _timers_in(self, file: FileKeys) -> pa.Table:
        is_small = not large_among([file])

        def keep(updates: pa.Table) -> pa.Table:
            keys = updates.column("key")
            self._cache.remember(keys)
            if is_small:
                self._keys_of_files.note(file.path, keys)
            is_deleted = pc.fill_null(updates.column("deleted"), False)
            return updates.filter(pc.or_(updates.column("timers").is_valid(), is_deleted))

        return self._reader.scan(file, _TIMER_COLUMNS, self._interval, keep)

    def _catch_up(self, unread: Sequence[LiveFile]) -> None:
        columns = [*MERGE_COLUMNS, "record_ids"] if self._ids.is_prepared else MERGE_COLUMNS
        updates = self._reader.read([file.path for file in unread], columns, interval=self._interval)
        if self._ids.is_prepared:
            self._ids.follow(updates)
        self._apply_changes(load_changes(combine_updates(updates), self._state_version))

    def _apply_changes(self, changes: RowChanges) -> None:
        keys, states, timers = changes.keys, changes.states, changes.timers
        if self._cache.is_complete:
            self._cache.replace_cold([key for key in keys if key in timers and key not in changes.same_state])
        self._cache.warm(keys)
        if changes.same_state:
            old = self._cache.states_of(keys)
            same = changes.same_state
            states = [was if key in same else now for key, was, now in zip(keys, old, states, strict=True)]
        self._timers.put(timers)
        if not self._cache.is_complete:
            self._cache.remember(keys)
            cached = [index for index, key in enumerate(keys) if key in self._cache]
            keys, states = [keys[index] for index in cached], [states[index] for index in cached]
            timers = {key: timers[key] for key in keys if key in timers}
        self._cache.put(keys, states, timers)
        self._evict()

    # ------------------------------------------------------------- serving a bundle

    def begin(self) -> None:
        """Prepare for a bundle: undo the last one if it was processed but never adopted."""
        if self._tentative and self._tentative[-1].path is None:
            self._undo(self._tentative.pop())

    def load(self, keys: Sequence[str]) -> list[StoredState | None]:
        """The states of the keys, read from files where they are not cached; ``None`` for no state."""
        self._cache.warm(keys)
        absent = self._cache.absent(keys)
        if absent:
            self._fetch(absent)
        return self._cache.states_of(keys)

    def timers_of(self, key: str) -> Timers:
        """The pending timers of a key that was loaded."""
        return self._cache.timers_of(key)

    def _fetch(self, keys: list[str]) -> None:
        files = self._keys_of_files.files_with(self._files.all, keys)
        paths, large = [file.path for file in files], large_among(files)
        updates = self._reader.read(paths, MERGE_COLUMNS, keys=keys, interval=self._interval, large=large)
        self._cache.load(load_rows(merge_updates(updates), self._state_version))

    def apply(
        self,
        updates: pa.Table,
        keys: Sequence[str],
        states: Sequence[StoredState | None],
        timers: Mapping[str, Timers],
        fingerprints: npt.NDArray[np.uint64] | None,
        clocks: tuple[int, int],
    ) -> None:
        """Apply a bundle's outcome tentatively, until `adopt` and `synchronise` settle whether it was committed.

        Args:
            updates: the row updates that will be written.
            keys: all keys of the bundle.
            states: their states now.
            timers: the timers of those whose timers changed.
            fingerprints: fingerprints of the consumed ids.
            clocks: low watermark and wall time, for choosing what to evict.
        """
        self._clocks = clocks
        if not self._cache.is_complete:
            self._statistics.note_uses(keys, self._wait_of, clocks)
        undo = self._cache.put(keys, states, timers)
        if keys:
            self._cache.note_use(keys[0], clocks)
        self._timers.put(timers)
        if not self._cache.is_complete:
            self._statistics.follow(keys, self._wait_of, clocks)
        if fingerprints is not None:
            self._ids.add(fingerprints)
        self._tentative.append(_Tentative(undo, updates))
        self._evict()

    def adopt(self, file: RowFile | None) -> None:
        """Note that the last bundle's updates were written to ``file``; ``None`` if there were none.

        The next `synchronise` finds out whether the file was committed.
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
        self._ids.keep(file.path, bundle.updates)
        if not self._cache.is_complete:
            self._keys_of_files.note(file.path, bundle.updates.column("key"))
        bundle.updates = bundle.updates.slice(0, 0)
        self._files.adopt(file)
        check(len(self._tentative) <= _TENTATIVE_MAX, "soft state is synchronised every few bundles")

    def _wait_of(self, key: str) -> float:
        return self._timers.wait_of(key, *self._clocks)

    def _evict(self) -> None:
        self._report()
        if self._cache.is_over_budget:
            expectations = self._statistics.expectations(self._clocks)
            self._cache.evict(self._timers.waits(*self._clocks), self._clocks, expectations)
            self._report()
