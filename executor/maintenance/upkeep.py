"""Upkeep: compaction and garbage collection while a pipeline runs.

Another process, a Spark job or a thread prepares a compaction while supersteps continue. The compaction becomes part
of the table between two supersteps, by one commit of the intervals' owner. So it never conflicts with a superstep, and
the next superstep waits only for that commit. Without workers (a simulation, a stepped test) everything happens within
`Upkeep.run`, in a fixed order.

A failure here costs space and never data: a compaction that could not be prepared, or whose files another writer has
replaced, is discarded and planned again. Only losing the lease ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from millpond.executor.maintenance.collection import CollectionSchedule
from millpond.executor.maintenance.compaction import CompactionSchedule, PartingSchedule, Schedule, Watermark
from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy, workers_of
from millpond.executor.ownership.catalog_recorder import CatalogRecorder
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction import Compacted
from millpond.statestore.errors import ConflictError
from millpond.statestore.failpoint import reach
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng, Superstep

_LOG = logging.getLogger("millpond")


class Upkeep:
    """Keeps the store of one pipeline small; for the coordinator's thread, between supersteps.

    ``policy=None`` turns upkeep off. ``compaction_workers`` makes workers on other machines; by default helper processes of this
    one do the work.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        journal: CatalogRecorder,
        topology: Topology,
        *,
        clock: Clock,
        rng: Rng,
        policy: UpkeepPolicy | None,
        compaction_workers: CompactionWorkers | None = None,
    ) -> None:
        self._ownership = ownership
        self._journal = journal
        self._pipeline = topology.name
        self._clock = clock
        self._is_on = policy is not None
        used = policy or UpkeepPolicy(background=False)
        self._workers = workers_of(
            store,
            clock,
            background=used.background,
            in_thread=used.place == "thread",
            elsewhere=compaction_workers,
        )
        parts = (store, ownership, topology, clock, rng, used, self._workers)
        self._compactions, partings = CompactionSchedule(*parts), PartingSchedule(*parts)
        self._schedules: tuple[Schedule, ...] = (self._compactions, partings)
        self._rounds = CollectionSchedule(
            store, ownership, clock=clock, policy=used, worker=self._workers.rounds
        )

    def open(self) -> None:
        """Find the work that earlier runs have left."""
        self._rounds.open()
        for schedule in self._schedules:
            schedule.open()

    def follow(self, cut: Cut) -> None:
        """Adapt to a computation whose keys were cut into other intervals."""
        for schedule in self._schedules:
            schedule.follow(cut)

    def update(self, topology: Topology) -> None:
        """Adapt to a changed pipeline: discard the tasks of released intervals."""
        for schedule in self._schedules:
            schedule.update(topology)

    def note(self, request: CommitRequest) -> None:
        """Count the files that a superstep has added."""
        self._compactions.record(request)

    def run(self, superstep: Superstep, watermark: Watermark) -> None:
        """Commit finished tasks, and start due ones."""
        if not self._is_on:
            return
        self._rounds.record_version()
        self._compactions.throttle()
        self._commit_ready()
        self._rounds.report()
        if self._rounds.is_due:
            # Finish small compactions first: a round would delete their uncommitted files as orphans.
            if self._compactions.is_idle:
                busy = {name for schedule in self._schedules for name in schedule.busy}
                self._rounds.start(superstep, busy=busy)
            return
        for schedule in self._schedules:
            schedule.start(superstep, watermark, during_round=self._rounds.is_running)
        if self._workers.is_inline:
            self._commit_ready()

    def _commit_ready(self) -> None:
        for schedule in self._schedules:
            pieces = schedule.pop_ready()
            if pieces:
                self._commit(schedule, pieces)

    def _commit(self, schedule: Schedule, pieces: Sequence[Compacted]) -> None:
        request = CommitRequest(
            kind="compaction", writes=self._writes(pieces), metadata={"pipeline": self._pipeline}
        )
        started_us = self._clock.monotonic_us()
        try:
            # Under the owner's next fences, like a superstep: a former owner's compaction is refused.
            committed = self._ownership.commit(request)
        except ConflictError as error:
            _LOG.info("a compaction was overtaken: %s", error)
            for piece in pieces:
                schedule.discard(piece)
            return
        reach("compaction.committed")
        replaced = {file.path: file.size_bytes for piece in pieces for file in piece.compaction.files}
        self._rounds.record_replaced(sum(replaced.values()))
        self._journal.record(request, committed, (self._clock.monotonic_us() - started_us) / 1_000)

    def _writes(self, pieces: Sequence[Compacted]) -> tuple[IntervalWrite, ...]:
        writes: list[IntervalWrite] = []
        removed: set[str] = set()
        for piece in pieces:
            write = piece.write(self._ownership.get(piece.compaction.interval).next_fence)
            # A commit names a removed file once, although a parting's file is a part of every piece.
            writes.append(
                replace(write, removed=tuple(path for path in write.removed if path not in removed))
            )
            removed.update(write.removed)
        return tuple(writes)

    def close(self) -> None:
        """Stop, and discard uncommitted tasks."""
        self._workers.shutdown()
        for schedule in reversed(self._schedules):
            schedule.close()
