"""Upkeep: compaction and garbage collection while a pipeline runs.

Workers prepare a rewrite while supersteps continue, and it becomes part of the table between two supersteps, by one commit
of the intervals' owner. So it never conflicts with a superstep. A run that ends before its workers have started does what is
due itself, at its close (`Upkeep.finish`). Without workers (a simulation, a stepped test) everything happens within
`Upkeep.run`, in a fixed order. A failure here costs space and never data: the rewrite is
discarded and planned again. Only losing the lease ends the run.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Final

from millpond.executor.maintenance.compaction import CompactionSchedule, PartingSchedule, Schedule, Watermark
from millpond.executor.maintenance.policy import (
    CompactionWorkers,
    ExecutorWorker,
    UpkeepPolicy,
    workers_at_close,
    workers_of,
)
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.gc.collectors import KEPT_MS, CollectionRound, Owned, forget_checkpoint
from millpond.gc.compaction import Compacted
from millpond.statestore.errors import ConflictError, MillpondError, UnavailableError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.objects.ranges import ParallelObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US, Clock, Objects, Rng, Superstep, TableVersion

_LOG = logging.getLogger("millpond")
_FIRST_ROUND_AFTER: Final = 64
# A round takes forty requests of an object store.
_FAR_FIRST_ROUND_AFTER: Final = 256
_CHECKPOINT_EVERY: Final = 32
"""Number of versions after which the close of a run writes a checkpoint, and collects garbage."""

_FAR_CHECKPOINT_EVERY: Final = 8
# A checkpoint takes 13 us for each of its entries, in the helper process.
_ENTRIES_A_COMMIT: Final = 1_024
# Commits in memory until a checkpoint has them; more are read again, which a busy helper process makes many.
_RECENT_MAX: Final = 256
_REPLACED_BYTES_MIN: Final = 1 << 18
# Its requests cost as much as some MiB for a month.
_FAR_REPLACED_BYTES_MIN: Final = 1 << 24
_ROUNDS_A_RETENTION: Final = 6
_ROUND_EVERY_US_MIN: Final = 60_000_000
_WAITING_SHARE: Final = 8
"""Rounds come by time while an eighth of the live bytes waits to be deleted."""

_SIGHTINGS_MAX: Final = 16
"""Number of versions remembered, over twice the time for which the log is kept."""

_SIGHTING_EVERY_US: Final = 2_000 * KEPT_MS // _SIGHTINGS_MAX

_HELPERS_AFTER_US: Final = 2_000_000
"""Age at which a run starts helper processes: one takes as long to start as a short run to end."""

_CLOSING_SHARE: Final = 4
"""The close of a run begins no further piece of upkeep after this fraction of the run's time."""


