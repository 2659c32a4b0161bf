"""
Leases on intervals, and their sequencers: what every kind of `Leases` promises.

A lease is the right to write an interval; its sequencer is higher than that of
every earlier lease on the interval *and* than what the table holds, so a commit
that carries it can be told from a remnant of a former owner (MillWheel §6.2, §7.1).

Leases only make conflicts rare. That no former owner can write rests on the
sequencer alone, which the commit compares with the stored one; nothing here
depends on clocks, on a time-out, or on an owner hearing in time that it lost.
So a state of ``HELD`` means "nobody has told us otherwise", never "it is safe".

Interfaces and pure rules are here; `millpond.statestore.leases.memory` and
`millpond.statestore.zookeeper.lease` implement them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol

from millpond.statestore.errors import FencedError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.types import Sequencer

__all__ = [
    "TIMEOUT_MS",
    "Holder",
    "Lease",
    "LeaseState",
    "Leases",
    "OnHeld",
    "may_move",
    "next_sequencer",
]

TIMEOUT_MS: Final = 10_000
"""How long taking and waiting last unless the caller says otherwise."""

OnHeld = Literal["take", "wait", "refuse"]
"""
What to do about a live holder.

``take`` replaces it (the newest wins, as with Kafka's transactional producers),
``wait`` stands by until it goes, ``refuse`` raises `ConflictError` naming it.
"""


class LeaseState(StrEnum):
    """
    Life of a lease: ``HELD`` and ``SUSPENDED`` alternate, ``LOST`` and ``RELEASED`` are the end.
    """

    HELD = "held"
    SUSPENDED = "suspended"
    LOST = "lost"
    RELEASED = "released"


_ENDED: Final = frozenset({LeaseState.LOST, LeaseState.RELEASED})


def may_move(old: LeaseState, new: LeaseState) -> bool:
    """
    Whether a lease may go from ``old`` to ``new``: late news must not bring an ended one back.

    Example:
        >>> may_move(LeaseState.SUSPENDED, LeaseState.HELD)
        True
        >>> may_move(LeaseState.LOST, LeaseState.HELD)
        False
    """
    return old is not new and old not in _ENDED


def next_sequencer(last: int, above: Sequencer) -> Sequencer:
    """
    The sequencer of a new taking: above the last one given out and above what the table holds.

    Args:
        last: the last sequencer that the lease service remembers; 0 when it knows of none,
            because the interval is new or the service was wiped.
        above: the sequencer that the table holds.

    Example:
        >>> next_sequencer(7, Sequencer(3)), next_sequencer(0, Sequencer(3))
        (8, 4)
    """
    return Sequencer(max(last, above) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """
    Who holds a lease, as errors name it.
    """

    writer_id: str
    host: str
    process_id: int

    def __str__(self) -> str:
        """
        One line for errors.
        """
        return f"{self.writer_id} (process {self.process_id} on {self.host})"

    def encode(self) -> bytes:
        """
        JSON, readable in ZooKeeper's own shell.
        """
        pairs = {"writer_id": self.writer_id, "host": self.host, "process_id": self.process_id}
        return json.dumps(pairs).encode()

    @staticmethod
    def decode(data: bytes) -> Holder:
        """
        The holder that ``data`` names; unreadable data names an unknown one, for it is only shown.
        """
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
    """
    The right to write one interval, under one sequencer, until it ends.

    The state changes by itself as news of the service comes in; `check` turns it
    into an error. It is safe to use from any thread.
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
        """
        The interval that may be written.
        """
        return self._interval

    @property
    def sequencer(self) -> Sequencer:
        """
        The number that fences every earlier owner.
        """
        return self._sequencer

    @property
    def state(self) -> LeaseState:
        """
        The state as last heard.
        """
        return self._state

    def check(self) -> None:
        """
        Return if the lease is held, as far as is known.

        Raises:
            UnavailableError: the service is away; pause, the lease may come back.
            FencedError: the lease has ended; stop.
        """
        if self._state is LeaseState.HELD:
            return
        details = {"interval": self._interval.app_id, "sequencer": self._sequencer}
        if self._state is LeaseState.SUSPENDED:
            raise UnavailableError("the lease service is away", **details)
        raise FencedError(f"the lease has ended: {self._reason or self._state}", **details)

    def move(self, state: LeaseState, reason: str = "") -> bool:
        """
        Take in news; only the `Leases` that made the lease calls this.

        Returns:
            Whether the state changed; news about an ended lease changes nothing.
        """
        with self._lock:
            if not may_move(self._state, state):
                return False
            # The reason first: `check` reads without the lock.
            self._reason = reason
            self._state = state
            return True

    def __repr__(self) -> str:
        """
        Interval, sequencer and state.
        """
        return f"Lease({self._interval.app_id}, sequencer={self._sequencer}, {self._state})"


class Leases(Protocol):
    """
    Gives out leases for one writer of one store.
    """

    def take(
        self,
        interval: Interval,
        *,
        above: Sequencer,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> Lease:
        """
        Take the lease of ``interval``; its sequencer is higher than ``above`` and every earlier one.

        A lease that this writer already has on the interval ends, in every mode.

        Args:
            interval: what to write.
            above: the sequencer that the table holds.
            on_held: what to do when another writer holds it.
            timeout_ms: bound on waiting, for the holder as well as for the service.

        Raises:
            ConflictError: another writer holds it (``refuse``), still holds it (``wait``).
            UnavailableError: the service is away.
        """
        ...

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        """
        Take the leases of all ``intervals`` (each with its ``above``), in few round trips.

        On an error no new lease is kept; leases that this writer had before are untouched
        unless a new one had replaced them by then.
        """
        ...

    def release(self, lease: Lease) -> None:
        """
        Give the lease up, so that a standby need not wait for a time-out; harmless if it has ended.
        """
        ...

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        """
        Wait until no lease is suspended: each is held again, or has ended.

        Returns:
            Whether that is so; ``False`` when the time ran out.
        """
        ...

    @property
    def high_water(self) -> HighWater:
        """
        The mark of the last commit of the store, kept outside the table.
        """
        ...

    def close(self) -> None:
        """
        Release every lease and let the service go.
        """
        ...
