"""
How far a long command has come: a bar in a terminal, elsewhere a line now and then.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from millpond.statestore.types import Clock

__all__ = ["EVERY_MS", "CountProgress"]

EVERY_MS: Final = 30_000.0
"""How often a line is printed where no terminal is listening, unless said otherwise."""


class CountProgress:
    """
    Counts what passed and failed of a known number of things; use it as a context manager.

    A terminal sees a bar that is gone at the end. A file, a pipe or a build server sees
    ``simulating: 240 of 2,000 seeds, 240 passed, 0 failed, 3.10 seeds/s`` every half minute, and
    nothing of what is over sooner.

    Args:
        verb: what is being done to them.
        noun: what they are, in the plural.
        total: how many there are.
        clock: paces the lines and measures the rate.
        console: where to; standard error by default.
        every_ms: least time between two lines.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> with CountProgress("simulating", "seeds", 2, SystemClock()) as progress:
        ...     progress.count(passed=True)
    """

    def __init__(
        self,
        verb: str,
        noun: str,
        total: int,
        clock: Clock,
        *,
        console: Console | None = None,
        every_ms: float = EVERY_MS,
    ) -> None:
        self._verb, self._noun, self._total = verb, noun, total
        self._clock = clock
        self._every_us = every_ms * 1_000
        self._console = console or Console(stderr=True, highlight=False)
        self._passed = self._failed = 0
        self._started_us = self._told_us = clock.monotonic_us()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        """
        Begin: time is measured from here.
        """
        self._started_us = self._told_us = self._clock.monotonic_us()
        if self._console.is_terminal:
            columns = (TextColumn(self._verb), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """
        Take the bar away.
        """
        if self._bar is not None:
            self._bar.stop()

    def count(self, *, passed: bool) -> None:
        """
        One more is over; shown at once in a terminal, else with the next line.
        """
        self._passed += passed
        self._failed += not passed
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            return
        now_us = self._clock.monotonic_us()
        if now_us - self._told_us >= self._every_us:
            self._told_us = now_us
            self._console.print(self._line(now_us), soft_wrap=True)

    def _line(self, now_us: int) -> str:
        done = self._passed + self._failed
        rate = done / max((now_us - self._started_us) / 1e6, 1e-6)
        return (
            f"{self._verb}: {done:,} of {self._total:,} {self._noun}, "
            f"{self._passed:,} passed, {self._failed:,} failed, {rate:.2f} {self._noun}/s"
        )
