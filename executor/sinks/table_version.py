"""Older versions of a sink's table: the one that a superstep left, and its rows."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.errors import DataError
from millpond.statestore.integrity.table_history import read_histories
from millpond.statestore.log.log import Log
from millpond.statestore.types import Objects, TableVersion
from millpond.statestore.versions.replayed_log import replay_log


def version_within(log: Log, limits: Mapping[str, int]) -> TableVersion | None:
    """The newest version of a table in which no transaction is beyond its limit.

    Args:
        log: the table's log.
        limits: by application id.

    Returns:
        ``None`` if that is before the table's first version.

    Raises:
        DataError: the log is damaged, or does not reach back that far.
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
    """The rows of a table at a version; no columns if it has no files.

    Raises:
        DataError: the log is damaged, or files of that version have been vacuumed.
    """
    paths = replay_log(Log(objects), version).adds
    tables = [pq.read_table(pa.BufferReader(objects.get(path))) for path in paths]
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
