"""Sinks: streams leave Millpond through them, each record exactly once (MillWheel §6.1, architecture §6).

A runner passes each committed superstep's productions to the sink, in order, and repeats the last superstep
after a crash. The sink stores the superstep's number in the same commit as the data and skips a superstep
that it already has. Uncommitted productions never reach a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

import pyarrow as pa

from millpond.executor.sinks.columns import ROW_SCHEMA_BY_WINDOW, SinkRecord
from millpond.executor.sinks.delta_table import DeltaSinkWriter
from millpond.executor.sinks.delta_upsert import UpsertSinkWriter, key_columns
from millpond.statestore.arguments import check_instance
from millpond.statestore.errors import InvalidError, UnavailableError, did_you_mean
from millpond.statestore.history.lineage import local_folder
from millpond.statestore.log.action import delta_schema
from millpond.statestore.objects.obstore import (
    is_local,
    local_path,
    open_objects,
    place_for_delta_rs,
    refuse_outside,
)
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import DURABILITIES, Clock, Durability, Rng, Superstep

WINDOW_KEYS: Final = ("window_start", "window_end", "key")


class SinkWriter(Protocol):
    """The running side of a `Sink`; used by one thread at a time."""

    @property
    def delivered(self) -> Superstep:
        """The last superstep that the sink has stored; 0 before the first."""

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """Store a superstep's productions, unless the sink has stored that superstep already.

        Store the superstep's number as durably as the records and together with them: it decides after a
        crash. The productions have the columns ``key`` (text), ``at`` (microseconds), ``value`` (JSON text) and
        ``value_bytes``; one of the last two is null.

        Raises:
            InvalidError: the records do not fit the sink; the run stops.
            UnavailableError: the sink does not respond; the runner repeats the call.
            OutcomeUnknownError: the records may have been stored; the runner repeats the call.
        """


@runtime_checkable
class Sink(Protocol):
    """The destination of a stream: configuration without state.

    Implement this protocol to write to another system; pass an instance to `Stream.sink`.
    """

    @property
    def identity(self) -> str:
        """The destination as text; two sinks of one pipeline must not share it."""

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """Create the writer of one sink of one pipeline of one store.

        Each copy of a store has a different ``store_id`` here. Clock and names of files are the system's by default.

        Raises:
            InvalidError: the destination holds something else.
            UnavailableError: the destination does not respond.
        """


@runtime_checkable
class RecordingSink(Protocol):
    """A sink that keeps a `SinkRecord`, and so distinguishes the incarnations of a store."""

    def open_for(
        self, record: SinkRecord, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """Create the writer, or refuse a destination of another copy of the store or ahead of the store."""


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """Writes a stream to a Delta table, which is created if it does not exist.

    With ``mode="append"`` every production is appended, in order; from a windowed step, each pane and each
    retraction (``pane.is_retraction``, or the column ``is_retraction``). With ``mode="upsert"`` the table has
    one row per value of ``keys``: a new pane replaces the row, a retraction deletes it, and each version of
    the table holds the current results. A windowed step without ``accumulation=`` retracts where a new pane may not
    replace each row of the last one: ``keys`` with a field of the value, or a ``flat_map`` in between.

    The running pipeline writes checkpoints of the table's log, merges small files, and deletes replaced files and old
    log entries when Delta's properties of the table permit it (docs/windows.md). Readers, streaming ones too, and
    other writers are not disturbed.

    Args:
        path: the table's folder or URL.
        schema: the table's columns. ``key`` and ``at`` come from the record, the others from fields of its
            value; for a pane, from fields of the inner value, or else ``window_start``, ``window_end`` and
            ``is_retraction`` from its window. Without a schema the columns are ``key``, ``at`` and ``value`` as JSON
            text, and with ``"upsert"`` also ``window_start`` and ``window_end``. A value that does not fit stops the
            run.
        storage_options: the options that ``obstore`` needs to open the URL.
        mode: ``"append"``, or ``"upsert"`` to replace rows.
        keys: with ``"upsert"``, the columns that identify a row: text, whole numbers or times. Rows are
            sorted by them, so supersteps cost least if the first key follows time. By default
            ``window_start``, ``window_end`` and ``key``, as far as the table has them.
        durability: what rows in a local folder survive; see `Store.open`. ``None`` takes the store's. With a
            weaker durability than the store's, a power cut can lose rows for good: the store counts a
            superstep as delivered once the table has it.

    Example:
        >>> DeltaSink("out/spikes", pa.schema([("key", pa.string()), ("flights", pa.int64())])).path
        'out/spikes'
    """

    path: str | Path
    schema: pa.Schema | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    mode: Literal["append", "upsert"] = "append"
    keys: Sequence[str] | None = None
    durability: Durability | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path) or not self.path:
            raise InvalidError("a Delta sink needs a path, as text or as a Path", path=self.path)
        if self.durability not in (None, *DURABILITIES):
            raise InvalidError("there is no such durability", durability=self.durability, known=DURABILITIES)
        check_instance("storage_options", self.storage_options, Mapping, optional=True)
        check_instance("schema", self.schema, pa.Schema, optional=True, path=self.path)
        if self.schema is not None:
            delta_schema(self.schema)
        if self.mode not in ("append", "upsert"):
            raise InvalidError("a Delta sink's mode must be append or upsert", mode=self.mode)
        if self.mode == "append" and self.keys is not None:
            raise InvalidError(
                'keys are for an upsert only: set mode="upsert"', path=self.path, keys=self.keys
            )
        if self.mode == "upsert":
            self._row_keys()

    def _row_keys(self) -> tuple[str, ...]:
        schema = ROW_SCHEMA_BY_WINDOW if self.schema is None else self.schema
        names = (name for name in WINDOW_KEYS if name in schema.names) if self.keys is None else self.keys
        keys = (names,) if isinstance(names, str) else tuple(names)
        if not keys or len(set(keys)) < len(keys) or not set(keys) <= set(schema.names):
            unknown = [name for name in keys if name not in schema.names]
            hint = did_you_mean(unknown[0], schema.names) if unknown else ""
            raise InvalidError(
                f"keys must be columns of the table, each once{hint}",
                path=self.path,
                keys=keys,
                columns=schema.names,
            )
        key_columns(schema.empty_table(), keys)
        return keys

    @property
    def identity(self) -> str:
        """The table's URL, or its absolute path on this machine."""
        local = local_path(self.path)
        return str(self.path).rstrip("/") if local is None else str(local)

    def following(self, durability: Durability) -> DeltaSink:
        """Return this sink with a store's durability, unless it sets one itself or its URL leaves no choice."""
        if self.durability is not None or not is_local(str(self.path)):
            return self
        return replace(self, durability=durability)

    def read(self) -> pa.Table:
        """Return the current rows of the table, in no particular order; see `read_table`.

        With ``mode="append"`` these are all productions, including retractions; with ``mode="upsert"`` the
        current row of each key.
        """
        return read_table(self.path, self.storage_options)

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """Open the table, or create it; see `Sink.open`."""
        return self.open_for(SinkRecord.of_store(store_id, pipeline, name), clock=clock, rng=rng)

    def open_for(
        self, record: SinkRecord, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """Open the table, or create it, for one incarnation of a store.

        Raises:
            InvalidError: the table has other columns or is partitioned, or belongs to another copy of the store.
            DataError: the table is ahead of the store, which was restored from an older copy, or lacks what the store has
                delivered to it.
            UnavailableError: the folder or bucket cannot be opened.
        """
        writer: Callable[..., DeltaSinkWriter | UpsertSinkWriter] = DeltaSinkWriter
        if self.mode == "upsert":
            writer = partial(UpsertSinkWriter, keys=self._row_keys())
        folder = local_folder(self.path)
        if folder is not None and not folder.is_dir():
            # Before the folder is made, so that the removed one can be moved back.
            record.refuse_loss(0, self.identity)
        opened = writer(
            open_objects(str(self.path), self.storage_options, durability=self.durability),
            clock or SystemClock(),
            rng or SystemRng(),
            name=record.name,
            record=record,
            schema=self.schema,
        )
        opened.keep_up()
        return opened


def read_table(path: str | Path, storage_options: Mapping[str, str] | None = None) -> pa.Table:
    """Return the current rows of a Delta table, such as the table of a `DeltaSink`, as a `pyarrow.Table`.

    All rows are of one version of the table, so a superstep is in it as a whole or not at all. They come in no
    particular order and with the columns of the table's schema; times are UTC, in microseconds. The whole table
    is read into memory: for a part of a large table use SQL, for example DuckDB or Spark.

    Args:
        path: the table's folder or URL.
        storage_options: the credentials and endpoints of an object store, as for `DeltaSink`.

    Raises:
        InvalidError: there is no Delta table at the path, or the library that reads it cannot take the path.
        UnavailableError: the table cannot be read now: its storage does not respond, or a file is gone.

    Example:
        ``read_table("counts").sort_by("window_start").to_pylist()``
    """
    from deltalake import DeltaTable, QueryBuilder
    from deltalake.exceptions import DeltaError, TableNotFoundError

    place = place_for_delta_rs(path)
    try:
        table = DeltaTable(place, storage_options=None if storage_options is None else dict(storage_options))
        # The table's log could name any file that this user may read.
        refuse_outside(pa.table(table.get_add_actions())["path"].to_pylist(), place)
        # Not to_pyarrow_table: its threads may outlive the program's last line, which then exits with 134
        # (delta-rs issue 2184).
        rows = pa.table(QueryBuilder().register("rows", table).execute("SELECT * FROM rows"))
        # The query gives views of text, which fewer of Arrow's functions take than plain text.
        return rows.cast(pa.schema(table.schema().to_arrow()))
    except TableNotFoundError as cause:
        raise InvalidError("there is no Delta table at this path", path=path) from cause
    except (DeltaError, pa.ArrowException, OSError) as cause:
        raise UnavailableError("the Delta table cannot be read", path=path, reason=cause) from cause
