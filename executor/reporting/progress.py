"""Progress of a run: a log line per superstep, and a live line in a terminal.

The log lines go to the logger ``millpond.progress.<pipeline>`` of the standard
library, so they are silenced, redirected and filtered like any other. A run in
a terminal shows its live line; a run elsewhere, in a program that has not set up
logging, writes the log lines to standard error. Nothing is kept but sums.
"""

from __future__ import annotations

import logging

from rich.console import Console

from millpond.executor.reporting.progress_line import ProgressLine
from millpond.executor.reporting.progress_log import ProgressLog
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.types import Clock

_LOG = logging.getLogger("millpond")


class Progress:
    """Reports the supersteps of one run.

    Args:
        pipeline: the pipeline's name.
        clock: stamps the log lines and paces the live line.
        enabled: whether to report at all.
        log_every_ms: log at most this often and sum the supersteps in between, for a runner that
            commits hundreds a second; 0 logs every superstep.
        console: where the live line goes, or the log lines if the program has not set up logging;
            standard error by default.

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
        enabled: bool = True,
        log_every_ms: float = 0,
        console: Console | None = None,
    ) -> None:
        console = console or Console(stderr=True, highlight=False)
        in_terminal = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
        self._log: ProgressLog | None = None
        self._line: ProgressLine | None = None
        if enabled:
            fallback = None if in_terminal else console.file
            self._log = ProgressLog(
                pipeline, clock, as_json=not in_terminal, every_ms=log_every_ms, fallback=fallback
            )
            self._line = ProgressLine(pipeline, clock, console) if in_terminal else None

    def report(self, report: SuperstepReport) -> None:
        """Log a superstep and show it; after `close` it does nothing."""
        if self._log is not None:
            self._log.report(report)
        if self._line is not None:
            self._line.report(report)

    def note(self, text: str) -> None:
        """Say something about the run, where its supersteps are reported; in the log of ``millpond`` if nowhere."""
        if self._log is None:
            _LOG.info(text)
        else:
            self._log.note(text)
        if self._line is not None:
            self._line.note(text)

    def close(self) -> None:
        """Log the supersteps that are not logged yet, and stop the live line in its last state."""
        log, line = self._log, self._line
        self._log = self._line = None
        if line is not None:
            line.close()
        if log is not None:
            log.close()
