"""Row files: the Parquet files that hold row updates, whole, in parts or piece by piece (MillWheel §7.1).

A file is sorted by key, contains each key once, and is written whole or not at all. Every read is verified: a damaged or
missing file raises a `DataError` that names it, and never yields wrong rows. Files into which other Delta writers (Spark's
OPTIMIZE, delta-rs) have rewritten ours are read as well, verified by their own checksums.

`open_runs` and `RowFileWriter` work in memory that does not grow with files: a file is copied to the local disk, its seal
is checked there, and batches of bounded size are decoded. A new file is encoded there a row group at a time, sealed, and
uploaded in pieces.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError, MillpondError, ObjectMissingError, UnavailableError, check
from millpond.statestore.interval import Interval
from millpond.statestore.objects.disk_tier import forget_copy
from millpond.statestore.objects.obstore import disk_errors, download, upload
from millpond.statestore.objects.ranges import is_written_once, put_new, read_ranges
from millpond.statestore.rows.pages import (
    PAGE_INDEXES,
    decode_blocks,
    join_ranges,
    pack_section,
    page_index_of,
)
from millpond.statestore.rows.record_ids import Fingerprints, fingerprints
from millpond.statestore.rows.row import (
    PARTITION_COLUMN,
    ROW_SCHEMA,
    Fence,
    check_names,
    conform,
    no_cells,
    with_texts,
)
from millpond.statestore.rows.row_format import (
    COMPACTED_PAGED_BYTES_MIN,
    ROWS_PER_GROUP,
    MayHold,
    ParquetRowFormat,
    RowFormat,
    decode_rows,
    empty_columns,
    file_name_of,
    footer_start,
    parquet_file_seal_holds,
    parquet_options,
    read_groups,
    rows_per_page,
    seal_parquet_file,
)
from millpond.statestore.rows.state_schema import is_typed_column, stored_columns, typed_columns_among
from millpond.statestore.types import CommitNumber, Objects, Sequencer, Superstep, quickly_pickled

# The format of every store on disk.
PARQUET: Final[RowFormat] = ParquetRowFormat()

_SMALL_BYTES: Final = 1 << 16
LARGE_BYTES: Final = 1 << 18
"""The size from which a file is read in parts; looking for a page index costs as much as reading a smaller one."""

# A file of which more than half is wanted is read whole.
_SHARE_MAX: Final = 2
# A larger file with a page index is never read whole, so that memory does not grow with files.
_WHOLE_BYTES_MAX: Final = 1 << 22
_BLOCKS_AT_ONCE: Final = 256
# Bounds of the encoded blocks in memory.
_BYTES_AT_ONCE: Final = 1 << 21
# Parts of a file with a smaller gap are read at once.
_GAP_BYTES: Final = 1 << 14


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """A row file that no commit names yet.

    ``path`` is relative to the table's root and not URL-encoded; the fence is that of the commit to come.
    """

    path: str
    size_bytes: int
    rows: int
    min_key: str
    max_key: str
    superstep: Superstep
    sequencer: Sequencer
    commit_number: CommitNumber
    productions: int
    typed_columns: tuple[pa.Field, ...] = ()  # of states and productions with a schema


def row_file_path(computation: str, superstep: Superstep, token: str) -> str:
    return f"{PARTITION_COLUMN}={quote(computation, safe='')}/{superstep:010d}-{token}.parquet"


def encode_row_file(table: pa.Table, path: str, row_format: RowFormat = PARQUET) -> bytes:
    check(table.num_rows > 0, "a row file holds at least one row update")
    check_keys_rise(table)
    return row_format.encode(table, file_name_of(path))


def check_keys_rise(table: pa.Table) -> None:
    own = pa.schema([*ROW_SCHEMA, *typed_fields(table.schema)])
    check(table.schema.equals(own), "row updates have the row's schema", schema=table.schema.names)
    keys = table.column("key")
    rises = pc.all(pc.less(keys.slice(0, table.num_rows - 1), keys.slice(1)))
    check(keys.null_count == 0 and rises.as_py() is not False, "the keys of a row file rise")


def typed_fields(schema: pa.Schema) -> tuple[pa.Field, ...]:
    return tuple(map(schema.field, typed_columns_among(schema.names)))


def check_may_commit(table: pa.Table, interval: Interval, fence: Fence) -> tuple[str, str]:
    """Check that sorted row updates lie in the interval and are not newer than the fence; return their end keys."""
    low, high = _ends(table)
    check(interval.contains(low) and interval.contains(high), "keys lie in the interval", low=low, high=high)
    sequencers, commit_numbers = (table.column(name).to_numpy() for name in ("sequencer", "commit_number"))
    last = sequencers.max()
    newest = Fence(Sequencer(int(last)), CommitNumber(int(commit_numbers[sequencers == last].max())))
    check(newest <= fence, "no row update is newer than the commit that names it", fence=fence)
    return low, high


def productions_in(table: pa.Table) -> int:
    productions = table.column("productions")
    if productions.null_count == table.num_rows:
        return 0
    return pc.sum(pc.list_value_length(productions)).as_py() or 0


def write_row_file(
    objects: Objects,
    interval: Interval,
    table: pa.Table,
    *,
    superstep: Superstep,
    fence: Fence,
    token: str,
    row_format: RowFormat = PARQUET,
) -> RowFile:
    """Write one interval's row updates; they stay invisible until a commit under ``fence`` names the file.

    The table has at least one row update in `ROW_SCHEMA`, none newer than the fence, and its keys rise.
    ``token`` has 32 unique hexadecimal digits, so that no two attempts share a file.
    """
    path = row_file_path(interval.computation, superstep, token)
    data = encode_row_file(table, path, row_format)
    low, high = check_may_commit(table, interval, fence)
    # Unsynced: the commit that names the file syncs it, so many files cost one sync.
    put_new(objects, path, data, synced=False)
    return RowFile(
        path=path,
        size_bytes=len(data),
        rows=table.num_rows,
        min_key=low,
        max_key=high,
        superstep=superstep,
        sequencer=fence.sequencer,
        commit_number=fence.commit_number,
        productions=productions_in(table),
        typed_columns=typed_fields(table.schema),
    )


def read_row_files(
    objects: Objects,
    paths: Iterable[str],
    columns: Sequence[str] | None = None,
    *,
    keys: Iterable[str] | None = None,
    interval: Interval | None = None,
    large: Collection[str] = (),
    keep: Callable[[pa.Table], pa.Table] | None = None,
    keeps_cells: bool = False,
) -> pa.Table:
    """Return the verified updates of live files, in the order of ``paths``; a missing or damaged file is a `DataError`.

    States with a schema become text; with ``keeps_cells`` they stay in their columns, which come last. ``keys`` and ``interval`` select updates, and ``keep`` filters them while reading. Of ``large`` files with
    a page index only the pages that may hold ``keys`` are read.
    """
    names = list(ROW_SCHEMA.names if columns is None else columns)
    check(set(names) <= set(ROW_SCHEMA.names), "only columns of rows are read", columns=names)
    needed = names if "key" in names else ["key", *names]
    selection = _Selection(keys, interval, keep, keeps_cells=keeps_cells)
    found, are_reduced = [], True
    for path in paths:
        try:
            table, is_reduced = _read_row_file(objects, path, needed, selection, in_parts=path in large)
        except DataError:
            if not forget_copy(objects, path):
                raise
            # A kept copy was damaged: read once more, from the store.
            table, is_reduced = _read_row_file(objects, path, needed, selection, in_parts=path in large)
        found += [table] if table.num_rows else []
        are_reduced = are_reduced and is_reduced
    if not found:
        return pa.schema([ROW_SCHEMA.field(name) for name in names]).empty_table()
    table = join_updates(found) if are_reduced else selection.apply(join_updates(found))
    return table.select([*names, *typed_columns_among(table.column_names)])


def join_updates(tables: Sequence[pa.Table]) -> pa.Table:
    """Return row updates of several files as one table, with the columns of cells that any of them has."""
    fields = {field.name: field for table in tables for field in typed_fields(table.schema)}
    return pa.concat_tables([_with_columns(table, fields.values()) for table in tables] if fields else tables)


def _with_columns(updates: pa.Table, typed: Iterable[pa.Field]) -> pa.Table:
    """Return row updates whose columns of cells are these, in this order; those that they lack hold no cells."""
    names = updates.column_names
    columns = {name: updates.column(name) for name in names if not is_typed_column(name)}
    for field in typed:
        columns[field.name] = updates.column(field.name) if field.name in names else no_cells(updates, field)
    return pa.table(columns)


def sealed_name(path: str) -> str | None:
    """Return the name under which one of our row files is sealed; None for another writer's file."""
    return file_name_of(path) if is_written_once(path) else None


