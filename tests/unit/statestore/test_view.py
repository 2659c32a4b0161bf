from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.interval import Interval
from millpond.statestore.log.checkpoint import checkpoint_path, write_part
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import PARQUET, write_row_file
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.row import ROW_SCHEMA as ROWS
from millpond.statestore.rows.row import Fence, conform
from millpond.statestore.rows.row_format import IpcRowFormat, RowFormat
from millpond.statestore.types import CommitNumber, Objects, Sequencer, Superstep, TableVersion
from millpond.statestore.view import ROWS_VIEW_SCHEMA, WHOLE_ROW_SCHEMA, RowsView, connect
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNTER = Interval("window counter")
MODEL = Interval("model")
AT = 1_360_281_600_000_000


def rows_view(log: Log, computation: str, version: TableVersion | None = None) -> RowsView:
    return RowsView.of(load(log, version), log.objects, computation)


class Table:
    def __init__(self, objects: Objects, row_format: RowFormat = PARQUET) -> None:
        self.objects = objects
        self.row_format = row_format
        self.rng = SeededRng()
        self.log = Log(objects)
        create_rows_table(self.log, ManualClock(), self.rng)
        self.committer = Committer(self.log, ManualClock(), self.rng, MemoryHighWater())
        writes = tuple(IntervalWrite(interval=interval, fence=fence(0)) for interval in (COUNTER, MODEL))
        self.committer.commit(CommitRequest(kind="fence", writes=writes))
        self.supersteps = 0

    def step(self, interval: Interval, updates: Sequence[dict[str, Any]]) -> TableVersion:
        stored = self.committer.snapshot.fence_of(interval)
        assert stored is not None
        number = stored.commit_number + 1
        self.supersteps += 1
        stamp = {"sequencer": 1, "commit_number": number, "superstep": self.supersteps}
        file = write_row_file(
            self.objects,
            interval,
            pa.Table.from_pylist([{"deleted": False, **stamp, **update} for update in updates], schema=ROWS),
            superstep=Superstep(self.supersteps),
            fence=fence(number),
            token=self.rng.token(),
            row_format=self.row_format,
        )
        write = IntervalWrite(interval=interval, fence=fence(number), added=(file,))
        return self.committer.commit(CommitRequest(kind="superstep", writes=(write,))).version

    def view(self, interval: Interval = COUNTER) -> RowsView:
        return RowsView.of(self.committer.snapshot, self.objects, interval.computation)


def fence(number: int) -> Fence:
    return Fence(Sequencer(1), CommitNumber(number))


def busy(table: Table) -> list[TableVersion]:
    timers = [{"tag": "end", "domain": "event", "at": AT, "output_at": AT}]
    first = table.step(
        COUNTER,
        [
            {"key": "EWR", "state": '{"count":1}', "timers": timers, "hold": AT},
            {"key": "JFK", "state": '{"count":10}'},
            {"key": "LGA", "state": '{"count":100}'},
        ],
    )
    table.step(MODEL, [{"key": "EWR 17", "state": '{"normal":0.5}'}])
    second = table.step(COUNTER, [{"key": "EWR", "state": '{"count":2}'}, {"key": "JFK", "deleted": True}])
    third = table.step(COUNTER, [{"key": "EWR", "timers": []}, {"key": "SFO", "state_bytes": b"\x00"}])
    return [first, second, third]


def states(rows: pa.Table) -> dict[str, str | None]:
    return dict(zip(rows.column("key").to_pylist(), rows.column("state").to_pylist(), strict=True))


FINAL = {"EWR": '{"count":2}', "LGA": '{"count":100}', "SFO": None}


