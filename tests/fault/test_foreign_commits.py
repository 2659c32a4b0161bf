"""Commits of other engines on the store's rows: changes of data are refused, maintenance is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import deltalake
import orjson
import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake
from deltalake.table import TableFeatures

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_repair
from millpond.gc.collectors import write_checkpoint
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.features import Use
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
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

    def repair(self) -> None:
        objects, clock = open_objects(self.rows), SystemClock()
        leases = MemoryLeases(self._registry, clock, writer_id="repair")
        repair_store(objects, plan_repair(objects, leases.high_water.read()), leases, clock, SystemRng())

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


def test_vacuum_of_a_savepoints_files_is_reported_with_version_and_engine(payments: Payments) -> None:
    with payments.open() as store:
        store.savepoint("kept")
    payments.pay(FIRST_DAY, FIRST_DAY + 10)
    table = DeltaTable(payments.rows)
    table.optimize.compact()
    assert verify_store(open_objects(payments.rows)).findings == ()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    (finding,) = verify_store(open_objects(payments.rows)).findings
    assert finding.held.startswith("savepoint 'kept', version ")
    assert (
        f"delta-rs:py-{deltalake.__version__} has vacuumed in version {payments.version()}" in finding.fault
    )
    with payments.open() as store:
        store.drop_savepoint("kept")
        assert counted(store) == FIRST_DAY + 10
    assert verify_store(open_objects(payments.rows)).findings == ()


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


def _with(*names: str) -> Callable[[str], Any]:
    features = [getattr(TableFeatures, name) for name in names]
    return lambda rows: DeltaTable(rows).alter.add_feature(features, allow_protocol_versions_increase=True)


def _set(**properties: str) -> Callable[[str], Any]:
    return lambda rows: DeltaTable(rows).alter.set_table_properties(
        {f"delta.{name}": value for name, value in properties.items()}
    )


def _upgrade(rows: str) -> None:
    table = DeltaTable(rows)
    commit = [
        {"commitInfo": {"timestamp": 0, "operation": "UPGRADE PROTOCOL", "engineInfo": "Apache-Spark/5.0.0"}},
        {"protocol": {"minReaderVersion": 9, "minWriterVersion": 9}},
    ]
    path = Path(rows, "_delta_log", f"{table.version() + 1:020d}.json")
    path.write_bytes(b"\n".join(map(orjson.dumps, commit)))


FEATURES: Final[dict[str, tuple[Callable[[str], Any], Use, str]]] = {
    "vectors": (_with("DeletionVectors"), Use.READ, "deletionVectors"),
    "mapping": (_with("ColumnMapping"), Use.READ, "columnMapping"),
    "checkpoints": (_with("V2Checkpoint"), Use.READ, "v2Checkpoint"),
    "newer": (_upgrade, Use.READ, "newer Delta reader"),
    "tracking": (_with("RowTracking"), Use.APPEND, "rowTracking"),
    "constraint": (
        lambda rows: DeltaTable(rows).alter.add_constraint({"positive": "superstep >= 0"}),
        Use.APPEND,
        "checkConstraints",
    ),
    "feed": (_set(enableChangeDataFeed="true"), Use.REWRITE, "changeDataFeed"),
    "append_only": (_set(appendOnly="true"), Use.REWRITE, "appendOnly"),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("log", ["whole", "checkpoint", "cleaned"])
def test_feature_is_named_and_switched_off_without_loss(payments: Payments, name: str, log: str) -> None:
    """Rows, savepoints and older versions stay as they were, whatever is left of the log."""
    act, use, feature = FEATURES[name]
    with payments.open() as store:
        store.savepoint("before")
    before, table = payments.version(), DeltaTable(payments.rows)
    form = table.protocol(), table.metadata().configuration, table.schema()
    act(payments.rows)
    version = payments.version() if name != "newer" else before + 1
    if log != "whole" and name != "newer":
        DeltaTable(payments.rows).create_checkpoint()
    if log == "cleaned" and name != "newer":
        for commit in sorted(Path(payments.rows, "_delta_log").glob("*.json"))[:-1]:
            commit.unlink()

    (finding,) = verify_store(open_objects(payments.rows)).findings
    assert f"feature=`{feature}" in finding.fault
    assert f"version=`{version}`" in finding.fault
    if log != "cleaned":
        assert "engine=`delta-rs" in finding.fault or "engine=`Apache-Spark" in finding.fault
    if use is not Use.REWRITE:
        with pytest.raises(InvalidError, match=rf"another engine.*`millpond repair`.*feature=`{feature}"):
            payments.pay(FIRST_DAY, FIRST_DAY + 1)
    paid = FIRST_DAY
    if use is Use.REWRITE:
        payments.pay(FIRST_DAY, paid := FIRST_DAY + 7)

    payments.repair()
    assert verify_store(open_objects(payments.rows)).findings == ()
    payments.pay(paid, BOTH_DAYS)
    with payments.open() as store:
        assert counted(store) == BOTH_DAYS
        assert [known.name for known in store.savepoints()] == ["before"]
    if log != "cleaned":
        assert load(Log(open_objects(payments.rows)), TableVersion(before)).version == before
    table = DeltaTable(payments.rows)
    assert (table.protocol(), table.metadata().configuration, table.schema()) == form
    assert verify_store(open_objects(payments.rows)).findings == ()


def test_feature_stops_a_running_writer_and_no_row_is_deleted_by_a_vector(payments: Payments) -> None:
    with payments.open() as store:
        pay(store, FIRST_DAY, FIRST_DAY + 40)
        _with("DeletionVectors")(payments.rows)
        with pytest.raises(InvalidError, match="feature=`deletionVectors"):
            pay(store, FIRST_DAY + 40, FIRST_DAY + 80)
    commit = Path(payments.rows, "_delta_log", f"{payments.version():020d}.json")
    (add,) = [
        file for file in load(Log(open_objects(payments.rows)), use=None).files if file.computation == "count"
    ][:1]
    vector = {
        "storageType": "u",
        "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^",
        "sizeInBytes": 40,
        "cardinality": 6,
    }
    line = {
        "path": add.path,
        "partitionValues": dict(add.partition_values),
        "size": add.size_bytes,
        "modificationTime": 0,
        "dataChange": False,
        "deletionVector": vector,
    }
    following = commit.with_name(f"{payments.version() + 1:020d}.json")
    following.write_bytes(orjson.dumps({"add": line}))

    with pytest.raises(DataError, match="another engine changed the store's rows"):
        payments.open(read_only=True)
    payments.repair()
    with payments.open() as store:
        assert counted(store) == FIRST_DAY + 40
