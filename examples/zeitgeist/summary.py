"""The run in numbers, as ``summary.json`` has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import millpond as mp
from examples.zeitgeist.results import Results, days_of

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END_OF_TIME_US: Final = 2**63 - 1
_DAYS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a finished run.

    Attributes:
        records: flights consumed, each once, by this run and the runs that it resumed.
        supersteps: commits, likewise.
        records_per_second: flights by this run's time from the first superstep to the last.
        late_records: flights that were too late to be counted in their hour.
        behind_watermark: records behind the low watermark, a number that depends on the cut into batches.
        alerts: spikes and dips, each counted once.
        strongest_days: the days with the strongest alerts, by their dates in New York.
        final_watermark: ``+inf`` once the input has ended, else the time up to which everything is processed.
        peak_memory_mib: an upper bound for all processes together.
        peak_memory_mib_by_program: the same, by the name of the program.
        elapsed_seconds: this run's time, without the start of Spark.
    """

    records: int
    supersteps: int
    records_per_second: float
    late_records: int
    behind_watermark: int
    alerts: int
    strongest_days: Sequence[Mapping[str, Any]]
    final_watermark: str
    peak_memory_mib: int
    peak_memory_mib_by_program: Mapping[str, int]
    elapsed_seconds: float

    @classmethod
    def of(cls, run: mp.RunSummary, results: Results, *, late: int, memory_mib: Mapping[str, int]) -> Summary:
        """The summary of a run that has just ended."""
        seconds = run.elapsed_ms / 1_000
        return cls(
            records=run.totals.injected,
            supersteps=run.superstep,
            records_per_second=round(run.run.injected / seconds, 1),
            late_records=late,
            behind_watermark=run.totals.late,
            alerts=len(results.final_alerts),
            strongest_days=_strongest_days(results),
            final_watermark=_time(run.watermark),
            peak_memory_mib=sum(memory_mib.values()),
            peak_memory_mib_by_program=memory_mib,
            elapsed_seconds=round(seconds, 1),
        )

    @classmethod
    def read(cls, path: Path) -> Summary:
        """The summary of an earlier run."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(f"{json.dumps(asdict(self), indent=2)}\n", encoding="utf-8")
        unfinished.replace(path)


def _strongest_days(results: Results) -> list[dict[str, Any]]:
    days = days_of(results).head(_DAYS)
    return [
        {
            "day": f"{day:%Y-%m-%d}",
            "strength": round(float(row.strength), 2),
            "alerts": int(row.spikes + row.dips),
            "cancelled": int(row.cancelled),
        }
        for day, row in days.iterrows()
    ]


def _time(watermark_us: int) -> str:
    if watermark_us == _END_OF_TIME_US:
        return "+inf"
    return (_EPOCH + timedelta(microseconds=watermark_us)).isoformat()
