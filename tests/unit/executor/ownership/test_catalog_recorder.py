"""The recorder of a pipeline in the catalog."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from millpond.executor.local.runner import LocalRunner
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered
from millpond.testing.servers.zookeeper import wait_until

CLOCK = SystemClock()


def test_locked_catalog_delays_no_pipeline(tmp_path: Path) -> None:
    """The topology reaches the catalog once the lock is released."""
    registry = MemoryRegistry()

    def opened() -> Store:
        return Store.open(
            tmp_path / "pond", leases=lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)
        )

    with opened() as store, LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
        run.inject(ROWS, numbered([0])).wait()
    with closing(sqlite3.connect(tmp_path / "pond" / "catalog.sqlite", isolation_level=None)) as stopped:
        stopped.execute("UPDATE computations SET code_hash = 'older', code_version = 7")
        stopped.execute("BEGIN IMMEDIATE")
        with opened() as store, LocalRunner(store, progress=False).start(ledger_pipeline()) as run:
            assert run.inject(ROWS, numbered([1])).wait("60s")
            catalog = store.catalog
            assert catalog is not None
            assert {each.code_version for each in catalog.computations()} == {7}
            stopped.execute("ROLLBACK")
            assert wait_until(lambda: {each.code_version for each in catalog.computations()} == {8}, CLOCK)
