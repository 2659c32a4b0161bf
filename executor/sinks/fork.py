"""The sinks of a fork: separate tables, which begin with the deliveries of the parent up to the fork.

A fork runs its parent's code, which names the parent's destinations. It must not write there, also not where the parent
has written nothing yet: so each sink, of whatever kind, gets a table in the fork's folder, unless the fork was told to
take the destination over. On one disk the tables share their files (`millpond.statestore.objects.disk_tier`).
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
from millpond.statestore.history.lineage import ROWS_FOLDER, local_folder
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
        if isinstance(sink, DeltaSink):
            if sink.identity.startswith(f"{self.store}/"):
                return sink
            target = open_objects(place, options)
            if Log(target).latest_version() is None:
                theirs = _log_at(str(sink.path), sink.storage_options)
                # Forks of earlier releases wrote into tables that their parents had not written.
                if theirs is not None and record.is_writer(load(theirs).txns):
                    return sink
                source = self._parents_log(record) or theirs
                if source is not None:
                    fork_sink_table(source, target, record, self.clock, self.rng)
            owned = replace(sink, path=place, storage_options=options)
        else:
            owned = DeltaSink(place, storage_options=options)
        _LOG.info("sink %s of the fork writes to %s, not to %s", record.name, place, sink.identity)
        return owned

    def _parents_log(self, record: SinkRecord) -> Log | None:
        """Return the table in the folder of a parent that is a fork itself; ``None`` if no parent has one."""
        for parent in record.lineage.parents:
            table = _log_at(replace(self, store=parent).place_of(record.name), self.storage_options)
            if table is not None:
                return table
            rows = f"{parent}/{ROWS_FOLDER}"
            if _log_at(rows, self.storage_options) is None:
                raise DataError(
                    "the parent of this fork is gone, and its sinks with it: give this one a separate sink",
                    sink=record.name,
                    parent=parent,
                )
        return None


def _log_at(path: str, options: Mapping[str, str] | None) -> Log | None:
    """Return the log of the table at a path; ``None`` if there is no table."""
    folder = local_folder(path)
    # Opening a local table would make its folder, and a fork makes nothing outside of its own.
    if folder is not None and not folder.is_dir():
        return None
    log = Log(open_objects(path, dict(options or {}) or None))
    return None if log.latest_version() is None else log


def fork_sink_table(log: Log, target: Objects, record: SinkRecord, clock: Clock, rng: Rng) -> None:
    """Make a table with the rows that a sink's table had when the fork began, if it had any."""
    limits = {
        app_id: record.lineage.left_at(incarnation, record.pipeline) or 0
        for app_id, incarnation in record.app_ids(load(log).txns)
        if incarnation in {known.id for known in record.lineage.incarnations}
    }
    version = version_within(log, limits) if limits else None
    if version is None:
        return
    replayed = replay_log(log, version)
    delivered = max((replayed.snapshot.txns.get(app_id, 0) for app_id in limits), default=0)
    # Files first, the commit last: until it lands there is no table, so a crash in between is simply retried.
    for path in replayed.adds:
        try:
            share_object(log.objects, target, path)
        except ObjectMissingError as error:
            raise DataError(
                "files of the sink's table have been vacuumed since: give the fork a separate sink",
                store=log.objects.url,
                path=path,
            ) from error
    # Otherwise a power cut could keep the commit and lose the files that it names.
    target.sync()
    data = encode(_actions(replayed, record, delivered, clock.now_us() // 1_000, rng.token()))
    target.put_if_absent(commit_path(TableVersion(0)), data)


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
