"""
Upkeep: folds, and the other housekeeping, beside a running pipeline.

A fold is prepared by another process, or a Spark job, while supersteps go on, and becomes part of the table
between two supersteps, by one commit of the intervals' owner. So it never conflicts with a
superstep, and the next one waits for that commit and for nothing else. A store that another process
cannot open is folded by a thread. Without either (a simulation, a stepped test) everything happens
within `Upkeep.run`, in a fixed order.

What fails here costs space and never data: a fold that could not be prepared, or whose files
somebody else has replaced, is dropped and planned again. Only losing the lease ends the run.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.maintenance.helper_process import HelperProcess
from millpond.executor.maintenance.inline import INLINE
from millpond.executor.maintenance.workers import Jobs, Place, workers_of
from millpond.executor.ownership.catalog_recorder import Journal
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.spark.compactions import SparkFolds, fold_in_task
from millpond.gc.fold import Folded, FoldRules, fold_files
from millpond.gc.fold_plan import Fold, FoldPolicy, plan_fold, younger_than
from millpond.gc.log import KEPT_MS
from millpond.gc.orphan import Owned
from millpond.gc.round import Retention, Round, collect_garbage, collect_garbage_at
from millpond.statestore.commit.committer import CommitRequest
from millpond.statestore.errors import ConflictError, DataError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.store import Store
from millpond.statestore.types import (
    TIME_MAX_US,
    TIME_MIN_US,
    Clock,
    EventTimeMicros,
    Rng,
    Superstep,
    TableVersion,
)

__all__ = ["Upkeep", "UpkeepPolicy"]

_LOG = logging.getLogger("millpond")
_FOLDS_PER_COMMIT: Final = 32
_FOLDS_WAITING_MAX: Final = 64
_STALL_S: Final = 1.0
_FIRST_ROUND_AFTER: Final = 64
_EARLY_ROUNDS: Final = 16
_REPLACED_MIN: Final = 1 << 18
_SIGHTINGS: Final = 16
"""So many versions are remembered, over twice the time for which the log is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepPolicy:
    """
    How a running pipeline keeps its store small.

    Args:
        folds: when an interval's files become one.
        id_slack: how far behind the low watermark record ids are still known. What it gives up:
            an outside record that comes again after more than that counts again, as a late one.
        retention: how long a version of the table stays readable after it has been replaced;
            savepoints keep theirs for as long as they are open.
        collect_every: after so many versions garbage is collected, and a checkpoint written; after a
            sixteenth of them already when folds have replaced half as many bytes as are live.
        background: whether folds are prepared beside the supersteps; without, within `Upkeep.run`.
        place: where folds are prepared then: ``spark``, each as a Spark job (`SparkRunner` only);
            ``process``, a helper process of this machine, where the store can be opened from there;
            ``thread``, one of this process, which takes turns with the supersteps. ``auto`` is
            ``spark`` where Spark has other machines than the driver's, else ``process``.
        jobs: how folds become Spark jobs; `SparkRunner` says so.
    """

    folds: FoldPolicy = field(default_factory=FoldPolicy)
    id_slack: Duration = "3h"
    retention: Duration = "1h"
    collect_every: int = 1_024
    background: bool = True
    place: Place = "auto"
    jobs: Jobs | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """
        Refuse a place that there is not.
        """
        if self.place not in get_args(Place):
            raise InvalidError("folds are prepared in auto, spark, process or thread", place=self.place)

    @property
    def id_slack_us(self) -> int:
        """
        The slack in microseconds.
        """
        return duration_us(self.id_slack)

    @property
    def kept(self) -> Retention:
        """
        What collectors leave.
        """
        keep_ms = duration_us(self.retention) // 1_000
        return Retention(keep_ms=keep_ms, checkpoint_every=self.collect_early)

    @property
    def collect_early(self) -> int:
        """
        After so many versions at least garbage is collected, whatever there is of it.
        """
        return max(1, self.collect_every // _EARLY_ROUNDS)


class Upkeep:
    """
    Folds the intervals of one pipeline; used by the coordinator's thread, between supersteps.

    Args:
        store: the open store.
        ownership: the intervals, and the way to commit.
        journal: told of every commit.
        pipeline: its name.
        clock: measures commits.
        rng: the source of file names.
        policy: when and how; ``None``: not at all.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        journal: Journal,
        pipeline: str,
        *,
        clock: Clock,
        rng: Rng,
        policy: UpkeepPolicy | None,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._journal = journal
        self._pipeline = pipeline
        self._clock = clock
        self._rng = rng
        self._is_on = policy is not None
        self._policy = policy or UpkeepPolicy(background=False)
        self._workers = workers_of(store, clock, self._policy)
        self._files: defaultdict[Interval, int] = defaultdict(int)
        self._in_flight: dict[Interval, Future[Folded]] = {}
        self._large: dict[Interval, tuple[Fold, Future[Folded]]] = {}
        self._damaged: set[Interval] = set()
        self._round: Future[Round] | None = None
        self._round_due = TableVersion(0)
        self._round_early = TableVersion(0)
        self._replaced_bytes = 0
        self._sightings: deque[tuple[int, TableVersion]] = deque(maxlen=_SIGHTINGS)

    def open(self) -> None:
        """
        Look at what earlier runs have left.
        """
        snapshot = self._store.committer.snapshot
        # Soon after a start, for many short runs make garbage too; but a start has more urgent work.
        self._round_due = TableVersion(snapshot.version + min(_FIRST_ROUND_AFTER, self._policy.collect_every))
        for owned in self._ownership.all():
            self._files[owned.interval] = len(snapshot.files_of(owned.interval))

    def note(self, request: CommitRequest) -> None:
        """
        Intervals have got files.
        """
        for write in request.writes:
            self._files[write.interval] += len(write.added)

    def run(self, superstep: Superstep, watermark: Callable[[str], EventTimeMicros]) -> None:
        """
        Commit the folds that are ready, and start those that are due.

        Args:
            superstep: the last one committed.
            watermark: input low watermark by computation.

        Raises:
            FencedError: another process has taken an interval.
        """
        if not self._is_on:
            return
        self._look()
        self._stall()
        self._land()
        if self._is_round_due():
            self._start_round(superstep)
            return
        for interval in self._due():
            self._start(interval, superstep, watermark)
        if self._workers.small is INLINE:
            self._land()

    def close(self) -> None:
        """
        Stop; what was prepared and not committed is removed again.
        """
        self._workers.shutdown()
        for future in (*self._in_flight.values(), *(large for _, large in self._large.values())):
            if not future.cancelled() and future.exception() is None:
                self._discard(future.result())
        self._in_flight.clear()
        self._large.clear()

    # -- folds -----------------------------------------------------------------------------

    def _is_round_due(self) -> bool:
        if self._round is not None and self._round.done():
            self._report_round(self._round)
            self._round = None
        snapshot = self._store.committer.snapshot
        is_much = 2 * self._replaced_bytes >= max(snapshot.size_bytes, _REPLACED_MIN)
        due = self._round_early if is_much else self._round_due
        return self._round is None and snapshot.version >= due

    def _start_round(self, superstep: Superstep) -> None:
        if self._in_flight:
            # A fold's file that waits for its commit would look like an orphan: folds end first.
            return
        version = self._store.committer.snapshot.version
        self._round_due = TableVersion(version + self._policy.collect_every)
        self._round_early = TableVersion(version + self._policy.collect_early)
        self._replaced_bytes = 0
        # A large fold may take long, and its file too would look like an orphan.
        busy = {interval.computation for interval in self._large}
        owned = {
            each.interval: Owned(each.fence.sequencer, superstep)
            for each in self._ownership.all()
            if each.interval.computation not in busy
        }
        store, kept, seen = self._store, self._policy.kept, self._seen_long_ago()
        if isinstance(self._workers.rounds, HelperProcess):
            self._round = self._workers.rounds.submit(
                collect_garbage_at,
                store.objects,
                store.catalog_url,
                store.store_id,
                retention=kept,
                owned=owned,
                seen=seen,
            )
        else:
            self._round = self._workers.rounds.submit(
                collect_garbage,
                store.objects,
                store.catalog,
                self._clock,
                retention=kept,
                owned=owned,
                seen=seen,
            )

    def _look(self) -> None:
        """
        Remember which version the table has now, by a clock that never jumps.
        """
        now_us = self._clock.monotonic_us()
        if not self._sightings or now_us - self._sightings[-1][0] >= 2_000 * KEPT_MS // _SIGHTINGS:
            self._sightings.append((now_us, self._store.committer.snapshot.version))

    def _seen_long_ago(self) -> TableVersion:
        before_us = self._clock.monotonic_us() - 1_000 * KEPT_MS
        old = [version for at_us, version in self._sightings if at_us <= before_us]
        return old[-1] if old else TableVersion(0)

    def _report_round(self, done: Future[Round]) -> None:
        try:
            found = done.result()
        except MillpondError as error:
            _LOG.warning("garbage is left for the next round: %s", error)
        else:
            _LOG.debug("collected up to version %d (%s)", found.horizon, found.held_by)

    def _due(self) -> list[Interval]:
        room = _FOLDS_WAITING_MAX - len(self._in_flight)
        due = (
            interval
            for interval, files in self._files.items()
            if files >= self._policy.folds.fan_in
            and interval not in self._in_flight
            and interval not in self._damaged
        )
        return [interval for interval, _ in zip(due, range(room), strict=False)]

    def _start(
        self, interval: Interval, superstep: Superstep, watermark: Callable[[str], EventTimeMicros]
    ) -> None:
        large = self._large.get(interval)
        files: Sequence[LiveFile] = self._store.committer.snapshot.files_of(interval)
        if large is not None:
            files = younger_than(large[0], files)
        self._files[interval] = 0
        fold = plan_fold(files, interval, before=superstep, policy=self._policy.folds)
        if fold is None:
            return
        is_large = fold.size_bytes > self._policy.folds.memory_bytes_max
        worker = self._workers.large if is_large else self._workers.small
        if (is_large and large is not None) or (
            self._round is not None and worker is not self._workers.rounds
        ):
            # A file that is written while orphans are looked for would be taken for one.
            self._files[interval] = self._policy.folds.fan_in
            return
        if large is not None:
            fold = replace(fold, is_complete=False)
        computation = interval.computation
        mark = TIME_MIN_US if interval == self._ownership.control.interval else watermark(computation)
        future = worker.submit(
            fold_in_task if isinstance(worker, SparkFolds) else fold_files,
            self._store.objects,
            fold,
            FoldRules(pending_from=superstep, ids_from=self._ids_from(mark)),
            fence=self._ownership.get(interval).fence,
            token=self._rng.token(),
            row_format=self._store.row_format,
            memory_bytes_max=self._policy.folds.memory_bytes_max,
        )
        if is_large:
            self._large[interval] = fold, future
        else:
            self._in_flight[interval] = future

    def _ids_from(self, watermark: EventTimeMicros) -> EventTimeMicros:
        # Where the input has ended, no watermark tells how old a repetition may be.
        if watermark in {TIME_MIN_US, TIME_MAX_US}:
            return TIME_MIN_US
        return EventTimeMicros(max(watermark - self._policy.id_slack_us, TIME_MIN_US))

    def _stall(self) -> None:
        """
        Let the folds catch up, for a bounded time, when files come faster than they are folded.
        """
        limit = 2 * self._policy.folds.files_max
        behind = [future for interval, future in self._in_flight.items() if self._files[interval] >= limit]
        if behind:
            wait(behind, timeout=_STALL_S)

    def _land(self) -> None:
        ready = [interval for interval, future in self._in_flight.items() if future.done()]
        prepared = [
            self._result(interval, self._in_flight.pop(interval)) for interval in ready[:_FOLDS_PER_COMMIT]
        ]
        # One fold of an interval a commit.
        done = [interval for interval, (_, future) in self._large.items() if future.done()]
        prepared += [
            self._result(interval, self._large.pop(interval)[1]) for interval in done if interval not in ready
        ]
        folds = [folded for folded in prepared if folded is not None and self._is_current(folded)]
        if not folds:
            return
        request = CommitRequest(
            kind="fold",
            writes=tuple(
                each.write(self._ownership.get(each.fold.interval).next_fence)
                for each in sorted(folds, key=lambda each: each.fold.interval.app_id)
            ),
            metadata={"pipeline": self._pipeline},
        )
        started_us = self._clock.monotonic_us()
        try:
            committed = self._ownership.commit(request)
        except ConflictError as error:
            _LOG.info("a fold was overtaken: %s", error)
            for folded in folds:
                self._discard(folded)
            return
        reach("fold.committed")
        self._replaced_bytes += sum(file.size_bytes for each in folds for file in each.fold.files)
        self._journal.record(request, committed, (self._clock.monotonic_us() - started_us) / 1_000)

    def _result(self, interval: Interval, future: Future[Folded]) -> Folded | None:
        try:
            return future.result()
        except DataError as error:
            # Whoever needs the rows will be refused them; folding them is not the way to notice.
            _LOG.error("an interval is not folded any more: %s", error)
            self._damaged.add(interval)
        except UnavailableError as error:
            _LOG.info("a fold could not be prepared: %s", error)
            self._files[interval] += self._policy.folds.fan_in
        return None

    def _is_current(self, folded: Folded) -> bool:
        snapshot = self._store.committer.snapshot
        if all(snapshot.file(file.path) is not None for file in folded.fold.files):
            return True
        self._discard(folded)
        return False

    def _discard(self, folded: Folded) -> None:
        """
        Remove a file that no commit names; if that fails too, the orphan collector finds it.
        """
        if folded.file is None:
            return
        try:
            self._store.objects.delete([folded.file.path])
        except MillpondError as error:
            _LOG.debug("a file that nobody needs is left: %s", error)
