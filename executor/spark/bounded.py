"""Bounded frames on Spark: large ones are cut by event time, and each piece is a superstep.

As for bounded input of the local runner, the least time of the remaining rows is the watermark, so that windows close
on the way and memory is bounded by open windows. A frame has no order, so a piece is a range of times. Each commit
records where its piece ends, with the number and digest of all rows before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.routing import before_sql, time_sql
from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.session import spark_calls, worker_calls
from millpond.executor.time.watermark_policies import ManualWatermark, Perfect
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros

PIECE_ROWS: Final = 500_000
MEASURED_SIZES: Final = range(32 << 20, 1 << 60)
"""Spark's estimates, in bytes, of frames that are measured. Smaller ones, and those of unknown size, are one piece."""

_END: Final = EventTimeMicros(TIME_MAX_US)


@dataclass(slots=True)
class FrameRest:
    """The rest of a frame.

    Attributes:
        time: SQL of a row's event time, null where it is unreadable; such rows belong to the first piece.
        oldest: the least time of each remaining piece.
        batch: the number of the next piece.
    """

    stream: str
    frame: DataFrame
    time: str
    oldest: list[EventTimeMicros]
    batch: int

    @property
    def oldest_at(self) -> EventTimeMicros:
        return self.oldest[0] if self.oldest else _END

    def consume(self, run: SparkRun, watermarks: Mapping[str, EventTimeMicros]) -> None:
        begin = self.oldest.pop(0)
        until = self.oldest[0] if self.oldest else None
        piece = self.frame if self.batch == 0 else self.frame.where(f"{self.time} >= {begin}")
        if until is not None:
            piece = piece.where(before_sql(self.time, until))
        run.consume_piece(self.stream, piece, self.batch, until, watermarks)
        self.batch += 1


def consume_frames(
    run: SparkRun, inputs: Mapping[str, DataFrame], *, finish: bool, in_steps: bool = False
) -> None:
    """Consume all bounded frames, and end their streams if they ``finish``. Of those in pieces the one furthest behind continues."""
    with ExitStack() as stack:
        rests = list[FrameRest]()
        for stream, frame in inputs.items():
            if frame.isStreaming:
                continue
            rest = _rest_of(run, stream, frame, stack, finish=finish)
            if rest is None:
                run.consume_bounded(stream, frame, finish=finish, in_steps=in_steps)
            else:
                rests.append(rest)
        while left := [rest for rest in rests if rest.oldest]:
            known = {rest.stream: rest.oldest_at for rest in rests} if finish else {}
            min(left, key=lambda rest: rest.oldest_at).consume(run, known)
        if finish:
            for rest in rests:
                run.finish(rest.stream)


def _rest_of(
    run: SparkRun, stream: str, frame: DataFrame, stack: ExitStack, *, finish: bool
) -> FrameRest | None:
    """Return what is left of a frame in pieces; ``None`` for a frame that is one piece, or was consumed."""
    place = run.frame_place(stream)
    with spark_calls(), worker_calls():
        time = time_sql(run.topology.injectors[stream], frame.schema)
        if place is None:
            if time is None or not finish or not _can_be_cut(run.topology, stream) or not _is_large(frame):
                return None
            kept = _kept(frame, stack)
            oldest = _cuts(kept, time)
            return FrameRest(stream, kept, time, oldest, 0) if len(oldest) > 1 else None
        if "until" not in place:
            return None
        if time is None:
            raise InvalidError(
                "an earlier run has consumed a part of this frame by the times of a column: give at= the column again, or "
                "begin with a new store",
                input=stream,
            )
        run.check_frame(stream, frame)
        begin = EventTimeMicros(place["until"])
        kept = _kept(frame.where(f"{time} >= {begin}"), stack)
        return FrameRest(stream, kept, time, _cuts(kept, time) or [begin], place["batch"] + 1)


def _kept(frame: DataFrame, stack: ExitStack) -> DataFrame:
    # Otherwise each piece would read the whole frame, which may be computed, again.
    kept = frame.persist(StorageLevel.DISK_ONLY)
    stack.callback(kept.unpersist)
    return kept


def _can_be_cut(topology: Topology, stream: str) -> bool:
    node = topology.injectors[stream]
    # Times that are clamped to that of arrival are not in the order of the column.
    follows = node.ahead is None and not isinstance(node.watermark, Perfect | ManualWatermark)
    is_simple = not (topology.percentiles or topology.has_feedback or topology.has_unbounded_horizon)
    return follows and is_simple and bool(topology.consumers_of(stream))


def _is_large(frame: DataFrame) -> bool:
    plan: Any = frame._jdf.queryExecution().optimizedPlan()  # noqa: SLF001
    # Pieces of a frame that differs each time it is computed could lose rows.
    return bool(plan.deterministic()) and int(str(plan.stats().sizeInBytes())) in MEASURED_SIZES


def _cuts(frame: DataFrame, time: str) -> list[EventTimeMicros]:
    """Return the least time of each piece."""
    times = frame.selectExpr(f"{time} AS at")
    (measured,) = times.selectExpr("count(1) AS rows", "min(at) AS oldest").collect()
    if measured.oldest is None:
        return []
    count = -(-measured.rows // PIECE_ROWS)
    shares = ", ".join(f"{number / count}D" for number in range(1, count))
    found = {measured.oldest}
    if shares:
        (bounds,) = times.selectExpr(f"percentile_approx(at, array({shares})) AS at").collect()
        found.update(bounds.at)
    return [EventTimeMicros(at) for at in sorted(found)]
