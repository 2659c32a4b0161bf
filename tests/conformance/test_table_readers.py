"""Every version of a busy table reads alike in Millpond, delta-rs, DuckDB and delta-spark.

The table is committed to by Millpond (fences, supersteps, a compaction), by delta-rs (OPTIMIZE with an
application transaction, checkpoint) and by delta-spark (OPTIMIZE), in turns. DuckDB's own
Delta extension has to be downloaded, so DuckDB reads in two other ways: through the
Arrow data set of delta-rs, and straight from the Parquet files that a `Snapshot` names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import duckdb
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction

from millpond.statestore.errors import DataError
from millpond.statestore.history.fork import fork_table
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import read_row_files, write_row_file
from millpond.statestore.rows.row import PARTITION_COLUMN, ROW_SCHEMA, STATE_VERSION, Fence
from millpond.statestore.system import SystemClock
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep, TableVersion
from millpond.testing.fixtures.determinism import SeededRng
from tests.fixtures.commit_requests import fence_request
from tests.fixtures.row_updates import row_updates

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from millpond.statestore.log.files import LiveFile

pytestmark = pytest.mark.slow

Row: TypeAlias = dict[str, Any]
Reader: TypeAlias = Callable[[int], pa.Table]

COUNTER, ODD = "window counter", "a/b%ü:c"
INTERVALS = (Interval(COUNTER, "", "m"), Interval(COUNTER, "m"), Interval(ODD))
SCHEMA = pa.schema([pa.field(PARTITION_COLUMN, pa.string()), *ROW_SCHEMA])
RS_APP = "delta-rs tidy/ü"


def _updates(keys: str, number: int) -> list[Row]:
    return [
        {
            "key": f"{key}{number:02d}",
            "sequencer": 1,
            "commit_number": number,
            "superstep": number,
            "state": f'{{"count":{number}}}',
            "state_bytes": b"\x00\xff",
            "state_version": number if number % 2 else None,
            "timers": [{"tag": "t", "domain": "event", "at": number, "output_at": number}],
            "record_ids": [{"id": bytes([number]), "at": 5}],
            "productions": [{"stream": "s", "key": key, "value": "1", "value_bytes": None, "at": 7}],
            "hold": number,
        }
        for key in sorted(keys)
    ]


class BusyTable:
    """A table, and its expected contents at each version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = open_objects(str(folder))
        self.log = Log(self.objects)
        self.rng = SeededRng()
        create_rows_table(self.log, SystemClock(), self.rng, store_id="s" * 32)
        self.committer = Committer(self.log, SystemClock(), self.rng, MemoryHighWater())
        self.rows: list[Row] = []
        self.history: list[list[Row]] = [[]]
        self.number = 0

    def note(self, computation: str = "", added: pa.Table | None = None) -> None:
        """Record a new version and its added rows."""
        if added is not None:
            self.rows = [
                *self.rows,
                *({PARTITION_COLUMN: computation, **row} for row in added.to_pylist()),
            ]
        self.history.append(self.rows)

    def fence(self) -> None:
        """Take over all intervals."""
        self.committer.commit(fence_request(1, *INTERVALS))
        self.note()

    def superstep(self) -> None:
        """Two updates in each interval."""
        self.number += 1
        fence = Fence(Sequencer(1), CommitNumber(self.number))
        writes = []
        added = []
        for interval, keys in zip(INTERVALS, ("ab", "xy", "éz"), strict=True):
            table = row_updates(_updates(keys, self.number))
            file = write_row_file(
                self.objects,
                interval,
                table,
                superstep=Superstep(self.number),
                fence=fence,
                token=self.rng.token(),
            )
            added.append((interval.computation, table))
            writes.append(
                IntervalWrite(interval=interval, fence=fence, added=(file,), watermark=EventTimeMicros(9))
            )
        request = CommitRequest(
            kind="superstep",
            writes=tuple(writes),
            positions={"millpond/superstep/p": self.number, "millpond/input/p/clicks/local": self.number},
            metadata={"records": 6},
        )
        self.committer.commit(request)
        for computation, table in added:
            self.rows = [*self.rows, *({PARTITION_COLUMN: computation, **row} for row in table.to_pylist())]
        self.note()

    def compaction(self) -> None:
        """Rewrite the files of one interval as one."""
        self.number += 1
        interval = INTERVALS[0]
        fence = Fence(Sequencer(1), CommitNumber(self.number))
        old = [
            file
            for file in self.committer.refresh().files_of(interval)
            if file.interval_id == interval.app_id
        ]
        paths = tuple(file.path for file in old)
        table = read_row_files(self.objects, paths).sort_by("key").combine_chunks()
        file = write_row_file(
            self.objects,
            interval,
            table,
            superstep=Superstep(self.number),
            fence=fence,
            token=self.rng.token(),
        )
        write = IntervalWrite(interval=interval, fence=fence, added=(file,), removed=paths)
        others = tuple(IntervalWrite(interval=other, fence=fence) for other in INTERVALS[1:])
        self.committer.commit(CommitRequest(kind="compaction", writes=(write, *others)))
        self.note()

    def compact_with_delta_rs(self) -> None:
        """Run delta-rs's OPTIMIZE, and commit an application transaction alone."""
        table = DeltaTable(str(self.folder))
        table.optimize.compact()
        self.note()
        properties = CommitProperties(app_transactions=[Transaction(RS_APP, 3)])
        table.create_write_transaction([], "append", table.schema(), commit_properties=properties)
        self.note()


