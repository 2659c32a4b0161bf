"""The clock of a replay: the wall time is that of the superstep which is repeated."""

from __future__ import annotations

from millpond.statestore.types import Clock, WallTimeMicros


class ReplayClock:
    """A `Clock` whose wall time is set, and whose other time is the machine's.

    Args:
        machine: the machine's clock, which measures durations and waits.
        now_us: the wall time at first.
    """

    def __init__(self, machine: Clock, now_us: WallTimeMicros) -> None:
        self._machine = machine
        self._now_us = now_us

    def set(self, now_us: WallTimeMicros) -> None:
        """Go to a wall time."""
        self._now_us = now_us

    def now_us(self) -> WallTimeMicros:
        """The wall time that was set."""
        return self._now_us

    def monotonic_us(self) -> int:
        """Microseconds on the machine's monotonic clock."""
        return self._machine.monotonic_us()

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait, as the machine does."""
        self._machine.sleep_ms(duration_ms)