def _read_row_file(
    objects: Objects, path: str, needed: list[str], selection: _Selection, *, in_parts: bool
) -> tuple[pa.Table, bool]:
    """Return the rows of a file, and whether they are the selected ones only: many small files are joined first."""
    name = sealed_name(path)
    with reading(path):
        chosen = selection.read_blocks(objects, path, name, needed) if in_parts and name else None
        if chosen is not None:
            return chosen, True
        data = objects.get(path)
        table = conform(
            decode_rows(data, needed, selection.filter, name=name), needed, keeps_cells=selection.keeps_cells
        )
        if len(data) <= _SMALL_BYTES and selection.keep is None:
            return table, False
        # Rows of one of our files rise by key, as in `open_runs`.
        return selection.reduce(table, is_sorted=name is not None), True


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Add the row file's path to errors, and tell a failed local disk from a damaged file."""
    try:
        yield
    except ObjectMissingError:
        raise
    except DataError as error:
        raise DataError(error.message, **{"path": path, **error.details}) from error
    except MillpondError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError("this machine's disk failed", path=path, cause=error) from error
        raise DataError("row file is damaged or not a row file", path=path, reason=error) from error


class _Selection:
    def __init__(
        self,
        keys: Iterable[str] | None,
        interval: Interval | None,
        keep: Callable[[pa.Table], pa.Table] | None,
        *,
        keeps_cells: bool,
    ) -> None:
        self._keys = None if keys is None else sorted(set(keys))
        self._interval = interval
        self.filter: MayHold | None = None if keys is None and interval is None else self.may_hold
        self.keep = keep
        self.keeps_cells = keeps_cells
        self._prints: Fingerprints | None = None

    def may_hold(self, low: str, high: str) -> bool:
        interval = self._interval
        if interval is not None and (
            high < interval.low or (interval.high is not None and interval.high <= low)
        ):
            return False
        if self._keys is None:
            return True
        index = bisect_left(self._keys, low)
        return index < len(self._keys) and self._keys[index] <= high

    def read_blocks(self, objects: Objects, path: str, name: str, wanted: list[str]) -> pa.Table | None:
        """Return the selected rows of a large file of ours, read in parts; None where that is no gain."""
        index = PAGE_INDEXES.of(objects, path, name)
        if index is None:
            return None
        columns = stored_columns(wanted, index.columns)
        every = range(len(index.firsts))
        if self._keys is not None and self._prints is None:
            self._prints = fingerprints(pa.array(self._keys, pa.string()))
        blocks = every if self._prints is None else index.blocks_of(self._keys or (), self._prints)
        whole_bytes = index.pages_bytes
        is_most = index.size_of(blocks, columns) * _SHARE_MAX > whole_bytes
        if is_most and whole_bytes <= _WHOLE_BYTES_MAX:
            return None
        tables = [pa.schema([ROW_SCHEMA.field(column) for column in wanted]).empty_table()]
        for some in index.portions(blocks, columns, blocks_max=_BLOCKS_AT_ONCE, bytes_max=_BYTES_AT_ONCE):
            ranges = join_ranges(index.ranges(some, columns), _GAP_BYTES)
            parts = dict(zip(ranges, read_ranges(objects, path, ranges), strict=True))
            rows = conform(decode_blocks(index, some, columns, parts), wanted, keeps_cells=self.keeps_cells)
            tables.append(self.reduce(rows, is_sorted=True))
        return join_updates(tables)

    def reduce(self, table: pa.Table, *, is_sorted: bool = False) -> pa.Table:
        selected = self.apply(table, is_sorted=is_sorted)
        return selected if self.keep is None else self.keep(selected)

    def apply(self, table: pa.Table, *, is_sorted: bool = False) -> pa.Table:
        if self._interval is not None:
            table = rows_within(table, self._interval, is_sorted=is_sorted)
        if self._keys is not None:
            keys = self._keys
            if is_sorted and table.num_rows:
                first, last = _ends(table)
                keys = keys[bisect_left(keys, first) : bisect_right(keys, last)]
            is_wanted = pc.is_in(table.column("key"), pa.array(keys, pa.string()))
            if sum(chunk.true_count for chunk in is_wanted.iterchunks()) < table.num_rows:
                table = table.filter(is_wanted)
        return table


