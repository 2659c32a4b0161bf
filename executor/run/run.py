"""A running pipeline, in either runner: watermarks, signals, changes of the pipeline, counts and the end."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Generic, Self, TypeVar, get_args

import pyarrow as pa

from millpond.executor.ownership.catalog_recorder import definition_of
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.signals import SignalWindow, listeners, signal_rows
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.lifecycle import Lifecycle, Phase
from millpond.executor.run.progress import Progress
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.report import RunStatus, Totals
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import INSTANT_MAX_US, Instant, instant_us
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.executor.watermark.stream_time import MemberStatus
from millpond.statestore.catalog.topology import TopologyChange, change_between
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros, TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkUpdate:
    """A source's promise about the time of one stream, or of one of its members.

    Attributes:
        at: no older record will arrive; ``None`` promises nothing.
        status: idle, gone or expected; ``None`` changes nothing.
        member: the member; ``None`` for the whole stream.
        percentile: percentage of the records that the promise covers.
    """

    stream: str
    at: EventTimeMicros | None = None
    status: MemberStatus | None = None
    member: str | None = None
    percentile: float = EXACT

    def check(self, topology: Topology) -> None:
        """Raise `InvalidError` for a stream, a member or a percentile that the pipeline does not have."""
        topology.injector(self.stream).check_member(self.member)
        topology.percentile(self.percentile)

    def apply(self, watermarks: PipelineWatermarks) -> None:
        """Update the pipeline's watermarks; the next superstep makes that durable."""
        if self.at is not None:
            watermarks.advance(self.stream, self.at, self.member, self.percentile)
        if self.status is not None:
            watermarks.declare(self.stream, self.status, self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Counts of one run, and of the pipeline's whole life (restarts included).

    Attributes:
        supersteps: number of supersteps that this run committed.
        superstep: number of the pipeline's last superstep.
        run: counts of this run.
        totals: counts of the pipeline's whole life.
        watermark: the lowest output watermark; everything before it is done.
        elapsed_ms: duration of this run.
        error: the error that ended the run, in one line; ``None`` unless it failed.
        ended: injected streams whose input has ended for good, in order of their names: later
            records are refused.
        skipped: by stream, the reason why a bounded input, or a stream read up to now, brought no
            records or not all of them.
        times_in_1970: by injected stream, the number of this run's records with times in that year, where clocks
            that were never set and times in a wrong unit lie.
    """

    supersteps: int
    superstep: int
    run: Totals
    totals: Totals
    watermark: EventTimeMicros
    elapsed_ms: float
    error: str | None = None
    ended: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    times_in_1970: Mapping[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[str, ...]:
        """The records of this run that were not processed, or probably not as meant, a sentence for each kind."""
        letters, dropped = self.run.dead_letters, self.run.dropped
        found = [
            f"{letters:,} became dead letters: `millpond dead-letters list` shows them" if letters else "",
            f"{dropped:,} came too late and were dropped: allow more lateness, or a watermark that waits longer"
            if dropped
            else "",
        ]
        found += [
            f"{count:,} of {stream} have times in 1970: look at the unit of the times and at the senders' clocks"
            for stream, count in sorted(self.times_in_1970.items())
        ]
        return tuple(filter(None, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUpdate:
    """An update of a running pipeline, which has taken effect.

    Attributes:
        version: table version from which the changed pipeline runs.
        pause_ms: time without supersteps.
        change: new, removed and changed parts of the pipeline.
    """

    version: int
    pause_ms: float
    change: TopologyChange


def update_between(
    former: Topology, present: Topology, version: TableVersion, elapsed_us: int
) -> PipelineUpdate:
    change = change_between(definition_of(former), definition_of(present))
    return PipelineUpdate(version=version, pause_ms=elapsed_us / 1_000, change=change)


_Accepted = TypeVar("_Accepted")
"""The result of an accepted watermark: a receipt in the local runner, ``None`` on Spark."""

_LOG = logging.getLogger("millpond")
_STEPS_MAX: Final = 10_000
"""Steps of event time after the last event in which records of a cycle may return."""


class Run(ABC, Generic[_Accepted]):
    """A running pipeline; stopped by `stop` or at the end of a ``with``.

    Once the run has failed, every method that works raises its first error.

    Args:
        first: state of the pipeline before this run.
        release: closes the store if the run owns it; called once by `stop`.
    """

    def __init__(
        self,
        topology: Topology,
        coordinator: Coordinator,
        lifecycle: Lifecycle,
        clock: Clock,
        progress: Progress,
        *,
        first: RunStatus,
        release: Callable[[], None],
    ) -> None:
        self._topology = topology
        self._coordinator = coordinator
        self._lifecycle = lifecycle
        self._clock = clock
        self._progress = progress
        self._first = first
        self._release = release
        self._started_us = clock.monotonic_us()
        self._skipped: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon()

    # -- watermarks ------------------------------------------------------------------------

    def advance_watermark(
        self, stream: str, at: Instant, *, member: str | None = None, percentile: float = 100
    ) -> _Accepted:
        """Promise that no record older than ``at`` will arrive on a stream, after the records injected so far.

        From then on records before ``at`` are late, windows close and timers fire. The next
        superstep makes the promise durable.

        Args:
            stream: an injected stream.
            at: the time.
            member: restricts the promise to one of the stream's members.
            percentile: percentage of the records that the promise covers; older records of the rest are
                not late. Either 100 or a percentile that a computation or a trigger uses.

        Returns:
            A `Receipt` in the local runner, nothing on Spark.

        Raises:
            InvalidError: the stream is not injected, it has no such member, the pipeline does not
                use the percentile, or ``at`` is not a time.
        """
        moment = instant_us(at)
        known = self._topology.percentile(percentile)
        return self._update(WatermarkUpdate(stream=stream, at=moment, member=member, percentile=known))

    def declare(self, stream: str, status: MemberStatus, *, member: str | None = None) -> _Accepted:
        """Declare a stream, or one of its members, ``idle``, ``gone``, or ``expected`` again.

        A stream that is idle or gone does not hold back watermarks; its records may be late. Its next
        record ends idleness, but not absence. The next run of the pipeline remembers both.

        Args:
            stream: an injected stream.
            status: ``expected``, ``idle`` or ``gone``.
            member: restricts the declaration to one of the stream's members.

        Returns:
            A `Receipt` in the local runner, nothing on Spark.

        Raises:
            InvalidError: the stream is not injected, or it has no such member.
        """
        if status not in get_args(MemberStatus):
            raise InvalidError("a stream is expected, idle or gone", stream=stream, status=status)
        return self._update(WatermarkUpdate(stream=stream, status=status, member=member))

    def finish(self, stream: str) -> _Accepted:
        """Promise that no more records will arrive on a stream; every later record is late.

        The next superstep makes the promise durable.

        Returns:
            A `Receipt` in the local runner, nothing on Spark.

        Raises:
            InvalidError: the stream is not injected.
        """
        self._topology.injector(stream)
        return self._finish(stream)

    def _update(self, update: WatermarkUpdate) -> _Accepted:
        update.check(self._topology)
        return self._accept(update)

    @abstractmethod
    def _accept(self, update: WatermarkUpdate) -> _Accepted:
        """Apply a checked update, after the records injected so far."""

    @abstractmethod
    def _finish(self, stream: str) -> _Accepted:
        """End an injected stream, after the records injected so far."""

    def signal(
        self,
        name: str,
        key: str,
        window: SignalWindow = None,
        *,
        step: str | None = None,
        id: str | None = None,  # noqa: A002 - the word of `inject`
    ) -> _Accepted:
        """Send a signal to windowed steps whose trigger waits for it (see `AfterSignal`), after the records injected so far.

        The signal takes effect exactly once, in the commit of a superstep: once that is durable, neither a crash
        nor a restart loses or repeats it. A signal that finds no window of the key (because it has no elements, has
        expired, or its trigger has finished) has no effect and is counted as ``signals_missed`` of the step.

        Args:
            name: the signal's name.
            key: the key whose windows are signalled.
            window: start and end of one window, as panes show it; of merging windows, all windows that overlap
                it. ``None`` for all windows of the key.
            step: name of the only windowed step to signal; ``None`` for all steps that wait for the signal.
            id: id of the signal: for three hours a signal with the same key and id has no effect.
                Use an id if you may repeat a signal whose outcome you do not know.

        Returns:
            A `Receipt` in the local runner; on Spark it returns when the signal is durable.

        Raises:
            InvalidError: no step waits for this signal, or an argument is malformed.

        Example:
            ``run.signal("release", "red", [start_us, end_us], id="ticket-17")``
        """
        steps = listeners(self._topology, name, step)
        watermarks = [self.watermark(listening) for listening in steps]
        return self._signal(signal_rows(name, key, window, step=step, id_=id, watermarks=watermarks))

    @abstractmethod
    def _signal(self, rows: pa.Table) -> _Accepted:
        """Inject a checked signal, after the records injected so far."""

    # -- changes of the pipeline ------------------------------------------------------------

    def update(self, pipeline: EnginePipeline) -> PipelineUpdate:
        """Continue with a changed pipeline, without stopping: computations and sinks are added, removed and replaced.

        It has the effect of a restart with this pipeline. The pipeline is checked as a whole, as at a start, and
        refused with the same errors; then the old pipeline continues unchanged. Otherwise the change takes effect
        between two supersteps: the leases stay held, waiting input is kept, and one commit records the version from
        which the new pipeline runs (``millpond history --topology``).

        - A new computation gets the records from then on, and productions that wait to be delivered.
        - A computation that stays keeps its rows, whatever its code is now.
        - A computation that is removed is named in ``retire``, ``drop`` or ``renamed_from``, unless it has no rows.
          The rows of a retired computation can be read as before; it continues from them once an update, or a
          restart, brings it back.
        - Records that wait for a stream which is no longer injected are refused: their receipts raise.

        Args:
            pipeline: the changed pipeline, of the same name. It may share computations and sinks with the old one.

        Returns:
            The changes, the version from which they hold, and the time without supersteps.

        Raises:
            InvalidError: the pipeline cannot run, or its store does not allow the change; nothing has changed.
            UnavailableError: a service is away; nothing has changed while `is_active` is true.

        Example:
            ``run.update(pipeline_with_an_alert())``
        """
        topology = pipeline.check()
        if topology.name != self._topology.name:
            raise InvalidError(
                "an update keeps the pipeline's name, under which the store has its inputs and its time",
                pipeline=self._topology.name,
                given=topology.name,
            )
        return self._change(topology)

    @abstractmethod
    def _change(self, topology: Topology) -> PipelineUpdate:
        """Continue with a checked topology from the next superstep on."""

    # -- status ----------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The checked pipeline that runs."""
        return self._topology

    @property
    def is_active(self) -> bool:
        """True while the run takes input."""
        return self._lifecycle.is_active

    @abstractmethod
    def _status(self) -> RunStatus:
        """Return the state of the pipeline; any thread may call it."""

    def watermark(self, computation: str) -> EventTimeMicros:
        """Return the input low watermark of a computation after the last superstep, in microseconds.

        Raises:
            InvalidError: the pipeline has no such computation.
        """
        marks = self._status().watermarks
        if computation not in marks:
            raise InvalidError(
                f"the pipeline has no such computation{did_you_mean(computation, marks)}",
                pipeline=self._topology.name,
                computation=computation,
                computations=sorted(marks),
            )
        return marks[computation]

    def summary(self) -> RunSummary:
        """Return the counts so far, of this run and of the pipeline's whole life."""
        status = self._status()
        return RunSummary(
            supersteps=status.superstep - self._first.superstep,
            superstep=status.superstep,
            run=status.totals.minus(self._first.totals),
            totals=status.totals,
            watermark=status.low_watermark,
            elapsed_ms=(self._clock.monotonic_us() - self._started_us) / 1_000,
            error=None if self._lifecycle.error is None else str(self._lifecycle.error),
            ended=tuple(sorted(status.ended)),
            skipped=dict(self._skipped),
            times_in_1970=status.times_in_1970,
        )

    def note_skipped(self, stream: str, reason: str) -> None:
        """Record for `summary` why this run does not process an input, or a part of it."""
        self._skipped[stream] = reason
        self._progress.note(f"of the input {stream}: {reason}")

    def note_end(self) -> None:
        """Report the end of the input, and warn if a hold or a wall timer still keeps event time from passing."""
        held = {name: at for name, at in self._status().watermarks.items() if at != TIME_MAX_US}
        if held:
            _LOG.warning(
                "the input has ended, but a hold, or a timer that waits for the clock, keeps event time from passing:"
                " windows and event timers after these watermarks have not fired watermarks=`%s` ended=`%s`",
                held,
                list(self.summary().ended),
            )
            return
        self._progress.note(
            "the input has ended: windows are closed, timers in event time have fired, and what comes later is"
            f" refused (finish=False leaves it open): {', '.join(self.summary().ended)}"
        )

    def note_nothing(self) -> None:
        """Warn with the reasons if the run has read all its input and done nothing at all."""
        done = self.summary().run
        if not self._skipped or done.injected or done.records or done.timers or done.retried:
            return
        letters = self._coordinator.letters.retries.lying()
        _LOG.warning(
            "nothing was processed: %s; a new store processes them again%s",
            "; ".join(f"{stream}: {reason}" for stream, reason in sorted(self._skipped.items())),
            f"; {letters:,} dead letters of earlier runs were not retried: see `millpond dead-letters list`"
            if letters > 0
            else "",
        )

    # -- the end ---------------------------------------------------------------------------

    @abstractmethod
    def run_until_quiet(
        self, *, supersteps_max: int = 1_000_000, timeout: str | timedelta | None = None
    ) -> bool:
        """Work until nothing is due; return False if that takes too long."""

    def expect_bounded_input(self) -> None:
        """Leave silence unmeasured, and add failures up, because the input's times decide how it is cut."""
        self._coordinator.watermarks.follows_clock = False
        self._coordinator.letters.is_bounded = True

    def come_to_rest(self) -> None:
        """Do all the work that is due, or refuse a pipeline that never comes to rest."""
        if not self.run_until_quiet() and self._lifecycle.phase is Phase.RUNNING:
            raise InvalidError(
                "the pipeline does not come to rest: its records or timers make others without an end, so look for a "
                "cycle that never drops a record, or for timers that renew themselves",
                pipeline=self._topology.title,
                supersteps=self.summary().supersteps,
            )

    def pass_time(self, until: Mapping[str, EventTimeMicros]) -> None:
        """Let bounded streams' time pass in steps from timer to timer, where records return on a feedback.

        In one step all windows up to ``until`` would end at once, and what returns to them would be too late.
        """
        if not self._topology.has_feedback or not until:
            return
        ownership, last_at, steps = self._coordinator.ownership, self._coordinator.watermarks.newest_at, 0
        mark = EventTimeMicros(TIME_MIN_US)
        self.come_to_rest()
        while (at := ownership.next_event_timer(mark)) is not None and at <= min(until.values()):
            steps += at > last_at
            if steps > _STEPS_MAX:
                raise InvalidError(
                    "records of a cycle return long after the last event, so it would never be empty: let it drop a record "
                    "some time",
                    pipeline=self._topology.title,
                    steps=_STEPS_MAX,
                )
            for stream in until:
                self.advance_watermark(stream, at)
            mark = at
            self.come_to_rest()

    def finish_inputs(self, streams: Iterable[str] | None = None) -> None:
        """End injected streams, by default all, and run supersteps until nothing is left to do."""
        ended = list(self._topology.injectors if streams is None else streams)
        if self._topology.has_feedback:
            self._coordinator.watermarks.drains = True
            self.pass_time(dict.fromkeys(ended, EventTimeMicros(INSTANT_MAX_US)))
        for stream in ended:
            self.finish(stream)
        # A superstep journals the end, also if no timer is due.
        self._coordinator.watermarks.has_changed = True
        self.come_to_rest()

    def stop(self) -> RunSummary:
        """Finish the superstep under way, give the leases back and release all resources.

        Nothing is drained: undelivered productions are delivered after the next start, and uncommitted
        input is refused to its source. A superstep that waits for an unavailable service fails at
        once. A second call does nothing.

        Returns:
            Counts of this run and of the pipeline's whole life.

        Raises:
            MillpondError: the error of a sink that was writing the last superstep.
        """
        if not self._lifecycle.stop():
            return self.summary()
        # No superstep may begin once the leases are given back, so work ends first.
        self._end_work()
        summary = self.summary()
        try:
            self._close()
        finally:
            self._release()
        return summary

    def abandon(self) -> None:
        """Stop after a failure; log another error of stopping, so that it does not hide the failure."""
        first = sys.exception()
        try:
            self.stop()
        except Exception as failure:  # noqa: BLE001 - the caller raises the first failure
            if failure is not first:
                _LOG.warning("stopping after a failure failed too: %s", failure)

    @abstractmethod
    def _end_work(self) -> None:
        """Finish the superstep under way; begin no other."""

    @abstractmethod
    def _close(self) -> None:
        """Wait for the sinks and give the leases back."""
