"""
A pipeline while it runs on Spark: streaming queries feed it, a ticker keeps it awake.

Each outside stream is a Spark streaming query of its own whose ``foreachBatch`` is one superstep;
the next batch delivers its productions. While no batch comes, the ticker runs supersteps for
undelivered productions and for timers that are due, so wall timers fire on an idle stream
(MillWheel §4.6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from millpond.executor.pipeline.positions import BOUNDED_SOURCE
from millpond.executor.reporting.progress import Progress, SuperstepReport
from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.executor.run.run import Run
from millpond.executor.run.status import RunStatus, WatermarkUpdate, input_watermarks
from millpond.executor.spark.engine import SparkEngine, plan_once
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import Clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["SparkRun"]

_SKEW_POLL_MS = 50.0
_QUERY_ID = "sql.streaming.queryId"


class SparkRun(Run[None]):
    """
    A running pipeline; created by `SparkRunner.start`, stopped by `stop` or at the end of a ``with``.

    Args:
        engine: runs supersteps.
        coordinator: plans and commits supersteps.
        clock: measures times.
        progress: reports supersteps.
        release: closes the store if the run owns it; called once by `stop`.
    """

    def __init__(
        self,
        engine: SparkEngine,
        coordinator: Coordinator,
        *,
        clock: Clock,
        progress: Progress,
        release: Callable[[], None],
    ) -> None:
        lifecycle = Lifecycle()
        first = RunStatus.of(coordinator)
        super().__init__(coordinator.topology, lifecycle, clock, first=first, release=release)
        self._engine = engine
        self._coordinator = coordinator
        coordinator.sinks.on_failure = lifecycle.fail
        self._progress = progress
        self._lock = threading.RLock()
        self._queries: list[StreamingQuery] = []
        self._ticker: threading.Thread | None = None
        self._last_superstep_us = clock.monotonic_us()
        # Replaced after each superstep, so that any thread may read it.
        self._watermarks = first.watermarks

    # -- input -----------------------------------------------------------------------------

    def on_batch(self, stream: str) -> Callable[[DataFrame, int], None]:
        """
        The ``foreachBatch`` function of one outside stream.

        Args:
            stream: an injected stream.
        """
        is_planned = False

        def consume(frame: DataFrame, batch: int) -> None:
            nonlocal is_planned
            if not is_planned:
                # This is the query's own clone of the user's session.
                plan_once(frame.sparkSession)
                is_planned = True
            source = frame.sparkSession._jsparkSession.sparkContext().getLocalProperty(_QUERY_ID)  # noqa: SLF001
            if source is None:
                raise InvalidError(
                    "this function runs only as the foreachBatch of a streaming query", input=stream
                )
            self._wait_for_slower(stream)
            self.consume(frame, InputPosition(stream=stream, source=source, batch=batch))

        return consume

    def _wait_for_slower(self, stream: str) -> None:
        """
        Wait while the stream is further ahead than its skew limit, if a ticker keeps time going.

        Raises:
            UnavailableError: the run was stopped meanwhile; the next run gets the batch again.
        """
        while self._ticker is not None:
            with self._guarded():
                if stream not in self._coordinator.watermarks.streams_ahead():
                    return
            if self._lifecycle.wait_for_stop(_SKEW_POLL_MS):
                raise UnavailableError(
                    "the run was stopped while the stream waited for slower ones", input=stream
                )

    def consume(self, frame: DataFrame, position: InputPosition) -> SuperstepReport | None:
        """
        Run one superstep on a batch; after a failure every further call raises that failure again.

        Args:
            frame: the batch.
            position: the stream, the streaming query and the number of the batch.

        Returns:
            What the superstep did; ``None`` if the store has consumed the batch already.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._guarded():
            return self._reported(self._engine.consume(frame, position))

    def consume_bounded(self, stream: str, frame: DataFrame) -> None:
        """
        Consume a bounded DataFrame, unless the store has consumed it already, and end its stream.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._guarded():
            position = InputPosition(stream=stream, source=BOUNDED_SOURCE, batch=0)
            self._reported(self._engine.consume(frame, position))
            # Nothing comes after it, so its watermark must not hold back the others.
            self._coordinator.watermarks.finish(stream)

    def advance(self) -> SuperstepReport | None:
        """
        Run one superstep without outside input: deliver productions and fire due timers.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._guarded():
            return self._reported(self._engine.advance())

    def _accept(self, update: WatermarkUpdate) -> None:
        with self._guarded():
            update.apply(self._coordinator.watermarks)

    def _finish(self, stream: str) -> None:
        with self._guarded():
            self._coordinator.watermarks.finish(stream)

    def has_work(self) -> bool:
        """
        Whether a superstep without outside input would do anything now; lets idle time pass first.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._guarded():
            return self._is_work_due()

    def _is_work_due(self) -> bool:
        self._coordinator.tick()
        return self._coordinator.has_work()

    def finish_inputs(self) -> None:
        """
        End all injected streams, and run supersteps until nothing is left to do.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._guarded():
            for stream in self._coordinator.topology.injectors:
                self._coordinator.watermarks.finish(stream)
            self._reported(self._engine.advance())
            while self._is_work_due():
                self._reported(self._engine.advance())

    def add_query(self, query: StreamingQuery) -> None:
        """
        Watch a query that feeds the run, and stop it when the run stops.
        """
        self._queries.append(query)

    # -- the ticker ------------------------------------------------------------------------

    def start_ticker(self, tick_ms: float) -> None:
        """
        Start a thread that runs supersteps while the input is silent.

        Args:
            tick_ms: how long the input must be silent.
        """
        self._ticker = threading.Thread(
            target=self._tick_until_stopped, args=(tick_ms,), name="millpond-ticker", daemon=True
        )
        self._ticker.start()

    def _tick_until_stopped(self, tick_ms: float) -> None:
        while not self._lifecycle.wait_for_stop(tick_ms):
            idle_us = self._clock.monotonic_us() - self._last_superstep_us
            if idle_us < tick_ms * 1_000 or not self._lock.acquire(blocking=False):
                continue
            try:
                has_failed = self._lifecycle.error is not None
                if not has_failed and self._is_work_due():
                    self._reported(self._engine.advance())
                elif not has_failed:
                    self._coordinator.maintain()
            except BaseException as failure:  # noqa: BLE001 - kept, and raised to each thread that waits
                self._lifecycle.fail(failure)
                return
            finally:
                self._lock.release()

    # -- the end ---------------------------------------------------------------------------

    @property
    def queries(self) -> tuple[StreamingQuery, ...]:
        """
        The streaming queries that feed the run, with Spark's own progress of each micro-batch.
        """
        return tuple(self._queries)

    @property
    def is_active(self) -> bool:
        """
        Whether the run still takes input: it lives, and so do all its queries.
        """
        return super().is_active and all(query.isActive for query in self._queries)

    def await_termination(self, timeout_ms: float | None = None) -> bool:
        """
        Wait until every query has ended.

        Args:
            timeout_ms: how long to wait; ``None`` waits as long as a query runs.

        Returns:
            Whether all queries ended within the time.

        Raises:
            MillpondError: the error that ended the run, as it was raised in the superstep.
        """
        deadline_us = None if timeout_ms is None else self._clock.monotonic_us() + timeout_ms * 1_000
        for query in self._queries:
            while not self._await(query):
                self._lifecycle.raise_failure()
                if deadline_us is not None and self._clock.monotonic_us() > deadline_us:
                    return False
        self._lifecycle.raise_failure()
        return True

    def _await(self, query: StreamingQuery) -> bool:
        try:
            ended = query.awaitTermination(1)
        except Exception:
            # Spark wraps what foreachBatch raised into text; the error itself is better.
            self._lifecycle.raise_failure()
            raise
        return bool(ended)

    def _status(self) -> RunStatus:
        coordinator = self._coordinator
        return RunStatus(
            superstep=coordinator.superstep,
            totals=coordinator.totals,
            watermarks=self._watermarks,
            low_watermark=coordinator.watermarks.low_watermark(),
        )

    def _end_work(self) -> None:
        self._coordinator.give_up()
        for query in self._queries:
            query.stop()
        if self._ticker is not None:
            self._ticker.join()

    def _close(self) -> None:
        try:
            with self._lock:
                self._lifecycle.close()
                self._coordinator.close()
        finally:
            self._progress.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """
        Let one superstep run at a time; the first failure ends the run for every thread.
        """
        with self._lock:
            # A batch that is under way while the run stops is finished, but without leases none begins.
            self._lifecycle.check_phase(Phase.RUNNING, Phase.STOPPING)
            try:
                yield
            except BaseException as failure:
                self._lifecycle.fail(failure)
                raise

    def _reported(self, report: SuperstepReport | None) -> SuperstepReport | None:
        self._last_superstep_us = self._clock.monotonic_us()
        self._watermarks = input_watermarks(self._coordinator)
        if report is not None:
            self._progress.report(report)
            self._coordinator.maintain()
        return report
