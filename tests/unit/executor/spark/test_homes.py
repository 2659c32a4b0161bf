"""Homes of slots on one machine. `tests/fault/test_homes_on_a_cluster.py` tests executors that are lost or
join.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import millpond as mp
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark import routing as production_routing
from millpond.executor.spark.slots import Anchor, OneMachine, homes_for
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import SuperstepReport
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUPERSTEPS, KEYS = 4, 40


class Count(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)
        context.produce("passed", {"n": record.value["n"]})


class Last(Count):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)


def two_stages() -> EnginePipeline:
    pipeline = EnginePipeline("stages")
    records = pipeline.inject("records", key="k", at="at", at_unit="us")
    first = records.apply(Count(), name="first", produces="passed")
    first.apply(Last(), name="second", key=lambda value: str(value["n"] % KEYS))
    return pipeline


@pytest.fixture(params=[200_000, 0], ids=["read", "shuffled"])
def reports(
    spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[SuperstepReport]:
    """Run two stages over the same keys; return the reports. Slots read productions themselves, or a shuffle
    brings them.
    """
    monkeypatch.setattr(production_routing, "_READ_MAX", request.param)
    with Store.open(tmp_path / "pond") as store:
        runner = mp.SparkRunner(store, spark=spark, progress=False, intervals=4, upkeep=None)
        frame = spark.range(KEYS).selectExpr("CAST(id AS STRING) AS k", "id AS at", "id AS n")
        with runner.open(two_stages()) as run:
            made = [
                run.consume(frame, InputPosition(stream="records", source="test", batch=batch))
                for batch in range(SUPERSTEPS)
            ]
            made.append(run.advance())
        counts = Counter(store.rows_view("second").to_arrow().column("state").to_pylist())
    assert counts == {str(SUPERSTEPS): KEYS}
    return [report for report in made if report is not None]


def test_slots_stay_in_their_process_and_read_only_productions(reports: list[SuperstepReport]) -> None:
    """A slot that moved would read the rows of its soft state again."""
    assert len(reports) == SUPERSTEPS + 1
    assert all(report.slots_at_home == report.slots > 0 for report in reports)
    production_bytes = max(report.read_bytes for report in reports[1:])
    assert all(report.read_bytes <= production_bytes for report in reports)
    assert reports[0].read_bytes == 0


def test_one_machine_has_a_slot_for_each_concurrent_task(spark: SparkSession) -> None:
    """The number of intervals does not matter."""
    homes = homes_for(spark, 100, "test")

    assert isinstance(homes, OneMachine)
    assert (homes.slots, homes.slots_per_process) == (spark.sparkContext.defaultParallelism, 1)


def test_settled_anchor_places_rows_in_their_slots(spark: SparkSession) -> None:
    from pyspark.sql.functions import col, spark_partition_id

    session = spark.newSession()
    session.conf.set("spark.sql.adaptive.enabled", "false")
    anchor = Anchor(session, 5, 1, "test")
    try:
        anchor.settle()
        assert set(anchor.executors_by_slot()) == set(range(5))
        assert anchor.surplus() == []
        frame = spark.range(100).withColumn("a `name`", col("id") * 2)
        placed = anchor.place(frame, (col("id") % 5).cast("int"), 3).withColumn("slot", spark_partition_id())
        rows = placed.collect()
        assert placed.columns == ["id", "a `name`", "slot"]
        assert sorted((row[0], row[1], row[2]) for row in rows) == [(n, 2 * n, n % 5) for n in range(100)]
        assert anchor.empty(3).rdd.getNumPartitions() == 5
    finally:
        anchor.close()
