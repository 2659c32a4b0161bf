"""Rows that look like panes."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.columns import retractions, sink_table
from millpond.executor.windows.combiners import Count, ToList
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window import Window
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.rows.value_text import PlainObject
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

CLEANED = [{"value": "north", "window": 3, "at": at, "pane": "left"} for at in (1, 2, 30)]
"""Rows of someone who cleans windows."""

_PANE = Pane(index=0, nonspeculative_index=0, timing=Timing.ON_TIME, is_last=True, is_retraction=True)
COPIED = [
    {**WindowedValue(value="north", window=Window(0, 10), at=9, pane=_PANE).to_json(), "at": at}
    for at in (1, 2, 30)
]
"""Rows that are the panes of another pipeline, read back from its table."""


class _Keep(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


class _Pass(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.produce("passed", record.value)


def _shown(rows: Any, *, through: str = "", key: Any = "value") -> list[Any]:
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    pipeline = Pipeline("p")
    stream = pipeline.inject("rows", key="value", at="at")
    if through == "map":
        stream = stream.map(dict, name="mapped")
    elif through == "pass":
        stream = stream.apply(_Pass(), name="pass", produces="passed")
    elif through == "shift":
        stream = stream.with_timestamps(lambda value, at: value["at"], name="shifted")
    counted = stream.window(FixedWindows("10us")).combine(Count(), name="counts", key=key)
    counted.apply(_Keep(), name="kept")
    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"rows": rows})
    assert not len(store.rows_view("dead_letters").to_arrow())
    kept = {row["key"]: orjson.loads(row["state"]) for row in store.rows_view("kept").to_arrow().to_pylist()}
    return kept["north"]


@pytest.mark.parametrize("rows", [CLEANED, COPIED], ids=["cleaned", "copied"])
@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize("through", ["", "map", "pass", "shift"])
@pytest.mark.parametrize("key", ["value", lambda row: row["value"], None])
def test_rows_with_the_fields_of_a_pane_are_rows(rows, as_table, through, key):
    """Holds for dicts and columns, and behind any step."""
    assert _shown(pa.Table.from_pylist(rows) if as_table else rows, through=through, key=key) == [2, 1]


def test_pane_kept_in_state_and_produced_again_is_still_a_pane():
    """State returns a plain dict, which the next step must still unwrap."""

    class Delay(Computation):
        def process_record(self, context: Context, record: Record) -> None:
            context.state.set(record.value)
            context.produce("delayed", {**context.state.get(), "value": ["new"]})

    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    pipeline = Pipeline("p")
    stream = pipeline.inject("rows", key="value", at="at")
    lists = stream.window(FixedWindows("10us")).combine(ToList(), name="lists")
    delayed = lists.apply(Delay(), name="delay", produces="delayed")
    delayed.window(FixedWindows("10us")).combine(ToList(), name="again").apply(_Keep(), name="kept")
    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"rows": CLEANED})

    [row] = store.rows_view("kept").to_arrow().to_pylist()
    assert orjson.loads(row["state"]) == [[["new"]], [["new"]]]


def test_upsert_keeps_a_row_that_looks_like_a_retraction():
    texts = [" " + orjson.dumps(COPIED[0]).decode(), orjson.dumps(COPIED[0]).decode()]
    productions = pa.table(
        {
            "key": ["a", "a"],
            "at": pa.array([1, 1], pa.timestamp("us", "UTC")),
            "value": texts,
            "value_bytes": pa.nulls(2, pa.binary()),
        }
    )

    assert retractions(productions, "s") == [False, True]
    assert sink_table(productions, None, "s")["value"].to_pylist() == [texts[1], texts[1]]


def test_row_that_looks_like_a_pane_can_be_state():
    pipeline = Pipeline("p")
    pipeline.inject("rows", key="value", at="at").apply(_Whole(), name="whole")
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"rows": CLEANED[:1]})

    [row] = store.rows_view("whole").to_arrow().to_pylist()
    assert orjson.loads(row["state"]) == CLEANED[0]
    assert PlainObject(CLEANED[0]) == CLEANED[0]


class _Whole(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(record.value)
