"""States to which code only adds, on both runners: the sums that Arrow gives, whatever is cut, repeated or compacted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.verification import verify_store
from millpond.testing.fixtures.determinism import ManualClock
from tests.conformance.test_tables import POISON, letters_of, rows_of, run_in_cuts, table_of
from tests.fixtures.both_runners import Play, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUMS = pa.schema([("count", pa.int64()), ("total", pa.int64())])
STATE = mp.types.CombiningState(SUMS)
OFTEN = mp.UpkeepPolicy(compaction=CompactionPolicy(fan_in=2, files_max=3), retention="0s", collect_every=2)


class ByRecord(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        value = record.value["v"]
        # In two steps, of which neither may stay if the second one fails.
        context.state.add({"count": 1})
        if value == POISON:
            raise ValueError("a poisonous record")
        context.state.add({"total": value})
        context.produce("first", value)


class ByTable(mp.Computation):
    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        values = table["v"].to_numpy()
        groups.add_states({"count": np.diff(groups.bounds)})
        if (values == POISON).any():
            raise ValueError("a poisonous record")
        groups.add_states({"total": np.add.reduceat(values, groups.bounds[:-1])})


def pipeline_of(computation: mp.Computation, state: Any = STATE, **options: Any) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("rows", key="k", at="t", id="id", watermark=mp.BoundedDisorder("1h"))
    rows.apply(computation, name="first", state=state, retries=0, **options)
    return pipeline


def sums_of(rows: Sequence[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    table = table_of(rows)
    good = table.filter(pc.not_equal(table["v"], POISON)) if rows else table
    sums = good.group_by("k").aggregate([("v", "count"), ("v", "sum")]).to_pylist()
    return {row["k"]: (row["v_count"], row["v_sum"]) for row in sums}


def check(play: Play, rows: Sequence[tuple[str, int]]) -> None:
    assert rows_of(play, "first", "count", "total") == sums_of(rows)
    assert len(letters_of(play)) == sum(value == POISON for _, value in rows)


_rows = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "é"]), st.sampled_from([-5, 1, 2, POISON, 2**40])), max_size=24
)


@pytest.mark.parametrize("code", [ByRecord, ByTable])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=_rows, cuts=st.lists(st.integers(0, 24), max_size=6), restarts=st.none() | st.integers(0, 6))
def test_sums_on_the_local_runner(
    tmp_path_factory: pytest.TempPathFactory, code: Any, rows: Any, cuts: Any, restarts: int | None
) -> None:
    folder = tmp_path_factory.mktemp("sums")
    ends = sorted(min(cut, len(rows)) for cut in cuts)
    with plays(folder, ManualClock, dead_letter_limit=None, upkeep=OFTEN) as start:
        play = start(lambda: pipeline_of(code()))
        run_in_cuts(play, table_of(rows), ends, restarts)
        check(play, rows)
        assert not verify_store(play.store.objects).findings


@pytest.mark.parametrize("is_ansi", ["true", "false"])
def test_a_sum_that_leaves_64_bits_is_an_error_of_spark(
    tmp_path: Path, spark: SparkSession, is_ansi: str
) -> None:
    usual = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", is_ansi)
    try:
        with plays(tmp_path, ManualClock) as start:
            play = start(lambda: pipeline_of(ByRecord()))
            run_in_cuts(
                play, table_of([("a", 2**62), ("b", -(2**62)), ("b", -(2**62)), ("a", 2**62)]), (1, 2), None
            )
            view = play.store.rows_view("first").to_spark(spark)

            assert view.where("key = 'b'").select("total").collect() == [(-(2**63),)]
            with pytest.raises(Exception, match="does not fit into 64 bits"):
                view.select("total").collect()
    finally:
        spark.conf.set("spark.sql.ansi.enabled", usual)


@pytest.mark.parametrize("code", [ByRecord, ByTable])
def test_sums_on_spark_and_in_its_view(tmp_path: Path, spark: SparkSession, code: Any) -> None:
    rng = np.random.default_rng(7)
    rows = [(f"k{key}", int(value)) for key, value in rng.integers(0, 30, (300, 2)).tolist()]
    with plays(tmp_path, ManualClock, spark, dead_letter_limit=None) as start:
        play = start(lambda: pipeline_of(code()))
        run_in_cuts(play, table_of(rows), (100, 101, 250), 2)
        check(play, rows)

        # With one more field, to which only some keys get something.
        play.make = lambda: pipeline_of(
            code(), mp.types.CombiningState(pa.schema([("more", pa.int64()), *SUMS]))
        )
        play.restart()
        more = [(key, value) for key, value in rows if key < "k2"]
        given = table_of(more)
        ids = pa.array([f"again {number}" for number in range(len(more))])
        play.inject("rows", given.set_column(given.column_names.index("id"), "id", ids))
        play.settle()

        assert rows_of(play, "first", "count", "total") == sums_of(rows + more)
        view = play.store.rows_view("first")
        found = view.to_arrow().to_pylist()
        assert {row["state"].count("more") for row in found} == {0, 1}
        assert view.to_spark(spark).orderBy("key").toArrow().to_pylist() == found
