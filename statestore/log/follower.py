"""Following a log: keep a snapshot at the table's newest version.

A refresh reads the next version by name, so it costs only the new commits and no
listing. It cannot notice a log that was cleaned up while the follower slept: there the
next version is deleted rather than not yet written. So a follower that has not seen its
own version for a while checks whether that version still exists, and reloads the table
if it does not.

What a writer has read it builds on, and tells others: the high-water mark, a sink's readers. The process that wrote
it may have died between the commit's name and that name's sync, so a follower syncs what it reads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from millpond.statestore.log.snapshot import NO_TABLE, Snapshot, load
from millpond.statestore.system import RetryPolicy, retrying
from millpond.statestore.types import Clock, Rng, TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from millpond.statestore.log.action import Action
    from millpond.statestore.log.high_water import HighWater
    from millpond.statestore.log.log import Log

_Result = TypeVar("_Result")

_TRUSTED_US: Final = 10_000_000
"""How long an observed version is assumed to still exist; log cleanups keep commits for longer."""


class LogFollower:
    """Keeps a snapshot at the newest version; for one thread at a time.

    Args:
        log: the table's log.
        snapshot: the snapshot to start from.
        clock: measures how long ago the log was read, and waits.
        rng: for jitter.
        retry: the policy for retries of reads.
        high_water: advanced to every version that is read.

    Raises:
        UnavailableError: the store is unavailable.
    """

    def __init__(
        self,
        log: Log,
        snapshot: Snapshot,
        clock: Clock,
        rng: Rng,
        *,
        retry: RetryPolicy,
        high_water: HighWater | None = None,
    ) -> None:
        self.snapshot: Snapshot = snapshot
        self._log = log
        self._clock = clock
        self._rng = rng
        self._retry = retry
        self._high_water = high_water
        self._seen_us = clock.monotonic_us()
        if snapshot.version != NO_TABLE:
            self.retrying(partial(log.sync, snapshot.version))

    def follow(self) -> Iterator[tuple[TableVersion, bytes, tuple[Action, ...]]]:
        """Apply new commits one by one; yields the version, bytes and actions of each.

        Raises:
            DataError: a commit is damaged.
            UnavailableError: the store is unavailable.
        """
        while True:
            started_us = self._clock.monotonic_us()
            version = TableVersion(self.snapshot.version + 1)
            data = self.retrying(partial(self._log.read, version))
            if data is None:
                return
            self.retrying(partial(self._log.sync, version))
            actions = self.snapshot.apply(version, data)
            self._moved(started_us)
            yield version, data, actions

    def take(self, version: TableVersion, actions: tuple[Action, ...], digest: str, seen_us: int) -> None:
        """Apply the caller's own commit, which was in the log at ``seen_us``."""
        self.snapshot.apply_actions(version, actions, digest)
        self._moved(seen_us)

    def may_be_stale(self) -> bool:
        """Whether the log may have been cleaned up since its newest version was read."""
        slept_us = self._clock.monotonic_us() - self._seen_us
        return slept_us > _TRUSTED_US and self.snapshot.version != NO_TABLE

    def is_before_log_start(self, version: TableVersion) -> bool:
        """Whether the log was cleaned up behind a checkpoint at or after ``version``.

        Raises:
            DataError: a commit is missing although the log was not cleaned up.
        """
        if self._is_there():
            return False
        checkpoints = self._log.inventory().checkpoints
        newest = max((checkpoint.version for checkpoint in checkpoints), default=NO_TABLE)
        if newest < self.snapshot.version:
            self._log.require(self.snapshot.version)
        return newest >= version

    def reload_if_missing(self) -> bool:
        """Reload the table if the snapshot's version is no longer in the log.

        Returns:
            Whether the table was reloaded.

        Raises:
            DataError: the log ends before the version that was read earlier.
        """
        if self.retrying(self._is_there):
            return False
        self.reload()
        return True

    def reload(self) -> None:
        """Load the table again from the log.

        Raises:
            DataError: the log ends before the version that was read earlier.
        """
        started_us = self._clock.monotonic_us()
        fresh = self.retrying(partial(load, self._log))
        if fresh.version < self.snapshot.version:
            self._log.require(self.snapshot.version)
        self.retrying(partial(self._log.sync, fresh.version))
        self.snapshot = fresh
        self._moved(started_us)

    def retrying(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action`` and return its result, retrying while the store is unavailable."""
        return retrying(action, self._retry, self._clock, self._rng)

    def _is_there(self) -> bool:
        started_us = self._clock.monotonic_us()
        there = self._log.read(self.snapshot.version) is not None
        if there:
            self._seen_us = started_us
        return there

    def _moved(self, seen_us: int) -> None:
        self._seen_us = seen_us
        if self._high_water is not None:
            self._high_water.advance(self.snapshot.version, self.snapshot.digest)
