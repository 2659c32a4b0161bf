"""Windowed streams on the local runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.keys import PaneKey
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.sink import DeltaSink, read_table
from millpond.executor.time.watermark_policies import BoundedDisorder, ManualWatermark
from millpond.executor.windows.combiners import Count, Max, Sum
from millpond.executor.windows.composite_triggers import AfterEach, Never, Repeatedly
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.stream import DataflowStream, WindowedStream, co_group
from millpond.executor.windows.time_triggers import AfterProcessingTime, AfterWatermark, WatermarkPercentile
from millpond.executor.windows.window import Window, WindowFn
from millpond.executor.windows.window_fns import FixedWindows, GlobalWindows, Sessions
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TIMESTAMP
from millpond.statestore.store import Store
from millpond.statestore.types import Superstep
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.fixtures.own_writer import OwnWriter


class _Shelf(OwnWriter):
    def __init__(self) -> None:
        super().__init__("memory://shelf")
        self.rows: list[dict[str, Any]] = []

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        self.rows += productions.select(["key", "at", "value"]).to_pylist()

    @property
    def panes(self) -> list[tuple[str, Any, bool]]:
        values = [(row["key"], orjson.loads(row["value"])) for row in self.rows]
        return [(key, value["value"], value["pane"]["is_retraction"]) for key, value in values]


def _injected(pipeline: Pipeline) -> DataflowStream:
    return pipeline.inject("scores", key="user", at="at", watermark=ManualWatermark())


def _rows(*given: tuple[str, str, int, int]) -> list[dict[str, Any]]:
    return [{"user": user, "team": team, "score": score, "at": at} for user, team, score, at in given]


def _to_upsert(folder: Path, windows: WindowFn, **options: Any) -> list[tuple[int, str]]:
    """Return the rows of an upsert table after two elements, a closed window, and a third element."""
    pipeline = Pipeline("p")
    windowed = _injected(pipeline).window(windows, allowed_lateness="100us", **options)
    counts = windowed.map(lambda value: value["score"], name="values").combine(Sum(), name="sums")
    counts.map(lambda total: total, name="same").sink("out", DeltaSink(str(folder), mode="upsert"))
    with LocalRunner(Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for bundle, mark in ((_rows(("a", "t", 1, 5), ("a", "t", 2, 6)), 30), (_rows(("a", "t", 4, 14)), 31)):
            run.inject("scores", bundle)
            run.run_until_quiet()
            run.advance_watermark("scores", mark)
            run.run_until_quiet()
    return sorted((row["window_start"].microsecond, row["value"]) for row in read_table(folder).to_pylist())


@pytest.mark.parametrize(
    ("windows", "given", "rows"),
    [
        (FixedWindows("20us"), {}, [(0, "7")]),
        (FixedWindows("20us"), {"accumulation": "discarding"}, [(0, "4")]),
        (FixedWindows("20us"), {"accumulation": "retracting"}, [(0, "7")]),
        (Sessions("10us"), {}, [(5, "7")]),
        (Sessions("10us"), {"accumulation": "accumulating"}, [(5, "3"), (5, "7")]),
    ],
)
def test_upsert_holds_whole_windows_unless_told_otherwise(
    tmp_path: Path, windows: WindowFn, given: dict[str, Any], rows: list[tuple[int, str]]
) -> None:
    assert _to_upsert(tmp_path / "out", windows, **given) == rows


def _late_fields(scores: DataflowStream, **options: Any) -> DataflowStream:
    return scores.window(FixedWindows("20us"), allowed_lateness="100us", **options).combine(
        best=Max("score"), total=Sum("score"), name="best"
    )


def _above(fields: Any) -> list[Any]:
    return [fields] if fields["total"] > 10 else []


def _having(scores: DataflowStream, **options: Any) -> DataflowStream:
    return _late_fields(scores, **options).flat_map(_above, name="above")


def _having_of_elements(scores: DataflowStream) -> DataflowStream:
    windows = scores.window(FixedWindows("20us"), allowed_lateness="100us", of="score")
    return windows.process_windows(
        lambda given, _window, _pane: _above({"best": max(given), "total": sum(given)}), name="above"
    )


def _rekeyed(scores: DataflowStream) -> DataflowStream:
    return _late_fields(scores).map(
        lambda fields: fields, name="keyed", key=lambda fields: str(fields["best"])
    )


def _places(scores: DataflowStream) -> DataflowStream:
    best = scores.window(FixedWindows("20us"), allowed_lateness="100us").top(1, Sum("score"), name="best")
    return best.flat_map(
        lambda ranked: [{"who": one["key"], "best": one["value"]} for one in ranked], name="places"
    )


@pytest.mark.parametrize(
    ("results", "sink", "late", "rows"),
    [
        (_having, {}, ("a", -5), []),
        (_having_of_elements, {}, ("a", -5), []),
        (_rekeyed, {}, ("a", 20), [20]),
        (_late_fields, {"keys": ["window_start", "best"]}, ("a", 20), [20]),
        (_late_fields, {"keys": "best"}, ("a", 20), [20]),
        (_places, {"keys": ["window_start", "who"]}, ("b", 20), [20]),
        (partial(_having, accumulation="accumulating"), {}, ("a", -5), [12]),
    ],
)
def test_upsert_keeps_no_row_that_a_correction_moves_or_leaves_out(
    tmp_path: Path,
    results: Callable[[DataflowStream], DataflowStream],
    sink: dict[str, Any],
    late: tuple[str, int],
    rows: list[int],
) -> None:
    columns = [("window_start", TIMESTAMP), ("key", pa.string()), ("who", pa.string()), ("best", pa.int64())]
    pipeline = Pipeline("p")
    table = DeltaSink(str(tmp_path / "out"), pa.schema(columns), mode="upsert", **sink)
    results(_injected(pipeline)).sink("out", table)
    with LocalRunner(Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for who, score in (("a", 12), late):
            run.inject("scores", _rows((who, "t", score, 5)))
            run.run_until_quiet()
            run.advance_watermark("scores", 30)
            run.run_until_quiet()
    assert [row["best"] for row in table.read().to_pylist()] == rows


def test_panes_that_others_read_are_discarding_by_default() -> None:
    pipeline = Pipeline("p")
    counts = _injected(pipeline).window(FixedWindows("10us")).combine(Count(), name="counts")
    counts.window(FixedWindows("20us")).combine(Sum(), name="sums").sink(
        "out", DeltaSink("out", mode="upsert")
    )

    steps = pipeline.check().computations
    modes = [steps[name].computation.fingerprint["accumulation"] for name in ("counts", "sums")]
    assert modes == ["discarding", "accumulating"]


def _run(pipeline: Pipeline, *bundles: list[dict[str, Any]]) -> Store:
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    for bundle in bundles:
        run.inject("scores", bundle)
        run.run_until_quiet()
    run.finish("scores")
    run.run_until_quiet()
    run.stop()
    return store


def test_each_key_and_window_gets_one_pane() -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")
    _injected(pipeline).window(FixedWindows("1s")).combine(Sum("score"), name="sums").sink("out", shelf)
    _run(
        pipeline, _rows(("a", "x", 3, 1), ("a", "x", 4, 999_999), ("b", "y", 5, 1), ("a", "x", 6, 1_000_000))
    )

    assert sorted(shelf.panes) == [("a", 6, False), ("a", 7, False), ("b", 5, False)]


def test_windowed_result_can_be_windowed_again() -> None:
    """Panes keep their event time, so each falls into the right outer window."""
    shelf, pipeline = _Shelf(), Pipeline("p")
    seconds = _injected(pipeline).window(FixedWindows("1s")).combine(Sum("score"), name="seconds")
    minutes = seconds.window(FixedWindows("1m")).combine(Sum(), name="minutes")
    minutes.window(FixedWindows("1h")).combine(Count(), name="hours").sink("out", shelf)
    _run(pipeline, _rows(*(("a", "x", 1, second * 1_000_000) for second in range(0, 180, 20))))

    assert shelf.panes == [("a", 3, False)]


def test_retractions_reach_the_aggregate_of_another_key() -> None:
    """A merged session leaves the count of short sessions and enters the count of long ones."""
    shelf, pipeline = _Shelf(), Pipeline("p")
    sessions = (
        _injected(pipeline)
        .window(Sessions("10us"), trigger=Repeatedly(AfterCount(1)), accumulation="retracting")
        .combine(Count(), name="sessions")
    )
    lengths = sessions.map(lambda count: "long" if count > 1 else "short", name="lengths")
    counts = lengths.window(
        GlobalWindows(), trigger=Repeatedly(AfterCount(1)), accumulation="accumulating"
    ).combine(Count(), name="counts", key=lambda length: length)
    counts.sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 1, 0)), _rows(("b", "x", 1, 0)), _rows(("a", "x", 1, 5)))

    assert shelf.panes == [
        ("short", 1, False),
        ("short", 2, False),
        ("long", 1, False),
        ("short", 1, False),
    ]


def test_process_windows_emits_any_number_of_values() -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")

    def pairs(values: list[Any], window: Window, pane: Pane) -> list[list[Any]]:
        scores = [value["score"] for value in values]
        return [[window.start, pane.index, score] for score in scores if score > 1]

    _injected(pipeline).window(FixedWindows("10us")).process_windows(pairs, name="pairs").sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 1, 1), ("a", "x", 2, 2), ("a", "x", 3, 3)))

    assert shelf.panes == [("a", [0, 0, 2], False), ("a", [0, 0, 3], False)]


def test_result_gets_key_value_and_window() -> None:
    """The retraction must carry the same value as the pane."""
    shelf, pipeline = _Shelf(), Pipeline("p")
    _injected(pipeline).window(
        FixedWindows("10us"), trigger=Repeatedly(AfterCount(1)), accumulation="retracting"
    ).combine(Count(), name="counts", result=lambda user, count, window: [user, count, window.end]).sink(
        "out", shelf
    )
    _run(pipeline, _rows(("a", "x", 1, 1)), _rows(("a", "x", 2, 2)))

    assert shelf.panes == [("a", ["a", 1, 10], False), ("a", ["a", 1, 10], True), ("a", ["a", 2, 10], False)]


def test_plain_computation_sees_value_window_and_pane() -> None:
    class Reader(Computation):
        def process_record(self, context: Context, record: Record) -> None:
            shown = WindowedValue.from_json(record.value)
            assert record.at == shown.at == shown.window.last_at
            assert shown.pane.timing is Timing.ON_TIME
            context.produce("read", {**record.value, "value": shown.value + 1})

    shelf, pipeline = _Shelf(), Pipeline("p")
    counts = _injected(pipeline).window(FixedWindows("10us")).combine(Count(), name="counts", key="team")
    counts.apply(Reader(), name="read").sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 1, 1), ("b", "x", 2, 2)))

    assert shelf.panes == [("x", 3, False)]


def test_ended_input_leaves_no_windows_or_timers() -> None:
    pipeline = Pipeline("p")
    for number, window_fn in enumerate((FixedWindows("10us"), GlobalWindows(), Sessions("5us"))):
        stream = pipeline.stream("scores").window(window_fn, allowed_lateness="100us")
        stream.combine(Count(), name=f"counts{number}")
    _injected(pipeline)
    store = _run(pipeline, _rows(("a", "x", 1, 1), ("b", "y", 2, 30)))

    assert [store.rows_view(f"counts{number}").to_arrow().num_rows for number in range(3)] == [0, 0, 0]


def test_open_windows_are_json_in_their_keys_row() -> None:
    pipeline, clock = Pipeline("p"), ManualClock()
    _injected(pipeline).window(FixedWindows("10us")).combine(Count(), name="counts")
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    run.inject("scores", _rows(("a", "x", 1, 3)))
    run.run_until_quiet()
    (row,) = store.rows_view("counts").to_arrow().to_pylist()
    run.stop()

    assert orjson.loads(row["state"]) == {
        "windows": [
            {"window": [0, 10], "accumulator": 1, "news": 1, "is_held": True, "timers": {"||event": 10}}
        ]
    }
    assert sorted(timer["tag"] for timer in row["timers"]) == ["0/10|||event", "~0/10"]


def test_combiner_class_instead_of_instance_is_refused() -> None:
    windowed = _injected(Pipeline("p")).window(FixedWindows("10us"))

    assert isinstance(windowed, WindowedStream)
    with pytest.raises(InvalidError, match="instance of a CombineFn"):
        windowed.combine(Count, name="counts")  # type: ignore[arg-type]


def test_co_group_joins_streams_by_key_and_window() -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")
    scores = _injected(pipeline)
    counts = scores.window(FixedWindows("10us")).combine(Count(), name="counts")
    sums = scores.window(FixedWindows("10us")).combine(Sum("score"), name="sums")
    both = co_group(
        {"count": counts, "sum": sums}, WindowingStrategy(window_fn=FixedWindows("10us")), name="both"
    )
    both.flat_map(
        lambda group: [[count, total] for count in group["count"] for total in group["sum"]], name="joined"
    ).sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 3, 1), ("a", "x", 4, 2), ("a", "x", 5, 11), ("b", "x", 1, 1)))

    assert sorted(shelf.panes) == [("a", [1, 5], False), ("a", [2, 7], False), ("b", [1, 1], False)]


def test_co_group_of_keeps_the_selected_part_of_each_value() -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")
    scores = _injected(pipeline)
    sums = scores.window(FixedWindows("10us")).combine(Sum("score"), name="sums")
    strategy = WindowingStrategy(window_fn=FixedWindows("10us"))
    co_group({"raw": scores, "sum": sums}, strategy, name="both", of={"raw": "score"}).sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 3, 1), ("a", "x", 4, 2)))

    assert shelf.panes == [("a", {"raw": [3, 4], "sum": [7]}, False)]
    with pytest.raises(InvalidError, match="a field, a function"):
        co_group({"raw": scores}, strategy, name="more", of={"raw": 3})  # type: ignore[dict-item]


def test_co_group_needs_different_streams_of_one_pipeline() -> None:
    first, other = _injected(Pipeline("p")), _injected(Pipeline("q"))
    for streams in ({}, {"one": first, "other": other}, {"one": first, "again": first}):
        with pytest.raises(InvalidError, match="different streams"):
            co_group(streams, WindowingStrategy(), name="both")


@pytest.mark.parametrize("argument", ["keys", "of"])
def test_co_group_refuses_unknown_tags(argument: str) -> None:
    streams = {"scores": _injected(Pipeline("p"))}
    with pytest.raises(InvalidError, match="tags of the streams"):
        co_group(streams, WindowingStrategy(), name="both", **{argument: {"score": "team"}})  # type: ignore[arg-type]


def test_owed_pane_holds_the_output_watermark() -> None:
    """The watermark stays at the earliest element's time until the pane is emitted."""
    pipeline, clock = Pipeline("p"), ManualClock()
    counts = (
        _injected(pipeline)
        .window(FixedWindows("100us"), timestamp_combiner="OUTPUT_AT_EARLIEST")
        .combine(Count(), name="counts")
    )
    counts.window(GlobalWindows()).combine(Count(), name="panes")
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    seen = []
    for at, watermark in ((10, 15), (20, 50), (120, 110)):
        run.inject("scores", _rows(("a", "x", 1, at)))
        run.run_until_quiet()
        run.advance_watermark("scores", watermark)
        run.run_until_quiet()
        run.step()
        seen.append(run.watermark("panes"))
    run.stop()

    assert seen == [10, 10, 110]


