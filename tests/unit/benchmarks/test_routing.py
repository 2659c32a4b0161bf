"""The benchmark of routing records to intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.routing import measure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
def test_routing_is_measured_for_each_number_of_intervals(spark: SparkSession) -> None:
    """Unrouted records are the baseline."""
    frame = spark.range(0, 100, 1, 2).selectExpr("lpad(hex(xxhash64(id)), 16, '0') AS k", "id AS at")
    runs = measure(frame, [1, 300])

    assert [(run["intervals"], run["records"]) for run in runs] == [(1, 100), (300, 100)]
    assert all(run["routed_ms"] > 0 and run["unrouted_ms"] > 0 for run in runs)
