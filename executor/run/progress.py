"""Progress of a run: a log line per superstep, and a live line in a terminal.

The log lines go to the logger ``millpond.progress.<pipeline>`` of the standard library, so they are silenced,
redirected and filtered as any other. A run that a person watches, in a terminal or a notebook, shows its line and no
log lines; a run elsewhere, in a program that has not set up logging, writes them to standard error. Only sums are kept.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import IO, Any, Final, Literal

import orjson
import structlog
from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros
from millpond.statestore.visible import visible_value

_REFRESH_US: Final = 100_000
_SEPARATOR: Final = " · "


class ProgressLine:
    """The live line of one run, refreshed ten times a second; it appears with the first superstep.

    On a console that cannot redraw a line it appears once, at the end of the run.
    """

    def __init__(self, pipeline: str, clock: Clock, console: Console) -> None:
        self._pipeline = pipeline
        self._clock = clock
        # Standard output may be a file: the program's own output must not land in the terminal.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
        self._newest: SuperstepReport | None = None
        self._sum: SuperstepReport | None = None
        self._shown_us: int | None = None

    def report(self, report: SuperstepReport) -> None:
        """Show a superstep, unless the line was refreshed a moment ago."""
        self._newest = report
        self._sum = report.after(self._sum)
        now_us = self._clock.monotonic_us()
        if self._shown_us is None:
            self._live.start()
        if self._shown_us is None or now_us - self._shown_us >= _REFRESH_US:
            self._shown_us = now_us
            self._show()

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False)

    def close(self) -> None:
        """Show the newest superstep and leave the line standing."""
        if self._shown_us is not None:
            self._show()
            self._live.stop()

    def _show(self) -> None:
        if self._newest is not None and self._sum is not None:
            text = line_text(self._pipeline, self._newest, self._sum)
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)


def line_text(pipeline: str, newest: SuperstepReport, run: SuperstepReport) -> str:
    """Return the line for the newest superstep and the sum of all supersteps of the run."""
    mark_us = newest.watermark_us
    watermark = "unknown" if mark_us == TIME_MIN_US else "at the end"
    if mark_us not in (TIME_MIN_US, TIME_MAX_US):
        try:
            minute = f"{datetime.fromtimestamp(mark_us // 1_000_000, UTC):%Y-%m-%d %H:%M}"
        except (OverflowError, ValueError, OSError):  # beyond the years that datetime knows
            minute = f"{mark_us} us"
        watermark = f"{minute} (lag {duration_text(newest.lag_ms)})"
    parts = [
        f"{pipeline}  superstep {newest.superstep:,}",
        f"{run.records:,} records",
        f"{newest.records_per_second:,.0f}/s",
        f"watermark {watermark}",
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


def duration_text(duration_ms: float) -> str:
    """Return a duration in the largest unit that leaves a number of one or more.

    Example:
        >>> duration_text(90_000)
        '1.5 min'
    """
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if abs(duration_ms) >= unit_ms:
            return f"{duration_ms / unit_ms:,.1f} {unit}"
    return f"{duration_ms:,.0f} ms"


LOGGER: Final = "millpond.progress"
"""Parent of the loggers of all pipelines; silence this one to silence all."""


class ProgressLog:
    """Log lines of a pipeline's supersteps, as JSON or ``key=value`` pairs; structlog renders, the standard library logs.

    At most one line in ``every_ms``, with the sums of the supersteps in between. ``fallback`` gets the lines if the
    program has not set up logging.
    """

    def __init__(
        self,
        pipeline: str,
        clock: Clock,
        *,
        as_json: bool = True,
        every_ms: float = 0,
        fallback: IO[str] | None = None,
    ) -> None:
        self._clock = clock
        self._every_us = every_ms * 1_000
        self._logger = logging.getLogger(f"{LOGGER}.{pipeline}")
        self._handler = _attach(self._logger, fallback) if fallback is not None else None
        self._log = _structured(self._logger, clock, as_json=as_json).bind(pipeline=pipeline)
        self._waiting: SuperstepReport | None = None
        self._waiting_count = 0
        self._written_us: int | None = None

    def report(self, report: SuperstepReport) -> None:
        if self._logger.isEnabledFor(logging.INFO):
            self._waiting = report.after(self._waiting)
            self._waiting_count += 1
            now_us = self._clock.monotonic_us()
            if self._written_us is None or now_us - self._written_us >= self._every_us:
                self._written_us = now_us
                self._write()

    def note(self, text: str) -> None:
        self._write()
        self._log.info(visible_value(text))

    def close(self) -> None:
        """Write the waiting sums, and remove the handler if this object has added it."""
        self._write()
        if self._handler is not None:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(logging.NOTSET)

    def _write(self) -> None:
        if self._waiting is not None:
            self._log.info("superstep", **_fields(self._waiting, self._waiting_count))
            self._waiting, self._waiting_count = None, 0


def _fields(report: SuperstepReport, supersteps: int) -> dict[str, Any]:
    at_an_end = report.watermark_us in (TIME_MIN_US, TIME_MAX_US)
    of_slots = {
        "slots": report.slots,
        "slots_at_home": report.slots_at_home,
        "read_mib": round(report.read_bytes / 2**20, 2),
    }
    return {
        "superstep": report.superstep,
        "supersteps": supersteps,
        "version": report.version,
        "records": report.records,
        "records_per_second": round(report.records_per_second),
        "late": report.late,
        "dropped": report.dropped,
        "duplicates": report.duplicates,
        "dead_letters": report.dead_letters,
        "timers": report.timers,
        "productions": report.productions,
        "pending": report.pending,
        "watermark": watermark_text(report.watermark_us),
        "lag_ms": None if at_an_end else round(report.lag_ms),
        "commit_ms": round(report.commit_ms, 1),
        "duration_ms": round(report.duration_ms, 1),
        **(of_slots if report.slots else {}),
    }


def watermark_text(watermark_us: EventTimeMicros) -> str:
    """Return a watermark as ISO text in UTC; ``unknown`` and ``end`` before and after all time.

    Example:
        >>> watermark_text(EventTimeMicros(1_360_396_800_000_000))
        '2013-02-09T08:00:00+00:00'
    """
    if watermark_us == TIME_MIN_US:
        return "unknown"
    if watermark_us == TIME_MAX_US:
        return "end"
    try:
        return datetime.fromtimestamp(watermark_us / 1_000_000, UTC).isoformat()
    except (OverflowError, ValueError, OSError):  # beyond the years that datetime knows
        return f"{watermark_us} us"


def _structured(logger: logging.Logger, clock: Clock, *, as_json: bool) -> Any:
    def stamp(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        now = datetime.fromtimestamp(clock.now_us() / 1_000_000, UTC)
        return {"event": event.pop("event"), "timestamp": now.isoformat(timespec="milliseconds"), **event}

    render: structlog.typing.Processor = structlog.processors.JSONRenderer(
        serializer=lambda event, **_options: orjson.dumps(event).decode()
    )
    if not as_json:
        render = structlog.processors.LogfmtRenderer()
    return structlog.wrap_logger(
        logger, processors=[stamp, render], wrapper_class=structlog.stdlib.BoundLogger
    )


def _attach(logger: logging.Logger, stream: IO[str]) -> logging.Handler | None:
    """Add a handler, unless the program has configured logging: a handler or a level is its decision."""
    ancestors = (logger, logging.getLogger(LOGGER), logging.getLogger("millpond"))
    if logger.hasHandlers() or any(ancestor.level != logging.NOTSET for ancestor in ancestors):
        return None
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


_LOG = logging.getLogger("millpond")


class Progress:
    """The reports of one run's supersteps, on standard error unless a console is given.

    ``enabled="json"`` writes log lines where a person watches, too. Log at most once in ``log_every_ms``, with the sums of the supersteps in between; 0 logs every superstep.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> progress = Progress("zeitgeist", clock=SystemClock(), enabled=False)
        >>> progress.close()
    """

    def __init__(
        self,
        pipeline: str,
        *,
        clock: Clock,
        enabled: bool | Literal["json"] = True,
        log_every_ms: float = 0,
        console: Console | None = None,
    ) -> None:
        console = console or Console(stderr=True, highlight=False)
        is_watched = (console.is_terminal or console.is_jupyter) and enabled != "json"
        if console.is_jupyter:
            # Rich would draw with widgets that a notebook may lack: a plain console prints the line at the end.
            console = Console(file=console.file, force_jupyter=False, highlight=False)
        self.is_enabled: bool = bool(enabled)
        self._log: ProgressLog | None = None
        self._line: ProgressLine | None = None
        if enabled:
            fallback = None if is_watched else console.file
            self._log = ProgressLog(
                pipeline, clock, as_json=not is_watched, every_ms=log_every_ms, fallback=fallback
            )
            self._line = ProgressLine(pipeline, clock, console) if is_watched else None

    def report(self, report: SuperstepReport) -> None:
        """Log a superstep and show it; after `close` it does nothing."""
        if self._log is not None:
            self._log.report(report)
        if self._line is not None:
            self._line.report(report)

    def note(self, text: str) -> None:
        """Report a text about the run with its supersteps, or in the log of ``millpond`` if they are not reported."""
        if self._log is None:
            _LOG.info(text)
        else:
            self._log.note(text)
        if self._line is not None:
            self._line.note(visible_value(text))

    def close(self) -> None:
        log, line = self._log, self._line
        self._log = self._line = None
        if line is not None:
            line.close()
        if log is not None:
            log.close()
