"""Functions of groups with state, in Arrow and in pandas."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import millpond as mp
from millpond.executor.spark_compat.group_state import ApplyInArrowWithState, ApplyInPandasWithState
from millpond.executor.spark_compat.schema import parse_schema
from millpond.executor.spark_compat.transform_with_state import FrameLimits, YieldedRows
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import decode_value
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
            self.values += map(decode_value, productions.column("value").to_pylist())


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
    return sorted(kept.values, key=lambda row: (row["k"], row["has_timed_out"], row["n"]))


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
        "first": dt.datetime(2026, 11, 23, 17, 36, 50, tzinfo=dt.UTC),
        "has_timed_out": False,
        "parts": {"rows": 2},
    }
    assert [row["k"] for row in ours if row["has_timed_out"]] == ["a", "b"]


_MOMENT = dt.datetime(2024, 1, 1, 1, 30, tzinfo=dt.UTC)


def _in_frames(function: Any, output_schema: str) -> list[Any]:
    """Return what a function yields for two keys, one of which has nulls, in a session in New York."""
    computation = ApplyInPandasWithState(function, output_schema, "s long", time_zone="America/New_York")
    kept = Kept()
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key=["k"], at=mp.IngressTime())
    stream.apply(computation, name="frames", on_error="stop").sink("kept", kept)
    rows = pa.table(
        {
            "k": ["a", "b"],
            "n": [1, None],
            "sold": [True, None],
            "t": pa.array([_MOMENT, None], pa.timestamp("us", "UTC")),
            "m": pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    mp.LocalRunner(Store.in_memory(), progress=False).run(pipeline, {"in": rows})
    return sorted(kept.values, key=str)


def test_frame_has_the_types_of_spark() -> None:
    """Times are in the session's zone and in nanoseconds, and another key's null changes no type."""

    def seen(key: Any, frames: Any, _state: Any) -> Any:
        for frame in frames:
            told = {name: f"{frame[name].dtype} {frame[name].iloc[0]}" for name in frame.columns[1:]}
            yield pd.DataFrame({"k": [key[0]], "seen": [repr(told)]})

    assert _in_frames(seen, "k string, seen string") == [
        {
            "k": "a",
            "seen": repr(
                {
                    "n": "int64 1",
                    "sold": "bool True",
                    "t": "datetime64[ns] 2023-12-31 20:30:00",
                    "m": "object {'x': 1}",
                }
            ),
        },
        {
            "k": "b",
            "seen": repr(
                {"n": "float64 nan", "sold": "object None", "t": "datetime64[ns] NaT", "m": "object None"}
            ),
        },
    ]


def test_frame_that_is_passed_on_keeps_its_values() -> None:
    def passed_on(_key: Any, frames: Any, _state: Any) -> Any:
        yield from frames

    schema = "k string, n long, sold boolean, t timestamp, m map<string,long>"

    assert _in_frames(passed_on, schema) == [
        {"k": "a", "n": 1, "sold": True, "t": _MOMENT, "m": {"x": 1}},
        {"k": "b", "n": None, "sold": None, "t": None, "m": None},
    ]


@pytest.mark.parametrize("columns", [None, ["k", "n"], ["n", "k"]])
def test_columns_are_taken_by_name_or_without_names_by_place(columns: list[str] | None) -> None:
    def counted(key: Any, _frames: Any, _state: Any) -> Any:
        row = [1, key[0]] if columns == ["n", "k"] else [key[0], 1]
        yield pd.DataFrame([row], columns=columns)

    assert _in_frames(counted, "k string, n long") == [{"k": "a", "n": 1}, {"k": "b", "n": 1}]


@pytest.mark.parametrize("columns", [["k", "m"], ["k"], ["k", "n", "m"], [0], ["k", "n", "n"]])
def test_columns_that_are_missing_or_misspelt_are_refused(columns: list[Any]) -> None:
    """They were nulls, without a word."""

    def wrong(_key: Any, _frames: Any, _state: Any) -> Any:
        yield pd.DataFrame([["a", 1, 2][: len(columns)]], columns=columns)

    with pytest.raises(InvalidError, match="must yield the columns of its output schema"):
        _in_frames(wrong, "k string, n long")


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


@pytest.mark.parametrize("in_columns", [True, False])
@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        (FrameLimits(rows=3), [3, 3, 1]),
        (FrameLimits(rows=7), [7]),
        (FrameLimits(rows=0), [7]),
        (FrameLimits(), [7]),
    ],
)
def test_key_has_frames_within_the_limits(limits: FrameLimits, sizes: list[int], *, in_columns: bool) -> None:
    assert _frame_sizes(limits, in_columns=in_columns) == [{"sizes": sizes}, {"sizes": [1]}]


def test_frame_ends_with_the_row_that_reaches_the_bytes() -> None:
    """A row of two numbers and one letter has about 22 bytes."""
    in_bytes = [FrameLimits(bytes=limit) for limit in (1, 40, 60, 1_000)]

    sizes = [_frame_sizes(limits, in_columns=True)[0]["sizes"] for limits in in_bytes]

    assert sizes == [[1] * 7, [2, 2, 2, 1], [3, 3, 1], [7]]


def _frame_sizes(limits: FrameLimits, *, in_columns: bool) -> list[Any]:
    def sizes(_key: Any, frames: Any, _state: Any) -> Any:
        yield pd.DataFrame({"sizes": [list(map(len, frames))]})

    computation = ApplyInPandasWithState(sizes, "sizes array<long>", "s long")
    computation.frame_limits = limits
    kept = Kept()
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at=mp.IngressTime())
    stream.apply(computation, name="sizes", on_error="stop").sink("kept", kept)
    run = mp.LocalRunner(Store.in_memory(), progress=False).start(pipeline, stepping=True)
    rows = [{"k": key, "n": number, "m": number} for number, key in enumerate("aaabaaaa")]
    run.inject("in", pa.Table.from_pylist(rows) if in_columns else rows)
    run.run_until_quiet()
    run.stop()
    return sorted(kept.values, key=lambda value: -sum(value["sizes"]))
