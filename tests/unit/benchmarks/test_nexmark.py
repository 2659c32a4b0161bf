"""The Nexmark benchmark measures what it says, at a size that costs seconds."""

from __future__ import annotations

import pyarrow as pa
import pytest

from benchmarks import nexmark
from examples.nexmark.generator import Generator
from examples.nexmark.queries import QUERIES


def test_a_query_has_its_figure() -> None:
    """A query's figure has its row count and its rate, and no Spark rate when Spark is left out."""
    figure = nexmark.measure(QUERIES["q0"], [Generator(seed=1).events(1_000)], None)

    assert (figure.query, figure.events, figure.rows) == ("q0", 920, 920)
    assert figure.local_events_per_second > 0
    assert figure.spark_per_local is None


def test_the_generator_is_measured() -> None:
    """The generator has a positive rate."""
    assert nexmark.generator_speed(1_000) > 0


def test_a_dead_letter_is_no_figure() -> None:
    """A run with dead letters is refused."""
    piece = Generator(seed=1).events(50)
    bids = piece["bids"]
    index = bids.column_names.index("date_time")
    times = bids.column(index).to_pylist()
    timeless = pa.array([None, *times[1:]], bids.schema.field(index).type)
    piece = {**piece, "bids": bids.set_column(index, "date_time", timeless)}

    with pytest.raises(RuntimeError, match="1 records ended as dead letters"):
        nexmark.measure(QUERIES["q0"], [piece], None)
