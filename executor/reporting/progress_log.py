"""Supersteps as structured log lines: key=value for people, JSON where no terminal is listening.

structlog renders, the standard library's logging decides whether and where to.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import IO, Any, Final

import orjson
import structlog

from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros

LOGGER: Final = "millpond.progress"
"""Parent of the loggers of all pipelines; silence this one to silence all."""


class ProgressLog:
    """Writes supersteps to the logger of a pipeline.

    Args:
        pipeline: its name, the last part of the logger's.
        clock: stamps the lines and measures the time between them.
        as_json: JSON for machines, else ``key=value`` pairs for people.
        every_ms: at most one line in this time, adding up the supersteps in between.
        fallback: where lines go if the program has not set up logging; nowhere if None.
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
        """Write a line, or keep the sums for the next one."""
        if self._logger.isEnabledFor(logging.INFO):
            self._waiting = report.after(self._waiting)
            self._waiting_count += 1
            now_us = self._clock.monotonic_us()
            if self._written_us is None or now_us - self._written_us >= self._every_us:
                self._written_us = now_us
                self._write()

    def note(self, text: str) -> None:
        """Write a line of its own, after the sums that wait."""
        self._write()
        self._log.info(text)

    def close(self) -> None:
        """Write the sums that wait, and remove the handler if this object has added it."""
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
    """A watermark as ISO text in UTC; ``unknown`` and ``end`` before and after all time.

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
    """Bring a handler of our own, unless the program has one or has set a level: then it knows what it wants."""
    ancestors = (logger, logging.getLogger(LOGGER), logging.getLogger("millpond"))
    if logger.hasHandlers() or any(ancestor.level != logging.NOTSET for ancestor in ancestors):
        return None
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler
