"""Progress as log lines and as a live line in a terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from millpond.executor.run.progress import (
    Progress,
    ProgressLine,
    ProgressLog,
    duration_text,
    line_text,
    watermark_text,
)
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, Superstep, TableVersion
from millpond.testing.fixtures.determinism import ManualClock

FEBRUARY_9 = 1_360_396_800_000_000


def _terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=160, legacy_windows=False, _environ={"TERM": "xterm"}
    )


def _pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, _environ={})


def _dumb_terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "dumb"})


def _notebook() -> Console:
    return Console(file=io.StringIO(), force_jupyter=True, width=160, _environ={})


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _report(superstep: int = 1, *, records: int = 100, late: int = 0, **figures: int) -> SuperstepReport:
    return SuperstepReport(
        superstep=Superstep(superstep),
        version=TableVersion(superstep + 10),
        records=records,
        records_per_second=2_000.4,
        late=late,
        dropped=figures.get("dropped", 0),
        duplicates=figures.get("duplicates", 0),
        dead_letters=figures.get("dead_letters", 0),
        timers=3,
        productions=4,
        watermark_us=EventTimeMicros(figures.get("watermark_us", FEBRUARY_9)),
        lag_ms=1_500.4,
        commit_ms=2.345,
        duration_ms=50.0,
        pending=figures.get("pending", 0),
    )


@contextmanager
def _bare_logging() -> Iterator[None]:
    """Hide pytest's handlers, as in a program without logging."""
    tree = logging.getLogger("millpond")
    tree.propagate = False
    try:
        yield
    finally:
        tree.propagate = True
        tree.setLevel(logging.NOTSET)


def _json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_superstep_is_one_json_line_outside_a_terminal() -> None:
    """The program has not set up logging."""
    console = _pipe()
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(FEBRUARY_9), console=console)
        progress.report(_report(1, late=7))
        progress.report(_report(2))
        progress.close()

    first, second = _json_lines(_written(console))
    assert second["superstep"] == 2
    assert first == {
        "event": "superstep",
        "timestamp": "2013-02-09T08:00:00.000+00:00",
        "pipeline": "zeitgeist",
        "superstep": 1,
        "supersteps": 1,
        "version": 11,
        "records": 100,
        "records_per_second": 2000,
        "late": 7,
        "dropped": 0,
        "duplicates": 0,
        "dead_letters": 0,
        "timers": 3,
        "productions": 4,
        "pending": 0,
        "watermark": "2013-02-09T08:00:00+00:00",
        "lag_ms": 1500,
        "commit_ms": 2.3,
        "duration_ms": 50.0,
    }


def test_own_handler_is_removed_at_the_end_of_the_run() -> None:
    logger = logging.getLogger("millpond.progress.passing")
    with _bare_logging():
        progress = Progress("passing", clock=ManualClock(), console=_pipe())
        during = list(logger.handlers)
        progress.close()

    assert len(during) == 1
    assert logger.handlers == []
    assert logger.level == logging.NOTSET


def test_lines_go_to_handlers_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is then written to the stream."""
    console = _pipe()
    with caplog.at_level(logging.INFO, logger="millpond"):
        progress = Progress("zeitgeist", clock=ManualClock(), console=console)
        progress.report(_report())
        progress.close()

    assert [record.name for record in caplog.records] == ["millpond.progress.zeitgeist"]
    assert _written(console) == ""


def test_level_of_the_logging_tree_silences_the_lines() -> None:
    console = _pipe()
    with _bare_logging():
        logging.getLogger("millpond").setLevel(logging.WARNING)
        progress = Progress("zeitgeist", clock=ManualClock(), console=console)
        progress.report(_report())
        progress.close()

    assert _written(console) == ""


def test_disabled_progress_is_silent() -> None:
    console = _terminal()
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(), enabled=False, console=console)
        progress.report(_report())
        progress.close()

    assert _written(console) == ""


def test_supersteps_between_two_lines_are_added_up() -> None:
    """No count may be lost, including those after the last line."""
    stream, clock = io.StringIO(), ManualClock()
    with _bare_logging():
        log = ProgressLog("fast", clock, every_ms=1_000, fallback=stream)
        for superstep in range(1, 26):
            log.report(_report(superstep, records=10))
            clock.advance_ms(100)
        log.close()

    lines = _json_lines(stream.getvalue())
    assert [line["supersteps"] for line in lines] == [1, 10, 10, 4]
    assert [line["records"] for line in lines] == [10, 100, 100, 40]
    assert lines[-1]["superstep"] == 25


def test_closed_progress_ignores_reports_and_closing() -> None:
    console = _pipe()
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(), console=console)
        progress.close()
        progress.report(_report())
        progress.close()

    assert _written(console) == ""


def test_terminal_gets_a_live_line_and_no_log_lines() -> None:
    """The line's last state stays when the run ends."""
    console = _terminal()
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(), console=console)
        progress.report(_report(1))
        progress.report(_report(2))
        progress.close()

    drawn = _written(console)
    assert "superstep 1 · 100 records" in drawn
    assert drawn.rindex("superstep 2 · 200 records · 2,000/s") > drawn.rindex("superstep 1 ")
    assert "{" not in drawn


