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
    """The phase of a run and its first failure; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._phase = Phase.RUNNING
        self._error: BaseException | None = None
        self._is_stranded = False

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    @property
    def error(self) -> BaseException | None:
        """The first error; ``None`` if the run has not failed."""
        return self._error

    @property
    def is_stranded(self) -> bool:
        """True if user code hangs in one of the run's threads and cannot be interrupted."""
        return self._is_stranded

    @property
    def is_active(self) -> bool:
        """True while the run takes input: it was not stopped and has not failed."""
        return self._phase is Phase.RUNNING and self._error is None

    def fail(self, error: BaseException, *, is_stranded: bool = False) -> None:
        """Record a failure; only the first error is kept."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._is_stranded |= is_stranded

    def stop(self) -> bool:
        """Begin to stop; return False if an earlier call did."""
        with self._lock:
            is_first = self._phase is Phase.RUNNING
            if is_first:
                self._phase = Phase.STOPPING
        self._stopping.set()
        return is_first

    def close(self) -> None:
        """Record that the stopping run is about to give its leases back."""
        with self._lock:
            check(self._phase is Phase.STOPPING, "a run is stopped before it is closed", phase=self._phase)
            self._phase = Phase.STOPPED

    def wait_for_stop(self, timeout_ms: float) -> bool:
        """Wait until the run is being stopped; return True if that is so in time."""
        return self._stopping.wait(timeout_ms / 1_000)

    def raise_failure(self) -> None:
        """Raise the first error, if the run has failed."""
        if self._error is not None:
            raise self._error

    def check_phase(self, *allowed: Phase) -> None:
        """Raise the first error, or `InvalidError` in a phase that is not allowed."""
        if self._error is not None:
            raise self._error
        if self._phase not in allowed:
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
        """Return the end of a wait that begins now."""
        return Deadline(clock, None if timeout_ms is None else clock.monotonic_us() + timeout_ms * 1_000)

    @property
    def has_passed(self) -> bool:
        """True once the wait is over."""
        return self.at_us is not None and self.clock.monotonic_us() > self.at_us

    @property
    def left_ms(self) -> float | None:
        """The remaining wait; ``None`` if it never ends."""
        return None if self.at_us is None else (self.at_us - self.clock.monotonic_us()) / 1_000
