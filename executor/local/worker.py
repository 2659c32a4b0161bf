"""The worker of a local run: takes input, runs supersteps, and ends at the first failure.

The same steps run in a thread of their own or one by one in the caller's, so tests and the
simulation run the code of production. One superstep runs at a time; the first failure ends the run
and is raised to every thread that injects or waits.

Requests to change the pipeline of a run whose supersteps run in a thread of their own.

Backfills of the local runner: history in the order of time, in pieces, each of which is a superstep.

The rows of a history are put in the order of their times once, stably, so a run that continues another one has them in
the same order, and a number of rows says where that one was. Of several streams the one that has come least far goes
on. The least time still to come holds the computation's watermark: no row is late, and timers fire on the way.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.executor.inputs.extraction import Rows, check_fields, read_injected, row_count, sorted_by_time
from millpond.executor.inputs.payload import rows_to_extract
from millpond.executor.inputs.positions import BOUNDED_SOURCE, LOCAL_SOURCE, consumed_before
from millpond.executor.local.engine import LocalEngine, Prepared
from millpond.executor.local.intake import Intake, OutsideRows, Taken
from millpond.executor.local.rows import RowSource, rows_from
from millpond.executor.pipeline.nodes import INPUT, Backfill
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.executor.run.progress import Progress
from millpond.executor.run.run import PipelineUpdate, update_between
from millpond.executor.run.status import RunStatus
from millpond.executor.superstep.backfills import backfill_position
from millpond.executor.superstep.commit import SuperstepReport
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.clocks import PercentileTimes
from millpond.executor.watermark.authority import Conditions
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import TIME_MIN_US, Clock, EventTimeMicros


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """A changed pipeline that waits for its turn.

    Attributes:
        topology: the pipeline.
        then: called once it runs, before the next superstep.
        outcome: how it ended.
    """

    topology: Topology
    then: Callable[[], None]
    outcome: Future[PipelineUpdate] = field(default_factory=Future)


class UpdateRequests:
    """Hands changed pipelines to the thread that runs supersteps; each sender waits, so no more wait than threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[UpdateRequest] = deque()
        self._ended: BaseException | None = None

    def put(self, topology: Topology, then: Callable[[], None]) -> Future[PipelineUpdate]:
        """Ask for an update; the future has its outcome."""
        request = UpdateRequest(topology, then)
        with self._lock:
            if self._ended is None:
                self._waiting.append(request)
            else:
                request.outcome.set_exception(self._ended)
        return request.outcome

    def take(self) -> UpdateRequest | None:
        """The next request; ``None`` without one."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def end(self, reason: BaseException) -> None:
        """Refuse all requests, waiting and future."""
        with self._lock:
            self._ended = reason
            waiting = [*self._waiting]
            self._waiting.clear()
        for request in waiting:
            request.outcome.set_exception(reason)


_READ_AT_ONCE: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillPiece:
    """What one superstep gives a computation of its history.

    Attributes:
        computation: its name.
        rows: the rows.
        position: how much of the history of the stream it has once that is committed.
        oldest_at: no row of any of its streams' histories that is still to come is before this time.
    """

    computation: str
    rows: Rows
    position: InputPosition
    oldest_at: EventTimeMicros


@dataclass(slots=True)
class _History:
    """The history of one stream, in the order of time."""

    stream: str
    rows: Rows
    at: npt.NDArray[np.int64]
    consumed: int

    @property
    def is_left(self) -> bool:
        return self.consumed < len(self.at)

    @property
    def oldest_at(self) -> EventTimeMicros:
        return EventTimeMicros(int(self.at[self.consumed]))

    def take(self, computation: str, records_max: int) -> BackfillPiece:
        start, oldest_at = self.consumed, self.oldest_at
        self.consumed = min(start + records_max, len(self.at))
        rows = self.rows
        batch = backfill_position(self.consumed, is_all=not self.is_left)
        return BackfillPiece(
            computation=computation,
            rows=rows.slice(start, records_max)
            if isinstance(rows, pa.Table)
            else rows[start : self.consumed],
            position=InputPosition(stream=self.stream, source="", batch=batch, backfill=computation),
            oldest_at=oldest_at,
        )


def backfill_pieces(
    coordinator: Coordinator, inputs: Mapping[str, Rows | RowSource] | None, records_max: int
) -> Iterator[BackfillPiece]:
    """What is still to be given, piece by piece; ask for the next one once a piece is committed.

    All of it is read before this returns, so what does not fit is refused at once.

    Args:
        coordinator: knows which computations have not got all of their history.
        inputs: the bounded inputs of the run; ``None`` if it has none.
        records_max: how many rows a piece has at most.

    Raises:
        InvalidError: a history does not fit its stream, or is not the one that the store has a part of.
    """
    histories = {name: _histories(coordinator, name, inputs) for name in coordinator.backfills.pending}
    return _pieces(coordinator, histories, records_max)


def _pieces(
    coordinator: Coordinator, histories: Mapping[str, Sequence[_History]], records_max: int
) -> Iterator[BackfillPiece]:
    for name, parts in histories.items():
        coordinator.backfills.join(name)
        empty = {history.stream: history.consumed for history in parts if not history.is_left}
        while left := [history for history in parts if history.is_left]:
            yield min(left, key=lambda history: history.oldest_at).take(name, records_max)
        coordinator.backfills.end(name, empty)


def _histories(
    coordinator: Coordinator, computation: str, inputs: Mapping[str, Rows | RowSource] | None
) -> list[_History]:
    topology, found = coordinator.topology, list[_History]()
    for stream, consumed in coordinator.backfills.consumed(computation).items():
        if consumed is None:
            continue
        given = topology.backfills[computation][stream]
        node = topology.injectors[stream]
        rows = (
            _of_input(coordinator, stream, inputs)
            if _is_input(given)
            else rows_to_extract(node, history_rows(given))
        )
        _check_rows(coordinator, computation, stream, rows)
        if consumed > row_count(rows):
            raise InvalidError(
                "the store has consumed more of this backfill than there is: it is another one",
                computation=computation,
                stream=stream,
                rows=row_count(rows),
                consumed=consumed,
            )
        ordered, at = sorted_by_time(node, rows)
        found.append(_History(stream, ordered, at, consumed))
    return found


def _is_input(given: Backfill) -> bool:
    return isinstance(given, str) and given == INPUT


def history_rows(given: Any) -> Rows:
    """The rows that a backfill is.

    Raises:
        InvalidError: it has no rows, or is a file that cannot be read.
    """
    if not isinstance(given, str | Path):
        return rows_from(given)
    try:
        return pq.read_table(given)
    except (pa.ArrowException, OSError) as cause:
        raise InvalidError(
            'a backfill is rows, "input" or the path of a Parquet file',
            path=given,
            reason=str(cause).partition("\n")[0],
        ) from cause


def _check_rows(coordinator: Coordinator, computation: str, stream: str, rows: Rows) -> None:
    node = coordinator.topology.injectors[stream]
    subscription = coordinator.topology.computations[computation].subscription(stream)
    key = None if subscription is None else subscription.key
    if isinstance(rows, pa.Table):
        read_injected(node, key, rows.slice(0, 0))
    elif rows:
        check_fields(node, [key], rows)


def _of_input(coordinator: Coordinator, stream: str, inputs: Mapping[str, Rows | RowSource] | None) -> Rows:
    """The rows of a bounded input that the store consumed before."""
    if inputs is None or stream not in inputs:
        raise InvalidError(
            'backfill="input" is of the rows that are given to run: this run has none, so give it rows',
            stream=stream,
        )
    given, known = inputs[stream], coordinator.inputs.consumed(stream)
    # Put in the order of time, so all of them are needed.
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
    return rows.slice(0, consumed or 0) if isinstance(rows, pa.Table) else rows[: consumed or 0]


BUNDLE_RECORDS_MAX: Final = 20_000
"""The most injected records that a superstep takes."""

_LOG = logging.getLogger("millpond")
_REST_MS_MAX: Final = 250.0
_RETRY_MS: Final = 50.0


class LocalWorker:
    """Processes an intake, superstep by superstep.

    Args:
        engine: runs supersteps.
        coordinator: plans and commits supersteps.
        clock: the source of time.
        progress: reports supersteps.
        intake_records_max: how many injected records may wait.
        pause_timeout_ms: how long to wait for a service that is away.

    Attributes:
        engine: the engine.
        coordinator: the coordinator.
        intake: the input of the next supersteps.
        lifecycle: the phase of the run and its first failure.
        status: where the pipeline stood after the last superstep; any thread may read it.
    """

    def __init__(
        self,
        engine: LocalEngine,
        coordinator: Coordinator,
        clock: Clock,
        *,
        progress: Progress,
        intake_records_max: int,
        pause_timeout_ms: float,
    ) -> None:
        self.engine = engine
        self.coordinator = coordinator
        self.intake: Intake = Intake(intake_records_max)
        self._clock = clock
        self._progress = progress
        self._pause_timeout_ms = pause_timeout_ms
        self.lifecycle: Lifecycle = Lifecycle()
        self._thread: threading.Thread | None = None
        self._updates = UpdateRequests()
        self._taken = Taken()
        engine.on_stuck = self._strand
        coordinator.sinks.on_failure = self._end_by_sink
        self.status: RunStatus = RunStatus.of(coordinator)
        self._backfill: Iterator[BackfillPiece] | None = None

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> SuperstepReport | None:
        """Run one superstep on the intake; ``None`` if there was nothing to do.

        Raises:
            MillpondError: what ended the run.
        """
        if self.lifecycle.is_stranded:
            self.lifecycle.raise_failure()
        backfilled = self.backfill_step()
        if backfilled is not None:
            return backfilled
        taken = self._taken = self._take()
        try:
            with self._failing():
                report = self._handle(taken)
        except BaseException as failure:
            taken.settle(failure)
            raise
        taken.settle()
        return report

    def begin_backfills(self, inputs: Mapping[str, Rows | RowSource] | None) -> None:
        """Read the history that computations are still to be given; the next steps are on it, before any other input.

        Args:
            inputs: the bounded inputs of the run; ``None`` if it has none.

        Raises:
            InvalidError: a history does not fit its stream, or is not the one that the store has a part of.
        """
        with self._failing():
            pieces = backfill_pieces(self.coordinator, inputs, BUNDLE_RECORDS_MAX)
        self._backfill = pieces

    def backfill_step(self) -> SuperstepReport | None:
        """Run one superstep on a piece of a backfill; ``None`` if there is none left.

        Raises:
            MillpondError: what ended the run.
        """
        with self._failing():
            piece = None if self._backfill is None else next(self._backfill, None)
            if piece is None and self._backfill is not None:
                self._backfill = None
                # Streams that were too far ahead of the one that joined need not be any more.
                self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
            if piece is None:
                return None
            self.coordinator.backfills.hold(piece.computation, piece.oldest_at)
            rows = OutsideRows(stream=piece.position.stream, rows=piece.rows, backfill=piece.computation)
            return self._superstep([rows], position=piece.position, after={})

    def _take(self) -> Taken:
        """The next input that fits the pipeline as it is; of what waits since before an update some may not."""
        while taken := self.intake.take(BUNDLE_RECORDS_MAX):
            fitting = taken.fitting(self.coordinator.topology)
            if fitting:
                return fitting
        return taken

    def consume(
        self,
        stream: str,
        rows: Rows,
        position: InputPosition,
        watermarks: Mapping[str, EventTimeMicros],
        after: Mapping[str, EventTimeMicros],
    ) -> None:
        """Run one superstep on a piece of a bounded input, of which no row is before these watermarks.

        No row of the pieces that come ``after`` it is before those.

        Raises:
            MillpondError: what ended the run.
        """
        self.check_active()
        with self._failing():
            for injected, at in watermarks.items():
                self.coordinator.watermarks.advance(injected, at)
            outside = [OutsideRows(stream=stream, rows=rows)]
            self._superstep(outside, position=position, is_bounded=True, after=after)

    def advance_percentiles(self, stream: str, watermarks: PercentileTimes) -> None:
        """Move percentile watermarks of a stream; the next superstep makes that durable.

        Raises:
            MillpondError: what ended the run.
        """
        self.check_active()
        with self._failing():
            for percentile, at in watermarks.items():
                self.coordinator.watermarks.advance(stream, at, percentile=percentile)

    def observe(self, stream: str, rows: Iterable[Rows], position: InputPosition) -> None:
        """Run one superstep in which rows that were consumed before move their stream's watermark.

        Raises:
            MillpondError: what ended the run.
        """
        self.check_active()
        with self._failing():
            self._superstep([], position=position, observed=(stream, rows))

    def repeat(
        self,
        rows: Sequence[tuple[str, Rows]],
        conditions: Conditions,
        journaled: Mapping[str, int],
        position: InputPosition | None,
        after: Mapping[str, EventTimeMicros],
    ) -> None:
        """Run a superstep of a past run again, under the conditions that it met.

        Raises:
            MillpondError: what ended the run.
        """
        self.check_active()
        outside = [OutsideRows(stream=stream, rows=part) for stream, part in rows]
        is_bounded = position is not None
        with self._failing():
            self.coordinator.watermarks.impose(conditions, journaled)
            self._superstep(
                outside, position=position, is_bounded=is_bounded, after=after if is_bounded else None
            )

    def update(self, topology: Topology, then: Callable[[], None]) -> PipelineUpdate:
        """Go on with a changed pipeline; waits until the superstep under way has ended.

        Args:
            topology: the changed pipeline.
            then: called once it runs, before the next superstep.

        Raises:
            InvalidError: the pipeline cannot go on like this; the old one does.
            MillpondError: what ended the run.
        """
        self.check_active()
        if self._thread is None:
            return self._update(topology, then)
        if self._thread is threading.current_thread():
            raise InvalidError("a pipeline's own code cannot update it: the update would wait for itself")
        asked = self._updates.put(topology, then)
        self.intake.wake()
        return asked.result()

    def _update(self, topology: Topology, then: Callable[[], None]) -> PipelineUpdate:
        former, began_us = self.coordinator.topology, self._clock.monotonic_us()
        # What is refused here leaves the run as it is.
        parts = self.coordinator.prepare_update(topology)
        with self._failing():
            version = self.engine.update(parts)
            self.status = RunStatus.of(self.coordinator)
            then()
            self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
        elapsed_us = self._clock.monotonic_us() - began_us
        return update_between(former, topology, version, elapsed_us)

    def _update_as_asked(self) -> None:
        """Make the updates that other threads wait for; one that is refused ends nothing."""
        while (request := self._updates.take()) is not None:
            try:
                request.outcome.set_result(self._update(request.topology, request.then))
            except BaseException as failure:
                request.outcome.set_exception(failure)
                if self.lifecycle.error is not None:
                    raise
                _LOG.info("an update was refused, and the pipeline goes on as it is: %s", failure)

    def say(self, text: str) -> None:
        """Show a line where supersteps are reported."""
        self._progress.note(text)

    def _handle(self, taken: Taken) -> SuperstepReport | None:
        if not taken:
            self.coordinator.watermarks.tick()
            if not self.coordinator.has_work():
                self.engine.settle_sinks()
                self.coordinator.maintain()
                return None
        for entry in taken.updates:
            entry.update.apply(self.coordinator.watermarks)
        return self._superstep(
            [OutsideRows(stream=arrival.stream, rows=arrival.rows) for arrival in taken.arrivals]
        )

    def _superstep(
        self,
        outside: list[OutsideRows],
        *,
        position: InputPosition | None = None,
        is_bounded: bool = False,
        observed: tuple[str, Iterable[Rows]] | None = None,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> SuperstepReport:
        prepared = self._prepare(outside, is_bounded=is_bounded, after=after)
        for injected, at in (after or {}).items():
            # The same commit journals it: what comes before it in a later run is late.
            self.coordinator.watermarks.promise(injected, at)
        if observed is not None:
            prepared = replace(prepared, observations=self.engine.observations_of(*observed))
        if self.lifecycle.is_stranded:
            # User code returned after the run had ended because it would not.
            self.lifecycle.raise_failure()
        report = self.engine.commit(prepared, position)
        self.status = RunStatus.of(self.coordinator)
        self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
        self._progress.report(report)
        self.coordinator.maintain()
        return report

    def _prepare(
        self,
        outside: list[OutsideRows],
        *,
        is_bounded: bool,
        after: Mapping[str, EventTimeMicros] | None,
    ) -> Prepared:
        """Run the bundles of a superstep; repeat it while a service is away, as nothing counts before the commit."""
        deadline_us = self._clock.monotonic_us() + self._pause_timeout_ms * 1_000
        while True:
            try:
                return self.engine.prepare(outside, is_bounded=is_bounded, after=after)
            except UnavailableError:
                is_stopping = self.lifecycle.phase is not Phase.RUNNING
                if is_stopping or self._clock.monotonic_us() > deadline_us:
                    raise
                self._clock.sleep_ms(_RETRY_MS)

    def _strand(self, error: InvalidError) -> None:
        """End the run because user code hangs and cannot be interrupted.

        Its thread is left alone. If the code returns after all, its bundle is not committed.
        """
        self.lifecycle.fail(error, is_stranded=True)
        self.intake.end(error)
        self._updates.end(error)
        self._taken.settle(error)

    def _end_by_sink(self, error: BaseException) -> None:
        """End the run because a sink has failed, also while there is nothing to do."""
        self.lifecycle.fail(error)
        self.intake.end(error)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            self.lifecycle.fail(failure)
            self.intake.end(failure)
            raise

    # -- the thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Run the steps in a thread of their own from now on."""
        self._thread = threading.Thread(target=self._work, name="millpond-local", daemon=True)
        self._thread.start()

    @property
    def is_threaded(self) -> bool:
        """Whether the steps run in a thread of their own."""
        return self._thread is not None

    def _work(self) -> None:
        try:
            while self.lifecycle.phase is Phase.RUNNING:
                self._update_as_asked()
                if self.step() is None:
                    self.intake.rest(self._rest_ms())
        except BaseException as failure:  # noqa: BLE001 - kept, and raised to each thread that injects or waits
            _LOG.debug("the run has ended: %s", failure)
        finally:
            self._updates.end(
                self.lifecycle.error or InvalidError("the run has been stopped: start another one")
            )

    def _rest_ms(self) -> float:
        due = self.coordinator.next_wall_timer()
        if due is None:
            return _REST_MS_MAX
        return min(max((due - self._clock.now_us()) / 1_000, 0.0), _REST_MS_MAX)

    # -- the end ---------------------------------------------------------------------------

    def check_active(self) -> None:
        """Raise what ended the run, if it has ended.

        Raises:
            MillpondError: the first failure.
            InvalidError: the run was stopped.
        """
        self.lifecycle.check_phase(Phase.RUNNING)

    def end(self) -> None:
        """Finish the superstep under way and refuse all further input; the life cycle says so already.

        A superstep that waits for a service that is away fails instead, so that stopping is prompt.
        """
        self.coordinator.give_up()
        self.intake.end(
            self.lifecycle.error or UnavailableError("the run was stopped; inject this again in the next")
        )
        if self._thread is not None and not self.lifecycle.is_stranded:
            self._thread.join()

    def close(self) -> None:
        """Wait for the sinks and give the leases back.

        Raises:
            MillpondError: the error of a sink that was writing the last superstep.
        """
        self.lifecycle.close()
        try:
            self.engine.close(wait_for_code=not self.lifecycle.is_stranded)
            self.coordinator.close()
        finally:
            self._progress.close()
