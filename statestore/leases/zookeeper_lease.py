"""Leases in ZooKeeper: sequencers that rise with every taking, and owners that vanish with their session.

::

    /millpond/ensemble                           the ensemble's id       persistent, shared by all stores
    /millpond/<store id>/high_water              {"version": 17, "digest": "..."}
    /millpond/<store id>/waiting/<writer id>     {"writer_id": ..., "interval": ...}    ephemeral
    /millpond/<store id>/leases/<interval>       {"offset": 4}          persistent
    /millpond/<store id>/leases/<interval>/owner {"writer_id": ...}     ephemeral

The sequencer of the last taking is the interval node's data version plus ``offset``. Taking a lease sets that node
and creates its ephemeral child ``owner`` in one transaction, conditional on the version read before: of two writers
that decide on the same reading, one succeeds. A transaction of unknown outcome is followed by a new read; if it had
landed, the writer takes over from itself under a higher sequencer.

Safety rests on the sequencer alone (MillWheel §6.2, §7.1). A watch on the owner node only stops a replaced holder soon.
kazoo's own lock and lease recipes give no fencing number and are not used.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final
from urllib.parse import quote, unquote

import orjson

from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, UnavailableError, check
from millpond.statestore.interval import Interval
from millpond.statestore.leases.ensemble import NO_ENSEMBLE, Ensemble
from millpond.statestore.leases.lease import (
    TIMEOUT_MS,
    Holder,
    Lease,
    Leases,
    LeaseState,
    OnHeld,
    lease_is_held,
    next_sequencer,
)
from millpond.statestore.leases.zookeeper_client import OPEN_ENSEMBLE, ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import ZooKeeperHighWater, store_folder
from millpond.statestore.leases.zookeeper_session import (
    Connection,
    Create,
    Deadline,
    Delete,
    Expect,
    Node,
    Operation,
    Set,
    Watcher,
    ZooKeeperSession,
)
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.outage import Outage
from millpond.statestore.types import Clock, Sequencer

_LOG: Final = logging.getLogger("millpond")

# A ZooKeeper transaction holds 1 MiB by default.
_BATCH_INTERVALS: Final = 64
_BATCH_CHARACTERS: Final = 128 * 1024
_REVIEW_INTERVALS: Final = 256
_ENSEMBLE_PATH: Final = "/millpond/ensemble"


class StorePaths:
    def __init__(self, store_id: str) -> None:
        self.store: str = store_folder(store_id)
        self.leases: str = f"{self.store}/leases"
        self.waiting: str = f"{self.store}/waiting"

    def node(self, interval: Interval) -> str:
        return f"{self.leases}/{quote(interval.app_id, safe='')}"

    def owner(self, interval: Interval) -> str:
        return f"{self.node(interval)}/owner"

    def interval_of(self, owner_path: str) -> Interval | None:
        name = owner_path.removeprefix(f"{self.leases}/").removesuffix("/owner")
        return Interval.from_app_id(unquote(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalNodes:
    interval: Interval
    node: Node | None
    owner: Node | None

    @property
    def last_sequencer(self) -> int:
        """The sequencer of the last taking; 0 if ZooKeeper has none, because it is new or was wiped."""
        return 0 if self.node is None else self.node.version + _offset(self.node.data)

    def held_by_other(self, session_id: int) -> bool:
        return self.owner is not None and self.owner.owner_session != session_id

    def holder(self) -> Holder | None:
        return None if self.owner is None else Holder.decode(self.owner.data)


def taking(
    found: IntervalNodes, above: Sequencer, holder: Holder, paths: StorePaths
) -> tuple[Sequencer, list[Operation]]:
    """Return the sequencer of the next taking, and the operations that make ``holder`` the owner."""
    sequencer = next_sequencer(found.last_sequencer, above)
    check(sequencer > found.last_sequencer, "sequencers rise", interval=found.interval.app_id)
    path, owner = paths.node(found.interval), paths.owner(found.interval)
    operations: list[Operation] = []
    if found.node is None:
        operations.append(Create(path, _encode_offset(sequencer)))
    else:
        version = found.node.version
        # Fails if another writer took the interval since the reading, so no sequencer is issued twice.
        operations.append(Set(path, _encode_offset(sequencer - version - 1), version))
    if found.owner is not None:
        operations.append(Delete(owner))
    operations.append(Create(owner, holder.encode(), ephemeral=True))
    return sequencer, operations


def giving_up(found: IntervalNodes, session_id: int, paths: StorePaths) -> list[Operation]:
    """Return the operations that remove the owner node of ``session_id``; none if it has none."""
    if found.node is None or found.owner is None or found.held_by_other(session_id):
        return []
    # Expect the version that was read: a lease that this writer takes again meanwhile must keep its owner node.
    return [Expect(paths.node(found.interval), found.node.version), Delete(paths.owner(found.interval))]


def batches(intervals: Mapping[Interval, Sequencer]) -> Iterator[dict[Interval, Sequencer]]:
    batch: dict[Interval, Sequencer] = {}
    characters = 0
    for interval, above in intervals.items():
        length = len(interval.app_id)
        if batch and (len(batch) == _BATCH_INTERVALS or characters + length > _BATCH_CHARACTERS):
            yield batch
            batch, characters = {}, 0
        batch[interval] = above
        characters += length
    if batch:
        yield batch


def _encode_offset(offset: int) -> bytes:
    return orjson.dumps({"offset": offset})


def _offset(data: bytes) -> int:
    """Return 0 for unreadable data: the table's sequencer bounds the next one anyway."""
    try:
        return int(orjson.loads(data)["offset"])
    except (ValueError, KeyError, TypeError):
        return 0


