"""
An index of a table's live files by path, by computation and by interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.statestore.interval import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millpond.statestore.log.live_file import LiveFile

__all__ = ["FileIndex"]


class FileIndex:
    """
    Live files, grouped by computation and then by the interval that they were written for.

    `put` and `remove` take constant time. Files of other engines name no interval;
    they form a group of their own (""), in which key ranges decide.

    Attributes:
        size_bytes: size of all live files together.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, LiveFile] = {}
        self._groups: dict[str, dict[str, dict[str, LiveFile]]] = {}
        self.size_bytes: int = 0

    def __len__(self) -> int:
        return len(self._by_path)

    def get(self, path: str) -> LiveFile | None:
        """
        The live file at a path; ``None`` if there is none.
        """
        return self._by_path.get(path)

    def put(self, file: LiveFile) -> None:
        """
        Add a file, or replace the entry at its path.
        """
        self.remove(file.path)
        self._by_path[file.path] = file
        self.size_bytes += file.size_bytes
        groups = self._groups.setdefault(file.computation, {})
        groups.setdefault(file.interval_id, {})[file.path] = file

    def remove(self, path: str) -> None:
        """
        Remove a file; an unknown path is ignored.
        """
        file = self._by_path.pop(path, None)
        if file is None:
            return
        self.size_bytes -= file.size_bytes
        groups = self._groups[file.computation]
        group = groups[file.interval_id]
        del group[path]
        if not group:
            del groups[file.interval_id]
        if not groups:
            del self._groups[file.computation]

    def all(self) -> tuple[LiveFile, ...]:
        """
        Every live file in the order in which they were added.
        """
        return _in_order(self._by_path.values())

    def computations(self) -> tuple[str, ...]:
        """
        The computations that have live files, sorted.
        """
        return tuple(sorted(self._groups))

    def in_computation(self, computation: str) -> tuple[LiveFile, ...]:
        """
        The live files of a computation in the order in which they were added.
        """
        groups = self._groups.get(computation, {})
        return _in_order(file for group in groups.values() for file in group.values())

    def in_interval(self, interval: Interval) -> tuple[LiveFile, ...]:
        """
        The live files that can hold keys of the interval, in the order in which they were added.
        """
        own = interval.app_id
        files: list[LiveFile] = []
        for app_id, group in self._groups.get(interval.computation, {}).items():
            if app_id == own:
                files.extend(group.values())
            elif _may_overlap(app_id, interval):
                files.extend(file for file in group.values() if file.overlaps(interval))
        return _in_order(files)


def _may_overlap(app_id: str, interval: Interval) -> bool:
    other = Interval.from_app_id(app_id)
    return other is None or (
        (other.high is None or other.high > interval.low)
        and (interval.high is None or other.low < interval.high)
    )


def _in_order(files: Iterable[LiveFile]) -> tuple[LiveFile, ...]:
    return tuple(sorted(files, key=lambda file: (file.added_version, file.path)))
