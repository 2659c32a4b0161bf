"""Rewrites of files while a pipeline runs: compactions of intervals, and partings after splits.

Each schedule has the same life: find due work, have workers prepare a `Task`, hand the finished task to the caller, which
commits or discards it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from math import inf
from typing import Final

from millpond.executor.maintenance.policy import UpkeepPolicy, UpkeepWorkers
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction import (
    Compacted,
    Compaction,
    CompactionPolicy,
    CompactionRules,
    compact_files,
    plan_compaction,
    plan_parting,
    younger_than,
)
from millpond.statestore.errors import DataError, MillpondError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.record_ids import ID_SLACK_US, IdRetention
from millpond.statestore.store import Store
from millpond.statestore.types import (
    TIME_MAX_US,
    TIME_MIN_US,
    Clock,
    EventTimeMicros,
    Objects,
    Rng,
    Superstep,
)

_LOG = logging.getLogger("millpond")
_PER_COMMIT_MAX: Final = 32
_IN_FLIGHT_MAX: Final = 64
_THROTTLE_S_MAX: Final = 1.0
_FAN_IN_AT_CLOSE: Final = CompactionPolicy().fan_in

Watermark = Callable[[str], EventTimeMicros]
"""Input low watermark by computation."""


@dataclass(frozen=True, slots=True)
class Task:
    """Files that workers rewrite for one commit: a compaction, or one part for each interval of a parting.

    All parts have the same files.
    """

    parts: tuple[Compaction, ...]
    futures: tuple[Future[Compacted], ...]

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)


@dataclass(eq=False)
class Schedule(ABC):
    """One kind of rewrite of one pipeline's files; subclasses decide when work is due.

    The topology bounds how long the senders of each computation may repeat their records; ``rng`` makes file names.
    ``row_files`` is where small compactions read: the store, or this machine's copies in front of it.
    """

    store: Store
    ownership: Ownership
    topology: Topology
    clock: Clock
    rng: Rng
    policy: UpkeepPolicy
    workers: UpkeepWorkers
    row_files: Objects

    @property
    @abstractmethod
    def busy(self) -> Collection[str]:
        """The computations of which a rewrite may be under way during a round of garbage collection."""

    @abstractmethod
    def open(self) -> None:
        """Find the work that earlier runs have left."""

    @property
    @abstractmethod
    def is_preparing(self) -> bool:
        """True while workers prepare a task, or one waits for its commit."""

    @abstractmethod
    def supersteps_left(self, superstep: Superstep) -> int:
        """Return the number of supersteps after ``superstep`` before which no rewrite can become due."""

    @abstractmethod
    def follow(self, cut: Cut, superstep: Superstep) -> None:
        """Adapt to a computation whose keys were cut into other intervals after ``superstep``."""

    @abstractmethod
    def update(self, topology: Topology) -> None:
        """Adapt to a changed pipeline."""

    @abstractmethod
    def start(self, superstep: Superstep, watermark: Watermark, *, during_round: bool) -> None:
        """Have due tasks prepared; ``superstep`` is the last one committed."""

    @abstractmethod
    def pop_ready(self) -> Sequence[Compacted]:
        """Return finished rewrites that still fit the table; the caller commits them at once, or discards them."""

    @abstractmethod
    def close(self) -> None:
        """Discard uncommitted tasks, after the workers have been shut down."""

    def discard(self, compacted: Compacted) -> None:
        """Remove a file that no commit names; if that fails too, the orphan collector finds it."""
        if compacted.file is None:
            return
        try:
            self.store.objects.delete([compacted.file.path])
        except MillpondError as error:
            _LOG.debug("an unused file is left: %s", error)

    @abstractmethod
    def _failed(self, task: Task, error: MillpondError) -> None:
        """Decide when the work of a failed task is tried again."""

    def _prepare(
        self, parts: Sequence[Compaction], superstep: Superstep, watermark: Watermark, *, during_round: bool
    ) -> Task | None:
        worker = self.workers.large if self._is_large(parts[0]) else self.workers.small
        if worker is None:
            return None
        # A round would take a file that is written meanwhile for an orphan, unless the round's own worker writes
        # the file, because that does one thing after the other.
        if during_round and worker is not self.workers.rounds:
            return None
        works = [self._work_of(part, superstep, watermark) for part in parts]
        return Task(tuple(parts), tuple(worker.compact(work) for work in works))

    def _is_large(self, compaction: Compaction) -> bool:
        return compaction.size_bytes > self.policy.compaction.memory_bytes_max

    def _work_of(
        self, compaction: Compaction, superstep: Superstep, watermark: Watermark
    ) -> partial[Compacted]:
        interval = compaction.interval
        is_control = interval == self.ownership.control.interval
        ids = IdRetention.of(
            TIME_MIN_US if is_control else watermark(interval.computation),
            self.clock.now_us(),
            ID_SLACK_US if is_control else self.topology.id_slack_us(interval.computation),
        )
        # Large files go through the disk anyway, and would crowd out others there.
        objects = self.store.objects if self._is_large(compaction) else self.row_files
        return partial(
            compact_files,
            objects,
            compaction,
            CompactionRules(pending_from=superstep, ids=ids),
            fence=self.ownership.owned[interval].fence,
            token=self.rng.token(),
            row_format=self.store.row_format,
            memory_bytes_max=self.policy.compaction.memory_bytes_max,
        )

    def _finish(self, task: Task) -> tuple[Compacted, ...]:
        """Return the results of a finished task, none if it failed or no longer fits the table."""
        try:
            pieces = tuple(future.result() for future in task.futures)
        except (DataError, UnavailableError, CancelledError) as error:
            self._discard(task)
            if isinstance(error, CancelledError):
                error = UnavailableError("the run is being closed")
            self._failed(task, error)
            return ()
        if self._is_current(task):
            return pieces
        self._discard(task)
        return ()

    def _is_current(self, task: Task) -> bool:
        # Another writer may have replaced a file meanwhile, and then a commit could only end in a conflict.
        snapshot = self.store.committer.snapshot
        return all(snapshot.file(file.path) is not None for file in task.parts[0].files)

    def _discard(self, task: Task) -> None:
        for future in task.futures:
            if not future.cancelled() and future.exception() is None:
                self.discard(future.result())


@dataclass(eq=False)
class CompactionSchedule(Schedule):
    """The compactions of one pipeline's intervals, due once an interval has got `CompactionPolicy.fan_in` files.

    A compaction that fits into memory keeps its interval busy. A large one may take minutes, and younger files of its
    interval are compacted meanwhile.

    ``files`` has the number of files that each interval has got since its last compaction; the committer of a superstep
    adds the superstep's files.
    """

    files: defaultdict[Interval, int] = field(init=False, default_factory=lambda: defaultdict(int))
    _small: dict[Interval, Task] = field(init=False, default_factory=dict)
    _large: dict[Interval, Task] = field(init=False, default_factory=dict)
    _damaged: set[Interval] = field(init=False, default_factory=set)
    _overtaken: list[Task] = field(init=False, default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not self._small and not self._overtaken

    @property
    def busy(self) -> Collection[str]:
        return {interval.computation for interval in self._large}

    def open(self) -> None:
        self._count(owned.interval for owned in self.ownership.owned.values())

    @property
    def is_preparing(self) -> bool:
        return bool(self._small or self._large or self._overtaken)

    def supersteps_left(self, superstep: Superstep) -> int:  # noqa: ARG002 - a superstep adds one file at most
        most = max((files for one, files in self.files.items() if one not in self._damaged), default=0)
        return self.policy.compaction.fan_in - most

    def follow(self, cut: Cut, superstep: Superstep) -> None:  # noqa: ARG002
        self._forget(cut.replaced)
        self._count(cut.by)
        # The cut puts an unreadable file into one of the new intervals, so the others can be compacted again.
        self._damaged.difference_update(cut.replaced)

    def update(self, topology: Topology) -> None:
        self.topology = topology
        held = {owned.interval for owned in self.ownership.owned.values()}
        known = {*self.files, *self._small, *self._large}
        self._forget(known - held)
        self._count(held - known)

    def _count(self, intervals: Iterable[Interval]) -> None:
        snapshot = self.store.committer.snapshot
        for interval in intervals:
            self.files[interval] = len(snapshot.files_of(interval))

    def _forget(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            self.files.pop(interval, None)
            tasks = (self._small.pop(interval, None), self._large.pop(interval, None))
            self._overtaken += [task for task in tasks if task is not None]

    @property
    def room(self) -> int:
        """The number of files that the fullest interval can get before it has as many as a read should open."""
        return self.policy.compaction.files_max - max(self.files.values(), default=0)

    def throttle(self) -> None:
        """Let compactions catch up, for a bounded time, when files come faster than they are compacted."""
        limit = 2 * self.policy.compaction.files_max
        behind = [
            future
            for interval, task in self._small.items()
            if self.files[interval] >= limit
            for future in task.futures
        ]
        if behind:
            wait(behind, timeout=_THROTTLE_S_MAX)

    def due(self) -> list[Interval]:
        """Return the intervals to compact now, as many as may be in preparation, most files first."""
        # In a fixed order the last intervals would starve where more become due than are compacted.
        room = _IN_FLIGHT_MAX - len(self._small)
        due = (
            interval
            for interval, files in self.files.items()
            if files >= self.policy.compaction.fan_in
            and interval not in self._small
            and interval not in self._damaged
        )
        return nlargest(room, due, key=self.files.__getitem__)

    def start(self, superstep: Superstep, watermark: Watermark, *, during_round: bool) -> None:
        for interval in self.due():
            self._start(interval, superstep, watermark, during_round=during_round)

    def start_at_close(
        self, superstep: Superstep, watermark: Watermark, closing: UpkeepWorkers, until_us: int
    ) -> None:
        """Have due compactions done at once, most files first, until a monotonic time; the first one in any case."""
        self.workers = closing
        # Wide compactions spare a run that makes many files a minute, and would leave those of short runs for weeks.
        given = self.policy.compaction
        narrow = replace(given, fan_in=min(given.fan_in, _FAN_IN_AT_CLOSE))
        self.policy: UpkeepPolicy = replace(self.policy, compaction=narrow)
        for number, interval in enumerate(self.due()):
            if number and self.clock.monotonic_us() >= until_us:
                return
            self._start(interval, superstep, watermark, during_round=False)

    def _start(
        self, interval: Interval, superstep: Superstep, watermark: Watermark, *, during_round: bool
    ) -> None:
        large = self._large.get(interval)
        files: Sequence[LiveFile] = self.store.committer.snapshot.files_of(interval)
        if large is not None:
            files = younger_than(large.parts[0], files)
        self.files[interval] = 0
        policy = self.policy.compaction
        compaction = plan_compaction(files, interval, before=superstep, policy=policy)
        if compaction is not None and self.workers.large is None and self._is_large(compaction):
            # Nothing that takes minutes is begun at the close of a run: the young files are merged without the old.
            young = replace(policy, garbage_ratio=inf)
            compaction = plan_compaction(files, interval, before=superstep, policy=young)
        if compaction is None:
            return
        is_large, task = self._is_large(compaction), None
        if large is None or not is_large:
            if large is not None:
                # The files of the large compaction are older and stay, so tombstones must stay too.
                compaction = replace(compaction, is_complete=False)
            task = self._prepare([compaction], superstep, watermark, during_round=during_round)
        if task is None:
            self.files[interval] = policy.fan_in
        else:
            (self._large if is_large else self._small)[interval] = task

    def pop_ready(self) -> Sequence[Compacted]:
        for task in [task for task in self._overtaken if task.is_done]:
            self._overtaken.remove(task)
            self._discard(task)
        small = [interval for interval, task in self._small.items() if task.is_done]
        # A commit writes an interval once, so a large compaction waits for the small one of its interval.
        large = [interval for interval, task in self._large.items() if task.is_done and interval not in small]
        tasks = [self._small.pop(interval) for interval in small[:_PER_COMMIT_MAX]]
        tasks += [self._large.pop(interval) for interval in large]
        pieces = [piece for task in tasks for piece in self._finish(task)]
        return sorted(pieces, key=lambda piece: piece.compaction.interval.app_id)

    def _failed(self, task: Task, error: MillpondError) -> None:
        interval = task.parts[0].interval
        if isinstance(error, DataError):
            # The damage is reported to a run that needs these rows; compaction must neither hide nor spread it.
            _LOG.error("an interval is not compacted any more: %s", error)
            self._damaged.add(interval)
        else:
            _LOG.info("a compaction could not be prepared: %s", error)
            self.files[interval] += self.policy.compaction.fan_in

    def close(self) -> None:
        for task in (*self._small.values(), *self._large.values(), *self._overtaken):
            self._discard(task)
        self._small.clear()
        self._large.clear()
        self._overtaken.clear()


@dataclass(eq=False)
class PartingSchedule(Schedule):
    """The partings of one pipeline, one at a time, due once each part of a split interval has got some files."""

    _due_after: dict[str, int] = field(init=False, default_factory=dict)
    _task: Task | None = field(init=False, default=None)
    _superstep: Superstep = field(init=False, default=Superstep(0))

    @property
    def is_preparing(self) -> bool:
        return self._task is not None

    def supersteps_left(self, superstep: Superstep) -> int:
        return min(self._due_after.values(), default=TIME_MAX_US) - superstep

    @property
    def busy(self) -> Collection[str]:
        return () if self._task is None else {part.interval.computation for part in self._task.parts}

    def open(self) -> None:
        snapshot = self.store.committer.snapshot
        live = {owned.interval.app_id for owned in self.ownership.owned.values()}
        for computation in {owned.interval.computation for owned in self.ownership.owned.values()}:
            if any(file.interval_id not in live for file in snapshot.files_in(computation)):
                self._due_after[computation] = 0

    def follow(self, cut: Cut, superstep: Superstep) -> None:
        if cut.kind == "split":
            self._due_after[cut.by[0].computation] = superstep + self.policy.compaction.fan_in

    def update(self, topology: Topology) -> None:
        self.topology = topology
        self._due_after.clear()
        self.open()

    def start(self, superstep: Superstep, watermark: Watermark, *, during_round: bool) -> None:
        self._superstep = superstep
        if self._task is not None:
            return
        for computation in [name for name, at in self._due_after.items() if at <= superstep]:
            live = [owned.interval for owned in self.ownership.of(computation)]
            files = self.store.committer.snapshot.files_in(computation)
            parts = plan_parting(files, live, before=superstep)
            if parts:
                self._task = self._prepare(parts, superstep, watermark, during_round=during_round)
                if self._task is not None:
                    return
                continue
            known = {interval.app_id for interval in live}
            if all(file.interval_id in known for file in files):
                del self._due_after[computation]
            else:
                # Files of an uncommitted superstep, or of another engine, cannot be parted yet.
                self._due_after[computation] = superstep + self.policy.compaction.fan_in

    def pop_ready(self) -> Sequence[Compacted]:
        if self._task is None or not self._task.is_done:
            return ()
        task, self._task = self._task, None
        return self._finish(task)

    def _is_current(self, task: Task) -> bool:
        held = {owned.interval for owned in self.ownership.owned.values()}
        return all(part.interval in held for part in task.parts) and super()._is_current(task)

    def _failed(self, task: Task, error: MillpondError) -> None:
        _LOG.info("files could not be parted: %s", error)
        for part in task.parts:
            self._due_after[part.interval.computation] = self._superstep + self.policy.compaction.files_max

    def close(self) -> None:
        if self._task is not None:
            self._discard(self._task)
            self._task = None
