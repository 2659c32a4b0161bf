"""Row streams: row files read and written piece by piece, in memory that does not grow with them.

A file is copied to the local disk unchanged, its seal is checked there, and batches of bounded size are decoded from it.
A new file is encoded there a row group at a time, sealed, and uploaded in pieces. The results equal those of
`read_row_files` and `write_row_file`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError, check
from millpond.statestore.interval import Interval
from millpond.statestore.objects.obstore import disk_errors, download, upload
from millpond.statestore.rows.files import (
    RowFile,
    check_keys_rise,
    check_may_commit,
    productions_in,
    reading,
    row_file_path,
    rows_within,
    sealed_name,
)
from millpond.statestore.rows.page_index import pack_section
from millpond.statestore.rows.pages import page_index_of
from millpond.statestore.rows.row import ROW_SCHEMA, Fence, check_names, conform
from millpond.statestore.rows.row_format import (
    COMPACTED_PAGED_BYTES_MIN,
    PARQUET_OPTIONS,
    ROWS_PER_GROUP,
    empty_columns,
    file_name_of,
    paged_options,
    parquet_file_seal_holds,
    rows_per_page,
    seal_parquet_file,
)
from millpond.statestore.types import Objects, Superstep

Run = Iterator[pa.Table]
"""Row updates sorted by key, in pieces; no key is in two pieces."""

_NAMES: Final = list(ROW_SCHEMA.names)
_BUFFER_BYTES: Final = 1 << 18
_GROUP_BYTES: Final = 1 << 26
_BATCH_ROWS_MIN: Final = 64


def open_runs(
    objects: Objects, path: str, *, interval: Interval, scratch: Path, batch_bytes: int
) -> Sequence[Run]:
    """Open a live row file as runs of updates; together they equal the result of `read_row_files`.

    One of our files is a single run. Another writer's file may be unsorted, so each of its row groups is sorted on its
    own and spilled to disk. A damaged page raises `DataError` only when the run reaches the page.

    Args:
        objects: the table's root.
        path: the file.
        interval: only the updates whose key lies in it.
        scratch: an empty local folder, which must stay until the runs are read.
        batch_bytes: approximate number of bytes of a run that are decoded at a time.
    """
    local = scratch / "file"
    name = sealed_name(path)
    download(objects, path, local)
    with reading(path):
        if name is not None and not parquet_file_seal_holds(local, name):
            raise DataError("row file is damaged: its seal is broken")
        file = pq.ParquetFile(
            local,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",
            buffer_size=_BUFFER_BYTES,
        )
        check_names(file.schema_arrow)
        if name is not None:
            return [_batches(file, path, interval, _rows_of(batch_bytes, file))]
        groups = range(file.num_row_groups)
        return [_sorted_group(file, group, interval, scratch, batch_bytes) for group in groups]


def _batches(file: pq.ParquetFile, path: str, interval: Interval, rows: int) -> Run:
    with reading(path), file:
        # One group at a time: over all groups, Arrow's reader would keep every group in memory.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(rows, row_groups=[group], use_threads=False):
                yield rows_within(conform(pa.Table.from_batches([batch]), _NAMES), interval)


def _sorted_group(
    file: pq.ParquetFile, group: int, interval: Interval, scratch: Path, batch_bytes: int
) -> Run:
    rows = file.read_row_group(group, use_threads=False)
    table = rows_within(conform(rows, _NAMES), interval)
    # Arrow's sort is stable, so updates of a key stay in the file's order.
    table = table.take(pc.sort_indices(table.column("key"))).combine_chunks()
    spill = scratch / f"group{group}"
    with pa.ipc.new_file(spill, ROW_SCHEMA) as writer:
        for piece in _cut_between_keys(table, batch_bytes):
            writer.write_table(piece)
    return _spilled_run(spill)


def _spilled_run(path: Path) -> Run:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)])


def _cut_between_keys(table: pa.Table, batch_bytes: int) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    keys = table.column("key")
    is_new = pc.not_equal(keys.slice(1), keys.slice(0, table.num_rows - 1)).to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], 1 + np.flatnonzero(is_new), [table.num_rows]])
    rows = max(1, table.num_rows * batch_bytes // max(table.nbytes, 1))
    begin = 0
    while begin < table.num_rows:
        end = int(starts[np.searchsorted(starts, min(begin + rows, table.num_rows))])
        yield table.slice(begin, end - begin)
        begin = end


def _rows_of(batch_bytes: int, file: pq.ParquetFile) -> int:
    metadata = file.metadata
    held = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    rows: int = batch_bytes * metadata.num_rows // max(held, 1)
    return min(max(rows, _BATCH_ROWS_MIN), ROWS_PER_GROUP)


class RowFileWriter:
    """Writer of one row file of any size, in a local folder ``scratch``; see `write_row_file` for the other arguments."""

    def __init__(
        self, scratch: Path, interval: Interval, *, superstep: Superstep, fence: Fence, token: str
    ) -> None:
        self._interval = interval
        self._superstep = superstep
        self._fence = fence
        self._path = row_file_path(interval.computation, superstep, token)
        self._local = scratch / "written"
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._rows = 0
        self._productions = 0
        self._low: str | None = None
        self._high: str | None = None
        self._page_rows = 0
        self._empty_columns = frozenset(ROW_SCHEMA.names)

    def write(self, table: pa.Table) -> None:
        """Append row updates in `ROW_SCHEMA`, whose keys rise and are greater than all earlier keys."""
        if not table.num_rows:
            return
        self._check(table)
        self._rows += table.num_rows
        self._empty_columns &= empty_columns(table)
        self._productions += productions_in(table)
        self._waiting.append(table)
        self._waiting_rows += table.num_rows
        self._waiting_bytes += table.nbytes
        if self._waiting_rows >= ROWS_PER_GROUP or self._waiting_bytes >= _GROUP_BYTES:
            self._write_groups(is_end=False)

    def finish(self, objects: Objects) -> RowFile | None:
        """Seal and upload the file, which stays invisible until a commit names it; None if there were no rows."""
        if self._low is None or self._high is None:
            return None
        self._write_groups(is_end=True)
        with disk_errors(path=self._path):
            self.close()
            name = file_name_of(self._path)
            seal_parquet_file(self._local, name, self._page_section(name))
            size_bytes = self._local.stat().st_size
        upload(objects, self._path, self._local)
        return RowFile(
            path=self._path,
            size_bytes=size_bytes,
            rows=self._rows,
            min_key=self._low,
            max_key=self._high,
            superstep=self._superstep,
            sequencer=self._fence.sequencer,
            commit_number=self._fence.commit_number,
            productions=self._productions,
        )

    def close(self) -> None:
        """Close the local file; an unfinished file is discarded."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _check(self, table: pa.Table) -> None:
        check_keys_rise(table)
        low, high = check_may_commit(table, self._interval, self._fence)
        check(self._high is None or self._high < low, "the keys of a row file rise", low=low)
        self._low = low if self._low is None else self._low
        self._high = high

    def _write_groups(self, *, is_end: bool) -> None:
        """Write whole row groups; wide rows make smaller groups."""
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        if self._writer is None and table.nbytes >= COMPACTED_PAGED_BYTES_MIN:
            self._page_rows = rows_per_page(table)
        rows = max(1, min(ROWS_PER_GROUP, table.num_rows * _GROUP_BYTES // max(table.nbytes, 1)))
        if self._page_rows:
            rows = max(rows - rows % self._page_rows, self._page_rows)
        with disk_errors(path=self._path):
            if self._writer is None:
                options = paged_options(self._page_rows) if self._page_rows else PARQUET_OPTIONS
                self._writer = pq.ParquetWriter(self._local, ROW_SCHEMA, **options)
            while table.num_rows >= rows or (is_end and table.num_rows):
                group = table.slice(0, rows)
                self._writer.write_table(group, row_group_size=rows)
                table = table.slice(rows)
        self._waiting = [table.combine_chunks()] if table.num_rows else []
        self._waiting_rows, self._waiting_bytes = table.num_rows, table.nbytes

    def _page_section(self, name: str) -> bytes:
        """Return the page index of the closed local file; nothing for one that is read whole."""
        if not self._page_rows:
            return b""
        with (
            self._local.open("rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            return pack_section(page_index_of(view, self._page_rows, self._empty_columns), name)
