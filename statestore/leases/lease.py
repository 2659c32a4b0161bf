"""Leases on intervals, and their sequencers: the promises of every implementation of `Leases`.

A lease is the right to write an interval; its sequencer is higher than that of
every earlier lease on the interval *and* than the one stored in the table, so a commit
that carries it differs from a late write of a former owner (MillWheel §6.2, §7.1).

Leases only make conflicts rare. Former owners cannot write because every commit
compares its sequencer with the stored one; safety depends on no clock, no time-out,
and no owner learning in time that it lost its lease. So the state ``HELD`` means
"no loss has been reported", never "it is safe to write".

This module holds the interfaces and pure rules; `millpond.statestore.leases.memory` and
`millpond.statestore.leases.zookeeper_lease` implement them.

The maintenance lock: offline repair and offline garbage collection of a store exclude each other.

A running pipeline collects its own garbage, and repair is refused while its leases are held. Tools that
operators start need a lock of their own: a collection that judged a file to be garbage must not delete it
after a repair has restored it. So both take a lease on an interval that no computation can have. The
lease ends with the session of the process that holds it, so a dead process blocks others only briefly.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

from millpond.statestore.errors import ConflictError, FencedError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.types import Sequencer

TIMEOUT_MS: Final = 10_000
"""Default bound, in milliseconds, on taking a lease and on waiting."""

OnHeld = Literal["take", "wait", "refuse"]
"""
What to do when another writer holds the lease.