class TestArrow:
    @pytest.mark.parametrize("row_format", [PARQUET, IpcRowFormat()])
    def test_view_has_one_row_per_key(self, row_format: RowFormat) -> None:
        table = Table(MemoryObjects(), row_format)
        busy(table)
        rows = table.view().to_arrow()

        assert rows.schema == ROWS_VIEW_SCHEMA
        assert states(rows) == FINAL
        assert rows.column("key").to_pylist() == ["EWR", "LGA", "SFO"]
        assert rows.column("timers").to_pylist() == [[], [], []]

    def test_older_versions_keep_their_rows(self) -> None:
        table = Table(MemoryObjects())
        first, second, third = busy(table)
        by_version = [
            states(rows_view(table.log, "window counter", v).to_arrow()) for v in (first, second, third)
        ]

        assert by_version[0] == {"EWR": '{"count":1}', "JFK": '{"count":10}', "LGA": '{"count":100}'}
        assert by_version[1] == {"EWR": '{"count":2}', "LGA": '{"count":100}'}
        assert by_version[2] == FINAL
        with pytest.raises(ObjectMissingError):
            rows_view(table.log, "window counter", TableVersion(third + 1))

    def test_later_commits_do_not_change_view(self) -> None:
        table = Table(MemoryObjects())
        busy(table)
        view = table.view()
        table.step(COUNTER, [{"key": "EWR", "state": "3"}])

        assert states(view.to_arrow()) == FINAL
        assert view.version == table.committer.snapshot.version - 1

    def test_view_of_keys_reads_only_needed_files(self) -> None:
        table = Table(MemoryObjects())
        busy(table)
        first_file = table.view().files[0]
        table.objects.delete([first_file.path])

        assert states(table.view().to_arrow(["SFO", "ZZZ", "AAA"])) == {"SFO": None}
        with pytest.raises(DataError, match=first_file.path):
            table.view().to_arrow(["EWR"])

    def test_unknown_computation_has_empty_view(self) -> None:
        rows = rows_view(Table(MemoryObjects()).log, "unknown").to_arrow()

        assert rows == ROWS_VIEW_SCHEMA.empty_table()


class TestDuckDB:
    def test_sql_reads_all_computations(self) -> None:
        """JSON states open with ``->>``, and times are UTC."""
        table = Table(MemoryObjects())
        first, *_ = busy(table)
        with connect(table.committer.snapshot, table.objects) as connection:
            counts = connection.execute(
                """select key, (state ->> 'count')::int from "window counter" where state is not null order by 1"""
            ).fetchall()
            both = connection.execute(
                """
                select c.key, m.state ->> '$.normal'
                from "window counter" c join model m on starts_with(m.key, c.key)
                """
            ).fetchall()
            names = connection.execute("show tables").fetchall()

        assert counts == [("EWR", 2), ("LGA", 100)]
        assert both == [("EWR", "0.5")]
        assert names == [("model",), ("window counter",)]
        with duckdb.connect() as connection:
            rows_view(table.log, "window counter", first).to_duckdb(connection).create_view("c")
            (row,) = connection.execute(
                "select epoch_us(hold), timers[1].tag from c where key = 'EWR'"
            ).fetchall()
        assert row == (AT, "end")

    @pytest.mark.parametrize(
        "query",
        [
            "from read_csv('{secret}')",
            "from read_text('{secret}')",
            "from read_blob('{secret}')",
            "from '{secret}'",
            "from glob('{folder}/*')",
            "from sniff_csv('{secret}')",
            "from json_execute_serialized_sql(json_serialize_sql('from read_text(''{secret}'')'))",
            "copy (select 1) to '{folder}/copied.csv'",
            "export database '{folder}/exported'",
            "attach '{folder}/attached.db'",
            "call enable_logging(storage = 'file', storage_path = '{folder}/log')",
            "create persistent secret mine (type s3)",
            "install httpfs",
            "load httpfs",
            "from variable_of_python",
            "select getenv('HOME')",
            "set enable_external_access = true",
            "set temp_directory = '{folder}'",
            "reset TimeZone",
            "pragma enable_profiling",
        ],
    )
    def test_query_reaches_only_views(self, tmp_path: Path, query: str) -> None:
        variable_of_python = pa.table({"secret": [1]})
        table = Table(MemoryObjects())
        busy(table)
        secret = tmp_path / "secret.csv"
        secret.write_text("a,b\n1,2\n")
        with connect(table.committer.snapshot, table.objects) as connection:
            with pytest.raises(duckdb.Error):
                connection.execute(query.format(secret=secret, folder=tmp_path)).fetchall()

            views = connection.execute("from model").fetchall()
            extras = connection.execute("select * from record_ids.model, productions.model").fetchall()
        assert (len(views), extras) == (1, [])
        assert [path.name for path in tmp_path.iterdir()] == [secret.name]
        del variable_of_python

    def test_files_are_joined_where_allowed(self, tmp_path: Path) -> None:
        variable_of_python = pa.table({"key": ["EWR 17"]})
        table = Table(MemoryObjects())
        busy(table)
        (tmp_path / "keys.csv").write_text("key\nEWR 17\n")
        query = f"select key from model join read_csv('{tmp_path}/keys.csv') using (key) join variable_of_python using (key)"
        with connect(table.committer.snapshot, table.objects, allow_files=True) as connection:
            assert connection.execute(query).fetchall() == [("EWR 17",)]
        del variable_of_python

    def test_equal_to_arrow(self) -> None:
        table = Table(MemoryObjects())
        busy(table)
        arrow = table.view().to_duckdb().to_arrow_table()

        assert table.view().to_arrow(whole=True).equals(arrow.cast(WHOLE_ROW_SCHEMA))

    def test_computation_name_may_need_quoting(self) -> None:
        objects = MemoryObjects()
        table = Table(objects)
        busy(table)
        with duckdb.connect() as connection:
            assert len(table.view().to_duckdb(connection, 'a "quoted" name').fetchall()) == 3

    def test_damaged_file_is_named_by_sql(self) -> None:
        table = Table(MemoryObjects())
        busy(table)
        path = table.view().files[0].path
        table.objects.put(path, table.objects.get(path)[:-1])
        with connect(table.committer.snapshot, table.objects) as connection:
            assert len(connection.execute("from model").fetchall()) == 1
            with pytest.raises(duckdb.Error, match=path):
                connection.execute('from "window counter"').fetchall()


