"""Rules of leases and of their nodes in ZooKeeper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import FencedError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Holder, Lease, LeaseState, may_move, next_sequencer
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_lease import IntervalNodes, StorePaths, batches, giving_up, taking
from millpond.statestore.leases.zookeeper_session import Create, Delete, Expect, Node, Operation, Set
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Sequencer

INTERVAL = Interval("counter", "a", "m")
HOLDER = Holder(writer_id="w1", host="pond", process_id=7)
PATHS = StorePaths("s1")
SEQUENCERS = st.integers(min_value=0, max_value=2**31)


def owned_by(session_id: int) -> Node:
    return Node(data=HOLDER.encode(), version=0, owner_session=session_id)


def after(nodes: IntervalNodes, operations: list[Operation]) -> IntervalNodes:
    node, owner = nodes.node, nodes.owner
    for operation in operations:
        match operation:
            case Create(path, data, ephemeral):
                created = Node(data=data, version=0, owner_session=1 if ephemeral else 0)
                node, owner = (node, created) if path == PATHS.owner(INTERVAL) else (created, owner)
            case Set(_, data, version):
                assert node is not None
                assert node.version == version
                node = Node(data=data, version=version + 1, owner_session=0)
            case Delete():
                assert owner is not None
                owner = None
            case Expect(_, version):
                assert node is not None
                assert node.version == version
    return IntervalNodes(interval=INTERVAL, node=node, owner=owner)


@given(last=SEQUENCERS, above=SEQUENCERS)
def test_next_sequencer_is_one_above_last_and_table(last: int, above: int) -> None:
    sequencer = next_sequencer(last, Sequencer(above))

    assert sequencer > last
    assert sequencer > above
    assert sequencer - 1 in {last, above}


@given(above=st.lists(SEQUENCERS, min_size=1, max_size=10), wiped_after=st.integers(0, 10))
def test_sequencers_rise_over_acquisitions_and_wipe(above: list[int], wiped_after: int) -> None:
    nodes = IntervalNodes(interval=INTERVAL, node=None, owner=None)
    last = 0
    for number, held in enumerate(above):
        if number == wiped_after:
            nodes, last = IntervalNodes(interval=INTERVAL, node=None, owner=None), 0
        sequencer, operations = taking(nodes, Sequencer(held), HOLDER, PATHS)
        nodes = after(nodes, operations)

        assert sequencer > max(held, last)
        assert sequencer == nodes.last_sequencer
        assert nodes.holder() == HOLDER
        last = sequencer


@pytest.mark.parametrize("ended", [LeaseState.LOST, LeaseState.RELEASED])
def test_ended_lease_stays_ended(ended: LeaseState) -> None:
    assert not [state for state in LeaseState if may_move(ended, state)]


@pytest.mark.parametrize("state", [LeaseState.HELD, LeaseState.SUSPENDED])
def test_live_lease_may_move_to_any_other_state(state: LeaseState) -> None:
    assert {new for new in LeaseState if may_move(state, new)} == set(LeaseState) - {state}


def test_check_passes_while_held() -> None:
    lease = Lease(INTERVAL, Sequencer(3))

    lease.check()

    assert lease.state is LeaseState.HELD
    assert "sequencer=3" in repr(lease)


def test_check_of_suspended_lease_is_unavailable() -> None:
    lease = Lease(INTERVAL, Sequencer(3))
    lease.move(LeaseState.SUSPENDED)

    with pytest.raises(UnavailableError):
        lease.check()
    assert lease.move(LeaseState.HELD)
    lease.check()


def test_check_of_lost_lease_raises_interval_sequencer_and_reason() -> None:
    lease = Lease(INTERVAL, Sequencer(3))
    lease.move(LeaseState.LOST, f"held now by {HOLDER}")

    with pytest.raises(FencedError, match=r"held now by w1 .process 7 on pond.*sequencer=`3`"):
        lease.check()
    assert not lease.move(LeaseState.HELD)


def test_holder_survives_encoding() -> None:
    assert Holder.decode(HOLDER.encode()) == HOLDER


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"writer_id": "w"}', b'"text"'])
def test_unreadable_holder_is_unknown(data: bytes) -> None:
    """A damaged node must not prevent acquiring the lease."""
    assert Holder.decode(data).writer_id == "unknown"


@given(
    computation=st.text(min_size=1, max_size=5),
    low=st.text(st.characters(codec="utf-8"), max_size=5),
    high=st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
)
def test_path_names_interval(computation: str, low: str, high: str | None) -> None:
    interval = Interval(computation.encode(errors="ignore").decode(), low, high)

    assert PATHS.owner(interval).count("/") == PATHS.leases.count("/") + 2
    assert PATHS.interval_of(PATHS.owner(interval)) == interval


def test_release_deletes_only_own_owner_node() -> None:
    """The deletion is conditional on the version that was read."""
    node = Node(data=b"{}", version=4, owner_session=0)
    nodes = IntervalNodes(interval=INTERVAL, node=node, owner=owned_by(1))

    assert giving_up(nodes, 2, PATHS) == []
    assert giving_up(nodes, 1, PATHS) == [Expect(PATHS.node(INTERVAL), 4), Delete(PATHS.owner(INTERVAL))]
    assert giving_up(IntervalNodes(interval=INTERVAL, node=node, owner=None), 1, PATHS) == []


def test_damaged_node_is_bounded_by_table_sequencer() -> None:
    nodes = IntervalNodes(interval=INTERVAL, node=Node(data=b"?", version=4, owner_session=0), owner=None)

    assert nodes.last_sequencer == 4
    assert taking(nodes, Sequencer(9), HOLDER, PATHS)[0] == 10


def test_batch_is_bounded_by_count_and_size() -> None:
    short = {Interval("c", f"{number:03d}"): Sequencer(0) for number in range(130)}
    long = {Interval("c", f"{number:03d}" + "x" * 50_000): Sequencer(0) for number in range(4)}

    assert [len(batch) for batch in batches(short)] == [64, 64, 2]
    assert [interval for batch in batches(short) for interval in batch] == list(short)
    assert [len(batch) for batch in batches(long)] == [2, 2]


def test_replaced_lease_is_held_until_notification_arrives() -> None:
    registry = MemoryRegistry()
    deaf, other = (MemoryLeases(registry, SystemClock(), writer) for writer in ("deaf", "other"))
    lease = deaf.take(INTERVAL, above=Sequencer(0))
    deaf.hold_notices()
    newer = other.take(INTERVAL, above=Sequencer(0))

    lease.check()
    deaf.deliver_notices()

    assert lease.state is LeaseState.LOST
    assert newer.sequencer > lease.sequencer


def test_wiped_registry_loses_leases_but_no_sequencers() -> None:
    registry = MemoryRegistry()
    leases = MemoryLeases(registry, SystemClock())
    lease = leases.take(INTERVAL, above=Sequencer(5))
    registry.wipe()

    assert lease.state is LeaseState.LOST
    assert leases.high_water.read() is None
    assert leases.take(INTERVAL, above=lease.sequencer).sequencer > lease.sequencer
