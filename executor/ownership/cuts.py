"""Cuts: intervals of one computation that are replaced by others of the same keys (MillWheel §7.1).

Boundaries come from a sample of the keys, so each part gets about the same share of the work. Manual cuts are
requested by a position in the table, because only the pipeline may cut its keys. A tool writes an even number under
the name of the cut, and the commit that makes the cut writes the next odd one. A request outlives both processes; it
is honoured at the pipeline's next superstep or, if it is stopped, at its next start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError, check
from millpond.statestore.interval import CUT_CHARACTERS_MAX, Interval, locate


@dataclass(frozen=True, slots=True)
class Cut:
    """A split of an interval, or a merge of neighbours; both sides are in key order.

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
        return "split" if len(self.by) > len(self.replaced) else "merge"

    @classmethod
    def split(cls, interval: Interval, keys: Sequence[str]) -> Cut:
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
        if len(intervals) < 2 or any(left.high != right.low for left, right in pairwise(intervals)):
            raise InvalidError(
                "two or more neighbours are merged", intervals=[interval.app_id for interval in intervals]
            )
        return cls(tuple(intervals), (replace(intervals[0], high=intervals[-1].high),))


def boundaries_of(sample: pa.Array, count: int) -> tuple[str, ...]:
    """Return cuts that give each of ``count`` intervals about the same share of the sampled keys.

    A sample with fewer distinct keys gives fewer cuts. A long key is cut at its prefix, which
    divides the keys nearly as well.

    Example:
        >>> boundaries_of(pa.array(["a", "b", "c", "d"]), 2)
        ('c',)
    """
    if count < 2 or not len(sample):
        return ()
    ordered = sample.take(pc.sort_indices(sample))
    positions = [len(ordered) * part // count for part in range(1, count)]
    lowest = ordered[0].as_py()
    cuts = {ordered[position].as_py()[:CUT_CHARACTERS_MAX] for position in positions}
    return tuple(sorted(cut for cut in cuts if cut > lowest))


def middle_of(interval: Interval, sample: Sequence[str]) -> str | None:
    """Return the key that divides an interval into two with about the same share of the sampled keys each.

    It is ``None`` if all of the sample inside the interval is one key, which cannot be split. A key that is worked on
    more often occurs more often in the sample.

    Example:
        >>> middle_of(Interval("c"), ["a", "b", "c", "d"])
        'c'
        >>> middle_of(Interval("c"), ["a", "a"]) is None
        True
    """
    keys = sorted(key for key in sample if interval.contains(key))
    # A cut lies in front of a key, and has some of the sample on either side of it.
    cuts = [at for at in range(1, len(keys)) if keys[at - 1] < keys[at][:CUT_CHARACTERS_MAX]]
    if not cuts:
        return None
    return keys[min(cuts, key=lambda at: abs(2 * at - len(keys)))][:CUT_CHARACTERS_MAX]


CutKind: TypeAlias = Literal["split", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """A request to split an interval in front of a key, or to merge the two intervals that meet there.

    ``number`` is the position that requests it, which is even; the next one answers.
    """

    computation: str
    kind: CutKind
    key: str
    number: int

    @property
    def app_id(self) -> str:
        return AppId.CUT.of(self.computation, self.kind, self.key)

    @property
    def answer(self) -> Mapping[str, int]:
        return {self.app_id: self.number + 1}

    @classmethod
    def next(cls, txns: Mapping[str, int], computation: str, kind: CutKind, key: str) -> CutRequest:
        """Return the request to write now, given the table's transactions; it equals a request that waits already."""
        known = txns.get(AppId.CUT.of(computation, kind, key), 1)
        return cls(computation=computation, kind=kind, key=key, number=known + known % 2)

    def cut(self, intervals: Sequence[Interval]) -> Cut | None:
        """Return the cut of the computation's intervals, in key order; ``None`` if the keys are cut like that already."""
        at = locate([interval.low for interval in intervals], self.key)
        is_bound = intervals[at].low == self.key
        if self.kind == "split":
            return None if is_bound else Cut.split(intervals[at], [self.key])
        return Cut.merge(intervals[at - 1 : at + 1]) if is_bound and at else None


def waiting_requests(txns: Mapping[str, int]) -> tuple[CutRequest, ...]:
    """Return the requests that no commit has answered.

    Example:
        >>> waiting_requests({AppId.CUT.of("counter", "split", "m"): 2, AppId.CUT.of("counter", "merge", "g"): 5})
        (CutRequest(computation='counter', kind='split', key='m', number=2),)
    """
    found = []
    for app_id, number in txns.items():
        if number % 2 == 0 and app_id.startswith(AppId.CUT):
            computation, part, key = AppId.CUT.parts(app_id)
            kind: CutKind = "split" if part == "split" else "merge"
            found.append(CutRequest(computation=computation, kind=kind, key=key, number=number))
    return tuple(sorted(found, key=lambda request: (request.computation, request.key)))
