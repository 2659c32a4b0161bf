"""Sessions that only wait for their end, of all keys of a bundle at once, as columns.

A bundle's elements are sessions among themselves first: in order of time, an element that begins a gap or more after the
one before begins another. Then they and the sessions that are open are joined where they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.executor.windows.waiting_columns import Spans, WaitingColumns, WindowArrays
from millpond.statestore.durations import duration_us

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class SessionColumns(WaitingColumns):
    """The rows of keys of one interval whose sessions only wait."""

    def _measure(self, window_fn: Any) -> None:
        self._size_us = duration_us(window_fn.gap)

    def _is_own(self, start: int, end: int) -> bool:
        return end - start >= self._size_us

    def _assigned(self, owner: _Index, times: _Index) -> tuple[_Index, _Index, _Index]:
        # Each element has a window of the gap's length, until windows are joined.
        return owner, times, np.arange(len(times))

    def _is_apart(self, starts: _Index) -> _Mask:
        apart: _Mask = np.diff(starts) >= self._size_us
        return apart

    def _leave_odd(
        self, is_here: _Mask, keys: Sequence[str], owner: _Index, starts: _Index, watermark: int
    ) -> None:
        """Leave keys out with elements for a session that has ended and not expired: it gets late panes."""
        sessions = self._owned(self._numbers_of(keys))[1]
        has_ended = (sessions.end <= watermark) & (sessions.end + self._lateness_us > watermark)
        last_end = np.full(len(keys), np.iinfo(np.int64).min)
        np.maximum.at(last_end, sessions.owner[has_ended], sessions.end[has_ended])
        # An element whose own window is live ends after all of these.
        is_here[owner[starts < last_end[owner]]] = False

    def _merged(
        self, former: WindowArrays, arrived: WindowArrays, watermark: int
    ) -> tuple[WindowArrays, _Mask]:
        is_growing = former.is_open & (former.end > watermark)
        growing, others = former.at(is_growing), former.at(~is_growing)
        both = growing.with_others(arrived)
        is_new = np.zeros(len(both.owner), np.bool_)
        if len(both.owner):
            order = np.lexsort((both.start, both.owner))
            is_arrived = order >= len(growing.owner)
            both = both.at(order)
            last_end = _last_ends(both.owner, both.end)
            is_more = np.concatenate(
                [[False], (both.owner[1:] == both.owner[:-1]) & (both.start[1:] < last_end[:-1])]
            )
            firsts = np.flatnonzero(~is_more)
            nexts = np.append(firsts[1:], len(both.owner))
            joined = WindowArrays(
                both.owner[firsts],
                both.start[firsts],
                last_end[nexts - 1],
                np.add.reduceat(both.news, firsts),
                self._column.merged(both.total, is_arrived, firsts),
                np.ones(len(firsts), np.bool_),
            )
            # Where an open session has these bounds, it has its timers.
            same = ~is_arrived & (both.end == np.repeat(joined.end, nexts - firsts))
            same &= both.start == np.repeat(joined.start, nexts - firsts)
            is_new = ~np.logical_or.reduceat(same, firsts)
            both = joined
        both = both.with_others(others)
        order = np.lexsort((both.start, both.owner))
        return both.at(order), np.concatenate([is_new, np.zeros(len(others.owner), np.bool_)])[order]

    def _spans(self, windows: WindowArrays) -> Spans:
        return Spans.between(np.arange(len(windows.start)), windows.start, windows.end)


def _last_ends(owner: _Index, ends: _Index) -> _Index:
    """Return for each window the latest end of its owner's windows up to it; owners ascend."""
    distinct, rank = np.unique(ends, return_inverse=True)
    # An owner's ranks are above those of all owners before it.
    ranks = np.maximum.accumulate(owner * len(distinct) + rank)
    found: _Index = distinct[ranks % len(distinct)]
    return found
