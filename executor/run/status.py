"""The state of a pipeline, the counts of a run, and a source's updates of watermarks."""

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
    """Return the input low watermark of each computation."""
    names = coordinator.topology.computations
    return {name: coordinator.watermarks.input_watermark(name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a pipeline after a superstep; a value that any thread may read.

    Attributes:
        superstep: number of the last committed superstep.
        totals: counts over the pipeline's whole life.
        watermarks: input low watermark by computation.
        low_watermark: the lowest output watermark; everything before it is done.
        ended: injected streams whose input has ended for good.
    """

    superstep: Superstep
    totals: Totals
    watermarks: Mapping[str, EventTimeMicros]
    low_watermark: EventTimeMicros
    ended: frozenset[str] = frozenset()

    @classmethod
    def of(cls, coordinator: Coordinator) -> Self:
        """Return the present status; only the thread that runs supersteps may call it."""
        return cls(
            superstep=coordinator.superstep,
            totals=coordinator.totals,
            watermarks=input_watermarks(coordinator),
            low_watermark=coordinator.watermarks.low_watermark(),
            ended=coordinator.watermarks.ended,
        )


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
