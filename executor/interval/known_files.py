"""The keys and the consumed record ids in the committed files of an interval.

A Bloom filter answers "never seen" for nearly every new record id (MillWheel §6.1.1). A hit is checked exactly,
against the ``record_ids`` of the key: ids of the newest files are still in memory, ids of older files are read. A
false hit costs a read and never a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.interval.row_reader import FileKeys, RowReader, large_among
from millpond.statestore.interval import Interval
from millpond.statestore.rows.record_ids import Fingerprints, RecordIdFilter, fingerprints
from millpond.statestore.rows.row import lengths_of, lists_of, one_array

ID_COLUMNS: Final = ("key", "record_ids")

_CAPACITY_MIN: Final = 262_144
_CAPACITY_MAX: Final = 16_777_216
_ERROR_RATE: Final = 1e-6
# What the filter takes for one id.
_FILTER_BYTES: Final = 8
_FILES_AT_ONCE: Final = 8
_IDS: Final = pa.list_(pa.binary())
# The size of Arrow's objects around a small table, which `nbytes` leaves out.
_TABLE_BYTES: Final = 4_096

_Contents = TypeVar("_Contents")


class _NewestFiles(Generic[_Contents]):
    """Contents of the newest files, by path, within a bound of memory."""

    def __init__(self, limit_bytes: Callable[[], int], size_of: Callable[[_Contents], int]) -> None:
        self._limit_bytes = limit_bytes
        self._size_of = size_of
        self._contents: dict[str, _Contents] = {}
        self.size_bytes: int = 0

    def _put(self, path: str, contents: _Contents) -> None:
        self.drop(path)
        self._contents[path] = contents
        self.size_bytes += self._size_of(contents)
        limit = self._limit_bytes()
        while self.size_bytes > limit and self._contents:
            self.drop(next(iter(self._contents)))

    def drop(self, path: str) -> None:
        if path in self._contents:
            self.size_bytes -= self._size_of(self._contents.pop(path))

    def keep_only(self, paths: Collection[str]) -> None:
        for path in self._contents.keys() - paths:
            self.drop(path)


class KeysOfFiles(_NewestFiles[Fingerprints]):
    """The key fingerprints of the newest files, within a bound of memory: a file without a wanted key is not read.

    A superstep's file is read whole, and there are many of them. Their keys are mostly in the cache, so nearly none is
    wanted from them. A large file contains a filter of its keys (`millpond.statestore.rows.pages`).
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        super().__init__(limit_bytes, lambda keys: keys.nbytes)

    def add(self, path: str, keys: pa.Array | pa.ChunkedArray) -> None:
        self._put(path, np.sort(fingerprints(keys)))

    def files_with(self, files: Sequence[FileKeys], keys: Sequence[str]) -> list[FileKeys]:
        """Return the files that may have any of the keys, including all files with unknown keys."""
        low, high = min(keys), max(keys)
        in_range = [file for file in files if file.may_hold_any(low, high)]
        if not any(file.path in self._contents for file in in_range):
            return in_range
        wanted = fingerprints(pa.array(keys, pa.string()))
        return [file for file in in_range if self._may_have_any(file.path, wanted)]

    def _may_have_any(self, path: str, wanted: Fingerprints) -> bool:
        known = self._contents.get(path)
        if known is None:
            return True
        if not len(known):
            # After a split a file may have rows of the other part only.
            return False
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return bool((known[places] == wanted).any())


