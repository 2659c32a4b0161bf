"""Cuts by hand: asked for by a position in the table, made and answered by the pipeline that owns the keys.

The pipeline alone may cut its keys, so a tool writes what it wants: an even number under the name of the cut. The
commit that makes the cut writes the next odd one. A request outlives the process that made it and the one that
runs the pipeline; it is honoured at the pipeline's next superstep or, if it is stopped, at its next start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from millpond.executor.ownership.cut import Cut
from millpond.statestore.app_ids import CUT_PREFIX, app_id_parts, cut_app_id
from millpond.statestore.interval import Interval, locate

CutKind: TypeAlias = Literal["split", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """A split of the interval that has a key, in front of it; or a merge of the two that meet there.

    Attributes:
        computation: whose keys.
        kind: ``split`` or ``merge``.
        key: where.
        number: the position that asks for it, even; the next one answers.
    """

    computation: str
    kind: CutKind
    key: str
    number: int

    @property
    def app_id(self) -> str:
        """The name of its position."""
        return cut_app_id(self.computation, self.kind, self.key)

    @property
    def answer(self) -> Mapping[str, int]:
        """The position that says that it is done."""
        return {self.app_id: self.number + 1}

    @classmethod
    def next(cls, txns: Mapping[str, int], computation: str, kind: CutKind, key: str) -> CutRequest:
        """The request to write now, given the table's transactions; one that waits already is the same."""
        known = txns.get(cut_app_id(computation, kind, key), 1)
        return cls(computation=computation, kind=kind, key=key, number=known + known % 2)

    def cut(self, intervals: Sequence[Interval]) -> Cut | None:
        """The cut that it asks for; ``None`` if the keys are cut like that already.

        Args:
            intervals: those of the computation, in key order.
        """
        at = locate([interval.low for interval in intervals], self.key)
        is_bound = intervals[at].low == self.key
        if self.kind == "split":
            return None if is_bound else Cut.split(intervals[at], [self.key])
        return Cut.merge(intervals[at - 1 : at + 1]) if is_bound and at else None


def waiting_requests(txns: Mapping[str, int]) -> tuple[CutRequest, ...]:
    """The requests that no commit has answered.

    Example:
        >>> waiting_requests({cut_app_id("counter", "split", "m"): 2, cut_app_id("counter", "merge", "g"): 5})
        (CutRequest(computation='counter', kind='split', key='m', number=2),)
    """
    found = []
    for app_id, number in txns.items():
        if number % 2 == 0 and app_id.startswith(CUT_PREFIX):
            computation, kind, key = app_id_parts(app_id, CUT_PREFIX)
            found.append(
                CutRequest(
                    computation=computation,
                    kind="split" if kind == "split" else "merge",
                    key=key,
                    number=number,
                )
            )
    return tuple(sorted(found, key=lambda request: (request.computation, request.key)))
