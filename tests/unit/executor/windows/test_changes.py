"""Changes of a table through joins, maps, moved times and upserting sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.time.watermark_policies import ManualWatermark, MarkColumn
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.composite_triggers import Repeatedly
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.stream import co_group
from millpond.executor.windows.window_fns import FixedWindows, GlobalWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class _Newest(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        if not record.value["pane"]["is_retraction"]:
            context.state.set(record.value["value"])


def _row(name: str, city: str, paid: int, at: int = 1) -> dict[str, Any]:
    return {"id": name, "city": city, "paid": paid, "at": at}


def _change(before: Any, after: Any, ts_ms: int = 0) -> dict[str, Any]:
    word = "c" if before is None else "d" if after is None else "u"
    return {"op": word, "before": before, "after": after, "ts_ms": ts_ms}


MOVED = [
    _change(None, _row("a", "Oslo", 3)),
    _change(None, _row("b", "Oslo", 5)),
    _change(_row("a", "Oslo", 3), _row("a", "Bergen", 3)),
    _change(_row("b", "Oslo", 5), None),
    _change(None, _row("c", "Bergen", 7)),
    _change(_row("c", "Bergen", 7), _row("c", "Bergen", 8)),
]


def _run(pipeline: Pipeline, **inputs: list[Any]) -> Store:
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    for stream, rows in inputs.items():
        for row in rows:
            run.inject(stream, [row])
            run.run_until_quiet()
    run.stop()
    return store


def _states(store: Store, name: str) -> dict[str, Any]:
    return {row["key"]: orjson.loads(row["state"]) for row in store.rows_view(name).to_arrow().to_pylist()}


def _changes(pipeline: Pipeline, **options: Any) -> Any:
    given = {"key": "city", "at": "at", "watermark": ManualWatermark(), **options}
    return pipeline.inject("orders", change="op", **given)


def test_join_of_table_changes_moves_and_removes_rows() -> None:
    """A row that changes its key leaves one group and enters the other."""
    pipeline = Pipeline("p")
    orders = _changes(pipeline)
    cities = pipeline.inject("cities", key="city", at="at", watermark=ManualWatermark())
    strategy = WindowingStrategy(
        window_fn=GlobalWindows(), trigger=Repeatedly(AfterCount(1)), accumulation="accumulating"
    )
    joined = co_group({"orders": orders, "cities": cities}, strategy, name="joined", of={"orders": "id"})
    joined.apply(_Newest(), name="newest")
    cities_given = [{"city": "Oslo", "at": 1}, {"city": "Bergen", "at": 1}]

    newest = _states(_run(pipeline, cities=cities_given, orders=MOVED), "newest")

    assert newest["Oslo"]["orders"] == []
    assert newest["Bergen"]["orders"] == ["a", "c"]


@pytest.mark.parametrize("together", [True, False])
def test_upserting_sink_of_changes_is_a_copy_of_the_table(tmp_path: Path, together: bool) -> None:
    """Holds even when a row's pipeline key changes, in one bundle or several."""
    schema = pa.schema([("id", pa.string()), ("city", pa.string()), ("paid", pa.int64())])
    pipeline = Pipeline("p")
    rows = _changes(pipeline).map(lambda row: row, name="rows")
    rows.sink("copy", DeltaSink(str(tmp_path / "copy"), schema, mode="upsert", keys=["id"]))
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    for piece in [MOVED] if together else [[change] for change in MOVED]:
        run.inject("orders", piece)
        run.run_until_quiet()
    run.stop()

    copied = DeltaTable(tmp_path / "copy").to_pyarrow_table().to_pylist()
    assert sorted(copied, key=lambda row: row["id"]) == [
        {"id": "a", "city": "Bergen", "paid": 3},
        {"id": "c", "city": "Bergen", "paid": 8},
    ]


def test_moved_times_move_retractions_too() -> None:
    """A retraction must reach the window of the element it retracts."""
    pipeline = Pipeline("p")
    paid = _changes(pipeline).with_timestamps(lambda row, at: at + row["paid"], name="paid")
    counts = paid.window(FixedWindows("5us"), trigger=Repeatedly(AfterCount(1)), accumulation="accumulating")
    counts.combine(Count(), name="counts", key=lambda row: row["id"]).apply(_Newest(), name="newest")

    assert _states(_run(pipeline, orders=MOVED), "newest") == {"a": 1, "b": 0, "c": 1}


def test_change_fields_are_visible_to_keys_and_watermarks_only() -> None:
    """The fields `__change_*` are not part of the record's value."""

    class Keep(Computation):
        def process_record(self, context: Context, record: Record) -> None:
            context.state.set([record.value["value"], context.watermark])

    pipeline = Pipeline("p")
    orders = _changes(
        pipeline, key=lambda row: f"{row['id']}/{row['__change_op']}", watermark=MarkColumn("__change_ts_ms")
    )
    orders.apply(Keep(), name="kept")
    row = _row("a", "Oslo", 3, at=90)
    kept = _states(_run(pipeline, orders=[_change(None, row, 70), _change(row, None, 80)]), "kept")

    assert kept["a/d"] == [row, 70]


def test_rows_that_are_not_changes_become_dead_letters() -> None:
    """A row is refused without the field, with an unknown operation, or if it is not a mapping."""
    pipeline = Pipeline("p")
    counts = _changes(pipeline).window(GlobalWindows(), trigger=Repeatedly(AfterCount(1)), asked="bundle")
    counts.combine(Count(), name="counts").apply(_Newest(), name="newest")
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, dead_letter_limit=None)
    run = runner.start(pipeline, stepping=True)
    run.inject("orders", [*MOVED[:2], _row("d", "Oslo", 1), {**_row("e", "Oslo", 1), "op": 7}, 3])
    run.run_until_quiet()

    assert run.summary().totals.dead_letters == 3
    run.stop()
    assert _states(store, "newest") == {"Oslo": 2}


@pytest.mark.parametrize("change", ["", 3, len])
def test_change_must_name_a_column(change: Any) -> None:
    with pytest.raises(InvalidError, match="change"):
        Pipeline("p").inject("s", key="k", at="at", change=change)