class KnownIds(_NewestFiles[pa.Table]):
    """The consumed record ids of one interval: a filter, built when first needed, and the newest ids themselves.

    A filter forgets nothing, while compactions drop the ids that are past the horizon. So a full filter is rebuilt from
    the files. ``limit_bytes`` is the limit of the newest ids, and of the filter if that is enough for 262,144 ids;
    ``capacity_max`` is the most ids that the filter is built for, at 8 bytes each.
    """

    def __init__(
        self,
        interval: Interval,
        reader: RowReader,
        limit_bytes: Callable[[], int],
        *,
        capacity_max: int = _CAPACITY_MAX,
    ) -> None:
        super().__init__(limit_bytes, lambda table: int(table.nbytes) + _TABLE_BYTES)
        self._interval = interval
        self._reader = reader
        self._capacity_max = capacity_max
        self.is_prepared: bool = False
        self._filter: RecordIdFilter | None = None
        self._full_at = 0

    @property
    def filter_bytes(self) -> int:
        return 0 if self._filter is None else self._filter.size_bytes

    def prepare(self, files: Sequence[FileKeys]) -> None:
        """Build the filter from all files with rows of the interval, unless the present one has room."""
        if self._filter is not None and self._filter.count < self._full_at:
            return
        affordable = max(self._limit_bytes() // _FILTER_BYTES, _CAPACITY_MIN)
        capacity_max = min(affordable, self._capacity_max)
        built = RecordIdFilter(min(_CAPACITY_MIN, capacity_max), _ERROR_RATE, capacity_max=capacity_max)
        # A few files at a time: all ids of an interval may not fit in memory at once.
        for start in range(0, len(files), _FILES_AT_ONCE):
            some = files[start : start + _FILES_AT_ONCE]
            read = self._reader.read(
                [file.path for file in some], ID_COLUMNS, interval=self._interval, large=large_among(some)
            )
            built.add(_ids_in(read))
        # With more live ids than the filter is built for, rebuilding soon would gain nothing.
        self._full_at = built.count + max(built.count, capacity_max)
        self._filter, self.is_prepared = built, True

    def may_be_known(self, prints: Fingerprints) -> npt.NDArray[np.bool_]:
        """Return False for each id that was never consumed, by fingerprint; call `prepare` first."""
        if self._filter is None:
            return np.ones(len(prints), dtype=np.bool_)
        return self._filter.might_contain(prints)

    def add(self, prints: Fingerprints) -> None:
        if self._filter is not None:
            self._filter.add(prints)

    def add_updates(self, updates: pa.Table) -> None:
        ids = _ids_in(updates)
        if self._filter is not None and len(ids):
            self._filter.add(ids)

    def keep(self, path: str, updates: pa.Table) -> None:
        self._put(path, _keys_and_ids(updates))

    def consumed(
        self, files: Sequence[FileKeys], keys: Sequence[str], ids: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        """Mark each (key, id) that has been consumed, exactly."""
        wanted = pa.array(sorted(set(ids)), pa.binary())
        low, high = min(keys), max(keys)
        files = [file for file in files if file.may_hold_any(low, high)]
        consumed: set[tuple[str, bytes]] = set()
        for file in files:
            if file.path in self._contents:
                consumed |= _pairs(self._contents[file.path], wanted)
        unread = [file.path for file in files if file.path not in self._contents]
        missing = {key for key, id_ in zip(keys, ids, strict=True) if (key, id_) not in consumed}
        if unread and missing:
            large = large_among(files)
            read = self._reader.read(unread, ID_COLUMNS, keys=missing, interval=self._interval, large=large)
            consumed |= _pairs(_keys_and_ids(read), wanted)
        return np.fromiter((pair in consumed for pair in zip(keys, ids, strict=True)), np.bool_, len(keys))


def _ids_in(updates: pa.Table) -> pa.Array:
    return one_array(updates.column("record_ids")).flatten().field("id")


def _keys_and_ids(updates: pa.Table) -> pa.Table:
    # The times of the ids would double the memory, and only compactions use them.
    lists = updates.column("record_ids").combine_chunks()
    ids = lists_of(lists.flatten().field("id"), lengths_of(lists), _IDS, lists.is_null())
    return pa.table({"key": updates.column("key"), "ids": ids})


def _pairs(table: pa.Table, wanted: pa.Array) -> set[tuple[str, bytes]]:
    lists = one_array(table.column("ids"))
    ids = lists.flatten()
    chosen = pc.is_in(ids, wanted)
    rows = pc.list_parent_indices(lists).filter(chosen)
    keys = one_array(table.column("key")).take(rows)
    return set(zip(keys.to_pylist(), ids.filter(chosen).to_pylist(), strict=True))
