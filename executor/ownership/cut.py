"""A cut: intervals of one computation that are replaced by others of the same keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from millpond.statestore.check import check
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval


@dataclass(frozen=True, slots=True)
class Cut:
    """A split of an interval, or a merge of neighbours.

    Args:
        replaced: neighbours, in key order.
        by: their successors, in key order.

    Example:
        >>> cut = Cut.split(Interval("c"), ["m"])
        >>> cut.by
        (Interval(computation='c', low='', high='m'), Interval(computation='c', low='m', high=None))
        >>> Cut.merge(cut.by).by
        (Interval(computation='c', low='', high=None),)
    """

    replaced: tuple[Interval, ...]
    by: tuple[Interval, ...]

    def __post_init__(self) -> None:
        """Refuse a cut that would leave keys without an interval, or with two."""
        check(
            bool(self.replaced and self.by)
            and (self.replaced[0].low, self.replaced[-1].high) == (self.by[0].low, self.by[-1].high)
            and all(
                left.high == right.low for cut in (self.replaced, self.by) for left, right in pairwise(cut)
            )
            and len({interval.computation for interval in (*self.replaced, *self.by)}) == 1
            and {*self.replaced}.isdisjoint(self.by),
            "a cut replaces intervals by others of the same keys",
            replaced=[interval.app_id for interval in self.replaced],
            by=[interval.app_id for interval in self.by],
        )

    @property
    def kind(self) -> str:
        """``split`` or ``merge``."""
        return "split" if len(self.by) > len(self.replaced) else "merge"

    @classmethod
    def split(cls, interval: Interval, keys: Sequence[str]) -> Cut:
        """The cut of an interval in front of some of its keys.

        Raises:
            InvalidError: a key is not in the interval, is its first one, or they do not rise.
        """
        bounds = [interval.low, *keys]
        inside = all(interval.contains(key) for key in keys)
        if not keys or not inside or any(left >= right for left, right in pairwise(bounds)):
            raise InvalidError(
                "an interval is split at rising keys inside it", interval=interval.app_id, keys=list(keys)
            )
        highs = [*bounds[1:], interval.high]
        parts = (replace(interval, low=low, high=high) for low, high in zip(bounds, highs, strict=True))
        return cls((interval,), tuple(parts))

    @classmethod
    def merge(cls, intervals: Sequence[Interval]) -> Cut:
        """The cut that makes neighbours, in key order, one interval.

        Raises:
            InvalidError: they are not neighbours, or fewer than two.
        """
        if len(intervals) < 2 or any(left.high != right.low for left, right in pairwise(intervals)):
            raise InvalidError(
                "two or more neighbours are merged", intervals=[interval.app_id for interval in intervals]
            )
        return cls(tuple(intervals), (replace(intervals[0], high=intervals[-1].high),))
