"""Delta tables: creation of a store's ``rows`` and of plain tables for sinks, appends, replacements and new columns.

They use no table feature beyond reader version 1 and writer version 2, so every Delta engine can work on them. A commit
whose application transactions the table has reached is skipped, so appends and replacements happen exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import orjson
import pyarrow as pa

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ConflictError, InvalidError, ObjectExistsError
from millpond.statestore.log.action import (
    Action,
    Add,
    JsonValue,
    Metadata,
    Protocol,
    Remove,
    Txn,
    delta_schema,
)
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.log.writer import CommitDraft, LogWriter
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA
from millpond.statestore.rows.state_schema import is_typed_column
from millpond.statestore.system import RetryPolicy
from millpond.statestore.types import Clock, Rng, TableVersion

FORMAT_VERSION: Final = 1
FORMAT_VERSION_KEY: Final = "millpond.formatVersion"
STORE_ID_KEY: Final = "millpond.storeId"
_ROWS_SCHEMA: Final = pa.schema([pa.field(PARTITION_COLUMN, pa.string()), *ROW_SCHEMA])


def create_table(
    log: Log,
    clock: Clock,
    rng: Rng,
    *,
    schema: pa.Schema,
    name: str,
    partition_columns: tuple[str, ...] = (),
    configuration: Mapping[str, str] | None = None,
    txns: Mapping[str, int] | None = None,
    retry: RetryPolicy | None = None,
) -> LogWriter:
    """Create an empty Delta table and return a writer at its version 0."""
    missing = [column for column in partition_columns if column not in schema.names]
    if missing:
        raise InvalidError("a partition column is not in the schema", columns=missing)
    if log.latest_version() is not None:
        raise ObjectExistsError("there is already a table", store=log.objects.url)
    metadata = Metadata(
        table_id=table_id_of(rng.token()),
        name=name,
        schema_string=delta_schema(schema),
        partition_columns=partition_columns,
        configuration=dict(configuration or {}),
        created_ms=clock.now_us() // 1_000,
    )
    writer = LogWriter(log, Snapshot(), clock, rng, retry=retry)
    writer.write(_CreatePlan(metadata, dict(txns or {})))
    return writer


def create_rows_table(
    log: Log,
    clock: Clock,
    rng: Rng,
    *,
    store_id: str | None = None,
    location: str = "",
) -> LogWriter:
    """Create the table ``rows`` of a new store; its location is recorded unless it is ""."""
    return create_table(
        log,
        clock,
        rng,
        schema=_ROWS_SCHEMA,
        name="rows",
        partition_columns=(PARTITION_COLUMN,),
        configuration={FORMAT_VERSION_KEY: str(FORMAT_VERSION), STORE_ID_KEY: store_id or rng.token()},
        txns={AppId.LOCATION.of(location): 0} if location else {},
    )


def check_format(snapshot: Snapshot) -> None:
    """Raise `InvalidError` for a table that does not belong to a store, or to a store of a newer format."""
    text = snapshot.configuration.get(FORMAT_VERSION_KEY)
    if text is None or not text.isdecimal():
        raise InvalidError("the Delta table is not a Millpond store", format_version=text)
    if int(text) > FORMAT_VERSION:
        raise InvalidError(
            "the store was written by a newer Millpond; upgrade this one",
            format_version=text,
            known=FORMAT_VERSION,
        )


def store_id_of(snapshot: Snapshot) -> str:
    store_id = snapshot.configuration.get(STORE_ID_KEY)
    if not store_id:
        raise InvalidError("the Delta table is not a Millpond store", key=STORE_ID_KEY)
    return store_id


def rows_metadata(metadata: Metadata) -> Metadata:
    """Return a store's metadata with the columns and properties that Millpond gave it, and no others."""
    own = {
        name: value
        for name, value in metadata.configuration.items()
        if name in (FORMAT_VERSION_KEY, STORE_ID_KEY)
    }
    schema = orjson.loads(delta_schema(_ROWS_SCHEMA))
    fields = orjson.loads(metadata.schema_string).get("fields", [])
    schema["fields"] += [field for field in fields if is_typed_column(field["name"])]
    return replace(metadata, schema_string=orjson.dumps(schema).decode(), configuration=own)


def with_row_columns(metadata: Metadata, typed: Iterable[pa.Field] = ()) -> Metadata:
    """Return metadata with all columns of rows, and with ``typed`` ones for states and productions with a schema."""
    schema = orjson.loads(metadata.schema_string)
    fields = schema.setdefault("fields", [])
    names = {field["name"] for field in fields}
    lacking = [field for field in (*ROW_SCHEMA, *typed) if field.name not in names]
    if not lacking:
        return metadata
    fields += orjson.loads(delta_schema(pa.schema(lacking)))["fields"]
    return replace(metadata, schema_string=orjson.dumps(schema).decode())


