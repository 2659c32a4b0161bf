"""The book of leases keeps notices and takings in order, whichever thread brings which first."""

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
    """A book whose connection stands."""
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


def test_lease_of_an_ended_session_is_not_entered(book: LeaseBook) -> None:
    """A taking whose session expired before it was entered gives no lease."""
    book.connection_changed(EXPIRED)

    assert book.enter({INTERVAL: Sequencer(1)}, SESSION) is None
    assert not book.is_in_use(INTERVAL)


def test_lease_entered_while_away_is_suspended(book: LeaseBook) -> None:
    """A taking that is entered after the connection was lost is not held before it was looked at."""
    book.connection_changed(AWAY)
    lease = enter(book)

    states = [lease.state]
    book.connection_changed(CONNECTED)
    states.append(lease.state)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION))])
    states.append(lease.state)

    assert states == [LeaseState.SUSPENDED, LeaseState.SUSPENDED, LeaseState.HELD]


@pytest.mark.parametrize("connection", [AWAY, EXPIRED, Connection(connected=True, session_id=SESSION + 1)])
def test_reading_of_an_earlier_connection_holds_nothing(book: LeaseBook, connection: Connection) -> None:
    """What was read before the connection or the session went does not bring a lease back."""
    lease = enter(book)
    book.connection_changed(AWAY)
    book.connection_changed(connection)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION))])

    assert lease.state is not LeaseState.HELD


def test_owner_of_another_session_ends_the_lease(book: LeaseBook) -> None:
    """A lease whose owner node is another session's is lost to the writer that the node names."""
    lease = enter(book)
    book.owners_seen(SESSION, [(lease, owned_by(SESSION + 1))])

    assert lease.state is LeaseState.LOST
    assert not book.is_in_use(INTERVAL)


def test_later_taking_wins_in_any_order(book: LeaseBook) -> None:
    """Of two takings by the same writer the one with the higher sequencer is held, whichever is entered first."""
    later = enter(book, 2)
    earlier = enter(book, 1)

    assert (earlier.state, later.state) == (LeaseState.LOST, LeaseState.HELD)
    assert book.leases_of([INTERVAL]) == {INTERVAL: later}


def test_interval_is_in_use_while_it_is_taken(book: LeaseBook) -> None:
    """An interval counts as in use from before its taking, and is looked at afterwards."""
    with book.being_taken([INTERVAL]), book.being_taken([INTERVAL]):
        assert book.is_in_use(INTERVAL)

    assert not book.is_in_use(INTERVAL)
    assert book.next_for_review(0.0) == (INTERVAL,)
    assert book.next_for_review(0.0) == ()


def test_nothing_is_reviewed_while_away(book: LeaseBook) -> None:
    """Intervals wait for the connection before they are looked at, and for nothing once closed."""
    book.review([INTERVAL])
    book.connection_changed(AWAY)

    assert book.next_for_review(0.0) == ()
    book.connection_changed(CONNECTED)
    assert book.close()
    assert book.next_for_review(0.0) == ()
    assert not book.close()
