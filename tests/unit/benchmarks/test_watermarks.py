"""The benchmark of watermarks, with few records."""

from __future__ import annotations

from benchmarks import watermarks


def test_percentile_99_leaves_about_one_percent_late():
    """The disorder is skewed."""
    figures = watermarks.percentile(60_000)

    assert (figures["p"], figures["records"]) == (99, 54_000)
    assert 0.005 <= figures["late_share"] <= 0.015


def test_authority_is_measured_with_all_intervals():
    figures = watermarks.authority(2_000, 3_000)

    assert (figures["intervals"], figures["updates"]) == (2_000, 3_000)
    assert figures["updates_per_second"] > 0
    assert figures["bytes"] > 2_000
    assert figures["reporters"] == 2_000
    assert 0 < figures["superstep_ms"]["p50"] <= figures["superstep_ms"]["p99"]


def test_each_stage_has_a_lag():
    """The local runner has three stages here."""
    assert len(watermarks.local_lag(2, rate=50)) == 3
