"""Views of rows: exactly one row per key, at the newest or any older version.

Arrow and DuckDB read through `merge_updates`, with every checksum verified, from any object store. Spark reads the
files itself and applies the same rule as SQL (`rows_query`); `millpond.statestore.rows.row` states the rule. Record
ids and undelivered productions are read only on request.

A view belongs to one table version. It reads on demand, so a vacuum of that version's files makes it unreadable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId, recorded_word
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import PendingFiles, pending_files
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.objects.hadoop import refused_by_hadoop
from millpond.statestore.objects.obstore import refuse_outside
from millpond.statestore.rows.files import LARGE_BYTES, read_row_files
from millpond.statestore.rows.key_columns import key_columns_in, key_lookup
from millpond.statestore.rows.key_text import KeyValue, encode_key, key_of_text
from millpond.statestore.rows.merge import (
    MERGE_COLUMNS,
    ROWS_VIEW_COLUMNS,
    SqlDialect,
    rows_query,
    split_rows,
)
from millpond.statestore.rows.row import (
    ID_COLUMNS,
    PARTITION_COLUMN,
    PRODUCTION_COLUMNS,
    ROW_SCHEMA,
    STATE_VERSION,
    ListsOfKeys,
    lists_by_key,
    with_texts,
)
from millpond.statestore.rows.state_schema import addend_columns_among, state_columns_among, sum_name
from millpond.statestore.types import Objects, TableVersion
from millpond.statestore.view_columns import (
    ShownColumn,
    StateColumn,
    shown_columns,
    state_columns_in,
    states_in_spark,
)

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

# The row schema without the engine's own columns.
ROWS_VIEW_SCHEMA: Final = pa.schema([ROW_SCHEMA.field(name) for name in ROWS_VIEW_COLUMNS])
_EXTRAS: Final = ("record_ids", "productions")
WHOLE_ROW_SCHEMA: Final = pa.schema([*ROWS_VIEW_SCHEMA, *(ROW_SCHEMA.field(name) for name in _EXTRAS)])

_NUMBERS: Final = count()


_LOCKED: Final = (
    "set python_enable_replacements = false",
    "set autoinstall_known_extensions = false",
    "set autoload_known_extensions = false",
    "set allow_persistent_secrets = false",
    "set enable_external_access = false",
    "set lock_configuration = true",
)
"""Settings that confine a query to the tables of its connection; the last one makes the others final."""


def computations_of(snapshot: Snapshot) -> list[str]:
    """Return the names of all computations that have rows or an owner, in order."""
    owned = (Interval.from_app_id(app_id) for app_id in snapshot.txns)
    return sorted({one.computation for one in owned if one is not None}.union(snapshot.computations))


def connect(snapshot: Snapshot, objects: Objects, *, allow_files: bool = False) -> duckdb.DuckDBPyConnection:
    """Open an in-memory DuckDB in which each computation is a view of that name.

    The schemas ``record_ids`` and ``productions`` also have a view of each computation, with a row for each
    record id or undelivered production. A computation that is owned but has no rows yet, such as
    ``dead_letters``, is an empty view. The first query reads the rows. Times are shown in UTC. Unless
    ``allow_files``, queries reach only these views and what their caller registers.
    """
    from duckdb import ParserException

    connection = fresh_duckdb()
    computations = computations_of(snapshot)
    for computation in computations:
        try:
            RowsView.of(snapshot, objects, computation).to_duckdb(connection, computation)
        except ParserException as error:
            # Only a forged log has it: no store gives a computation the empty name.
            raise DataError(
                "the log names a computation that no store can have", computation=computation
            ) from error
    for name in _EXTRAS:
        connection.execute(f"create schema {name}")
        connection.execute(f"use {name}")
        for computation in computations:
            contents = _Contents(RowsView.of(snapshot, objects, computation))
            read = partial(contents.values, name)
            connection.from_arrow(_Lazy(contents.schema_of(name), read)).create_view(computation)
    connection.execute("use main")
    return connection if allow_files else confined(connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsView:
    """The rows of one computation at one table version; files without pins may be collected meanwhile."""

    objects: Objects
    computation: str
    version: TableVersion
    files: tuple[LiveFile, ...]
    pending: tuple[PendingFiles, ...] = ()  # files that may hold undelivered productions
    key_columns: tuple[pa.Field, ...] = ()  # of typed keys, as far as the store has recorded them
    state_columns: tuple[StateColumn, ...] = ()  # as far as the computation's code has declared them
    stored_columns: tuple[
        str, ...
    ] = ()  # that may hold its states and addends, if it has ever declared a schema

    @staticmethod
    def of(snapshot: Snapshot, objects: Objects, computation: str) -> RowsView:
        return RowsView(
            objects=objects,
            computation=computation,
            version=snapshot.version,
            files=snapshot.files_in(computation),
            pending=pending_files(snapshot, computation),
            key_columns=key_columns_in(snapshot.txns, computation),
            state_columns=state_columns_in(snapshot.txns, computation),
            stored_columns=_stored_columns(snapshot, computation),
        )

    def key_of(self, values: Sequence[KeyValue]) -> str:
        """Return the text of a typed key, given values or texts that convert; `InvalidError` if no key has them."""
        return key_lookup(values, self.key_columns) if self.key_columns else encode_key(values)

    def to_arrow(
        self, keys: Iterable[str | tuple[KeyValue, ...]] | None = None, *, whole: bool = False
    ) -> pa.Table:
        """Return the rows, sorted by key, in `ROWS_VIEW_SCHEMA`, with typed columns of keys and states behind the key.

        Args:
            keys: only these keys, each as text or as a tuple of its values; files and pages without them are skipped.
            whole: return `WHOLE_ROW_SCHEMA`, with record ids and undelivered productions, and include keys without
                state or timers.

        Raises:
            DataError: a file is missing or damaged; the error names it.
            InvalidError: no key can have the values.
        """
        if isinstance(keys, str | bytes):
            raise InvalidError("keys must be a list of keys", keys=keys)
        texts = (
            None
            if keys is None
            else {key_of_text(key) if isinstance(key, str) else self.key_of(key) for key in keys}
        )
        contents = _Contents(self, None if texts is None else sorted(texts))
        if not whole:
            return self._with_typed_columns(contents.rows)
        rows = pa.concat_tables([contents.rows, contents.other_rows]).sort_by("key")
        for name in _EXTRAS:
            lists = ListsOfKeys(contents.lists(name), name)
            rows = rows.append_column(ROW_SCHEMA.field(name), lists.at(rows.column("key")))
        return self._with_typed_columns(rows)

    @property
    def shown(self) -> tuple[ShownColumn, ...]:
        """The typed columns behind the key."""
        return shown_columns(self.key_columns, self.state_columns)

    def _with_typed_columns(self, rows: pa.Table) -> pa.Table:
        sources = {name: rows.column(name) for name in ("key", "state")}
        for place, column in enumerate(self.shown):
            rows = rows.add_column(place + 1, column.field, column.cells(sources[column.source]))
        return rows

    def to_duckdb(
        self, connection: duckdb.DuckDBPyConnection | None = None, name: str | None = None
    ) -> duckdb.DuckDBPyRelation:
        """Return the whole rows as a DuckDB relation, read at the first query and kept with the connection.

        The first query that names ``record_ids`` or ``productions`` reads them. The relation is called
        ``computation@version`` in SQL unless ``name`` is given; by default the database is a new one in
        memory with times in UTC.
        """
        database = fresh_duckdb() if connection is None else connection
        relation = f"{self.computation}@{self.version}" if name is None else name
        _register_rows(database, self, relation)
        return database.sql(f"from {_quote(relation)}")

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """Return the rows as a DataFrame, read by Delta's own reader at the view's version.

        Spark's Python workers, which import this package, make the typed columns that a query names. Delta's reader
        verifies no page checksums; use `to_arrow` where damage must raise an error. For a store on S3, make the session
        with ``mp.spark_session(store=…, storage_options=…)``; for other object stores, configure Hadoop's connector.

        Raises:
            InvalidError: Spark cannot read the store, because it is in memory or the session lacks Delta or access.
        """
        url = self.objects.url
        if url.startswith("memory:"):
            raise InvalidError("Spark cannot read a store in memory", store=url)
        from pyspark.sql.functions import lit

        reader = spark.read.format("delta").option("versionAsOf", str(self.version))
        try:
            table = reader.load(url)
        except Exception as error:
            if (refused := refused_by_hadoop(error, url)) is not None:
                raise refused from error
            if "DATA_SOURCE_NOT_FOUND" not in str(error):
                raise
            raise InvalidError(
                "this session of Spark has no Delta: make it with mp.spark_session(), or add Delta's jar and extension to "
                "it (delta.configure_spark_with_delta_pip)",
                store=url,
            ) from error
        # Spark reads the log by itself, perhaps with checkpoints that this view did not need.
        root = url if "://" in url else f"file:{url}"
        refuse_outside((file.removeprefix(f"{root}/") for file in table.inputFiles()), url)
        if STATE_VERSION not in table.columns:
            # A table that was made before there were versions gets the column when one is first used.
            table = table.selectExpr("*", f"cast(null as int) as {STATE_VERSION}")
        known = [name for name in self.stored_columns if name in table.columns]
        for name in addend_columns_among(known):
            if sum_name(name) not in known:
                # No file has a whole sum yet.
                table = table.withColumn(sum_name(name), lit(None).cast(table.schema[name].dataType))
                known.append(sum_name(name))
        addends = {name: table.select(f"{name}.*").columns for name in addend_columns_among(known)}
        typed = state_columns_among(known)
        updates = table.where(table[PARTITION_COLUMN] == self.computation).select(*MERGE_COLUMNS, *known)
        rows = spark.sql(rows_query("{updates}", SqlDialect.SPARK, typed, addends), updates=updates)
        if typed:
            rows = rows.withColumn("state", states_in_spark(typed))
        first, *others = ROWS_VIEW_COLUMNS
        return (
            rows.select(first, *(column.in_spark() for column in self.shown), *others)
            if self.shown or typed
            else rows
        )


def _stored_columns(snapshot: Snapshot, computation: str) -> tuple[str, ...]:
    metadata = snapshot.metadata
    if metadata is None or recorded_word(snapshot.txns, AppId.STATE_COLUMNS, computation) is None:
        return ()
    names = [field["name"] for field in orjson.loads(metadata.schema_string).get("fields", [])]
    return (*state_columns_among(names), *addend_columns_among(names))


class _Contents:
    """The parts of a view, each read once, on first use."""

    def __init__(self, view: RowsView, keys: Sequence[str] | None = None) -> None:
        self._view = view
        self._keys = keys

    @property
    def rows(self) -> pa.Table:
        return self._split[0]

    @cached_property
    def other_rows(self) -> pa.Table:
        """Rows that have only record ids or undelivered productions."""
        others = self._split[1]
        if not others.num_rows:
            return others
        keys = others.column("key")
        found = [pc.is_in(keys, value_set=self.lists(name).column("key")) for name in _EXTRAS]
        return others.filter(pc.or_(*found))

    def lists(self, name: str) -> pa.Table:
        return self._record_ids if name == "record_ids" else self._productions

    @staticmethod
    def schema_of(name: str) -> pa.Schema:
        """Return the schema of `values`: a production's own key has another name than that of its row."""
        fields = list(ROW_SCHEMA.field(name).type.value_type)
        renamed = [field.with_name("production_key") if field.name == "key" else field for field in fields]
        return pa.schema([("key", pa.string()), *renamed])

    def values(self, name: str) -> pa.Table:
        by_key = self.lists(name)
        lists = by_key.column(name).combine_chunks()
        keys = by_key.column("key").combine_chunks().take(pc.list_parent_indices(lists))
        return pa.Table.from_arrays([keys, *lists.flatten().flatten()], schema=self.schema_of(name))

    @cached_property
    def _split(self) -> tuple[pa.Table, pa.Table]:
        # As text they could not be added up.
        rows, others = split_rows(self._read(self._paths, MERGE_COLUMNS, keeps_cells=True))
        return with_texts(rows).select(ROWS_VIEW_COLUMNS), others.select(ROWS_VIEW_COLUMNS)

    @cached_property
    def _record_ids(self) -> pa.Table:
        return lists_by_key(self._read(self._paths, ID_COLUMNS), "record_ids")

    @cached_property
    def _productions(self) -> pa.Table:
        wanted = set(self._paths)
        found = [pa.schema([ROW_SCHEMA.field(name) for name in PRODUCTION_COLUMNS]).empty_table()]
        for each in self._view.pending:
            paths = [path for path in each.paths if path in wanted]
            updates = self._read(paths, PRODUCTION_COLUMNS, each.interval)
            found.append(updates.filter(pc.greater_equal(updates.column("superstep"), each.superstep)))
        return lists_by_key(pa.concat_tables(found), "productions")

    @cached_property
    def _paths(self) -> list[str]:
        keys, files = self._keys, self._view.files
        if keys is None:
            return [file.path for file in files]
        begins = ((0 if file.min_key is None else bisect_left(keys, file.min_key), file) for file in files)
        return [
            file.path
            for begin, file in begins
            if begin < len(keys) and (file.max_key is None or keys[begin] <= file.max_key)
        ]

    def _read(
        self,
        paths: Sequence[str],
        columns: Sequence[str],
        interval: Interval | None = None,
        *,
        keeps_cells: bool = False,
    ) -> pa.Table:
        large = {file.path for file in self._view.files if file.size_bytes >= LARGE_BYTES}
        return read_row_files(
            self._view.objects,
            paths,
            columns,
            keys=self._keys,
            interval=interval,
            large=large,
            keeps_cells=keeps_cells,
        )