class CollectionSchedule:
    """The rounds of garbage collection of one pipeline, one at a time.

    They come after a number of versions, and sooner when compactions have replaced much. Replaced files can be deleted
    once a checkpoint has recorded their removal and the retention has passed since. Where supersteps are slow, a few
    versions are hours; so while much waits for deletion, rounds also come by time.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        *,
        clock: Clock,
        policy: UpkeepPolicy,
        worker: ExecutorWorker,
    ) -> None:
        self._store = store
        self._is_far = isinstance(store.objects, ParallelObjects)
        self._ownership = ownership
        self._clock = clock
        self._policy = policy
        self._worker = worker
        self._round: Future[CollectionRound] | None = None
        self._opened_at = self._due_at = TableVersion(0)
        self._early_at = TableVersion(0)
        self._replaced_bytes = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._waiting_bytes = 0
        self._round_every_us = max(policy.kept.keep_ms * 1_000 // _ROUNDS_A_RETENTION, _ROUND_EVERY_US_MIN)
        self._last_round_us = clock.monotonic_us()
        self._sightings: deque[tuple[int, TableVersion]] = deque(maxlen=_SIGHTINGS_MAX)

    @property
    def is_running(self) -> bool:
        return self._round is not None

    @property
    def due_version(self) -> TableVersion:
        """The table version before which no round can be due, except by time."""
        return self._early_at if self._replaced_bytes else self._due_at

    @property
    def due_us(self) -> int:
        """The monotonic time before which no round can be due by time, and no version need be remembered."""
        next_sighting_us = self._sightings[-1][0] + _SIGHTING_EVERY_US
        next_round_us = self._last_round_us + self._round_every_us
        return min(next_sighting_us, next_round_us) if self._waiting else next_sighting_us

    @property
    def is_due(self) -> bool:
        if self.is_running:
            return False
        is_much = 2 * self._replaced_bytes >= self._live_bytes()
        due_at = self._early_at if is_much else self._due_at
        return self._store.committer.snapshot.version >= due_at or self._comes_by_time()

    def _comes_by_time(self) -> bool:
        now_us = self._clock.monotonic_us()
        if now_us - self._last_round_us < self._round_every_us:
            return False
        # By then one round has recorded a removal in a checkpoint and another has deleted the file.
        gone_us = now_us - self._policy.kept.keep_ms * 1_000 - 2 * self._round_every_us
        while self._waiting and self._waiting[0][0] < gone_us:
            self._waiting_bytes -= self._waiting.popleft()[1]
        return _WAITING_SHARE * self._waiting_bytes >= self._live_bytes()

    def _live_bytes(self) -> int:
        # A small store counts as larger than it is, so that it is not collected after every compaction.
        least = _FAR_REPLACED_BYTES_MIN if self._is_far else _REPLACED_BYTES_MIN
        return max(self._store.committer.snapshot.size_bytes, least)

    def open(self) -> None:
        """Plan the first round: soon, but not while the run starts."""
        self._opened_at = version = self._store.committer.snapshot.version
        soon = _FAR_FIRST_ROUND_AFTER if self._is_far else _FIRST_ROUND_AFTER
        self._due_at = TableVersion(version + min(soon, self._policy.collect_every))

    def is_due_at_close(self) -> bool:
        """Return True if a run that ends should do a round, because no run of its length would ever reach one."""
        every = min(_CHECKPOINT_EVERY, self._policy.collect_every)
        version = self._store.committer.snapshot.version
        if self._is_far:
            # Its checkpoints come anyway, so their age says nothing of the last round.
            return version // every > self._opened_at // every
        known = self._store.log.inventory().checkpoints
        last = max((checkpoint.version for checkpoint in known), default=0)
        return version - last >= every

    def record_version(self) -> None:
        """Remember the table's present version, by a clock that never jumps."""
        now_us = self._clock.monotonic_us()
        if not self._sightings or now_us - self._sightings[-1][0] >= _SIGHTING_EVERY_US:
            self._sightings.append((now_us, self._store.committer.snapshot.version))

    def record_replaced(self, size_bytes: int) -> None:
        self._replaced_bytes += size_bytes
        self._waiting_bytes += size_bytes
        self._waiting.append((self._clock.monotonic_us(), size_bytes))

    def report(self) -> None:
        """Log a round that has ended; the next one collects the rest."""
        if self._round is None or not self._round.done():
            return
        done, self._round = self._round, None
        try:
            summary = done.result()
        except (MillpondError, CancelledError) as error:
            _LOG.warning("garbage is left for the next round: %s", error)
        else:
            _LOG.debug("collected up to version %d (%s)", summary.horizon, summary.held_by)

    def start(
        self, superstep: Superstep, busy: Collection[str] = (), *, at_close: ExecutorWorker | None = None
    ) -> None:
        """Start a round after ``superstep``, the last one committed; ``at_close`` does it when the run is closed.

        It spares the orphans of ``busy`` computations, because one of their files may wait for its commit.
        """
        version = self._store.committer.snapshot.version
        retention, seen = self._policy.kept, self._seen_long_ago()
        if at_close is not None or self._comes_by_time():
            retention = replace(retention, checkpoint_every=1)
        self._last_round_us = self._clock.monotonic_us()
        self._due_at = TableVersion(version + self._policy.collect_every)
        self._early_at = TableVersion(version + self._policy.collect_early)
        self._replaced_bytes = 0
        owned = {
            current.interval: Owned(current.fence.sequencer, superstep)
            for current in self._ownership.owned.values()
            if current.interval.computation not in busy
        }
        # A short run has seen no version for long enough, so only the commits' own times tell their age.
        worker, seen_then = at_close or self._worker, seen or (None if at_close else seen)
        try:
            self._round = worker.collect(self._store, retention=retention, owned=owned, seen=seen_then)
        except UnavailableError as error:
            _LOG.warning("garbage is left for the next round: %s", error)

    def _seen_long_ago(self) -> TableVersion:
        before_us = self._clock.monotonic_us() - 1_000 * KEPT_MS
        old = [version for at_us, version in self._sightings if at_us <= before_us]
        return old[-1] if old else TableVersion(0)


