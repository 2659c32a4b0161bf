"""
A pipeline while it runs in this process: injected records in, durable effects out.

One thread works, anybody may inject. While a commit is in flight the next bundle gathers in the
intake (group commit), so the rate rises with the load and the latency stays that of two commits.
Wall timers wake the worker by the injected clock. In stepping mode there is no thread at all and
nothing happens but within `LocalRun.step`: tests and the simulator run the same code so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from millpond.executor.duration import Instant, instant_us
from millpond.executor.injection import Rows, read_injected
from millpond.executor.intake import Arrival, Intake, Movement, Receipt, Taken
from millpond.executor.local_engine import LocalEngine, Prepared
from millpond.executor.local_input import OutsideRows
from millpond.executor.local_rows import RowsLike, pieces, rows_from
from millpond.executor.progress import Progress, SuperstepReport
from millpond.executor.summary import RunSummary
from millpond.executor.superstep import Coordinator
from millpond.executor.superstep_plan import InputPosition
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, Clock, EventTimeMicros

__all__ = ["BUNDLE_RECORDS_MAX", "LocalRun"]

BUNDLE_RECORDS_MAX: Final = 20_000
"""Outside records of one superstep at most."""

_LOG = logging.getLogger("millpond")
_REST_MS_MAX: Final = 250.0
_RETRY_MS: Final = 50.0


class LocalRun:
    """
    A running pipeline; made by `LocalRunner.start`, stopped by `stop` or at the end of a ``with``.

    Args:
        engine: runs supersteps.
        coordinator: plans and commits them.
        clock: the source of time.
        progress: where supersteps are reported.
        intake_records_max: how many injected records may wait.
        pause_timeout_ms: how long to wait for a service that is away.
        release: gives back what the run holds, called once by `stop`.
    """

    def __init__(
        self,
        engine: LocalEngine,
        coordinator: Coordinator,
        *,
        clock: Clock,
        progress: Progress,
        intake_records_max: int,
        pause_timeout_ms: float,
        release: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._coordinator = coordinator
        self._clock = clock
        self._progress = progress
        self._pause_timeout_ms = pause_timeout_ms
        self._release = release
        self._intake = Intake(intake_records_max)
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        self._worker: threading.Thread | None = None
        self._stopping = False
        self._stopped = False
        self._started_us = clock.monotonic_us()
        self._first_superstep = coordinator.superstep
        self._first_totals = coordinator.totals

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- input -----------------------------------------------------------------------------

    def inject(self, stream: str, rows: RowsLike, *, timeout_ms: float | None = None) -> Receipt:
        """
        Hand outside rows to a stream; they are handled in the order of the calls.

        Waits while the intake is full. An unreadable row becomes a dead letter and does not
        disturb the others.

        Args:
            stream: an injected stream.
            rows: a table (Arrow, pandas, anything that speaks Arrow), or mappings of fields.
            timeout_ms: how long to wait for room; ``None`` waits as long as the run lives. In
                stepping mode nobody makes room meanwhile, so it never waits.

        Returns:
            A receipt that tells when the rows' effects are durable. Until then a crash may
            lose them: inject them again, with ids if they must not count twice.

        Raises:
            InvalidError: nobody injects this stream, or a column is missing or of the wrong type.
            UnavailableError: the intake stayed full.
            MillpondError: what ended the run.
        """
        given = rows_from(rows)
        self.check_rows(stream, given)
        cut = list(pieces(given, BUNDLE_RECORDS_MAX))
        receipt = Receipt(len(cut))
        for count, piece in cut:
            self._put(Arrival(stream=stream, rows=piece, count=count, receipt=receipt), timeout_ms)
        return receipt

    def advance_watermark(self, stream: str, at: Instant) -> Receipt:
        """
        Promise that nothing older than ``at`` will come on a stream, after what has been injected so far.

        What it gives up: records before ``at`` are late from then on. Windows close and timers fire.

        Raises:
            InvalidError: nobody injects this stream, or ``at`` is no time.
            MillpondError: what ended the run.
        """
        return self._move(stream, instant_us(at))

    def finish(self, stream: str) -> Receipt:
        """
        Promise that nothing will come on a stream any more; every record that does is late.

        Raises:
            InvalidError: nobody injects this stream.
            MillpondError: what ended the run.
        """
        return self._move(stream, TIME_MAX_US)

    def _move(self, stream: str, at: EventTimeMicros) -> Receipt:
        self._coordinator.topology.injector(stream)
        movement = Movement(stream=stream, at=at, receipt=Receipt())
        self._put(movement, None)
        return movement.receipt

    def check_rows(self, stream: str, rows: Rows) -> None:
        """
        Refuse a table whose columns do not fit the stream's injector and consumers.

        Raises:
            InvalidError: nobody injects this stream, or a column is missing or of the wrong type.
        """
        topology = self._coordinator.topology
        injector = topology.injector(stream)
        if isinstance(rows, pa.Table):
            # A column that is missing is the mistake of this call, not the end of the run.
            for consumer in topology.consumers_of(stream):
                read_injected(injector, consumer.subscription.key, rows.slice(0, 0))

    def _put(self, entry: Arrival | Movement, timeout_ms: float | None) -> None:
        self._raise_failure()
        self._intake.put(entry, timeout_ms=timeout_ms if self._is_threaded else 0)

    # -- work ------------------------------------------------------------------------------

    def step(self) -> SuperstepReport | None:
        """
        Run one superstep, in stepping mode.

        Returns:
            What it did; ``None`` when there was nothing to do.

        Raises:
            InvalidError: the run has a worker of its own.
            MillpondError: what ended the run.
        """
        if self._is_threaded:
            raise InvalidError("this run has a worker of its own: start it with stepping=True to step it")
        self._raise_failure()
        return self._step()

    def run_until_quiet(self, *, supersteps_max: int = 1_000_000, timeout_ms: float | None = None) -> bool:
        """
        Work (in stepping mode) or wait (else) until everything injected has been handled, what it
        produced too, no timer is due, and the sinks have theirs.

        Args:
            supersteps_max: bound for stepping mode, for cycles that never come to rest.
            timeout_ms: how long to wait for the worker; ``None`` waits as long as the run lives.

        Returns:
            Whether it came to rest in time.

        Raises:
            MillpondError: what ended the run.
        """
        if self._is_threaded:
            return self._intake.wait_until_idle(timeout_ms)
        return any(self.step() is None for _ in range(supersteps_max))

    def consumed(self, stream: str) -> dict[str, int]:
        """
        How far outside inputs of a stream have been consumed, by their source.
        """
        return self._engine.consumed(stream)

    def consume(self, stream: str, rows: Rows, position: InputPosition) -> None:
        """
        One superstep for a piece of a bounded input; in stepping mode only.
        """
        self._raise_failure()
        outside = [OutsideRows(stream=stream, rows=rows)]
        with self._failing():
            self._superstep(outside, position=position, is_bounded=True)

    def _step(self) -> SuperstepReport | None:
        taken = self._intake.take(BUNDLE_RECORDS_MAX)
        try:
            with self._failing():
                report = self._handle(taken)
        except BaseException as failure:
            taken.settle(failure)
            raise
        taken.settle()
        return report

    def _handle(self, taken: Taken) -> SuperstepReport | None:
        if not taken and not self._coordinator.has_work():
            self._engine.settle_sinks()
            return None
        for movement in taken.movements:
            self._coordinator.advance_injector(movement.stream, movement.at)
        return self._superstep([OutsideRows(stream=a.stream, rows=a.rows) for a in taken.arrivals])

    def _superstep(
        self,
        outside: list[OutsideRows],
        *,
        position: InputPosition | None = None,
        is_bounded: bool = False,
    ) -> SuperstepReport:
        prepared = self._prepare(outside, is_bounded=is_bounded)
        report = self._engine.commit(prepared, position)
        self._progress.report(report)
        return report

    def _prepare(self, outside: list[OutsideRows], *, is_bounded: bool) -> Prepared:
        """
        Do the work of a superstep, again if a service was away: nothing counts before the commit.
        """
        deadline_us = self._clock.monotonic_us() + self._pause_timeout_ms * 1_000
        while True:
            try:
                return self._engine.prepare(outside, is_bounded=is_bounded)
            except UnavailableError:
                if self._stopping or self._clock.monotonic_us() > deadline_us:
                    raise
                self._clock.sleep_ms(_RETRY_MS)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """
        One superstep at a time; the first failure ends the run for everybody.
        """
        with self._lock:
            try:
                yield
            except BaseException as failure:
                self._failure = failure
                self._intake.end(failure)
                raise

    # -- the worker ------------------------------------------------------------------------

    def start_worker(self) -> None:
        """
        From now on a thread of this run does the work.
        """
        self._worker = threading.Thread(target=self._work, name="millpond-local", daemon=True)
        self._worker.start()

    @property
    def _is_threaded(self) -> bool:
        return self._worker is not None

    def _work(self) -> None:
        try:
            while not self._stopping:
                if self._step() is None:
                    self._intake.rest(self._rest_ms())
        except BaseException as failure:  # noqa: BLE001 - kept, and raised to whoever injects or waits
            _LOG.debug("the run has ended: %s", failure)

    def _rest_ms(self) -> float:
        due = self._coordinator.next_wall_timer()
        if due is None:
            return _REST_MS_MAX
        return min(max((due - self._clock.now_us()) / 1_000, 0.0), _REST_MS_MAX)

    # -- the end ---------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """
        Whether the run still takes input.
        """
        return self._failure is None and not self._stopped

    def watermark(self, computation: str) -> EventTimeMicros:
        """
        The input low watermark of a computation.

        Raises:
            InvalidError: the pipeline has no such computation.
        """
        node = self._coordinator.topology.computation(computation)
        with self._lock:
            return self._coordinator.watermark(node.name)

    def intervals_of(self, computation: str) -> tuple[Interval, ...]:
        """
        The key intervals of a computation, in key order; empty before its first record.

        Raises:
            InvalidError: the pipeline has no such computation.
        """
        node = self._coordinator.topology.computation(computation)
        with self._lock:
            return self._coordinator.intervals_of(node.name)

    def summary(self) -> RunSummary:
        """
        Counts so far, of this run and of the pipeline's whole life.
        """
        coordinator = self._coordinator
        with self._lock:
            return RunSummary(
                supersteps=coordinator.superstep - self._first_superstep,
                superstep=coordinator.superstep,
                run=coordinator.totals.minus(self._first_totals),
                totals=coordinator.totals,
                watermark=coordinator.low_watermark(),
                elapsed_ms=(self._clock.monotonic_us() - self._started_us) / 1_000,
            )

    def stop(self) -> RunSummary:
        """
        Finish the superstep that runs, give the leases back, and let go.

        It drains nothing: what was produced and not delivered is delivered after the next
        start; what was injected and not yet committed is lost to the pipeline, and its
        receipts say so. Stopping twice does nothing.

        Raises:
            MillpondError: what a sink raised while it took the last superstep.
        """
        if self._stopped:
            return self.summary()
        self._stopped = self._stopping = True
        self._intake.end(
            self._failure or UnavailableError("the run was stopped; inject this again in the next")
        )
        if self._worker is not None:
            self._worker.join()
        summary = self.summary()
        try:
            self._engine.close()
            self._coordinator.close()
        finally:
            self._progress.close()
            self._release()
        return summary

    def abandon(self) -> None:
        """
        Stop after a failure: whatever stopping raises must not hide the failure itself.
        """
        try:
            self.stop()
        except Exception as failure:  # noqa: BLE001 - the first failure is the one that is raised
            _LOG.warning("stopping after a failure failed too: %s", failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise InvalidError("the run has been stopped")