def _ends(table: pa.Table) -> tuple[str, str]:
    keys = table.column("key")
    return keys[0].as_py(), keys[table.num_rows - 1].as_py()


def rows_within(table: pa.Table, interval: Interval, *, is_sorted: bool = False) -> pa.Table:
    if not table.num_rows or (not interval.low and interval.high is None):
        return table
    keys = table.column("key")
    if all(map(interval.contains, _ends(table) if is_sorted else pc.min_max(keys).as_py().values())):
        return table
    mask = pc.greater_equal(keys, interval.low)
    if interval.high is not None:
        mask = pc.and_(mask, pc.less(keys, interval.high))
    return table.filter(mask)


# Row updates sorted by key, in pieces; no key is in two pieces.
Run = Iterator[pa.Table]

_NAMES: Final = list(ROW_SCHEMA.names)
_BUFFER_BYTES: Final = 1 << 18
_GROUP_BYTES: Final = 1 << 26
_BATCH_ROWS_MIN: Final = 64


@contextmanager
def scratch_folder(use: str, parent: str | None = None) -> Iterator[Path]:
    """Create a temporary folder to ``use``, such as "sort rows in", in the system's or ``parent``; remove it at the end."""
    try:
        folder = TemporaryDirectory(prefix="millpond-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        place = {} if parent is None else {"folder": parent}
        raise UnavailableError(f"cannot create a folder to {use}", **place, cause=error) from error
    with folder as path:
        yield Path(path)


def open_runs(
    objects: Objects, path: str, *, interval: Interval, scratch: Path, batch_bytes: int
) -> Sequence[Run]:
    """Open a live row file as runs of the updates in an interval, together the result of `read_row_files`.

    States with a schema stay in their columns. One of our files is a single run. Another writer's file may be unsorted, so each of its row groups is
    sorted on its own and spilled to ``scratch``, an empty local folder which must stay until the runs are
    read. About ``batch_bytes`` of a run are decoded at a time. A damaged page raises `DataError` only when
    the run reaches it.
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
        groups = range(file.num_row_groups)
        if name is not None:
            held = sum(file.metadata.row_group(group).total_byte_size for group in groups)
            rows = batch_bytes * file.metadata.num_rows // max(held, 1)
            return [_batches(file, path, interval, min(max(rows, _BATCH_ROWS_MIN), ROWS_PER_GROUP))]
        size_bytes = local.stat().st_size
        return [_sorted_group(file, group, interval, scratch, batch_bytes, size_bytes) for group in groups]


def _batches(file: pq.ParquetFile, path: str, interval: Interval, rows: int) -> Run:
    with reading(path), file:
        # One group at a time: over all groups, Arrow's reader would keep every group in memory.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(rows, row_groups=[group], use_threads=False):
                updates = conform(pa.Table.from_batches([batch]), _NAMES, keeps_cells=True)
                yield rows_within(updates, interval)


def _sorted_group(
    file: pq.ParquetFile, group: int, interval: Interval, scratch: Path, batch_bytes: int, size_bytes: int
) -> Run:
    rows = read_groups(file, [group], None, size_bytes)
    table = rows_within(conform(rows, _NAMES, keeps_cells=True), interval)
    # Arrow's sort is stable, so updates of a key stay in the file's order.
    table = table.take(pc.sort_indices(table.column("key"))).combine_chunks()
    keys = table.column("key")
    is_new = pc.not_equal(keys.slice(1), keys.slice(0, max(table.num_rows - 1, 0)))
    changes = 1 + np.flatnonzero(is_new.to_numpy(zero_copy_only=False))
    starts = np.concatenate([[0], changes, [table.num_rows]])
    rows = max(1, table.num_rows * batch_bytes // max(table.nbytes, 1))
    spill, begin = str(scratch / f"group{group}"), 0
    with pa.ipc.new_file(spill, table.schema) as writer:
        while begin < table.num_rows:
            # Cut between keys only.
            end = int(starts[np.searchsorted(starts, min(begin + rows, table.num_rows))])
            writer.write_table(table.slice(begin, end - begin))
            begin = end
    return _spilled_run(spill)


def _spilled_run(path: str) -> Run:
    with pa.OSFile(path) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(number)])


def _aligned(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return row updates with the columns of ``schema``; states in other columns become text."""
    return _with_columns(with_texts(table, typed_columns_among(schema.names)), typed_fields(schema))


class RowFileWriter:
    """Writer of one row file of any size, in a local folder ``scratch``."""

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
        self._rows = 0
        self._productions = 0
        self._low: str | None = None
        self._high: str | None = None
        self._page_rows = 0
        self._schema: pa.Schema | None = None
        self._empty_columns: frozenset[str] | None = None

    def write(self, table: pa.Table) -> None:
        """Append row updates in `ROW_SCHEMA`, whose keys rise and are greater than all earlier keys.

        The first ones decide which columns of states the file has; states of other schemas become text.
        """
        if not table.num_rows:
            return
        if self._schema is None:
            self._schema = table.schema
        if table.schema != self._schema:
            table = _aligned(table, self._schema)
        check_keys_rise(table)
        low, high = check_may_commit(table, self._interval, self._fence)
        check(self._high is None or self._high < low, "the keys of a row file rise", low=low)
        self._low = low if self._low is None else self._low
        self._high = high
        self._rows += table.num_rows
        empty = empty_columns(table)
        self._empty_columns = empty if self._empty_columns is None else self._empty_columns & empty
        self._productions += productions_in(table)
        self._waiting.append(table)
        rows = sum(waiting.num_rows for waiting in self._waiting)
        if rows >= ROWS_PER_GROUP or sum(waiting.nbytes for waiting in self._waiting) >= _GROUP_BYTES:
            self._write_groups(is_end=False)

    def finish(self, objects: Objects) -> RowFile | None:
        """Seal and upload the file, which stays invisible until a commit names it; None if there were no rows."""
        if self._low is None or self._high is None:
            return None
        self._write_groups(is_end=True)
        with disk_errors(path=self._path):
            self.close()
            name, section = file_name_of(self._path), b""
            if self._page_rows:
                with (
                    self._local.open("rb") as file,
                    mmap(file.fileno(), 0, access=ACCESS_READ) as data,
                    memoryview(data) as view,
                ):
                    index = page_index_of(
                        view, footer_start(view), self._page_rows, self._empty_columns or ()
                    )
                section = pack_section(index, name)
            seal_parquet_file(self._local, name, section)
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
            typed_columns=() if self._schema is None else typed_fields(self._schema),
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_groups(self, *, is_end: bool) -> None:
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
                schema = table.schema
                options = parquet_options(schema, self._page_rows)
                self._writer = pq.ParquetWriter(self._local, schema, **options)
            while table.num_rows >= rows or (is_end and table.num_rows):
                group = table.slice(0, rows)
                self._writer.write_table(group, row_group_size=rows)
                table = table.slice(rows)
        self._waiting = [table.combine_chunks()] if table.num_rows else []
