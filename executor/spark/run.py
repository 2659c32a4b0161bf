"""
A pipeline while it runs on Spark: streaming queries feed it, a ticker keeps it awake.

Each outside stream is a Spark streaming query of its own whose ``foreachBatch`` is one
superstep; what that superstep produced is delivered with the next batch. When no batch comes,
the ticker runs supersteps for what is undelivered and for timers that are due, so wall timers
fire on an idle stream (MillWheel §4.6).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.pipeline.positions import BOUNDED_SOURCE
from millpond.executor.reporting.progress import Progress, SuperstepReport
from millpond.executor.reporting.summary import RunSummary
from millpond.executor.spark.engine import SparkEngine, plan_once
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.watermark.stream_time import MemberStatus
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import Clock, EventTimeMicros

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["SparkRun"]

_LOG = logging.getLogger("millpond")
_SKEW_POLL_MS = 50.0
_QUERY_ID = "sql.streaming.queryId"


class SparkRun:
    """
    A running pipeline; made by `SparkRunner.start` and by `foreach_batch`.

    Args:
        engine: executes supersteps.
        coordinator: plans and commits them.
        clock: measures.
        progress: where supersteps are reported.
        release: gives back what the run holds, called once by `stop`.
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
        self._engine = engine
        self._coordinator = coordinator
        self._clock = clock
        self._progress = progress
        self._release = release
        self._lock = threading.RLock()
        self._failure: BaseException | None = None
        self._queries: list[StreamingQuery] = []
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None
        self._last_superstep_us = clock.monotonic_us()
        self._first_superstep = coordinator.superstep
        self._started_us = clock.monotonic_us()
        self._first_totals = coordinator.totals
        # Made anew after each superstep, so that any thread may look at it meanwhile.
        self._watermarks = self._stand()
        self._stopped = False
        self._closed = False

    # -- input -----------------------------------------------------------------------------

    def on_batch(self, stream: str) -> Callable[[DataFrame, int], None]:
        """
        The ``foreachBatch`` function of one outside stream.
        """
        planned = False

        def consume(frame: DataFrame, batch: int) -> None:
            nonlocal planned
            if not planned:
                # This is the query's own clone of the user's session.
                plan_once(frame.sparkSession)
                planned = True
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
        Wait while the stream is further ahead than its skew limit; only where a ticker keeps time going.

        Raises:
            UnavailableError: the run was stopped meanwhile; the batch comes again in the next.
        """
        while self._ticker is not None:
            with self._guarded():
                if stream not in self._coordinator.watermarks.streams_ahead():
                    return
            if self._stopping.wait(_SKEW_POLL_MS / 1_000):
                raise UnavailableError(
                    "the run was stopped while the stream waited for slower ones", input=stream
                )

    def consume(self, frame: DataFrame, position: InputPosition) -> SuperstepReport | None:
        """
        One superstep for a batch; after a failure every further call raises that failure again.
        """
        with self._guarded():
            return self._reported(self._engine.consume(frame, position))

    def consume_bounded(self, stream: str, frame: DataFrame) -> None:
        """
        Consume a bounded DataFrame, unless the store has it already, and end its stream.
        """
        with self._guarded():
            position = InputPosition(stream=stream, source=BOUNDED_SOURCE, batch=0)
            self._reported(self._engine.consume(frame, position))
            # Nothing comes after it: left where it is, its watermark would hold up the others for ever.
            self._coordinator.watermarks.finish(stream)

    def advance(self) -> SuperstepReport | None:
        """
        One superstep without outside input: delivers productions, fires due timers.
        """
        with self._guarded():
            return self._reported(self._engine.advance())

    def advance_watermark(
        self, stream: str, at: Instant, *, member: str | None = None, percentile: float = 100
    ) -> None:
        """
        Promise that nothing older than ``at`` will come on a stream; see `LocalRun.advance_watermark`.

        It is durable with the next superstep.

        Raises:
            InvalidError: nobody injects this stream, it expects no such member, nobody asks for the
                percentile, or ``at`` is no time.
        """
        moment = instant_us(at)
        known = self._coordinator.topology.percentile(percentile)
        self._coordinator.topology.injector(stream).check_member(member)
        with self._guarded():
            self._coordinator.watermarks.advance(stream, moment, member, known)

    def finish(self, stream: str) -> None:
        """
        Promise that nothing will come on a stream any more; see `LocalRun.finish`.

        It is durable with the next superstep.

        Raises:
            InvalidError: nobody injects this stream.
        """
        self._coordinator.topology.injector(stream)
        with self._guarded():
            self._coordinator.watermarks.finish(stream)

    def declare(self, stream: str, status: MemberStatus, *, member: str | None = None) -> None:
        """
        Say that a stream, or one of its members, is ``idle``, ``gone``, or ``expected``; see `LocalRun.declare`.

        Raises:
            InvalidError: nobody injects this stream, or it expects no such member.
        """
        if status not in get_args(MemberStatus):
            raise InvalidError("a stream is expected, idle or gone", stream=stream, status=status)
        self._coordinator.topology.injector(stream).check_member(member)
        with self._guarded():
            self._coordinator.watermarks.declare(stream, status, member)

    def watermark(self, computation: str) -> EventTimeMicros:
        """
        The input low watermark of a computation after the last superstep.

        Raises:
            InvalidError: the pipeline has no such computation.
        """
        return self._watermarks[self._coordinator.topology.computation(computation).name]

    def _stand(self) -> dict[str, EventTimeMicros]:
        return {
            name: self._coordinator.watermarks.input_watermark(name)
            for name in self._coordinator.topology.computations
        }

    def has_work(self) -> bool:
        """
        Whether a superstep without outside input would do anything now.
        """
        with self._guarded():
            return self._is_work_due()

    def _is_work_due(self) -> bool:
        self._coordinator.tick()
        return self._coordinator.has_work()

    def finish_inputs(self) -> None:
        """
        Say that no input will come any more, and run until nothing is left to do.
        """
        with self._guarded():
            for stream in self._coordinator.topology.injectors:
                self._coordinator.watermarks.finish(stream)
            self._reported(self._engine.advance())
            while self._is_work_due():
                self._reported(self._engine.advance())

    def add_query(self, query: StreamingQuery) -> None:
        """
        Stop this query when the run stops, and watch it.
        """
        self._queries.append(query)

    # -- the ticker ------------------------------------------------------------------------

    def start_ticker(self, tick_ms: float) -> None:
        """
        Run supersteps of our own whenever the input has been silent for ``tick_ms``.
        """
        self._ticker = threading.Thread(
            target=self._tick_until_stopped, args=(tick_ms,), name="millpond-ticker", daemon=True
        )
        self._ticker.start()

    def _tick_until_stopped(self, tick_ms: float) -> None:
        while not self._stopping.wait(tick_ms / 1_000):
            idle_us = self._clock.monotonic_us() - self._last_superstep_us
            if idle_us < tick_ms * 1_000 or not self._lock.acquire(blocking=False):
                continue
            try:
                if self._failure is None and self._is_work_due():
                    self._reported(self._engine.advance())
                elif self._failure is None:
                    self._coordinator.maintain()
            except BaseException as failure:  # noqa: BLE001 - kept, and raised to whoever waits
                self._failure = failure
                return
            finally:
                self._lock.release()

    # -- the end ---------------------------------------------------------------------------

    @property
    def queries(self) -> tuple[StreamingQuery, ...]:
        """
        The streaming queries that feed the run, with Spark's own account of each micro-batch.
        """
        return tuple(self._queries)

    @property
    def is_active(self) -> bool:
        """
        Whether the run still takes input.
        """
        return self._failure is None and not self._stopped and all(q.isActive for q in self._queries)

    def await_termination(self, timeout_ms: float | None = None) -> bool:
        """
        Wait until every query has ended.

        Returns:
            Whether they have, within the time.

        Raises:
            MillpondError: whatever ended the run, as it was raised in the superstep.
        """
        deadline_us = None if timeout_ms is None else self._clock.monotonic_us() + timeout_ms * 1_000
        for query in self._queries:
            while not self._await(query):
                self._raise_failure()
                if deadline_us is not None and self._clock.monotonic_us() > deadline_us:
                    return False
        self._raise_failure()
        return True

    def _await(self, query: StreamingQuery) -> bool:
        try:
            ended = query.awaitTermination(1)
        except Exception:
            # Spark wraps what foreachBatch raised into text; the error itself is better.
            self._raise_failure()
            raise
        return bool(ended)

    def summary(self) -> RunSummary:
        """
        Counts so far, of this run and of the pipeline's whole life.
        """
        elapsed_ms = (self._clock.monotonic_us() - self._started_us) / 1_000
        coordinator = self._coordinator
        return RunSummary(
            supersteps=coordinator.superstep - self._first_superstep,
            superstep=coordinator.superstep,
            run=coordinator.totals.minus(self._first_totals),
            totals=coordinator.totals,
            watermark=coordinator.watermarks.low_watermark(),
            elapsed_ms=elapsed_ms,
        )

    def stop(self) -> RunSummary:
        """
        Stop the queries and the ticker, give the leases back; everything committed stays.

        Raises:
            MillpondError: what a sink raised while it took the last superstep.
        """
        if self._stopped:
            return self.summary()
        self._stopped = True
        self._stopping.set()
        self._coordinator.give_up()
        for query in self._queries:
            query.stop()
        if self._ticker is not None:
            self._ticker.join()
        summary = self.summary()
        try:
            with self._lock:
                self._closed = True
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

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """
        One superstep at a time; the first failure ends the run for everybody.
        """
        with self._lock:
            self._raise_failure()
            if self._closed:
                # A batch that was under way: without leases it must not even begin.
                raise InvalidError("the run has been stopped")
            try:
                yield
            except BaseException as failure:
                self._failure = failure
                raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _reported(self, report: SuperstepReport | None) -> SuperstepReport | None:
        self._last_superstep_us = self._clock.monotonic_us()
        self._watermarks = self._stand()
        if report is not None:
            self._progress.report(report)
            self._coordinator.maintain()
        return report
