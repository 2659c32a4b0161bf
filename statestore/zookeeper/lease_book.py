"""What a writer knows of its leases, between what ZooKeeper says and what the writer asks.

ZooKeeper's events and the writer's takings reach the book from different threads. In
whatever order they come, a lease that is entered while the connection is away is
suspended, a lease of a session that has ended is not entered, and an ended lease stays
ended. No thread waits for ZooKeeper while it holds the book's lock: kazoo's own thread
takes that lock too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Holder, Lease, LeaseState
from millpond.statestore.types import Sequencer
from millpond.statestore.zookeeper.nodes import IntervalNodes
from millpond.statestore.zookeeper.session import Connection

_REVIEW_INTERVALS: Final = 256


class LeaseBook:
    """Live leases of one writer, and the intervals whose owner nodes must be checked."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._connection = Connection(connected=False, session_id=None)
        self._leases: dict[Interval, Lease] = {}
        self._being_taken: Counter[Interval] = Counter()
        self._to_review: set[Interval] = set()
        self._owner_changes = 0
        self._closed = False

    @property
    def owner_changes(self) -> int:
        """How many changes of watched owner nodes have been reported."""
        return self._owner_changes

    @property
    def closed(self) -> bool:
        """Whether the writer has closed."""
        return self._closed

    # What is heard.

    def connection_changed(self, connection: Connection) -> None:
        """Suspend, lose, or look again at every lease."""
        with self._changed:
            self._connection = connection
            if connection.connected:
                self.look_at(self._leases)
            elif connection.session_id is None:
                self.end(tuple(self._leases.values()), LeaseState.LOST, "the zookeeper session has expired")
                self._to_review.clear()
            else:
                for lease in self._leases.values():
                    lease.move(LeaseState.SUSPENDED)
            self._changed.notify_all()

    def owner_changed(self, interval: Interval | None) -> None:
        """Count the change, have the interval reviewed, and wake the threads that stand by for its lease."""
        with self._changed:
            self._owner_changes += 1
            self.look_at([] if interval is None else [interval])

    def owners_seen(self, session_id: int, owners: Iterable[tuple[Lease, IntervalNodes]]) -> None:
        """Bring leases up to date with their owner nodes, as read in the session ``session_id``."""
        with self._changed:
            if self._connection != Connection(connected=True, session_id=session_id):
                return  # They are looked at again after the reconnection.
            for lease, nodes in owners:
                if nodes.owner is not None and not nodes.held_by_other(session_id):
                    lease.move(LeaseState.HELD)
                else:
                    holder: Holder | str = nodes.holder() or "no process"
                    self.end([lease], LeaseState.LOST, f"held now by {holder}")
            self._changed.notify_all()

    # What is asked.

    def enter(self, sequencers: Mapping[Interval, Sequencer], session_id: int) -> tuple[Lease, ...] | None:
        """The leases that a transaction of the session ``session_id`` took; `None` if it has ended."""
        with self._changed:
            if self._connection.session_id != session_id:
                return None
            self.look_at(sequencers)
            return tuple(self._enter(Lease(*pair)) for pair in sequencers.items())

    def end(self, leases: Iterable[Lease], state: LeaseState, reason: str = "") -> None:
        """End leases, and forget them."""
        with self._changed:
            for lease in leases:
                lease.move(state, reason)
                if self._leases.get(lease.interval) is lease:
                    del self._leases[lease.interval]
            self._changed.notify_all()

    @contextmanager
    def being_taken(self, intervals: Collection[Interval]) -> Iterator[None]:
        """Keep the review from giving up an owner node whose lease is about to be entered.

        Afterwards it looks at all of them: a transaction whose answer was not waited
        for may land yet, and an owner node that no lease here stands for must go.
        """
        with self._changed:
            self._being_taken.update(intervals)
        try:
            yield
        finally:
            with self._changed:
                self._being_taken.subtract(intervals)
                self._being_taken += Counter()
                self.look_at(intervals)

    def is_in_use(self, interval: Interval) -> bool:
        """Whether an owner node of ours has a lease here, or is about to have one."""
        with self._changed:
            return interval in self._leases or interval in self._being_taken

    def leases_of(self, intervals: Iterable[Interval]) -> dict[Interval, Lease]:
        """The live leases on ``intervals``."""
        with self._changed:
            return {interval: self._leases[interval] for interval in intervals if interval in self._leases}

    def close(self) -> bool:
        """Wake every waiting thread because the writer closes; false if the book was closed before."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.notify_all()
            return was_open

    def release_all(self) -> None:
        """End every lease."""
        with self._changed:
            self.end(tuple(self._leases.values()), LeaseState.RELEASED)

    # What is waited for.

    def look_at(self, intervals: Iterable[Interval]) -> None:
        """Have the owner nodes of ``intervals`` compared with the leases soon."""
        with self._changed:
            self._to_review.update(intervals)
            self._changed.notify_all()

    def next_for_review(self, timeout_s: float) -> Sequence[Interval]:
        """Intervals to look at; none if the time ran out, or the book was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or bool(self._to_review and self._connection.connected), timeout_s
            )
            if self._closed or not self._connection.connected:
                return ()
            intervals = tuple(islice(self._to_review, _REVIEW_INTERVALS))
            self._to_review.difference_update(intervals)
            return intervals

    def wait_for_owner_change(self, seen: int, timeout_s: float) -> None:
        """Wait until `owner_changes` is no longer ``seen``, the book is closed, or the time runs out."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._owner_changes != seen, timeout_s)

    def wait_until_settled(self, timeout_s: float) -> bool:
        """Wait until no lease is suspended; whether that is so."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_s)

    def pause(self, timeout_s: float) -> None:
        """Wait, but not beyond the closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout_s)

    def _enter(self, lease: Lease) -> Lease:
        old = self._leases.get(lease.interval)
        if old is not None and old.sequencer > lease.sequencer:
            # Two threads took it, and the later taking was entered first.
            lease.move(LeaseState.LOST, "taken again by this writer")
            return lease
        if old is not None:
            old.move(LeaseState.LOST, "taken again by this writer")
        self._leases[lease.interval] = lease
        if not self._connection.connected:
            lease.move(LeaseState.SUSPENDED)
        return lease

    def _is_settled(self) -> bool:
        return all(lease.state is not LeaseState.SUSPENDED for lease in self._leases.values())
