"""Functions of groups with state, in Arrow and in pandas."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import orjson
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import millpond as mp
from millpond.executor.spark_compat.group_state import ApplyInArrowWithState, ApplyInPandasWithState
from millpond.executor.spark_compat.schema import parse_schema
from millpond.executor.spark_compat.transform_with_state import YieldedRows
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.fixtures.own_writer import OwnWriter

_OUTPUT = "k string, n long, first timestamp, has_timed_out boolean, parts map<string,int>"
_AT = dt.datetime(2026, 11, 23, 17, 36, 50, tzinfo=dt.UTC)


def _totals(count: int, total: int, state: GroupState) -> tuple[Any, ...]:
    """Add up, and time out ten seconds after the last row."""
    if state.hasTimedOut:
        before = state.get
        state.remove()
        return before
    known = state.getOption or (0, 0)
    state.update((known[0] + count, known[1] + total))
    state.setTimeoutDuration(10_000)
    return state.get


def in_arrow(
    key: tuple[Any, ...], batches: Iterator[pa.RecordBatch], state: GroupState
) -> Iterator[pa.Table]:
    table = pa.Table.from_batches(list(batches), None if not state.hasTimedOut else pa.schema([]))
    rows = [] if state.hasTimedOut else table.column("n").to_pylist()
    count, total = _totals(len(rows), sum(rows), state)
    first = None if state.hasTimedOut else table.column("t").to_pylist()[0]
    row = {
        "n": total,
        "k": key[0],
        "first": first,
        "has_timed_out": state.hasTimedOut,
        "parts": {"rows": count},
    }
    fields = {**row, "parts": pa.array([list(row["parts"].items())], pa.map_(pa.string(), pa.int64()))}
    yield pa.table({name: cell if isinstance(cell, pa.Array) else [cell] for name, cell in fields.items()})


def in_pandas(
    key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    frame = pd.concat(list(frames)) if not state.hasTimedOut else pd.DataFrame({"n": [], "t": []})
    count, total = _totals(len(frame), int(frame["n"].sum()), state)
    first = None if state.hasTimedOut else frame["t"].iloc[0].to_pydatetime().replace(tzinfo=dt.UTC)
    yield pd.DataFrame(
        {
            "k": [key[0]],
            "n": total,
            "first": first,
            "has_timed_out": state.hasTimedOut,
            "parts": [{"rows": count}],
        }
    )


class Kept(OwnWriter):
    """A sink that keeps its values."""

    def __init__(self) -> None:
        super().__init__("kept")
        self.values: list[Any] = []

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        if superstep > self.delivered:
            self.delivered = superstep
            self.values += map(orjson.loads, productions.column("value").to_pylist())


def _answers(computation: mp.Computation, *, in_columns: bool) -> list[Any]:
    clock = ManualClock()
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key=["k"], at=mp.IngressTime())
    out = stream.apply(computation, name="totals", on_error="stop")
    kept = Kept()
    out.sink("kept", kept)
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = mp.LocalRunner(
        store, clock=clock, rng=SeededRng("r"), progress=False, dead_letter_limit=None
    ).start(pipeline, stepping=True)
    for batch in ([("a", 1), ("b", 2), ("a", 3)], [("b", 4)], []):
        rows = [{"k": key, "n": number, "t": _AT} for key, number in batch]
        if rows:
            run.inject("in", pa.Table.from_pylist(rows) if in_columns else rows)
        run.run_until_quiet()
        clock.advance_ms(6_000)
    clock.advance_ms(6_000)
    run.run_until_quiet()
    run.stop()
    return sorted(kept.values, key=str)


@pytest.mark.parametrize("in_columns", [True, False])
def test_arrow_and_pandas_functions_give_the_same(*, in_columns: bool) -> None:
    """The runner may have the rows in columns or as dicts."""
    timeout = GroupStateTimeout.ProcessingTimeTimeout
    arguments = (_OUTPUT, "count long, total long", timeout)

    ours = _answers(ApplyInArrowWithState(in_arrow, *arguments), in_columns=in_columns)
    theirs = _answers(ApplyInPandasWithState(in_pandas, *arguments), in_columns=in_columns)

    assert len(ours) == 5
    assert ours == theirs
    assert ours[0] == {
        "k": "a",
        "n": 4,
        "first": "2026-11-23T17:36:50+00:00",
        "has_timed_out": False,
        "parts": [["rows", 2]],
    }
    assert [row["k"] for row in ours if row["has_timed_out"]] == ["a", "b"]


def test_frame_from_an_arrow_function_is_refused() -> None:
    def wrong(_key: Any, _batches: Any, _state: Any) -> Any:
        yield pd.DataFrame({"k": ["a"]})

    with pytest.raises(InvalidError, match="something else than it is given"):
        _answers(ApplyInArrowWithState(wrong, _OUTPUT, "n long"), in_columns=True)


@pytest.mark.parametrize(
    ("schema", "name", "reason"),
    [
        ("n long", "t", "the output has no column"),
        ("n long, t date", "t", "an event time must be a timestamp"),
    ],
)
def test_event_time_must_be_a_timestamp_column_of_the_output(schema: str, name: str, reason: str) -> None:
    """As in Spark, the check needs no rows."""
    with pytest.raises(InvalidError, match=reason):
        YieldedRows(parse_schema(schema), "row", name)
