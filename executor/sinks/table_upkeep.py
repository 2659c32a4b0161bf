"""Upkeep of a sink's table: checkpoints, compaction and cleanup, as the Delta properties of the table ask.

What is due follows from the table's version, so a process that stops in between leaves it to the next one. A delivery never
waits for upkeep and never fails with it, and upkeep gives way to every other writer.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from millpond.gc.collectors import collect_log, collect_removed
from millpond.gc.compaction import CompactionPolicy
from millpond.gc.survey import Horizons, survey
from millpond.statestore.errors import DataError, MillpondError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.replayed_log import ReplayedLog, replay_log
from millpond.statestore.history.savepoint import write_checkpoint_of
from millpond.statestore.log.action import Add, Metadata
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.log.table import Compact
from millpond.statestore.log.writer import LogWriter
from millpond.statestore.objects.ranges import ParallelObjects
from millpond.statestore.types import Clock, Objects, TableVersion

COMPACTION: Final = CompactionPolicy(fan_in=16, memory_bytes_max=1 << 25)
"""A sink's files are compacted in tiers; together they are at most ``memory_bytes_max``."""

FILE_BYTES_MAX: Final = 1 << 24
"""A larger file is never compacted again."""

_LOG: Final = logging.getLogger("millpond")
_LOOK_EVERY: Final = 4
_CHECKPOINTS_A_CLEANUP: Final = 16
# In an object store, where a cleanup takes some thirty requests for each of its two horizons …
_FAR_CHECKPOINTS_A_CLEANUP: Final = 64
_CHECKPOINT_INTERVAL: Final = 10
_INTERVAL_PROPERTY: Final = "delta.checkpointInterval"
# Commits that a start may read rather than that two requests are made for a checkpoint.
_BEHIND_MAX: Final = 3
_ACTIONS_A_COMMIT: Final = 256
# … and a start one for each commit after the last checkpoint.
_FAR_ACTIONS_A_COMMIT: Final = 1_024
_DAY_MS: Final = 86_400_000
_INTERVAL: Final = re.compile(r"(\d+)\s*(week|day|hour|minute|second|millisecond)s?")
_UNIT_MS: Final = {
    "week": 7 * _DAY_MS,
    "day": _DAY_MS,
    "hour": 3_600_000,
    "minute": 60_000,
    "second": 1_000,
    "millisecond": 1,
}


class CompactedTable(Protocol):
    """A table that can find and merge its small files."""

    def small_files(self, snapshot: Snapshot) -> Sequence[LiveFile]:
        """Return files to merge now; none while there are too few."""

    def merged(self, files: Sequence[LiveFile]) -> Iterable[Add]:
        """Write the rows of files to larger ones, which no commit names yet."""


