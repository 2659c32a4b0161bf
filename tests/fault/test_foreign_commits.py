"""Commits of other engines on the store's rows: changes of data are refused, maintenance is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.gc.collectors import write_checkpoint
from millpond.statestore.errors import DataError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TableVersion

FIRST_DAY: Final = 2_988
BOTH_DAYS: Final = 5_006
ACCOUNTS: Final = 17


class Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set((context.state.get() or 0) + 1)


class Payments:
    """A store that counts payments, with the view of other engines on its rows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pond"
        self.rows = str(self.path / "rows")
        self._registry = MemoryRegistry()

    def open(self, *, read_only: bool = False) -> Store:
        clock = SystemClock()
        return Store.open(
            self.path,
            read_only=read_only,
            leases=lambda _, writer_id: MemoryLeases(self._registry, clock, writer_id=writer_id),
        )

    def pay(self, first: int, last: int) -> None:
        """Run the pipeline over payments number ``first`` to ``last - 1``."""
        with self.open() as store:
            pay(store, first, last)

    def version(self) -> int:
        """Return the newest version, by delta-rs."""
        return DeltaTable(self.rows).version()


def pipeline_of() -> EnginePipeline:
    pipeline = EnginePipeline("bank")
    pipeline.inject("payments", key="account", at="at", id="number").apply(Count(), name="count")
    return pipeline


def pay(store: Store, first: int, last: int) -> None:
    rows = [{"account": f"a{n % ACCOUNTS}", "at": n, "number": f"p{n}"} for n in range(first, last)]
    with LocalRunner(store, progress=False).start(pipeline_of(), stepping=True) as run:
        run.inject("payments", rows)
        run.run_until_quiet()


def counted(store: Store) -> int:
    states = store.rows_view("count").to_arrow().column("state").to_pylist()
    return sum(int(state) for state in states if state is not None)


@pytest.fixture
def payments(tmp_path: Path) -> Payments:
    """A store with 2,988 payments of one day and 5,006 of two, and its version in between."""
    made = Payments(tmp_path)
    made.pay(0, FIRST_DAY)
    return made


def test_restore_by_delta_rs_is_refused_and_repaired(payments: Payments) -> None:
    """RESTORE reverts 5,006 counted payments to 2,988; repair brings all of them back."""
    before = payments.version()
    payments.pay(FIRST_DAY, BOTH_DAYS)
    DeltaTable(payments.rows).restore(before)
    said = rf"another engine.*millpond repair.*version=`{payments.version()}` operation=`RESTORE`"

    for read_only in (False, True):
        with pytest.raises(DataError, match=said):
            payments.open(read_only=read_only)
    pond = str(payments.path)
    for command in (["verify", pond], ["sql", pond, "select 1"], ["rows", pond, "count"], ["status", pond]):
        told = CliRunner().invoke(main, command)
        assert told.exit_code != 0
        assert "RESTORE" in f"{told.output} {told.exception}", command

    repaired = CliRunner().invoke(main, ["repair", str(payments.path), "--yes"])
    assert repaired.exit_code == 0, repaired.output
    with payments.open() as store:
        assert counted(store) == BOTH_DAYS
        pay(store, BOTH_DAYS, BOTH_DAYS + 3)
        assert counted(store) == BOTH_DAYS + 3
    assert CliRunner().invoke(main, ["verify", str(payments.path)]).exit_code == 0


def test_restore_stops_a_running_writer(payments: Payments) -> None:
    with payments.open() as store:
        before = payments.version()
        pay(store, FIRST_DAY, FIRST_DAY + 40)
        DeltaTable(payments.rows).restore(before)
        after = payments.version()
        with pytest.raises(DataError, match="operation=`RESTORE`"):
            store.committer.refresh()
        with pytest.raises(DataError, match="operation=`RESTORE`"):
            pay(store, FIRST_DAY + 40, FIRST_DAY + 80)
    assert payments.version() == after


def _delete(rows: str) -> None:
    DeltaTable(rows).delete("key = 'a1'")


def _update(rows: str) -> None:
    DeltaTable(rows).update(updates={"state": "'0'"}, predicate="key = 'a1'")


def _append(rows: str) -> None:
    # Commit the table's current contents again.
    write_deltalake(rows, DeltaTable(rows).to_pyarrow_table(), mode="append")


def _overwrite(rows: str) -> None:
    table = DeltaTable(rows).to_pyarrow_table()
    write_deltalake(rows, table.slice(0, 3), mode="overwrite")


def _merge(rows: str) -> None:
    source = pa.table({"key": ["a1"]})
    merge = DeltaTable(rows).merge(source, "s.key = t.key", source_alias="s", target_alias="t")
    merge.when_matched_delete().execute()


@pytest.mark.parametrize(
    ("operation", "act"),
    [("DELETE", _delete), ("UPDATE", _update), ("WRITE", _append), ("WRITE", _overwrite), ("MERGE", _merge)],
)
def test_foreign_changes_of_data_are_refused(
    payments: Payments, operation: str, act: Callable[[str], Any]
) -> None:
    """The error names version and operation."""
    act(payments.rows)

    with pytest.raises(DataError, match=rf"version=`{payments.version()}` operation=`{operation}`"):
        payments.open(read_only=True)


def test_foreign_compactions_and_checkpoints_are_accepted(payments: Payments) -> None:
    payments.pay(FIRST_DAY, FIRST_DAY + 10)
    table = DeltaTable(payments.rows)
    table.optimize.compact()
    table.create_checkpoint()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    payments.pay(FIRST_DAY + 10, BOTH_DAYS)

    with payments.open(read_only=True) as store:
        assert counted(store) == BOTH_DAYS


def test_foreign_checkpoint_does_not_hide_a_restore(payments: Payments) -> None:
    """After a cleanup of the log, only the checkpoint shows it."""
    table = DeltaTable(payments.rows)
    first = payments.version()
    with payments.open() as store:
        # Delete the oldest commits, as after a checkpoint of Millpond: the log is no longer whole.
        write_checkpoint(store.objects, every=0)
        store.objects.delete([path for path in store.objects.list("_delta_log") if path.endswith("00.json")])
    payments.pay(FIRST_DAY, BOTH_DAYS)
    table = DeltaTable(payments.rows)
    table.restore(first)
    DeltaTable(payments.rows).create_checkpoint()

    with pytest.raises(DataError, match=r"operation=`RESTORE`"):
        payments.open(read_only=True)
    repaired = CliRunner().invoke(main, ["repair", str(payments.path), "--yes"])
    assert repaired.exit_code == 0, repaired.output
    with payments.open(read_only=True) as store:
        assert counted(store) == BOTH_DAYS


def test_versions_before_the_restore_stay_readable(payments: Payments) -> None:
    before = payments.version()
    _delete(payments.rows)

    log = Log(open_objects(payments.rows))
    assert load(log, TableVersion(before)).version == before
    with pytest.raises(DataError, match="operation=`DELETE`"):
        load(log)
