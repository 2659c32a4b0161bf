"""Records that came too late for a windowed step, as a stream of their own, on both runners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest

import millpond as mp
from millpond.executor.ownership.catalog_recorder import definition_of
from millpond.executor.pipeline.nodes import OnLate
from millpond.statestore.errors import InvalidError
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Open = Callable[..., Play]
SECOND = 1_000_000


class Kept(mp.Computation):
    """Keeps what it gets."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), [record.value, record.at, record.late]])


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark: SparkSession | None = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def row(key: str, at: int, value: int) -> dict[str, Any]:
    return {"k": key, "t": at * SECOND, "v": value, "id": f"{key}{at}"}


def windowed(folder: Path | None = None, **options: Any) -> mp.DataflowStream:
    """Return sums of windows of ten seconds, which take late records for five seconds."""
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("s", key="k", at="t", id="id", at_unit="us", watermark=mp.ManualWatermark())
    sums = rows.window(mp.FixedWindows("10s"), allowed_lateness="5s", of="v").combine(
        mp.Sum(), name="sums", **options
    )
    sums.apply(Kept(), name="panes")
    return sums


def with_late(folder: Path) -> mp.Pipeline:
    sums = windowed()
    late = sums.late().sink("late", mp.DeltaSink(str(folder)))
    late.apply(Kept(), name="late")
    late.window(mp.FixedWindows("10s"), allowed_lateness="1h").combine(mp.Count(), name="again")
    return sums.pipeline  # type: ignore[return-value]  # the pipeline of a `DataflowStream`


def test_dropped_records_come_once_with_value_key_and_time(play: Open, tmp_path: Path) -> None:
    run = play(lambda: with_late(tmp_path / "sink"))
    run.inject("s", [row("a", 1, 1), row("b", 2, 2)])
    run.advance("s", 14 * SECOND)
    # In time, within the lateness, after it, and after it for the second time.
    run.inject("s", [row("a", 17, 3), row("a", 3, 4)])
    run.advance("s", 16 * SECOND)
    run.inject("s", [row("a", 4, 5), row("a", 18, 6), row("b", 5, 7), row("a", 4, 5)])
    run.settle()
    run.restart()
    run.inject("s", [row("a", 4, 5), row("b", 6, 8)])
    run.settle()

    assert {key: orjson.loads(state) for key, state in run.states("late").items()} == {
        "a": [[row("a", 4, 5), 4 * SECOND, True]],
        "b": [[row("b", 5, 7), 5 * SECOND, True], [row("b", 6, 8), 6 * SECOND, True]],
    }
    counts = run.run.summary().totals.by_computation["sums"]
    assert counts["dropped"] == 3
    run.stop()
    written = sorted((orjson.loads(one["value"])["v"], one["key"]) for one in rows_of(tmp_path / "sink"))
    assert written == [(5, "a"), (7, "b"), (8, "b")]
    run.restart()


def test_undelivered_late_record_follows_its_renamed_step(play: Open) -> None:
    def make(name: str, **options: Any) -> Callable[[], mp.Pipeline]:
        def pipeline() -> mp.Pipeline:
            pipeline = mp.Pipeline("p")
            rows = pipeline.inject("s", key="k", at="t", at_unit="us", watermark=mp.ManualWatermark())
            rows.window(mp.FixedWindows("10s")).combine(mp.Count(), name=name, **options).late().apply(
                Kept(), name="late"
            )
            return pipeline

        return pipeline

    run = play(make("sums"))
    run.advance("s", 30 * SECOND)
    run.inject("s", [row("a", 1, 1)])
    run.make = make("totals", renamed_from="sums")
    run.restart()
    run.settle()

    assert orjson.loads(run.states("late")["a"])[0][1:] == [SECOND, True]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    table: pa.Table = mp.read_table(str(folder))
    return table.to_pylist()


def test_late_stream_is_part_of_the_declaration() -> None:
    sums = windowed()
    before = sums.pipeline.check()
    late = sums.late()

    topology = sums.pipeline.check()
    streams = {one.name: one.producers for one in definition_of(topology).streams}
    assert (late.name, sums.late().name) == ("sums.late", "sums.late")
    assert streams["sums.late"] == ("sums",)
    assert "sums.late" not in {one.name for one in definition_of(before).streams}
    assert topology.computations["sums"].computation.fingerprint == (
        before.computations["sums"].computation.fingerprint
    )


def test_composite_names_its_late_stream() -> None:
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("s", key="k", at="t")

    def counts(stream: mp.DataflowStream) -> mp.DataflowStream:
        counted = stream.window(mp.FixedWindows("10us")).combine(mp.Count(), name="counts")
        counted.late().apply(Kept(), name="late")
        return counted

    assert pipeline.transform("visits", counts, rows).name == "visits.counts"
    assert pipeline.check().computations["visits.counts"].produces == ("visits.counts", "visits.counts.late")


def test_upsert_of_late_records_changes_no_accumulation(tmp_path: Path) -> None:
    """Only readers of panes decide how panes relate."""
    sums = windowed()
    sums.late().sink("late", mp.DeltaSink(str(tmp_path), mode="upsert", keys=["key"]))

    code: Any = sums.pipeline.check().computations["sums"].computation
    assert code.strategy.accumulation is mp.windows.Accumulation.DISCARDING


def test_late_records_of_another_stream_are_refused() -> None:
    sums = windowed()
    mapped = sums.map(lambda value: value, name="mapped")
    for stream in (mapped, sums.late(), mapped.pipeline.stream("s")):
        with pytest.raises(InvalidError, match="only the result of a windowed step"):
            stream.late()
    on_late: OnLate = "drop"
    with pytest.raises(InvalidError, match='on_late="drop" withholds'):
        windowed(on_late=on_late).late()


@pytest.mark.parametrize("value", [datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.50"), b"\xff", None])
def test_late_value_of_a_column_is_as_any_step_passes_it_on(value: Any, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"k": "a", "t": SECOND, "x": value}])
    with mp.Store.in_memory() as store:
        pipeline = mp.Pipeline("p")
        rows = pipeline.inject("s", key="k", at="t", at_unit="us", watermark=mp.ManualWatermark())
        counts = rows.window(mp.FixedWindows("10s")).combine(mp.Count(), name="counts")
        counts.late().apply(Kept(), name="late")
        rows.map(lambda value: value, name="copy").apply(Kept(), name="copies")
        with mp.LocalRunner(store, progress=False, dead_letter_limit=None).start(
            pipeline, stepping=True
        ) as run:
            run.advance_watermark("s", 60 * SECOND)
            run.run_until_quiet()
            run.inject("s", table)
            run.run_until_quiet()
        late, copies = (store.rows_view(name).to_arrow()["state"].to_pylist() for name in ("late", "copies"))
        assert late == copies
