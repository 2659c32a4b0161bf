"""The benchmark of state larger than memory, with little state."""

from __future__ import annotations

import pytest

from benchmarks.state_size import ENGINE, LOCAL, ROCKSDB, measure


@pytest.mark.spark
@pytest.mark.spark_all
@pytest.mark.timeout(600)
def test_both_engines_have_rates_times_and_memory() -> None:
    runs = measure([2_000], [100], limit_s=120.0)

    assert [(run["engine"], run["code"]) for run in runs] == [
        (ENGINE, "blob"),
        (ENGINE, "sums read"),
        (LOCAL, "sums read"),
        (ENGINE, "sums added"),
        (LOCAL, "sums added"),
        (ROCKSDB, "blob"),
    ]
    for run in runs:
        assert (run["keys"], run["touched"]) == (2_000, 100)
        assert run["records_per_second"] > 0
        assert run["peak_process_mib" if run["engine"] == LOCAL else "peak_worker_mib"] > 10
        assert 0 < run["first_commit_s"] < run["load_s"] + 60
    assert runs[0]["base_worker_mib"] > 10
    assert runs[0]["share_read"] == 0.0
