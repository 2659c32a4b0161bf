"""What a run has done, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond.executor.superstep.totals import Totals
from millpond.statestore.types import EventTimeMicros


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
