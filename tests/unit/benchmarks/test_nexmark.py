"""The Nexmark benchmark, with few events."""

from __future__ import annotations

import pyarrow as pa
import pytest

from benchmarks import nexmark
from examples.nexmark.generator import Generator
from examples.nexmark.queries import QUERIES


def test_query_has_rows_and_a_rate() -> None:
    """The Spark rate is missing when Spark is left out."""
    figure = nexmark.measure(QUERIES["q0"], [Generator(seed=1).events(1_000)], None)

    assert (figure.query, figure.events, figure.rows) == ("q0", 920, 920)
    assert figure.local_events_per_second > 0
    assert figure.spark_per_local is None


def test_generator_has_a_positive_rate() -> None:
    assert nexmark.generator_speed(1_000) > 0


def test_run_with_dead_letters_is_refused() -> None:
    piece = Generator(seed=1).events(50)
    bids = piece["bids"]
    index = bids.column_names.index("date_time")
    times = bids.column(index).to_pylist()
    timeless = pa.array([None, *times[1:]], bids.schema.field(index).type)
    piece = {**piece, "bids": bids.set_column(index, "date_time", timeless)}

    with pytest.raises(RuntimeError, match="1 records ended as dead letters"):
        nexmark.measure(QUERIES["q0"], [piece], None)
