"""
Chance and time of a simulated world: everything that is drawn comes from its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from millpond.statestore.types import WallTimeMicros
from millpond.testing.fixtures.determinism import SeededRng

__all__ = ["Draw", "ProcessClock"]

_Choice = TypeVar("_Choice")


class Draw:
    """
    What happens by chance, the same for the same seed.

    Args:
        seed: of this stream of draws; streams of other names are independent.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = SeededRng(seed)

    def chance(self, probability: float) -> bool:
        """
        Whether something of this probability happens.
        """
        return self._rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """
        A whole number from ``low`` to ``high``, both included.
        """
        return low + int(self._rng.random() * (high - low + 1))

    def choice(self, choices: Sequence[_Choice]) -> _Choice:
        """
        One of them.
        """
        return choices[self.number(0, len(choices) - 1)]

    def weighted(self, weights: Mapping[_Choice, float]) -> _Choice:
        """
        One of them, each as often as its weight says.
        """
        left = self._rng.random() * sum(weights.values())
        for choice, weight in weights.items():
            left -= weight
            if left < 0:
                return choice
        return choice


class ProcessClock:
    """
    A `Clock` as one process sees it: it may be set wrongly, jump and run fast, and no other agrees.

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
        """
        Wall time in microseconds since 1970 UTC, as this process believes it to be.
        """
        return WallTimeMicros(self._born_us + self.monotonic_us() + self.offset_us)

    def monotonic_us(self) -> int:
        """
        Microseconds since the process was born, at its own rate; they never fall.
        """
        return self._counted_us + int((self._now_us() - self._since_us) * self.rate)

    def set_rate(self, rate: float) -> None:
        """
        Run at another rate from now on: 1.1 is a tenth too fast.
        """
        self._counted_us, self._since_us = self.monotonic_us(), self._now_us()
        self.rate = rate

    def sleep_ms(self, duration_ms: float) -> None:
        """
        Let the world go on for a while.
        """
        self._sleep(duration_ms / self.rate)
