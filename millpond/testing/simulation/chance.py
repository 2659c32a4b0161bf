"""Randomness and time of a simulated world; every draw follows from its seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from millpond.statestore.types import WallTimeMicros
from millpond.testing.fixtures.determinism import SeededRng

_Choice = TypeVar("_Choice")


class Draw:
    """A seeded stream of random draws.

    Args:
        seed: of this stream; streams with other seeds are independent.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = SeededRng(seed)

    def chance(self, probability: float) -> bool:
        """Draw if an event of this probability happens."""
        return self._rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return low + int(self._rng.random() * (high - low + 1))

    def choice(self, choices: Sequence[_Choice]) -> _Choice:
        """One of the choices, each equally likely."""
        return choices[self.number(0, len(choices) - 1)]

    def weighted(self, weights: Mapping[_Choice, float]) -> _Choice:
        """One of the choices, with a probability proportional to its weight."""
        left = self._rng.random() * sum(weights.values())
        for choice, weight in weights.items():
            left -= weight
            if left < 0:
                return choice
        return choice


class ProcessClock:
    """A `Clock` of one process: it may be wrong, jump and drift, independently of all others.

    Args:
        now_us: the true time of the world.
        sleep: lets the world's time pass, in milliseconds.
    """

    def __init__(self, now_us: Callable[[], int], sleep: Callable[[float], None]) -> None:
        self._now_us = now_us
        self._sleep = sleep
        self._born_us = self._since_us = now_us()
        self._counted_us = 0
        self.offset_us = 0
        self.rate: float = 1.0

    def now_us(self) -> WallTimeMicros:
        """The process's wall time, in microseconds since 1970 UTC; may be wrong."""
        return WallTimeMicros(self._born_us + self.monotonic_us() + self.offset_us)

    def monotonic_us(self) -> int:
        """Microseconds since the process started, at its own rate; never falls."""
        return self._counted_us + int((self._now_us() - self._since_us) * self.rate)

    def set_rate(self, rate: float) -> None:
        """Change the clock's rate from now on: 1.1 is a tenth too fast."""
        self._counted_us, self._since_us = self.monotonic_us(), self._now_us()
        self.rate = rate

    def sleep_ms(self, duration_ms: float) -> None:
        """Let the world's time pass."""
        self._sleep(duration_ms / self.rate)
