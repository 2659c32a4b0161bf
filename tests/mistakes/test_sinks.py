"""Mistakes with sinks: columns, keys, and the owner of the table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

import millpond as mp
from millpond.executor.sinks.delta_table import begin_anew
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.objects.obstore import open_objects
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, Does, counting, run

COLUMNS = pa.schema([("key", pa.string()), ("count", pa.int64())])


def into(table: Path, value: Any = None, **options: Any) -> mp.Pipeline:
    """A pipeline whose computation ``counter`` writes to the sink ``counts``."""
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")
    produced = {"count": 1} if value is None else value
    counts = queries.apply(Does(lambda context, _: context.produce("counter", produced)), name="counter")
    counts.sink("counts", mp.DeltaSink(str(table), **options))
    return pipeline


@pytest.mark.mistake("sink-of-other-columns")
def test_table_with_other_columns(told: Told, tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "counts"), pa.table({"key": ["a"], "count": ["one"]}))

    with told.by_error("counts", tmp_path / "counts", "column=`count`", "long", "string"):
        run(into(tmp_path / "counts", schema=COLUMNS), ROWS)


@pytest.mark.mistake("sink-value-misfit")
def test_value_of_another_type_than_its_column(
    told: Told, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with told.by_error("counts", "column=`count`", "int64", "cat", "many"):
        run(into(tmp_path / "counts", {"count": "many"}, schema=COLUMNS), ROWS)
    assert "failed too" not in caplog.text


@pytest.mark.mistake("sink-value-without-fields")
def test_value_without_fields_for_columns(told: Told, tmp_path: Path) -> None:
    with told.by_error("counts", "count", "cat", "value=`7`"):
        run(into(tmp_path / "counts", 7, schema=COLUMNS), ROWS)


@pytest.mark.mistake("sink-column-never-there")
def test_column_without_a_value(told: Told, tmp_path: Path) -> None:
    """It stays null, with a warning, since a later value may have it."""
    with told.by_warning("counts", "count", "cnt"):
        run(into(tmp_path / "counts", {"cnt": 1}, schema=COLUMNS), ROWS)


@pytest.mark.mistake("sink-partitioned")
def test_partitioned_table(told: Told, tmp_path: Path) -> None:
    """A sink writes whole files."""
    write_deltalake(str(tmp_path / "counts"), pa.table({"key": ["a"], "count": [1]}), partition_by="key")

    with told.by_error("counts", tmp_path / "counts", "['key']"):
        run(into(tmp_path / "counts", schema=COLUMNS), ROWS)


@pytest.mark.mistake("sink-with-feature")
def test_table_with_a_constraint(told: Told, tmp_path: Path) -> None:
    table = DeltaTable.create(str(tmp_path / "counts"), COLUMNS)
    table.alter.add_constraint({"positive": "count > 0"})

    with told.by_error("counts", tmp_path / "counts", "checkConstraints", "delta.constraints.positive"):
        run(into(tmp_path / "counts", schema=COLUMNS), ROWS)


@pytest.mark.mistake("two-sinks-one-table")
def test_two_sinks_with_one_path(told: Told, tmp_path: Path) -> None:
    """A sink could not recognise its own rows."""
    pipeline = into(tmp_path / "counts")
    pipeline.stream("counter").sink("totals", mp.DeltaSink(str(tmp_path / "counts")))

    with told.by_error("counts", "totals", tmp_path / "counts"):
        pipeline.check()


@pytest.mark.mistake("sink-of-another-store")
def test_table_of_another_store(told: Told, tmp_path: Path) -> None:
    """A store that was removed and created again delivers everything twice."""
    with told.by_warning("counts", tmp_path / "counts"):
        run(into(tmp_path / "counts"), ROWS)
        run(into(tmp_path / "counts"), ROWS)


@pytest.mark.mistake("sink-table-gone")
@pytest.mark.parametrize("what", ["removed", "moved", "emptied", "replaced", "older"])
def test_table_that_lost_its_rows(told: Told, tmp_path: Path, what: str) -> None:
    table, other, older = tmp_path / "counts", tmp_path / "other", tmp_path / "older"
    store = mp.Store.in_memory()

    def night(number: int) -> None:
        run(into(table), ROWS * number, store, finish=False)

    night(1)
    shutil.copytree(table, older)
    night(2)
    night(3)
    if what == "emptied":
        shutil.rmtree(table / "_delta_log")
    else:
        table.rename(other)
    if what == "replaced":
        mp.DeltaSink(str(table)).open("others", "p", "s")
    elif what == "older":
        older.rename(table)

    for _ in range(2):
        with told.by_error("counts", table, "delivered=`1`" if what == "older" else "delivered=`0`"):
            night(4)
    assert table.exists() is (what not in ("removed", "moved"))
    if what == "moved":
        other.rename(table)
    else:
        # What `millpond take-over` does.
        positions = begin_anew(
            open_objects(str(table)), store.lineage, {str(table)}, store.committer.snapshot.txns
        )
        store.committer.commit(CommitRequest(kind="adoption", positions=positions))
    night(4)
    assert mp.read_table(table).num_rows == len(ROWS) * {"moved": 4, "older": 2}.get(what, 1)
    night(5)
    night(6)
    shutil.rmtree(table)
    with told.by_error("counts", table):
        night(7)


@pytest.mark.mistake("sink-elsewhere")
def test_sink_with_another_path_than_before(told: Told, tmp_path: Path) -> None:
    """It may be a relative path, and a program that was started in another folder."""
    with mp.Store.in_memory() as store:
        run(into(tmp_path / "counts"), ROWS, store, finish=False)

        with told.by_warning("counts", tmp_path / "others"):
            run(into(tmp_path / "others"), ROWS * 2, store, finish=False)


@pytest.mark.mistake("sink-of-an-input")
def test_sink_for_an_injected_stream(told: Told, tmp_path: Path) -> None:
    """A sink consumes productions."""
    pipeline = into(tmp_path / "counts")
    pipeline.stream("queries").sink("raw", mp.DeltaSink(str(tmp_path / "raw")))

    with told.by_error("raw", "queries"):
        pipeline.check()


@pytest.mark.mistake("upsert-of-unknown-keys")
def test_upsert_by_an_unknown_column(told: Told, tmp_path: Path) -> None:
    with told.by_error(tmp_path / "counts", "keys", "'key'"):
        mp.DeltaSink(str(tmp_path / "counts"), COLUMNS, mode="upsert", keys=["keys"])


@pytest.mark.mistake("upsert-of-undeclared-panes")
def test_upsert_and_another_reader_without_accumulation(told: Told) -> None:
    made = mp.Pipeline("searches")
    queries = made.inject("queries", key="query", at="at")
    hourly = queries.window(mp.FixedWindows("1h"), allowed_lateness="1d").combine(mp.Count(), name="hourly")
    hourly.sink("table", mp.DeltaSink("counts", mode="upsert"))
    hourly.window(mp.FixedWindows("1d")).combine(mp.Sum(), name="daily")

    with told.by_error("hourly", "table", "daily"):
        made.check()


@pytest.mark.mistake("sink-column-of-the-window")
@pytest.mark.parametrize(
    "name", ["key", "at", "window_start", "window_end", "window", "pane", "is_retraction"]
)
@pytest.mark.parametrize("behind", ["", "union", "with_timestamps"])
def test_combined_field_under_the_name_of_a_column_of_the_window(told: Told, name: str, behind: str) -> None:
    made = mp.Pipeline("searches")
    queries = made.inject("queries", key="query", at="at")
    hourly = queries.window(mp.FixedWindows("1h")).combine(
        {"n": mp.Count(), name: mp.Max("at")}, name="hourly"
    )
    others = queries.window(mp.FixedWindows("1d")).combine(mp.Count(), name="daily")
    if behind == "union":
        hourly = others.union(hourly, name="both")
    elif behind:
        hourly = hourly.with_timestamps(lambda _, at: at, name="shifted")
    columns = pa.schema([("n", pa.int64()), (name, pa.string())])
    hourly.sink("table", mp.DeltaSink("counts", columns))

    with told.by_error("hourly", "table", name):
        made.check()


def test_such_a_field_is_taken_where_no_column_hides_it() -> None:
    made = mp.Pipeline("searches")
    windowed = made.inject("queries", key="query", at="at").window(
        mp.FixedWindows("1h"), accumulation="accumulating"
    )
    last = windowed.combine(at=mp.Max("at"), value=mp.Count(), name="last")
    last.sink("values", mp.DeltaSink("values", pa.schema([("key", pa.string()), ("value", pa.int64())])))
    last.map(lambda value: {"last": value["at"]}, name="named").sink(
        "named", mp.DeltaSink("named", pa.schema([("at", pa.timestamp("us", "UTC")), ("last", pa.int64())]))
    )
    last.sink("whole", mp.DeltaSink("whole", mode="upsert"))
    windowed.combine(
        at=mp.Max("at"), name="own", result=lambda key, value, window: {"window_start": window.start}
    ).sink("own", mp.DeltaSink("own", pa.schema([("window_start", pa.int64())])))

    assert made.check()


@pytest.mark.mistake("keys-without-upsert")
def test_keys_of_an_append_only_table(told: Told, tmp_path: Path) -> None:
    with told.by_error(tmp_path / "counts", "key"):
        mp.DeltaSink(str(tmp_path / "counts"), COLUMNS, keys=["key"])


@pytest.mark.mistake("sink-no-sink")
def test_path_in_place_of_a_sink(told: Told) -> None:
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")

    with told.by_error("counts", "str"):
        queries.apply(Does(), name="counter").sink("counts", "out/counts")  # type: ignore[arg-type]


@pytest.mark.mistake("two-sinks-one-folder")
@pytest.mark.parametrize("other", ["sub/../out", "link", "./out/"])
def test_two_sinks_by_other_paths_of_a_folder(told: Told, tmp_path: Path, other: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    pipeline = counting()
    for name, path in (("first", "out"), ("second", other)):
        pipeline.add_sink(name, "counter", mp.DeltaSink(f"{tmp_path}/{path}"))

    with told.by_error("first", "second", str(tmp_path)):
        pipeline.check()


@pytest.mark.mistake("sink-around-another")
def test_folder_of_a_sink_within_the_folder_of_another(told: Told, tmp_path: Path) -> None:
    pipeline = counting()
    for name, path in (("late", "out/late"), ("counts", "out"), ("outer", "out_2")):
        pipeline.add_sink(name, "counter", mp.DeltaSink(f"{tmp_path}/{path}"))

    with told.by_error("counts", "sink late", tmp_path / "out", tmp_path / "out/late"):
        pipeline.check()


@pytest.mark.mistake("sink-around-the-store")
@pytest.mark.parametrize("path", ["pond", "."])
def test_folder_of_a_sink_with_the_store_in_it(told: Told, tmp_path: Path, path: str) -> None:
    with told.by_error("counts", "store", "pond/rows"):
        run(into(tmp_path / path), ROWS, tmp_path / "pond")


@pytest.mark.mistake("upsert-becomes-append")
def test_table_of_an_upsert_is_appended_to(told: Told, tmp_path: Path) -> None:
    """Panes would stand next to the rows that they replace."""
    _change_mode(told, tmp_path, "upsert", "append")


@pytest.mark.mistake("append-becomes-upsert")
def test_table_with_appended_panes_is_updated(told: Told, tmp_path: Path) -> None:
    """An upsert would replace what it finds of a key, and leave its other panes."""
    _change_mode(told, tmp_path, "append", "upsert")


def _change_mode(told: Told, tmp_path: Path, before: str, now: str) -> None:
    table = str(tmp_path / "counts")
    columns = pa.schema(
        [("key", pa.string()), ("window_start", pa.timestamp("us", "UTC")), ("value", pa.int64())]
    )

    def pipeline(mode: Any) -> mp.Pipeline:
        made = mp.Pipeline("searches")
        panes = made.inject("queries", key="query", at="at").window(
            mp.FixedWindows("1s"), accumulation="accumulating"
        )
        panes.combine(mp.Count(), name="counter").sink("table", mp.DeltaSink(table, columns, mode=mode))
        return made

    with mp.Store.in_memory() as store:
        runner = mp.LocalRunner(store, progress=False)
        runner.run(pipeline(before), {"queries": ROWS}, finish=False)
        with told.by_error("table", table):
            runner.run(pipeline(now), {"queries": ROWS}, finish=False)
