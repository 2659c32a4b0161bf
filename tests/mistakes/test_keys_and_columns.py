"""Mistakes with keys, and with the names of columns, streams, computations and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import DAY_US, ROWS, Does, counting, run, run_code


def keyed(key: Any) -> mp.Pipeline:
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key=key, at="at").apply(Does(), name="counter")
    return pipeline


@pytest.mark.mistake("key-misspelt")
def test_missing_key_field(told: Told) -> None:
    with told.by_error("queries", "qury", "'query'"):
        run(keyed("qury"), ROWS)


@pytest.mark.mistake("column-misspelt")
def test_missing_key_column(told: Told) -> None:
    with told.by_error("qury", "'query'"):
        run(keyed("qury"), pa.Table.from_pylist(ROWS))


@pytest.mark.mistake("time-column-misspelt")
def test_missing_time_column(told: Told) -> None:
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="att").apply(Does(), name="counter")

    with told.by_error("att", "'at'"):
        run(pipeline, pa.Table.from_pylist(ROWS))


@pytest.mark.mistake("key-null")
def test_null_keys(told: Told) -> None:
    """If no record has a key, the run stops before it commits."""
    with told.by_error("counter", "queries", "the key is null"):
        run(keyed("query"), [{"query": None, "at": DAY_US + number} for number in range(200)])


@pytest.mark.mistake("key-of-a-list")
def test_key_that_is_a_list(told: Told) -> None:
    with told.by_error("tags"):
        run(keyed("tags"), pa.table({"tags": [["a"]], "at": [DAY_US]}))


@pytest.mark.mistake("key-function-raises")
def test_key_function_that_raises(told: Told) -> None:
    with told.by_error("counter", "queries", "KeyError: 'user'"):
        run(keyed(lambda row: row["user"]), ROWS * 100)


@pytest.mark.mistake("key-of-a-production")
def test_missing_key_of_a_produced_value(told: Told) -> None:
    """A step downstream takes its key from the produced value."""
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")
    made = queries.apply(Does(lambda context, _: context.produce("hits", {"city": "Bergen"})), name="hits")
    made.apply(Does(), name="by_city", key="cty")

    with told.by_error("by_city", "hits", "cty", "'city'"):
        run(pipeline, ROWS * 100)


@pytest.mark.mistake("stream-misspelt")
def test_unknown_stream(told: Told) -> None:
    pipeline = counting()
    pipeline.stream("querys").apply(Does(), name="detector")

    with told.by_error("querys", "'queries'", "detector"):
        run(pipeline, ROWS)


@pytest.mark.mistake("produce-misspelt")
def test_production_to_an_undeclared_stream(told: Told) -> None:
    """Every record would fail, so the run stops."""
    with told.by_error("counter", "hit", "'hits'"):
        run_code(lambda context, _: context.produce("hit", 1), produces=["hits"])


@pytest.mark.mistake("input-misspelt")
def test_input_of_an_unknown_name(told: Told) -> None:
    with mp.Store.in_memory() as store, told.by_error("searches", "querys", "'queries'"):
        mp.LocalRunner(store).run(counting(), {"querys": ROWS})


@pytest.mark.mistake("input-missing")
def test_stream_without_its_input(told: Told) -> None:
    with mp.Store.in_memory() as store, told.by_error("searches", "queries"):
        mp.LocalRunner(store).run(counting(), {})


@pytest.mark.mistake("inputs-not-by-stream")
def test_rows_without_the_name_of_their_stream(told: Told) -> None:
    with mp.Store.in_memory() as store, told.by_error("searches", "list", "'queries'"):
        mp.LocalRunner(store).run(counting(), ROWS)


@pytest.mark.mistake("rows-of-no-kind")
def test_path_in_place_of_rows(told: Told) -> None:
    with told.by_error("str"):
        run(counting(), "queries.parquet")


@pytest.mark.mistake("inject-into-no-stream")
def test_injection_into_an_unknown_stream(told: Told) -> None:
    with (
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(counting(), stepping=True) as running,
        told.by_error("searches", "querys", "'queries'"),
    ):
        running.inject("querys", ROWS)


@pytest.mark.mistake("computation-misspelt")
def test_unknown_computation(told: Told) -> None:
    with (
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(counting(), stepping=True) as running,
        told.by_error("searches", "countr", "'counter'"),
    ):
        running.watermark("countr")


@pytest.mark.mistake("one-name-twice")
def test_two_computations_with_one_name(told: Told) -> None:
    """The name is also the table's in the store."""
    pipeline = counting()

    with told.by_error("counter"):
        pipeline.stream("queries").apply(Does(), name="counter")


@pytest.mark.mistake("name-of-other-letters")
def test_name_with_a_space(told: Told) -> None:
    """The name is also a table's, a folder's and a node's."""
    with told.by_error("my counter"):
        counting("my counter")


@pytest.mark.mistake("class-for-object")
def test_class_of_a_computation(told: Told) -> None:
    with told.by_error("counter", "Does"):
        mp.Pipeline("searches").inject("queries", key="query", at="at").apply(Does, name="counter")  # type: ignore[arg-type]


@pytest.mark.mistake("option-misspelt")
def test_unknown_option(told: Told) -> None:
    with told.by_error("counter", "on_eror", "'on_error'"):
        counting(on_eror="stop")


class Yields(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> Iterator[int]:  # type: ignore[override]
        yield 1


@pytest.mark.mistake("hook-that-yields")
def test_generator_as_a_hook(told: Told) -> None:
    """A generator's body would never run."""
    with told.by_error("counter", "process_record", "context.produce"):
        mp.Pipeline("searches").inject("queries", key="query", at="at").apply(Yields(), name="counter")


@pytest.mark.mistake("window-in-a-cycle")
def test_windowed_step_in_a_cycle_without_a_feedback(told: Told) -> None:
    """The step would wait for its own watermark indefinitely."""
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")
    both = queries.union(pipeline.stream("again"), name="both")
    counts = both.window(mp.FixedWindows("1h")).combine(mp.Count(), name="counts")
    counts.apply(Does(), name="again")

    with told.by_error("counts", "feedback=", "again"):
        run(pipeline, ROWS)
