"""What code gets of a bundle as a table, and what it may give back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.executor.computation.record_table import table_of
from millpond.executor.computation.values import (
    ArrowValues,
    ConcatenatedValues,
    JsonValues,
    PythonValues,
)
from millpond.statestore.errors import InvalidError

STATE = pa.schema([("n", pa.int64()), ("seen", pa.list_(pa.string()))])
OUT = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])

Code = Callable[[mp.types.TableContext, pa.Table, mp.types.KeyGroups], object]


class Does(mp.Computation):
    counters = ("calls",)

    def __init__(self, code: Code) -> None:
        self.code = code

    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        self.code(context, table, groups)


class Keep(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), [record.value, record.at]])


def run(code: Code, rows: Any, **options: Any) -> dict[str, Any]:
    """Run code over one bundle of rows; return states, what was produced, and letters."""
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("in", key="k", at="t", at_unit="us", id="i", watermark=mp.BoundedDisorder("1h"))
    settings = {"state": STATE, "produces": {"out": OUT}} | options
    stream.apply(Does(code), name="code", **settings).apply(Keep(), name="kept")
    with mp.Store.in_memory() as store:
        runner = mp.LocalRunner(store, progress=False, upkeep=None, dead_letter_limit=None, intervals=1)
        with runner.start(pipeline, stepping=True) as running:
            running.inject("in", rows)
            running.run_until_quiet()
            views = {
                name: store.rows_view(name).to_arrow().to_pylist()
                for name in ("code", "kept", "dead_letters")
            }
    states = {row["key"]: (row["n"], row["seen"]) for row in views["code"]} if "state" in settings else {}
    kept = {row["key"]: mp.JsonCodec().decode(row["state"]) for row in views["kept"]}
    errors = [mp.JsonCodec().decode(row["state"])["error"] for row in views["dead_letters"]]
    return {"states": states, "kept": kept, "errors": errors}


ROWS = pa.table(
    {"k": ["b", "a", "b"], "t": [3_000_000, 2_000_000, 1_000_000], "v": [30, 20, 10], "i": ["x", None, "y"]}
)


def test_code_sees_records_by_key_and_time() -> None:
    seen: list[Any] = []

    def code(context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups) -> None:
        seen.append(
            [
                table.column_names,
                table["v"].to_pylist(),
                groups.keys.to_pylist(),
                groups.bounds.tolist(),
                groups.owners.tolist(),
                groups.at.tolist(),
                groups.late.tolist(),
                groups.ids.to_pylist(),
                groups.streams.to_pylist(),
                groups.states.to_pylist(),
                len(groups),
                context.streams,
            ]
        )

    run(code, ROWS)
    assert seen == [
        [
            ["k", "t", "v", "i"],
            [20, 10, 30],
            ["a", "b"],
            [0, 1, 3],
            [0, 1, 1],
            [2_000_000, 1_000_000, 3_000_000],
            [False] * 3,
            [None, b"y", b"x"],
            ["in"] * 3,
            [None, None],
            2,
            ("out",),
        ]
    ]


def test_what_code_gets_cannot_be_written_to() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        for array in (groups.bounds, groups.at, groups.late, groups.owners):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1

    assert run(code, ROWS)["errors"] == []


def test_the_last_state_that_was_set_counts() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        groups.set_states({"n": [1, 2], "seen": [["x"], None]})
        groups.set_states({"n": [3, 4]}, changed=np.array([False, True]))
        groups.set_states({"n": [5, 6]}, changed=[False, False])

    assert run(code, ROWS)["states"] == {"a": (1, ["x"]), "b": (4, None)}


def test_arrays_that_code_changes_afterwards_change_nothing() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        numbers, owners, times = np.array([1, 2]), np.array([0, 1]), np.array([2_000_000, 3_000_000])
        groups.set_states({"n": numbers})
        groups.produce("out", {"n": pa.array(numbers)}, owners=owners, at=times)
        for array in (numbers, owners, times):
            np.add(array, 10**9, out=array)

    result = run(code, ROWS)
    assert result["states"] == {"a": (1, None), "b": (2, None)}
    assert {key: [(row["n"], at) for row, at in rows] for key, rows in result["kept"].items()} == {
        "a": [(1, 2_000_000)],
        "b": [(2, 3_000_000)],
    }


def test_states_of_some_keys_leave_the_others_without_one() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        groups.set_states({"n": [1, 2]}, changed=pa.chunked_array([[True], [False]]))
        groups.set_states({"n": [7, 8]}, changed=np.array([False, False]))

    assert run(code, ROWS)["states"] == {"a": (1, None)}


def test_productions_have_the_time_of_the_newest_record_or_their_own() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        groups.produce("out", {"n": [1, 2]})
        groups.produce("out", {"n": [3]}, owners=[1], at=2_500_000)
        groups.produce("out", {"n": [4]}, owners=pa.array([1]), at=datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC))
        times = pa.array([2_000_000, 1_000_000]).cast(pa.timestamp("us", "UTC"))
        groups.produce("out", {"n": [5, 6], "at": times}, at=times)
        groups.produce("out", {"n": []}, owners=[])

    kept = run(code, ROWS)["kept"]
    found = {key: [(value["n"], at) for value, at in rows] for key, rows in kept.items()}
    assert found == {
        "a": [(1, 2_000_000), (5, 2_000_000)],
        "b": [(6, 1_000_000), (4, 2_000_000), (3, 2_500_000), (2, 3_000_000)],
    }


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda groups: groups.set_states({"n": [1, 2, 3, 4]}), "states must have an entry for each key"),
        (
            lambda groups: groups.set_states({"n": groups.bounds[1:]}, changed=[1] * len(groups)),
            "truth values",
        ),
        (lambda groups: groups.set_states({"n": groups.bounds[1:]}, changed=[]), "changed must"),
        (lambda groups: groups.produce("out", {"n": [1] * 9}), "values must have an entry for each key"),
        (lambda groups: groups.produce("out", {"n": [1]}, owners=[9]), "owners must be indices of keys"),
        (lambda groups: groups.produce("out", {"n": [1]}, owners=[0.5]), "owners must be indices of keys"),
        (lambda groups: groups.produce("out", {"n": [1]}, owners=[0, 0]), "owners must have an entry"),
        (lambda groups: groups.produce("out", {"n": [1]}, [0], at=[5, 5]), "at must have an entry"),
        (lambda groups: groups.produce("out", {"n": [1]}, [0], at=[0]), "must not be before the input's"),
        (lambda groups: groups.produce("out", {"n": [1]}, [0], at=["x"]), "at must be whole microseconds"),
        (lambda groups: groups.produce("out", {"n": [1]}, [0], at="x"), "a time must be an int"),
        (
            lambda groups: groups.produce("out", pa.array([None], pa.struct(list(OUT))), [0]),
            "must not be null",
        ),
        (
            lambda groups: groups.produce(
                "out", {"at": pa.array([2**62]).cast(pa.timestamp("us", "UTC"))}, owners=[0]
            ),
            "cannot be read by Python",
        ),
        (lambda groups: groups.set_states({"seen": [[1]] * len(groups)}), "another type"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(code: Any, words: str) -> None:
    raised: list[str] = []

    def checked(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        try:
            code(groups)
        except InvalidError as error:
            raised.append(str(error))
            raise

    result = run(checked, ROWS)
    assert all(words in text for text in raised), raised
    assert len(result["errors"]) == 3
    assert (result["states"], result["kept"]) == ({}, {})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda context, groups: groups.produce("ou", {"n": [1]}), "does not declare this stream"),
        (lambda context, groups: context.state.get(), "has no state"),
        (lambda context, groups: context.produce("out", 1), "has no produce"),
        (lambda context, groups: groups.state("m"), "no such field"),
        (lambda context, groups: context.count("cals"), "does not declare this counter"),
        (lambda context, groups: context.watermark_at(50), "does not declare this percentile"),
    ],
)
def test_misuse_ends_the_run_even_if_code_catches_it(code: Any, words: str) -> None:
    def swallowing(context: Any, _: Any, groups: Any) -> None:
        with suppress(InvalidError):
            code(context, groups)

    with pytest.raises(InvalidError, match=words):
        run(swallowing, ROWS)


def test_a_context_has_the_times_and_counters_of_the_computation() -> None:
    seen: list[Any] = []

    def code(context: mp.types.TableContext, _: Any, __: Any) -> None:
        context.count("calls")
        seen.append(context.watermark_at() == context.watermark == context.late_before)
        seen.append(context.wall_time > 0)
        assert not hasattr(context, "nothing")

    assert run(code, ROWS)["errors"] == []
    assert seen == [True, True]


def test_a_failed_call_counts_nothing_and_single_keys_come_alone() -> None:
    calls: list[list[str]] = []

    def code(context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups) -> None:
        calls.append(groups.keys.to_pylist())
        groups.set_states({"n": [1] * len(groups)})
        groups.produce("out", {"n": [1] * len(groups)})
        if 10 in table["v"].to_pylist():
            raise ValueError("ten")

    result = run(code, ROWS, retries=0)
    assert calls == [["a", "b"], ["a"], ["b"], ["b"], ["b"], ["b"]]
    assert result["states"] == {"a": (1, None), "b": (1, None)}
    assert result["errors"] == ["ValueError: ten"]
    assert {key: len(rows) for key, rows in result["kept"].items()} == {"a": 1, "b": 1}


def test_a_time_limit_is_of_a_call_and_then_of_each_key() -> None:
    calls: list[int] = []

    def code(_: Any, table: pa.Table, groups: mp.types.KeyGroups) -> None:
        calls.append(len(groups))
        while 20 in table["v"].to_pylist():
            pass
        groups.set_states({"n": [1] * len(groups)})

    result = run(code, ROWS, user_code_timeout="200ms", retries=2)
    assert calls == [2, 1, 1, 1]
    assert result["states"] == {"b": (1, None)}
    assert ["time limit" in error for error in result["errors"]] == [True]


def test_code_without_states_needs_no_schema_of_them() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        groups.produce("out", {"n": [1] * len(groups)})

    assert set(run(code, ROWS, state=None)["kept"]) == {"a", "b"}


class InBatches(Does):
    in_micro_batches = True


class Packed(Does):
    codec = mp.MsgpackCodec()


@pytest.mark.parametrize(
    ("computation", "options", "words"),
    [
        (InBatches(print), {}, "in_micro_batches"),
        (Packed(print), {}, "states as columns"),
        (Does(print), {"produces": {"code": None, "out": None}}, "the stream needs a schema"),
    ],
)
def test_code_that_tables_do_not_suit_is_refused(computation: Any, options: Any, words: str) -> None:
    stream = mp.Pipeline("p").inject("in", key="k", at="t")

    with pytest.raises(InvalidError, match=words):
        stream.apply(computation, name="code", **options)


def test_streams_within_a_composite_have_short_names() -> None:
    def code(_: Any, __: Any, groups: mp.types.KeyGroups) -> None:
        groups.produce("out", {"n": [1] * len(groups)})

    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("in", key="k", at="t", at_unit="us")
    made = pipeline.transform(
        "part", lambda own: own.apply(Does(code), name="code", produces={"out": OUT}), rows
    )
    made.apply(Keep(), name="kept")
    with mp.Store.in_memory() as store:
        mp.LocalRunner(store, progress=False, upkeep=None).run(pipeline, {"in": ROWS}, finish=False)
        assert sorted(store.rows_view("kept").to_arrow()["key"].to_pylist()) == ["a", "b"]


# ---------------------------------------------------------------------------- tables of values


def test_rows_of_python_make_columns_of_all_their_fields() -> None:
    values = PythonValues([{"a": 1}, {"b": "x", "a": None}, {}])

    assert table_of(values, np.array([1, 0, 2])).to_pydict() == {"b": ["x", None, None], "a": [None, 1, None]}


def test_values_that_are_not_all_dicts_are_one_column() -> None:
    assert table_of(JsonValues(pa.array(["3", "4"])), np.array([1, 0])).to_pydict() == {"value": [4, 3]}
    assert table_of(PythonValues([{}, {}]), np.array([0, 1])).to_pydict() == {"value": [None, None]}
    with pytest.raises(InvalidError, match="make no column"):
        table_of(PythonValues([1, "x"]), np.array([0, 1]))


def test_columns_of_several_deliveries_are_joined() -> None:
    one = ArrowValues(pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"]}))
    two = ArrowValues(pa.table({"c": [0.5], "a": pa.array([3], pa.int64())}))
    text = JsonValues(pa.array(['{"a":4}']))
    values = ConcatenatedValues([one, text, two])

    table = table_of(values, np.array([3, 0, 1]))
    assert table.to_pydict() == {"a": [3, 1, 2], "b": [None, "x", "y"], "c": [0.5, None, None]}
    assert table.schema.field("a").type == pa.int64()
    # Of records of one delivery alone, the types are its own.
    assert table_of(values, np.array([1])).schema == one_schema()
    assert table_of(values, np.array([2, 0])).to_pydict() == {"a": [4, 1], "b": [None, "x"]}
    clash = ConcatenatedValues([one, ArrowValues(pa.table({"a": ["x"]}))])
    with pytest.raises(InvalidError, match="types that make no column"):
        table_of(clash, np.array([0, 2]))


def one_schema() -> pa.Schema:
    return pa.schema([("a", pa.int32()), ("b", pa.string())])


def test_null_rows_are_rows_of_nulls() -> None:
    rows = pa.array([{"a": 1}, None], pa.struct([("a", pa.int64())]))

    assert table_of(ArrowValues(rows), np.array([1, 0])).to_pydict() == {"a": [None, 1]}