@dataclass(slots=True)
class TableUpkeep:
    """The upkeep of one open table; `due` belongs to the thread that delivers."""

    objects: Objects
    writer: LogWriter
    clock: Clock
    table: CompactedTable
    guard: Callable[[Snapshot], None]
    lock: AbstractContextManager[object]
    _looked_at: TableVersion = field(init=False)
    _checkpointed: TableVersion = field(init=False)
    _replayed: ReplayedLog | None = field(init=False, default=None)
    _is_busy: bool = field(init=False, default=False)
    _is_damaged: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        opened = self.writer.snapshot.version
        self._looked_at = opened
        # As if the runs before had done their part: so many short runs do it together.
        self._checkpointed = TableVersion(
            opened - opened % checkpoint_interval(self.writer.snapshot.configuration)
        )

    @property
    def _is_far(self) -> bool:
        return isinstance(self.objects, ParallelObjects)

    def due(self) -> Callable[[], None] | None:
        """Return the work that the commits since the last call have made due, for any thread; else ``None``."""
        snapshot = self.writer.snapshot
        before, now = self._looked_at, snapshot.version
        if self._is_busy or self._is_damaged or before == now:
            return None
        self._looked_at = now
        work: list[Callable[[], object]] = []
        if before // _LOOK_EVERY < now // _LOOK_EVERY and (small := self.table.small_files(snapshot)):
            work.append(partial(self._compact, small))
        every = self._checkpoint_every(snapshot)
        if now - self._checkpointed >= every:
            cleanup_every = every * (_FAR_CHECKPOINTS_A_CLEANUP if self._is_far else _CHECKPOINTS_A_CLEANUP)
            if self._checkpointed // cleanup_every < now // cleanup_every and snapshot.metadata is not None:
                # Before the checkpoint, which forgets the deleted files: the next one may be that of another process.
                work.append(partial(self._clean_up, snapshot.metadata))
            work.append(self._write_checkpoint)
            self._checkpointed = now
        self._is_busy = bool(work)
        return partial(self._do, work) if work else None

    def close(self) -> None:
        """Write a last checkpoint of a table in an object store, where the next start would read the commits since the last."""
        snapshot = self.writer.snapshot
        is_behind = snapshot.version - self._checkpointed > _BEHIND_MAX
        # A run that has written none would read as many commits for it as it saves, so short runs do it together.
        knows_log = self._replayed is not None and not self._is_damaged
        if self._is_far and is_behind and knows_log and _INTERVAL_PROPERTY not in snapshot.configuration:
            self._do([self._write_checkpoint])

    def _checkpoint_every(self, snapshot: Snapshot) -> int:
        every = checkpoint_interval(snapshot.configuration)
        if _INTERVAL_PROPERTY in snapshot.configuration:
            return every
        # A checkpoint names every live or removed file. Its cost is spread over as many commits as keeps it small.
        known = (
            len(snapshot.files)
            if self._replayed is None
            else len(self._replayed.adds) + len(self._replayed.removes)
        )
        return max(every, known // (_FAR_ACTIONS_A_COMMIT if self._is_far else _ACTIONS_A_COMMIT))

    def _do(self, work: Sequence[Callable[[], object]]) -> None:
        try:
            for piece in work:
                self._try(piece)
        finally:
            self._is_busy = False

    def _try(self, piece: Callable[[], object]) -> None:
        if self._is_damaged:
            return
        try:
            piece()
        except DataError as error:
            # A reader of the damaged file is told; compaction must neither hide nor spread the damage.
            self._is_damaged = True
            self.writer.applied = None
            _LOG.warning("a sink's table gets no more upkeep in this run: %s", error)
        except MillpondError as error:
            _LOG.info("upkeep of a sink's table is left for later: %s", error)

    def _write_checkpoint(self) -> None:
        replayed = self._replay()
        write_checkpoint_of(self.objects, replayed, names_newest=True, on_disk=tuple(replayed.removes))

    def _replay(self) -> ReplayedLog:
        """Follow the log to the newest version that the writer knows."""
        applied, replayed = self.writer.applied, self._replayed
        if replayed is None or applied is None:
            # Ask for commits before the log is read, so that none is missed in between.
            applied = self.writer.applied = deque()
            log = Log(self.objects)
            replayed = self._replayed = replay_log(log, log.latest_version() or TableVersion(0))
        while applied:
            version, actions = applied.popleft()
            if version > replayed.version:
                replayed.advance(version, actions)
        return replayed

    def _compact(self, files: Sequence[LiveFile]) -> None:
        added = tuple(self.table.merged(files))
        reach("compaction.file_written")
        rows = sum(file.num_records or 0 for file in files)
        # After a conflict the new files stay until a VACUUM: of an unknown outcome they may be the table's.
        with self.lock:
            self.writer.write(Compact(removed=tuple(files), added=added, rows=rows, guard=self.guard))
        reach("compaction.committed")

    def _clean_up(self, metadata: Metadata) -> None:
        """Delete removed files and old entries of the log, once nothing may read them as the table's properties have it."""
        configuration = metadata.configuration
        keep_ms = retention_ms(configuration, "delta.deletedFileRetentionDuration", 7 * _DAY_MS)
        # Files first: the log that is deleted records their removal.
        if self._is_older(metadata, keep_ms):
            self._delete_removed(keep_ms)
        if configuration.get("delta.enableExpiredLogCleanup", "true").lower() == "true":
            keep_ms = retention_ms(configuration, "delta.logRetentionDuration", 30 * _DAY_MS)
            if self._is_older(metadata, keep_ms):
                old = survey(
                    self.objects, Horizons(Log(self.objects), None, self.clock, keep_ms), dry_run=False
                )
                # The writers of sinks do without a look at the boundary while their next version stays taken.
                collect_log(old, self.clock, None, keeps_successors=True, dry_run=False)

    def _is_older(self, metadata: Metadata, keep_ms: int) -> bool:
        """Return False for a table that is too young to have anything to delete, so that it need not be surveyed."""
        created_ms = metadata.created_ms
        return created_ms is None or created_ms <= self.clock.now_us() // 1_000 - keep_ms

    def _delete_removed(self, keep_ms: int) -> None:
        removes = self._replay().removes
        surveyed = survey(self.objects, Horizons(Log(self.objects), None, self.clock, keep_ms), dry_run=False)
        # What is deleted is garbage only because of these commits and checkpoints: no power cut may revert them.
        self.objects.sync(surveyed.rests_on)
        gone = set(collect_removed(surveyed, dry_run=False).paths)
        # The next checkpoint forgets them, and what another engine's VACUUM has deleted.
        for path in [path for path in removes if path in gone or path not in surveyed.data_files]:
            del removes[path]


def checkpoint_interval(configuration: Mapping[str, str]) -> int:
    text = configuration.get(_INTERVAL_PROPERTY, "")
    return int(text) if text.isdecimal() and int(text) else _CHECKPOINT_INTERVAL


def retention_ms(configuration: Mapping[str, str], name: str, default_ms: int) -> int:
    """Return the length of an interval that a property of the table sets.

    Example:
        >>> retention_ms({"delta.logRetentionDuration": "interval 1 week 12 hours"}, "delta.logRetentionDuration", 0)
        648000000
    """
    terms = _INTERVAL.findall(configuration.get(name, "").lower())
    return sum(int(number) * _UNIT_MS[unit] for number, unit in terms) if terms else default_ms
