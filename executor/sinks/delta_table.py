"""The Delta table of a sink: opened or created, its files, and the rows of its older versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import ConflictError, DataError, InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.replayed_log import read_histories, replay_log
from millpond.statestore.log.action import Add, delta_schema
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import change_schema, create_table
from millpond.statestore.log.writer import LogWriter
from millpond.statestore.objects.obstore import put_new
from millpond.statestore.types import Clock, Objects, Rng, Superstep, TableVersion


def open_table(
    objects: Objects, clock: Clock, rng: Rng, name: str, schema: pa.Schema, *, whole: bool = False
) -> LogWriter:
    """Return the writer of a sink's table, which is created if it does not exist.

    A table that a sink of this name created can change its columns: freely while it has no rows, later by
    further nullable columns. Not with ``whole``: an upsert rewrites rows, and a row would no longer equal its
    retraction.
    """
    log = Log(objects)
    if log.latest_version() is None:
        try:
            return create_table(log, clock, rng, schema=schema, name=name)
        except ConflictError:
            pass  # Another process created the table first: check below that it fits.
    snapshot = load(log)
    writer = LogWriter(log, snapshot, clock, rng)
    columns = _new_columns(snapshot, schema, name, may_grow=not whole)
    if columns is not None:
        change_schema(writer, columns)
        snapshot = writer.snapshot
    _check_fits(snapshot, schema, name, objects.url)
    if whole:
        _check_no_others(snapshot, schema, name, objects.url)
    return writer


_FIELDS: Final = "fields"
_WAY_OUT: Final = "give the sink another path, or change the columns of the table"


def _new_columns(snapshot: Snapshot, schema: pa.Schema, name: str, *, may_grow: bool) -> str | None:
    """Return the columns with which a table would fit; ``None`` if it fits already, or cannot change."""
    metadata = snapshot.metadata
    if metadata is None or metadata.partition_columns or metadata.configuration or metadata.name != name:
        # Not a table that a sink of this name has created.
        return None
    wanted = orjson.loads(delta_schema(schema))
    existing = orjson.loads(metadata.schema_string)
    kinds = {column["name"]: column["type"] for column in existing[_FIELDS]}
    if all(kinds.get(column["name"]) == column["type"] for column in wanted[_FIELDS]):
        return None
    if not snapshot.file_count:
        return orjson.dumps(wanted).decode()
    further = [column for column in wanted[_FIELDS] if column["name"] not in kinds]
    if not further or not may_grow or not all(column["nullable"] for column in further):
        return None
    return orjson.dumps({**existing, _FIELDS: [*existing[_FIELDS], *further]}).decode()


def _check_fits(snapshot: Snapshot, schema: pa.Schema, name: str, url: str) -> None:
    metadata = snapshot.metadata
    if metadata is None:
        raise InvalidError("the sink's table has no metadata", sink=name, path=url)
    if metadata.partition_columns:
        raise InvalidError(
            "a Delta sink cannot append to a partitioned table: give the sink another path",
            sink=name,
            path=url,
            partition_columns=list(metadata.partition_columns),
        )
    existing = {column["name"]: column["type"] for column in orjson.loads(metadata.schema_string)[_FIELDS]}
    for column in orjson.loads(delta_schema(schema))[_FIELDS]:
        kind = existing.get(column["name"])
        if kind != column["type"]:
            raise InvalidError(
                f"the sink's table has other columns: {_WAY_OUT}",
                sink=name,
                path=url,
                column=column["name"],
                wanted=column["type"],
                found=kind,
            )


def _check_no_others(snapshot: Snapshot, schema: pa.Schema, name: str, url: str) -> None:
    existing = orjson.loads(snapshot.metadata.schema_string)[_FIELDS] if snapshot.metadata else ()
    others = sorted({column["name"] for column in existing} - set(schema.names))
    if others:
        raise InvalidError(
            f"the sink's table has columns that an upsert would lose: {_WAY_OUT}",
            sink=name,
            path=url,
            columns=others,
        )


def write_sink_file(
    objects: Objects,
    clock: Clock,
    rng: Rng,
    sink: str,
    superstep: Superstep,
    rows: pa.Table,
    *,
    tags: Mapping[str, str] | None = None,
) -> Add:
    """Write rows to one Parquet file of a sink's table; it takes effect once a commit adds it."""
    buffer = pa.BufferOutputStream()
    pq.write_table(rows, buffer, compression="zstd", coerce_timestamps="us", write_page_checksum=True)
    data = buffer.getvalue().to_pybytes()
    path = f"{sink}-{superstep:010d}-{rng.token()}.parquet"
    # No sync yet: the commit that adds the file syncs it first.
    put_new(objects, path, data, synced=False)
    reach("sink.file_written")
    return Add(
        path=path,
        size_bytes=len(data),
        partition_values={},
        modification_time_ms=clock.now_us() // 1_000,
        stats=orjson.dumps({"numRecords": rows.num_rows}).decode(),
        tags=dict(tags or {}),
    )


def version_within(log: Log, limits: Mapping[str, int]) -> TableVersion | None:
    """Return a table's newest version in which no transaction is beyond its limit; ``None`` if it has none.

    ``limits`` is by application id. Raises `DataError` if the log is damaged or does not reach back far
    enough.
    """
    histories = read_histories(log, None)
    if not histories:
        raise DataError("the log of the sink's table cannot be read", store=log.objects.url)
    history = histories[0]
    version, at = history.newest, dict(history.state.txns)
    for change in reversed(history.changes):
        if _is_within(at, limits):
            return version
        for app_id, before in change.txns_before:
            at[app_id] = before or 0
        version = TableVersion(change.version - 1)
    if _is_within(at, limits):
        return version if version >= 0 else None
    raise DataError("the log of the sink's table does not reach back that far", store=log.objects.url)


def _is_within(at: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    return all(at.get(app_id, 0) <= limit for app_id, limit in limits.items())


def read_rows(objects: Objects, version: TableVersion) -> pa.Table:
    """Return the rows of a table at a version; no columns if it has no files."""
    paths = replay_log(Log(objects), version).adds
    tables = [pq.read_table(pa.BufferReader(objects.get(path))) for path in paths]
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
