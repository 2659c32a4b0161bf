"""Row formats: the encoding of row updates as the bytes of a file.

Stores use Parquet, which every Delta reader understands. The simulation, which writes many tiny files to memory, uses
Arrow IPC. Both are *sealed*: a checksum covers every other byte of the file and its name, so a flipped bit, a truncated
file and a swapped file are all detected. In Parquet the seal lies between the last page and the footer, where no reader
looks. Pages have their own checksums, but the footer, whose statistics decide which pages are read at all, has none.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError
from millpond.statestore.rows.pages import (
    PARQUET_MAGIC,
    SEAL_BYTES,
    TAIL_BYTES,
    RecentlyUsed,
    pack_section,
    page_index_of,
)
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, check_names
from millpond.statestore.rows.state_schema import stored_columns

# A file's bytes, the name it is sealed under, and the decoded columns.
FileKey: TypeAlias = tuple[bytes, str, tuple[str, ...]]

_SHARE_MAX: Final = 16


class DecodedFiles(RecentlyUsed[FileKey, pa.Table]):
    """Recently decoded tables of small row files.

    A takeover scans an interval's files and then reads its rows, an evicted key is read back, and a resumed
    run reads the same files again. A table is identified by the bytes that it was decoded from: comparing
    them costs far less than opening a small Parquet file, and a changed file is another file.
    """

    def put(self, key: FileKey, table: pa.Table) -> None:
        size_bytes = len(key[0]) + table.get_total_buffer_size()
        # A large table would evict too many others.
        if size_bytes * _SHARE_MAX <= self.bytes_max:
            self.keep(key, table, size_bytes)


_NUMBERS: Final = ("sequencer", "commit_number", "superstep")
# Rows per Parquet row group: the minimum that a point read decodes.
ROWS_PER_GROUP: Final = 16_384

# The size in memory from which a superstep's file has a page index; smaller files are read whole.
PAGED_BYTES_MIN: Final = 1 << 24
# The same for a compaction, which no superstep waits for.
COMPACTED_PAGED_BYTES_MIN: Final = 1 << 18

_PAGE_BYTES: Final = 1 << 15
_PAGE_ROWS_MIN: Final = 64
_PAGE_ROWS_MAX: Final = 4_096

# Starting a page takes zstd 20 µs and LZ4 one; only texts gain enough from zstd, and ids in pages that are not small.
_ZSTD: Final = ("state", "productions.list.element.value")
_ZSTD_UNPAGED: Final = (*_ZSTD, "record_ids.list.element.id", "record_ids.list.element.at")

# Return True if a run of rows with this smallest and greatest key may contain selected keys.
MayHold: TypeAlias = Callable[[str, str], bool]

_SEAL: Final = b"MPSEAL02"
# The seal of files written before the name became part of the checksum.
_NAMELESS_SEAL: Final = b"MPSEAL01"
_IPC: Final = b"MPROWS01"
# Of a file that is read whole, however small it is.
DECODED_BYTES_MAX: Final = 1 << 30
_EXPANSION_MAX: Final = 1 << 10
_VALUE_BYTES: Final = 16
_SMALL_BYTES: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 20
_KEPT_FILE_BYTES: Final = 1 << 14
_DECODED: Final = DecodedFiles(8 << 20)
_KEY_LEAF: Final = ROW_SCHEMA.names.index("key")


def rows_per_page(table: pa.Table) -> int:
    """Return after how many rows all columns are cut into pages: about 32 KiB, the cost of reading one key."""
    rows = table.num_rows * _PAGE_BYTES // max(table.nbytes, 1)
    return int(min(max(rows, _PAGE_ROWS_MIN), _PAGE_ROWS_MAX))


def parquet_options(schema: pa.Schema, page_rows: int = 0) -> dict[str, Any]:
    """Return the options for both of Arrow's Parquet writers, with a page index if pages have ``page_rows`` rows."""
    leaves = [leaf for column in schema for leaf in _leaves_of(column.name, column.type)]
    by_zstd = _ZSTD if page_rows else _ZSTD_UNPAGED
    options = {
        "compression": {path: "zstd" if path in by_zstd else "lz4" for path in leaves},
        "compression_level": dict.fromkeys(by_zstd, 1),
        "write_page_checksum": True,
        "store_schema": False,
        "column_encoding": {"record_ids.list.element.at": "DELTA_BINARY_PACKED"},
        "write_statistics": ["key", *_NUMBERS],
    }
    if not page_rows:
        return {
            **options,
            # Keys, states and ids rarely repeat: a dictionary would cost a third of the time without saving space.
            "use_dictionary": [*_NUMBERS, "record_ids.list.element.arrived_at", STATE_VERSION],
            "write_batch_size": ROWS_PER_GROUP,
        }
    return {
        **options,
        # Each page must be readable alone, without a dictionary page.
        "use_dictionary": False,
        "max_rows_per_page": page_rows,
        "write_batch_size": page_rows,
        "data_page_size": 1 << 30,
        "write_page_index": True,
    }


