"""Which record ids an interval has already consumed (MillWheel §6.1.1).

A Bloom filter answers "never seen" for nearly every new id. A hit is checked exactly, against
the ``record_ids`` of the key: those of the newest files are still in memory, those of older
files are read. A false hit costs a read and never a record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.interval.row_reader import FileKeys, RowReader, large_among
from millpond.statestore.interval import Interval
from millpond.statestore.rows.record_ids import RecordIdFilter
from millpond.statestore.rows.row import lengths_of, lists_of

ID_COLUMNS: Final = ("key", "record_ids")

_CAPACITY_MIN: Final = 262_144
_CAPACITY_MAX: Final = 16_777_216
_ERROR_RATE: Final = 1e-6
_FILTER_BYTES: Final = 8
"""Of the filter, for an id."""

_FILES_AT_ONCE: Final = 8
_IDS: Final = pa.list_(pa.binary())
# The size of Arrow's objects around a small table, which `nbytes` leaves out.
_TABLE_BYTES: Final = 4_096


class KnownIds:
    """The ids of one interval: a filter, built when first needed, and the newest ids themselves.

    A filter forgets nothing, while compactions drop the ids that are past the horizon. So it is rebuilt from the
    files once as many ids have been added to it as it was built for.

    Args:
        interval: the interval.
        reader: reads ``record_ids`` back.
        limit_bytes: how much the newest ids may occupy now, and as much again the filter, where that is enough for
            262,144 ids.
        capacity_max: the most ids that the filter is built for, at 8 bytes each.
    """

    def __init__(
        self,
        interval: Interval,
        reader: RowReader,
        limit_bytes: Callable[[], int],
        *,
        capacity_max: int = _CAPACITY_MAX,
    ) -> None:
        self._interval = interval
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._capacity_max = capacity_max
        self._filter: RecordIdFilter | None = None
        self._full_at = 0
        self._recent: OrderedDict[str, pa.Table] = OrderedDict()
        self._recent_bytes = 0

    def prepare(self, files: Sequence[FileKeys]) -> None:
        """Build the filter from the files, unless there is one that is not full.

        Args:
            files: all that hold rows of the interval, including those of adopted bundles.
        """
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
            built.add(ids_in(read))
        # If more ids are live than the filter is built for, to read them again soon gains nothing.
        self._full_at = built.count + max(built.count, capacity_max)
        self._filter = built

    @property
    def recent_bytes(self) -> int:
        """How much of the newest ids is in memory."""
        return self._recent_bytes

    @property
    def filter_bytes(self) -> int:
        """What the filter occupies."""
        return 0 if self._filter is None else self._filter.size_bytes

    def may_be_known(self, fingerprints: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """False where an id was never consumed, by its fingerprint; call `prepare` first."""
        if self._filter is None:
            return np.ones(len(fingerprints), dtype=np.bool_)
        return self._filter.might_contain(fingerprints)

    def add(self, fingerprints: npt.NDArray[np.uint64]) -> None:
        """Note ids that a bundle consumes."""
        if self._filter is not None:
            self._filter.add(fingerprints)

    def follow(self, updates: pa.Table) -> None:
        """Note the ids in updates that another process committed."""
        if self._filter is not None:
            ids = ids_in(updates)
            if len(ids):
                self._filter.add(ids)

    @property
    def is_prepared(self) -> bool:
        """Whether the filter has been built."""
        return self._filter is not None

    def keep(self, path: str, updates: pa.Table) -> None:
        """Keep the ids of a file that this process has written."""
        if self._filter is None:
            return
        table = _keys_and_ids(updates)
        self._recent[path] = table
        self._recent_bytes += _size_bytes(table)
        limit = self._limit_bytes()
        while self._recent_bytes > limit and self._recent:
            self._recent_bytes -= _size_bytes(self._recent.popitem(last=False)[1])

    def keep_only(self, files: Sequence[FileKeys]) -> None:
        """Drop the ids of all files but these."""
        for path in self._recent.keys() - {file.path for file in files}:
            self.drop(path)

    def drop(self, path: str) -> None:
        """Drop the ids of a file that was never committed."""
        table = self._recent.pop(path, None)
        if table is not None:
            self._recent_bytes -= _size_bytes(table)

    def consumed(
        self, files: Sequence[FileKeys], keys: Sequence[str], ids: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        """Whether each (key, id) has been consumed, without false hits."""
        wanted = pa.array(sorted(set(ids)), pa.binary())
        low, high = min(keys), max(keys)
        files = [file for file in files if file.may_hold_any(low, high)]
        paths = [file.path for file in files]
        tables = [self._recent[path] for path in paths if path in self._recent]
        unread = [path for path in paths if path not in self._recent]
        consumed: set[tuple[str, bytes]] = set()
        for table in tables:
            consumed |= _pairs(table, wanted)
        missing = {key for key, id_ in zip(keys, ids, strict=True) if (key, id_) not in consumed}
        if unread and missing:
            large = large_among(files)
            read = self._reader.read(unread, ID_COLUMNS, keys=missing, interval=self._interval, large=large)
            consumed |= _pairs(_keys_and_ids(read), wanted)
        return np.fromiter((pair in consumed for pair in zip(keys, ids, strict=True)), np.bool_, len(keys))


def ids_in(updates: pa.Table) -> pa.Array:
    """All record ids of row updates."""
    lists = updates.column("record_ids").combine_chunks()
    ids = lists.flatten().field("id")
    return ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids


def _size_bytes(table: pa.Table) -> int:
    return int(table.nbytes) + _TABLE_BYTES


def _keys_and_ids(updates: pa.Table) -> pa.Table:
    """Each key with its ids, without their times, which only compactions use and which would double the memory."""
    lists = updates.column("record_ids").combine_chunks()
    ids = lists_of(lists.flatten().field("id"), lengths_of(lists), _IDS, lists.is_null())
    return pa.table({"key": updates.column("key"), "ids": ids})


def _pairs(table: pa.Table, wanted: pa.Array) -> set[tuple[str, bytes]]:
    lists = table.column("ids").combine_chunks()
    ids = lists.flatten()
    chosen = pc.is_in(ids, wanted)
    rows = pc.list_parent_indices(lists).filter(chosen)
    keys = table.column("key").combine_chunks().take(rows)
    return set(zip(keys.to_pylist(), ids.filter(chosen).to_pylist(), strict=True))
