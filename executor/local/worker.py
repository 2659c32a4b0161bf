"""The worker of a local run: takes input, runs supersteps, and ends at the first failure.

The same steps run in a thread or one by one in the caller's, so tests and the simulation run the code of production.
One superstep runs at a time; the first failure ends the run and is raised to every thread that injects or waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.inputs.extraction import (
    Rows,
    row_count,
    rows_between,
    rows_from,
    rows_to_extract,
    sorted_by_time,
)
from millpond.executor.inputs.positions import (
    BOUNDED_SOURCE,
    LOCAL_SOURCE,
    consumed_before,
    digest_in,
    digest_place,
    recorded_place,
)
from millpond.executor.inputs.row_digest import added, rows_digest
from millpond.executor.local.engine import LocalBatch, LocalEngine, LocalInputs, LocalResults
from millpond.executor.local.intake import Intake, OutsideRows, Taken, check_fit
from millpond.executor.local.rows import RowSource
from millpond.executor.pipeline.nodes import INPUT, Backfill
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.executor.run.options import RunnerOptions
from millpond.executor.run.progress import Progress
from millpond.executor.run.run import PipelineUpdate, update_between
from millpond.executor.superstep.backfills import backfill_position
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import RunStatus, SuperstepReport
from millpond.executor.superstep.superstep import Superstep
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros

BUNDLE_RECORDS_MAX: Final = 50_000
"""Injected records that a superstep takes at most: a row is written once, however many of them its key gets."""

_LOG = logging.getLogger("millpond")
_LOG_EVERY_MS: Final = 1_000.0
_REST_MS_MAX: Final = 250.0


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A changed pipeline that waits for its turn; ``then`` is called once it runs, before the next superstep."""

    topology: Topology
    then: Callable[[], None]
    outcome: Future[PipelineUpdate] = field(default_factory=Future)


