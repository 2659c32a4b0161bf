"""The benchmark of a retention's disk space."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.retention import measure_retention

pytestmark = pytest.mark.slow


def test_hour_of_versions_is_below_three_times_the_live_bytes(tmp_path: Path) -> None:
    """Each row changes 3.6 times a day; the log and the disk must agree."""
    figures = measure_retention(tmp_path, hours=10, superstep_s=120, keys=20_000, records=100, check="1h")

    assert figures["updates_per_key_per_day"] == 3.6
    assert figures["ratio_1h"] < 3
    assert figures["ratio_1h_run"] < 3