@pytest.mark.parametrize("console", [_dumb_terminal(), _notebook()])
def test_console_that_cannot_redraw_gets_the_last_line_alone(console: Console) -> None:
    """A terminal of an editor, or a notebook: a person reads it, so there is no JSON either."""
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(), console=console)
        progress.report(_report(1))
        progress.report(_report(2))
        during = _written(console)
        progress.close()

    assert during == ""
    assert "{" not in _written(console)
    assert _written(console).startswith("zeitgeist  superstep 2 · 200 records")


@pytest.mark.parametrize("console", [_terminal(), _dumb_terminal(), _notebook(), _pipe()])
def test_json_is_written_everywhere_if_asked_for(console: Console) -> None:
    with _bare_logging():
        progress = Progress("zeitgeist", clock=ManualClock(), enabled="json", console=console)
        progress.report(_report(1))
        progress.close()

    (line,) = _json_lines(_written(console))
    assert line["superstep"] == 1


def test_log_lines_in_a_terminal_are_key_value_pairs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="millpond"):
        progress = Progress("zeitgeist", clock=ManualClock(), console=_terminal())
        progress.report(_report())
        progress.close()

    assert "event=superstep" in caplog.messages[0]
    assert "pipeline=zeitgeist superstep=1" in caplog.messages[0]


def test_live_line_is_drawn_ten_times_a_second_at_most() -> None:
    console, clock = _terminal(), ManualClock()
    line = ProgressLine("fast", clock, console)
    for superstep in range(1_000):
        line.report(_report(superstep))
        clock.advance_ms(1)

    drawn = _written(console).count("superstep")
    line.close()
    assert drawn <= 10


def test_live_line_hides_counts_of_zero() -> None:
    """Late records, duplicates and dead letters are hidden while there are none."""
    quiet, eventful = _report(), _report(late=1_234, duplicates=2, dead_letters=3, pending=4)

    assert line_text("p", quiet, quiet) == (
        "p  superstep 1 · 100 records · 2,000/s · watermark 2013-02-09 08:00 (lag 1.5 s) · commit 2.3 ms"
    )
    assert line_text("p", eventful, eventful).endswith(
        "1,234 late · 2 duplicates · 3 dead letters · 4 pending"
    )


@pytest.mark.parametrize(
    ("watermark_us", "in_log", "in_line"),
    [
        (TIME_MIN_US, "unknown", "watermark unknown ·"),
        (TIME_MAX_US, "end", "watermark at the end ·"),
        (TIME_MAX_US - 1, "9223372036854775806 us", "watermark 9223372036854775806 us (lag"),
    ],
)
def test_watermarks_beyond_the_calendar_are_shown(
    watermark_us: EventTimeMicros, in_log: str, in_line: str
) -> None:
    """The ends of time have names; other times beyond the calendar are numbers."""
    report = _report(watermark_us=watermark_us)

    assert watermark_text(watermark_us) == in_log
    assert in_line in line_text("p", report, report)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.0 s"),
        (90_000, "1.5 min"),
        (5_400_000, "1.5 h"),
        (4e11, "4,629.6 d"),
    ],
)
def test_durations_are_shown_in_their_largest_unit(duration_ms: float, text: str) -> None:
    assert duration_text(duration_ms) == text