class UpdateRequests:
    """A queue of changed pipelines for the thread that runs supersteps; each sender waits, so it stays short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[UpdateRequest] = deque()
        self._ended: BaseException | None = None

    def put(self, topology: Topology, then: Callable[[], None]) -> Future[PipelineUpdate]:
        request = UpdateRequest(topology, then)
        with self._lock:
            if self._ended is None:
                self._waiting.append(request)
            else:
                request.outcome.set_exception(self._ended)
        return request.outcome

    def pop(self) -> UpdateRequest | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def end(self, reason: BaseException) -> None:
        with self._lock:
            self._ended = reason
            waiting = [*self._waiting]
            self._waiting.clear()
        for request in waiting:
            request.outcome.set_exception(reason)


_READ_AT_ONCE: Final = 20_000


@dataclass(slots=True)
class _History:
    """The history of one stream, in the order of time.

    The rows are sorted once, stably: a run that continues another run has them in the same order, so a number of rows
    is a position.
    """

    stream: str
    rows: Rows
    at: npt.NDArray[np.int64]
    consumed: int
    digest: int = 0

    @property
    def is_left(self) -> bool:
        return self.consumed < len(self.at)

    @property
    def oldest_at(self) -> EventTimeMicros:
        return EventTimeMicros(int(self.at[self.consumed]))

    def pop(self, computation: str) -> LocalBatch:
        start = self.consumed
        self.consumed = min(start + BUNDLE_RECORDS_MAX, len(self.at))
        batch = backfill_position(self.consumed, is_all=not self.is_left)
        rows = rows_between(self.rows, start, self.consumed)
        offsets = None
        if self.is_left:
            # Only a history of which a part was consumed is read again.
            self.digest = added(self.digest, rows_digest(rows, start))
            offsets = digest_place(self.consumed, self.digest)
        return LocalBatch(
            outside=[OutsideRows(stream=self.stream, rows=rows, backfill=computation)],
            position=InputPosition(
                stream=self.stream, source="", batch=batch, offsets=offsets, backfill=computation
            ),
            after={},
            backfilled=computation,
        )


def _pieces(coordinator: Coordinator, histories: Mapping[str, Sequence[_History]]) -> Iterator[LocalBatch]:
    """Yield the missing history of all computations, in batches; ask for a batch once the last one is committed.

    Of several streams the one furthest behind continues, so the oldest time still to come holds the computation's
    watermark: no row is late, and timers fire on the way.
    """
    for name, parts in histories.items():
        # Join before the first piece: a computation with rows and without this position is refused at a restart.
        coordinator.backfills.join(name)
        empty = {history.stream: history.consumed for history in parts if not history.is_left}
        while left := [history for history in parts if history.is_left]:
            behind = min(left, key=lambda history: history.oldest_at)
            coordinator.backfills.hold(name, behind.oldest_at)
            yield behind.pop(name)
        coordinator.backfills.end(name, empty)


def _histories(
    coordinator: Coordinator, computation: str, inputs: Mapping[str, Rows | RowSource] | None
) -> list[_History]:
    topology, found = coordinator.topology, list[_History]()
    for stream, consumed in coordinator.backfills.consumed(computation).items():
        if consumed is None:
            continue
        given: Backfill = topology.backfills[computation][stream]
        node = topology.injectors[stream]
        rows = (
            _of_input(coordinator, stream, inputs)
            if isinstance(given, str) and given == INPUT
            else rows_to_extract(node, _history_rows(given))
        )
        check_fit(topology, stream, rows, only=computation)
        if consumed > row_count(rows):
            raise InvalidError(
                "the store has consumed more of this backfill than there is: it is another one",
                computation=computation,
                stream=stream,
                rows=row_count(rows),
                consumed=consumed,
            )
        ordered, at = sorted_by_time(node, rows)
        digest = rows_digest(rows_between(ordered, 0, consumed), 0)
        known = digest_in(recorded_place(coordinator.backfills.offsets(computation, stream), consumed))
        if consumed and known not in (None, digest):
            raise InvalidError(
                f"the rows that were consumed before are not the first {consumed:,} of this backfill in the order of their "
                "times: give the same rows again; or rewind the store to before the backfill, and give it the others",
                computation=computation,
                stream=stream,
            )
        found.append(_History(stream, ordered, at, consumed, digest))
    return found


def _history_rows(given: Any) -> Rows:
    if not isinstance(given, str | Path):
        return rows_from(given)
    try:
        return pq.read_table(given)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as cause:
        raise InvalidError(
            'a backfill is rows, "input" or the path of a Parquet file',
            path=given,
            reason=str(cause).partition("\n")[0],
        ) from cause


def _of_input(coordinator: Coordinator, stream: str, inputs: Mapping[str, Rows | RowSource] | None) -> Rows:
    if inputs is None or stream not in inputs:
        raise InvalidError(
            'backfill="input" is of the rows that are given to run: this run has none, so give it rows',
            stream=stream,
        )
    given, known = inputs[stream], coordinator.inputs.consumed(stream)
    # They are sorted by time, so all of them are needed.
    rows = given.all_rows(_READ_AT_ONCE) if isinstance(given, RowSource) else given
    if BOUNDED_SOURCE in known:
        consumed_before(stream, row_count(rows), coordinator.inputs.input_rows(stream))
        return rows
    consumed = known.get(LOCAL_SOURCE)
    is_uncounted = consumed is None and coordinator.watermarks.injector_watermark(stream) > TIME_MIN_US
    if is_uncounted or set(known) - {LOCAL_SOURCE}:
        raise InvalidError(
            'the store has consumed records of this stream that no position of a bounded input counts: backfill="input" '
            "does not know them, so give it rows",
            stream=stream,
        )
    if (consumed or 0) > row_count(rows):
        raise InvalidError(
            "the store has consumed more of this input than there is: it is another input",
            input=stream,
            rows=row_count(rows),
            consumed=consumed,
        )
    return rows_between(rows, 0, consumed or 0)


class LocalWorker:
    """The loop of a local run: input from the intake, one superstep after another, the first failure.

    Any thread may read ``status``, the state of the pipeline after the last superstep.
    """

    def __init__(self, engine: LocalEngine, coordinator: Coordinator, options: RunnerOptions) -> None:
        self.engine = engine
        self.coordinator = coordinator
        self.superstep: Superstep[LocalBatch, LocalInputs, LocalResults] = Superstep(coordinator, engine)
        self.intake: Intake = Intake(options.intake_records_max)
        self._clock = options.clock
        self.progress: Progress = options.progress_of(coordinator.topology.title, log_every_ms=_LOG_EVERY_MS)
        self.lifecycle: Lifecycle = Lifecycle()
        self.is_threaded: bool = False
        self._thread: threading.Thread | None = None
        self._updates = UpdateRequests()
        self._taken = Taken()
        engine.on_stuck = self._strand
        coordinator.sinks.on_failure = self._fail
        self.status: RunStatus = coordinator.status()
        self._backfill: Iterator[LocalBatch] | None = None

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> SuperstepReport | None:
        """Run one superstep on the intake; return ``None`` if there was nothing to do."""
        if self.lifecycle.is_stranded:
            self.lifecycle.raise_failure()
        if self._backfill is not None and (backfilled := self.backfill_step()) is not None:
            return backfilled
        taken = self.intake.pop(BUNDLE_RECORDS_MAX)
        # Input that waited through an update may not fit the present pipeline.
        while taken.refuse_unfit(self.coordinator.topology) and not taken.arrivals and not taken.updates:
            taken = self.intake.pop(BUNDLE_RECORDS_MAX)
        self._taken = taken
        try:
            report = self._handle(taken)
        except BaseException as failure:
            self._fail(failure)
            taken.settle(failure)
            raise
        # Acknowledge last: a sender that is acknowledged never sends again, so its records must be durable.
        taken.settle()
        return report

    def _handle(self, taken: Taken) -> SuperstepReport | None:
        if not taken.arrivals and not taken.updates:
            self.coordinator.watermarks.tick()
            if not self.coordinator.has_work():
                if self.coordinator.topology.sinks:
                    self.coordinator.sinks.wait()
                self.coordinator.maintain()
                return None
        # Updates first: the intake cuts a bundle at an update, so that it comes after the records before it.
        for entry in taken.updates:
            entry.update.apply(self.coordinator.watermarks)
        outside = [OutsideRows(stream=arrival.stream, rows=arrival.rows) for arrival in taken.arrivals]
        return self.run(LocalBatch(outside=outside))

    def run(self, batch: LocalBatch) -> SuperstepReport:
        report = self.superstep.run(batch)
        self.status = self.coordinator.status()
        if self.coordinator.watermarks.skew_limits:
            self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
        if self.progress.is_enabled:
            self.progress.report(report)
        self.coordinator.maintain()
        return report

    def begin_backfills(self, inputs: Mapping[str, Rows | RowSource] | None) -> None:
        """Read the missing history of computations; the next steps are on it, before any other input."""
        with self._failing():
            # Read all history now, so that a history that does not fit is refused at once.
            pending = self.coordinator.backfills.pending
            histories = {name: _histories(self.coordinator, name, inputs) for name in pending}
            self._backfill = _pieces(self.coordinator, histories)

    def backfill_step(self) -> SuperstepReport | None:
        """Run one superstep on a piece of a backfill; return ``None`` if none is left."""
        if self._backfill is None:
            return None
        with self._failing():
            batch = next(self._backfill, None)
            if batch is None:
                self._backfill = None
                # Streams that were too far ahead of the joining computation may continue.
                self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
                return None
            return self.run(batch)

    # -- changes of the pipeline -----------------------------------------------------------

    def update(self, topology: Topology, then: Callable[[], None]) -> PipelineUpdate:
        """Continue with a changed pipeline, once the superstep under way has ended; call ``then`` before the next one."""
        self.lifecycle.check_phase(Phase.RUNNING)
        if self._thread is None:
            return self._update(topology, then)
        if self._thread is threading.current_thread():
            raise InvalidError("a pipeline's own code cannot update it: the update would wait for itself")
        asked = self._updates.put(topology, then)
        self.intake.wake()
        return asked.result()

    def _update(self, topology: Topology, then: Callable[[], None]) -> PipelineUpdate:
        former, began_us = self.coordinator.topology, self._clock.monotonic_us()
        # Outside of `_failing`: a change that is refused here does not end the run.
        sinks = self.coordinator.check_update(topology)
        with self._failing():
            version = self.engine.update(topology, sinks)
            self.status = self.coordinator.status()
            then()
            self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
        elapsed_us = self._clock.monotonic_us() - began_us
        return update_between(former, topology, version, elapsed_us)

    def _update_as_asked(self) -> None:
        while (request := self._updates.pop()) is not None:
            try:
                request.outcome.set_result(self._update(request.topology, request.then))
            except BaseException as failure:
                request.outcome.set_exception(failure)
                if self.lifecycle.error is not None:
                    raise
                _LOG.info("an update was refused, and the pipeline goes on as it is: %s", failure)

    # -- failures --------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End the run, also while it is idle: a sink's thread calls it too."""
        self.lifecycle.fail(error)
        self.intake.end(error)

    def _strand(self, error: InvalidError) -> None:
        """End the run because user code hangs and cannot be interrupted.

        Its thread is abandoned. If the code returns after all, its bundle is not committed.
        """
        self.lifecycle.fail(error, is_stranded=True)
        self.intake.end(error)
        self._updates.end(error)
        self._taken.settle(error)

    @contextmanager
    def working(self) -> Iterator[Coordinator]:
        """Let the caller's thread work in place of the worker's; a failure ends the run."""
        self.lifecycle.check_phase(Phase.RUNNING)
        with self._failing():
            yield self.coordinator

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            self._fail(failure)
            raise

    def start(self) -> None:
        self.is_threaded = True
        self._thread = threading.Thread(target=self._work, name="millpond-local", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while self.lifecycle.phase is Phase.RUNNING:
                self._update_as_asked()
                if self.step() is None:
                    due = self.coordinator.next_wall_timer()
                    until_ms = _REST_MS_MAX if due is None else (due - self._clock.now_us()) / 1_000
                    self.intake.rest(min(max(until_ms, 0.0), _REST_MS_MAX))
        except BaseException as failure:  # noqa: BLE001 - kept, and raised to each thread that injects or waits
            _LOG.debug("the run has ended: %s", failure)
        finally:
            self._updates.end(
                self.lifecycle.error or InvalidError("the run has been stopped: start another one")
            )

    # -- the end ---------------------------------------------------------------------------

    def end(self) -> None:
        """Finish the superstep under way and refuse all further input, once the life cycle is stopping."""
        # A superstep that waits for a service fails instead, so that stopping is prompt.
        self.coordinator.give_up()
        self.intake.end(
            self.lifecycle.error or UnavailableError("the run was stopped; inject this again in the next")
        )
        if self._thread is not None and not self.lifecycle.is_stranded:
            self._thread.join()

    def close(self) -> None:
        self.lifecycle.close()
        try:
            self.engine.close(wait_for_code=not self.lifecycle.is_stranded)
            self.coordinator.close(has_failed=self.lifecycle.error is not None)
        finally:
            self.progress.close()