class TestDeltaRs:
    def test_delta_rs_reads_same_updates(self, tmp_path: Path) -> None:
        table = Table(open_objects(str(tmp_path)))
        busy(table)
        delta = deltalake.DeltaTable(str(tmp_path))
        query = "select * from updates where computation = 'window counter'"
        arrow = pa.table(deltalake.QueryBuilder().register("updates", delta).execute(query).read_all())
        updates = conform(arrow, ROWS.names)

        assert merge_updates(updates).select(ROWS_VIEW_SCHEMA.names).equals(table.view().to_arrow())


class TestSpark:
    def test_store_in_memory_is_refused(self) -> None:
        session: Any = None
        with pytest.raises(InvalidError, match="memory"):
            Table(MemoryObjects()).view().to_spark(session)

    def test_equal_to_arrow(self, spark_as_reader: SparkSession, tmp_path: Path) -> None:
        objects = open_objects(str(tmp_path))
        table = Table(objects)
        versions = busy(table)
        spark_as_reader.sql(f"optimize delta.`{tmp_path}`").collect()
        versions.append(rows_view(table.log, "model").version)

        views = [rows_view(table.log, "window counter", version) for version in (versions[0], versions[-1])]
        for view in views:
            assert in_utc(view.to_spark(spark_as_reader).orderBy("key").toArrow()).equals(view.to_arrow())
        assert all("/part-" in file.path for file in views[-1].files)

    @pytest.mark.parametrize("is_link", [True, False])
    def test_file_outside_store_is_not_read(
        self, spark_as_reader: SparkSession, tmp_path: Path, is_link: bool
    ) -> None:
        """A checkpoint may hold paths that this package did not need."""
        root, outside = tmp_path / "rows", tmp_path / "outside.parquet"
        table = Table(open_objects(str(root)))
        busy(table)
        view = table.view()
        own = root / view.files[0].path
        own.rename(outside)
        if is_link:
            own.symlink_to(outside)
        else:
            outside_uri(root, view.files[0].path, outside)

        with pytest.raises(DataError, match="must not be links" if is_link else "outside of the table"):
            view.to_spark(spark_as_reader)


def outside_uri(root: Path, path: str, outside: Path) -> None:
    log = Log(open_objects(str(root)))
    version = log.latest_version()
    assert version is not None
    replayed = replay_log(log, version)
    part = write_part(replayed.actions(on_disk=()), checkpoint_path(version))
    rows = pq.read_table(pa.BufferReader(part)).to_pylist()
    for row in rows:
        if row["add"] and unquote(row["add"]["path"]) == path:
            row["add"]["path"] = outside.as_uri()
    schema = pq.read_schema(pa.BufferReader(part))
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), root / checkpoint_path(version))
    log.name_checkpoint(version, len(rows))


def in_utc(table: pa.Table) -> pa.Table:
    """Return Spark's table with the view's types; instants ignore the session's time zone."""
    return table.cast(ROWS_VIEW_SCHEMA)
