"""The benchmark of throughput on two engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millpond as mp
from benchmarks import commit_time, millpond_spark, spark_counts, transform_with_state
from benchmarks.batches import Load, write_batches
from benchmarks.engine_result import BatchTime, EngineResult, percentile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOAD = Load(rows_per_batch=400, keys_per_batch=50, batches=2, warm_up=1)


def _batches(folder: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]


def test_batches_have_all_keys_equally_often(tmp_path: Path) -> None:
    batches = _batches(write_batches(tmp_path / "inputs", LOAD))
    assert len(batches) == LOAD.files
    for batch in batches:
        counts = batch.column("key").value_counts().to_pylist()
        assert {count["counts"] for count in counts} == {8}
        assert len(counts) == LOAD.keys_per_batch


def test_record_ids_are_unique_over_all_batches(tmp_path: Path) -> None:
    """Deduplication must find nothing to drop."""
    ids = pa.concat_tables(_batches(write_batches(tmp_path / "inputs", LOAD))).column("id")
    assert len(ids.unique()) == LOAD.files * LOAD.rows_per_batch


def test_rate_excludes_the_warm_up() -> None:
    """The raw times include it."""
    times = [BatchTime(rows_read=400, batch_ms=ms, parts_ms={}) for ms in (9_000.0, 100.0, 300.0)]
    result = EngineResult(engine="x", load=LOAD, times=tuple(times)).to_json()
    assert result["records_per_second"] == 2_000.0
    assert result["batches"] == 2
    assert result["batch_ms"] == [9_000.0, 100.0, 300.0]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.25, 1.0)])
def test_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    """It is the smallest value that at least the given share of values does not exceed."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


@pytest.mark.slow
def test_both_engines_count_every_record_once(spark: SparkSession, tmp_path: Path) -> None:
    inputs = write_batches(tmp_path / "inputs", LOAD)
    ours = millpond_spark.measure(spark, tmp_path / "pond", LOAD, inputs)
    theirs = transform_with_state.measure(spark, tmp_path / "checkpoint", LOAD, inputs)
    assert len(ours.times) == len(theirs.times) == LOAD.files
    with mp.Store.open(tmp_path / "pond", read_only=True) as store:
        states = store.rows_view("count").to_arrow().column("state").to_pylist()
    assert states == ["24"] * LOAD.keys_per_batch


@pytest.mark.slow
@pytest.mark.parametrize("name", spark_counts.ENGINES)
def test_sparks_other_ways_count_every_record_once(spark: SparkSession, tmp_path: Path, name: str) -> None:
    inputs = write_batches(tmp_path / "inputs", LOAD)
    result = spark_counts.ENGINES[name](spark, tmp_path / "checkpoint", LOAD, inputs)

    assert (result.engine, len(result.times)) == (name, LOAD.files)
    reader = spark.read.format("statestore")
    if name == "spark-tws-python-pandas":
        reader = reader.option("stateVarName", "count")
    states = [row["value"] for row in reader.load(str(tmp_path / "checkpoint")).collect()]
    counts = [state["groupState"]["count"] if "groupState" in state else state["count"] for state in states]
    assert counts == [24] * LOAD.keys_per_batch


def test_commits_are_measured_on_tables_of_constant_size() -> None:
    (result,) = commit_time.measure(2, shapes=((1_000, 10),))
    assert (result["keys"], result["live_files"], result["commits"]) == (1_000, 10, 2)
    assert len(result["commit_ms"]) == 2
