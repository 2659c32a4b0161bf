"""Orphans: row files that no commit ever named, left by tasks that failed or ran twice.

A file's name contains its superstep, and a committed superstep accepts no more files. So a file of
a past superstep that the log does not name is garbage, regardless of who wrote it and when
it lands. Only the owner of a computation may conclude this, though: the output of a
compaction in preparation has such a name too, and only the owner knows that there is none;
a former owner's compaction is fenced. And an owner may have lost the interval without knowing it: the
files were listed before the log was read, so if the log still names this owner, no other owner's
compaction was among the files; if it does not, nothing is deleted. Files with other names belong to
other engines and stay.

The replayed log may have forgotten a file that it once named: checkpoints of other engines omit files
removed a week ago. So before anything is deleted, all retained versions are checked: the files of the
horizon's version, the files added by every commit since, and the files of open savepoints.

Vacuum: delete data files that the table has removed and that no readable version needs.

A file is deleted when its removal is settled: it was removed at or before the horizon, and no commit
has added it again since. So no version at or after the horizon contains it. Files of savepoints stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final
from urllib.parse import unquote

from millpond.gc.collector import Collection, Survey
from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.types import Objects, Sequencer, Superstep, TableVersion

_DELETED_AT_ONCE: Final = 1_000


class VacuumCollector:
    """Deletes removed data files behind the horizon.

    Args:
        survey: the survey of the store.
    """

    kind = "vacuum"

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    def collect(self, *, dry_run: bool = False) -> Collection:
        """Delete the files, or only list them on a dry run.

        Raises:
            UnavailableError: the store is unavailable; some files may be deleted.
        """
        sizes = self._garbage()
        if not dry_run:
            delete_files(self._survey.objects, sizes)
        return Collection(kind=self.kind, paths=tuple(sizes), freed_bytes=sum(sizes.values()))

    def _garbage(self) -> dict[str, int]:
        survey = self._survey
        if survey.settled is None:
            return {}
        newest = survey.newest
        return {
            path: remove.size_bytes or 0
            for path, remove in sorted(survey.settled.removes.items())
            if path in survey.data_files
            and path not in survey.pinned
            and path not in newest.adds
            # If a file was removed, added and removed again, the later removal counts.
            and newest.removes.get(path, remove).deletion_time_ms == remove.deletion_time_ms
        }


def delete_files(objects: Objects, paths: Iterable[str]) -> None:
    """Delete files in bounded batches.

    Raises:
        UnavailableError: the store is unavailable; some files may be deleted.
    """
    rest = iter(paths)
    while batch := list(islice(rest, _DELETED_AT_ONCE)):
        reach("garbage.before_delete")
        objects.delete(batch)
        reach("garbage.deleted")


_OWN_NAME: Final = re.compile(r"^computation=([^/]*)/(\d{10,})-[0-9a-f]{32}\.parquet$")
_READ_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Owned:
    """An interval that the caller owns, or believes to own.

    Attributes:
        sequencer: the sequencer of the caller's lease.
        superstep: the last superstep that the caller has committed.
    """

    sequencer: Sequencer
    superstep: Superstep


class OrphanCollector:
    """Deletes row files of past supersteps that were never committed.

    Args:
        survey: the survey of the store, made after the intervals were taken.
        owned: the intervals that the caller owns. Where they cover only a part of a computation
            (several pipelines share the dead letters), the file's keys are read to decide.
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
        """Delete the files, or only list them on a dry run.

        Raises:
            DataError: a retained version cannot be read; nothing was deleted.
            UnavailableError: the store is unavailable; some files may be deleted.
        """
        unnamed = tuple(self._unnamed())
        needed = self._needed() | self._added_since_horizon(unnamed) if unnamed else frozenset()
        paths = tuple(path for path in unnamed if path not in needed)
        if not dry_run:
            delete_files(self._survey.objects, paths)
        return Collection(kind=self.kind, paths=paths)

    def _needed(self) -> frozenset[str]:
        survey = self._survey
        try:
            return survey.pinned | replay_log(Log(survey.objects), survey.horizon.version).adds.keys()
        except ObjectMissingError:
            # The log does not reach back that far: that version is unreadable.
            return survey.pinned

    def _added_since_horizon(self, unnamed: Iterable[str]) -> frozenset[str]:
        """The files among ``unnamed`` that a commit after the horizon added; newest commits first, until none is left."""
        survey, log = self._survey, Log(self._survey.objects)
        left, needed = set(unnamed), set[str]()
        for number in range(survey.newest.version, survey.horizon.version, -1):
            if not left:
                break
            version = TableVersion(number)
            data = log.read(version)
            if data is None:
                # Another process cleaned the log: what that commit added is unknown; keeping files costs only space.
                return frozenset(unnamed)
            added = {action.path for action in decode(data, commit_path(version)) if isinstance(action, Add)}
            needed |= added & left
            left -= added
        return frozenset(needed)

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
                if self._holds_only_keys_of(path, past):
                    yield path

    def _holds_only_keys_of(self, path: str, intervals: list[Interval]) -> bool:
        try:
            keys = read_row_files(self._survey.objects, [path], ["key"]).column("key").to_pylist()
        except DataError:
            # The owner of an unreadable file is unknown; keeping it costs only space.
            return False
        return all(any(interval.contains(key) for interval in intervals) for key in keys)


def _cover_everything(intervals: list[Interval]) -> bool:
    ordered = sorted(intervals, key=lambda interval: interval.low)
    highs = [interval.high for interval in ordered]
    lows = [interval.low for interval in ordered]
    return lows[0] == "" and highs[-1] is None and highs[:-1] == lows[1:]
