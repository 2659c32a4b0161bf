"""Leases in ZooKeeper: sequencers that rise with every taking, owners that go with their session.

Taking a lease sets the interval's node and creates its ephemeral child ``owner`` in
one transaction, conditional on the version read before
(`millpond.statestore.leases.zookeeper_nodes`). Nothing is retried blindly: a transaction of
unknown outcome is followed by a new read, and if it had landed, the writer takes over
from itself under a higher sequencer.

Safety rests on the sequencer alone (MillWheel §6.2, §7.1). A watch on the owner node
tells a replaced holder soon, so that it stops working for nothing. After a lost
connection every lease is ``SUSPENDED`` until its owner node was read and is this
session's; after a lost session every lease is ``LOST``. kazoo's own lock and lease
recipes give no fencing number and are not used.

What a writer knows of its leases, between what ZooKeeper says and what the writer asks.

ZooKeeper's events and the writer's takings reach the book from different threads. In
whatever order they come, a lease that is entered while the connection is away is
suspended, a lease of a session that has ended is not entered, and an ended lease stays
ended. No thread waits for ZooKeeper while it holds the book's lock: kazoo's own thread
takes that lock too.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import TIMEOUT_MS, Holder, Lease, LeaseState, OnHeld, lease_is_held
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import ZooKeeperHighWater
from millpond.statestore.leases.zookeeper_nodes import IntervalNodes, StorePaths, batches, giving_up, taking
from millpond.statestore.leases.zookeeper_session import (
    Connection,
    Deadline,
    Operation,
    Watcher,
    ZooKeeperSession,
)
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.types import Clock, Sequencer

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


SESSION_TIMEOUT_MS: Final = 10_000
"""How long ZooKeeper waits for a silent writer before its leases are free for standbys."""

_OPEN: Final = ZooKeeperSecurity()
_ATTEMPTS_MAX: Final = 100
_RETRY_MS: Final = 20
_STANDBY_POLL_S: Final = 1.0
_REVIEW_RETRY_S: Final = 1.0


class ZooKeeperLeases:
    """`Leases` of one writer of one store, in one ZooKeeper session.

    Args:
        hosts: ``host:port`` pairs, separated by commas.
        store_id: names the store's nodes, ``/millpond/<store_id>``.
        writer_id: names this writer to others.
        clock: measures the bounds on waiting.
        session_timeout_ms: see `SESSION_TIMEOUT_MS`; the server may raise or lower it.
        security: how to connect, and whom the nodes are for; to an open ensemble by default.

    Raises:
        UnavailableError: no server answered within the session's time-out.
        InvalidError: the servers refuse the credentials, or the nodes belong to another user.
    """

    def __init__(
        self,
        hosts: str,
        store_id: str,
        writer_id: str,
        clock: Clock,
        *,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
        security: ZooKeeperSecurity = _OPEN,
    ) -> None:
        self._paths = StorePaths(store_id)
        self._clock = clock
        self._timeout_ms = session_timeout_ms
        self._holder = Holder(writer_id=writer_id, host=socket.gethostname(), process_id=os.getpid())
        self._book = LeaseBook()
        self._session = ZooKeeperSession(hosts, session_timeout_ms, self._book.connection_changed, security)
        self._session.start(self._deadline())
        try:
            self._session.ensure_path(self._paths.leases, self._deadline())
            self._session.close_to_others(self._paths.store, self._deadline())
        except MillpondError:
            self._session.close()
            raise
        self._high_water = ZooKeeperHighWater(self._session, self._paths.store, clock, session_timeout_ms)
        self._thread = threading.Thread(target=self._run, name="millpond-leases", daemon=True)
        self._thread.start()

    @property
    def high_water(self) -> HighWater:
        """The store's mark, in the same ZooKeeper."""
        return self._high_water

    def take(
        self,
        interval: Interval,
        *,
        above: Sequencer,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> Lease:
        """Take one lease; see `Leases.take`."""
        return self.take_all({interval: above}, on_held=on_held, timeout_ms=timeout_ms)[0]

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        """Take several leases, two round trips for 64 of them; see `Leases.take_all`."""
        deadline = Deadline.after(self._clock, timeout_ms)
        taken: list[Lease] = []
        with self._book.being_taken(intervals.keys()):
            try:
                for batch in batches(intervals):
                    taken += self._take_batch(batch, on_held, deadline)
            except MillpondError:
                self._book.end(taken, LeaseState.RELEASED)
                raise
        return tuple(taken)

    def release(self, lease: Lease) -> None:
        """Give the lease up; while ZooKeeper is away, its node goes after the reconnection."""
        self._book.end([lease], LeaseState.RELEASED)
        try:
            if self._session.connection.connected:
                self._give_up([lease.interval])
                return
        except (UnavailableError, InvalidError):
            pass  # The review sees to it.
        self._book.look_at([lease.interval])

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        """Wait until no lease is suspended."""
        return self._book.wait_until_settled(timeout_ms / 1_000)

    def close(self) -> None:
        """End the session, which frees every lease; a mark that is due is written first."""
        if self._book.close():
            self._thread.join()
            self._high_water.close()
            self._book.release_all()
            self._session.close()

    # Taking.

    def _take_batch(
        self, batch: Mapping[Interval, Sequencer], on_held: OnHeld, deadline: Deadline
    ) -> tuple[Lease, ...]:
        for _ in range(_ATTEMPTS_MAX):
            try:
                leases = self._try_take(batch, on_held, deadline)
            except UnavailableError:
                if deadline.left_s == 0:
                    raise
                leases = None
            if leases is not None:
                return leases
            self._clock.sleep_ms(_RETRY_MS)
        raise ConflictError("taking the lease kept failing", interval=next(iter(batch)).app_id)

    def _try_take(
        self, batch: Mapping[Interval, Sequencer], on_held: OnHeld, deadline: Deadline
    ) -> tuple[Lease, ...] | None:
        """Read, decide, and take; `None` if another writer came between, or the session went."""
        session_id = self._session.wait_connected(deadline)
        found = self._stand_by(tuple(batch), session_id, on_held, deadline)
        if on_held == "wait":
            # The time that was given for the holder is not also the time for the taking.
            deadline = self._deadline()
        sequencers: dict[Interval, Sequencer] = {}
        operations: list[Operation] = []
        for nodes in found:
            sequencer, own = taking(nodes, batch[nodes.interval], self._holder, self._paths)
            sequencers[nodes.interval] = sequencer
            operations += own
        if self._session.transact(operations, deadline):
            return self._book.enter(sequencers, session_id)
        # The folder itself is missing after ZooKeeper was wiped.
        self._session.ensure_path(self._paths.leases, deadline)
        return None

    def _stand_by(
        self, intervals: Sequence[Interval], session_id: int, on_held: OnHeld, deadline: Deadline
    ) -> list[IntervalNodes]:
        """The nodes of ``intervals``, once they may be taken."""
        watcher = self._on_watch if on_held == "wait" else None
        while True:
            changes = self._book.owner_changes
            found = self._find(intervals, self._deadline() if watcher else deadline, watcher)
            held = next((nodes for nodes in found if nodes.held_by_other(session_id)), None)
            if held is None or on_held == "take":
                return found
            if on_held == "refuse" or deadline.left_s == 0:
                raise lease_is_held(held.interval, held.holder())
            self._book.wait_for_owner_change(changes, min(deadline.left_s, _STANDBY_POLL_S))

    def _find(
        self, intervals: Sequence[Interval], deadline: Deadline, watcher: Watcher | None = None
    ) -> list[IntervalNodes]:
        # Nodes before owners: an owner node that came later shows in the node's version.
        paths = [self._paths.node(i) for i in intervals] + [self._paths.owner(i) for i in intervals]
        nodes = self._session.read(paths, deadline, watcher)
        return [
            IntervalNodes(interval=interval, node=node, owner=owner)
            for interval, node, owner in zip(
                intervals, nodes[: len(intervals)], nodes[len(intervals) :], strict=True
            )
        ]

    def _on_watch(self, path: str) -> None:
        self._book.owner_changed(self._paths.interval_of(path))

    # Review: a thread of ours compares leases with their owner nodes.

    def _run(self) -> None:
        while not self._book.closed:
            # Without anything to look at, twice a session: a connection that is away that
            # long may be one that the servers refuse.
            intervals = self._book.next_for_review(self._timeout_ms / 2_000)
            try:
                self._review(intervals)
                if not (self._book.closed or self._session.connection.connected):
                    self._session.renew_if_refused()
            except (UnavailableError, InvalidError):
                # InvalidError: what we may do was changed meanwhile, and may be changed back.
                self._book.look_at(intervals)
                self._book.pause(_REVIEW_RETRY_S)

    def _review(self, intervals: Sequence[Interval]) -> None:
        """Bring leases up to date, and give up owner nodes that no lease stands for."""
        leases = self._book.leases_of(intervals)
        self._review_leases(leases)
        self._give_up([interval for interval in intervals if interval not in leases])

    def _review_leases(self, leases: Mapping[Interval, Lease]) -> None:
        if not leases:
            return
        deadline = self._deadline()
        session_id = self._session.wait_connected(deadline)
        found = self._find(tuple(leases), deadline, self._on_watch)
        self._book.owners_seen(session_id, zip(leases.values(), found, strict=True))

    def _give_up(self, intervals: Sequence[Interval]) -> None:
        if not intervals:
            return
        deadline = self._deadline()
        session_id = self._session.wait_connected(deadline)
        for nodes in self._find(intervals, deadline):
            operations = giving_up(nodes, session_id, self._paths)
            # Asked after the reading: a taking that starts later changes the node's version.
            if operations and not self._book.is_in_use(nodes.interval):
                self._session.transact(operations, deadline)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._timeout_ms)
