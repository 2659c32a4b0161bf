"""Which intervals are compacted next, and the compactions that are being prepared.

An interval is compacted when it has got `CompactionPolicy.fan_in` files since it was last looked at. A compaction
that fits into memory keeps its interval busy; a large one may take minutes, and meanwhile younger files of
its interval are compacted as ever.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from heapq import nlargest
from typing import Final

from millpond.executor.maintenance.policy import CompactionWorker, UpkeepPolicy, UpkeepWorkers
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction import (
    Compacted,
    Compaction,
    CompactionRules,
    compact_files,
    plan_compaction,
    younger_than,
)
from millpond.statestore.errors import DataError, MillpondError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.rows.record_ids import ID_SLACK_US, IdRetention
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MIN_US, Clock, EventTimeMicros, Rng, Superstep

_LOG = logging.getLogger("millpond")
_PER_COMMIT_MAX: Final = 32
_IN_FLIGHT_MAX: Final = 64
_THROTTLE_S_MAX: Final = 1.0


class CompactionSchedule:
    """The compactions of one pipeline's intervals: it prepares them, and its caller commits them.

    Args:
        store: the open store.
        ownership: the intervals.
        topology: how long the senders of each computation may repeat their records.
        clock: the source of time.
        rng: the source of file names.
        policy: when and how.
        workers: where they are prepared.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        topology: Topology,
        *,
        clock: Clock,
        rng: Rng,
        policy: UpkeepPolicy,
        workers: UpkeepWorkers,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._topology = topology
        self._clock = clock
        self._rng = rng
        self._policy = policy
        self._workers = workers
        self._files: defaultdict[Interval, int] = defaultdict(int)
        self._in_flight: dict[Interval, Future[Compacted]] = {}
        self._large: dict[Interval, tuple[Compaction, Future[Compacted]]] = {}
        self._damaged: set[Interval] = set()
        self._overtaken: list[Future[Compacted]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no small compaction is being prepared or waits for its commit."""
        return not self._in_flight and not self._overtaken

    @property
    def large_computations(self) -> Collection[str]:
        """The computations of which a large compaction is being prepared or waits for its commit."""
        return {interval.computation for interval in self._large}

    def open(self) -> None:
        """Count the files that earlier runs have left."""
        snapshot = self._store.committer.snapshot
        for owned in self._ownership.all():
            self._files[owned.interval] = len(snapshot.files_of(owned.interval))

    def note(self, request: CommitRequest) -> None:
        """Intervals have got files."""
        for write in request.writes:
            self._files[write.interval] += len(write.added)

    def follow(self, cut: Cut) -> None:
        """Drop what is prepared of intervals that were replaced, and look at those that replace them."""
        self._forget(cut.replaced)
        snapshot = self._store.committer.snapshot
        for interval in cut.by:
            self._files[interval] = len(snapshot.files_of(interval))
        # A cut puts a file that cannot be read into one part or the other.
        self._damaged.difference_update(cut.replaced)

    def update(self, topology: Topology) -> None:
        """Follow a pipeline that has changed: drop what is prepared of intervals that it no longer has, and look at new ones."""
        self._topology = topology
        held = {owned.interval for owned in self._ownership.all()}
        known = {*self._files, *self._in_flight, *self._large}
        self._forget(known - held)
        snapshot = self._store.committer.snapshot
        for interval in held - known:
            self._files[interval] = len(snapshot.files_of(interval))

    def _forget(self, intervals: Iterable[Interval]) -> None:
        for interval in intervals:
            self._files.pop(interval, None)
            small, large = self._in_flight.pop(interval, None), self._large.pop(interval, None)
            self._overtaken += [future for future in (small, large and large[1]) if future is not None]

    def throttle(self) -> None:
        """Let compactions catch up, for a bounded time, when files come faster than they are compacted."""
        limit = 2 * self._policy.compaction.files_max
        behind = [future for interval, future in self._in_flight.items() if self._files[interval] >= limit]
        if behind:
            wait(behind, timeout=_THROTTLE_S_MAX)

    def due(self) -> list[Interval]:
        """The intervals to compact now, at most as many as may be in preparation: those with most files first.

        In a fixed order the last ones would wait for ever where more become due than are compacted.
        """
        room = _IN_FLIGHT_MAX - len(self._in_flight)
        due = (
            interval
            for interval, files in self._files.items()
            if files >= self._policy.compaction.fan_in
            and interval not in self._in_flight
            and interval not in self._damaged
        )
        return nlargest(room, due, key=self._files.__getitem__)

    def start(
        self,
        interval: Interval,
        superstep: Superstep,
        watermark: Callable[[str], EventTimeMicros],
        *,
        during_round: bool,
    ) -> None:
        """Have an interval's compaction prepared.

        Args:
            interval: one that is due.
            superstep: the last one committed.
            watermark: input low watermark by computation.
            during_round: whether garbage is being collected. A file that is written meanwhile would be taken for
                an orphan, unless the round's own worker writes it, which does one thing after the other.
        """
        large = self._large.get(interval)
        files: Sequence[LiveFile] = self._store.committer.snapshot.files_of(interval)
        if large is not None:
            files = younger_than(large[0], files)
        self._files[interval] = 0
        policy = self._policy.compaction
        compaction = plan_compaction(files, interval, before=superstep, policy=policy)
        if compaction is None:
            return
        is_large = compaction.size_bytes > policy.memory_bytes_max
        worker = self._workers.large if is_large else self._workers.small
        if (is_large and large is not None) or (during_round and not self._workers.does_rounds(worker)):
            self._files[interval] = policy.fan_in
            return
        if large is not None:
            compaction = replace(compaction, is_complete=False)
        future = self.prepare(worker, compaction, superstep, watermark)
        if is_large:
            self._large[interval] = compaction, future
        else:
            self._in_flight[interval] = future

    def prepare(
        self,
        worker: CompactionWorker,
        compaction: Compaction,
        superstep: Superstep,
        watermark: Callable[[str], EventTimeMicros],
    ) -> Future[Compacted]:
        """Have a worker read the files of a compaction and write what replaces them.

        Args:
            worker: does it.
            compaction: the files.
            superstep: the last one committed.
            watermark: input low watermark by computation.
        """
        interval = compaction.interval
        is_control = interval == self._ownership.control.interval
        ids = IdRetention.of(
            TIME_MIN_US if is_control else watermark(interval.computation),
            self._clock.now_us(),
            ID_SLACK_US if is_control else self._topology.id_slack_us(interval.computation),
        )
        rules = CompactionRules(pending_from=superstep, ids=ids)
        work = partial(
            compact_files,
            self._store.objects,
            compaction,
            rules,
            fence=self._ownership.get(interval).fence,
            token=self._rng.token(),
            row_format=self._store.row_format,
            memory_bytes_max=self._policy.compaction.memory_bytes_max,
        )
        return worker.compact(work)

    def take_ready(self) -> list[Compacted]:
        """The compactions that are prepared and still fit the table, at most one an interval.

        They are the caller's from now on: to be committed, or discarded.
        """
        for future in [future for future in self._overtaken if future.done()]:
            self._overtaken.remove(future)
            self.discard_result(future)
        ready = [interval for interval, future in self._in_flight.items() if future.done()]
        prepared = [
            self._result(interval, self._in_flight.pop(interval)) for interval in ready[:_PER_COMMIT_MAX]
        ]
        done = [interval for interval, (_, future) in self._large.items() if future.done()]
        prepared += [
            self._result(interval, self._large.pop(interval)[1]) for interval in done if interval not in ready
        ]
        return [compacted for compacted in prepared if compacted is not None and self._is_current(compacted)]

    def _result(self, interval: Interval, future: Future[Compacted]) -> Compacted | None:
        try:
            return future.result()
        except DataError as error:
            # A run that needs these rows is refused them; a compaction is not the way to notice.
            _LOG.error("an interval is not compacted any more: %s", error)
            self._damaged.add(interval)
        except UnavailableError as error:
            _LOG.info("a compaction could not be prepared: %s", error)
            self._files[interval] += self._policy.compaction.fan_in
        return None

    def _is_current(self, compacted: Compacted) -> bool:
        snapshot = self._store.committer.snapshot
        if all(snapshot.file(file.path) is not None for file in compacted.compaction.files):
            return True
        self.discard(compacted)
        return False

    def discard(self, compacted: Compacted) -> None:
        """Remove a file that no commit names; if that fails too, the orphan collector finds it."""
        if compacted.file is None:
            return
        try:
            self._store.objects.delete([compacted.file.path])
        except MillpondError as error:
            _LOG.debug("an unused file is left: %s", error)

    def close(self) -> None:
        """Discard what was prepared and not committed; the workers have been shut down."""
        for future in (
            *self._in_flight.values(),
            *(large for _, large in self._large.values()),
            *self._overtaken,
        ):
            self.discard_result(future)
        self._in_flight.clear()
        self._large.clear()
        self._overtaken.clear()

    def discard_result(self, future: Future[Compacted]) -> None:
        """Remove what was prepared and is not wanted any more; the future is done, or its worker was shut down."""
        if not future.cancelled() and future.exception() is None:
            self.discard(future.result())
