"""Key intervals: the unit of ownership (MillWheel §7.1).

The intervals of a computation cover all keys. Each one is leased, fenced and processed on its own. Keys are ordered
by their UTF-8 bytes, which is the order of code points, so plain comparison of Python strings is right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import AppId, quoted
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import Sequencer, quickly_pickled

_PREFIX: Final = AppId.INTERVAL.value
# Cuts are short prefixes of keys, because application ids and ZooKeeper's paths contain them.
CUT_CHARACTERS_MAX: Final = 256


@quickly_pickled
@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """The keys ``low <= key < high`` of one computation; ``high`` ``None`` is unbounded."""

    computation: str
    low: str = ""
    high: str | None = None

    def contains(self, key: str) -> bool:
        return self.low <= key and (self.high is None or key < self.high)

    def overlaps(self, other: Interval) -> bool:
        return (
            self.computation == other.computation
            and (self.high is None or other.low < self.high)
            and (other.high is None or self.low < other.high)
        )

    @property
    @lru_cache(maxsize=65_536)  # noqa: B019 - intervals are few, and each commit names the same ones
    def app_id(self) -> str:
        """The Delta application id under which the interval's commits are fenced."""
        # The mark keeps a high key distinct from an unbounded interval, even if the key were empty.
        high = "" if self.high is None else "=" + quoted(self.high)
        return f"{_PREFIX}{quoted(self.computation, self.low)}/{high}"

    @staticmethod
    def from_app_id(app_id: str) -> Interval | None:
        if not app_id.startswith(_PREFIX):
            return None
        computation, low, high = app_id.removeprefix(_PREFIX).split("/")
        return Interval(unquote(computation), unquote(low), unquote(high[1:]) if high else None)


def intervals_from_boundaries(computation: str, boundaries: Iterable[str]) -> tuple[Interval, ...]:
    """Cut all keys at ``boundaries``, which are sorted, distinct and not empty."""
    cuts = ["", *boundaries]
    if any(left >= right for left, right in pairwise(cuts)):
        raise InvalidError("interval boundaries must rise", boundaries=cuts[1:])
    highs: list[str | None] = [*cuts[1:], None]
    return tuple(Interval(computation, low, high) for low, high in zip(cuts, highs, strict=True))


def locate(lows: Sequence[str], key: str) -> int:
    """Return the index of the interval that holds ``key``, given the sorted low bounds."""
    return bisect_right(lows, key) - 1


def superseded(sequencers: Mapping[Interval, Sequencer]) -> dict[Interval, Interval]:
    """Map each interval that a split or a merge has replaced to an interval that replaced it.

    A split's children and a merge's result are leased later than the intervals they replace, and a later lease of
    the same keys has a higher sequencer (MillWheel §7.1). So of two intervals that share keys, the one with the
    higher sequencer is live, and splits and merges need no other record.

    Example:
        >>> old, low, high = Interval("c"), Interval("c", "", "m"), Interval("c", "m")
        >>> superseded({old: Sequencer(1), low: Sequencer(2), high: Sequencer(2)}) == {old: low}
        True
    """
    replaced: dict[Interval, Interval] = {}
    active: list[Interval] = []
    # One sweep over the low bounds suffices, because the live intervals of a computation cover all keys of the
    # intervals that they replaced.
    for interval in sorted(sequencers, key=lambda key: (key.computation, key.low)):
        active = [other for other in active if other.overlaps(interval)]
        for other in active:
            if sequencers[other] > sequencers[interval]:
                replaced.setdefault(interval, other)
            elif sequencers[other] < sequencers[interval]:
                replaced.setdefault(other, interval)
        active = [other for other in (*active, interval) if other not in replaced]
    return replaced
