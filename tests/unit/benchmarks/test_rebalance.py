"""The benchmark of a wandering hot range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rebalance import draw, measure, summarise


def run(load: str, *rates: int) -> dict[str, Any]:
    """Make figures of a run whose hot range moves every thirty supersteps."""
    steps = [
        {"superstep": number, "records_per_second": rate, "intervals": 8} for number, rate in enumerate(rates)
    ]
    return {"load": load, "wander_every": 30, "supersteps": steps}


def test_rates_are_relative_to_the_even_load(tmp_path: Path) -> None:
    """They are taken right after a move and twenty supersteps later."""
    even = run("even", *[7] * 30, *[100] * 60)
    balanced = run("balanced", *[7] * 30, *([50] * 10 + [90] * 20) * 2)

    assert summarise([even, balanced])["balanced"] == {"at_once": 0.5, "after_20": 0.9}
    draw([even, balanced], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1_000


@pytest.mark.spark
@pytest.mark.spark_all
def test_counts_are_right_across_cuts_and_a_takeover() -> None:
    (figures,) = measure(["balanced"], 12, 2_000, 3, faults=True)

    assert figures["counted"] == figures["expected"] == 24_000
    assert len(figures["supersteps"]) == 12
