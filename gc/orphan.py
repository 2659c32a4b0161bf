"""
Orphans: row files that no commit ever named, left by tasks that failed or ran twice (fact F12).

A file's name tells its superstep, and a superstep that has been committed takes no file any
more. So a file that the log knows nothing of, of a superstep that is past, belongs to nobody,
whoever wrote it and whenever it lands. Only the owner of a computation may say so, though: a
compaction that is being prepared has such a name too, and only the owner knows that there is none;
a former owner's compaction is fenced. And an owner may be a former one without knowing it: the files
were listed before the log was read, so where the log still names him, nobody else's compaction was
among them, and where it does not, nothing goes. Files with other names are other engines', and
stay.

The log's sum may have forgotten a file that it named: checkpoints of other engines leave out what was
removed a week ago. So before anything goes, all versions that are kept are looked at: what the
horizon's has and every commit since has added, and what open savepoints have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from millpond.gc.collector import Collection
from millpond.gc.replayed_log import sum_log
from millpond.gc.survey import Survey
from millpond.gc.vacuum import delete_files
from millpond.statestore.catalog.facts import savepoints_of
from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.types import Sequencer, Superstep, TableVersion

__all__ = ["OrphanCollector", "Owned"]

_OWN_NAME: Final = re.compile(r"^computation=([^/]*)/(\d{10,})-[0-9a-f]{32}\.parquet$")
_READ_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Owned:
    """
    What the caller knows of an interval that he owns, or believes to own.

    Attributes:
        sequencer: of his lease.
        superstep: the last one that he has committed.
    """

    sequencer: Sequencer
    superstep: Superstep


class OrphanCollector:
    """
    Deletes row files of past supersteps that were never committed.

    Args:
        survey: the store as it was found, after the intervals were taken.
        owned: the intervals that the caller owns. An interval that is not all of its computation
            (several pipelines share their dead letters) is told from the others by reading the
            file's keys.
    """

    kind = "orphans"

    def __init__(self, survey: Survey, owned: Mapping[Interval, Owned]) -> None:
        self._survey = survey
        self._owned: dict[str, list[tuple[Interval, Superstep]]] = {}
        for interval, known in owned.items():
            fence = survey.newest.snapshot.fence_of(interval)
            if fence is not None and fence.sequencer == known.sequencer:
                self._owned.setdefault(interval.computation, []).append((interval, known.superstep))

    def collect(self, *, dry_run: bool = False) -> Collection:
        """
        Delete them, or name them.

        Raises:
            DataError: a version that is kept cannot be read; nothing was taken away.
            UnavailableError: the store is away; some may be gone.
        """
        unnamed = tuple(self._unnamed())
        needed = self._needed() | self._added_since_horizon(unnamed) if unnamed else frozenset()
        paths = tuple(path for path in unnamed if path not in needed)
        if not dry_run:
            delete_files(self._survey.objects, paths)
        return Collection(kind=self.kind, paths=paths)

    def _needed(self) -> frozenset[str]:
        seen, log = self._survey, Log(self._survey.objects)
        kept = {seen.horizon.version}
        kept |= {
            TableVersion(at) for _, at in savepoints_of(seen.newest.snapshot.txns) if at < seen.newest.version
        }
        needed: set[str] = set()
        for version in sorted(kept):
            try:
                needed.update(sum_log(log, version).adds)
            except ObjectMissingError:
                # The log does not reach back that far: nobody can read that version.
                continue
        return frozenset(needed)

    def _added_since_horizon(self, unnamed: Iterable[str]) -> frozenset[str]:
        """
        Those that some commit after the horizon has added; the newest commits first, until all are found.
        """
        seen, log = self._survey, Log(self._survey.objects)
        left, found = set(unnamed), set[str]()
        for number in range(seen.newest.version, seen.horizon.version, -1):
            if not left:
                break
            version = TableVersion(number)
            data = log.read(version)
            if data is None:
                # Somebody else cleaned the log: what that commit has added cannot be told, and costs only space.
                return frozenset(unnamed)
            added = {action.path for action in decode(data, commit_path(version)) if isinstance(action, Add)}
            found |= added & left
            left -= added
        return frozenset(found)

    def _unnamed(self) -> Iterator[str]:
        newest, reads = self._survey.newest, 0
        for path in sorted(self._survey.data_files):
            match = _OWN_NAME.match(path)
            if match is None or path in newest.adds or path in newest.removes:
                continue
            owned = self._owned.get(unquote(match[1]), [])
            past = [interval for interval, superstep in owned if int(match[2]) <= superstep]
            if not past or len(past) < len(owned):
                continue
            if _cover_everything(past):
                yield path
            elif reads < _READ_MAX:
                reads += 1
                if self._is_in(path, past):
                    yield path

    def _is_in(self, path: str, intervals: list[Interval]) -> bool:
        try:
            keys = read_row_files(self._survey.objects, [path], ["key"]).column("key").to_pylist()
        except DataError:
            # What cannot be read cannot be told apart either; it costs only space.
            return False
        return all(any(interval.contains(key) for interval in intervals) for key in keys)


def _cover_everything(intervals: list[Interval]) -> bool:
    ordered = sorted(intervals, key=lambda interval: interval.low)
    highs = [interval.high for interval in ordered]
    return ordered[0].low == "" and highs[-1] is None and highs[:-1] == [each.low for each in ordered[1:]]
