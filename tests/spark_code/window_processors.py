"""Spark processors that count by window, and processors chained behind them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import Row


class Windowed(StatefulProcessor):
    """Counts rows in windows of ten seconds, and yields each count once, when its window ends.

    Args:
        back_s: how many seconds before the end of its window a count is timed; 0 by default.
    """

    def __init__(self, back_s: int = 0) -> None:
        self._back = timedelta(seconds=back_s)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._counts = handle.getMapState("counts", "until long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in rows:
            until_ms = (int(row.t.timestamp()) // 10 + 1) * 10_000
            found = self._counts.getValue((until_ms,))
            self._counts.updateValue((until_ms,), (1 if found is None else found[0] + 1,))
            self._handle.registerTimer(until_ms)
        return iter(())

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[Row]:
        until_ms = expiredTimerInfo.getExpiryTimeInMs()
        found = self._counts.getValue((until_ms,))
        self._counts.removeKey((until_ms,))
        at = datetime.fromtimestamp(until_ms / 1_000) - self._back  # noqa: DTZ006 - local time, as Spark takes it
        yield Row(k=key[0], t=at, seen=f"{until_ms} {found}")


class WindowEchoes(StatefulProcessor):
    """Yields its input, and again a second of event time later."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._texts = handle.getMapState("texts", "ms long", "text string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        for row in rows:
            until_ms = int(_instant(row.t) * 1_000) + 1_000
            self._texts.updateValue((until_ms,), (row.seen,))
            self._handle.registerTimer(until_ms)
            yield Row(seen=f"row {key} {row.seen} {until_ms}")

    def handleExpiredTimer(
        self,
        key: Any,
        timerValues: TimerValues,
        expiredTimerInfo: ExpiredTimerInfo,
    ) -> Iterator[Row]:
        until_ms = expiredTimerInfo.getExpiryTimeInMs()
        text = self._texts.getValue((until_ms,))
        self._texts.removeKey((until_ms,))
        yield Row(seen=f"timer {tuple(key)} {until_ms} {text}")


def _instant(at: datetime | str) -> float:
    return (datetime.fromisoformat(at) if isinstance(at, str) else at).timestamp()
