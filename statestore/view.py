"""
Views of rows: exactly one row per key, at the newest or any older version.

The reader's rule is stated in `millpond.statestore.rows.row`. Arrow and DuckDB read
through `merge_updates`, with every checksum verified, from any object store;
Spark reads the files itself and applies the same rule as SQL (`rows_query`).

A view belongs to one table version for ever. It reads on demand, so the files of
that version must still exist: a vacuum that deletes them makes the view unreadable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.rows.files import MERGE_COLUMNS, merge_updates, read_row_files
from millpond.statestore.rows.reader_sql import ROWS_VIEW_COLUMNS, SqlDialect, rows_query
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA
from millpond.statestore.types import Objects, TableVersion

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["ROWS_VIEW_COLUMNS", "ROWS_VIEW_SCHEMA", "RowsView", "connect", "rows_view"]

ROWS_VIEW_SCHEMA: Final = pa.schema([ROW_SCHEMA.field(name) for name in ROWS_VIEW_COLUMNS])
"""Schema of a view: the row schema without the columns that only the engine needs."""


def rows_view(log: Log, computation: str, version: TableVersion | None = None) -> RowsView:
    """
    The rows of a computation, read from the log; use `RowsView.of` to reuse a loaded snapshot.

    Args:
        log: the table's log.
        computation: whose rows to read; a computation without rows has an empty view.
        version: an older table version; the newest by default.

    Raises:
        ObjectMissingError: there is no such version, or it was cleaned up.
    """
    return RowsView.of(load(log, version), log.objects, computation)


def connect(snapshot: Snapshot, objects: Objects) -> duckdb.DuckDBPyConnection:
    """
    An in-memory DuckDB in which each computation is a view of that name, for SQL over all of them.

    A computation that is owned but has no rows yet, such as ``dead_letters``, is an empty view.
    Rows are read by the first query that needs them. Times are shown in UTC.

    Example:
        ``connect(snapshot, objects).execute("select key, state ->> 'count' from window_counter")``
    """
    connection = _fresh_duckdb()
    owned = (Interval.from_app_id(app_id) for app_id in snapshot.txns)
    names = {interval.computation for interval in owned if interval is not None}
    for computation in sorted(names.union(snapshot.computations)):
        RowsView.of(snapshot, objects, computation).to_duckdb(connection, computation)
    return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsView:
    """
    The rows of one computation at one table version.

    Args:
        objects: the table's root.
        computation: whose rows.
        version: the table version.
        files: the computation's live files at that version.
    """

    objects: Objects
    computation: str
    version: TableVersion
    files: tuple[LiveFile, ...]

    @staticmethod
    def of(snapshot: Snapshot, objects: Objects, computation: str) -> RowsView:
        """
        The rows at the snapshot's current version; later commits do not change the view.
        """
        return RowsView(
            objects=objects,
            computation=computation,
            version=snapshot.version,
            files=snapshot.files_in(computation),
        )

    def to_arrow(self, keys: Iterable[str] | None = None) -> pa.Table:
        """
        The rows, sorted by key, in `ROWS_VIEW_SCHEMA`.

        Args:
            keys: only these keys' rows; files without them are not read, parts of files without them not decoded.

        Raises:
            DataError: a file is missing or damaged; the error names it.
        """
        wanted = None if keys is None else sorted(set(keys))
        paths = [file.path for file in self.files if wanted is None or _may_contain(file, wanted)]
        updates = read_row_files(self.objects, paths, MERGE_COLUMNS, keys=wanted)
        return merge_updates(updates).select(ROWS_VIEW_COLUMNS)

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None, name: str | None = None
    ) -> duckdb.DuckDBPyRelation:
        """
        The rows as a DuckDB relation, read at the first query and kept with the connection.

        Args:
            connection: the database to register with; by default a new in-memory one that shows times in UTC.
            name: the relation's name in SQL; ``computation@version`` by default.
        """
        database = _fresh_duckdb() if connection is None else connection
        relation = f"{self.computation}@{self.version}" if name is None else name
        database.register(relation, _LazyRows(self))
        return database.sql(f"from {_quote(relation)}")

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """
        The rows as a DataFrame, read by Delta's own reader at the view's version.

        Delta's reader verifies no page checksums; use `to_arrow` where damage must raise an error.
        For a store on an object store, configure the session's access to it (Hadoop's options).

        Raises:
            InvalidError: the store is in memory, where Spark cannot read it.
        """
        url = self.objects.url
        if url.startswith("memory:"):
            raise InvalidError("Spark cannot read a store in memory", store=url)
        table = spark.read.format("delta").option("versionAsOf", str(self.version)).load(url)
        updates = table.where(table[PARTITION_COLUMN] == self.computation).select(*MERGE_COLUMNS)
        return spark.sql(rows_query("{updates}", SqlDialect.SPARK), updates=updates)


class _LazyRows:
    """
    Arrow data that is read on first use (the Arrow PyCapsule protocol).
    """

    def __init__(self, view: RowsView) -> None:
        self._view = view

    @cached_property
    def _rows(self) -> pa.Table:
        return self._view.to_arrow()

    def __arrow_c_schema__(self) -> Any:
        return ROWS_VIEW_SCHEMA.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._rows.to_reader().__arrow_c_stream__(requested_schema)


def _fresh_duckdb() -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    connection.execute("set TimeZone = 'UTC'")
    return connection


def _may_contain(file: LiveFile, keys: Sequence[str]) -> bool:
    index = 0 if file.min_key is None else bisect_left(keys, file.min_key)
    return index < len(keys) and (file.max_key is None or keys[index] <= file.max_key)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
