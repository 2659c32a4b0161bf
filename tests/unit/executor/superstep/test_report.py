"""Sums of supersteps' reports."""

from __future__ import annotations

from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import EventTimeMicros, Superstep, TableVersion


def _report(superstep: int, **figures: float) -> SuperstepReport:
    counts = dict.fromkeys(
        ("late", "dropped", "duplicates", "dead_letters", "timers", "productions", "pending"), 0
    )
    times = {"records": 100, "records_per_second": 1.0, "lag_ms": 5.0, "commit_ms": 2.0, "duration_ms": 500.0}
    return SuperstepReport(
        superstep=Superstep(superstep),
        version=TableVersion(superstep + 10),
        watermark_us=EventTimeMicros(superstep * 1_000_000),
        **{**counts, **times, **figures},  # type: ignore[arg-type]
    )


def test_counts_and_durations_add_up() -> None:
    both = _report(2, late=3, timers=1).after(_report(1, late=4, dead_letters=2))

    assert (both.records, both.late, both.timers, both.dead_letters) == (200, 7, 1, 2)
    assert (both.commit_ms, both.duration_ms) == (4.0, 1_000.0)
    assert both.records_per_second == 200.0


def test_positions_come_from_the_later_superstep() -> None:
    """Number, version, watermark, lag and pending productions are facts of a moment."""
    both = _report(2, lag_ms=7.0, pending=9).after(_report(1, lag_ms=8.0, pending=1))

    assert (both.superstep, both.version, both.watermark_us) == (2, 12, 2_000_000)
    assert (both.lag_ms, both.pending) == (7.0, 9)


def test_report_after_none_is_itself() -> None:
    report = _report(1)

    assert report.after(None) is report


def test_supersteps_of_zero_duration_have_a_rate() -> None:
    both = _report(2, duration_ms=0.0).after(_report(1, duration_ms=0.0))

    assert both.records_per_second > 0
