"""
Sinks: streams on their way out of Millpond, exactly once (MillWheel §6.1, architecture §6).

A runner hands a sink each committed superstep's productions, in order, and after a crash the
last superstep again. The sink stores the superstep's number in the same commit as the data, so
what it already has it skips. Nothing that has not been committed ever reaches a sink.

`DeltaSink` is the one that comes with Millpond: it appends what comes, retractions included, or keeps
one row for each key, which retractions delete and new panes replace; another is a class with ``identity`` and
``open`` whose writer remembers the superstep as safely as it keeps the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

import pyarrow as pa

from millpond.executor.sinks.changes import key_columns
from millpond.executor.sinks.columns import ROW_SCHEMA_BY_WINDOW
from millpond.executor.sinks.delta_append import DeltaSinkWriter
from millpond.executor.sinks.delta_upsert import UpsertSinkWriter
from millpond.statestore.app_ids import sink_app_id
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.delta_schema import delta_schema
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng, Superstep

__all__ = ["DeltaSink", "Sink", "SinkWriter"]


_ROW_KEYS: Final = ("window_start", "window_end", "key")


class SinkWriter(Protocol):
    """
    The running side of a sink; used by one thread at a time.
    """

    @property
    def delivered(self) -> Superstep:
        """
        The last superstep that the sink has; 0 when it has none.
        """
        ...

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """
        Deliver a superstep's productions, unless the sink has them already.

        Args:
            superstep: the superstep that produced them, already committed.
            productions: columns ``key``, ``at``, ``value`` (JSON text) and ``value_bytes``.

        Raises:
            InvalidError: the records do not fit the sink.
            UnavailableError: the sink is away; the same call may be made again.
            OutcomeUnknownError: the records may have arrived; the same call may be made again.
        """
        ...


@runtime_checkable
class Sink(Protocol):
    """
    Where a stream goes: configuration without state.
    """

    @property
    def identity(self) -> str:
        """
        The place that is written to; two sinks of one pipeline must not share it.
        """
        ...

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """
        Make the running side for one sink of one pipeline of one store.

        Args:
            store_id: the store whose supersteps are counted.
            pipeline: the pipeline.
            name: the sink's name in it.
            clock: for timestamps and waiting; the machine's unless given.
            rng: for file names; the machine's unless given.

        Raises:
            InvalidError: the place holds something else.
            UnavailableError: the place does not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """
    A Delta table that follows a stream; made when it is not there.

    With ``mode="append"`` everything is appended, in order of production: of a windowed step, each
    pane and each retraction (``pane.is_retraction``, or the column ``is_retraction``). With
    ``mode="upsert"`` the table has one row for each value of ``keys``: a new pane replaces it, a
    retraction deletes it, and at every version a reader finds what stands at that moment. The files
    that this replaces stay until you vacuum the table, as in any Delta table (docs/windows.md).

    Args:
        path: the table's folder or URL.
        schema: its columns; ``key`` and ``at`` are the record's own, the others are fields of
            its value. Without one the columns are ``key``, ``at`` and ``value`` as JSON text.
            A value that does not fit stops the run: nothing is dropped in silence. Of a pane,
            columns may also be ``window_start`` and ``window_end``, and fields of the value inside.
            When rows are replaced, the columns without a schema are ``key``, ``window_start``,
            ``window_end``, ``at`` and ``value``.
        storage_options: what ``obstore`` needs to open the URL.
        mode: ``"append"``, or ``"upsert"`` to replace rows.
        keys: with ``"upsert"``, the columns that tell rows apart: text, whole numbers or times. Rows
            lie in this order, so a superstep costs least if the first one follows time. By default
            those of ``window_start``, ``window_end`` and ``key`` that there are.

    Example:
        >>> DeltaSink("out/spikes", pa.schema([("key", pa.string()), ("flights", pa.int64())])).path
        'out/spikes'
    """

    path: str
    schema: pa.Schema | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    mode: Literal["append", "upsert"] = "append"
    keys: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """
        Refuse what can never be a table while the caller is still near.
        """
        if not isinstance(self.path, str) or not self.path:
            raise InvalidError("a Delta sink needs a path", path=self.path)
        if self.schema is not None:
            delta_schema(self.schema)
        if self.mode not in ("append", "upsert"):
            raise InvalidError("a Delta sink's mode is append or upsert", mode=self.mode)
        if self.mode == "append" and self.keys is not None:
            raise InvalidError("only an upsert has keys", keys=self.keys)
        if self.mode == "upsert":
            self._row_keys()

    def _row_keys(self) -> tuple[str, ...]:
        schema = ROW_SCHEMA_BY_WINDOW if self.schema is None else self.schema
        wanted = (name for name in _ROW_KEYS if name in schema.names) if self.keys is None else self.keys
        keys = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        if not keys or len(set(keys)) < len(keys) or not set(keys) <= set(schema.names):
            raise InvalidError("keys are some of the table's columns", keys=keys, columns=schema.names)
        key_columns(schema.empty_table(), keys)
        return keys

    @property
    def identity(self) -> str:
        """
        The table's URL, or its absolute path on this machine.
        """
        return _absolute(self.path)

    def open(
        self, store_id: str, pipeline: str, name: str, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> SinkWriter:
        """
        Open the table, or make it.

        Raises:
            InvalidError: there is a table with other columns, or a partitioned one.
            UnavailableError: the folder or bucket cannot be opened.
        """
        writer: Callable[..., SinkWriter] = DeltaSinkWriter
        if self.mode == "upsert":
            writer = partial(UpsertSinkWriter, keys=self._row_keys())
        return writer(
            open_objects(self.path, self.storage_options),
            clock or SystemClock(),
            rng or SystemRng(),
            name=name,
            app_id=sink_app_id(store_id, pipeline, name),
            schema=self.schema,
        )


def _absolute(path: str) -> str:
    local = path.removeprefix("file://")
    return path.rstrip("/") if "://" in local else str(Path(local).absolute())
