"""An index of a table's live files by path, by computation and by interval."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from millpond.statestore.interval import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millpond.statestore.log.live_file import LiveFile

_AGE: Final = attrgetter("added_version", "path")


class FileIndex:
    """Live files, grouped by computation and then by the interval that they were written for.

    `put` and `remove` take constant time, and `in_interval` no longer with more intervals. Files of other
    engines name no interval; they form a group of their own (""), in which key ranges decide.

    Attributes:
        size_bytes: size of all live files together.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, LiveFile] = {}
        self._statistics: dict[str, str] = {}
        self._computations: dict[str, _Groups] = {}
        self.size_bytes: int = 0

    def __len__(self) -> int:
        return len(self._by_path)

    def get(self, path: str) -> LiveFile | None:
        """The live file at a path; ``None`` if there is none."""
        return self._by_path.get(path)

    def statistics_of(self, path: str) -> str | None:
        """The statistics of the live file at a path, as the log has them; ``None`` if there are none."""
        return self._statistics.get(path)

    def put(self, file: LiveFile, statistics: str | None = None) -> None:
        """Add a file, or replace the entry at its path.

        Args:
            file: the file.
            statistics: its statistics as the log has them. They are no part of `LiveFile`, whose values
                travel to the tasks of each superstep.
        """
        self.remove(file.path)
        self._by_path[file.path] = file
        if statistics is not None:
            self._statistics[file.path] = statistics
        self.size_bytes += file.size_bytes
        groups = self._computations.get(file.computation)
        if groups is None:
            groups = self._computations[file.computation] = _Groups()
        groups.put(file)

    def remove(self, path: str) -> None:
        """Remove a file; an unknown path is ignored."""
        file = self._by_path.pop(path, None)
        if file is None:
            return
        self._statistics.pop(path, None)
        self.size_bytes -= file.size_bytes
        groups = self._computations[file.computation]
        groups.remove(file)
        if not groups.files:
            del self._computations[file.computation]

    def all(self) -> tuple[LiveFile, ...]:
        """Every live file in the order in which they were added."""
        return _in_order(self._by_path.values())

    def computations(self) -> tuple[str, ...]:
        """The computations that have live files, sorted."""
        return tuple(sorted(self._computations))

    def in_computation(self, computation: str) -> tuple[LiveFile, ...]:
        """The live files of a computation in the order in which they were added."""
        groups = self._computations.get(computation)
        return (
            () if groups is None else _in_order(chain.from_iterable(map(dict.values, groups.files.values())))
        )

    def in_interval(self, interval: Interval) -> tuple[LiveFile, ...]:
        """The live files that can hold keys of the interval, in the order in which they were added."""
        groups = self._computations.get(interval.computation)
        return () if groups is None else _in_order(groups.in_interval(interval))


class _Groups:
    """The live files of a computation by the application id that they name; no group is empty."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, LiveFile]] = {}
        self._spans: _Spans | None = None

    def put(self, file: LiveFile) -> None:
        group = self.files.get(file.interval_id)
        if group is None:
            group = self.files[file.interval_id] = {}
            self._spans = None
        group[file.path] = file

    def remove(self, file: LiveFile) -> None:
        group = self.files[file.interval_id]
        del group[file.path]
        if not group:
            del self.files[file.interval_id]
            self._spans = None

    def in_interval(self, interval: Interval) -> list[LiveFile]:
        own = interval.app_id
        files = list(self.files.get(own, {}).values())
        if self._spans is None:
            self._spans = _Spans.of(self.files)
        for app_id in self._spans.overlapping(interval):
            if app_id != own:
                files += [file for file in self.files[app_id].values() if file.overlaps(interval)]
        return files


@dataclass(frozen=True, slots=True)
class _Spans:
    """The intervals of some groups in key order, to find those that overlap a given one.

    Attributes:
        lows: their low bounds, rising.
        highs: their high bounds.
        reaches: for each the greatest high bound up to there.
        app_ids: their groups.
        others: groups that name no interval, and may overlap any.
    """

    lows: list[str]
    highs: list[str | None]
    reaches: list[str | None]
    app_ids: list[str]
    others: list[str]

    @classmethod
    def of(cls, app_ids: Iterable[str]) -> _Spans:
        parsed = [(Interval.from_app_id(app_id), app_id) for app_id in app_ids]
        ordered = sorted((interval.low, app_id, interval.high) for interval, app_id in parsed if interval)
        highs = [high for _, _, high in ordered]
        return cls(
            lows=[low for low, _, _ in ordered],
            highs=highs,
            reaches=list(accumulate(highs, _greater_bound)),
            app_ids=[app_id for _, app_id, _ in ordered],
            others=[app_id for interval, app_id in parsed if interval is None],
        )

    def overlapping(self, interval: Interval) -> Iterator[str]:
        """The groups whose interval shares a key with ``interval``, and those that name none."""
        yield from self.others
        end = len(self.lows) if interval.high is None else bisect_left(self.lows, interval.high)
        for index in range(end - 1, -1, -1):
            if not _is_beyond(self.reaches[index], interval.low):
                return
            if _is_beyond(self.highs[index], interval.low):
                yield self.app_ids[index]


def _greater_bound(left: str | None, right: str | None) -> str | None:
    return None if left is None or right is None else max(left, right)


def _is_beyond(high: str | None, key: str) -> bool:
    return high is None or high > key


def _in_order(files: Iterable[LiveFile]) -> tuple[LiveFile, ...]:
    return tuple(sorted(files, key=_AGE))
