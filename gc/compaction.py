"""Compactions: rewrite files of an interval into one file with one row per key, without garbage.

A compaction reads its files with their checksums, combines the updates of each key by the reader's
rule, keeps what may still be needed, and writes one file. Its rows carry the newest
contributing (sequencer, commit number, superstep), so they keep their order relative to all
other updates of their keys. It drops:

- updates that a newer update in the compaction overrides;
- productions that have been delivered: those of all supersteps before the last one (MillWheel §6.1.2);
- record ids that no sender may repeat any more (`millpond.statestore.rows.id_retention`);
- tombstones and empty rows, if the compaction is complete: no older file of the interval is left.

Supersteps never wait for a compaction. It is prepared in parallel with them and becomes part of the table
by a commit of the interval's owner, with the owner's next commit number, like any other write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.gc.compaction_plan import MEMORY_BYTES_MAX, Compaction
from millpond.statestore.commit.request import IntervalWrite
from millpond.statestore.errors import UnavailableError
from millpond.statestore.failpoint import reach
from millpond.statestore.rows.files import PARQUET, RowFile, read_row_files, write_row_file
from millpond.statestore.rows.id_retention import IdRetention
from millpond.statestore.rows.merge import combine_updates
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.rows.row_format import COMPACTED_PAGED_BYTES_MIN, ParquetRowFormat, RowFormat
from millpond.statestore.rows.row_shape import lengths_of, lists_of
from millpond.statestore.rows.stream import RowFileWriter, Run, open_runs
from millpond.statestore.rows.wide_column import nulls
from millpond.statestore.types import Objects, Superstep

_STREAMED_BYTES: Final = 1 << 27
_BATCH_BYTES_MIN: Final = 1 << 20
"""Least number of bytes of one file that a compaction through the disk decodes at a time."""

_COMPACTED: Final = ParquetRowFormat(COMPACTED_PAGED_BYTES_MIN)
"""What is read by key for as long as it is not compacted again has a page index even where it is not large."""

_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRules:
    """What a compaction must keep.

    Attributes:
        pending_from: productions of this superstep and later ones may be undelivered.
        ids: the records that may be delivered again.
    """

    pending_from: Superstep
    ids: IdRetention


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """A compaction that is prepared but not yet committed.

    Attributes:
        compaction: the files that were rewritten.
        file: the file that replaces them; ``None`` when none of their rows is still needed.
    """

    compaction: Compaction
    file: RowFile | None

    def write(self, fence: Fence) -> IntervalWrite:
        """The interval's part of the commit that replaces the old files by the new one.

        Args:
            fence: the owner's next fence.
        """
        added = () if self.file is None else (self.file,)
        return IntervalWrite(
            interval=self.compaction.interval,
            fence=fence,
            added=tuple(
                replace(file, sequencer=fence.sequencer, commit_number=fence.commit_number) for file in added
            ),
            removed=tuple(file.path for file in self.compaction.files),
        )

    @property
    def freed_bytes(self) -> int:
        """By how many bytes the table shrinks."""
        before = sum(file.size_bytes for file in self.compaction.files)
        return before - (0 if self.file is None else self.file.size_bytes)


def compact_files(
    objects: Objects,
    compaction: Compaction,
    rules: CompactionRules,
    *,
    fence: Fence,
    token: str,
    row_format: RowFormat = PARQUET,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    scratch: str | None = None,
) -> Compacted:
    """Read the files of a compaction and write their replacement; nothing is committed.

    Files of more than ``memory_bytes_max`` together are merged through the local disk, in memory that
    does not grow with them; the result is equivalent.

    Args:
        objects: the table's root.
        compaction: what to rewrite.
        rules: what to keep.
        fence: the owner's last or next fence; no row may be newer.
        token: 32 unique hexadecimal digits.
        row_format: the encoding of the new file; only Parquet is merged through the disk.
        memory_bytes_max: size of the files up to which they are compacted in memory.
        scratch: local folder for a merge through the disk; the system's temporary folder by default. It
            needs room for the old files and the new one.

    Raises:
        DataError: a file is missing or its bytes are wrong.
        UnavailableError: the store is unavailable, or the local disk has no room.
    """
    if compaction.size_bytes > memory_bytes_max and isinstance(row_format, ParquetRowFormat):
        file = _compact_through_disk(objects, compaction, rules, fence, token, scratch)
        reach("compaction.file_written")
        return Compacted(compaction=compaction, file=file)
    updates = read_row_files(objects, [file.path for file in compaction.files], interval=compaction.interval)
    reach("compaction.read")
    rows = compact_updates(updates, rules, is_complete=compaction.is_complete)
    if not rows.num_rows:
        return Compacted(compaction=compaction, file=None)
    file = write_row_file(
        objects,
        compaction.interval,
        rows,
        superstep=compaction.superstep,
        fence=fence,
        token=token,
        row_format=_COMPACTED if isinstance(row_format, ParquetRowFormat) else row_format,
    )
    # It may be another process that commits it.
    objects.sync()
    reach("compaction.file_written")
    return Compacted(compaction=compaction, file=file)


def _compact_through_disk(
    objects: Objects,
    compaction: Compaction,
    rules: CompactionRules,
    fence: Fence,
    token: str,
    scratch: str | None,
) -> RowFile | None:
    """Merge the sorted files, one range of keys after the other."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(_scratch_folder(scratch)))
        batch_bytes = max(_BATCH_BYTES_MIN, _STREAMED_BYTES // len(compaction.files))
        runs: list[Run] = []
        for number, file in enumerate(compaction.files):
            run_folder = folder / str(number)
            run_folder.mkdir()
            runs += open_runs(
                objects, file.path, interval=compaction.interval, scratch=run_folder, batch_bytes=batch_bytes
            )
        reach("compaction.read")
        writer = RowFileWriter(
            folder, compaction.interval, superstep=compaction.superstep, fence=fence, token=token
        )
        opened.callback(writer.close)
        for updates in stretches(runs):
            writer.write(compact_updates(updates, rules, is_complete=compaction.is_complete))
        return writer.finish(objects)


def stretches(runs: Sequence[Run]) -> Iterator[pa.Table]:
    """The updates of all runs, cut by key: all updates of a key are in one piece, and keys rise from piece to piece.

    Within a piece the runs keep their order. One batch of each run is in memory at a time.

    Args:
        runs: each sorted by key, no key in two of its batches.
    """
    heads = [next(run, None) for run in runs]
    while True:
        for index, run in enumerate(runs):
            while (head := heads[index]) is not None and not head.num_rows:
                heads[index] = next(run, None)
        waiting = [head for head in heads if head is not None]
        if not waiting:
            return
        # The current batches hold all updates up to this key, and at least one batch is used up.
        bound = min(_key(head, head.num_rows - 1) for head in waiting)
        counts = [0 if head is None else _rows_up_to(head, bound) for head in heads]
        pieces = [head.slice(0, rows) for head, rows in zip(heads, counts, strict=True) if head and rows]
        yield pa.concat_tables(pieces)
        heads = [head and head.slice(rows) for head, rows in zip(heads, counts, strict=True)]


def _key(table: pa.Table, row: int) -> str:
    key: str = table.column("key")[row].as_py()
    return key


def _rows_up_to(table: pa.Table, bound: str) -> int:
    return bisect_right(range(table.num_rows), bound, key=lambda row: _key(table, row))


@contextmanager
def _scratch_folder(parent: str | None) -> Iterator[str]:
    try:
        folder = TemporaryDirectory(prefix="millpond-compaction-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UnavailableError("cannot create a folder to compact in", folder=parent, cause=error) from error
    with folder as path:
        yield path


def compact_updates(updates: pa.Table, rules: CompactionRules, *, is_complete: bool) -> pa.Table:
    """One update per key, sorted by key, equivalent to all of its updates, without garbage.

    Args:
        updates: row updates in `ROW_SCHEMA`, in any order.
        rules: what to keep.
        is_complete: no older updates of these keys exist elsewhere.
    """
    combined = combine_updates(updates)
    keys = combined.column("key").combine_chunks()
    slots = pc.index_in(updates.column("key").combine_chunks(), value_set=keys).to_numpy().astype(np.int64)
    columns = {name: combined.column(name) for name in combined.column_names}
    columns["record_ids"] = _record_ids(updates, slots, len(keys), rules.ids)
    columns["productions"] = _productions(updates, slots, len(keys), rules.pending_from)
    rows = pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)
    needed = _is_needed(rows) if is_complete else np.ones(len(keys), np.bool_)
    return rows if needed.all() else rows.filter(pa.array(needed))


def _is_needed(rows: pa.Table) -> npt.NDArray[np.bool_]:
    needed = lengths_of(rows.column("timers").combine_chunks()) > 0
    for name in ("state", "state_bytes", "record_ids", "productions", "hold"):
        needed |= rows.column(name).is_valid().to_numpy()
    return needed


def _record_ids(updates: pa.Table, slots: _Index, count: int, retention: IdRetention) -> pa.ListArray:
    """Per key, the ids of all its updates that may come again; null where there are none.

    ``slots`` gives the key of each update, as an index below ``count``.
    """
    lists = updates.column("record_ids").combine_chunks()
    ids, owners = lists.flatten(), slots[pc.list_parent_indices(lists).to_numpy()]
    kept = np.flatnonzero(retention.keeps(ids))
    if not len(kept):
        return nulls(lists.type, count)
    kept = kept[np.argsort(owners[kept], kind="stable")]
    lengths = np.bincount(owners[kept], minlength=count)
    return _lists(retention.with_arrivals(ids.take(pa.array(kept))), lengths, "record_ids")


def _productions(
    updates: pa.Table, slots: _Index, count: int, pending_from: Superstep
) -> pa.ListArray | pa.Array:
    """Per key, the productions of its updates of ``pending_from`` and later; null where there are none."""
    lists = updates.column("productions").combine_chunks()
    owners = pc.list_parent_indices(lists).to_numpy()
    pending = updates.column("superstep").to_numpy()[owners] >= pending_from
    kept = np.flatnonzero(pending)
    if not len(kept):
        return nulls(lists.type, count)
    kept = kept[np.argsort(slots[owners[kept]], kind="stable")]
    lengths = np.bincount(slots[owners[kept]], minlength=count)
    return _lists(lists.flatten().take(pa.array(kept)), lengths, "productions")


def _lists(values: pa.Array, lengths: _Index, name: str) -> pa.ListArray:
    return lists_of(values, lengths, ROW_SCHEMA.field(name).type, pa.array(lengths == 0))
