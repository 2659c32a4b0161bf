"""Staged rows of a load: typed columns, sorted by key on the local disk before the store is written.

DuckDB sorts any number of rows within a memory limit. So a load finds repeated keys, and the keys to cut intervals
at, before it takes a lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.interval import CUT_CHARACTERS_MAX, Interval
from millpond.statestore.loading.source import Column, Piece, first_line, is_text
from millpond.statestore.loading.timers import TIMERS, read_timers
from millpond.statestore.rows.codec import Codec
from millpond.statestore.rows.row import STATE_VERSION
from millpond.statestore.rows.state_schema import SchemaCodec

if TYPE_CHECKING:
    import duckdb


# A row on its way into a store; times are microseconds.
STAGED_SCHEMA: Final = pa.schema(
    {
        "key": pa.string(),
        "state": pa.string(),
        "state_bytes": pa.binary(),
        "timers": TIMERS,
        "hold": pa.int64(),
        STATE_VERSION: pa.int32(),
    }
)


def staged_rows(piece: Piece, codec: Codec, before: int) -> pa.Table:
    """Convert a piece to `STAGED_SCHEMA`, in order; ``before`` counts the rows before it, for errors."""
    keys = _keys(piece["key"], before)
    texts, blobs = _states(piece.get("state"), piece.get("state_bytes"), codec, keys)
    timers, holds = read_timers(piece.get("timers"), keys)
    state = blobs if texts is None else texts
    is_empty = timers.is_null() if state is None else pc.and_(timers.is_null(), state.is_null())
    if pc.any(is_empty).as_py():
        row = pc.index(is_empty, True).as_py()
        raise InvalidError("a row has neither state nor timers: leave its key out", key=keys[row].as_py())
    return pa.Table.from_arrays(
        [
            keys,
            pa.nulls(len(keys), pa.string()) if texts is None else texts,
            pa.nulls(len(keys), pa.binary()) if blobs is None else blobs,
            timers,
            holds,
            _versions(piece.get(STATE_VERSION), len(keys)),
        ],
        schema=STAGED_SCHEMA,
    )


def _versions(column: Column | None, rows: int) -> pa.Int32Array:
    """Return the version of each state; version 0 and a missing one are null."""
    if column is None:
        return pa.nulls(rows, pa.int32())
    try:
        versions = (column if isinstance(column, pa.Array) else pa.array(column)).cast(pa.int32())
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError("state_version must be a whole number", reason=first_line(cause)) from cause
    if pc.any(pc.less(versions, 0)).as_py():
        raise InvalidError("state_version must be at least 0", state_version=pc.min(versions).as_py())
    return pc.if_else(pc.equal(versions, 0), pa.scalar(None, pa.int32()), versions)


def _keys(column: Column, before: int) -> pa.StringArray:
    if isinstance(column, pa.Array):
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if not (is_text(kind) or pa.types.is_null(kind)):
            raise InvalidError("the key column is not text", type=column.type)
        keys = column.cast(pa.string())
    else:
        wrong = next((row for row, key in enumerate(column) if not isinstance(key, str | None)), None)
        if wrong is not None:
            raise InvalidError("a key is not text", row=before + wrong, type=type(column[wrong]).__name__)
        keys = _array(column, pa.string(), "a key has no UTF-8 form")
    if keys.null_count:
        raise InvalidError("a key is null", row=before + pc.index(keys.is_null(), True).as_py())
    return keys


def _states(
    state: Column | None, state_bytes: Column | None, codec: Codec, keys: pa.StringArray
) -> tuple[pa.StringArray | None, pa.BinaryArray | None]:
    """Return the encoded states as (text, bytes); one is ``None``."""
    state, state_bytes = (None if _is_absent(column) else column for column in (state, state_bytes))
    if isinstance(state, pa.Array) and _is_blob(state.type):
        state, state_bytes = (None, state) if state_bytes is None else (state, state_bytes)
    if state is not None and state_bytes is not None:
        raise InvalidError("states must be in state or in state_bytes, not in both")
    if state_bytes is not None:
        if codec.is_text:
            raise InvalidError("the codec stores text, and not state_bytes", codec=codec.name)
        if not isinstance(state_bytes, pa.Array):
            blobs = _array(state_bytes, pa.binary(), "state_bytes are not bytes")
        elif _is_blob(state_bytes.type):
            blobs = state_bytes.cast(pa.binary())
        else:
            raise InvalidError("state_bytes are not bytes", type=state_bytes.type)
        return None, _checked(blobs, codec, keys)
    if state is None:
        return None, None
    if isinstance(state, pa.Array) and is_text(state.type):
        if not codec.is_text:
            raise InvalidError("the codec stores bytes: give state_bytes, or values", codec=codec.name)
        return _checked(state.cast(pa.string()), codec, keys), None
    values = _values(state) if isinstance(state, pa.Array) else state
    encoded = _encoded(values, codec, keys)
    return (encoded, None) if codec.is_text else (None, encoded)


def _is_absent(column: Column | None) -> bool:
    if column is None:
        return True
    if isinstance(column, pa.Array):
        return bool(column.null_count == len(column))
    return all(value is None for value in column)


def _checked(encoded: pa.Array, codec: Codec, keys: pa.StringArray) -> pa.Array:
    """Check that the codec reads each encoded state."""
    for row, text in enumerate(encoded.to_pylist()):
        try:
            if text is not None:
                codec.decode(text)
        except DataError as cause:
            raise InvalidError(
                "a state is not what the codec stores",
                key=keys[row].as_py(),
                codec=codec.name,
                reason=cause.details.get("reason", cause.message),
            ) from cause
    return encoded


def _encoded(values: Sequence[Any], codec: Codec, keys: pa.StringArray) -> pa.Array:
    encoded: list[str | bytes | None] = []
    try:
        # On an error, the list's length is the index of the bad value.
        # States with a schema move to their columns when they are next written.
        encode = codec.encode_text if isinstance(codec, SchemaCodec) else codec.encode
        encoded.extend(None if value is None else encode(value) for value in values)
    except InvalidError as error:
        error.add_note(f"in the state of the key {keys[len(encoded)].as_py()!r}")
        raise
    kind = pa.string() if codec.is_text else pa.binary()
    message = "a codec must give text that has a UTF-8 form, or bytes, as its is_text says"
    return _array(encoded, kind, message)


def _values(array: pa.Array) -> list[Any]:
    """Convert a column to Python values; structs field by field, which takes a fifth of the time."""
    if not pa.types.is_struct(array.type):
        try:
            found: list[Any] = array.to_pylist(maps_as_pydicts="strict")
        except KeyError as cause:
            raise InvalidError("a map has a key twice", reason=cause.args[0]) from cause
        except (pa.ArrowException, ArithmeticError, ValueError) as cause:
            raise InvalidError(
                "a value of the column cannot be read", type=array.type, reason=cause
            ) from cause
        return found
    names = [field.name for field in array.type]
    fields = [_values(field) for field in array.flatten()]
    rows: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
    if not names:
        rows = [{} for _ in range(len(array))]
    for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
        rows[row] = None
    return rows


def _array(values: Sequence[Any], kind: pa.DataType, message: str) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(message, reason=first_line(cause)) from cause


def _is_blob(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


_MEMORY_LIMIT: Final = "512MiB"
_BATCH_ROWS: Final = 65_536


class Staging:
    """Rows on their way into a store, in a DuckDB file in an empty local folder."""

    def __init__(self, folder: Path) -> None:
        # Imported here, because opening a store must not load DuckDB.
        import duckdb

        self._error = duckdb.Error
        self._connection = duckdb.connect(str(folder / "rows.duckdb"))
        self._execute(f"set memory_limit = '{_MEMORY_LIMIT}'")
        spilled = str(folder / "spilled").replace("'", "''")
        self._execute(f"set temp_directory = '{spilled}'")
        self._connection.register("piece", STAGED_SCHEMA.empty_table())
        self._execute("create table staged as from piece")
        self.rows: int = 0

    def add(self, rows: pa.Table) -> None:
        self._connection.register("piece", rows)
        self._execute("insert into staged from piece")
        self.rows += rows.num_rows

    def sort(self) -> None:
        """Sort all rows by key, and refuse repeated keys."""
        self._execute("create table sorted as from staged order by key")
        self._execute("drop table staged")
        repeated = self._execute(
            "select key from (select key, lag(key) over (order by rowid) as before from sorted) "
            "where key = before limit 5"
        ).fetchall()
        if repeated:
            raise InvalidError(
                "a key is in the table more than once: each key is one row", keys=[key for (key,) in repeated]
            )

    def state_version(self) -> int:
        """Return the greatest version of a row; 0 for none."""
        found = self._execute(f"select coalesce(max({STATE_VERSION}), 0) from sorted").fetchall()  # noqa: S608 - a name
        return int(found[0][0])

    def cuts(self, count: int) -> list[str]:
        """Return keys that cut the rows into ``count`` parts of about equal size; fewer if there are fewer keys."""
        positions = sorted({self.rows * part // count for part in range(1, count)} - {0})
        if not positions:
            return []
        listed = ", ".join(map(str, positions))
        found = self._execute(f"select key from sorted where rowid in ({listed})").fetchall()  # noqa: S608 - numbers
        lowest = self._execute("select key from sorted where rowid = 0").fetchall()[0][0]
        return sorted({key[:CUT_CHARACTERS_MAX] for (key,) in found if key[:CUT_CHARACTERS_MAX] > lowest})

    def rows_of(self, interval: Interval) -> Iterator[pa.Table]:
        bounds = "key >= $low" + ("" if interval.high is None else " and key < $high")
        params = {"low": interval.low} | ({} if interval.high is None else {"high": interval.high})
        query = f"select * from sorted where {bounds} order by rowid"  # noqa: S608 - the bounds are parameters
        try:
            for batch in self._connection.sql(query, params=params).to_arrow_reader(_BATCH_ROWS):
                yield pa.Table.from_batches([batch]).cast(STAGED_SCHEMA)
        except (self._error, OSError) as cause:
            raise _failed(cause) from cause

    def close(self) -> None:
        self._connection.close()

    def _execute(self, query: str) -> duckdb.DuckDBPyConnection:
        try:
            return self._connection.execute(query)
        except (self._error, OSError) as cause:
            raise _failed(cause) from cause


def _failed(cause: Exception) -> UnavailableError:
    return UnavailableError("the rows could not be sorted on this machine's disk", reason=first_line(cause))
