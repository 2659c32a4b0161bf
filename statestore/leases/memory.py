"""Leases within one Python process: the same rules as ZooKeeper's, without a server.

Tests and the simulator can disturb each writer as a network does: suspend it, end its session, or delay the notice that
it lost a lease, so that it still believes to be the owner. They can also wipe the registry, as when a ZooKeeper loses its
data.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from millpond.statestore.errors import UnavailableError, check
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import (
    TIMEOUT_MS,
    Lease,
    Leases,
    LeaseState,
    OnHeld,
    lease_is_held,
    next_sequencer,
)
from millpond.statestore.log.high_water import HighWater, MemoryHighWater
from millpond.statestore.types import Clock, Sequencer

_POLL_MS: Final = 10


@dataclass(slots=True)
class MemoryRegistry:
    """The data that ZooKeeper would hold for one store: last sequencers, owners, the high-water mark.

    The `MemoryLeases` of one store share its registry.
    """

    sequencers: dict[Interval, Sequencer] = field(default_factory=dict)
    owners: dict[Interval, tuple[MemoryLeases, Lease]] = field(default_factory=dict)
    high_water: MemoryHighWater = field(default_factory=MemoryHighWater)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def wipe(self) -> None:
        """Forget everything and end every session, as when a ZooKeeper restarts empty."""
        with self.lock:
            for leases in {id(owner): owner for owner, _ in self.owners.values()}.values():
                leases.expire_session()
            self.sequencers.clear()
            self.high_water.lose_boundary()
            self.high_water = MemoryHighWater()


class MemoryLeases(Leases):
    """`Leases` of one writer over a shared registry.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> leases = MemoryLeases(MemoryRegistry(), SystemClock(), writer_id="w1")
        >>> leases.take(Interval("counter"), above=Sequencer(4)).sequencer
        5
    """

    def __init__(self, registry: MemoryRegistry, clock: Clock, writer_id: str = "memory") -> None:
        self._registry = registry
        self._clock = clock
        self.writer_id: str = writer_id
        self._suspended = False
        self._notices: list[tuple[Lease, str]] | None = None

    @property
    def high_water(self) -> HighWater:
        return self._registry.high_water

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        deadline_us = self._clock.monotonic_us() + int(timeout_ms * 1_000)
        while True:
            with self._registry.lock:
                if self._suspended:
                    raise UnavailableError("the lease service is unavailable", writer=self.writer_id)
                owners = self._registry.owners
                held = next((one for one in intervals if one in owners and owners[one][0] is not self), None)
                if held is None or on_held == "take":
                    return tuple(self._take(interval, above) for interval, above in intervals.items())
            if on_held == "refuse" or self._clock.monotonic_us() >= deadline_us:
                raise lease_is_held(held, owners[held][0].writer_id if held in owners else "")
            self._clock.sleep_ms(_POLL_MS)

    def release(self, lease: Lease) -> None:
        with self._registry.lock:
            self._forget(lease)
            lease.move(LeaseState.RELEASED)

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        deadline_us = self._clock.monotonic_us() + int(timeout_ms * 1_000)
        while self._suspended:
            if self._clock.monotonic_us() >= deadline_us:
                return False
            self._clock.sleep_ms(_POLL_MS)
        return True

    def close(self) -> None:
        with self._registry.lock:
            for lease in self._current():
                self.release(lease)

    def suspend(self) -> None:
        """Lose the connection but not the session yet: other writers may take over unnoticed."""
        with self._registry.lock:
            self._suspended = True
            for lease in self._current():
                lease.move(LeaseState.SUSPENDED)
            self.hold_notices()

    def resume(self) -> None:
        """Reconnect: leases that this writer still owns are held again, the others are lost."""
        with self._registry.lock:
            self._suspended = False
            for lease in self._current():
                lease.move(LeaseState.HELD)
            self.deliver_notices()

    def expire_session(self) -> None:
        """End the session: owner entries vanish at once, and leases are lost as notices are delivered."""
        with self._registry.lock:
            for lease in self._current():
                self._forget(lease)
                self._lose(lease, "the session has expired")

    def hold_notices(self) -> None:
        """Delay notices of lost leases: this writer keeps believing that it holds them."""
        with self._registry.lock:
            if self._notices is None:
                self._notices = []

    def deliver_notices(self) -> None:
        """Deliver delayed notices now, and later notices immediately."""
        with self._registry.lock:
            notices, self._notices = self._notices or [], None
            for lease, reason in notices:
                lease.move(LeaseState.LOST, reason)

    def _take(self, interval: Interval, above: Sequencer) -> Lease:
        registry = self._registry
        sequencer = next_sequencer(registry.sequencers.get(interval, 0), above)
        check(sequencer > above, "a sequencer must exceed the table's", interval=interval.app_id)
        if interval in registry.owners:
            owner, old = registry.owners[interval]
            owner._lose(old, f"taken by {self.writer_id}")  # noqa: SLF001 - an instance of this class
        # Kept when the lease ends: the next taking must issue a higher one.
        registry.sequencers[interval] = sequencer
        lease = Lease(interval, sequencer)
        registry.owners[interval] = (self, lease)
        return lease

    def _lose(self, lease: Lease, reason: str) -> None:
        if self._notices is None:
            lease.move(LeaseState.LOST, reason)
        else:
            self._notices.append((lease, reason))

    def _forget(self, lease: Lease) -> None:
        _, current = self._registry.owners.get(lease.interval, (self, None))
        if current is lease:
            del self._registry.owners[lease.interval]

    def _current(self) -> list[Lease]:
        return [lease for owner, lease in self._registry.owners.values() if owner is self]
