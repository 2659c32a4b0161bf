"""A bundle as a table, on both runners: the sums that Arrow gives, one letter for each poisonous record, in any cuts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession

STATE = pa.schema([("count", pa.int64()), ("total", pa.int64())])
SUM = pa.schema([("user", pa.string()), ("parity", pa.string()), ("added", pa.int64())])
POISON = 13


class ByTable(mp.Computation):
    def __init__(self, *, mended: bool = False) -> None:
        self.mended = mended

    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        values = table["v"].to_numpy()
        added = np.add.reduceat(values, groups.bounds[:-1])
        parity = pc.if_else(pa.array(added % 2 == 0), "even", "odd")
        groups.produce("sums", {"user": groups.keys, "parity": parity, "added": added})
        context.count("tables")
        if not self.mended and (values == POISON).any():
            raise ValueError("a poisonous record")
        count = groups.state("count").fill_null(0).to_numpy() + np.diff(groups.bounds)
        groups.set_states({"count": count, "total": groups.state("total").fill_null(0).to_numpy() + added})

    counters = ("tables",)


class ByKey(mp.Computation):
    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        added = sum(record.value["v"] for record in records)
        parity = "even" if added % 2 == 0 else "odd"
        context.produce("sums", {"user": context.key, "parity": parity, "added": added})
        if any(record.value["v"] == POISON for record in records):
            raise ValueError("a poisonous record")
        state = context.state.get({"count": 0, "total": 0})
        context.state.set({"count": state["count"] + len(records), "total": state["total"] + added})


class Total(mp.Computation):
    """The second stage, whose input no cut changes."""

    def process_table(
        self,
        context: mp.types.TableContext,
        table: pa.Table,
        groups: mp.types.KeyGroups,
    ) -> None:
        added = np.add.reduceat(table["added"].to_numpy(), groups.bounds[:-1])
        groups.set_states({"total": groups.state("total").fill_null(0).to_numpy() + added})


def pipeline_of(computation: mp.Computation, productions: Any = "strong") -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("rows", key="k", at="t", id="id", watermark=mp.BoundedDisorder("1h"))
    sums = rows.apply(
        computation, name="first", state=STATE, produces={"sums": SUM}, productions=productions, retries=0
    )
    total = pa.schema([("total", pa.int64())])
    sums.apply(Total(), name="second", key="user", state=total)
    return pipeline


def table_of(rows: Sequence[tuple[str, int]]) -> pa.Table:
    at = pa.array([number * 1_000_000 for number in range(len(rows))], pa.int64())
    return pa.table(
        {
            "k": pa.array([key for key, _ in rows], pa.string()),
            "v": pa.array([value for _, value in rows], pa.int64()),
            "t": at.cast(pa.timestamp("us", "UTC")),
            "id": pa.array([f"{number}" for number in range(len(rows))], pa.string()),
        }
    )


def run_in_cuts(play: Play, table: pa.Table, ends: Sequence[int], restarts: int | None) -> None:
    """Inject the rows in pieces, each of which begins with the last row of the one before, which has its id."""
    for number, (start, end) in enumerate(itertools.pairwise((0, *ends, len(table)))):
        if number == restarts:
            play.restart()
        play.inject("rows", table.slice(max(start - 1, 0), end - max(start - 1, 0)))
    play.settle()


def rows_of(play: Play, name: str, *fields: str) -> dict[str, tuple[int, ...]]:
    rows = play.store.rows_view(name).to_arrow().to_pylist()
    return {row["key"]: tuple(row[field] for field in fields) for row in rows if row["state"] is not None}


def letters_of(play: Play) -> list[tuple[Any, ...]]:
    texts = play.store.rows_view("dead_letters").to_arrow()["state"].to_pylist()
    letters = map(json.loads, texts)
    names = ("computation", "stream", "key", "value", "at", "error", "id", "attempt")
    return sorted(tuple(letter[name] for name in names) for letter in letters)


def check(play: Play, other: Play, rows: Sequence[tuple[str, int]]) -> None:
    """Compare with a group-by of Arrow's, and with the code that takes a key at a time."""
    table = table_of(rows)
    good = table.filter(pc.not_equal(table["v"], POISON)) if rows else table
    sums = good.group_by("k").aggregate([("v", "count"), ("v", "sum")]).to_pylist()
    assert rows_of(play, "first", "count", "total") == {
        row["k"]: (row["v_count"], row["v_sum"]) for row in sums
    }
    assert rows_of(play, "second", "total") == {row["k"]: (row["v_sum"],) for row in sums}
    assert rows_of(play, "first", "count", "total") == rows_of(other, "first", "count", "total")
    assert letters_of(play) == letters_of(other)
    assert len(letters_of(play)) == sum(value == POISON for _, value in rows)


_rows = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b", "c", "é"]), st.sampled_from([1, 2, 3, POISON]) | st.integers(0, 50)
    ),
    max_size=24,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=_rows,
    cuts=st.lists(st.integers(0, 24), max_size=3),
    restarts=st.none() | st.integers(0, 3),
    productions=st.sampled_from(["strong", "weak"]),
)
def test_tables_give_the_sums_of_arrow_on_the_local_runner(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, cuts: Any, restarts: int | None, productions: str
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    ends = sorted(min(cut, len(rows)) for cut in cuts)
    with plays(folder, ManualClock, dead_letter_limit=None) as start:
        play = start(lambda: pipeline_of(ByTable(), productions), "tables")
        other = start(lambda: pipeline_of(ByKey(), productions), "keys")
        for one in (play, other):
            run_in_cuts(one, table_of(rows), ends, restarts)
        check(play, other, rows)


def test_tables_give_the_sums_of_arrow_on_spark(tmp_path: Path, spark: SparkSession) -> None:
    rng = np.random.default_rng(7)
    rows = [(f"k{key}", int(value)) for key, value in rng.integers(0, 30, (300, 2)).tolist()]
    with plays(tmp_path, ManualClock, spark, dead_letter_limit=None) as start:
        play = start(lambda: pipeline_of(ByTable()), "tables")
        run_in_cuts(play, table_of(rows), (100, 101, 250), 2)
        with plays(tmp_path, ManualClock, dead_letter_limit=None) as start_local:
            other = start_local(lambda: pipeline_of(ByKey()), "keys")
            run_in_cuts(other, table_of(rows), (150,), None)
            check(play, other, rows)


def test_letters_of_a_table_are_retried_with_mended_code(tmp_path: Path) -> None:
    rows = [("a", 1), ("a", POISON), ("b", 2), ("a", 4)]
    with plays(tmp_path, ManualClock, dead_letter_limit=None) as start:
        play = start(lambda: pipeline_of(ByTable()))
        play.inject("rows", table_of(rows))
        play.settle()
        play.make = lambda: pipeline_of(ByTable(mended=True))
        play.restart()
        mp.retry_dead_letters(play.store)
        play.settle()

        assert rows_of(play, "first", "count", "total") == {"a": (3, 1 + POISON + 4), "b": (1, 2)}
        assert rows_of(play, "second", "total") == {"a": (1 + POISON + 4,), "b": (2,)}
        assert letters_of(play) == []
