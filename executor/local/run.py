"""A pipeline while it runs in this process: injected records in, durable effects out.

One thread works; any thread may inject. In stepping mode there is no thread, and supersteps run only in
`LocalRun.step`: tests and the simulation run the same code that way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta

import pyarrow as pa

from millpond.executor.inputs.changes import flat_rows
from millpond.executor.inputs.extraction import (
    InjectorNode,
    Rows,
    RowsLike,
    pieces,
    rows_from,
    rows_to_extract,
)
from millpond.executor.inputs.positions import LOCAL_SOURCE, after_the_end
from millpond.executor.local.engine import LocalBatch
from millpond.executor.local.intake import Arrival, OutsideRows, Receipt, UpdateEntry, check_fit
from millpond.executor.local.rows import DecodedSource, RowSource, source_of
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX, LocalWorker
from millpond.executor.pipeline.nodes import SIGNALS
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.lifecycle import Phase
from millpond.executor.run.run import PipelineUpdate, Run, WatermarkUpdate
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import RunStatus, SuperstepReport
from millpond.executor.time.clocks import PercentileTimes
from millpond.executor.watermark.authority import Conditions
from millpond.statestore.arguments import check_count
from millpond.statestore.durations import accepts_old_durations, timeout_ms
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, Clock, EventTimeMicros


class LocalRun(Run[Receipt]):
    """A running pipeline; created by `LocalRunner.start`, stopped by `stop` or at the end of a ``with``.

    Once the run has failed, every method that works raises its first error.
    """

    def __init__(self, worker: LocalWorker, clock: Clock, release: Callable[[], None]) -> None:
        topology, progress = worker.coordinator.topology, worker.progress
        coordinator, lifecycle, first = worker.coordinator, worker.lifecycle, worker.status
        super().__init__(topology, coordinator, lifecycle, clock, progress, first=first, release=release)
        self._worker = worker
        # One value, so that no thread reads the topology of one time and the checked streams of another.
        self._gate: tuple[Topology, dict[str, InjectorNode]] = self._topology, {}

    @accepts_old_durations
    def inject(self, stream: str, rows: RowsLike, *, timeout: str | timedelta | None = None) -> Receipt:
        """Inject rows into a stream; they are processed in the order of the calls.

        Waits while the intake is full. An unreadable row becomes a dead letter and does not
        affect the others.

        Args:
            stream: an injected stream.
            rows: a table (Arrow, pandas, anything with Arrow's C stream), or mappings of fields.
            timeout: longest wait for room; ``None`` waits as long as the run lives. In
                stepping mode no room can become free meanwhile, so it never waits.

        Returns:
            A receipt for the durability of the rows' effects. Until then a crash may lose
            them: inject them again, with ids if they must not count twice.

        Raises:
            InvalidError: the stream is not injected, an earlier run has ended it, or a column is missing
                or of the wrong type; mappings are refused if a field is missing in all of a stream's first ones.
            UnavailableError: the intake stayed full; the first part of a large table may be in it.
        """
        topology, checked = self._gate
        injector = checked.get(stream) or topology.injector(stream)
        given = _read_rows(injector, rows)
        if stream not in checked or isinstance(given, pa.Table):
            check_fit(topology, stream, given)
            if given and not isinstance(given, pa.Table):
                checked[stream] = injector
        self._refuse_if_ended(stream)
        # Pieces are committed one by one, so that a large table does not become one large superstep.
        cut = list(pieces(given, BUNDLE_RECORDS_MAX))
        wait_ms = timeout_ms(timeout)
        receipt = Receipt(len(cut))
        for count, piece in cut:
            arrival = Arrival(stream=stream, rows=piece, count=count, receipt=receipt, checked=topology)
            self._put(arrival, wait_ms)
        return receipt

    def inject_durably(self, stream: str, rows: RowsLike) -> None:
        """Inject rows and return once their effects are durable; in stepping mode it steps until then.

        Raises:
            InvalidError: the stream is not injected, or a column is missing or of the wrong type.
        """
        receipt = self.inject(stream, rows)
        while not self._worker.is_threaded and not receipt.is_durable:
            self.step()
        receipt.wait()

    def read_inputs(self, inputs: Mapping[str, RowsLike]) -> dict[str, Rows | RowSource]:
        """Return the bounded inputs of a caller, by stream."""
        given: dict[str, Rows | RowSource] = {}
        for stream, rows in inputs.items():
            injector = self._topology.injector(stream)
            if injector.payload is not None:
                # Piece by piece: decoded values take many times the memory of their payloads.
                source = rows if isinstance(rows, RowSource) else source_of(rows_from(rows))
                given[stream] = DecodedSource(source, injector)
            elif isinstance(rows, RowSource) and injector.change is None:
                given[stream] = rows
            else:
                given[stream] = self.read_rows(stream, rows)
        return given

    def read_rows(self, stream: str, rows: RowsLike) -> Rows:
        """Return a caller's rows in memory, with their payload decoded; changes of a table become flat rows."""
        return _read_rows(self._topology.injector(stream), rows)

    def check_rows(self, stream: str, rows: Rows) -> None:
        """Refuse rows that do not fit the stream's injector and consumers.

        A table is refused if it lacks a column. The first mappings of a stream are refused if a field is in none of
        them; other mappings without the field become dead letters.
        """
        check_fit(self._topology, stream, rows)

    def _put(self, entry: Arrival | UpdateEntry, wait_ms: float | None = None) -> None:
        if not self._lifecycle.is_active:
            self._lifecycle.check_phase(Phase.RUNNING)
        self._worker.intake.put(entry, timeout_ms=wait_ms if self._worker.is_threaded else 0)

    def _refuse_if_ended(self, stream: str) -> None:
        if stream in self._worker.coordinator.inputs.closed:
            raise after_the_end(stream)

    def consumed(self, stream: str) -> dict[str, int]:
        """Return the consumed positions of a stream's outside inputs, by source."""
        return self._worker.coordinator.inputs.consumed(stream)

    def consumed_offsets(self, stream: str) -> str | None:
        """Return the end of a bounded input's consumed rows in the source's own words, if it is known."""
        return self._worker.coordinator.inputs.offsets(stream, LOCAL_SOURCE)

    def arrived_at(self) -> EventTimeMicros:
        """Return the arrival of rows that come now, by the clock of the run."""
        return EventTimeMicros(self._clock.now_us())

    def consume(
        self,
        stream: str,
        rows: Rows,
        position: InputPosition,
        *,
        watermarks: Mapping[str, EventTimeMicros] | None = None,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> None:
        """Run one superstep on a piece of a bounded input; in stepping mode only.

        By stream, no row of this piece or a later one is before ``watermarks``, and none of a later piece before ``after``.
        """
        self._refuse_if_ended(stream)
        with self._worker.working() as coordinator:
            for injected, at in (watermarks or {}).items():
                coordinator.watermarks.advance(injected, at)
            outside = [OutsideRows(stream=stream, rows=rows)]
            self._worker.run(
                LocalBatch(outside=outside, position=position, is_bounded=True, after=after or {})
            )

    def begin_backfills(self, inputs: Mapping[str, Rows | RowSource] | None = None) -> None:
        """Read the missing history of computations; the run's next supersteps are on it."""
        self._worker.begin_backfills(inputs)

    @property
    def backfilled(self) -> Collection[str]:
        """The computations whose history is incomplete."""
        return self._worker.coordinator.backfills.pending

    def finish_backfills(self) -> None:
        """Run supersteps until each computation's history is complete; in stepping mode only."""
        while self._worker.backfill_step() is not None:
            pass

    def advance_percentiles(self, stream: str, watermarks: PercentileTimes) -> None:
        """Move percentile watermarks of a bounded input, with its next piece; in stepping mode only."""
        with self._worker.working() as coordinator:
            for percentile, at in watermarks.items():
                coordinator.watermarks.advance(stream, at, percentile=percentile)

    def observed(self, stream: str) -> int | None:
        """Return the number of rows of a bounded input that count towards its watermark, if it is known."""
        return self._worker.coordinator.inputs.input_rows(stream)

    def observe(self, stream: str, rows: Iterable[Rows], position: InputPosition) -> None:
        """Run one superstep in which consumed rows move their stream's watermark; in stepping mode only."""
        with self._worker.working():
            self._worker.run(LocalBatch(position=position, observed=(stream, rows)))

    def repeat(
        self,
        rows: Sequence[tuple[str, Rows]],
        conditions: Conditions,
        journaled: Mapping[str, int],
        *,
        position: InputPosition | None = None,
        after: Mapping[str, EventTimeMicros] | None = None,
    ) -> None:
        """Repeat a superstep of a past run; in stepping mode only, and for all further supersteps of this run.

        The run's clock is at the wall time of the ``conditions``; ``journaled`` are the watermarks of the inputs after
        the past superstep, by application id.
        """
        outside = [OutsideRows(stream=stream, rows=part) for stream, part in rows]
        is_bounded = position is not None
        with self._worker.working() as coordinator:
            coordinator.watermarks.impose(conditions, journaled)
            self._worker.run(
                LocalBatch(
                    outside=outside,
                    position=position,
                    is_bounded=is_bounded,
                    after=after or {} if is_bounded else None,
                )
            )

    def step(self) -> SuperstepReport | None:
        """Run one superstep, in stepping mode.

        Returns:
            The superstep's report; ``None`` if there was nothing to do.

        Raises:
            InvalidError: the run has a worker thread, or was stopped.
        """
        if self._worker.is_threaded:
            raise InvalidError("this run has a worker of its own: start it with stepping=True to step it")
        if not self._lifecycle.is_active:
            self._lifecycle.check_phase(Phase.RUNNING)
        return self._worker.step()

    @accepts_old_durations
    def run_until_quiet(
        self, *, supersteps_max: int = 1_000_000, timeout: str | timedelta | None = None
    ) -> bool:
        """Wait until all input and productions are processed, no timer is due and all sinks are written.

        In stepping mode this runs the supersteps; otherwise it waits for the worker.

        Args:
            supersteps_max: bound for stepping mode, as a cycle may never come to rest.
            timeout: longest wait for the worker; ``None`` waits as long as the run lives.

        Returns:
            True if the pipeline came to rest in time.
        """
        check_count("supersteps_max", supersteps_max)
        wait_ms = timeout_ms(timeout)
        if self._worker.is_threaded:
            return self._worker.intake.wait_until_idle(wait_ms)
        return any(self.step() is None for _ in range(supersteps_max))

    def _accept(self, update: WatermarkUpdate) -> Receipt:
        receipt = Receipt()
        self._put(UpdateEntry(update=update, receipt=receipt, checked=self._topology))
        return receipt

    def _signal(self, rows: pa.Table) -> Receipt:
        return self.inject(SIGNALS, rows)

    def _finish(self, stream: str) -> Receipt:
        return self._accept(WatermarkUpdate(stream=stream, at=TIME_MAX_US))

    def _change(self, topology: Topology) -> PipelineUpdate:
        def follow() -> None:
            self._topology, self._gate = topology, (topology, {})

        return self._worker.update(topology, then=follow)

    def _status(self) -> RunStatus:
        return self._worker.status

    def _end_work(self) -> None:
        self._worker.end()

    def _close(self) -> None:
        self._worker.close()


def _read_rows(injector: InjectorNode, rows: RowsLike) -> Rows:
    # Changes are put in order, so all of them are needed at once.
    given = rows.all_rows(BUNDLE_RECORDS_MAX) if isinstance(rows, RowSource) else rows_from(rows)
    if injector.payload is not None:
        given = rows_to_extract(injector, given)
    return given if injector.change is None else flat_rows(injector.change, given)
