"""ServiceRetry: a run retries while a service is unavailable, until a timeout or until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from millpond.statestore.errors import OutcomeUnknownError, UnavailableError
from millpond.statestore.types import Clock

_POLL_MS: Final = 50.0
_Result = TypeVar("_Result")


class ServiceRetry:
    """Retries while ZooKeeper or the object store is unavailable; safe to `end` from any thread.

    Args:
        clock: the source of time.
        timeout_ms: how long each `run` may wait.
    """

    def __init__(self, clock: Clock, timeout_ms: float) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._ended = False

    def end(self) -> None:
        """Stop retrying: from now on `run` raises the next error at once, also where it is already waiting."""
        self._ended = True

    def run(self, action: Callable[[], _Result], meanwhile: Callable[[], None] | None = None) -> _Result:
        """Call ``action``, again while it reports that a service is unavailable, and return its result.

        It must be safe to repeat: it first reads back what its last call left unknown.

        Args:
            action: the call to retry.
            meanwhile: called before each retry.

        Raises:
            OutcomeUnknownError: the outcome is still unknown at the timeout.
            UnavailableError: the service is still unavailable at the timeout.
        """
        deadline_us = self._clock.monotonic_us() + self._timeout_ms * 1_000
        while True:
            try:
                return action()
            except (OutcomeUnknownError, UnavailableError):
                if self._ended or self._clock.monotonic_us() > deadline_us:
                    raise
            if meanwhile is not None:
                meanwhile()
            self._clock.sleep_ms(_POLL_MS)
