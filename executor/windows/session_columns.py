"""Sessions that only wait for their end, of all keys of a bundle at once, as columns.

A bundle's elements are sessions among themselves first: in order of time, an element that begins a gap or more after the
one before begins another. Then they and the sessions that are open are joined where they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.executor.windows.waiting_columns import Spans, WaitingColumns, WindowArrays, in_order
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
        ends = self._windows.end
        if not ((ends <= watermark) & (ends + self._lateness_us > watermark)).any():
            return
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
        if not len(arrived.owner):
            windows, _ = in_order(former, arrived)
            return windows, np.zeros(len(windows.owner), np.bool_)
        both, is_arrived = in_order(growing, arrived)
        last_end = _last_ends(both.owner, both.end)
        joined, firsts = self._joined(both, is_arrived, both.start[1:] < last_end[:-1], last_end)
        # Where an open session has these bounds, it has its timers.
        parts = np.diff(np.append(firsts, len(both.owner)))
        is_same = (both.start == np.repeat(joined.start, parts)) & (both.end == np.repeat(joined.end, parts))
        is_new = ~np.logical_or.reduceat(is_same & ~is_arrived, firsts)
        windows, is_other = in_order(joined, others)
        found = np.zeros(len(windows.owner), np.bool_)
        found[~is_other] = is_new
        return windows, found

    def _spans(self, windows: WindowArrays) -> Spans:
        return Spans.between(np.arange(len(windows.start)), windows.start, windows.end)


def _last_ends(owner: _Index, ends: _Index) -> _Index:
    """Return for each window the latest end of its owner's windows up to it; owners ascend."""
    distinct, rank = np.unique(ends, return_inverse=True)
    # An owner's ranks are above the ranks of all owners before it.
    ranks = np.maximum.accumulate(owner * len(distinct) + rank)
    found: _Index = distinct[ranks % len(distinct)]
    return found
