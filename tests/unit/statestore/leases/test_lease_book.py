"""The lease book, which orders notifications and acquisitions of several threads."""

from __future__ import annotations

import pytest

from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Holder, Lease, LeaseState
from millpond.statestore.leases.zookeeper_lease import IntervalNodes, LeaseBook
from millpond.statestore.leases.zookeeper_session import Connection, Node
from millpond.statestore.types import Sequencer

INTERVAL = Interval("counter")
SESSION = 7
CONNECTED = Connection(connected=True, session_id=SESSION)
AWAY = Connection(connected=False, session_id=SESSION)
EXPIRED = Connection(connected=False, session_id=None)


@pytest.fixture
def book() -> LeaseBook:
    book = LeaseBook()
    book.connection_changed(CONNECTED)
    return book


def enter(book: LeaseBook, sequencer: int = 1) -> Lease:
    leases = book.enter({INTERVAL: Sequencer(sequencer)}, SESSION)
    assert leases is not None
    return leases[0]


def owned_by(session_id: int) -> IntervalNodes:
    data = Holder(writer_id="w2", host="pond", process_id=1).encode()
    owner = Node(data=data, version=0, owner_session=session_id)
    return IntervalNodes(interval=INTERVAL, node=None, owner=owner)


def test_lease_of_ended_session_is_not_recorded(book: LeaseBook) -> None:
    book.connection_changed(EXPIRED)

    assert book.enter({INTERVAL: Sequencer(1)}, SESSION) is None
    assert not book.is_in_use(INTERVAL)


def test_lease_recorded_while_disconnected_is_suspended(book: LeaseBook) -> None:
    book.connection_changed(AWAY)
    lease = enter(book)

    states = [lease.state]
    book.connection_changed(CONNECTED)
    states.append(lease.state)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION))])
    states.append(lease.state)

    assert states == [LeaseState.SUSPENDED, LeaseState.SUSPENDED, LeaseState.HELD]


@pytest.mark.parametrize("connection", [AWAY, EXPIRED, Connection(connected=True, session_id=SESSION + 1)])
def test_reading_of_earlier_connection_restores_nothing(book: LeaseBook, connection: Connection) -> None:
    lease = enter(book)
    book.connection_changed(AWAY)
    book.connection_changed(connection)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION))])

    assert lease.state is not LeaseState.HELD


def test_owner_of_another_session_ends_lease(book: LeaseBook) -> None:
    lease = enter(book)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION + 1))])

    assert lease.state is LeaseState.LOST
    assert not book.is_in_use(INTERVAL)


def test_higher_sequencer_wins_in_any_order(book: LeaseBook) -> None:
    later = enter(book, 2)
    earlier = enter(book, 1)

    assert (earlier.state, later.state) == (LeaseState.LOST, LeaseState.HELD)
    assert book.leases_of([INTERVAL]) == {INTERVAL: later}


def test_interval_is_in_use_during_acquisition(book: LeaseBook) -> None:
    with book.being_taken([INTERVAL]), book.being_taken([INTERVAL]):
        assert book.is_in_use(INTERVAL)

    assert not book.is_in_use(INTERVAL)
    assert book.next_for_review(0.0) == (INTERVAL,)
    assert book.next_for_review(0.0) == ()


def test_nothing_is_reviewed_while_disconnected(book: LeaseBook) -> None:
    book.review([INTERVAL])
    book.connection_changed(AWAY)

    assert book.next_for_review(0.0) == ()
    book.connection_changed(CONNECTED)
    assert book.close()
    assert book.next_for_review(0.0) == ()
    assert not book.close()