def _leaves_of(path: str, kind: pa.DataType) -> list[str]:
    """Return the paths of a column's leaves in a Parquet file."""
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves_of(f"{path}.{field.name}", field.type)]
    if pa.types.is_list(kind):
        return _leaves_of(f"{path}.list.element", kind.value_type)
    if pa.types.is_map(kind):
        parts = (("key", kind.key_type), ("value", kind.item_type))
        return [leaf for name, part in parts for leaf in _leaves_of(f"{path}.key_value.{name}", part)]
    return [path]


def empty_columns(table: pa.Table) -> frozenset[str]:
    return frozenset(name for name in table.column_names if table.column(name).null_count == table.num_rows)


class RowFormat(Protocol):
    """An encoding of tables of row updates."""

    def encode(self, table: pa.Table, name: str) -> bytes:
        """Return the bytes of a file with these rows, sealed under its name."""

    def decode(
        self, data: bytes, columns: list[str], may_hold: MayHold | None, *, name: str | None
    ) -> pa.Table:
        """Read columns from the file, skipping rows that ``may_hold`` rules out; absent columns are omitted.

        ``name`` is the name under which the file must be sealed, or None for another writer's file. Changed
        bytes are a `DataError`.
        """


def decode_rows(data: bytes, columns: list[str], may_hold: MayHold | None, *, name: str | None) -> pa.Table:
    row_format: RowFormat = IpcRowFormat() if data.startswith(_IPC) else ParquetRowFormat()
    return row_format.decode(data, columns, may_hold, name=name)


class ParquetRowFormat:
    """Parquet with page checksums and a seal; smaller tables than ``paged_bytes_min`` get no page index."""

    def __init__(self, paged_bytes_min: int | None = None) -> None:
        self._paged_bytes_min = paged_bytes_min

    def encode(self, table: pa.Table, name: str) -> bytes:
        sink = pa.BufferOutputStream()
        if table.column(STATE_VERSION).null_count == table.num_rows:
            # Files without versions stay readable for earlier releases, and no longer than before.
            table = table.drop_columns([STATE_VERSION])
        paged_bytes_min = PAGED_BYTES_MIN if self._paged_bytes_min is None else self._paged_bytes_min
        if table.nbytes < paged_bytes_min:
            pq.write_table(table, sink, row_group_size=ROWS_PER_GROUP, **parquet_options(table.schema))
            return seal_parquet(memoryview(sink.getvalue()), name)
        rows = rows_per_page(table)
        pq.write_table(
            table,
            sink,
            row_group_size=ROWS_PER_GROUP - ROWS_PER_GROUP % rows,
            **parquet_options(table.schema, rows),
        )
        file = memoryview(sink.getvalue()).cast("B")
        index = page_index_of(file, footer_start(file), rows, empty_columns(table))
        return seal_parquet(file, name, pack_section(index, name))

    def decode(
        self, data: bytes, columns: list[str], may_hold: MayHold | None, *, name: str | None
    ) -> pa.Table:
        if name is None or len(data) > _KEPT_FILE_BYTES:
            return self._decode(data, columns, may_hold, name)[0]
        key = (data, name, tuple(columns))
        table = _DECODED.get(key)
        if table is None:
            table, is_whole = self._decode(data, columns, may_hold, name)
            if is_whole:
                _DECODED.put(key, table)
        return table

    def _decode(
        self, data: bytes, columns: list[str], may_hold: MayHold | None, name: str | None
    ) -> tuple[pa.Table, bool]:
        """Return the rows that may be selected, and True if they are all rows."""
        if name is not None and not parquet_seal_holds(memoryview(data), name):
            raise DataError("row file is damaged: its seal is broken")
        file = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )
        schema = file.schema_arrow
        check_names(schema)
        names = stored_columns(columns, schema.names)
        groups = list(range(file.num_row_groups))
        if may_hold is not None:
            # Without a seal the statistics are unprotected, so read the keys.
            bounds = _key_bounds_of_rows if name is None else _key_bounds_of_statistics
            ends = {group: bounds(file, group) for group in groups}
            groups = [group for group, end in ends.items() if end is None or may_hold(*end)]
        table = read_groups(file, groups, names, len(data))
        return table, len(groups) == file.num_row_groups


