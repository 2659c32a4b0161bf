"""The arithmetic of a large pipeline."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.scale_arithmetic import Load, measure_sizes, multiply


def test_figures_are_proportional_to_their_causes() -> None:
    """Doubled intervals double the bytes, and doubled seconds halve the log entries."""
    sizes = measure_sizes()
    load = Load(intervals=500, seconds=10)
    few, many = multiply(load, sizes), multiply(replace(load, intervals=1_000), sizes)
    slow = multiply(replace(load, seconds=20), sizes)
    filed = multiply(replace(load, files=load.files + 1), sizes)

    assert all(size > 0 for size in asdict(sizes).values())
    assert many["commit_bytes"] == pytest.approx(2 * few["commit_bytes"], rel=1e-3)
    assert many["plan_to_all_bytes"] == pytest.approx(load.executors * many["plan_bytes"], rel=1e-3)
    assert few["log_entries_a_day"] == 2 * slow["log_entries_a_day"]
    assert filed["plan_bytes"] - few["plan_bytes"] == pytest.approx(500 * sizes.plan_file, rel=1e-3)
    assert few["objects_listed"] > slow["objects_listed"] > few["live_files"]
    assert many["zookeeper_nodes"] - few["zookeeper_nodes"] == 1_000


def test_compactions_of_a_commit_are_bounded() -> None:
    """Beyond the bound, each compaction has more files."""
    sizes = measure_sizes()
    few, many = (multiply(Load(intervals=count), sizes) for count in (80, 1_000))

    assert (few["compactions"], many["compactions"]) == (10, 32)
    assert few["files_per_compaction"] < many["files_per_compaction"]
