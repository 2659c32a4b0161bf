"""The watermark benchmark measures what it says, at sizes that cost a second."""

from __future__ import annotations

from benchmarks import watermarks


def test_a_percentile_leaves_its_share_late():
    """Under `ObservedPercentile(99)` and skewed disorder, 0.5 to 1.5 percent of the records are late."""
    figures = watermarks.percentile(60_000)

    assert (figures["p"], figures["records"]) == (99, 54_000)
    assert 0.005 <= figures["late_share"] <= 0.015


def test_the_authority_is_measured():
    """All intervals have reported, and the figures are present."""
    figures = watermarks.authority(2_000, 3_000)

    assert (figures["intervals"], figures["updates"]) == (2_000, 3_000)
    assert figures["updates_per_second"] > 0
    assert figures["bytes"] > 2_000
    assert figures["reporters"] == 2_000
    assert 0 < figures["superstep_ms"]["p50"] <= figures["superstep_ms"]["p99"]


def test_every_stage_has_its_lag():
    """Each of the local runner's three stages has a lag."""
    assert len(watermarks.local_lag(2, rate=50)) == 3
