"""The life cycle of a run: it takes input until it is stopped, or until its first failure."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum, auto

from millpond.statestore.errors import InvalidError, check
from millpond.statestore.types import Clock


class Phase(Enum):
    """The phase of a run in the eyes of its caller."""

    RUNNING = auto()
    """It takes input, unless it has failed."""

    STOPPING = auto()
    """The superstep under way is finished; no other begins."""

    STOPPED = auto()
    """Its leases are given back."""


class Lifecycle:
    """The phase of a run and its first failure; any thread may read and change them.

    Attributes:
        is_active: the run takes input: it was not stopped and has not failed.
        is_stranded: user code hangs in one of the run's threads and cannot be interrupted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.phase: Phase = Phase.RUNNING
        self.error: BaseException | None = None
        self.is_active: bool = True
        self.is_stranded: bool = False

    def fail(self, error: BaseException, *, is_stranded: bool = False) -> None:
        """Record a failure; only the first error is kept."""
        with self._lock:
            if self.error is None:
                self.error, self.is_active = error, False
            self.is_stranded |= is_stranded

    def stop(self) -> bool:
        """Begin to stop; return False if an earlier call did."""
        with self._lock:
            is_first = self.phase is Phase.RUNNING
            if is_first:
                self.phase, self.is_active = Phase.STOPPING, False
        self._stopping.set()
        return is_first

    def close(self) -> None:
        with self._lock:
            check(self.phase is Phase.STOPPING, "a run is stopped before it is closed", phase=self.phase)
            self.phase = Phase.STOPPED

    def wait_for_stop(self, timeout_ms: float) -> bool:
        """Wait until the run is being stopped; return True if that is so in time."""
        return self._stopping.wait(timeout_ms / 1_000)

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error

    def check_phase(self, *allowed: Phase) -> None:
        """Raise the first error, or `InvalidError` in a phase that is not allowed."""
        if self.error is not None:
            raise self.error
        if self.phase not in allowed:
            raise InvalidError(
                "the run has been stopped: start another one on its store, which goes on from there"
            )


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a wait on the monotonic clock; ``None`` waits indefinitely."""

    clock: Clock
    at_us: float | None

    @staticmethod
    def after(clock: Clock, timeout_ms: float | None) -> Deadline:
        return Deadline(clock, None if timeout_ms is None else clock.monotonic_us() + timeout_ms * 1_000)

    @property
    def has_passed(self) -> bool:
        return self.at_us is not None and self.clock.monotonic_us() > self.at_us
