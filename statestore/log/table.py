"""Tables at version 0: the store's ``rows``, and plain Delta tables for sinks.

Tables require reader version 1 and writer version 2 and use no table feature, so that
every Delta reader and writer can work on them.

Appending to any Delta table exactly once.

It uses the same log writer as the store's own table, so an append has the same three
outcomes. Delta's application transactions make it exactly once: an append whose
transactions the table has already reached is skipped.

Replacing files of any Delta table exactly once, in one commit.

Like `millpond.statestore.log.table`, it uses application transactions to skip a replacement that the table
already has. Because the new files were made from the old ones, the commit is made on the very version
that was read, or not at all.

Changing the columns of a Delta table whose files need not be rewritten for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

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
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.log.writer import CommitDraft, Committed, LogWriter
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from millpond.statestore.log.files import LiveFile
    from millpond.statestore.log.log import Log
    from millpond.statestore.system import RetryPolicy
    from millpond.statestore.types import Clock, Rng, TableVersion


FORMAT_VERSION: Final = 1
"""The store format that this code reads and writes."""

FORMAT_VERSION_KEY: Final = "millpond.formatVersion"
"""Key of the store's format in the table's configuration."""

STORE_ID_KEY: Final = "millpond.storeId"
"""Key of the store's identity in the table's configuration."""


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
    """Create an empty Delta table.

    Args:
        log: the table's log; there must be no table yet.
        clock: for timestamps.
        rng: for the table's identity.
        schema: all columns, including partition columns.
        name: the table's name.
        partition_columns: names of the columns that partition it.
        configuration: the table's properties.
        txns: application ids and the versions that they begin with.
        retry: the policy for retries.

    Returns:
        A writer of the table, at version 0.

    Raises:
        ObjectExistsError: there is already a table; another process may have just created it.
        InvalidError: the basic Delta protocol cannot represent the schema.
    """
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
    retry: RetryPolicy | None = None,
) -> LogWriter:
    """Create the table ``rows`` of a new store.

    Args:
        log: the table's log; there must be no table yet.
        clock: for timestamps.
        rng: for the identities of table and store.
        store_id: the store's id; drawn at random if not given.
        location: where the store lies; "" if that is not to be recorded.
        retry: the policy for retries.

    Raises:
        ObjectExistsError: there is already a table; another process may have just created it.
    """
    partition = pa.field(PARTITION_COLUMN, pa.string())
    return create_table(
        log,
        clock,
        rng,
        schema=pa.schema([partition, *ROW_SCHEMA]),
        name="rows",
        partition_columns=(PARTITION_COLUMN,),
        configuration={
            FORMAT_VERSION_KEY: str(FORMAT_VERSION),
            STORE_ID_KEY: store_id or rng.token(),
        },
        txns={AppId.LOCATION.of(location): 0} if location else {},
        retry=retry,
    )


def check_format(snapshot: Snapshot) -> None:
    """Refuse a table that does not belong to a store, or belongs to a store of a newer format.

    Raises:
        InvalidError: this code cannot read the table as a store.
    """
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
    """The identity of the store that a table belongs to.

    Raises:
        InvalidError: the table has no store's identity.
    """
    store_id = snapshot.configuration.get(STORE_ID_KEY)
    if not store_id:
        raise InvalidError("the Delta table is not a Millpond store", key=STORE_ID_KEY)
    return store_id


def with_row_columns(metadata: Metadata) -> Metadata:
    """The metadata of a table of rows with all columns that rows have; those that it has stay as they are."""
    schema = orjson.loads(metadata.schema_string)
    fields = schema.setdefault("fields", [])
    names = {field["name"] for field in fields}
    lacking = [field for field in ROW_SCHEMA if field.name not in names]
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
    """The id of a Delta table, which has the form of a UUID, from 32 hexadecimal digits."""
    cuts = (0, 8, 12, 16, 20, 32)
    return "-".join(token[low:high] for low, high in pairwise(cuts))


def append(
    writer: LogWriter,
    adds: tuple[Add, ...],
    *,
    txns: Mapping[str, int] | None = None,
    metadata: Mapping[str, JsonValue] | None = None,
    rows: int = 0,
    guard: Callable[[Snapshot], None] | None = None,
) -> Committed | None:
    """Add files to a table, once.

    Args:
        writer: the table's writer.
        adds: files that are already in the table's folder.
        txns: application ids and the versions that this append advances them to.
        metadata: stored in ``commitInfo.millpond``.
        rows: how many rows the files hold, for the table's history.
        guard: raises if the version that the commit is built on forbids it.

    Returns:
        The commit; ``None`` when the table has reached all of ``txns``, so nothing was added.

    Raises:
        OutcomeUnknownError: it may or may not have landed; repeating the call decides.
        ConflictError: some of ``txns`` are reached and some are not, or the table changed its schema.
        InvalidError: a file's partition values do not fit the table.
    """
    plan = _AppendPlan(
        adds=adds, txns=dict(txns or {}), metadata=dict(metadata or {}), rows=rows, guard=guard
    )
    return writer.write(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AppendPlan:
    adds: tuple[Add, ...]
    txns: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    rows: int = 0
    guard: Callable[[Snapshot], None] | None = None

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if self.guard is not None:
            self.guard(snapshot)
        reached = [app_id for app_id, at in self.txns.items() if snapshot.txns.get(app_id, -1) >= at]
        if self.txns and len(reached) == len(self.txns):
            return None
        if reached:
            raise ConflictError("the table already holds a part of this append", app_ids=reached)
        _check_partitions(self.adds, snapshot)
        txns = [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]
        return CommitDraft(
            operation="WRITE",
            actions=(*txns, *self.adds),
            fields={**self.metadata, "kind": "append"},
            parameters={"mode": "Append"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        if any(isinstance(action, (Protocol, Metadata)) for action in winner):
            raise ConflictError("another writer changed the table's protocol or metadata")


def _check_partitions(adds: tuple[Add, ...], snapshot: Snapshot) -> None:
    columns = set(snapshot.metadata.partition_columns) if snapshot.metadata else set()
    for add in adds:
        if set(add.partition_values) != columns:
            raise InvalidError(
                "the file's partition values do not fit the table", path=add.path, columns=sorted(columns)
            )


def replace_files(
    writer: LogWriter,
    removed: Sequence[LiveFile],
    added: Sequence[Add],
    *,
    read_at: TableVersion,
    txns: Mapping[str, int],
    metadata: Mapping[str, JsonValue] | None = None,
    rows: int = 0,
    guard: Callable[[Snapshot], None] | None = None,
) -> Committed | None:
    """Replace files of an unpartitioned table, once.

    Args:
        writer: the table's writer.
        removed: live files whose rows the new files replace.
        added: files that are already in the table's folder.
        read_at: the version from which ``added`` was made.
        txns: application ids and the versions that this commit advances them to.
        metadata: stored in ``commitInfo.millpond``.
        rows: how many rows the new files hold, for the table's history.
        guard: raises if the version that the commit is built on forbids it.

    Returns:
        The commit; ``None`` when the table has reached all of ``txns``, so nothing was changed.

    Raises:
        ConflictError: the table is at another version than ``read_at``: read again; nothing was written.
        OutcomeUnknownError: it may or may not have landed; the next call decides.
        UnavailableError: the store is unavailable; nothing was written.
    """
    plan = _ReplacePlan(
        removed=tuple(removed),
        added=tuple(added),
        read_at=read_at,
        txns=dict(txns),
        metadata=dict(metadata or {}),
        rows=rows,
        guard=guard,
    )
    return writer.write(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplacePlan:
    removed: tuple[LiveFile, ...]
    added: tuple[Add, ...]
    read_at: TableVersion
    txns: Mapping[str, int]
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    rows: int = 0
    guard: Callable[[Snapshot], None] | None = None

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        if self.guard is not None:
            self.guard(snapshot)
        if all(snapshot.txns.get(app_id, -1) >= at for app_id, at in self.txns.items()):
            return None
        if snapshot.version != self.read_at:
            raise ConflictError(
                "the table has changed since it was read", read_at=self.read_at, version=snapshot.version
            )
        txns = [Txn(app_id=app_id, version=at, updated_ms=now_ms) for app_id, at in self.txns.items()]
        removes = [
            Remove(path=file.path, deletion_time_ms=now_ms, partition_values={}, size_bytes=file.size_bytes)
            for file in self.removed
        ]
        return CommitDraft(
            operation="MERGE",
            actions=(*txns, *removes, *self.added),
            fields={**self.metadata, "kind": "replace"},
            rows=self.rows,
        )

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Accept every commit here: `build` refuses any version except the one that was read."""


def change_schema(writer: LogWriter, schema_string: str) -> None:
    """Give a table other columns, if it still has those that the writer knows.

    The caller sees to it that the files of the table, if any, can be read with the new columns.

    Args:
        writer: the table's writer.
        schema_string: the new columns, as Delta writes them.

    Raises:
        ConflictError: another writer changed the columns, or added a file; nothing was written.
        OutcomeUnknownError: it may or may not have landed; repeating the call decides.
        UnavailableError: the table is away; nothing was written.
    """
    metadata = writer.snapshot.metadata
    if metadata is None:
        raise ConflictError("the table has no metadata")
    writer.write(_SchemaPlan(before=metadata, after=replace(metadata, schema_string=schema_string)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaPlan:
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
