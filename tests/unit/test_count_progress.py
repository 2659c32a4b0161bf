"""
How far a long command has come, as a terminal and as a file see it.
"""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from millpond.testing.count_progress import CountProgress
from millpond.testing.determinism import ManualClock


def told(*, terminal: bool, duration_ms: float, total: int = 5) -> str:
    """What is printed by ``total`` things of a duration each, the second of which fails."""
    clock, out = ManualClock(), StringIO()
    console = Console(file=out, force_terminal=terminal, width=40, highlight=False)
    with CountProgress("simulating", "seeds", total, clock, console=console) as progress:
        for number in range(total):
            clock.advance_ms(duration_ms)
            progress.count(passed=number != 1)
    return out.getvalue()


def test_a_file_sees_a_line_every_half_minute() -> None:
    """Off a terminal there is one whole line in thirty seconds: how many, how they ended, how fast."""
    assert told(terminal=False, duration_ms=15_000).splitlines() == [
        "simulating: 2 of 5 seeds, 1 passed, 1 failed, 0.07 seeds/s",
        "simulating: 4 of 5 seeds, 3 passed, 1 failed, 0.07 seeds/s",
    ]


def test_what_is_soon_over_says_nothing() -> None:
    """What takes less than half a minute prints no line off a terminal."""
    assert told(terminal=False, duration_ms=1_000) == ""


def test_a_terminal_sees_a_bar() -> None:
    """In a terminal there is a bar, and no line."""
    shown = told(terminal=True, duration_ms=15_000)

    assert "5/5" in shown
    assert "passed" not in shown
