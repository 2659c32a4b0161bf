"""
Following a log: a snapshot that is kept at the table's newest version.

A refresh asks for the next version by name, so it costs what is new and lists
nothing. One thing that cannot show: a log that was cleaned up while the follower
slept, where the next version is gone rather than not there yet. So a follower that
has not seen its own version for a while looks whether it is there still, and opens
the table anew if it is not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from millpond.statestore.log.snapshot import NO_TABLE, Snapshot, load
from millpond.statestore.retry import RetryPolicy, retrying
from millpond.statestore.types import Clock, Rng, TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from millpond.statestore.log.action import Action
    from millpond.statestore.log.high_water import HighWater
    from millpond.statestore.log.log import Log

__all__ = ["LogFollower"]

_Result = TypeVar("_Result")

_TRUSTED_US: Final = 10_000_000
"""How long a version that was seen is taken to be there still; log cleanups keep far more."""


class LogFollower:
    """
    Keeps a snapshot at the newest version; for one thread at a time.

    Args:
        log: the table's log.
        snapshot: where to begin.
        clock: measures how long ago the log was seen, and waits.
        rng: for jitter.
        retry: how often and how patiently reads are tried.
        high_water: told of every version that is seen.
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

    def follow(self) -> Iterator[tuple[TableVersion, bytes, tuple[Action, ...]]]:
        """
        Apply the commits that are new, one by one: version, bytes and what it did.

        Raises:
            DataError: a commit is damaged.
            UnavailableError: the store is away.
        """
        while True:
            started_us = self._clock.monotonic_us()
            version = TableVersion(self.snapshot.version + 1)
            data = self.retrying(partial(self._log.read, version))
            if data is None:
                return
            actions = self.snapshot.apply(version, data)
            self._moved(started_us)
            yield version, data, actions

    def take(self, version: TableVersion, actions: tuple[Action, ...], digest: str, seen_us: int) -> None:
        """
        Move on by a commit of one's own, seen in the log at ``seen_us``.
        """
        self.snapshot.apply_actions(version, actions, digest)
        self._moved(seen_us)

    def may_be_stale(self) -> bool:
        """
        Whether the log may have been cleaned up since its newest version was seen.
        """
        slept_us = self._clock.monotonic_us() - self._seen_us
        return slept_us > _TRUSTED_US and self.snapshot.version != NO_TABLE

    def is_before_log_start(self, version: TableVersion) -> bool:
        """
        Whether a checkpoint stands for ``version`` and the log before it was cleaned up.

        Raises:
            DataError: the log was not cleaned up, and yet a commit is missing.
        """
        if self._is_there():
            return False
        newest = max((known.version for known in self._log.inventory().checkpoints), default=NO_TABLE)
        if newest < self.snapshot.version:
            self._log.require(self.snapshot.version)
        return newest >= version

    def reload_if_missing(self) -> bool:
        """
        Open the table anew if the snapshot's version is no longer in the log; whether it was opened.
        """
        if self.retrying(self._is_there):
            return False
        self.reload()
        return True

    def reload(self) -> None:
        """
        Open the table anew.

        Raises:
            DataError: it ends before the version that was seen.
        """
        started_us = self._clock.monotonic_us()
        fresh = self.retrying(partial(load, self._log))
        if fresh.version < self.snapshot.version:
            self._log.require(self.snapshot.version)
        self.snapshot = fresh
        self._moved(started_us)

    def retrying(self, action: Callable[[], _Result]) -> _Result:
        """
        What ``action`` returns, trying it again while the store is away.
        """
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
