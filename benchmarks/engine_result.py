"""The result of one engine under one load, from Spark's progress reports of the micro-batches.

Both engines run as a Spark streaming query, so both are timed by the same clock over the same span:
``triggerExecution`` of the query's progress, from Spark's search for new files until the batch is in
the checkpoint. All work of either engine for a batch lies within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.batches import Load

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """One micro-batch.

    Attributes:
        rows_read: rows that Spark read; more than its records if an engine reads them twice.
        batch_ms: from the search for input to the checkpoint.
        parts_ms: Spark's breakdown of that time.
    """

    rows_read: int
    batch_ms: float
    parts_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """All micro-batches of one engine under one load."""

    engine: str
    load: Load
    times: tuple[BatchTime, ...]

    @property
    def measured(self) -> tuple[BatchTime, ...]:
        """The micro-batches after the warm-up."""
        return self.times[self.load.warm_up :]

    @property
    def records_per_second(self) -> float:
        """Measured records by measured time: the mean, so a slow batch counts."""
        measured = self.measured
        return len(measured) * self.load.rows_per_batch / sum(time.batch_ms for time in measured) * 1_000

    def to_json(self) -> dict[str, Any]:
        """The result with every batch time, warm-up included."""
        return {
            "engine": self.engine,
            "rows_per_batch": self.load.rows_per_batch,
            "keys_per_batch": self.load.keys_per_batch,
            "records_per_second": round(self.records_per_second, 1),
            "batches": len(self.measured),
            "warm_up_batches": self.load.warm_up,
            "batch_ms": [time.batch_ms for time in self.times],
            "parts_ms": [dict(time.parts_ms) for time in self.times],
        }


def batch_times(query: StreamingQuery, *, are_read: bool = True) -> tuple[BatchTime, ...]:
    """The micro-batches of an ended query that had input, in order.

    Spark counts no input of a batch that nothing reads: then ``are_read`` must be false. Spark keeps the progress of the
    last 100 batches, so a load must have no more.
    """
    return tuple(
        BatchTime(
            rows_read=progress["numInputRows"],
            batch_ms=float(progress["durationMs"]["triggerExecution"]),
            parts_ms=progress["durationMs"],
        )
        for progress in map(as_mapping, query.recentProgress)
        if (progress["numInputRows"] > 0 if are_read else "addBatch" in progress["durationMs"])
    )


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def as_mapping(progress: Any) -> Mapping[str, Any]:
    """The progress of a micro-batch, which some versions of Spark give as an object."""
    return progress if isinstance(progress, Mapping) else progress.jsonValue()
