"""Where a pipeline stands, and what its source says about the watermark of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from millpond.executor.event_time.clocks import EXACT
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.totals import Totals
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
