"""The benchmark of garbage, on a small store."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.garbage import POLICY, measure_commits, measure_garbage

pytestmark = pytest.mark.slow


def test_bytes_and_files_stay_bounded(tmp_path: Path) -> None:
    """The bounds are on bytes and files; times need a quiet machine."""
    figures = measure_garbage(160, 3_000, tmp_path, reads=3)

    assert figures["ratio"] <= figures["ratio_max"] <= 3.0
    assert figures["files_per_interval_max"] <= POLICY.compaction.files_max + POLICY.compaction.fan_in
    assert figures["read_files_end"] <= figures["files_per_interval_max"]
    assert figures["live_rows"] == 6_000
    assert figures["records"] == 40_000


def test_commits_are_measured_on_an_old_and_a_young_store(tmp_path: Path) -> None:
    figures = measure_commits(110, tmp_path, turns=3)

    assert figures["commit_version"] >= 113
    assert figures["commit_young_p50_ms"] > 0 < figures["commit_old_p50_ms"]