class LeaseBook:
    """Live leases of one writer, and the intervals whose owner nodes must be checked.

    ZooKeeper's events and the writer's takings reach the book from different threads. In whatever order they come, a
    lease that is entered while the connection is away is suspended, a lease of an ended session is not entered, and
    an ended lease stays ended. No thread waits for ZooKeeper while it holds the book's lock, because kazoo's own thread
    takes that lock too.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._connection = Connection(connected=False, session_id=None)
        self._leases: dict[Interval, Lease] = {}
        self._being_taken: Counter[Interval] = Counter()
        self._to_review: set[Interval] = set()
        self.owner_changes: int = 0
        self.closed: bool = False

    def connection_changed(self, connection: Connection) -> None:
        with self._changed:
            self._connection = connection
            if connection.connected:
                # Leases stay suspended until the review has seen that their owner nodes are still this session's.
                self.review(self._leases)
            elif connection.session_id is None:
                self.end(tuple(self._leases.values()), LeaseState.LOST, "the zookeeper session has expired")
                self._to_review.clear()
            else:
                for lease in self._leases.values():
                    lease.move(LeaseState.SUSPENDED)
            self._changed.notify_all()

    def owner_changed(self, interval: Interval | None) -> None:
        with self._changed:
            self.owner_changes += 1
            self.review([] if interval is None else [interval])

    def owners_seen(self, session_id: int, owners: Iterable[tuple[Lease, IntervalNodes]]) -> None:
        with self._changed:
            if self._connection != Connection(connected=True, session_id=session_id):
                return  # A reading of another connection is outdated; the reconnection asks for a new review.
            for lease, nodes in owners:
                if nodes.owner is not None and not nodes.held_by_other(session_id):
                    lease.move(LeaseState.HELD)
                else:
                    holder: Holder | str = nodes.holder() or "no process"
                    self.end([lease], LeaseState.LOST, f"held now by {holder}")
            self._changed.notify_all()

    def enter(self, sequencers: Mapping[Interval, Sequencer], session_id: int) -> tuple[Lease, ...] | None:
        with self._changed:
            if self._connection.session_id != session_id:
                return None
            self.review(sequencers)
            return tuple(self._enter(Lease(*pair)) for pair in sequencers.items())

    def end(self, leases: Iterable[Lease], state: LeaseState, reason: str = "") -> None:
        with self._changed:
            for lease in leases:
                lease.move(state, reason)
                if self._leases.get(lease.interval) is lease:
                    del self._leases[lease.interval]
            self._changed.notify_all()

    @contextmanager
    def being_taken(self, intervals: Collection[Interval]) -> Iterator[None]:
        """Keep the review from giving up an owner node whose lease is about to be entered."""
        with self._changed:
            self._being_taken.update(intervals)
        try:
            yield
        finally:
            with self._changed:
                self._being_taken.subtract(intervals)
                self._being_taken += Counter()
                # A transaction whose answer was not awaited may land yet; the review removes an owner node
                # without a lease.
                self.review(intervals)

    def is_in_use(self, interval: Interval) -> bool:
        with self._changed:
            return interval in self._leases or interval in self._being_taken

    def leases_of(self, intervals: Iterable[Interval]) -> dict[Interval, Lease]:
        with self._changed:
            return {interval: self._leases[interval] for interval in intervals if interval in self._leases}

    def close(self) -> bool:
        with self._changed:
            was_open, self.closed = not self.closed, True
            self._changed.notify_all()
            return was_open

    def release_all(self) -> None:
        with self._changed:
            self.end(tuple(self._leases.values()), LeaseState.RELEASED)

    def review(self, intervals: Iterable[Interval]) -> None:
        with self._changed:
            self._to_review.update(intervals)
            self._changed.notify_all()

    def next_for_review(self, timeout_s: float) -> Sequence[Interval]:
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or bool(self._to_review and self._connection.connected), timeout_s
            )
            if self.closed or not self._connection.connected:
                return ()
            intervals = tuple(islice(self._to_review, _REVIEW_INTERVALS))
            self._to_review.difference_update(intervals)
            return intervals

    def wait_for_owner_change(self, seen: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self.owner_changes != seen, timeout_s)

    def wait_until_settled(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: all(lease.state is not LeaseState.SUSPENDED for lease in self._leases.values()),
                timeout_s,
            )

    def pause(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed, timeout_s)

    def _enter(self, lease: Lease) -> Lease:
        old = self._leases.get(lease.interval)
        if old is not None and old.sequencer > lease.sequencer:
            # Two threads took the interval, and the later taking was entered first.
            lease.move(LeaseState.LOST, "taken again by this writer")
            return lease
        if old is not None:
            old.move(LeaseState.LOST, "taken again by this writer")
        self._leases[lease.interval] = lease
        if not self._connection.connected:
            # The connection went after the taking: the lease must be reviewed like all others.
            lease.move(LeaseState.SUSPENDED)
        return lease


# How long ZooKeeper waits for a silent writer before its leases are free for standbys.
SESSION_TIMEOUT_MS: Final = 10_000
_ATTEMPTS_MAX: Final = 100
_RETRY_MS: Final = 20
_STANDBY_POLL_S: Final = 1.0
_ASK_TIMEOUT_MS: Final = 4_000
_REVIEW_RETRY_S: Final = 1.0


class ZooKeeperLeases(Leases):
    """`Leases` of one writer of one store, in one ZooKeeper session.

    The server may raise or lower ``session_timeout_ms``. ``is_own_server``: the server is the store's own.

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
        security: ZooKeeperSecurity = OPEN_ENSEMBLE,
        is_own_server: bool = False,
    ) -> None:
        self._paths = StorePaths(store_id)
        self._clock = clock
        self._timeout_ms = session_timeout_ms
        self._waiting_path = f"{self._paths.waiting}/{quote(writer_id, safe='')}"
        self._waits_for: tuple[Holder | None, int] | None = None
        self._holder = Holder(writer_id=writer_id, host=socket.gethostname(), process_id=os.getpid())
        self._book = LeaseBook()
        outage = Outage(f"store {store_id}", clock)
        self._session = ZooKeeperSession(
            hosts, session_timeout_ms, self._book.connection_changed, security, outage
        )
        self._session.start(self._deadline())
        # Nodes that an open ensemble made are closed before any lease is taken: until then others could take it.
        try:
            self._session.ensure_path(self._paths.leases, self._deadline())
            self._session.close_to_others(self._paths.store, self._deadline())
            self._ensemble = NO_ENSEMBLE if is_own_server else Ensemble(self._ensemble_id(writer_id), hosts)
            self._session.close_to_others(_ENSEMBLE_PATH, self._deadline())
        except MillpondError:
            self._session.close()
            raise
        self._high_water = ZooKeeperHighWater(self._session, self._paths.store, clock, session_timeout_ms)
        self._thread = threading.Thread(target=self._run, name="millpond-leases", daemon=True)
        self._thread.start()

    @property
    def ensemble(self) -> Ensemble:
        return self._ensemble

    def _ensemble_id(self, token: str) -> str:
        """Return the ensemble's id; the first writer ever makes its own ``token`` the id."""
        deadline = self._deadline()
        for _ in range(_ATTEMPTS_MAX):
            node = self._session.read([_ENSEMBLE_PATH], deadline)[0]
            if node is not None:
                return node.data.decode(errors="replace")
            # Whichever of several writers comes first: the next reading shows its id.
            self._session.transact([Create(_ENSEMBLE_PATH, token.encode())], deadline)
        raise UnavailableError("zookeeper does not keep the ensemble's id", path=_ENSEMBLE_PATH)

    @property
    def high_water(self) -> HighWater:
        return self._high_water

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        """Take several leases, in two round trips for 64 of them."""
        deadline = Deadline.after(self._clock, timeout_ms)
        taken: list[Lease] = []
        with self._book.being_taken(intervals.keys()):
            try:
                for batch in batches(intervals):
                    taken += self._take_batch(batch, on_held, deadline)
            except MillpondError:
                # All or none: a caller that got no lease must not leave other writers waiting for some.
                self._book.end(taken, LeaseState.RELEASED)
                raise
        return tuple(taken)

    def release(self, lease: Lease) -> None:
        """Release the lease; while ZooKeeper is away, its owner node stays until the reconnection."""
        # The lease ends first, so that this process stops writing whatever ZooKeeper answers.
        self._book.end([lease], LeaseState.RELEASED)
        try:
            if self._session.connection.connected:
                self._give_up([lease.interval])
                return
        except (UnavailableError, InvalidError):
            pass  # The review removes the owner node later.
        self._book.review([lease.interval])

    def wait_until_settled(self, timeout_ms: float = TIMEOUT_MS) -> bool:
        return self._book.wait_until_settled(timeout_ms / 1_000)

    def close(self) -> None:
        """Write the mark that is due, then end the session, which frees every lease."""
        if self._book.close():
            self._thread.join()
            self._high_water.close()
            self._book.release_all()
            self._session.close()

    def _take_batch(
        self, batch: Mapping[Interval, Sequencer], on_held: OnHeld, deadline: Deadline
    ) -> tuple[Lease, ...]:
        for _ in range(_ATTEMPTS_MAX):
            try:
                leases = self._try_take(batch, on_held, deadline)
            except UnavailableError:
                if deadline.left_s == 0:
                    raise
                # The transaction may have landed: read again instead of repeating it blindly.
                leases = None
            if leases is not None:
                return leases
            self._clock.sleep_ms(_RETRY_MS)
        raise ConflictError("taking the lease kept failing", interval=next(iter(batch)).app_id)

    def _try_take(
        self, batch: Mapping[Interval, Sequencer], on_held: OnHeld, deadline: Deadline
    ) -> tuple[Lease, ...] | None:
        """Read, decide and take; return ``None`` if another writer came between, or the session ended."""
        session_id = self._session.wait_connected(deadline)
        found = self._stand_by(tuple(batch), session_id, on_held, deadline)
        if on_held == "wait":
            # ``timeout_ms`` bounds the wait for the holder, so the taking gets time besides.
            deadline = self._deadline()
        sequencers: dict[Interval, Sequencer] = {}
        operations: list[Operation] = []
        for nodes in found:
            sequencer, own = taking(nodes, batch[nodes.interval], self._holder, self._paths)
            sequencers[nodes.interval] = sequencer
            operations += own
        if self._session.transact(operations, deadline):
            # The session may have expired meanwhile, and its owner nodes with it: then the leases are taken again.
            return self._book.enter(sequencers, session_id)
        # The folder itself is missing after ZooKeeper was wiped.
        self._session.ensure_path(self._paths.leases, deadline)
        return None

    def _stand_by(
        self, intervals: Sequence[Interval], session_id: int, on_held: OnHeld, deadline: Deadline
    ) -> list[IntervalNodes]:
        watcher = self._on_watch if on_held == "wait" else None
        while True:
            # Counted before the reading, so that no change between the two is missed.
            changes = self._book.owner_changes
            found = self._find(intervals, self._deadline() if watcher else deadline, watcher)
            held = next((nodes for nodes in found if nodes.held_by_other(session_id)), None)
            if held is None or on_held == "take":
                self._end_wait()
                return found
            if on_held == "refuse" or deadline.left_s == 0:
                raise lease_is_held(held.interval, held.holder())
            self._tell_of_wait(held, session_id)
            self._book.wait_for_owner_change(changes, min(deadline.left_s, _STANDBY_POLL_S))

    def _tell_of_wait(self, held: IntervalNodes, session_id: int) -> None:
        """Log for whom this process waits, and show it to `millpond status`, until the holder or the session changes."""
        if self._waits_for == (held.holder(), session_id):
            return
        self._waits_for = (held.holder(), session_id)
        _LOG.warning(
            "this process stands by, and takes over when the lease is free: held by %s interval=`%s`",
            held.holder(),
            held.interval.app_id,
        )
        deadline = self._deadline()
        self._session.ensure_path(self._paths.waiting, deadline)
        data = orjson.dumps({**orjson.loads(self._holder.encode()), "interval": held.interval.app_id})
        # It is there already if only the holder has changed; it goes with the session.
        self._session.transact([Create(self._waiting_path, data, ephemeral=True)], deadline)

    def _end_wait(self) -> None:
        if self._waits_for is not None:
            _LOG.warning("this process no longer stands by: the lease of %s is free", self._waits_for[0])
            self._waits_for = None
            self._session.transact([Delete(self._waiting_path)], self._deadline())

    def _find(
        self, intervals: Sequence[Interval], deadline: Deadline, watcher: Watcher | None = None
    ) -> list[IntervalNodes]:
        # Nodes are read before owners: an owner that is created in between has raised the node's version, so a
        # transaction on this reading fails.
        paths = [self._paths.node(i) for i in intervals] + [self._paths.owner(i) for i in intervals]
        found = self._session.read(paths, deadline, watcher)
        nodes, owners = found[: len(intervals)], found[len(intervals) :]
        return [
            IntervalNodes(interval=interval, node=node, owner=owner)
            for interval, node, owner in zip(intervals, nodes, owners, strict=True)
        ]

    def _on_watch(self, path: str) -> None:
        self._book.owner_changed(self._paths.interval_of(path))

    def _run(self) -> None:
        while not self._book.closed:
            # Wake at least twice per session time-out: servers may refuse a connection that is away that long.
            intervals = self._book.next_for_review(self._timeout_ms / 2_000)
            try:
                self._review(intervals)
                if not (self._book.closed or self._session.connection.connected):
                    self._session.tell_of_outage()
                    self._session.renew_if_refused()
            except (UnavailableError, InvalidError):
                # InvalidError: the access list was changed meanwhile, and may be changed back.
                self._book.review(intervals)
                self._book.pause(_REVIEW_RETRY_S)

    def _review(self, intervals: Sequence[Interval]) -> None:
        leases = self._book.leases_of(intervals)
        if leases:
            deadline = self._deadline()
            session_id = self._session.wait_connected(deadline)
            found = self._find(tuple(leases), deadline, self._on_watch)
            self._book.owners_seen(session_id, zip(leases.values(), found, strict=True))
        self._give_up([interval for interval in intervals if interval not in leases])

    def _give_up(self, intervals: Sequence[Interval]) -> None:
        if not intervals:
            return
        deadline = self._deadline()
        session_id = self._session.wait_connected(deadline)
        for nodes in self._find(intervals, deadline):
            operations = giving_up(nodes, session_id, self._paths)
            # Asked after the reading, because a taking that starts later changes the node's version.
            if operations and not self._book.is_in_use(nodes.interval):
                self._session.transact(operations, deadline)

    def _deadline(self) -> Deadline:
        return Deadline.after(self._clock, self._timeout_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The processes that hold intervals of a store, and those that stand by for them."""

    holders: Mapping[Interval, Holder]
    waiting: Sequence[tuple[Interval, Holder]]


def ask_who_waits(
    hosts: str, incarnation: str, intervals: Sequence[Interval], clock: Clock, security: ZooKeeperSecurity
) -> Attendance:
    """Return who holds these intervals, and who stands by; takes no lease."""
    paths = StorePaths(incarnation)
    deadline = Deadline.after(clock, _ASK_TIMEOUT_MS)
    session = ZooKeeperSession(hosts, _ASK_TIMEOUT_MS, lambda _: None, security)
    session.start(deadline)
    try:
        owners = session.read([paths.owner(interval) for interval in intervals], deadline)
        names = session.children(paths.waiting, deadline)
        waiting = session.read([f"{paths.waiting}/{name}" for name in names], deadline)
    finally:
        session.close()
    held = zip(intervals, owners, strict=True)
    return Attendance(
        holders={interval: Holder.decode(owner.data) for interval, owner in held if owner is not None},
        waiting=[found for node in waiting if node is not None for found in _standing_by(node.data)],
    )


def _standing_by(data: bytes) -> Iterator[tuple[Interval, Holder]]:
    with suppress(ValueError, KeyError, TypeError):
        interval = Interval.from_app_id(str(orjson.loads(data)["interval"]))
        if interval is not None:
            yield interval, Holder.decode(data)
