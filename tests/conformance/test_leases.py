"""What every kind of `Leases` promises: one suite for memory and for ZooKeeper.

ZooKeeper takes part three times: open, secured by TLS, SASL and access lists, and in a container. These are the only tests that need a Docker engine, and each has a twin that needs none:

| needs a Docker engine          | the same facts without one     | what only the first shows                            |
|--------------------------------|--------------------------------|------------------------------------------------------|
| ``[container]`` of every test: | ``[zookeeper]`` of every test: | nothing rests on the version that PySpark brings     |
| the official image, 3.9        | PySpark's jars, embedded       | along, nor on how we start it                        |
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import pytest

from millpond.statestore.errors import ConflictError, FencedError, UnavailableError
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import Lease, Leases, LeaseState
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.log.high_water import Mark
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Sequencer, TableVersion
from millpond.testing.servers.secured_zookeeper import SecuredZooKeeper
from millpond.testing.servers.tcp_proxy import TcpProxy
from millpond.testing.servers.zookeeper import container_hosts, docker_answers, wait_until

CLOCK = SystemClock()
INTERVAL = Interval("counter", "a", "m")
OTHER = Interval("counter", "m", None)
NOTHING = Sequencer(0)
# Short enough to await its expiry, long enough for a busy machine.
SHORT_SESSION_MS = 1_000


class World(Protocol):
    """A lease service for one store, and operations on its writers' connections."""

    def open(self, writer_id: str, session_timeout_ms: int = 10_000) -> Leases: ...

    def suspend(self, leases: Leases) -> None: ...

    def resume(self, leases: Leases) -> None: ...

    def expire_session(self, leases: Leases) -> None:
        """Expire the session; the writer is notified, perhaps later."""
        ...

    def close(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.registry = MemoryRegistry()

    def open(self, writer_id: str, session_timeout_ms: int = 10_000) -> Leases:
        return MemoryLeases(self.registry, CLOCK, writer_id)

    def suspend(self, leases: Leases) -> None:
        assert isinstance(leases, MemoryLeases)
        leases.suspend()

    def resume(self, leases: Leases) -> None:
        assert isinstance(leases, MemoryLeases)
        leases.resume()

    def expire_session(self, leases: Leases) -> None:
        assert isinstance(leases, MemoryLeases)
        leases.expire_session()

    def close(self) -> None:
        pass


class ZooKeeperWorld:
    def __init__(self, hosts: str, security: ZooKeeperSecurity | None = None) -> None:
        self.port = int(hosts.rpartition(":")[2])
        self.security = security or ZooKeeperSecurity()
        self.store_id = SystemRng().token()
        self.proxies: dict[str, TcpProxy] = {}
        self.opened: list[tuple[ZooKeeperLeases, TcpProxy]] = []

    def open(self, writer_id: str, session_timeout_ms: int = 10_000) -> Leases:
        proxy = TcpProxy(self.port)
        leases = ZooKeeperLeases(
            proxy.address,
            self.store_id,
            writer_id,
            CLOCK,
            session_timeout_ms=session_timeout_ms,
            security=self.security,
        )
        self.opened.append((leases, proxy))
        return leases

    def suspend(self, leases: Leases) -> None:
        self._proxy(leases).cut()

    def resume(self, leases: Leases) -> None:
        self._proxy(leases).mend()

    def expire_session(self, leases: Leases) -> None:
        # A standby acquires a disconnected writer's lease only after its session has expired.
        canary = Interval("canary")
        leases.take(canary, above=NOTHING)
        self.suspend(leases)
        self.open("canary").take(canary, above=NOTHING, on_held="wait", timeout_ms=30_000)
        self.resume(leases)

    def close(self) -> None:
        for leases, proxy in self.opened:
            proxy.mend()
            leases.close()
            proxy.close()

    def _proxy(self, leases: Leases) -> TcpProxy:
        return next(proxy for opened, proxy in self.opened if opened is leases)


@pytest.fixture(scope="session")
def zookeeper_in_container() -> Iterator[str]:
    """A server of the official image, where a Docker engine answers."""
    if not docker_answers():
        pytest.skip("no Docker engine answers")
    with container_hosts() as hosts:
        yield hosts


@pytest.fixture(params=["memory", "zookeeper", "secured", "container"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
    elif request.param == "zookeeper":
        in_zookeeper = ZooKeeperWorld(request.getfixturevalue("zookeeper_hosts"))
        yield in_zookeeper
        in_zookeeper.close()
    elif request.param == "secured":
        server: SecuredZooKeeper = request.getfixturevalue("secured_zookeeper")
        in_secured = ZooKeeperWorld(server.hosts, server.security_of("shop"))
        yield in_secured
        in_secured.close()
    else:
        in_container = ZooKeeperWorld(request.getfixturevalue("zookeeper_in_container"))
        yield in_container
        in_container.close()


def reaches(lease: Lease, state: LeaseState) -> bool:
    return wait_until(lambda: lease.state is state, CLOCK)


def in_background(wait: threading.Thread) -> threading.Thread:
    wait.start()
    return wait


def test_sequencers_rise_and_exceed_the_table(world: World) -> None:
    """Each acquired lease has a higher sequencer than the previous one and than the table."""
    leases = world.open("w1")

    first = leases.take(INTERVAL, above=NOTHING)
    second = leases.take(INTERVAL, above=Sequencer(41))
    third = leases.take(INTERVAL, above=Sequencer(3))

    assert NOTHING < first.sequencer < second.sequencer < third.sequencer
    assert second.sequencer > 41


def test_newest_taker_wins(world: World) -> None:
    old = world.open("w1").take(INTERVAL, above=NOTHING)
    new = world.open("w2").take(INTERVAL, above=NOTHING)

    assert new.sequencer > old.sequencer
    assert reaches(old, LeaseState.LOST)
    with pytest.raises(FencedError, match="w2"):
        old.check()
    new.check()


def test_refused_acquisition_names_the_holder(world: World) -> None:
    lease = world.open("w1").take(INTERVAL, above=NOTHING)

    with pytest.raises(ConflictError, match=r"holder=`w1"):
        world.open("w2").take(INTERVAL, above=NOTHING, on_held="refuse")
    lease.check()


def test_refuse_takes_a_free_lease(world: World) -> None:
    first = world.open("w1")
    first.release(first.take(INTERVAL, above=NOTHING))

    world.open("w2").take(INTERVAL, above=NOTHING, on_held="refuse").check()


def test_standby_gives_up_after_its_time(world: World) -> None:
    lease = world.open("w1").take(INTERVAL, above=NOTHING)

    with pytest.raises(ConflictError, match=r"holder=`w1"):
        world.open("w2").take(INTERVAL, above=NOTHING, on_held="wait", timeout_ms=100)
    lease.check()


@pytest.mark.parametrize("way", ["release", "close"])
def test_standby_follows_a_holder_that_goes(world: World, way: str) -> None:
    first, standby = world.open("w1"), world.open("w2")
    lease = first.take(INTERVAL, above=NOTHING)
    taken: list[Lease] = []

    def stand_by() -> None:
        taken.append(standby.take(INTERVAL, above=NOTHING, on_held="wait"))

    thread = in_background(threading.Thread(target=stand_by))
    if way == "release":
        first.release(lease)
    else:
        first.close()
    thread.join()

    assert taken[0].sequencer > lease.sequencer
    assert lease.state is LeaseState.RELEASED


def test_released_lease_has_ended(world: World) -> None:
    leases = world.open("w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    leases.release(lease)
    leases.release(lease)

    with pytest.raises(FencedError):
        lease.check()


def test_releasing_an_ended_lease_leaves_the_new_one_alone(world: World) -> None:
    """Releasing a lease that another writer, or this one again, has taken frees nothing."""
    first, second = world.open("w1"), world.open("w2")
    old = first.take(INTERVAL, above=NOTHING)
    second.take(INTERVAL, above=NOTHING)
    current = second.take(INTERVAL, above=NOTHING)
    first.release(old)

    with pytest.raises(ConflictError, match="w2"):
        first.take(INTERVAL, above=NOTHING, on_held="refuse")
    current.check()


def test_writer_may_take_its_own_lease_again(world: World) -> None:
    """Taking a lease that the writer has ends the old one, whatever it does about others."""
    leases = world.open("w1")
    old = leases.take(INTERVAL, above=NOTHING)
    new = leases.take(INTERVAL, above=NOTHING, on_held="refuse")

    assert old.state is LeaseState.LOST
    assert new.sequencer > old.sequencer
    new.check()


def test_all_are_taken_in_order(world: World) -> None:
    leases = world.open("w1")
    intervals = intervals_from_boundaries("many", [f"{number:03d}" for number in range(149)])
    wanted = {interval: Sequencer(number) for number, interval in enumerate(intervals)}

    taken = leases.take_all(wanted)

    assert [lease.interval for lease in taken] == list(wanted)
    assert all(lease.sequencer > wanted[lease.interval] for lease in taken)
    assert leases.wait_until_settled()
    assert {lease.state for lease in taken} == {LeaseState.HELD}


def test_all_or_none_are_taken(world: World) -> None:
    """If one of several is refused, its holder keeps it, the others stay free, and own ones stay held."""
    first, second = world.open("w1"), world.open("w2")
    lease = second.take(OTHER, above=NOTHING)
    third = Interval("counter", "", "a")
    own = first.take(third, above=NOTHING)

    with pytest.raises(ConflictError):
        first.take_all({INTERVAL: NOTHING, third: NOTHING, OTHER: NOTHING}, on_held="refuse")
    lease.check()
    own.check()
    second.take(INTERVAL, above=NOTHING, on_held="refuse").check()


@pytest.mark.parametrize("low", ["", "/", ".", "..", "%2F", "ünï", "a\x00b", "=" * 500])
def test_any_key_may_bound_an_interval(world: World, low: str) -> None:
    """Keys with every kind of character bound intervals that are leased separately."""
    first, second = world.open("w1"), world.open("w2")
    lease = first.take(Interval("odd", low, None), above=NOTHING)

    second.take(Interval("odd", low, low + "~"), above=NOTHING, on_held="refuse")
    with pytest.raises(ConflictError):
        second.take(lease.interval, above=NOTHING, on_held="refuse")


def test_lost_connection_suspends(world: World) -> None:
    """While the service is away leases are suspended, not lost, and taking is unavailable."""
    leases = world.open("w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    world.suspend(leases)

    assert reaches(lease, LeaseState.SUSPENDED)
    assert not leases.wait_until_settled(timeout_ms=50)
    with pytest.raises(UnavailableError):
        lease.check()
    with pytest.raises(UnavailableError):
        leases.take(OTHER, above=NOTHING, timeout_ms=50)

    world.resume(leases)

    assert leases.wait_until_settled()
    lease.check()


def test_lease_taken_while_away_is_lost_on_return(world: World) -> None:
    """A writer whose lease was taken while it was disconnected learns so when it reconnects."""
    leases, other = world.open("w1"), world.open("w2")
    lease, kept = leases.take_all({INTERVAL: NOTHING, OTHER: NOTHING})
    world.suspend(leases)
    assert reaches(lease, LeaseState.SUSPENDED)
    newer = other.take(INTERVAL, above=NOTHING)
    world.resume(leases)

    assert leases.wait_until_settled()
    assert (lease.state, kept.state) == (LeaseState.LOST, LeaseState.HELD)
    newer.check()


def test_release_while_away_frees_the_lease_on_return(world: World) -> None:
    """A lease released while the service is away is free soon after it is back."""
    leases, other = world.open("w1"), world.open("w2")
    lease = leases.take(INTERVAL, above=NOTHING)
    world.suspend(leases)
    assert reaches(lease, LeaseState.SUSPENDED)
    leases.release(lease)
    world.resume(leases)

    other.take(INTERVAL, above=NOTHING, on_held="wait").check()
    assert lease.state is LeaseState.RELEASED


def test_expired_session_loses_every_lease(world: World) -> None:
    """When its session has ended a writer has lost every lease, and may take them again."""
    leases = world.open("w1", SHORT_SESSION_MS)
    lease = leases.take(INTERVAL, above=NOTHING)
    world.expire_session(leases)

    assert reaches(lease, LeaseState.LOST)
    with pytest.raises(FencedError):
        lease.check()
    again = leases.take(INTERVAL, above=NOTHING, on_held="refuse")
    assert again.sequencer > lease.sequencer
    again.check()


def test_high_water_starts_empty_and_rises(world: World) -> None:
    high_water = world.open("w1").high_water

    assert high_water.read() is None
    for version in (1, 2, 5, 3):
        high_water.advance(TableVersion(version), f"digest-{version}")
    high_water.flush()
    assert high_water.read() == Mark(TableVersion(5), "digest-5")


def test_writers_share_the_high_water_mark(world: World) -> None:
    """Writers of a store see each other's marks, and a late lower mark does not lower it."""
    first, second = world.open("w1").high_water, world.open("w2").high_water
    second.advance(TableVersion(4), "four")
    second.flush()
    first.advance(TableVersion(9), "nine")
    first.flush()
    second.advance(TableVersion(7), "seven")
    second.flush()

    assert first.read() == second.read() == Mark(TableVersion(9), "nine")


def test_announced_boundary_is_seen_at_once_and_never_falls(world: World) -> None:
    """A commit that is made after a cleanup must learn of it, whichever server its writer asks."""
    first, second = world.open("w1").high_water, world.open("w2").high_water
    assert first.boundary() == 0
    for version, stands in ((5, 5), (3, 5), (70, 70)):
        second.announce_boundary(TableVersion(version))
        assert first.boundary() == second.boundary() == stands


def test_closing_twice_is_harmless(world: World) -> None:
    """Closing ends every lease, and closing again changes nothing."""
    leases = world.open("w1")
    lease = leases.take(INTERVAL, above=NOTHING)
    leases.close()
    leases.close()

    assert lease.state is LeaseState.RELEASED
