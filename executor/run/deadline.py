"""Deadlines: when a call stops waiting."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.statestore.types import Clock


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
