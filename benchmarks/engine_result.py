"""
The result of one engine under one load, from Spark's own account of each micro-batch.

Both engines run as a Spark streaming query, so both are timed by the same clock at the same place:
``triggerExecution`` of the query's progress, from the moment Spark looks for new files to the moment the
batch is in the checkpoint. Nothing that either engine does for a batch is outside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.batches import Load

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["BatchTime", "EngineResult", "batch_times", "percentile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """
    One micro-batch.

    Attributes:
        rows_read: what Spark has read for it; more than its records where an engine looks at them twice.
        batch_ms: from looking for input to the checkpoint.
        parts_ms: Spark's split of that time, by its names.
    """

    rows_read: int
    batch_ms: float
    parts_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """
    All micro-batches of one engine under one load.
    """

    engine: str
    load: Load
    times: tuple[BatchTime, ...]

    @property
    def measured(self) -> tuple[BatchTime, ...]:
        """
        The micro-batches after the warm-up.
        """
        return self.times[self.load.warm_up :]

    @property
    def records_per_second(self) -> float:
        """
        Measured records by measured time: the mean, so a slow batch counts.
        """
        measured = self.measured
        return len(measured) * self.load.rows_per_batch / sum(time.batch_ms for time in measured) * 1_000

    def to_json(self) -> dict[str, Any]:
        """
        With every raw batch time, warm-up included.
        """
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


def batch_times(query: StreamingQuery) -> tuple[BatchTime, ...]:
    """
    The micro-batches of an ended query that had input, in order.

    Spark keeps the progress of the last 100 batches, so a load must have no more.
    """
    return tuple(
        BatchTime(
            rows_read=progress["numInputRows"],
            batch_ms=float(progress["durationMs"]["triggerExecution"]),
            parts_ms=progress["durationMs"],
        )
        for progress in map(_as_mapping, query.recentProgress)
        if progress["numInputRows"] > 0
    )


def percentile(values: list[float], share: float) -> float:
    """
    The smallest value that at least this share of the values do not exceed.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _as_mapping(progress: Any) -> Mapping[str, Any]:
    return progress if isinstance(progress, Mapping) else progress.jsonValue()
