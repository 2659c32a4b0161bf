"""The sinks of a fork: separate tables, which begin with the deliveries of the parent up to the fork.

A fork runs its parent's code, which names the parent's tables. It must not write into them, so each sink gets
a table in the fork's folder. On one disk the tables share their files
(`millpond.statestore.objects.disk_tier`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_table import version_within
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.history.lineage import ROWS_FOLDER
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import table_id_of
from millpond.statestore.objects.disk_tier import share_object
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.types import Clock, Objects, Rng, TableVersion

SINKS_FOLDER = "sinks"
"""Folder within a store for sinks that must not lie where the code puts them."""

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFolder:
    """The folder in which a fork has tables in place of the parent's."""

    store: str
    storage_options: Mapping[str, str]
    clock: Clock
    rng: Rng

    def place_of(self, name: str) -> str:
        return f"{self.store}/{SINKS_FOLDER}/{quote(name, safe='')}"

    def own(self, sink: Sink, record: SinkRecord) -> DeltaSink:
        """Return the sink that replaces ``sink``; its table is made if needed.

        Only a `DeltaSink` whose table the parent has written gets a fork of that table. All others begin
        empty; a sink of another kind is replaced by a `DeltaSink` without a schema.
        """
        place = self.place_of(record.name)
        options = dict(self.storage_options) or None
        if not isinstance(sink, DeltaSink):
            return DeltaSink(place, storage_options=options)
        target = open_objects(place, options)
        if Log(target).latest_version() is None:
            fork_sink_table(self._source_of(sink, record), target, record, self.clock, self.rng)
        _LOG.info("sink %s of the fork writes to %s, not to %s", record.name, place, sink.path)
        return replace(sink, path=place, storage_options=options)

    def _source_of(self, sink: DeltaSink, record: SinkRecord) -> Objects:
        """Return the parent's table: in the parent's folder if that is a fork itself, else where the code puts it."""
        for parent in record.lineage.parents:
            table = open_objects(
                replace(self, store=parent).place_of(record.name), dict(self.storage_options) or None
            )
            if Log(table).latest_version() is not None:
                return table
            if not Log(open_objects(str(parent), self.storage_options, folder=ROWS_FOLDER)).latest_version():
                raise DataError(
                    "the parent of this fork is gone, and its sinks with it: give this one a separate sink",
                    sink=record.name,
                    parent=parent,
                )
        return open_objects(sink.path, sink.storage_options)


def is_of_the_parent(sink: DeltaSink, record: SinkRecord) -> bool:
    """Return True if another copy of the store has written the table: the parent of this fork, or another fork."""
    log = Log(open_objects(sink.path, sink.storage_options))
    if log.latest_version() is None:
        return False
    records = record.records(load(log).txns)
    return any(record.lineage.is_of_another_copy(incarnation) for incarnation, _ in records)


def fork_sink_table(source: Objects, target: Objects, record: SinkRecord, clock: Clock, rng: Rng) -> bool:
    """Make a table with the rows that a sink's table had when the fork began; False if it had none."""
    log = Log(source)
    if log.latest_version() is None:
        return False
    limits = {
        app_id: record.lineage.left_at(incarnation, record.pipeline) or 0
        for app_id, incarnation in record.app_ids(load(log).txns)
        if incarnation in {known.id for known in record.lineage.incarnations}
    }
    version = version_within(log, limits) if limits else None
    if version is None:
        return False
    replayed = replay_log(log, version)
    delivered = max((replayed.snapshot.txns.get(app_id, 0) for app_id in limits), default=0)
    # Files first, the commit last: until it lands there is no table, so a crash in between is simply retried.
    for path in replayed.adds:
        try:
            share_object(source, target, path)
        except ObjectMissingError as error:
            raise DataError(
                "files of the sink's table have been vacuumed since: give the fork a separate sink",
                store=source.url,
                path=path,
            ) from error
    # Otherwise a power cut could keep the commit and lose the files that it names.
    target.sync()
    data = encode(_actions(replayed, record, delivered, clock.now_us() // 1_000, rng.token()))
    target.put_if_absent(commit_path(TableVersion(0)), data)
    return True


def _actions(
    replayed: ReplayedLog, record: SinkRecord, delivered: int, now_ms: int, table: str
) -> Iterator[Action]:
    yield CommitInfo(operation="MILLPOND FORK", timestamp_ms=now_ms, parameters={"kind": "fork"})
    yield replayed.protocol
    if replayed.metadata is not None:
        yield replace(replayed.metadata, table_id=table_id_of(table), created_ms=now_ms)
    if delivered:
        yield Txn(app_id=record.app_id, version=delivered, updated_ms=now_ms)
    yield from replayed.adds.values()