class CheckpointSchedule:
    """The checkpoints of a store in an object store, where opening takes a request for each commit after the last one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_far = isinstance(store.objects, ParallelObjects)
        snapshot = store.committer.snapshot
        self._last = snapshot.checkpoint
        self._entries = snapshot.file_count + len(snapshot.txns)
        self._writing: Future[int] | None = None

    @property
    def due_version(self) -> int:
        """The table version from which the next checkpoint is due."""
        # A large checkpoint comes more rarely: it has all live and removed files.
        every = max(_FAR_CHECKPOINT_EVERY, self._entries // _ENTRIES_A_COMMIT)
        return self._last + every if self._is_far else TIME_MAX_US

    def open(self) -> None:
        if self._is_far:
            self._store.committer.recent = deque(maxlen=_RECENT_MAX)
            # Helper processes are the run's own; what this process knows may be from before.
            forget_checkpoint(self._store.objects)

    def run(self, worker: ExecutorWorker) -> None:
        """Have a checkpoint written if one is due."""
        version = self._store.committer.snapshot.version
        commits = tuple(commit for commit in self._store.committer.recent if commit[0] > self._last)
        if self._is_busy() or version < self.due_version or not commits:
            return
        self._last = version
        self._writing = worker.checkpoint(self._store, commits)

    def _is_busy(self) -> bool:
        if self._writing is None or not self._writing.done():
            return self._writing is not None
        done, self._writing = self._writing, None
        try:
            self._entries = done.result()
        except (MillpondError, CancelledError) as error:
            _LOG.info("a checkpoint is left for later: %s", error)
        return False


class Upkeep:
    """Keeps the store of one pipeline small; for the coordinator's thread, between supersteps.

    ``policy=None`` turns upkeep off. ``compaction_workers`` makes workers on other machines; by default helper processes of this
    one do the work, and read the files of small compactions from ``row_files``.

    Attributes:
        files: the files that each interval has got since its last compaction; add those of each superstep.
        due_version: the table version before which `run` has nothing to do …
        due_us: … unless it is called after this monotonic time.
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
        row_files: Objects | None = None,
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
        # Other machines do not have this one's copies.
        near = store.objects if row_files is None or compaction_workers is not None else row_files
        parts = (store, ownership, topology, clock, rng, used, self._workers, near)
        self._compactions, partings = CompactionSchedule(*parts), PartingSchedule(*parts)
        self._schedules: tuple[Schedule, ...] = (self._compactions, partings)
        self.files: defaultdict[Interval, int] = self._compactions.files
        self.due_version: int = 0 if self._is_on else TIME_MAX_US
        self.due_us: int = self.due_version
        self._rounds = CollectionSchedule(
            store, ownership, clock=clock, policy=used, worker=self._workers.rounds
        )
        self._began_us = clock.monotonic_us()
        self._checkpoints = CheckpointSchedule(store)

    def open(self) -> None:
        self._rounds.open()
        if self._is_on:
            self._checkpoints.open()
        for schedule in self._schedules:
            schedule.open()

    def follow(self, cut: Cut, superstep: Superstep) -> None:
        """Adapt to a computation whose keys were cut into other intervals after ``superstep``."""
        for schedule in self._schedules:
            schedule.follow(cut, superstep)
        self._look_soon()

    def update(self, topology: Topology) -> None:
        for schedule in self._schedules:
            schedule.update(topology)
        self._look_soon()

    def _look_soon(self) -> None:
        if self._is_on:
            self.due_version = 0

    def run(self, superstep: Superstep, watermark: Watermark) -> None:
        """Commit finished tasks, and start due ones."""
        if not self._is_on:
            return
        self._rounds.record_version()
        self._compactions.throttle()
        self._commit_ready()
        self._rounds.report()
        if self._is_too_young():
            self.due_us = self._began_us + _HELPERS_AFTER_US
            self.due_version = self._ownership.committer.snapshot.version + self._compactions.room
            return
        self._checkpoints.run(self._workers.rounds)
        if not self._rounds.is_due:
            for schedule in self._schedules:
                schedule.start(superstep, watermark, during_round=self._rounds.is_running)
            if self._workers.is_inline:
                self._commit_ready()
        elif self._compactions.is_idle:
            # Finish small compactions first: a round would delete their uncommitted files as orphans.
            busy = {name for schedule in self._schedules for name in schedule.busy}
            self._rounds.start(superstep, busy=busy)
        self._plan_next(superstep)

    def _is_too_young(self) -> bool:
        """Return True while the run starts no helper, unless so many files come that they would slow it down."""
        return (
            self._workers.are_helpers
            and self._clock.monotonic_us() - self._began_us < _HELPERS_AFTER_US
            and self._compactions.room > 0
            and not self._is_working
        )

    @property
    def _is_working(self) -> bool:
        return self._rounds.is_running or any(schedule.is_preparing for schedule in self._schedules)

    def _plan_next(self, superstep: Superstep) -> None:
        self.due_us = self._rounds.due_us
        if self._is_working:
            # Workers finish at any time.
            self.due_version = 0
            return
        left = min(schedule.supersteps_left(superstep) for schedule in self._schedules)
        due_version = min(self._rounds.due_version, self._checkpoints.due_version)
        self.due_version = min(due_version, self._ownership.committer.snapshot.version + left)

    def _commit_ready(self) -> bool:
        """Commit finished rewrites, a bounded number at once; return False if there were none."""
        is_any = False
        for schedule in self._schedules:
            if pieces := schedule.pop_ready():
                self._commit(schedule, pieces)
                is_any = True
        return is_any

    def _commit(self, schedule: Schedule, pieces: Sequence[Compacted]) -> None:
        request = CommitRequest(
            kind="compaction", writes=self._writes(pieces), metadata={"pipeline": self._pipeline}
        )
        try:
            # Under the owner's next fences, like a superstep: a former owner's compaction is refused.
            self._ownership.commit(request)
        except ConflictError as error:
            _LOG.info("a compaction was overtaken: %s", error)
            for piece in pieces:
                schedule.discard(piece)
            return
        reach("compaction.committed")
        replaced = {file.path: file.size_bytes for piece in pieces for file in piece.compaction.files}
        self._rounds.record_replaced(sum(replaced.values()))

    def _writes(self, pieces: Sequence[Compacted]) -> tuple[IntervalWrite, ...]:
        writes: list[IntervalWrite] = []
        removed: set[str] = set()
        for piece in pieces:
            write = piece.write(self._ownership.owned[piece.compaction.interval].next_fence)
            # A commit names a removed file once, although a parting's file is a part of every piece.
            writes.append(
                replace(write, removed=tuple(path for path in write.removed if path not in removed))
            )
            removed.update(write.removed)
        return tuple(writes)

    def finish(self, superstep: Superstep, watermark: Watermark) -> None:
        """Commit what workers have prepared, and do what else is due, before a run that has not failed is closed.

        Compactions that are not under way yet get a quarter of the run's time, the most overdue first. The first one is done
        in any case, and a checkpoint every `_CHECKPOINT_EVERY` versions: otherwise very short runs would have none.
        """
        if not self._is_on or self._workers.is_inline:
            return
        now_us = self._clock.monotonic_us()
        until_us = now_us + (now_us - self._began_us) // _CLOSING_SHARE
        closing = workers_at_close(self._clock)
        try:
            # Small work under way is waited for: the next run would begin it again.
            self._workers.shutdown()
            self._rounds.report()
            while self._commit_ready():
                pass
            self._compactions.start_at_close(superstep, watermark, closing, until_us)
            while self._commit_ready():
                pass
            self._checkpoints.run(closing.rounds)
            if self._rounds.is_due_at_close():
                self._rounds.start(superstep, at_close=closing.rounds)
                self._rounds.report()
        except MillpondError as error:
            _LOG.info("upkeep is left to the next run: %s", error)

    def close(self) -> None:
        # Workers first: a file that is still being written could not be discarded.
        self._workers.shutdown()
        for schedule in reversed(self._schedules):
            schedule.close()
