"""Leases in ZooKeeper: sequencers that rise with every taking, owners that go with their session.

Taking a lease sets the interval's node and creates its ephemeral child ``owner`` in
one transaction, conditional on the version read before
(`millpond.statestore.zookeeper.nodes`). Nothing is retried blindly: a transaction of
unknown outcome is followed by a new read, and if it had landed, the writer takes over
from itself under a higher sequencer.

Safety rests on the sequencer alone (MillWheel §6.2, §7.1). A watch on the owner node
tells a replaced holder soon, so that it stops working for nothing. After a lost
connection every lease is ``SUSPENDED`` until its owner node was read and is this
session's; after a lost session every lease is ``LOST``. kazoo's own lock and lease
recipes give no fencing number and are not used.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import TIMEOUT_MS, Holder, Lease, LeaseState, OnHeld, lease_is_held
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.types import Clock, Sequencer
from millpond.statestore.zookeeper.high_water import ZooKeeperHighWater
from millpond.statestore.zookeeper.lease_book import LeaseBook
from millpond.statestore.zookeeper.nodes import IntervalNodes, StorePaths, batches, giving_up, taking
from millpond.statestore.zookeeper.security import ZooKeeperSecurity
from millpond.statestore.zookeeper.session import Deadline, Operation, Watcher, ZooKeeperSession

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
