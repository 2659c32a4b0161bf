"""The life cycle of a run: it takes input until it is stopped, or until its first failure.

Deadlines: when a call stops waiting.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from enum import Enum, auto

from millpond.statestore.errors import InvalidError, check
from millpond.statestore.types import Clock


class Phase(Enum):
    """How far a run has got, as far as its caller is concerned."""

    RUNNING = auto()
    """It takes input, unless it has failed."""

    STOPPING = auto()
    """The superstep under way is finished; nothing else begins."""

    STOPPED = auto()
    """Its leases are given back."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a run.

    Attributes:
        error: the first error.
        is_stranded: whether user code hangs in one of its threads and cannot be interrupted.
    """

    error: BaseException
    is_stranded: bool = False


class Lifecycle:
    """The phase of a run and its first failure; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = Phase.RUNNING
        self._failure: Failure | None = None
        self._stopping = threading.Event()

    @property
    def phase(self) -> Phase:
        """How far the run has got."""
        return self._phase

    @property
    def error(self) -> BaseException | None:
        """The first error; ``None`` if the run has not failed."""
        return None if self._failure is None else self._failure.error

    @property
    def is_stranded(self) -> bool:
        """Whether user code hangs in one of the run's threads and cannot be interrupted."""
        return self._failure is not None and self._failure.is_stranded

    @property
    def is_active(self) -> bool:
        """Whether the run takes input: it was neither stopped nor has it failed."""
        return self._phase is Phase.RUNNING and self._failure is None

    def fail(self, error: BaseException, *, is_stranded: bool = False) -> None:
        """Note a failure; only the first error is kept.

        Args:
            error: what was raised.
            is_stranded: whether user code hangs and cannot be interrupted.
        """
        with self._lock:
            failure = self._failure or Failure(error)
            self._failure = replace(failure, is_stranded=failure.is_stranded or is_stranded)

    def stop(self) -> bool:
        """Begin to stop; return whether this call did, and not an earlier one."""
        with self._lock:
            is_first = self._phase is Phase.RUNNING
            if is_first:
                self._phase = Phase.STOPPING
        self._stopping.set()
        return is_first

    def close(self) -> None:
        """Note that the run is about to give its leases back; it must be stopping."""
        with self._lock:
            check(self._phase is Phase.STOPPING, "a run is stopped before it is closed", phase=self._phase)
            self._phase = Phase.STOPPED

    def wait_for_stop(self, timeout_ms: float) -> bool:
        """Wait until the run is being stopped; return whether it is, within the time."""
        return self._stopping.wait(timeout_ms / 1_000)

    def raise_failure(self) -> None:
        """Raise the first error, if the run has failed.

        Raises:
            MillpondError: the first error.
        """
        if self._failure is not None:
            raise self._failure.error

    def check_phase(self, *allowed: Phase) -> None:
        """Raise what has ended the run, if it has ended.

        Args:
            allowed: the phases in which the caller may go on.

        Raises:
            MillpondError: the first error.
            InvalidError: the run has been stopped.
        """
        self.raise_failure()
        if self._phase not in allowed:
            raise InvalidError(
                "the run has been stopped: start another one on its store, which goes on from there"
            )


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a wait.

    Args:
        clock: measures it.
        at_us: the end on the monotonic clock; ``None`` if there is none.
    """

    clock: Clock
    at_us: float | None

    @staticmethod
    def after(clock: Clock, timeout_ms: float | None) -> Deadline:
        """The end of a wait that begins now; ``None`` waits for ever."""
        return Deadline(clock, None if timeout_ms is None else clock.monotonic_us() + timeout_ms * 1_000)

    @property
    def has_passed(self) -> bool:
        """Whether the wait is over."""
        return self.at_us is not None and self.clock.monotonic_us() > self.at_us

    @property
    def left_ms(self) -> float | None:
        """How much of it is left; ``None`` if it never ends."""
        return None if self.at_us is None else (self.at_us - self.clock.monotonic_us()) / 1_000