@pytest.mark.parametrize(("combiner", "expected"), [("OUTPUT_AT_EARLIEST", 10), ("OUTPUT_AT_LATEST", 30)])
def test_pane_record_has_the_combined_time_of_its_elements(combiner: str, expected: int) -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")
    windowed = _injected(pipeline).window(
        FixedWindows("100us"), trigger=AfterCount(3), timestamp_combiner=combiner
    )
    windowed.combine(Count(), name="counts").sink("out", shelf)
    _run(pipeline, *(_rows(("a", "x", 1, at)) for at in (10, 20, 30)))

    assert [row["at"].timestamp() * 1e6 for row in shelf.rows] == [expected]
    assert orjson.loads(shelf.rows[0]["value"])["at"] == expected


def test_window_holds_the_watermark_at_its_last_instant() -> None:
    """Otherwise the next step would drop the on-time pane as late."""
    pipeline, clock, shelf = Pipeline("p"), ManualClock(), _Shelf()
    counts = _injected(pipeline).window(FixedWindows("100us")).combine(Count(), name="counts")
    counts.window(FixedWindows("100us")).combine(Sum(), name="sums").sink("out", shelf)
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    run.inject("scores", _rows(("a", "x", 1, 10)))
    run.advance_watermark("scores", 1_000)
    run.run_until_quiet()
    run.stop()
    store.close()

    assert shelf.panes == [("a", 1, False)]


