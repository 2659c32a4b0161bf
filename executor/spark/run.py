"""A pipeline while it runs on Spark: streaming queries feed it, and a ticker works while they are silent.

Each outside stream is a Spark streaming query whose ``foreachBatch`` is one superstep; the next batch delivers its
productions. While no batch arrives, the ticker runs supersteps for undelivered productions and due timers, so wall
timers fire on an idle stream (MillWheel §4.6).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from millpond.executor.inputs.positions import BOUNDED_SOURCE, consumed_before
from millpond.executor.pipeline.nodes import SIGNALS
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.lifecycle import Deadline, Lifecycle, Phase
from millpond.executor.run.options import RunnerOptions
from millpond.executor.run.run import (
    PipelineUpdate,
    Run,
    WatermarkUpdate,
    update_between,
)
from millpond.executor.spark.engine import SparkBatch, SparkEngine, take_over
from millpond.executor.spark.frames import InputFrames, table_of
from millpond.executor.spark.queries import Queries, QueryStart, StartQuery, unless_stopped
from millpond.executor.spark.session import spark_calls, worker_calls
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import RunStatus, SuperstepReport
from millpond.statestore.arguments import check_count
from millpond.statestore.durations import accepts_old_durations, duration_ms, timeout_ms
from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import EventTimeMicros

_LOG = logging.getLogger("millpond")
_SKEW_POLL_MS = 50.0
_SUPERSTEPS_MAX = 1_000_000


class SparkRun(Run[None]):
    """A running pipeline; created by `SparkRunner.start`, stopped by `stop` or at the end of a ``with``.

    Once the run has failed, every method that works raises its first error.
    """

    def __init__(
        self,
        engine: SparkEngine,
        coordinator: Coordinator,
        options: RunnerOptions,
        *,
        release: Callable[[], None],
        frames: InputFrames | None = None,
    ) -> None:
        lifecycle = Lifecycle()
        first = coordinator.status()
        topology = coordinator.topology
        progress = options.progress_of(topology.title)
        super().__init__(
            topology, coordinator, lifecycle, options.clock, progress, first=first, release=release
        )
        self._tick_ms = duration_ms("tick", options.tick)
        self._engine = engine
        self._frames = frames
        coordinator.sinks.on_failure = lifecycle.fail
        self._lock = threading.RLock()
        self._queries = Queries(self._check_owner)
        self._fed: set[str] = set()
        self._is_bounded = False
        self._ticker: threading.Thread | None = None
        self._last_superstep_us = options.clock.monotonic_us()
        # Replaced after each superstep, so that any thread may read it.
        self._watermarks = first.watermarks

    # -- input -----------------------------------------------------------------------------

    def on_batch(self, stream: str) -> Callable[[DataFrame, int], None]:
        """Return the ``foreachBatch`` function of an injected stream."""
        known: QueryStart | None = None
        ends = False

        def function(frame: DataFrame, batch: int) -> None:
            nonlocal known, ends
            begun = QueryStart.of(frame, stream)
            if begun != known:
                # Each start of a query clones the user's session.
                take_over(frame.sparkSession)
                self._meet(stream, frame)
                self._check_end(begun, frame, stream)
                known, ends = begun, begun.ends_by_itself(frame)
            # A query that ends by itself does not wait: the slower query may have ended already.
            if not ends:
                self._wait_for_slower(stream, lambda: begun.check_running(frame, stream))
            offsets = begun.end_offsets(frame, batch)
            self.consume(
                frame, InputPosition(stream=stream, source=begun.query, batch=batch, offsets=offsets)
            )

        return function

    def _check_end(self, begun: QueryStart, frame: DataFrame, stream: str) -> None:
        with self._guarded(stream):
            inputs = self._coordinator.inputs
            last, entry = inputs.consumed(stream).get(begun.query), inputs.offsets(stream, begun.query)
            if last is not None and entry is not None:
                begun.check_end(frame, stream, last, entry)

    def _meet(self, stream: str, frame: DataFrame) -> None:
        if self._frames is None:
            return
        with self._guarded(stream):
            topology = self._frames.meet(self._topology, stream, frame)
            if topology is not self._topology:
                self._coordinator.follow(topology)
                self._topology = topology

    def _wait_for_slower(self, stream: str, go_on: Callable[[], None] = lambda: None) -> None:
        """Wait while the stream is further ahead than its skew limit, if a ticker advances time; call ``go_on`` at each poll."""
        while self._ticker is not None and not self._is_bounded:
            with self._guarded():
                if stream not in self._coordinator.watermarks.streams_ahead():
                    return
            if self._lifecycle.wait_for_stop(_SKEW_POLL_MS):
                raise UnavailableError(
                    "the run was stopped while the stream waited for slower ones", input=stream
                )
            go_on()

    def consume(self, frame: DataFrame, position: InputPosition) -> SuperstepReport | None:
        """Run one superstep on a batch; return ``None`` if the store has consumed the batch already."""
        with self._guarded(position.stream), unless_stopped(frame, position.source, position.stream):
            report = self._reported(self._engine.consume(frame, position))
            if report is not None:
                self._fed.add(position.stream)
            return report

    def inject_durably(self, stream: str, rows: Iterable[Mapping[str, Any]] | pa.Table) -> None:
        """Run one superstep with rows of this process, and return once their effects are durable.

        It suits a source that the driver reads itself, such as a `DirectoryInjector`; use a streaming
        DataFrame for much data. After a crash inject the rows again, with ids if they must not count
        twice. Waits while the stream is further ahead than its ``skew_limit``.

        Args:
            stream: an injected stream without a streaming query.
            rows: mappings of fields, of which a field has one type, or an Arrow table.

        Raises:
            InvalidError: the stream is not injected, or a column is missing or of the wrong type.
        """
        self._topology.injector(stream)
        table = rows if isinstance(rows, pa.Table) else table_of(list(rows))
        if not table.num_rows:
            return
        self._wait_for_slower(stream)
        with self._guarded(stream):
            self._reported(self._engine.run(SparkBatch(frame=self._engine.frame(table), stream=stream)))
            self._fed.add(stream)

    def consume_bounded(
        self, stream: str, frame: DataFrame, *, finish: bool = True, in_steps: bool = False
    ) -> None:
        """Consume a bounded DataFrame, unless the store has consumed it already, and end its stream.

        Args:
            stream: an injected stream.
            frame: all of its input.
            finish: the stream ends with it, and its watermark does not hold back the others.
            in_steps: the stream's time stays where it is until `finish_inputs`.

        Raises:
            InvalidError: the store has consumed the input already, and it has changed since.
        """
        with self._guarded():
            position = InputPosition(stream=stream, source=BOUNDED_SOURCE, batch=0)
            is_last = finish and not in_steps
            if self._coordinator.inputs.consumed(stream).get(BOUNDED_SOURCE, 0) > 0:
                self.check_frame(stream, frame)
            else:
                report = self._engine.consume(frame, position, is_last=is_last, in_steps=in_steps)
                if self._reported(report) is None:
                    self.check_frame(stream, frame)
            if is_last:
                self._coordinator.watermarks.finish(stream)

    def frame_place(self, stream: str) -> Mapping[str, Any] | None:
        """Return what was recorded about the consumed part of a bounded frame; ``None`` if nothing was consumed."""
        with self._guarded():
            inputs = self._coordinator.inputs
            return inputs.bounded_place(stream) if BOUNDED_SOURCE in inputs.consumed(stream) else None

    def check_frame(self, stream: str, frame: DataFrame) -> None:
        """Note that the rows of a frame were consumed before, or a part of them; refuse others."""
        with self._guarded():
            known = self._coordinator.inputs.input_rows(stream)
            rows, is_same = (0, True) if known is None else self._engine.compare(frame, stream)
            reason = consumed_before(stream, rows, known, is_same=is_same)
            is_part = "until" in self._coordinator.inputs.bounded_place(stream)
            self.note_skipped(stream, f"{rows:,} of its rows were consumed before" if is_part else reason)

    def consume_piece(
        self,
        stream: str,
        frame: DataFrame,
        batch: int,
        until: EventTimeMicros | None,
        watermarks: Mapping[str, EventTimeMicros],
    ) -> None:
        """Run one superstep on a piece of a bounded frame: no row left in any of the streams is before its watermark."""
        with self._guarded():
            for injected, at in watermarks.items():
                self._coordinator.watermarks.advance(injected, at)
            position = InputPosition(stream=stream, source=BOUNDED_SOURCE, batch=batch)
            is_last = until is None and bool(watermarks)
            self._reported(self._engine.consume(frame, position, is_last=is_last, until=until))

    def backfill(self, inputs: Mapping[str, DataFrame]) -> None:
        """Give each computation its missing history, in one superstep for each of its streams.

        Raises:
            InvalidError: a history does not fit its stream, or cannot be read here.
        """
        with self._guarded():
            for frame, position in self._engine.backfills(inputs):
                name = position.backfill
                batch = SparkBatch(frame=frame, stream=position.stream, position=position, backfilled=name)
                self._reported(self._engine.run(batch))

    def advance(self) -> SuperstepReport | None:
        """Run one superstep without outside input: deliver productions and fire due timers."""
        with self._guarded():
            return self._reported(self._engine.run(SparkBatch()))

    def _accept(self, update: WatermarkUpdate) -> None:
        with self._guarded(update.stream):
            update.apply(self._coordinator.watermarks)

    def _signal(self, rows: pa.Table) -> None:
        self.inject_durably(SIGNALS, rows)

    def _finish(self, stream: str) -> None:
        with self._guarded(stream):
            self._coordinator.watermarks.finish(stream)

    def has_work(self) -> bool:
        """Return True if a superstep without outside input would do anything now; lets idle time pass first."""
        with self._guarded():
            return self._is_work_due()

    def _is_work_due(self) -> bool:
        self._coordinator.watermarks.tick()
        return self._coordinator.has_work()

    @accepts_old_durations
    def run_until_quiet(
        self, *, supersteps_max: int = _SUPERSTEPS_MAX, timeout: str | timedelta | None = None
    ) -> bool:
        """Run supersteps without outside input until no work is due and all sinks are written.

        Args:
            supersteps_max: bound, as a cycle may never come to rest.
            timeout: longest time to work; ``None`` for no limit.

        Returns:
            True if the pipeline came to rest in time, before the run was stopped.
        """
        check_count("supersteps_max", supersteps_max)
        return self._run_until_quiet(supersteps_max, Deadline.after(self._clock, timeout_ms(timeout)))

    def _run_until_quiet(self, supersteps_max: int, deadline: Deadline) -> bool:
        for _ in range(supersteps_max):
            with self._lock:
                self._lifecycle.raise_failure()
                if self._lifecycle.phase is not Phase.RUNNING or deadline.has_passed:
                    return False
                with self._guarded():
                    if not self._is_work_due():
                        self._coordinator.sinks.wait()
                        return True
                    self._reported(self._engine.run(SparkBatch()))
        return False

    def start_queries(self, starts: Mapping[str, StartQuery], *, is_bounded: bool) -> None:
        """Start the queries that feed the run, and stop them when the run stops.

        Raises:
            FencedError: another process has taken the pipeline; no query is started.
            ConflictError: another query keeps writing a checkpoint.
            UnavailableError: Spark's JVM has ended.
        """
        self._is_bounded = is_bounded
        for stream, start in starts.items():
            self._queries.start(stream, start)

    def _check_owner(self) -> None:
        with self._guarded():
            self._coordinator.ownership.check_owner()

    def start_ticker(self) -> None:
        """Start a thread that runs supersteps while the input is silent."""
        self._ticker = threading.Thread(target=self._tick_until_over, name="millpond-ticker", daemon=True)
        self._ticker.start()

    def _tick_until_over(self) -> None:
        while not self._lifecycle.wait_for_stop(self._tick_ms):
            try:
                with spark_calls():
                    self._tick()
            except BaseException as failure:  # noqa: BLE001 - kept, and raised to each thread that waits
                self._lifecycle.fail(failure)
            if self._lifecycle.error is not None:
                return

    def _tick(self) -> None:
        # A silent run commits nothing, so only this check finds that another process has taken over.
        self._coordinator.ownership.check_leases()
        self._queries.revive()
        idle_us = self._clock.monotonic_us() - self._last_superstep_us
        if idle_us < self._tick_ms * 1_000 or not self._lock.acquire(blocking=False):
            return
        try:
            has_failed = self._lifecycle.error is not None
            if not has_failed and self._is_work_due():
                self._reported(self._engine.run(SparkBatch()))
            elif not has_failed:
                self._coordinator.maintain()
        finally:
            self._lock.release()

    # -- the end ---------------------------------------------------------------------------

    @property
    def queries(self) -> tuple[StreamingQuery, ...]:
        """The streaming queries that feed the run, with Spark's own progress of each micro-batch."""
        return tuple(self._queries)

    @property
    def is_active(self) -> bool:
        """True while the run takes input: neither it, nor one of its queries, nor Spark's JVM has ended."""
        try:
            return super().is_active and self._queries.are_active
        except UnavailableError as failure:
            self._lifecycle.fail(failure)
            return False

    @accepts_old_durations
    def await_termination(self, timeout: str | timedelta | None = None) -> bool:
        """Wait until every query has ended, and do all the work that their input has made due.

        With ``trigger={"availableNow": True}`` that is a whole run: afterwards all productions are
        delivered, all timers that the watermarks have passed have fired, and all sinks are written.

        Args:
            timeout: longest wait; ``None`` waits as long as a query runs.

        Returns:
            True if all queries ended, and no work was left, in time.

        Raises:
            FencedError: another process has taken the pipeline.
            UnavailableError: Spark's JVM has ended.
            MillpondError: the error that ended the run, as the superstep raised it.
        """
        deadline = Deadline.after(self._clock, timeout_ms(timeout))
        if not self._await_queries(deadline):
            return False
        is_stopping = self._lifecycle.phase is not Phase.RUNNING
        has_ended = is_stopping or self._run_until_quiet(_SUPERSTEPS_MAX, deadline)
        if has_ended and self._is_bounded:
            self.note_unfed(self._queries.streams)
        return has_ended

    def _await_queries(self, deadline: Deadline) -> bool:
        def is_over() -> bool:
            self._lifecycle.raise_failure()
            return deadline.has_passed

        try:
            have_ended = self._queries.await_all(is_over)
        except UnavailableError as failure:
            self._lifecycle.fail(failure)
            raise
        except Exception:
            # Spark wraps an error of foreachBatch into text: raise the error itself.
            self._lifecycle.raise_failure()
            raise
        self._lifecycle.raise_failure()
        # Another driver in this process may have stopped them.
        self._coordinator.ownership.check_leases()
        return have_ended

    def note_unfed(self, streams: Iterable[str]) -> None:
        """Record which of these streams brought no records, once their queries have read all available input."""
        for stream in streams:
            if stream not in self._fed:
                known = self._coordinator.inputs.consumed(stream)
                reason = "all that is there was consumed before" if known else "nothing is there"
                self.note_skipped(stream, reason)
        self.note_nothing()

    def _change(self, topology: Topology) -> PipelineUpdate:
        with spark_calls(), worker_calls():
            topology = topology if self._frames is None else self._frames.fit(topology)
        with self._lock:
            self._lifecycle.check_phase(Phase.RUNNING)
            former, began_us = self._topology, self._clock.monotonic_us()
            # Outside of `_guarded`: a change that is refused here does not end the run.
            sinks = self._coordinator.check_update(topology)
            with self._guarded():
                version = self._engine.update(topology, sinks)
                self._topology = topology
                self._watermarks = self._coordinator.watermarks.input_watermarks()
            done = update_between(former, topology, version, self._clock.monotonic_us() - began_us)
        # Without the lock: a batch under way for such a stream waits for the lock, and is refused.
        self._queries.stop_others(topology.injectors)
        return done

    def _status(self) -> RunStatus:
        return replace(self._coordinator.status(), watermarks=self._watermarks)

    def _end_work(self) -> None:
        self._coordinator.give_up()
        try:
            had_ended = self._is_bounded and not self._queries.are_active
            self._queries.stop()
        except UnavailableError as failure:
            # With the JVM the queries have ended too; the leases are released anyway.
            self._lifecycle.fail(failure)
            had_ended = False
        if self._ticker is not None:
            self._ticker.join()
        if had_ended and self._lifecycle.error is None and self._coordinator.has_work():
            _LOG.warning("work is due that the next run will do: call await_termination() before stop()")

    def _close(self) -> None:
        try:
            with self._lock:
                self._lifecycle.close()
                self._coordinator.close(has_failed=self._lifecycle.error is not None)
                self._engine.close()
        finally:
            self._progress.close()

    @contextmanager
    def _guarded(self, stream: str | None = None) -> Iterator[None]:
        """Let one superstep run at a time; the first failure ends the run for every thread.

        A ``stream`` that an update has removed is refused, and the run continues.
        """
        with self._lock:
            # Finish a batch that is under way while the run stops; begin none, because the leases are released.
            self._lifecycle.check_phase(Phase.RUNNING, Phase.STOPPING)
            if stream is not None:
                self._topology.injector(stream)
            try:
                with spark_calls(), worker_calls():
                    yield
            except BaseException as failure:
                self._lifecycle.fail(failure)
                raise

    def _reported(self, report: SuperstepReport | None) -> SuperstepReport | None:
        self._last_superstep_us = self._clock.monotonic_us()
        self._watermarks = self._coordinator.watermarks.input_watermarks()
        if report is not None:
            self._progress.report(report)
            self._coordinator.maintain()
        return report
