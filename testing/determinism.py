"""
A clock that is moved by hand and randomness from a seed: the same run every time.
"""

from __future__ import annotations

import hashlib
import threading

from millpond.statestore.types import WallTimeMicros

__all__ = ["ManualClock", "SeededRng"]


class ManualClock:
    """
    `Clock` that stands still until it is moved; sleeping moves it.

    Args:
        now_us: the wall time to begin with.
    """

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._lock = threading.Lock()
        self._wall_us = now_us
        self._monotonic_us = 0
        self.slept_ms: list[float] = []

    def now_us(self) -> WallTimeMicros:
        """
        Wall time in microseconds since 1970 UTC.
        """
        return WallTimeMicros(self._wall_us)

    def monotonic_us(self) -> int:
        """
        Microseconds since the clock was made.
        """
        return self._monotonic_us

    def sleep_ms(self, duration_ms: float) -> None:
        """
        Move time on at once, and remember how long the sleep would have been.
        """
        self.slept_ms.append(duration_ms)
        self.advance_ms(duration_ms)

    def advance_ms(self, duration_ms: float) -> None:
        """
        Move both clocks on.
        """
        with self._lock:
            self._wall_us += int(duration_ms * 1_000)
            self._monotonic_us += int(duration_ms * 1_000)

    def jump_ms(self, duration_ms: float) -> None:
        """
        Set the wall clock off, forwards or backwards, while no time passes.
        """
        with self._lock:
            self._wall_us += int(duration_ms * 1_000)


class SeededRng:
    """
    `Rng` that draws the same numbers and tokens for the same seed.
    """

    def __init__(self, seed: int | str = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._drawn = 0

    def random(self) -> float:
        """
        A number in [0, 1).
        """
        return int.from_bytes(self._draw()[:6], "big") / 2**48

    def token(self) -> str:
        """
        32 hexadecimal digits; other seeds draw other ones.
        """
        return self._draw()[:16].hex()

    def _draw(self) -> bytes:
        with self._lock:
            self._drawn += 1
            return hashlib.sha256(f"{self._seed}/{self._drawn}".encode()).digest()
