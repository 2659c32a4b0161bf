"""The policy of upkeep, and the workers that do it: Spark jobs, helper processes, threads, or the caller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Protocol, TypeAlias, get_args

from millpond.executor.maintenance.helpers import INLINE, HelperProcess
from millpond.gc.collectors import (
    CollectionRound,
    Owned,
    Retention,
    collect_garbage,
    collect_garbage_at,
    extend_checkpoint,
)
from millpond.gc.compaction import Compacted, CompactionPolicy
from millpond.statestore.arguments import check_count, check_flags, check_instance
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, TableVersion

Place: TypeAlias = Literal["auto", "spark", "process", "thread"]
"""Where compactions are prepared; see `UpkeepPolicy`."""

_EARLY_ROUNDS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepPolicy:
    """The compaction and garbage collection of a running pipeline: when, and where (MillWheel §6.1.1).

    With ``upkeep=None`` a runner does neither, nor any upkeep of the tables of its sinks.

    Args:
        compaction: when the files of an interval are merged. The close of a run merges them from
            ``fan_in`` or eight files on, whichever is less: in a quarter of the run's time, most files first,
            and the first interval in any case.
        retention: how long a replaced version of the table stays readable, as a duration. Open
            savepoints keep their versions.
        collect_every: the number of versions between two garbage collections, each of which writes a
            checkpoint. Collection starts after a sixteenth of that number if compactions have
            replaced half as many bytes as are live, and every sixth of ``retention`` while an
            eighth of the live bytes waits to be deleted.
        background: prepare compactions in parallel with supersteps, instead of between them.
        place: where compactions are prepared in the background. ``"spark"`` runs each as a Spark job
            (`SparkRunner` only). ``"process"`` uses a helper process on this machine, if that can open
            the store. ``"thread"`` uses a thread of this process, which competes with the supersteps for
            the interpreter. ``"auto"`` is ``"spark"`` if Spark has machines other than the driver's,
            else ``"process"``.

    Raises:
        InvalidError: ``place`` is unknown, or ``retention`` or ``collect_every`` is too small.

    Example:
        ``mp.LocalRunner(store, upkeep=mp.UpkeepPolicy(retention="6h", collect_every=4_096))``
    """

    compaction: CompactionPolicy = field(default_factory=CompactionPolicy)
    retention: Duration = "1h"
    collect_every: int = 1_024
    background: bool = True
    place: Place = "auto"

    def __post_init__(self) -> None:
        check_instance("compaction", self.compaction, CompactionPolicy)
        check_count("collect_every", self.collect_every)
        check_flags(background=self.background)
        if duration_us(self.retention) < 0:
            raise InvalidError("retention must be at least 0s", retention=self.retention)
        if self.place not in get_args(Place):
            raise InvalidError("compactions are prepared in auto, spark, process or thread", place=self.place)

    @property
    def kept(self) -> Retention:
        """The bounds of a garbage collection under this policy."""
        keep_ms = duration_us(self.retention) // 1_000
        return Retention(keep_ms=keep_ms, checkpoint_every=self.collect_early)

    @property
    def collect_early(self) -> int:
        """The number of versions after which garbage is collected early."""
        return max(1, self.collect_every // _EARLY_ROUNDS)


_SMALL_AT_ONCE: Final = 2
_LARGE_S_MAX: Final = 21_600.0


class CompactionWorker(Protocol):
    """Prepares compactions somewhere; their arguments must pickle."""

    def compact(self, work: partial[Compacted]) -> Future[Compacted]: ...

    def shutdown(self) -> None: ...


CompactionWorkers: TypeAlias = Callable[[str, int], CompactionWorker]
"""Makes a worker from a name and the number of compactions that it may prepare at a time."""


class ExecutorWorker:
    """Works within this process: in the threads of an executor, or in the caller's."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock

    def compact(self, work: partial[Compacted]) -> Future[Compacted]:
        return self._executor.submit(work)

    def collect(
        self,
        store: Store,
        *,
        retention: Retention,
        owned: Mapping[Interval, Owned],
        seen: TableVersion | None,
    ) -> Future[CollectionRound]:
        return self._executor.submit(
            collect_garbage,
            store.objects,
            store.catalog,
            self._clock,
            retention=retention,
            owned=owned,
            seen=seen,
            announce=store.leases.high_water.announce_boundary,
        )

    def checkpoint(self, store: Store, commits: Sequence[tuple[TableVersion, bytes]]) -> Future[int]:
        return self._executor.submit(extend_checkpoint, store.objects, commits)

    def shutdown(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class ProcessWorker(ExecutorWorker):
    """Works in another process of this machine, which opens store and catalog for itself.

    ``is_cut_short`` abandons the work under way at shutdown instead of waiting for it.
    """

    def __init__(self, process: HelperProcess, clock: Clock, *, is_cut_short: bool = False) -> None:
        super().__init__(process, clock)
        self.process = process
        self._is_cut_short = is_cut_short

    def collect(
        self,
        store: Store,
        *,
        retention: Retention,
        owned: Mapping[Interval, Owned],
        seen: TableVersion | None,
    ) -> Future[CollectionRound]:
        if seen is None:
            raise InternalError("a helper process deletes only commits that this one has seen for a while")
        # The helper has no connection to the lease service, and deletes no commit from here on.
        store.leases.high_water.announce_boundary(seen)
        return self.process.submit(
            collect_garbage_at,
            store.objects,
            store.catalog_url,
            store.store_id,
            retention=retention,
            owned=owned,
            seen=seen,
        )

    def shutdown(self) -> None:
        if self._is_cut_short:
            self.process.abort()
        super().shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepWorkers:
    """The place of each kind of work.

    ``large`` compactions go through a disk; ``None`` begins none. ``is_inline`` means that a worker returns only when the
    work is done, and ``are_helpers`` that processes have to be started for it.
    """

    rounds: ExecutorWorker
    small: CompactionWorker
    large: CompactionWorker | None
    is_inline: bool = False
    are_helpers: bool = False

    def shutdown(self) -> None:
        """Stop; small work is waited for, large compactions and Spark jobs are cut short."""
        for worker in (self.small, self.large, self.rounds):
            if worker is not None:
                worker.shutdown()


def workers_at_close(clock: Clock) -> UpkeepWorkers:
    """Return workers for the close of a run: its own thread, for all but large compactions."""
    inline = ExecutorWorker(INLINE, clock)
    return UpkeepWorkers(rounds=inline, small=inline, large=None, is_inline=True)


def workers_of(
    store: Store, clock: Clock, *, background: bool, in_thread: bool, elsewhere: CompactionWorkers | None
) -> UpkeepWorkers:
    """Return the workers that a policy asks for, as far as they can open the store; none is started yet.

    ``elsewhere`` makes workers on other machines; ``None`` stands for helper processes of this one.
    """
    if not background:
        inline = ExecutorWorker(INLINE, clock)
        return UpkeepWorkers(rounds=inline, small=inline, large=inline, is_inline=True)
    is_shared = isinstance(store.objects, LocalObjects | ObstoreObjects) and isinstance(clock, SystemClock)
    if in_thread or not is_shared or not sys.executable:
        thread = ExecutorWorker(ThreadPoolExecutor(1, "millpond-upkeep"), clock)
        large = ExecutorWorker(ThreadPoolExecutor(1, "millpond-compactions"), clock)
        return UpkeepWorkers(rounds=thread, small=thread, large=large)
    process = ProcessWorker(HelperProcess("millpond-upkeep"), clock)
    if elsewhere is not None:
        return UpkeepWorkers(
            rounds=process,
            small=elsewhere("millpond-compactions", _SMALL_AT_ONCE),
            large=elsewhere("millpond-large-compactions", 1),
            are_helpers=True,
        )
    long_process = HelperProcess("millpond-compactions", answer_s_max=_LARGE_S_MAX)
    return UpkeepWorkers(
        rounds=process,
        small=process,
        large=ProcessWorker(long_process, clock, is_cut_short=True),
        are_helpers=True,
    )
