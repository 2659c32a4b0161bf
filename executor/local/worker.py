"""
The worker of a local run: takes what has come in, runs supersteps, and ends at the first failure.

The same steps run under a thread of their own or one by one under the caller's, so that what
tests and the simulator see is what production does. One superstep runs at a time; the first
failure ends the run and is raised to everybody who injects or waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from millpond.executor.local.engine import LocalEngine, Prepared
from millpond.executor.local.input import OutsideRows
from millpond.executor.local.intake import Intake, Taken, WatermarkUpdate
from millpond.executor.pipeline.extract_rows import Rows
from millpond.executor.reporting.progress import Progress, SuperstepReport
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.totals import Totals
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import Clock, EventTimeMicros, Superstep

__all__ = ["BUNDLE_RECORDS_MAX", "LocalWorker", "RunStatus"]

BUNDLE_RECORDS_MAX: Final = 20_000
"""Outside records of one superstep at most."""

_LOG = logging.getLogger("millpond")
_REST_MS_MAX: Final = 250.0
_RETRY_MS: Final = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """
    Where the pipeline stood after the last superstep; any thread may look at it.

    Attributes:
        superstep: number of the last one committed.
        totals: counts over the pipeline's whole life.
        watermarks: input low watermark by computation.
        low_watermark: the lowest output watermark; everything before it is done.
    """

    superstep: Superstep
    totals: Totals
    watermarks: Mapping[str, EventTimeMicros]
    low_watermark: EventTimeMicros


class LocalWorker:
    """
    Works off an intake, superstep by superstep.

    Args:
        engine: runs supersteps.
        coordinator: plans and commits them.
        clock: the source of time.
        progress: where supersteps are reported.
        intake_records_max: how many injected records may wait.
        pause_timeout_ms: how long to wait for a service that is away.
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
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._taken = Taken()
        self._is_stranded = False
        engine.on_stuck = self._strand
        self.status: RunStatus = self._stand()

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> SuperstepReport | None:
        """
        One superstep with what has come in; ``None`` when nothing was to be done.
        """
        if self._is_stranded:
            self.raise_failure()
        taken = self._taken = self.intake.take(BUNDLE_RECORDS_MAX)
        try:
            with self._failing():
                report = self._handle(taken)
        except BaseException as failure:
            taken.settle(failure)
            raise
        taken.settle()
        return report

    def consume(self, stream: str, rows: Rows, position: InputPosition) -> None:
        """
        One superstep for a piece of a bounded input.
        """
        self.raise_failure()
        with self._failing():
            self._superstep([OutsideRows(stream=stream, rows=rows)], position=position, is_bounded=True)

    def _handle(self, taken: Taken) -> SuperstepReport | None:
        if not taken:
            self.coordinator.tick()
            if not self.coordinator.has_work():
                self.engine.settle_sinks()
                self.coordinator.maintain()
                return None
        for movement in taken.movements:
            self._move(movement)
        return self._superstep([OutsideRows(stream=a.stream, rows=a.rows) for a in taken.arrivals])

    def _move(self, movement: WatermarkUpdate) -> None:
        if movement.at is not None:
            self.coordinator.watermarks.advance(
                movement.stream, movement.at, movement.member, movement.percentile
            )
        if movement.status is not None:
            self.coordinator.watermarks.declare(movement.stream, movement.status, movement.member)

    def _superstep(
        self,
        outside: list[OutsideRows],
        *,
        position: InputPosition | None = None,
        is_bounded: bool = False,
    ) -> SuperstepReport:
        prepared = self._prepare(outside, is_bounded=is_bounded)
        if self._is_stranded:
            # Its code came back after everybody was told that it would not.
            self.raise_failure()
        report = self.engine.commit(prepared, position)
        self.status = self._stand()
        self.intake.hold_back(self.coordinator.watermarks.streams_ahead())
        self._progress.report(report)
        self.coordinator.maintain()
        return report

    def _stand(self) -> RunStatus:
        coordinator = self.coordinator
        return RunStatus(
            superstep=coordinator.superstep,
            totals=coordinator.totals,
            watermarks={
                name: coordinator.watermarks.input_watermark(name)
                for name in coordinator.topology.computations
            },
            low_watermark=coordinator.watermarks.low_watermark(),
        )

    def _prepare(self, outside: list[OutsideRows], *, is_bounded: bool) -> Prepared:
        """
        Do the work of a superstep, again if a service was away: nothing counts before the commit.
        """
        deadline_us = self._clock.monotonic_us() + self._pause_timeout_ms * 1_000
        while True:
            try:
                return self.engine.prepare(outside, is_bounded=is_bounded)
            except UnavailableError:
                if self._stopping or self._clock.monotonic_us() > deadline_us:
                    raise
                self._clock.sleep_ms(_RETRY_MS)

    def _strand(self, error: InvalidError) -> None:
        """
        User code hangs where it cannot be interrupted: end the run for everybody else.

        Its thread is left where it is. Should the code ever return, nothing of it is committed.
        """
        self._failure = error
        self._is_stranded = True
        self.intake.end(error)
        self._taken.settle(error)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            self._failure = failure
            self.intake.end(failure)
            raise

    # -- the thread ------------------------------------------------------------------------

    def start(self) -> None:
        """
        From now on a thread of its own does the steps.
        """
        self._thread = threading.Thread(target=self._work, name="millpond-local", daemon=True)
        self._thread.start()

    @property
    def is_threaded(self) -> bool:
        """
        Whether a thread of its own does the steps.
        """
        return self._thread is not None

    def _work(self) -> None:
        try:
            while not self._stopping:
                if self.step() is None:
                    self.intake.rest(self._rest_ms())
        except BaseException as failure:  # noqa: BLE001 - kept, and raised to whoever injects or waits
            _LOG.debug("the run has ended: %s", failure)

    def _rest_ms(self) -> float:
        due = self.coordinator.next_wall_timer()
        if due is None:
            return _REST_MS_MAX
        return min(max((due - self._clock.now_us()) / 1_000, 0.0), _REST_MS_MAX)

    # -- the end ---------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """
        Whether it still works.
        """
        return self._failure is None and not self._stopping

    def raise_failure(self) -> None:
        """
        Raise what ended the run, if it has ended.

        Raises:
            MillpondError: the first failure.
            InvalidError: the run was stopped.
        """
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise InvalidError("the run has been stopped")

    def end(self) -> None:
        """
        Finish the superstep that runs, and take nothing in any more.

        One that waits for a service that is away fails instead: nobody has to wait for a pause to end.
        """
        self._stopping = True
        self.coordinator.give_up()
        self.intake.end(
            self._failure or UnavailableError("the run was stopped; inject this again in the next")
        )
        if self._thread is not None and not self._is_stranded:
            self._thread.join()

    def close(self) -> None:
        """
        Wait for the sinks and give the leases back.

        Raises:
            MillpondError: what a sink raised while it took the last superstep.
        """
        try:
            self.engine.close(wait_for_code=not self._is_stranded)
            self.coordinator.close()
        finally:
            self._progress.close()