def _canonical(table: pa.Table) -> list[Row]:
    rows = table.select(SCHEMA.names).cast(SCHEMA).to_pylist()
    return sorted(rows, key=lambda row: (row[PARTITION_COLUMN], row["key"]))


def _by_millpond(busy: BusyTable) -> Reader:
    def read(version: int) -> pa.Table:
        snapshot = load(busy.log, TableVersion(version))
        tables = [SCHEMA.empty_table()]
        for computation in snapshot.computations:
            rows = read_row_files(busy.objects, [file.path for file in snapshot.files_in(computation)])
            tables.append(
                rows.add_column(0, SCHEMA.field(0), pa.array([computation] * rows.num_rows, pa.string()))
            )
        return pa.concat_tables(tables)

    return read


def _by_delta_rs(busy: BusyTable) -> Reader:
    return lambda version: DeltaTable(str(busy.folder), version=version).to_pyarrow_table()


def _by_duckdb_data_set(busy: BusyTable) -> Reader:
    def read(version: int) -> pa.Table:
        rows = DeltaTable(str(busy.folder), version=version).to_pyarrow_dataset()
        with duckdb.connect() as connection:
            connection.execute("set timezone = 'UTC'")
            connection.register("rows", rows)
            return connection.sql("select * from rows").to_arrow_table()

    return read


def _by_duckdb_files(busy: BusyTable) -> Reader:
    def one(connection: duckdb.DuckDBPyConnection, file: LiveFile) -> pa.Table:
        query = "select * from read_parquet(?, hive_partitioning=false)"
        table = connection.sql(query, params=[str(busy.folder / file.path)]).to_arrow_table()
        names = [name for name in table.column_names if name != PARTITION_COLUMN]
        of_file = pa.array([file.computation] * table.num_rows, pa.string())
        table = table.select(names).append_column(PARTITION_COLUMN, of_file)
        if STATE_VERSION not in table.column_names:
            # Delta reads absent columns as null, as in a file whose states all have version 0.
            table = table.append_column(STATE_VERSION, pa.nulls(table.num_rows, pa.int32()))
        return table.select(SCHEMA.names).cast(SCHEMA)

    def read(version: int) -> pa.Table:
        with duckdb.connect() as connection:
            connection.execute("set timezone = 'UTC'")
            files = load(busy.log, TableVersion(version)).files
            return pa.concat_tables([SCHEMA.empty_table(), *(one(connection, file) for file in files)])

    return read


def _check_all_versions(busy: BusyTable, readers: dict[str, Reader]) -> None:
    assert busy.committer.refresh().version == len(busy.history) - 1
    for version, rows in enumerate(busy.history):
        wanted = _canonical(pa.Table.from_pylist(rows, schema=SCHEMA))
        for name, read in readers.items():
            assert _canonical(read(version)) == wanted, f"{name} reads version {version} differently"


def _check_newest(busy: BusyTable) -> Snapshot:
    snapshot = busy.committer.refresh()
    table = DeltaTable(str(busy.folder))
    assert table.version() == snapshot.version
    assert len(table.file_uris()) == snapshot.file_count
    for app_id, version in snapshot.txns.items():
        assert table.transaction_version(app_id) == version
    return snapshot


def _ageless(snapshot: Snapshot) -> list[LiveFile]:
    # A checkpoint does not record the version of another engine's file.
    """The live files without the versions that added them."""
    files = [replace(file, added_version=TableVersion(0)) for file in snapshot.files]
    return sorted(files, key=lambda file: file.path)


