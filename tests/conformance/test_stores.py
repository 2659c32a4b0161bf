"""The promises of every store, wherever it is: one suite for memory, disk and S3.

A pipeline runs, is restarted, taken over and read; only the store's location differs.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import pytest
from deltalake import DeltaTable

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.sinks.sink import DeltaSink
from millpond.gc.collectors import Retention, collect_garbage
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import DataError, FencedError, InvalidError, ObjectExistsError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import commit_path
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered, written

CLOCK: Final = SystemClock()


class Place:
    """A store's location, which can be opened any number of times."""

    def open(self) -> Store:
        raise NotImplementedError


class Memory(Place):
    def __init__(self) -> None:
        self._disk, self._registry = MemoryObjects(), MemoryRegistry()

    def open(self) -> Store:
        return Store.in_memory(objects=self._disk, registry=self._registry)


class Address(Place):
    def __init__(self, url: str, options: dict[str, str]) -> None:
        self.options, self.url = options, url
        self._registry = MemoryRegistry()

    def open(self) -> Store:
        return Store.open(
            f"{self.url}/pond",
            storage_options=self.options,
            leases=lambda _, writer_id: MemoryLeases(self._registry, CLOCK, writer_id=writer_id),
        )


def address(request: pytest.FixtureRequest, kind: str) -> Address:
    if kind == "local":
        return Address(str(request.getfixturevalue("tmp_path")), {})
    return Address(request.getfixturevalue("s3_bucket"), request.getfixturevalue("s3_server").options)


@pytest.fixture(params=["memory", "local", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    return Memory() if request.param == "memory" else address(request, request.param)


@pytest.fixture(params=["local", "s3"])
def addressed(request: pytest.FixtureRequest) -> Address:
    """A location that other engines can open too."""
    return address(request, request.param)


def start(store: Store, **options: Any) -> LocalRun:
    return LocalRunner(store, progress=False, **options).start(ledger_pipeline(), stepping=True)


def write(run: LocalRun, *numbers: int) -> None:
    run.inject(ROWS, numbered(numbers))
    run.run_until_quiet()


def test_restart_finds_rows_ids_and_positions(place: Place) -> None:
    with place.open() as store:
        run = start(store)
        write(run, 0, 1, 2)
        run.stop()
    with place.open() as store:
        run = start(store)
        write(run, 2, 3)
        assert ledger_of(store) == written(numbered(range(4)))
        run.stop()


def test_former_owner_is_fenced(place: Place) -> None:
    with place.open() as former_store, place.open() as other:
        former, owner = start(former_store), start(other)
        write(owner, 0)
        with pytest.raises(FencedError):
            write(former, 1)
        former.abandon()
        assert ledger_of(other) == written(numbered([0]))
        owner.stop()


def test_every_version_can_be_read(place: Place) -> None:
    with place.open() as store:
        run = start(store)
        versions = {}
        for number in range(4):
            write(run, number)
            versions[number] = store.snapshot().version
        for number, version in versions.items():
            assert ledger_of(store, version) == written(numbered(range(number + 1)))
        states = store.sql().sql(f"select key, state from {LEDGER} order by key").fetchall()
        assert {key: orjson.loads(state) for key, state in states} == written(numbered(range(4)))
        run.stop()


def test_one_of_two_writers_at_one_version_wins(place: Place) -> None:
    """The loser reads the winner's bytes."""
    with place.open() as first, place.open() as other:
        former, owner = start(first), start(other)
        write(owner, 0)
        version = other.snapshot().version
        data = other.log.require(version)
        with pytest.raises(ObjectExistsError):
            other.log.objects.put_if_absent(commit_path(version), data + b"\n")
        assert first.log.require(version) == data
        former.abandon()
        owner.stop()


def test_compactions_and_garbage(place: Place) -> None:
    """Compactions and an offline collection keep the answer, and the store verifies as sound."""
    upkeep = UpkeepPolicy(compaction=CompactionPolicy(fan_in=4, files_max=8), background=False)
    with place.open() as store:
        run = start(store, upkeep=upkeep)
        for number in range(24):
            write(run, number)
        run.stop()
        before = len(store.objects.list(f"computation={LEDGER}"))
        collect_garbage(
            store.objects,
            None,
            CLOCK,
            announce=None,
            retention=Retention(keep_ms=0, checkpoint_every=1),
            owned={},
        )
        assert len(store.objects.list(f"computation={LEDGER}")) < before
        assert ledger_of(store) == written(numbered(range(24)))
        assert verify_store(store.objects, store.leases.high_water.read()).findings == ()


def test_missing_last_commit_is_refused(place: Place) -> None:
    """The log must not open as an older table."""
    with place.open() as store:
        run = start(store)
        write(run, 0)
        run.stop()
        store.objects.delete([commit_path(store.snapshot().version)])
    with pytest.raises(DataError, match="cut or rolled back"):
        place.open()


def test_other_readers_take_the_same_options(addressed: Address) -> None:
    sink = DeltaSink(f"{addressed.url}/numbers", storage_options=addressed.options)
    with addressed.open() as store:
        run = LocalRunner(store, progress=False).start(ledger_pipeline(sink), stepping=True)
        write(run, 0, 1, 2)
        run.stop()
    numbers, rows = (
        DeltaTable(f"{addressed.url}/{name}", storage_options=addressed.options).to_pyarrow_table()
        for name in ("numbers", "pond/rows")
    )
    assert sorted(orjson.loads(value)["n"] for value in numbers.column("value").to_pylist()) == [0, 1, 2]
    assert sorted(set(rows.column("key").to_pylist())) == ["k0", "k1", "k2"]


def test_reading_a_missing_store_creates_nothing(addressed: Address) -> None:
    with pytest.raises(InvalidError, match="no store at this path"):
        Store.open(f"{addressed.url}/pond", storage_options=addressed.options, read_only=True)


@pytest.mark.zookeeper
def test_runner_opens_a_url(s3_bucket: str, s3_server: Any, zookeeper_hosts: str) -> None:
    url, options = f"{s3_bucket}/pond", s3_server.options
    runner = LocalRunner(url, zookeeper=zookeeper_hosts, storage_options=options, progress=False)
    with runner.start(ledger_pipeline()) as run:
        run.inject(ROWS, numbered(range(10))).wait("60s")
    with Store.open(url, storage_options=options, read_only=True) as store:
        assert ledger_of(store) == written(numbered(range(10)))
        assert store.catalog is None
