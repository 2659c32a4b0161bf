"""The interval map of low watermark holds of one computation (MillWheel §7.2).

Every interval's owner reports what its rows still owe. The map covers what it has heard of:
a report replaces exactly the keys that it is about, so intervals may split and merge, and a
part from which nothing new has come counts with its last value. A former owner, known by its
lower sequencer, is refused. A report and the minimum cost O(log n), at 500,000 intervals too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from millpond.statestore.errors import FencedError
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, Sequencer

_SLACK: Final = 64
"""Dead heap entries that are always tolerated; beyond it, at most as many as there are live ones."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The keys from some low bound up to ``high``, and what was last said of them."""

    high: str | None
    sequencer: Sequencer
    hold: EventTimeMicros


class IntervalMap:
    """Last known holds of a computation's intervals."""

    __slots__ = ("_heap", "_lows", "_pieces")

    def __init__(self) -> None:
        self._pieces: dict[str, _Piece] = {}
        self._lows: list[str] = []
        self._heap: list[tuple[EventTimeMicros, str]] = []

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def least(self) -> EventTimeMicros:
        """The oldest hold of all; after all time when nothing is owed."""
        while self._heap:
            hold, low = self._heap[0]
            piece = self._pieces.get(low)
            if piece is not None and piece.hold == hold:
                return hold
            heapq.heappop(self._heap)
        return TIME_MAX_US

    def expect(self, intervals: Iterable[Interval]) -> None:
        """Name intervals from which a report must come before the watermark may move on."""
        for interval in sorted(intervals):
            if not self._overlapped(interval):
                self._replace(interval, _Piece(interval.high, Sequencer(0), TIME_MIN_US))

    def report(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """Take in what an interval's owner says that it owes; ``None`` is nothing.

        Raises:
            FencedError: the reporter is no longer the owner of some of these keys.
        """
        piece = _Piece(interval.high, sequencer, TIME_MAX_US if hold is None else hold)
        known = self._pieces.get(interval.low)
        if known is None or known.high != interval.high:
            self._replace(interval, piece)
            return
        _check_sequencer(interval, piece, known)
        self._pieces[interval.low] = piece
        if piece.hold != known.hold:
            self._remember(interval.low, piece)

    def _replace(self, interval: Interval, piece: _Piece) -> None:
        overlapped = self._overlapped(interval)
        for low in overlapped:
            _check_sequencer(interval, piece, self._pieces[low])
        for low in overlapped:
            self._carve(low, interval)
        self._insert(interval.low, piece)

    def _overlapped(self, interval: Interval) -> list[str]:
        first = max(bisect_right(self._lows, interval.low) - 1, 0)
        last = len(self._lows) if interval.high is None else bisect_left(self._lows, interval.high)
        return [low for low in self._lows[first:last] if _is_below(interval.low, self._pieces[low].high)]

    def _carve(self, low: str, interval: Interval) -> None:
        """Leave of a piece only what lies outside ``interval``."""
        piece = self._pieces.pop(low)
        self._lows.pop(bisect_left(self._lows, low))
        if low < interval.low:
            self._insert(low, _Piece(interval.low, piece.sequencer, piece.hold))
        if interval.high is not None and _is_below(interval.high, piece.high):
            self._insert(interval.high, piece)

    def _insert(self, low: str, piece: _Piece) -> None:
        self._pieces[low] = piece
        insort(self._lows, low)
        self._remember(low, piece)

    def _remember(self, low: str, piece: _Piece) -> None:
        if piece.hold != TIME_MAX_US:
            heapq.heappush(self._heap, (piece.hold, low))
        if len(self._heap) > 2 * len(self._pieces) + _SLACK:
            self._heap = [(p.hold, low) for low, p in self._pieces.items() if p.hold != TIME_MAX_US]
            heapq.heapify(self._heap)


def _is_below(key: str, high: str | None) -> bool:
    return high is None or key < high


def _check_sequencer(interval: Interval, piece: _Piece, known: _Piece) -> None:
    if piece.sequencer < known.sequencer:
        raise FencedError(
            "a former owner reports a watermark",
            interval=interval.app_id,
            sequencer=piece.sequencer,
            newest=known.sequencer,
        )