def read_groups(
    file: pq.ParquetFile, groups: Sequence[int], columns: list[str] | None, size_bytes: int
) -> pa.Table:
    """Read row groups of a file of this size; more than `DECODED_BYTES_MAX` and 1,024 times the size is damage.

    A few KiB of dictionaries, nulls or zeros can stand for gigabytes of rows.
    """
    bytes_max = max(DECODED_BYTES_MAX, _EXPANSION_MAX * size_bytes)
    if sum(_decoded_bytes_at_most(file.metadata.row_group(group)) for group in groups) <= bytes_max:
        return file.read_row_groups(groups, columns=columns, use_threads=False)
    batches: list[pa.RecordBatch] = []
    held_bytes = 0
    for group in groups:
        metadata = file.metadata.row_group(group)
        rows = metadata.num_rows * bytes_max // (2 * _decoded_bytes_at_most(metadata) + 1)
        rows = max(1, min(metadata.num_rows, rows))
        for batch in file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
            held_bytes += batch.nbytes
            if held_bytes > bytes_max:
                raise DataError("the file holds far more than its size allows", size_bytes=size_bytes)
            batches.append(batch)
    return pa.Table.from_batches(batches)


def _decoded_bytes_at_most(group: pq.RowGroupMetaData) -> int:
    columns = map(group.column, range(group.num_columns))
    return sum(
        # A value may be as long as the whole dictionary.
        column.num_values * max(column.total_uncompressed_size, _VALUE_BYTES)
        if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY"
        else column.num_values * _VALUE_BYTES + column.total_uncompressed_size
        for column in columns
    )


class IpcRowFormat:
    """Arrow IPC for stores in memory: a tenth of Parquet's cost for a few rows; Delta readers cannot read it."""

    def encode(self, table: pa.Table, name: str) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        body: bytes = _IPC + sink.getvalue().to_pybytes()
        return body + _seal(zlib.crc32(body, _seed(name)))

    def decode(
        self, data: bytes, columns: list[str], may_hold: MayHold | None, *, name: str | None
    ) -> pa.Table:
        del may_hold
        decode = _decode_small_ipc if len(data) <= _SMALL_BYTES else _decode_ipc
        table = decode(data, name or "")
        names = table.column_names
        return table if names == columns else table.select(stored_columns(columns, names))


def _decode_ipc(data: bytes, name: str) -> pa.Table:
    view = memoryview(data)
    if bytes(view[-SEAL_BYTES:]) != _seal(zlib.crc32(view[:-SEAL_BYTES], _seed(name))):
        raise DataError("row file is damaged: its seal is broken")
    return pa.ipc.open_stream(pa.py_buffer(view[len(_IPC) : -SEAL_BYTES])).read_all()


# Making the reader of a small file takes far longer than comparing its bytes, and several readers read a file.
_decode_small_ipc = lru_cache(maxsize=256)(_decode_ipc)


def file_name_of(path: str) -> str:
    return path.rpartition("/")[2]