@pytest.mark.parametrize("lateness", [0, 50])
def test_closing_pane_is_not_late_downstream(lateness: int) -> None:
    """The next step must not take a pane emitted at expiry for late data."""
    pipeline, shelf = Pipeline("p"), _Shelf()
    windowed = _injected(pipeline).window(
        FixedWindows("10us"), trigger=Never(), allowed_lateness=f"{lateness}us"
    )
    counts = windowed.combine(Count(), name="counts")
    counts.window(FixedWindows("10us")).combine(Sum(), name="sums").sink("out", shelf)
    _run(pipeline, _rows(("a", "x", 1, 3), ("a", "x", 1, 4)))

    assert shelf.panes == [("a", 2, False)]


def test_on_time_pane_releases_the_watermark() -> None:
    """A window that only waits for late elements does not hold the watermark."""
    pipeline, clock = Pipeline("p"), ManualClock()
    windowed = _injected(pipeline).window(FixedWindows("10us"), allowed_lateness="1ms")
    windowed.combine(Count(), name="counts").window(FixedWindows("10us")).combine(Sum(), name="sums")
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    run.inject("scores", _rows(("a", "x", 1, 3)))
    run.run_until_quiet()
    run.advance_watermark("scores", 100)
    run.run_until_quiet()
    run.inject("scores", _rows(("a", "x", 1, 4)))
    run.run_until_quiet()
    run.step()
    watermark = run.watermark("sums")
    run.stop()

    assert watermark == 100


