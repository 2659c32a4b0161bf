"""The benchmark of latency on Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.spark_latency import ENGINES, batches_by_file, measure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_batch_of_each_file(tmp_path: Path) -> None:
    """Spark joins the logs of ten batches in one file, and leaves checksums and partial files behind."""
    entries = {
        name: json.dumps({"path": f"file:///in/{name}", "timestamp": 1, "batchId": batch})
        for name, batch in (("a", 0), ("b", 0), ("c", 9), ("d", 10))
    }
    (tmp_path / "9.compact").write_text("\n".join(["v1", entries["a"], entries["b"], entries["c"]]))
    (tmp_path / "10").write_text(f"v1\n{entries['d']}")
    (tmp_path / ".10.crc").write_bytes(b"\xff\xfe")

    assert batches_by_file(tmp_path) == {"a": 0, "b": 0, "c": 9, "d": 10}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_latencies_are_those_of_all_measured_records(
    spark: SparkSession, tmp_path: Path, engine: str
) -> None:
    figures = measure(spark, engine, tmp_path, 3, 200)

    # Twenty files a second of ten records each; the first second does not count.
    assert figures["records"] == 400
    assert 0 < figures["batches"] <= 40
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]