def _seal(checksum: int, magic: bytes = _SEAL) -> bytes:
    return magic + checksum.to_bytes(4, "little")


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def footer_start(file: memoryview) -> int:
    """Return the start of a Parquet file's footer by its last eight bytes; any number if they are damaged."""
    return len(file) - TAIL_BYTES - int.from_bytes(file[-TAIL_BYTES:-4], "little")


def seal_parquet(view: memoryview, name: str, section: bytes = b"") -> bytes:
    """Return the Parquet file with a section and a seal before its footer, valid under this file name only."""
    start = footer_start(view)
    checksum = zlib.crc32(view[start:], zlib.crc32(section, zlib.crc32(view[:start], _seed(name))))
    return b"".join((view[:start], section, _seal(checksum), view[start:]))


def seal_parquet_file(path: Path, name: str, section: bytes = b"") -> None:
    with path.open("r+b") as file:
        start, footer = _footer_of(file)
        file.seek(start)
        file.write(section)
        seal = _seal(_file_checksum(file, start + len(section), footer, _seed(name)))
        file.seek(start + len(section))
        file.write(seal + footer)


def parquet_file_seal_holds(path: Path, name: str) -> bool:
    with path.open("rb") as file:
        start, footer = _footer_of(file)
        pages_end = start - SEAL_BYTES
        if pages_end < 0 or not footer.endswith(PARQUET_MAGIC):
            return False
        file.seek(pages_end)
        seal = file.read(SEAL_BYTES)
        return _is_seal(seal, name, lambda seed: _file_checksum(file, pages_end, footer, seed))


def _footer_of(file: IO[bytes]) -> tuple[int, bytes]:
    """Return the footer's start and bytes; a negative start and no bytes if the file's end is damaged."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - TAIL_BYTES, 0))
    start = size - TAIL_BYTES - int.from_bytes(file.read(4), "little")
    file.seek(max(start, 0))
    return start, file.read() if start >= 0 else b""


def _file_checksum(file: IO[bytes], pages_end: int, footer: bytes, seed: int) -> int:
    file.seek(0)
    for at in range(0, pages_end, _PIECE_BYTES):
        seed = zlib.crc32(file.read(min(_PIECE_BYTES, pages_end - at)), seed)
    return zlib.crc32(footer, seed)


def has_parquet_seal(view: memoryview) -> bool:
    start = footer_start(view)
    return bytes(view[max(start - SEAL_BYTES, 0) : max(start - 4, 0)]) in (_SEAL, _NAMELESS_SEAL)


def parquet_seal_holds(view: memoryview, name: str) -> bool:
    """Return True if the file is unchanged since it was sealed under this name."""
    if len(view) < TAIL_BYTES or bytes(view[-4:]) != PARQUET_MAGIC:
        return False
    start = footer_start(view)
    pages_end = start - SEAL_BYTES
    if pages_end < 0:
        return False
    seal = bytes(view[pages_end:start])
    return _is_seal(seal, name, lambda seed: zlib.crc32(view[start:], zlib.crc32(view[:pages_end], seed)))


def _is_seal(seal: bytes, name: str, checksum: Callable[[int], int]) -> bool:
    if seal.startswith(_NAMELESS_SEAL):
        return seal == _seal(checksum(0), _NAMELESS_SEAL)
    return seal == _seal(checksum(_seed(name)))


def _key_bounds_of_statistics(file: pq.ParquetFile, group: int) -> tuple[str, str] | None:
    statistics = file.metadata.row_group(group).column(_KEY_LEAF).statistics
    # Keys may be too long for statistics.
    is_known = statistics is not None and statistics.has_min_max
    return (statistics.min, statistics.max) if is_known else None


def _key_bounds_of_rows(file: pq.ParquetFile, group: int) -> tuple[str, str] | None:
    keys = file.read_row_group(group, columns=["key"], use_threads=False).column("key")
    bounds = pc.min_max(pc.cast(keys, pa.string())).as_py()
    return None if bounds["min"] is None else (bounds["min"], bounds["max"])
