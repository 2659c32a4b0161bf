"""The ticker: a thread that looks after a run while its input is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millpond.executor.run.lifecycle import Lifecycle
from millpond.executor.spark.jvm import spark_calls


class Ticker:
    """Calls a function again and again, until the run is stopped or has failed.

    Args:
        tick: the function; what it raises ends the run.
        lifecycle: the run's.
        every_ms: how long to wait before each call.
    """

    def __init__(self, tick: Callable[[float], None], lifecycle: Lifecycle, every_ms: float) -> None:
        self._tick = tick
        self._lifecycle = lifecycle
        self._every_ms = every_ms
        self._thread = threading.Thread(target=self._work, name="millpond-ticker", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _work(self) -> None:
        while not self._lifecycle.wait_for_stop(self._every_ms):
            try:
                with spark_calls():
                    self._tick(self._every_ms)
            except BaseException as failure:  # noqa: BLE001 - kept, and raised to each thread that waits
                self._lifecycle.fail(failure)
            if self._lifecycle.error is not None:
                return
