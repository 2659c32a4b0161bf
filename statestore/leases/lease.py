"""Leases on intervals and their sequencers: the promises of every implementation of `Leases`.

A lease is the right to write an interval. Its sequencer exceeds every earlier one of the interval *and* the one stored in
the table (MillWheel §6.2, §7.1). Leases only make conflicts rare: every commit compares its sequencer with the stored
one, and that alone keeps former owners from writing. Safety depends on no clock, no time-out, and no owner learning
in time that its lease is lost. So ``HELD`` means "no loss has been reported", never "it is safe to write".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

import orjson

from millpond.statestore.errors import ConflictError, FencedError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.ensemble import Ensemble, missing_entry
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.types import Sequencer

TIMEOUT_MS: Final = 10_000
"""Default bound, in milliseconds, on taking a lease and on waiting."""

OnHeld = Literal["take", "wait", "refuse"]
"""
What to do when another writer holds the lease.

``take`` replaces the holder (the newest wins, as with Kafka's transactional producers),
``wait`` waits until the holder is gone, ``refuse`` raises a `ConflictError` that names the holder.
"""


class LeaseState(StrEnum):
    """``HELD`` and ``SUSPENDED`` alternate, ``LOST`` and ``RELEASED`` are final."""

    HELD = "held"
    SUSPENDED = "suspended"
    LOST = "lost"
    RELEASED = "released"


_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.RELEASED})


def may_move(old: LeaseState, new: LeaseState) -> bool:
    """Return True if a lease may change its state so: a late notice must not revive an ended lease."""
    return old is not new and old not in _ENDED


def next_sequencer(last: int, above: Sequencer) -> Sequencer:
    """Return a sequencer above the service's last one and above the table's.

    A wiped service remembers none (0), and still issues sequencers that fence every former owner.
    """
    return Sequencer(max(last, above) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lease, for errors; JSON in ZooKeeper, readable in its shell."""

    writer_id: str
    host: str
    process_id: int

    def __str__(self) -> str:
        return f"{self.writer_id} (process {self.process_id} on {self.host})"

    def encode(self) -> bytes:
        pairs = {"writer_id": self.writer_id, "host": self.host, "process_id": self.process_id}
        return orjson.dumps(pairs)

    @staticmethod
    def decode(data: bytes) -> Holder:
        try:
            pairs = orjson.loads(data)
            writer_id, host, process_id = (
                str(pairs["writer_id"]),
                str(pairs["host"]),
                int(pairs["process_id"]),
            )
            return Holder(writer_id=writer_id, host=host, process_id=process_id)
        except (ValueError, KeyError, TypeError):
            return Holder(writer_id="unknown", host="unknown", process_id=0)


class Lease:
    """The right to write one interval, under one sequencer, until it ends.

    ``state`` is what the service reported last; only `move` changes it, and `check` turns it into an error. A lease is
    safe to use from any thread.
    """

    __slots__ = ("_lock", "_reason", "interval", "sequencer", "state")

    def __init__(self, interval: Interval, sequencer: Sequencer) -> None:
        self.interval: Final = interval
        self.sequencer: Final = sequencer
        self.state: LeaseState = LeaseState.HELD
        self._reason = ""
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise unless the lease is held, according to the last report.

        `UnavailableError` means pause, because the lease may be held again later; `FencedError` means stop.
        """
        if self.state is LeaseState.HELD:
            return
        details = {"interval": self.interval.app_id, "sequencer": self.sequencer}
        if self.state is LeaseState.SUSPENDED:
            raise UnavailableError("the lease service is unavailable", **details)
        raise FencedError(
            f"the lease has ended: {self._reason or self.state}; this process ends, and the owner goes on",
            **details,
        )

    def move(self, state: LeaseState, reason: str = "") -> bool:
        """Apply a notice from the service; return True if it changed the state.

        Only the `Leases` that made the lease calls this.
        """
        with self._lock:
            if not may_move(self.state, state):
                return False
            # The reason is set first, because `check` reads without the lock.
            self._reason = reason
            self.state = state
            return True

    def __repr__(self) -> str:
        return f"Lease({self.interval.app_id}, sequencer={self.sequencer}, {self.state})"


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
        """Take the lease of ``interval``, under a sequencer above ``above``, the table's, and every earlier one.

        A lease that this writer already has on the interval ends, whatever ``on_held`` is. ``timeout_ms``
        bounds the wait for the holder, and that for the service.

        Raises:
            ConflictError: another writer holds it (``refuse``), or still holds it at the time-out (``wait``).
            UnavailableError: the service is unavailable.
        """
        return self.take_all({interval: above}, on_held=on_held, timeout_ms=timeout_ms)[0]

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        """Take the leases of all ``intervals`` (each with its ``above``), in few round trips.

        After an error this writer keeps none of the new leases, and keeps its earlier leases unless a new one had
        replaced them already.
        """

    def release(self, lease: Lease) -> None:
        """Release the lease, so that a standby need not wait for a time-out; does nothing if it has ended."""

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        """Wait until each suspended lease is held again or has ended; return False when the time runs out."""

    @property
    def ensemble(self) -> Ensemble | None:
        """The ensemble that has the leases, `NO_ENSEMBLE` for a store's own server, ``None`` for no ZooKeeper at all."""
        return None

    @property
    def high_water(self) -> HighWater:
        """The high-water mark of the store's last commit, kept outside the table."""

    def close(self) -> None:
        """Release every lease and disconnect from the service."""


def unrecorded_ensemble(leases: Leases, txns: Mapping[str, int], version: int) -> dict[str, int]:
    """Return the position that names the ensemble of ``leases`` in the log; see `missing_entry`."""
    return {} if leases.ensemble is None else missing_entry(txns, leases.ensemble, version)


def lease_is_held(interval: Interval, holder: object) -> ConflictError:
    return ConflictError(
        "another writer holds the lease: stop that process, or say on_held='wait' to stand by, or 'take' to replace it",
        interval=interval.app_id,
        holder=holder,
    )


# Names of computations have no slash, so no computation can have this interval.
_MAINTENANCE: Final = Interval("millpond/by_hand")


@contextmanager
def exclusive(leases: Leases) -> Iterator[Lease]:
    """Hold the store's maintenance lock for the length of the block; check the lease before each irreversible step.

    Offline repair and offline garbage collection exclude each other, because a collection that judged a file to be
    garbage must not delete it after a repair has restored it. The lock is a lease, so it ends with the session of its
    process, and a dead process blocks others only briefly.
    """
    try:
        lease = leases.take(_MAINTENANCE, above=Sequencer(0), on_held="refuse")
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
