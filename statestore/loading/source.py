"""Sources of a load: tables of any kind, files and mappings, read piece by piece."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.loading.parquet_files import read_parquet
from millpond.statestore.objects.obstore import file_here
from millpond.statestore.rows.row import one_array
from millpond.statestore.rows.value_text import TYPED_MARK

if TYPE_CHECKING:
    import duckdb

LoadSource: TypeAlias = Any
"""A table (Arrow, pandas, Polars, Spark, anything with Arrow's C stream interface), a reader of record batches, the path
of a Parquet, CSV or JSON file, or an iterable of mappings.
"""

Column: TypeAlias = "pa.Array | Sequence[Any]"
"""A column of a table, or Python values of mappings, which need not share a type."""

_PIECE_ROWS: Final = 65_536
_COLUMNS: Final = ("key", "state", "state_bytes", "state_version", "timers")
# Further columns of a view of rows, which a load makes again.
_IGNORED: Final = frozenset({"hold", "superstep", "sequencer", "commit_number"})

_JSON_COLUMNS: Final = "columns = {key: 'VARCHAR', state: 'JSON', state_bytes: 'VARCHAR', state_version: 'INTEGER', timers: 'JSON'}"
# DuckDB's function by the end of a file's name.
_READERS: Final = {
    # Every option is given, because DuckDB would guess, and leave out rows before its guess of the header.
    ".csv": "read_csv(?, auto_detect = false, header = true, skip = 0, delim = ',', quote = '\"', escape = '\"', "
    "comment = '', strict_mode = true, allow_quoted_nulls = false, hive_partitioning = false, columns = {columns})",
    ".json": f"read_json(?, {_JSON_COLUMNS}, hive_partitioning = false)",
    **dict.fromkeys(
        (".jsonl", ".ndjson"),
        f"read_json(?, format = 'newline_delimited', {_JSON_COLUMNS}, hive_partitioning = false)",
    ),
}
_PARQUET: Final = ".parquet"


Piece: TypeAlias = "Mapping[str, Column]"
"""The known columns that a source has, of some rows."""


def pieces_of(source: LoadSource) -> Iterator[Piece]:
    """Yield the rows of a source in pieces of bounded size; a Spark DataFrame is collected to the driver."""
    if isinstance(source, str | Path):
        yield from _of_batches(_open_file(file_here(source)))
    elif isinstance(source, pa.RecordBatch):
        yield from _of_batches([source])
    elif isinstance(source, pa.RecordBatchReader):
        yield from _of_batches(source)
    elif type(source).__module__.partition(".")[0] == "pandas":
        yield from _of_pandas(source)
    elif hasattr(source, "toArrow"):
        yield from _of_batches(source.toArrow().to_batches(_PIECE_ROWS))
    elif hasattr(source, "__arrow_c_stream__"):
        yield from _of_batches(pa.RecordBatchReader.from_stream(source))
    elif isinstance(source, Mapping | bytes) or not isinstance(source, Iterable):
        raise InvalidError(
            "rows must be a table, a file or an iterable of mappings", type=type(source).__name__
        )
    else:
        yield from _of_mappings(iter(source))


def _open_file(path: Path) -> Iterable[pa.RecordBatch]:
    """Open a Parquet, CSV or JSON file; states and timers of CSV and JSON stay JSON text."""
    suffix = path.suffix.lower()
    if suffix not in {*_READERS, _PARQUET}:
        raise InvalidError(
            "cannot tell the format of a file from its name: use a known suffix",
            path=path,
            known=sorted((*_READERS, _PARQUET)),
        )
    if not path.is_file():
        raise InvalidError("there is no such file", path=path)
    return _of_parquet(path) if suffix == _PARQUET else _of_text(path, _READERS[suffix])


def _of_text(path: Path, reader: str) -> Iterator[pa.RecordBatch]:
    import duckdb

    with TemporaryDirectory(prefix="millpond-load-") as folder, duckdb.connect() as connection:
        # DuckDB takes a name for a pattern, and so would read other files.
        plain = Path(folder, "rows").with_suffix(path.suffix)
        plain.symlink_to(path.absolute())
        try:
            connection.execute("set TimeZone = 'UTC'")
            names = _csv_names(path) if path.suffix.lower() == ".csv" else _json_names(connection, plain)
            _check_columns(names)
            reader = reader.replace("{columns}", str(dict.fromkeys(names, "VARCHAR")))
            query = f"select {_selected(path, names)} from {reader}"  # noqa: S608 - names of columns
            rows = connection.sql(query, params=[str(plain)])
            yield from rows.to_arrow_reader(_PIECE_ROWS)
        except duckdb.Error as cause:
            raise InvalidError("the table cannot be read", reason=first_line(cause), path=path) from cause


def _csv_names(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            names = next(csv.reader(file), [])
    except (OSError, csv.Error) as cause:
        raise InvalidError("the table cannot be read", reason=first_line(cause), path=path) from cause
    if len(set(names)) < len(names):
        raise InvalidError("the table has two columns of one name", columns=names)
    return names


def _json_names(connection: duckdb.DuckDBPyConnection, plain: Path) -> list[str]:
    """Return the fields of all objects, because a reader with given columns passes over others in silence."""
    objects = "read_json_objects" if plain.suffix.lower() == ".json" else "read_ndjson_objects"
    found = connection.sql(
        f"select distinct unnest(json_keys(json)) from {objects}(?, hive_partitioning = false)",  # noqa: S608 - a name
        params=[str(plain)],
    )
    return sorted({name for (name,) in found.fetchall()} | {"key"})


def _selected(path: Path, names: Collection[str]) -> str:
    """Return the columns in SQL: bytes are base64 in text; the JSON of a state with types begins with their mark."""
    in_csv = "nullif(state, '')"
    in_json = (
        f"""case when json_exists(state, '$."$types"') then '{TYPED_MARK}' || state::varchar else state end"""
    )
    special = {
        "state": in_csv if path.suffix.lower() == ".csv" else in_json,
        "state_bytes": "from_base64(state_bytes)",
    }
    return ", ".join(f"{special.get(name, name)} as {name}" for name in _COLUMNS if name in names)


def _of_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    for rows in read_parquet(path, 0, _PIECE_ROWS):
        # Arrow takes text for UTF-8 when it reads; an error would appear only in its use.
        rows.validate(full=True)
        yield from rows.combine_chunks().to_batches()


def _of_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Piece]:
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator, None)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as cause:
            raise InvalidError("the table cannot be read", reason=first_line(cause)) from cause
        if batch is None:
            return
        _check_columns(batch.schema.names)
        for start in range(0, batch.num_rows, _PIECE_ROWS):
            part = batch.slice(start, _PIECE_ROWS)
            yield {name: part.column(name) for name in _COLUMNS if name in batch.schema.names}


def _of_pandas(frame: Any) -> Iterator[Piece]:
    if not hasattr(frame, "columns"):
        raise InvalidError("rows must be a frame with columns", type=type(frame).__name__)
    _check_columns([str(name) for name in frame.columns])
    for start in range(0, len(frame), _PIECE_ROWS):
        part = frame.iloc[start : start + _PIECE_ROWS]
        yield {name: _of_series(part[name]) for name in _COLUMNS if name in part.columns}


def _of_series(series: Any) -> Column:
    values = series.tolist()
    if series.dtype == object and not all(value is None or isinstance(value, str) for value in values):
        # Arrow would give all objects of a column the fields of each.
        return values
    try:
        found = pa.array(series, from_pandas=True)
    except (pa.ArrowException, ValueError) as cause:
        reason = first_line(cause)
        raise InvalidError("the table cannot be read", reason=reason, column=series.name) from cause
    return one_array(found)


def _of_mappings(rows: Iterator[Any]) -> Iterator[Piece]:
    while some := list(islice(rows, _PIECE_ROWS)):
        names: dict[str, None] = {}
        for row in some:
            if not isinstance(row, Mapping):
                raise InvalidError("each row must be a mapping of columns", type=type(row).__name__)
            names |= dict.fromkeys(row)
        _check_columns(names)
        yield {name: [row.get(name) for row in some] for name in _COLUMNS if name in names}


def _check_columns(names: Iterable[str]) -> None:
    given = set(names)
    if "key" not in given:
        raise InvalidError("the table has no column key", columns=sorted(map(str, given)))
    if unknown := given - {*_COLUMNS, *_IGNORED}:
        raise InvalidError(
            f"the table has columns that rows do not have{did_you_mean(min(map(str, unknown)), _COLUMNS)}",
            columns=sorted(map(str, unknown)),
            known=list(_COLUMNS),
        )


def first_line(cause: Exception) -> str:
    """Return the gist of a library's error: further lines may quote the data."""
    return str(cause).partition("\n")[0]


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
