"""
Which intervals a split or a merge has replaced.

A split's children and a merge's result are leased later than what they replace, and a
later lease of the same keys has a higher sequencer (MillWheel §7.1). So of two intervals
that share keys the one with the higher sequencer is the live one, and no other record of
splits and merges is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.statestore.interval import Interval
from millpond.statestore.types import Sequencer

__all__ = ["superseded"]


def superseded(sequencers: Mapping[Interval, Sequencer]) -> dict[Interval, Interval]:
    """
    The intervals that are no longer live, each with one that replaced it.

    One sweep over the low bounds; the intervals of one computation must between them cover
    what they replaced, as splits and merges do.

    Example:
        >>> old, low, high = Interval("c"), Interval("c", "", "m"), Interval("c", "m")
        >>> superseded({old: Sequencer(1), low: Sequencer(2), high: Sequencer(2)}) == {old: low}
        True
    """
    replaced: dict[Interval, Interval] = {}
    active: list[Interval] = []
    for interval in sorted(sequencers, key=lambda each: (each.computation, each.low)):
        active = [each for each in active if _reaches(each, interval)]
        for other in active:
            if sequencers[other] > sequencers[interval]:
                replaced.setdefault(interval, other)
            elif sequencers[other] < sequencers[interval]:
                replaced.setdefault(other, interval)
        active = [each for each in (*active, interval) if each not in replaced]
    return replaced


def _reaches(interval: Interval, later: Interval) -> bool:
    """
    Whether an interval that begins no later shares keys with ``later``.
    """
    if interval.computation != later.computation:
        return False
    return interval.high is None or interval.high > later.low