``take`` replaces the holder (the newest wins, as with Kafka's transactional producers),
``wait`` waits until it is gone, ``refuse`` raises a `ConflictError` that names it.
"""


class LeaseState(StrEnum):
    """State of a lease: ``HELD`` and ``SUSPENDED`` alternate, ``LOST`` and ``RELEASED`` are final."""

    HELD = "held"
    SUSPENDED = "suspended"
    LOST = "lost"
    RELEASED = "released"


_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.RELEASED})


def may_move(old: LeaseState, new: LeaseState) -> bool:
    """Whether a lease may go from ``old`` to ``new``: a late notice must not revive an ended lease.

    Example:
        >>> may_move(LeaseState.SUSPENDED, LeaseState.HELD)
        True
        >>> may_move(LeaseState.LOST, LeaseState.HELD)
        False
    """
    return old is not new and old not in _ENDED


def next_sequencer(last: int, above: Sequencer) -> Sequencer:
    """The sequencer of a new lease: above the last one issued and above the one stored in the table.

    Args:
        last: the last sequencer that the lease service remembers; 0 when it remembers none,
            because the interval is new or the service was wiped.
        above: the sequencer stored in the table.

    Example:
        >>> next_sequencer(7, Sequencer(3)), next_sequencer(0, Sequencer(3))
        (8, 4)
    """
    return Sequencer(max(last, above) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease, as errors name it."""

    writer_id: str
    host: str
    process_id: int

    def __str__(self) -> str:
        """One line for errors."""
        return f"{self.writer_id} (process {self.process_id} on {self.host})"

    def encode(self) -> bytes:
        """Encode as JSON, readable in ZooKeeper's own shell."""
        pairs = {"writer_id": self.writer_id, "host": self.host, "process_id": self.process_id}
        return json.dumps(pairs).encode()

    @staticmethod
    def decode(data: bytes) -> Holder:
        """The holder that ``data`` names; "unknown" for unreadable data, because holders are only displayed."""
        try:
            pairs = json.loads(data)
            return Holder(
                writer_id=str(pairs["writer_id"]),
                host=str(pairs["host"]),
                process_id=int(pairs["process_id"]),
            )
        except (ValueError, KeyError, TypeError):
            return Holder(writer_id="unknown", host="unknown", process_id=0)


class Lease:
    """The right to write one interval, under one sequencer, until it ends.

    The state changes as notices from the service arrive; `check` turns it into an
    error. It is safe to use from any thread.
    """

    __slots__ = ("_interval", "_lock", "_reason", "_sequencer", "_state")

    def __init__(self, interval: Interval, sequencer: Sequencer) -> None:
        self._interval = interval
        self._sequencer = sequencer
        self._state = LeaseState.HELD
        self._reason = ""
        self._lock = threading.Lock()

    @property
    def interval(self) -> Interval:
        """The interval that the lease allows to write."""
        return self._interval

    @property
    def sequencer(self) -> Sequencer:
        """The number that fences every earlier owner."""
        return self._sequencer

    @property
    def state(self) -> LeaseState:
        """The state that the service reported last."""
        return self._state

    def check(self) -> None:
        """Return if the lease is held, according to the last report.

        Raises:
            UnavailableError: the service is unavailable; pause, the lease may come back.
            FencedError: the lease has ended; stop.
        """
        if self._state is LeaseState.HELD:
            return
        details = {"interval": self._interval.app_id, "sequencer": self._sequencer}
        if self._state is LeaseState.SUSPENDED:
            raise UnavailableError("the lease service is unavailable", **details)
        raise FencedError(
            f"the lease has ended: {self._reason or self._state}; this process ends, and the owner goes on",
            **details,
        )

    def move(self, state: LeaseState, reason: str = "") -> bool:
        """Apply a notice from the service; only the `Leases` that made the lease calls this.

        Returns:
            Whether the state changed; a notice about an ended lease changes nothing.
        """
        with self._lock:
            if not may_move(self._state, state):
                return False
            # The reason is set first: `check` reads without the lock.
            self._reason = reason
            self._state = state
            return True

    def __repr__(self) -> str:
        """Interval, sequencer and state."""
        return f"Lease({self._interval.app_id}, sequencer={self._sequencer}, {self._state})"


class Leases(Protocol):
    """Issues the leases of one writer of one store."""

    def take(
        self,
        interval: Interval,
        *,
        above: Sequencer,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> Lease:
        """Take the lease of ``interval``; its sequencer is higher than ``above`` and every earlier one.

        A lease that this writer already has on the interval ends, in every mode.

        Args:
            interval: the interval to write.
            above: the sequencer stored in the table.
            on_held: what to do when another writer holds the lease.
            timeout_ms: bound on waiting, for the holder as well as for the service.

        Raises:
            ConflictError: another writer holds it (``refuse``), or still holds it at the time-out (``wait``).
            UnavailableError: the service is unavailable.
        """
        ...

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        """Take the leases of all ``intervals`` (each with its ``above``), in few round trips.

        After an error this writer keeps none of the new leases; its earlier leases are untouched
        unless a new lease had already replaced them.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Release the lease, so that a standby need not wait for a time-out; does nothing if it has ended."""
        ...

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        """Wait until no lease is suspended: each is held again, or has ended.

        Returns:
            ``True`` when all are settled; ``False`` when the time ran out.
        """
        ...

    @property
    def high_water(self) -> HighWater:
        """The high-water mark of the store's last commit, kept outside the table."""
        ...

    def close(self) -> None:
        """Release every lease and disconnect from the service."""
        ...


def lease_is_held(interval: Interval, holder: object) -> ConflictError:
    """The error of a writer that may not take what another one holds.

    Args:
        interval: what is held.
        holder: the other writer.
    """
    return ConflictError(
        "another writer holds the lease: stop that process, or say on_held='wait' to stand by, or 'take' to replace it",
        interval=interval.app_id,
        holder=holder,
    )


_BY_HAND: Final = Interval("millpond/by_hand")
"""Names of computations have no slash."""


@contextmanager
def exclusive(leases: Leases) -> Iterator[Lease]:
    """Hold the store's maintenance lock for the length of the block.

    Yields:
        The lease behind the lock; call its `Lease.check` before each irreversible step.

    Raises:
        ConflictError: another process is repairing the store or collecting its garbage offline.
        UnavailableError: the lease service is unavailable.
    """
    try:
        lease = leases.take(_BY_HAND, above=Sequencer(0), on_held="refuse")
    except ConflictError as error:
        raise ConflictError(
            "another process is repairing the store or collecting its garbage offline; "
            "wait for it (the lock of a dead process ends seconds later, with its session)",
            **{name: value for name, value in error.details.items() if name == "holder"},
        ) from error
    try:
        yield lease
    finally:
        leases.release(lease)