def _readers(busy: BusyTable) -> dict[str, Reader]:
    return {
        "millpond": _by_millpond(busy),
        "delta-rs": _by_delta_rs(busy),
        "duckdb on delta-rs": _by_duckdb_data_set(busy),
        "duckdb on files": _by_duckdb_files(busy),
    }


def test_readers_without_spark_agree_at_every_version(tmp_path: Path) -> None:
    """OPTIMIZE and a checkpoint of delta-rs are among the versions."""
    busy = BusyTable(tmp_path)
    busy.fence()
    busy.superstep()
    busy.superstep()
    busy.compact_with_delta_rs()
    busy.superstep()
    DeltaTable(str(tmp_path)).create_checkpoint()
    busy.superstep()
    busy.compaction()
    busy.superstep()

    _check_all_versions(busy, _readers(busy))
    snapshot = _check_newest(busy)

    for version in range(5):
        (tmp_path / commit_path(version)).unlink()
    cold = load(busy.log)
    assert _ageless(cold) == _ageless(snapshot)
    assert (cold.txns, cold.digest) == (snapshot.txns, snapshot.digest)


def test_delta_rs_shows_the_history(tmp_path: Path) -> None:
    busy = BusyTable(tmp_path)
    busy.fence()
    busy.superstep()

    newest, fence, create = DeltaTable(str(tmp_path)).history()

    assert (newest["operation"], newest["operationParameters"]["superstep"]) == ("MILLPOND SUPERSTEP", "1")
    assert newest["operationMetrics"]["numOutputRows"] == "6"
    assert (fence["operation"], create["operation"]) == ("MILLPOND FENCE", "CREATE TABLE")


@pytest.mark.spark
def test_readers_with_spark_agree_at_every_version(spark: SparkSession, tmp_path: Path) -> None:
    """OPTIMIZE of delta-spark and delta-rs runs between Millpond's commits."""
    busy = BusyTable(tmp_path / "rows")
    path = str(busy.folder)

    def by_spark(version: int) -> pa.Table:
        return spark.read.format("delta").option("versionAsOf", version).load(path).toArrow()

    busy.fence()
    busy.superstep()
    busy.superstep()
    busy.compact_with_delta_rs()
    busy.superstep()
    spark.sql(f"OPTIMIZE delta.`{path}`")
    busy.note()
    busy.superstep()
    DeltaTable(path).create_checkpoint()
    busy.superstep()

    _check_all_versions(busy, {**_readers(busy), "delta-spark": by_spark})
    snapshot = _check_newest(busy)
    assert snapshot.txns[RS_APP] == 3
    operations = [row["operation"] for row in spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()]
    assert operations[-2:] == ["MILLPOND FENCE", "CREATE TABLE"]
    assert operations.count("MILLPOND SUPERSTEP") == 5


@pytest.mark.spark
def test_spark_reads_a_fork(spark: SparkSession, tmp_path: Path) -> None:
    """Its log begins with a checkpoint, and its parent has since lost the files."""
    busy, fork = BusyTable(tmp_path / "rows"), tmp_path / "fork"
    busy.fence()
    busy.superstep()
    busy.superstep()
    source, version = open_objects(str(busy.folder)), busy.committer.snapshot.version
    fork_table(source, open_objects(str(fork)), str(fork), version, SystemClock(), busy.rng)
    shutil.rmtree(busy.folder)

    def by_spark(version: int) -> pa.Table:
        return spark.read.format("delta").option("versionAsOf", version).load(str(fork)).toArrow()

    wanted = _canonical(pa.Table.from_pylist(busy.history[version], schema=SCHEMA))
    assert _canonical(by_spark(version + 1)) == wanted


@pytest.mark.spark
def test_restore_and_append_by_spark_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Earlier versions remain readable."""
    for name, act in (
        ("RESTORE", "RESTORE TABLE delta.`{}` TO VERSION AS OF 2"),
        ("DELETE", "DELETE FROM delta.`{}` WHERE key < 'b'"),
        ("WRITE", "INSERT INTO delta.`{0}` SELECT * FROM delta.`{0}` LIMIT 1"),
    ):
        busy = BusyTable(tmp_path / name / "rows")
        busy.fence()
        busy.superstep()
        busy.superstep()
        spark.sql(act.format(busy.folder))

        with pytest.raises(DataError, match=f"version=`4` operation=`{name}` engine=`Apache-Spark"):
            busy.committer.refresh()
        with pytest.raises(DataError, match=f"operation=`{name}`"):
            load(busy.log)
        assert load(busy.log, TableVersion(3)).version == 3
