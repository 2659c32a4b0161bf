"""The benchmark of the disk tier, with few rows."""

from __future__ import annotations

import pytest

from benchmarks.disk_tier import measure
from millpond.statestore.rows import files, row_format


def test_full_disk_tier_reads_nothing_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty tier reads whole files, which is more than the needed pages."""
    monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
    # The benchmark replaces this cache.
    monkeypatch.setattr(files, "PAGE_INDEXES", files.PAGE_INDEXES)
    result = measure(keys=12_000, touched=50, latency_ms=0.0, swept=10)

    assert result["full_tier"]["store_mib"] == 0
    assert 0 < result["store"]["store_mib"] < result["empty_tier"]["store_mib"]
    assert result["sweep"]["files"] == 10