def test_key_names_a_column_of_rows_and_a_field_of_envelopes() -> None:
    pipeline = Pipeline("p")
    windowed = _injected(pipeline).window(FixedWindows("10us"))
    windowed.combine(Count(), name="counts", key="team").map(len, name="other", key="team")
    keys = {name: node.subscriptions[0].key for name, node in pipeline.check().computations.items()}

    assert keys == {"counts": "team", "other": PaneKey("team")}


def test_percentile_trigger_emits_before_stragglers_arrive() -> None:
    """The source is up to an hour late; panes come at the 90 % watermark and at the low one."""
    second, pipeline, shelf = 1_000_000, Pipeline("p"), _Shelf()
    tiers = AfterEach(WatermarkPercentile(90), WatermarkPercentile(100))
    scores = pipeline.inject("scores", key="user", at="at", watermark=BoundedDisorder("1h"))
    windowed = scores.window(FixedWindows("10s"), trigger=tiers, accumulation="accumulating")
    windowed.combine(Count(), name="counts").sink("out", shelf)
    parts = (range(1), range(1, 110), range(110, 130))
    steps = [_rows(*(("a", "x", 1, at * second) for at in part)) for part in parts]
    late = _rows(("a", "x", 1, 5 * second))
    _run(pipeline, *steps, late)
    shown = [orjson.loads(row["value"]) for row in shelf.rows]
    first = [
        (envelope["value"], envelope["pane"]["watermark_percentile"])
        for envelope in shown
        if envelope["window"][0] == 0
    ]

    assert first == [(10, 90), (11, 100)]
    early = [envelope["window"][0] // second for envelope in shown if envelope["pane"]["timing"] == "early"]
    assert early == list(range(0, 130, 10))


@pytest.mark.parametrize(("by", "expected"), [(0, 9), (5, 14), (-5, 4)])
def test_with_timestamps_moves_the_time_of_a_late_pane(by: int, expected: int) -> None:
    """A late pane's record has a later time than its envelope."""
    pipeline, shelf, clock = Pipeline("p"), _Shelf(), ManualClock()
    late = AfterWatermark(late=AfterProcessingTime("1s"))
    windowed = _injected(pipeline).window(FixedWindows("10us"), trigger=late, allowed_lateness="1ms")
    counts = windowed.combine(Count(), name="counts")
    counts.with_timestamps(lambda _, at: at + by, name="moved", late_data_horizon="5us").sink("out", shelf)
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    for watermark in (20, 30):
        run.inject("scores", _rows(("a", "x", 1, 3)))
        run.advance_watermark("scores", watermark)
        run.run_until_quiet()
        clock.advance_ms(1_000)
        run.run_until_quiet()
    run.stop()
    shown = [orjson.loads(row["value"]) for row in shelf.rows]

    assert [(envelope["value"], envelope["at"], envelope["pane"]["timing"]) for envelope in shown] == [
        (1, expected, "on_time"),
        (1, expected, "late"),
    ]


_ONE_VALUES: dict[str, Callable[..., Any]] = {
    "dict": lambda *_: {"n": 1},
    "str": lambda *_: "ab",
    "bytes": lambda *_: b"ab",
    "mappingproxy": lambda *_: MappingProxyType({"n": 1}),
    "Table": lambda *_: pa.table({"n": [1]}),
    "NoneType": lambda *_: None,
}


@pytest.mark.parametrize("kind", _ONE_VALUES)
@pytest.mark.parametrize("method", ["flat_map", "process_windows"])
def test_one_value_in_place_of_an_iterable_is_a_dead_letter(method: str, kind: str) -> None:
    pipeline = Pipeline("p")
    scores = _injected(pipeline)
    steps = scores if method == "flat_map" else scores.window(FixedWindows("10us"))
    getattr(steps, method)(_ONE_VALUES[kind], name="wrong")
    store = Store.in_memory()
    with LocalRunner(store, progress=False, dead_letter_limit=None).start(pipeline, stepping=True) as run:
        run.inject("scores", _rows(("a", "t", 1, 5)))
        run.finish("scores")
        run.run_until_quiet()
    letters = store.rows_view("dead_letters").to_arrow().to_pylist()
    assert {kind in str(letter) for letter in letters} == {True}


@pytest.mark.parametrize(
    "function",
    [
        lambda _: [1, 2],
        lambda _: (1, 2),
        lambda _: iter([1, 2]),
        lambda _: (one for one in (1, 2)),
        lambda _: {1: 0, 2: 0}.keys(),
        lambda _: np.array([1, 2]),
    ],
)
def test_flat_map_takes_any_iterable_of_values(function: Any) -> None:
    shelf, pipeline = _Shelf(), Pipeline("p")
    _injected(pipeline).flat_map(function, name="each").sink("out", shelf)
    _run(pipeline, _rows(("a", "t", 1, 5)))
    assert [orjson.loads(row["value"]) for row in shelf.rows] == [1, 2]
