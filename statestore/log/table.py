"""Tables at version 0: the store's ``rows``, and plain Delta tables for sinks.

Tables require reader version 1 and writer version 2 and use no table feature, so that
every Delta reader and writer can work on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import orjson
import pyarrow as pa

from millpond.statestore.app_ids import location_app_id
from millpond.statestore.errors import InvalidError, ObjectExistsError
from millpond.statestore.log.action import Action, Metadata, Protocol, Txn
from millpond.statestore.log.delta_schema import delta_schema
from millpond.statestore.log.plan import CommitDraft
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.log.writer import LogWriter
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millpond.statestore.log.log import Log
    from millpond.statestore.retry import RetryPolicy
    from millpond.statestore.types import Clock, Rng

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
        txns={location_app_id(location): 0} if location else {},
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
