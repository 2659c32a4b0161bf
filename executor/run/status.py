"""Where a pipeline stands, and what its source says about the watermark of a stream.

What a run has done, in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.commit import Totals
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.time.clocks import EXACT
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.executor.watermark.stream_time import MemberStatus
from millpond.statestore.types import EventTimeMicros, Superstep


def input_watermarks(coordinator: Coordinator) -> dict[str, EventTimeMicros]:
    """The input low watermark of each computation."""
    names = coordinator.topology.computations
    return {name: coordinator.watermarks.input_watermark(name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Where the pipeline stands; a value that any thread may read.

    Attributes:
        superstep: number of the last superstep committed.
        totals: counts over the pipeline's whole life.
        watermarks: input low watermark by computation.
        low_watermark: the lowest output watermark; everything before it is done.
        ended: the injected streams whose input has ended for good.
    """

    superstep: Superstep
    totals: Totals
    watermarks: Mapping[str, EventTimeMicros]
    low_watermark: EventTimeMicros
    ended: frozenset[str] = frozenset()

    @classmethod
    def of(cls, coordinator: Coordinator) -> Self:
        """The status now; only the thread that runs supersteps may ask."""
        return cls(
            superstep=coordinator.superstep,
            totals=coordinator.totals,
            watermarks=input_watermarks(coordinator),
            low_watermark=coordinator.watermarks.low_watermark(),
            ended=coordinator.watermarks.ended,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkUpdate:
    """What a source says about the time of one stream, or of one of its members.

    Attributes:
        stream: the injected stream.
        at: no record older than this will come; ``None`` promises nothing.
        status: whether it is idle, gone or expected; ``None`` leaves that as it is.
        member: the member; ``None`` for the whole stream.
        percentile: the percentage of the records that the promise is about.
    """

    stream: str
    at: EventTimeMicros | None = None
    status: MemberStatus | None = None
    member: str | None = None
    percentile: float = EXACT

    def check(self, topology: Topology) -> None:
        """Refuse an update of a stream, a member or a percentile that the pipeline does not have.

        Raises:
            InvalidError: names it.
        """
        topology.injector(self.stream).check_member(self.member)
        topology.percentile(self.percentile)

    def apply(self, watermarks: PipelineWatermarks) -> None:
        """Pass it on to the pipeline's watermarks; the next superstep makes it durable."""
        if self.at is not None:
            watermarks.advance(self.stream, self.at, self.member, self.percentile)
        if self.status is not None:
            watermarks.declare(self.stream, self.status, self.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Counts of one run, and of the pipeline's whole life (restarts included).

    Attributes:
        supersteps: how many this run committed.
        superstep: number of the last one ever committed.
        run: counts of this run.
        totals: counts of the pipeline's whole life.
        watermark: the lowest output watermark; everything before it is done.
        elapsed_ms: how long this run took.
        error: what has ended the run, in one line; ``None`` unless it failed.
        ended: the injected streams whose input has ended for good, in order of their names: what
            comes on them later is refused.
        skipped: why a bounded input, or a stream that was read up to now, brought nothing or not all
            that it has, by stream.
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
