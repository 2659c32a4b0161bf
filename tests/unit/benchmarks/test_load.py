"""The benchmark of loads, with few rows."""

from __future__ import annotations

import pytest

from benchmarks.load import measure

pytestmark = pytest.mark.zookeeper


def test_each_kind_of_source_is_loaded_and_opened() -> None:
    """A pipeline starts on the loaded rows."""
    figures = measure(rows=5_000, intervals=2)

    assert figures["sources"].keys() == {"arrow", "parquet", "csv", "mappings"}
    for found in figures["sources"].values():
        assert found["load_s"] > 0
        assert found["open_s"] > 0
        assert found["store_mib"] > 0
