"""Upkeep: compaction and garbage collection while a pipeline runs.

A compaction is prepared by another process, or a Spark job, while supersteps go on, and becomes part of the table
between two supersteps, by one commit of the intervals' owner. So it never conflicts with a
superstep, and the next superstep waits for that commit and for nothing else. A store that another process
cannot open is compacted by a thread. Without either (a simulation, a stepped test) everything happens
within `Upkeep.run`, in a fixed order.

What fails here costs space and never data: a compaction that could not be prepared, or whose files
another writer has replaced, is dropped and planned again. Only losing the lease ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from millpond.executor.maintenance.collection import CollectionSchedule
from millpond.executor.maintenance.compaction import CompactionSchedule
from millpond.executor.maintenance.parting import PartingSchedule
from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy, workers_of
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction import Compacted
from millpond.statestore.errors import ConflictError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, EventTimeMicros, Rng, Superstep

_LOG = logging.getLogger("millpond")


class Upkeep:
    """Keeps the store of one pipeline small; used by the coordinator's thread, between supersteps.

    Args:
        store: the open store.
        ownership: the intervals, and the way to commit.
        journal: told of every commit.
        topology: the checked pipeline.
        clock: the source of time.
        rng: the source of file names.
        policy: when and how; ``None``: not at all.
        compaction_workers: makes workers on other machines; ``None`` for helper processes of this one.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        topology: Topology,
        *,
        clock: Clock,
        rng: Rng,
        policy: UpkeepPolicy | None,
        compaction_workers: CompactionWorkers | None = None,
    ) -> None:
        self._ownership = ownership
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
        self._compactions = CompactionSchedule(
            store, ownership, topology, clock=clock, rng=rng, policy=used, workers=self._workers
        )
        self._partings = PartingSchedule(
            store, ownership, self._compactions, policy=used, workers=self._workers
        )
        self._rounds = CollectionSchedule(
            store, ownership, clock=clock, policy=used, worker=self._workers.rounds
        )

    def open(self) -> None:
        """Look at what earlier runs have left."""
        self._rounds.open()
        self._compactions.open()
        self._partings.open()

    def follow(self, cut: Cut) -> None:
        """The keys of a computation were cut into other intervals."""
        self._compactions.follow(cut)
        self._partings.follow(cut)

    def update(self, topology: Topology) -> None:
        """Follow a pipeline that has changed: what is prepared of intervals that it gave back is dropped."""
        self._compactions.update(topology)
        self._partings.update()

    def note(self, request: CommitRequest) -> None:
        """Intervals have got files."""
        self._compactions.note(request)

    def run(self, superstep: Superstep, watermark: Callable[[str], EventTimeMicros]) -> None:
        """Commit the compactions that are ready, and start those that are due.

        Args:
            superstep: the last one committed.
            watermark: input low watermark by computation.

        Raises:
            FencedError: another process has taken an interval.
        """
        if not self._is_on:
            return
        self._rounds.note_version()
        self._compactions.throttle()
        self._commit_ready()
        self._rounds.settle()
        if self._rounds.is_due:
            # A file that waits for its commit would look like an orphan: small compactions end first.
            if self._compactions.is_idle:
                busy = {*self._compactions.large_computations, *self._partings.computations}
                self._rounds.start(superstep, busy=busy)
            return
        for interval in self._compactions.due():
            self._compactions.start(interval, superstep, watermark, during_round=self._rounds.is_running)
        self._partings.start(superstep, watermark, during_round=self._rounds.is_running)
        if self._workers.is_inline:
            self._commit_ready()

    def _commit_ready(self) -> None:
        compactions = self._compactions.take_ready()
        if compactions:
            ordered = sorted(compactions, key=lambda prepared: prepared.compaction.interval.app_id)
            writes = [prepared.write(self._next_fence(prepared.compaction.interval)) for prepared in ordered]
            self._commit(writes, compactions, [f for one in compactions for f in one.compaction.files])
        parted = self._partings.take_ready()
        if parted is not None:
            self._commit(parted.writes(self._next_fence), parted.pieces, parted.parting.files)

    def _next_fence(self, interval: Interval) -> Fence:
        return self._ownership.get(interval).next_fence

    def _commit(
        self, writes: Sequence[IntervalWrite], prepared: Sequence[Compacted], replaced: Sequence[LiveFile]
    ) -> None:
        request = CommitRequest(
            kind="compaction", writes=tuple(writes), metadata={"pipeline": self._pipeline}
        )
        try:
            self._ownership.commit(request)
        except ConflictError as error:
            _LOG.info("a compaction was overtaken: %s", error)
            for compacted in prepared:
                self._compactions.discard(compacted)
            return
        reach("compaction.committed")
        self._rounds.note_replaced(sum(file.size_bytes for file in replaced))

    def close(self) -> None:
        """Stop; what was prepared and not committed is removed again."""
        self._workers.shutdown()
        self._partings.close()
        self._compactions.close()
