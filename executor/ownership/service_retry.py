"""
ServiceRetry: how long a run waits for services that are away, and that it stops waiting when it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from millpond.statestore.errors import OutcomeUnknownError, UnavailableError
from millpond.statestore.types import Clock

__all__ = ["ServiceRetry"]

_POLL_MS: Final = 50.0
_Result = TypeVar("_Result")


class ServiceRetry:
    """
    Asks again while ZooKeeper or the object store is away; safe to `end` from any thread.

    Args:
        clock: the source of time.
        timeout_ms: how long each wait may take.
    """

    def __init__(self, clock: Clock, timeout_ms: float) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._ended = False

    def end(self) -> None:
        """
        Wait no more: what is away from now on fails at once, and so does what is being waited for.
        """
        self._ended = True

    def run(self, action: Callable[[], _Result], meanwhile: Callable[[], None] | None = None) -> _Result:
        """
        What ``action`` returns, asked again while it says that a service is away.

        It must bear to be asked again: what it left unknown it reads back first.

        Args:
            action: what is wanted.
            meanwhile: called before each further try.

        Raises:
            OutcomeUnknownError: it still does not say when the time is over.
            UnavailableError: it is still away then.
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
