"""The report of a superstep: its counts, its times, and the pipeline's progress after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from millpond.executor.superstep.plan import SuperstepPlan
from millpond.executor.superstep.totals import Totals
from millpond.statestore.types import EventTimeMicros, Superstep, TableVersion, WallTimeMicros

_SECONDS_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperstepReport:
    """The figures of a superstep.

    Attributes:
        superstep: its number.
        version: the table version that it committed.
        records: records processed, summed over all computations.
        records_per_second: ``records`` over the superstep's duration.
        late: records that were behind the watermark of their computation.
        dropped: records that were left out because they were late.
        duplicates: outside records discarded because their id had been consumed.
        dead_letters: records and timers that could not be processed.
        timers: timers fired.
        productions: records produced.
        watermark_us: the pipeline's low watermark after the commit.
        lag_ms: wall time less the watermark.
        commit_ms: how long the commit took.
        duration_ms: how long the superstep took, including the commit.
        pending: productions that wait for the next superstep.
        slots: tasks that ran on Spark, of those that had work.
        slots_at_home: how many of them ran in the process that has their soft state, or ran for the first time.
        read_bytes: how much they read of row files.
    """

    superstep: Superstep
    version: TableVersion
    records: int
    records_per_second: float
    late: int
    dropped: int
    duplicates: int
    dead_letters: int
    timers: int
    productions: int
    watermark_us: EventTimeMicros
    lag_ms: float
    commit_ms: float
    duration_ms: float
    pending: int
    slots: int = 0
    slots_at_home: int = 0
    read_bytes: int = 0

    def after(self, earlier: SuperstepReport | None) -> SuperstepReport:
        """Both supersteps as one: counts and durations are added, positions are those of this, the later one."""
        if earlier is None:
            return self
        records = earlier.records + self.records
        duration_ms = earlier.duration_ms + self.duration_ms
        return replace(
            self,
            records=records,
            records_per_second=records / max(duration_ms / 1_000, _SECONDS_MIN),
            late=earlier.late + self.late,
            dropped=earlier.dropped + self.dropped,
            duplicates=earlier.duplicates + self.duplicates,
            dead_letters=earlier.dead_letters + self.dead_letters,
            timers=earlier.timers + self.timers,
            productions=earlier.productions + self.productions,
            commit_ms=earlier.commit_ms + self.commit_ms,
            duration_ms=duration_ms,
            slots=earlier.slots + self.slots,
            slots_at_home=earlier.slots_at_home + self.slots_at_home,
            read_bytes=earlier.read_bytes + self.read_bytes,
        )


def report_of(
    plan: SuperstepPlan,
    version: TableVersion,
    counts: Totals,
    *,
    now_us: WallTimeMicros,
    elapsed_us: int,
    watermark: EventTimeMicros,
    commit_ms: float,
    pending: int,
) -> SuperstepReport:
    """The report of a superstep that has just been committed."""
    return SuperstepReport(
        superstep=plan.superstep,
        version=version,
        records=counts.records,
        records_per_second=counts.records / max(elapsed_us / 1_000_000, _SECONDS_MIN),
        late=counts.late,
        dropped=counts.dropped,
        duplicates=counts.duplicates,
        dead_letters=counts.dead_letters,
        timers=counts.timers,
        productions=counts.productions,
        watermark_us=watermark,
        lag_ms=(now_us - watermark) / 1_000,
        commit_ms=commit_ms,
        duration_ms=elapsed_us / 1_000,
        pending=pending,
    )
