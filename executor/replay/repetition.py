"""Repetition: the supersteps of a past run once more, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from millpond.executor.local.row_source import RowSource
from millpond.executor.local.run import LocalRun
from millpond.executor.pipeline.extract_rows import Rows
from millpond.executor.pipeline.positions import LOCAL_SOURCE, percentile_watermark_app_id, superstep_of
from millpond.executor.replay.clock import ReplayClock
from millpond.executor.replay.input_part import InputCursor
from millpond.executor.replay.recorded import RecordedSuperstep, consumed_rows
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import EventTimeMicros


def repeat_supersteps(
    run: LocalRun,
    supersteps: Sequence[RecordedSuperstep],
    parts: Mapping[str, RowSource],
    reached: Snapshot,
    wall: ReplayClock,
    told: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Repeat the supersteps of a past run that a fork does not have yet.

    Args:
        run: a run on the fork, in stepping mode.
        supersteps: those of the past run.
        parts: by injected stream, its rows; what is taken of others is left out.
        reached: the fork now.
        wall: the clock of the run.
        told: called after each superstep, with how many are done and how many there are.

    Raises:
        MillpondError: the error that ended the run.
    """
    pipeline = run.topology.name
    done = superstep_of(reached.txns, pipeline)
    cursors = {
        stream: InputCursor(part, consumed_rows(reached, pipeline, stream)) for stream, part in parts.items()
    }
    consumed = {stream: run.consumed(stream).get(LOCAL_SOURCE, 0) for stream in cursors}
    for number, superstep in enumerate(supersteps, start=1):
        if superstep.superstep > done:
            wall.set(superstep.conditions.wall_time)
            _repeat_one(run, superstep, cursors, consumed)
        told(number, len(supersteps))


def _repeat_one(
    run: LocalRun,
    superstep: RecordedSuperstep,
    cursors: Mapping[str, InputCursor],
    consumed: dict[str, int],
) -> None:
    rows: list[tuple[str, Rows]] = []
    for name, count in superstep.taken:
        if name in cursors:
            rows += [(name, part) for part in cursors[name].take(count)]
    stream, position = superstep.stream, None
    after: dict[str, EventTimeMicros] = {}
    if stream is not None and stream in cursors:
        count = superstep.consumed - consumed[stream]
        rows += [(stream, part) for part in cursors[stream].take(count)]
        consumed[stream] = superstep.consumed
        position = InputPosition(
            stream=stream, source=LOCAL_SOURCE, batch=superstep.consumed, rows=superstep.observed
        )
        promised = superstep.journaled.get(percentile_watermark_app_id(run.topology.name, "injector", stream))
        if promised is not None and superstep.observed is None and run.topology.sorts:
            after = {stream: EventTimeMicros(promised)}
    run.repeat(rows, superstep.conditions, superstep.journaled, position=position, after=after)
