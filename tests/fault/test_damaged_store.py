"""Damaged bytes of a store: readers name the file in an error, and see no older data."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.statestore.errors import DataError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_process import HOST, recorded_server
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import LEDGER, ROWS, ledger_of, ledger_pipeline, numbered, written

pytestmark = pytest.mark.fault

CLOCK = SystemClock()
Damage = Callable[[Path], object]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "cut after a line": lambda file: file.write_bytes(
        b"".join(file.read_bytes().splitlines(keepends=True)[:-1])
    ),
    "emptied": lambda file: file.write_bytes(b""),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "removed": lambda file: file.unlink(),
    "changed": flip_a_bit,
    "replaced": lambda file: shutil.copy(file.with_name(f"{int(file.stem) - 1:020d}.json"), file),
}


def run_on(store: Store, *numbers: int) -> None:
    with LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
        for number in numbers:
            run.inject(ROWS, numbered([number])).wait("60s")


def last_commit(path: Path) -> Path:
    return max((path / "rows" / "_delta_log").glob("*.json"))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], Store]:
    registry = MemoryRegistry()
    return lambda: Store.open(
        tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_last_commit_is_refused_until_repaired(
    opened: Callable[[], Store], tmp_path: Path, damage: str
) -> None:
    with opened() as store:
        run_on(store, 0, 5)
    file = last_commit(tmp_path / "pond")
    whole = file.read_bytes()
    DAMAGES[damage](file)

    with pytest.raises(DataError, match=re.escape(file.name)):
        opened()
    file.write_bytes(whole)
    with opened() as store:
        assert ledger_of(store) == {"k0": [0, 5]}


def test_rolled_back_log_is_refused(opened: Callable[[], Store], tmp_path: Path) -> None:
    """The log is consistent, so only the mark reveals the missing version."""
    with opened() as store:
        run_on(store, 0)
        copy = shutil.copytree(tmp_path / "pond" / "rows", tmp_path / "older")
        run_on(store, 5)
        newest = store.snapshot().version
    shutil.rmtree(tmp_path / "pond" / "rows")
    shutil.copytree(copy, tmp_path / "pond" / "rows")

    with pytest.raises(DataError, match=rf"cut or rolled back.*{newest:020d}\.json.*committed=`{newest}`"):
        opened()


@pytest.mark.zookeeper
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_mark_in_zookeeper_is_durable(tmp_path: Path, zookeeper_hosts: str, damage: str) -> None:
    """Closing a store makes its mark visible to every later process."""
    path = tmp_path / "pond"
    with Store.open(path, zookeeper=zookeeper_hosts) as store:
        run_on(store, 0, 5)
    file = last_commit(path)
    DAMAGES[damage](file)

    with pytest.raises(DataError, match=re.escape(file.name)):
        Store.open(path, zookeeper=zookeeper_hosts)


@pytest.mark.parametrize("damage", ["cut", "emptied", "zeroed", "removed", "changed"])
def test_damaged_row_file_is_named_by_runs_and_views(
    opened: Callable[[], Store], tmp_path: Path, damage: str
) -> None:
    with opened() as store:
        run_on(store, 0, 5)
    file = min((tmp_path / "pond" / "rows" / f"computation={LEDGER}").glob("*.parquet"))
    DAMAGES[damage](file)

    with opened() as store:
        for read in (lambda: ledger_of(store), lambda: run_on(store, 10)):
            with pytest.raises(DataError, match=re.escape(file.name)):
                read()


@pytest.mark.zookeeper
def test_server_of_a_store_avoids_a_port_in_use(tmp_path: Path) -> None:
    """Another process took the port of the store's dead server."""
    path = tmp_path / "pond"
    with Store.open(path) as store:
        run_on(store, 0)
        server = recorded_server(path / "zookeeper")
        assert server is not None
        server.kill(CLOCK)
    with socket.create_server((HOST, server.port)), Store.open(path) as store:
        successor = recorded_server(path / "zookeeper")
        assert successor is not None
        assert successor.port != server.port
        run_on(store, 5)
        assert ledger_of(store) == written(numbered([0, 5]))
