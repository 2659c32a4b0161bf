"""Staging: the rows of a load, sorted by key on the local disk before anything is written to the store.

DuckDB sorts them within a memory limit, however many there are. So a load learns whether keys repeat, and at which
keys to cut them, before it takes a lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.interval import CUT_CHARACTERS_MAX, Interval
from millpond.statestore.loading.rows import STAGED_SCHEMA
from millpond.statestore.rows.row import STATE_VERSION

if TYPE_CHECKING:
    import duckdb

_MEMORY_LIMIT: Final = "512MiB"
_BATCH_ROWS: Final = 65_536


class Staging:
    """Rows on their way into a store.

    Args:
        folder: an empty local folder, which the caller deletes.
    """

    def __init__(self, folder: Path) -> None:
        # Who only opens a store need not load it.
        import duckdb

        self._error = duckdb.Error
        self._connection = duckdb.connect(str(folder / "rows.duckdb"))
        self._execute(f"set memory_limit = '{_MEMORY_LIMIT}'")
        self._execute(f"set temp_directory = '{_quoted(folder / 'spilled')}'")
        self._connection.register("piece", STAGED_SCHEMA.empty_table())
        self._execute("create table staged as from piece")
        self.rows: int = 0

    def add(self, rows: pa.Table) -> None:
        """Take in rows in `STAGED_SCHEMA`, in any order.

        Raises:
            UnavailableError: the local disk failed or is full.
        """
        self._connection.register("piece", rows)
        self._execute("insert into staged from piece")
        self.rows += rows.num_rows

    def sort(self) -> None:
        """Sort all rows by key.

        Raises:
            InvalidError: a key is there twice.
            UnavailableError: the local disk failed or is full.
        """
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
        """The greatest ``state_version`` of a row; 0 where none says any."""
        found = self._execute(f"select coalesce(max({STATE_VERSION}), 0) from sorted").fetchall()  # noqa: S608 - a name
        return int(found[0][0])

    def cuts(self, count: int) -> list[str]:
        """Keys that cut the rows into so many parts of about the same size; fewer where there are fewer keys."""
        positions = sorted({self.rows * part // count for part in range(1, count)} - {0})
        if not positions:
            return []
        listed = ", ".join(map(str, positions))
        found = self._execute(f"select key from sorted where rowid in ({listed})").fetchall()  # noqa: S608 - numbers
        lowest = self._execute("select key from sorted where rowid = 0").fetchall()[0][0]
        return sorted({key[:CUT_CHARACTERS_MAX] for (key,) in found if key[:CUT_CHARACTERS_MAX] > lowest})

    def rows_of(self, interval: Interval) -> Iterator[pa.Table]:
        """The rows of an interval in key order, in batches."""
        bounds = "key >= $low" + ("" if interval.high is None else " and key < $high")
        params = {"low": interval.low} | ({} if interval.high is None else {"high": interval.high})
        query = f"select * from sorted where {bounds} order by rowid"  # noqa: S608 - the bounds are parameters
        try:
            for batch in self._connection.sql(query, params=params).to_arrow_reader(_BATCH_ROWS):
                yield pa.Table.from_batches([batch]).cast(STAGED_SCHEMA)
        except (self._error, OSError) as cause:
            raise _failed(cause) from cause

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def _execute(self, query: str) -> duckdb.DuckDBPyConnection:
        try:
            return self._connection.execute(query)
        except (self._error, OSError) as cause:
            raise _failed(cause) from cause


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _failed(cause: Exception) -> UnavailableError:
    return UnavailableError(
        "the rows could not be sorted on this machine's disk", reason=str(cause).partition("\n")[0]
    )