@dataclass(frozen=True, slots=True)
class _CreatePlan:
    metadata: Metadata
    txns: Mapping[str, int]

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft:
        if snapshot.version != NO_TABLE:
            raise ObjectExistsError("there is already a table", version=snapshot.version)
        return CommitDraft(
            operation="CREATE TABLE",
            actions=(
                Protocol(),
                self.metadata,
                *(Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()),
            ),
            fields={"kind": "create"},
            parameters={"partitionBy": ",".join(self.metadata.partition_columns)},
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        raise ObjectExistsError("another process created the table first", actions=len(winner))


def table_id_of(token: str) -> str:
    """Return a Delta table's id, in the form of a UUID, from 32 hexadecimal digits."""
    cuts = (0, 8, 12, 16, 20, 32)
    return "-".join(token[low:high] for low, high in pairwise(cuts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FilesPlan:
    """Files of the table's folder, committed once: not again when the table has reached all of ``txns``.

    ``guard`` raises if the version that the commit is built on forbids it. ``rows`` is for the table's history.
    """

    added: tuple[Add, ...]
    txns: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    rows: int = 0
    guard: Callable[[Snapshot], None] | None = None

    def _reached(self, snapshot: Snapshot) -> list[str]:
        """Return the transactions that the table has reached already, after the guard has admitted its version."""
        if self.guard is not None:
            self.guard(snapshot)
        return [app_id for app_id, at in self.txns.items() if snapshot.txns.get(app_id, -1) >= at]

    def _transactions(self, now_ms: int) -> list[Txn]:
        return [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(_FilesPlan):
    """Adds files; `ConflictError` if the table has reached only some of ``txns``, or changes its schema meanwhile."""

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        reached = self._reached(snapshot)
        # Every transaction is reached: this very append has landed, so a repetition adds nothing.
        if self.txns and len(reached) == len(self.txns):
            return None
        if reached:
            raise ConflictError("the table already holds a part of this append", app_ids=reached)
        columns = set(snapshot.metadata.partition_columns) if snapshot.metadata else set()
        for add in self.added:
            if set(add.partition_values) != columns:
                raise InvalidError(
                    "the file's partition values do not fit the table", path=add.path, columns=sorted(columns)
                )
        return CommitDraft(
            operation="WRITE",
            actions=(*self._transactions(now_ms), *self.added),
            fields={**self.metadata, "kind": "append"},
            parameters={"mode": "Append"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata)) for action in winner):
            raise ConflictError("another writer changed the table's protocol or metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace(_FilesPlan):
    """Replaces files of an unpartitioned table that were read at one version, on that version or not at all.

    At another version the commit is a `ConflictError`: read again; nothing was written.
    """

    removed: tuple[LiveFile, ...]
    read_at: TableVersion

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if len(self._reached(snapshot)) == len(self.txns):
            return None
        # A later version may have added rows or changed files that ``added`` was made without.
        if snapshot.version != self.read_at:
            raise ConflictError(
                "the table has changed since it was read", read_at=self.read_at, version=snapshot.version
            )
        removes = [
            Remove(path=file.path, deletion_time_ms=now_ms, partition_values={}, size_bytes=file.size_bytes)
            for file in self.removed
        ]
        return CommitDraft(
            operation="MERGE",
            actions=(*self._transactions(now_ms), *removes, *self.added),
            fields={**self.metadata, "kind": "replace"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Accept every commit here: `build` refuses any version except ``read_at``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact(_FilesPlan):
    """Moves the rows of files into other files; `ConflictError` if another writer has removed one of them, or changed the schema."""

    removed: tuple[LiveFile, ...]

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft:
        self._reached(snapshot)
        gone = [file.path for file in self.removed if snapshot.file(file.path) is None]
        if gone:
            # Their rows were changed or moved by another writer: adding them again would repeat or revive rows.
            raise ConflictError("another writer has removed files that were being compacted", path=gone[0])
        removes = [
            Remove(
                path=file.path,
                deletion_time_ms=now_ms,
                data_change=False,
                partition_values={},
                size_bytes=file.size_bytes,
            )
            for file in self.removed
        ]
        return CommitDraft(
            operation="OPTIMIZE",
            actions=(*removes, *(replace(add, data_change=False) for add in self.added)),
            fields={**self.metadata, "kind": "compaction"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata)) for action in winner):
            raise ConflictError("another writer changed the table's protocol or metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSchema:
    """Replaces the columns of a table, unless they have changed since the writer read them.

    The caller makes sure that the table's files, if any, can be read with the new columns.
    """

    before: Metadata
    after: Metadata

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        del now_ms
        if snapshot.metadata == self.after:
            return None
        if snapshot.metadata != self.before:
            raise ConflictError("another writer changed the table's metadata")
        return CommitDraft(operation="CHANGE COLUMNS", actions=(self.after,), fields={"kind": "columns"})

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata, Add)) for action in winner):
            raise ConflictError("another writer changed the table first")
