"""
The Nexmark benchmark measures what it says, at a size that costs seconds.
"""

from __future__ import annotations

import pytest

from benchmarks import nexmark
from examples.nexmark.generator import Generator
from examples.nexmark.queries import QUERIES


def test_a_query_has_its_figure() -> None:
    """
    A query over generated events has as many rows as it should and a rate, and none on a Spark that was not asked.
    """
    figure = nexmark.measure(QUERIES["q0"], [Generator(seed=1).events(1_000)], None)

    assert (figure.query, figure.events, figure.rows) == ("q0", 920, 920)
    assert figure.local_events_per_second > 0
    assert figure.spark_per_local is None


def test_the_generator_is_measured() -> None:
    """
    The generator makes events at some rate.
    """
    assert nexmark.generator_speed(1_000) > 0


def test_a_dead_letter_is_no_figure() -> None:
    """
    A run in which records failed is refused.
    """
    piece = Generator(seed=1).events(50)
    piece = {**piece, "bids": piece["bids"].drop_columns(["bidder"])}

    with pytest.raises(RuntimeError, match="46 records ended as dead letters"):
        nexmark.measure(QUERIES["q0"], [piece], None)
