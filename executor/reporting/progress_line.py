"""Supersteps as one line that stays in place in a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros

_REFRESH_US: Final = 100_000
_SEPARATOR: Final = " · "


class ProgressLine:
    """The live line of one run; it appears with the first superstep.

    Args:
        pipeline: the pipeline's name.
        clock: paces the line: ten times a second is enough for the eye.
        console: the terminal.
    """

    def __init__(self, pipeline: str, clock: Clock, console: Console) -> None:
        self._pipeline = pipeline
        self._clock = clock
        # Standard output may be a file: what the program prints there must not land in the terminal.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
        self._newest: SuperstepReport | None = None
        self._sum: SuperstepReport | None = None
        self._shown_us: int | None = None

    def report(self, report: SuperstepReport) -> None:
        """Show a superstep, if the last one has been seen for long enough."""
        self._newest = report
        self._sum = report.after(self._sum)
        now_us = self._clock.monotonic_us()
        if self._shown_us is None:
            self._live.start()
        if self._shown_us is None or now_us - self._shown_us >= _REFRESH_US:
            self._shown_us = now_us
            self._show()

    def note(self, text: str) -> None:
        """Print a line of its own above the live line."""
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        """Show the newest superstep once more and leave the line standing."""
        if self._shown_us is not None:
            self._show()
            self._live.stop()

    def _show(self) -> None:
        if self._newest is not None and self._sum is not None:
            text = line_text(self._pipeline, self._newest, self._sum)
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def line_text(pipeline: str, newest: SuperstepReport, run: SuperstepReport) -> str:
    """The line: where the newest superstep stands, and what the run has counted so far.

    Args:
        pipeline: the pipeline's name.
        newest: the newest superstep.
        run: all supersteps of the run added up.
    """
    parts = [
        f"{pipeline}  superstep {newest.superstep:,}",
        f"{run.records:,} records",
        f"{newest.records_per_second:,.0f}/s",
        f"watermark {_watermark_text(newest)}",
        f"commit {newest.commit_ms:,.1f} ms",
    ]
    exceptions = {
        "late": run.late,
        "duplicates": run.duplicates,
        "dead letters": run.dead_letters,
        "pending": newest.pending,
    }
    parts += [f"{count:,} {name}" for name, count in exceptions.items() if count]
    return _SEPARATOR.join(parts)


def _watermark_text(report: SuperstepReport) -> str:
    if report.watermark_us == TIME_MIN_US:
        return "unknown"
    if report.watermark_us == TIME_MAX_US:
        return "at the end"
    return f"{_minute_text(report.watermark_us)} (lag {duration_text(report.lag_ms)})"


def _minute_text(moment_us: EventTimeMicros) -> str:
    try:
        return f"{datetime.fromtimestamp(moment_us // 1_000_000, UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):  # beyond the years that datetime knows
        return f"{moment_us} us"


def duration_text(duration_ms: float) -> str:
    """A duration in the largest unit that leaves a number of one or more.

    Example:
        >>> duration_text(90_000)
        '1.5 min'
    """
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if abs(duration_ms) >= unit_ms:
            return f"{duration_ms / unit_ms:,.1f} {unit}"
    return f"{duration_ms:,.0f} ms"
