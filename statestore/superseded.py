"""
Intervals that a split or a merge has replaced.

A split's children and a merge's result are leased later than the intervals that they replace, and a
later lease of the same keys has a higher sequencer (MillWheel §7.1). So of two intervals
that share keys, the interval with the higher sequencer is live, and no other record of
splits and merges is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.statestore.interval import Interval
from millpond.statestore.types import Sequencer

__all__ = ["superseded"]


def superseded(sequencers: Mapping[Interval, Sequencer]) -> dict[Interval, Interval]:
    """
    The intervals that are no longer live, each with an interval that replaced it.

    One sweep over the low bounds; the live intervals of a computation together must cover
    all keys of the intervals that they replaced, as those of splits and merges do.

    Example:
        >>> old, low, high = Interval("c"), Interval("c", "", "m"), Interval("c", "m")
        >>> superseded({old: Sequencer(1), low: Sequencer(2), high: Sequencer(2)}) == {old: low}
        True
    """
    replaced: dict[Interval, Interval] = {}
    active: list[Interval] = []
    for interval in sorted(sequencers, key=lambda key: (key.computation, key.low)):
        active = [other for other in active if other.overlaps(interval)]
        for other in active:
            if sequencers[other] > sequencers[interval]:
                replaced.setdefault(interval, other)
            elif sequencers[other] < sequencers[interval]:
                replaced.setdefault(other, interval)
        active = [other for other in (*active, interval) if other not in replaced]
    return replaced
