"""The load of intervals: what their bundles took, superstep by superstep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from millpond.executor.bundle.result import Manifest
from millpond.statestore.interval import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLoad:
    """What an interval took in a superstep, by the median of the last ones.

    Attributes:
        work_ms: the time that its bundles took, of a processor where the runner can tell.
        records: the records and timers that they processed.
        keys: keys that were worked on, each about as often as it was.
        home: the process that ran it last; empty for that of the coordinator.
    """

    work_ms: float
    records: float
    keys: tuple[str, ...] = ()
    home: str = ""


@dataclass(slots=True)
class _Seen:
    work_us: deque[int]
    records: deque[int]
    keys: deque[tuple[str, ...]]
    home: str = ""


class Loads:
    """The last supersteps of each interval.

    Args:
        window: how many supersteps count.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: dict[Interval, _Seen] = {}

    def note(self, manifests: Iterable[Manifest], live: Iterable[Interval]) -> None:
        """Take in what a superstep reports; an interval without a bundle has had nothing to do.

        Args:
            manifests: of the intervals that ran.
            live: all intervals that may have run.
        """
        by_interval = {manifest.interval: manifest for manifest in manifests}
        for interval in live:
            seen = self._seen.get(interval)
            if seen is None:
                seen = self._seen[interval] = _Seen(
                    deque(maxlen=self._window), deque(maxlen=self._window), deque(maxlen=self._window)
                )
            manifest = by_interval.get(interval)
            statistics = None if manifest is None else manifest.result.statistics
            seen.work_us.append(0 if manifest is None else manifest.work_us)
            seen.records.append(0 if statistics is None else statistics.records + statistics.timers)
            seen.keys.append(() if manifest is None else manifest.result.key_sample)
            if manifest is not None:
                seen.home = manifest.home

    def forget(self, intervals: Iterable[Interval]) -> None:
        """Forget intervals that are no more."""
        for interval in intervals:
            self._seen.pop(interval, None)

    def of(self, intervals: Iterable[Interval]) -> Mapping[Interval, IntervalLoad] | None:
        """The loads of some intervals; ``None`` while one of them has not been seen for as many supersteps as count."""
        chosen = list(intervals)
        is_known = all(
            interval in self._seen and len(self._seen[interval].work_us) == self._window
            for interval in chosen
        )
        return self.so_far(chosen) if is_known else None

    def so_far(self, intervals: Iterable[Interval]) -> Mapping[Interval, IntervalLoad]:
        """The loads of those of the intervals that have been seen at all."""
        return {
            interval: IntervalLoad(
                work_ms=median(seen.work_us) / 1_000,
                records=median(seen.records),
                keys=tuple(key for keys in seen.keys for key in keys),
                home=seen.home,
            )
            for interval in intervals
            if (seen := self._seen.get(interval)) is not None
        }
