"""What rows are used by: learned from a sample of uses, each followed to the row's next use.

A sample is followed whether or not its row is evicted meanwhile, so what is learned does not depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from millpond.executor.soft_state.eviction import NEVER, Expectations

_SAMPLED: Final = 64
_FOLLOWED_MAX: Final = 8_192
_WEIGHT_MAX: Final = 4_096.0
"""How many uses of a bundle are sampled, how many are followed at once, and after how many older ones count half."""

_Clocks: TypeAlias = tuple[int, int]
_WaitOf: TypeAlias = Callable[[str], float]


class UseStatistics:
    """How often records come to rows that wait for a timer, and how soon, and how soon rows without timers are used again."""

    def __init__(self) -> None:
        self._followed: dict[str, tuple[_Clocks, bool]] = {}
        self._by_record = self._by_timer = 1.0
        self._record_gaps = 0.0
        self._free_uses = 1.0
        self._free_gaps = 0.0

    def note_uses(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Note the uses of a bundle, before it changes any timer.

        Args:
            keys: the rows that it uses.
            wait_of: how long a row waits for its next timer; 0 or less: the timer is why it is used.
            clocks: low watermark and wall time.
        """
        for key in filter(self._followed.__contains__, keys):
            at, waits = self._followed.pop(key)
            gap = _between(at, clocks)
            if not waits:
                self._free_uses += 1
                self._free_gaps += gap
            elif wait_of(key) <= 0:
                self._by_timer += 1
            else:
                self._by_record += 1
                self._record_gaps += gap
        self._forget()

    def follow(self, keys: Sequence[str], wait_of: _WaitOf, clocks: _Clocks) -> None:
        """Follow some uses of a bundle from now on, after it has changed timers."""
        for key in keys[:: len(keys) // _SAMPLED + 1]:
            self._followed[key] = clocks, wait_of(key) != NEVER
        while len(self._followed) > _FOLLOWED_MAX:
            at, waits = self._followed.pop(next(iter(self._followed)))
            if not waits:
                # It was not used for so long: that is known of it as well.
                self._free_gaps += _between(at, clocks)

    def expectations(self, clocks: _Clocks) -> Expectations:
        """What to expect of rows."""
        unused = sum(_between(at, clocks) for at, waits in self._followed.values() if not waits)
        return Expectations(
            by_record=self._by_record / (self._by_record + self._by_timer),
            record_gap=self._record_gaps / self._by_record,
            free_gap=(self._free_gaps + unused) / self._free_uses,
        )

    def _forget(self) -> None:
        if self._by_record + self._by_timer > _WEIGHT_MAX:
            self._by_record, self._by_timer = self._by_record / 2, self._by_timer / 2
            self._record_gaps /= 2
        if self._free_uses > _WEIGHT_MAX:
            self._free_uses, self._free_gaps = self._free_uses / 2, self._free_gaps / 2


def _between(at: _Clocks, now: _Clocks) -> float:
    """How long ago that was, on the clock that has gone further."""
    return float(max(now[0] - at[0], now[1] - at[1]))
