"""A process that stands still inside a transaction on the catalog does not hold up the new owner."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.statestore.catalog import engine
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered
from millpond.testing.servers.zookeeper import wait_until

pytestmark = pytest.mark.fault

CLOCK = SystemClock()


class Pond:
    """A store whose catalog's lock is waited for half a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = MemoryRegistry()

    def open(self) -> Store:
        return Store.open(
            self.path, leases=lambda _, writer_id: MemoryLeases(self.registry, CLOCK, writer_id=writer_id)
        )

    def write(self, store: Store, number: int) -> None:
        with LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
            run.inject(ROWS, numbered([number])).wait("60s")

    @contextmanager
    def holder(self, inside: str, version: int) -> Iterator[subprocess.Popen[str]]:
        """Start a process, and wait until it has stopped inside its transaction."""
        program = [sys.executable, "-m", "tests.processes.catalog_holder"]
        arguments = [default_catalog_url(str(self.path)), inside, str(version)]
        with subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, text=True) as process:
            try:
                stat = Path(f"/proc/{process.pid}/stat")
                assert wait_until(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), CLOCK)
                yield process
            finally:
                process.kill()


@pytest.fixture
def pond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pond:
    monkeypatch.setattr(engine, "_BUSY_TIMEOUT_MS", 500)
    monkeypatch.setitem(engine._SQLITE_ARGUMENTS, "timeout", 0.5)
    return Pond(tmp_path / "pond")


def woken(holder: subprocess.Popen[str]) -> str:
    holder.send_signal(signal.SIGCONT)
    return holder.communicate(timeout=60)[0].strip()


@pytest.mark.parametrize("inside", ["creation", "pin"])
def test_new_owner_records_collects_and_reads(pond: Pond, inside: str) -> None:
    """The catalog's contents go on; the stopped process is told that its version was collected."""
    with pond.open() as store:
        pond.write(store, 0)
        known = store.catalog.computations()
    if inside == "creation":
        for file in pond.path.glob("catalog.sqlite*"):
            file.unlink()

    with pond.holder(inside, version=0) as holder, pond.open() as store:
        pond.write(store, 1)
        assert [(each.name, each.code_version) for each in store.catalog.computations()] == [
            (each.name, each.code_version) for each in known
        ]
        collected = collect_offline(store, CLOCK, SystemRng(), UpkeepPolicy(retention=0, collect_every=1))
        assert collected.horizon == store.snapshot().version
        with store.reading() as snapshot:
            assert {each.version for each in store.catalog.horizons()} == {
                snapshot.version,
                collected.horizon,
            }
        assert woken(holder).startswith("that version is being collected")
        assert [each.holder for each in store.catalog.horizons()] == ["gc"]
        assert ledger_of(store) == {"k0": [0], "k1": [1]}


def test_woken_process_pins_where_collectors_look(pond: Pond) -> None:
    with pond.open() as store:
        pond.write(store, 0)
        newest = store.snapshot().version
        with pond.holder("pin", newest) as holder:
            pond.write(store, 1)
            store.catalog.publish_horizon("reader", newest)
            assert woken(holder) == "pinned"
            collected = collect_offline(store, CLOCK, SystemRng(), UpkeepPolicy(retention=0, collect_every=1))

        assert (collected.horizon, collected.held_by) == (newest, "a reader")
        assert {each.holder for each in store.catalog.horizons()} == {"gc", "holder", "reader"}