class _Lazy:
    """Arrow data read on first use (the Arrow PyCapsule protocol)."""

    def __init__(self, schema: pa.Schema, read: Callable[[], pa.Table]) -> None:
        self._schema = schema
        self._read = read

    def __arrow_c_schema__(self) -> Any:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._read().cast(self._schema).to_reader().__arrow_c_stream__(requested_schema)


def _register_rows(database: duckdb.DuckDBPyConnection, view: RowsView, relation: str) -> None:
    """Create a view of whole rows that reads no more than a query needs.

    DuckDB passes no choice of columns on to Python, but calls a function only where its result is used.
    """
    contents = _Contents(view)
    rows = database.from_arrow(_Lazy(ROWS_VIEW_SCHEMA, lambda: contents.rows))
    others = database.from_arrow(_Lazy(ROWS_VIEW_SCHEMA, lambda: contents.other_rows))
    extras = ", ".join(f"{_column_function(database, contents, name)}(key) as {name}" for name in _EXTRAS)
    types = dict(zip(rows.columns, rows.types, strict=True))
    # Constant nulls let DuckDB skip these rows in a query for states of a certain kind.
    nulls = ("state", "state_bytes", STATE_VERSION)
    nothing = ", ".join(f"null::{types[name]} as {name}" for name in nulls)
    nothing += f", []::{types['timers']} as timers"
    parts = no_parts = ""
    for column in view.shown:
        function, name = column.in_duckdb(database), _quote(column.field.name)
        parts += f"{function}({column.source}) as {name}, "
        # Keys without a state have null in every state column.
        no_parts += f"{function}({'key' if column.source == 'key' else 'null'}) as {name}, "
    rest = ", ".join(name for name in ROWS_VIEW_COLUMNS if name not in {"key", *nulls, "timers"})
    known = ", ".join(name for name in ROWS_VIEW_COLUMNS if name != "key")
    whole = rows.project(f"key, {parts}{known}, {extras}").union(
        others.project(f"key, {no_parts}{nothing}, {rest}, {extras}")
    )
    whole.create_view(relation, replace=True)


def _column_function(database: duckdb.DuckDBPyConnection, contents: _Contents, name: str) -> str:
    schema = pa.schema([ROW_SCHEMA.field(name)])
    (kind,) = database.from_arrow(schema.empty_table()).types
    function = f"{name} {next(_NUMBERS)}"

    @cache
    def lists() -> ListsOfKeys:
        return ListsOfKeys(contents.lists(name), name)

    def look_up(keys: pa.ChunkedArray) -> pa.Array:
        return lists().at(keys)

    # DuckDB's type hints want constants of a module that it does not have.
    database.create_function(function, look_up, ["VARCHAR"], kind, type="arrow")  # type: ignore[call-overload]
    return _quote(function)


def fresh_duckdb() -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect()
    connection.execute("set TimeZone = 'UTC'")
    return connection


def confined(connection: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """Refuse files, networks, extensions, Python variables and other settings to the connection's queries."""
    for setting in _LOCKED:
        connection.execute(setting)
    return connection


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
