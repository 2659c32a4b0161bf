"""
A pipeline while it runs in this process: injected records in, durable effects out.

One thread works, anybody may inject. While a commit is in flight the next bundle gathers in the
intake (group commit), so the rate rises with the load and the latency stays that of two commits.
Wall timers wake the worker by the injected clock. In stepping mode there is no thread at all and
nothing happens but within `LocalRun.step`: tests and the simulator run the same code so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self, get_args

import pyarrow as pa

from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.local.intake import Arrival, Receipt, WatermarkUpdate
from millpond.executor.local.rows import RowsLike, pieces, rows_from
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX, LocalWorker
from millpond.executor.pipeline.extract_rows import Rows, read_injected
from millpond.executor.pipeline.topology import Topology
from millpond.executor.reporting.progress import SuperstepReport
from millpond.executor.reporting.summary import RunSummary
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.watermark.stream_time import MemberStatus
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, Clock, EventTimeMicros

__all__ = ["LocalRun"]

_LOG = logging.getLogger("millpond")


class LocalRun:
    """
    A running pipeline; made by `LocalRunner.start`, stopped by `stop` or at the end of a ``with``.

    Args:
        worker: does the work.
        clock: the source of time.
        release: gives back what the run holds, called once by `stop`.
    """

    def __init__(self, worker: LocalWorker, clock: Clock, release: Callable[[], None]) -> None:
        self._worker = worker
        self._clock = clock
        self._release = release
        self._topology = worker.coordinator.topology
        self._stopped = False
        self._started_us = clock.monotonic_us()
        self._first = worker.status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon()

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
            UnavailableError: the intake stayed full; a large table may be in already up to there.
            MillpondError: what ended the run.
        """
        given = rows_from(rows)
        self.check_rows(stream, given)
        cut = list(pieces(given, BUNDLE_RECORDS_MAX))
        receipt = Receipt(len(cut))
        for count, piece in cut:
            self._put(Arrival(stream=stream, rows=piece, count=count, receipt=receipt), timeout_ms)
        return receipt

    def inject_durably(self, stream: str, rows: RowsLike) -> None:
        """
        Hand outside rows in and return once their effects are durable; in stepping mode it steps until then.

        Raises:
            InvalidError: nobody injects this stream, or a column is missing or of the wrong type.
            MillpondError: what ended the run.
        """
        receipt = self.inject(stream, rows)
        while not self._worker.is_threaded and not receipt.is_durable:
            self.step()
        receipt.wait()

    def advance_watermark(
        self, stream: str, at: Instant, *, member: str | None = None, percentile: float = 100
    ) -> Receipt:
        """
        Promise that nothing older than ``at`` will come on a stream, after what has been injected so far.

        What it gives up: records before ``at`` are late from then on. Windows close and timers fire.

        Args:
            stream: an injected stream.
            at: the time.
            member: promise it for one of the stream's members only.
            percentile: promise it of about so many percent of the records; what comes of the others
                is not late. It is one that a computation or a trigger asks for, or 100.

        Raises:
            InvalidError: nobody injects this stream, it expects no such member, nobody asks for the
                percentile, or ``at`` is no time.
            MillpondError: what ended the run.
        """
        return self._move(
            stream, at=instant_us(at), member=member, percentile=self._topology.percentile(percentile)
        )

    def declare(self, stream: str, status: MemberStatus, *, member: str | None = None) -> Receipt:
        """
        Say that a stream, or one of its members, is ``idle``, ``gone``, or ``expected`` again.

        What is idle or gone holds nobody back; records that it brings nevertheless may be late.
        Idle ends with the next record, gone does not; the next run of the pipeline knows of both.

        Raises:
            InvalidError: nobody injects this stream, or it expects no such member.
            MillpondError: what ended the run.
        """
        if status not in get_args(MemberStatus):
            raise InvalidError("a stream is expected, idle or gone", stream=stream, status=status)
        return self._move(stream, status=status, member=member)

    def finish(self, stream: str) -> Receipt:
        """
        Promise that nothing will come on a stream any more; every record that does is late.

        Raises:
            InvalidError: nobody injects this stream.
            MillpondError: what ended the run.
        """
        return self._move(stream, at=TIME_MAX_US)

    def _move(
        self,
        stream: str,
        *,
        at: EventTimeMicros | None = None,
        status: MemberStatus | None = None,
        member: str | None = None,
        percentile: float = 100,
    ) -> Receipt:
        self._topology.injector(stream).check_member(member)
        movement = WatermarkUpdate(
            stream=stream,
            at=at,
            status=status,
            member=member,
            percentile=percentile,
            receipt=Receipt(),
        )
        self._put(movement, None)
        return movement.receipt

    def check_rows(self, stream: str, rows: Rows) -> None:
        """
        Refuse a table whose columns do not fit the stream's injector and consumers.

        Raises:
            InvalidError: nobody injects this stream, or a column is missing or of the wrong type.
        """
        injector = self._topology.injector(stream)
        if isinstance(rows, pa.Table):
            # A column that is missing is the mistake of this call, not the end of the run.
            for consumer in self._topology.consumers_of(stream):
                read_injected(injector, consumer.subscription.key, rows.slice(0, 0))

    def _put(self, entry: Arrival | WatermarkUpdate, timeout_ms: float | None) -> None:
        self._worker.raise_failure()
        self._worker.intake.put(entry, timeout_ms=timeout_ms if self._worker.is_threaded else 0)

    def consumed(self, stream: str) -> dict[str, int]:
        """
        How far outside inputs of a stream have been consumed, by their source.
        """
        return self._worker.engine.consumed(stream)

    def consume(self, stream: str, rows: Rows, position: InputPosition) -> None:
        """
        One superstep for a piece of a bounded input; in stepping mode only.
        """
        self._worker.consume(stream, rows, position)

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
        if self._worker.is_threaded:
            raise InvalidError("this run has a worker of its own: start it with stepping=True to step it")
        self._worker.raise_failure()
        return self._worker.step()

    def run_until_quiet(self, *, supersteps_max: int = 1_000_000, timeout_ms: float | None = None) -> bool:
        """
        Come to rest: everything injected handled, what it produced too, no timer due, sinks served.

        In stepping mode this does the work; otherwise it waits for the worker.

        Args:
            supersteps_max: bound for stepping mode, for cycles that never come to rest.
            timeout_ms: how long to wait for the worker; ``None`` waits as long as the run lives.

        Returns:
            Whether it came to rest in time.

        Raises:
            MillpondError: what ended the run.
        """
        if self._worker.is_threaded:
            return self._worker.intake.wait_until_idle(timeout_ms)
        return any(self.step() is None for _ in range(supersteps_max))

    # -- what is known ---------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """
        Whether the run still takes input.
        """
        return self._worker.is_active

    @property
    def topology(self) -> Topology:
        """
        The checked pipeline that runs.
        """
        return self._topology

    def watermark(self, computation: str) -> EventTimeMicros:
        """
        The input low watermark of a computation after the last superstep.

        Raises:
            InvalidError: the pipeline has no such computation.
        """
        return self._worker.status.watermarks[self._topology.computation(computation).name]

    def summary(self) -> RunSummary:
        """
        Counts so far, of this run and of the pipeline's whole life.
        """
        status = self._worker.status
        return RunSummary(
            supersteps=status.superstep - self._first.superstep,
            superstep=status.superstep,
            run=status.totals.minus(self._first.totals),
            totals=status.totals,
            watermark=status.low_watermark,
            elapsed_ms=(self._clock.monotonic_us() - self._started_us) / 1_000,
        )

    # -- the end ---------------------------------------------------------------------------

    def stop(self) -> RunSummary:
        """
        Finish the superstep that runs, give the leases back, and let go.

        It drains nothing: what was produced and not delivered is delivered after the next
        start; what was injected and not yet committed is lost to the pipeline, and its
        receipts say so. A superstep that waits for a service that is away fails instead of
        being waited for. Stopping twice does nothing.

        Raises:
            MillpondError: what a sink raised while it took the last superstep.
        """
        if self._stopped:
            return self.summary()
        self._stopped = True
        self._worker.end()
        summary = self.summary()
        try:
            self._worker.close()
        finally:
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
