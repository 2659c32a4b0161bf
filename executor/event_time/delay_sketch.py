"""Delay sketches: how far behind the newest record later records come, at any percentile.

A t-digest of Apache DataSketches (the ``datasketches`` wheel, from the project that Druid and
Spark take their sketches from): 5 KB whatever has been seen, sharpest at the tails, where
marks such as 99 lie, mergeable across tasks, and, unlike the KLL sketches of the same library, without
randomness, so that a simulation repeats itself. It stands in for the exact distribution that
MillWheel §7.2 needs for percentile low watermarks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from millpond.statestore.errors import InvalidError

_ACCURACY: Final = 200
_GENERATION: Final = 100_000
"""Delays after which the older half is forgotten, so that a source may change its habits."""


def check_percentile(percentile: float) -> float:
    """Refuse what is no percentile: it must lie above 0 and not above 100.

    Raises:
        InvalidError: it does not.
    """
    if isinstance(percentile, bool) or not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise InvalidError("a percentile lies above 0 and not above 100", percentile=percentile)
    return float(percentile)


class DelaySketch:
    """The distribution of some delays in microseconds; travels from tasks to the driver."""

    __slots__ = ("_digest",)

    def __init__(self, serialized: bytes | None = None) -> None:
        from datasketches import tdigest_double

        self._digest = (
            tdigest_double(_ACCURACY) if serialized is None else tdigest_double.deserialize(serialized)
        )

    def __reduce__(self) -> tuple[type[DelaySketch], tuple[bytes]]:
        """Travel as the library's own bytes."""
        return DelaySketch, (self._digest.serialize(),)

    def __len__(self) -> int:
        return int(self._digest.get_total_weight())

    def add(self, delays: npt.NDArray[np.int64]) -> None:
        """Take in a column of delays."""
        self._digest.update(delays.astype(np.float64))

    def merge(self, other: DelaySketch) -> None:
        """Take in what another sketch has seen."""
        self._digest.merge(other._digest)

    def at(self, percentile: float) -> int:
        """The delay that ``percentile`` percent of the records do not exceed; 0 before the first record."""
        if not len(self):
            return 0
        delay: float = self._digest.get_quantile(percentile / 100)
        return round(delay)


class RecentDelays:
    """The delays of the last 100,000 to 200,000 records: two sketches, the older one forgotten in turn."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        self._older: DelaySketch | None = None
        self._newer: DelaySketch | None = None

    def __len__(self) -> int:
        return sum(len(sketch) for sketch in (self._older, self._newer) if sketch is not None)

    def merge(self, seen: DelaySketch) -> None:
        """Take in the delays of a superstep."""
        if self._newer is None:
            self._newer = DelaySketch()
        self._newer.merge(seen)
        if len(self._newer) >= _GENERATION:
            self._older, self._newer = self._newer, None

    def at(self, percentile: float) -> int:
        """The delay that ``percentile`` percent of the recent records do not exceed; 0 when there are none."""
        both = DelaySketch()
        for sketch in (self._older, self._newer):
            if sketch is not None:
                both.merge(sketch)
        return both.at(percentile)
