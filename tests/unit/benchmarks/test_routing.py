"""The benchmark of finding the interval of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.routing import measure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_each_number_of_intervals_is_measured(spark: SparkSession) -> None:
    """With the same records unrouted next to it."""
    frame = spark.range(0, 100, 1, 2).selectExpr("lpad(hex(xxhash64(id)), 16, '0') AS k", "id AS at")
    runs = measure(frame, [1, 300])

    assert [(run["intervals"], run["records"]) for run in runs] == [(1, 100), (300, 100)]
    assert all(run["routed_ms"] > 0 and run["unrouted_ms"] > 0 for run in runs)
