"""Log lines about an outage of a service: one at once, one a minute, and one when it is over."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Final

from millpond.statestore.types import Clock

_LOG: Final = logging.getLogger("millpond")
_REMINDER_US: Final = 60_000_000


class Outage:
    """The state of one service as its user sees it, who calls `away` at each failure and `back` at each success.

    Any thread may call it. ``waits`` names what waits for the service.
    """

    def __init__(self, waits: str, clock: Clock) -> None:
        self._waits = waits
        self._clock = clock
        self._lock = threading.Lock()
        self._since_us: int | None = None
        self._told_us = 0
        self._began = ""

    def away(self, cause: object) -> None:
        with self._lock:
            now_us = self._clock.monotonic_us()
            if self._since_us is None:
                self._since_us = now_us
                self._began = f"{datetime.fromtimestamp(self._clock.now_us() // 1_000_000, UTC):%H:%M:%S} UTC"
            elif now_us - self._told_us < _REMINDER_US:
                return
            self._told_us = now_us
            _LOG.warning("%s waits since %s for a service that is away: %s", self._waits, self._began, cause)

    def back(self) -> None:
        # Read without the lock: this is on the path of each commit.
        if self._since_us is None:
            return
        with self._lock:
            if self._since_us is not None:
                lasted_s = (self._clock.monotonic_us() - self._since_us) / 1e6
                self._since_us = None
                _LOG.warning("%s continues: the service is back after %.1f s", self._waits, lasted_s)
