"""Watermarks of bounded input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local import bounded
from millpond.executor.local.runner import LocalRunner
from millpond.executor.time.watermark_policies import BoundedDisorder, Perfect
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.composite_triggers import AfterEach
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.stream import co_group
from millpond.executor.windows.time_triggers import WatermarkPercentile
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millpond.executor.run.run import RunSummary

_TEN = 10


class _Seen(Computation):
    def __init__(self) -> None:
        self.panes: list[tuple[int, Any]] = []
        self.watermarks: list[int] = []

    def process_record(self, context: Context, record: Record) -> None:
        self.panes.append((record.value["window"][0], record.value["value"]))
        self.watermarks.append(context.watermark)


class _Panes(Computation):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str]] = []

    def process_record(self, context: Context, record: Record) -> None:
        value = record.value
        self.seen.append((value["window"][0], value["value"], value["pane"]["timing"]))


def run(rows: Any, *, shift: bool = False, **options: Any) -> tuple[_Seen, RunSummary]:
    """Count the rows of one key in windows of ten."""
    pipeline, seen, clock = Pipeline("bounded"), _Seen(), ManualClock()
    stream = pipeline.inject("s", key="k", at="t", **options)
    if shift:
        stream = stream.with_timestamps(lambda row, _: row["t"], name="same", late_data_horizon="unbounded")
    stream.window(FixedWindows(f"{_TEN}us")).combine(Count(), name="counts").apply(seen, name="seen")
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False)
    return seen, runner.run(pipeline, {"s": rows})


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "BUNDLE_RECORDS_MAX", _TEN)


class _Beat(Computation):
    """Keeps the times at which its timer fired, which sets itself again after ten."""

    def process_record(self, context: Context, record: Record) -> None:
        context.set_timer(record.at + _TEN)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), timer.at])
        context.set_timer(timer.at + _TEN)


def rows_at(times: Iterable[int]) -> list[dict[str, Any]]:
    return [{"k": "only", "t": at} for at in times]


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist])
def test_windows_of_sorted_input_close_before_its_end(make: Callable[[Any], Any]) -> None:
    """A window closes when its last row has been read."""
    seen, summary = run(make(rows_at(range(100))))

    assert seen.panes == [(start, _TEN) for start in range(0, 100, _TEN)]
    assert seen.watermarks == sorted(seen.watermarks)
    assert len(set(seen.watermarks)) > 7
    assert (summary.totals.late, summary.totals.dropped) == (0, 0)


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist])
def test_timers_fire_within_silences(make: Callable[[Any], Any]) -> None:
    """A silence is between rows that are all older, and rows that are all newer; an unreadable time is neither."""
    pipeline, clock = Pipeline("beats"), ManualClock()
    pipeline.inject("s", key="k", at="t", at_unit="us").apply(_Beat(), name="beats")
    times = [2, 1, 3, None, 1_001, 999, 1_000, 995, *range(1_010, 1_020), 5_000]
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, dead_letter_limit=None)
    runner.run(pipeline, {"s": make([{"k": "only", "t": at} for at in times])})

    (state,) = store.rows_view("beats").to_arrow()["state"].to_pylist()
    assert orjson.loads(state) == [*range(13, 995, 10), *range(1_029, 5_000, 10), 5_010]


@pytest.mark.parametrize("disorder", [3, 25, 1_000])
def test_no_row_is_late_whatever_the_order(disorder: int) -> None:
    """The watermark accounts for unread rows, whatever disorder the policy promises."""
    rng = SeededRng(disorder)
    times = sorted(range(100), key=lambda at: at + rng.random() * disorder)
    seen, summary = run(rows_at(times), watermark=BoundedDisorder(0))

    assert sorted(seen.panes) == [(start, _TEN) for start in range(0, 100, _TEN)]
    assert (summary.totals.late, summary.totals.dropped) == (0, 0)


@pytest.mark.parametrize("options", [{"watermark": Perfect()}, {"shift": True}])
def test_windows_wait_for_the_end_with_perfect_or_movable_times(options: dict[str, Any]) -> None:
    """Code that may move records freely could still produce for any window."""
    seen, summary = run(rows_at(range(100)), **options)

    assert seen.panes == [(start, _TEN) for start in range(0, 100, _TEN)]
    assert len(set(seen.watermarks)) < 3
    assert summary.totals.late == 0


def by_share(rows: Any, **options: Any) -> list[tuple[int, int, str]]:
    """Run windows of ten that fire at 80 % and at their end; return start, size and timing of each pane."""
    pipeline, panes, clock = Pipeline("bounded"), _Panes(), ManualClock()
    stream = pipeline.inject("s", key="k", at="t", **options)
    tiers = AfterEach(WatermarkPercentile(80), WatermarkPercentile(100))
    windows = stream.window(FixedWindows(f"{_TEN}us"), trigger=tiers, accumulation="accumulating")
    windows.combine(Count(), name="counts").apply(panes, name="panes")
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"s": rows})
    return panes.seen


@pytest.mark.parametrize("make", [list, pa.Table.from_pylist])
def test_windows_fire_early_at_a_percentile(make: Callable[[Any], Any]) -> None:
    """One row in ten is delayed by fifty; the early pane lacks it."""
    delayed = [at for at in range(100) if at % _TEN == 3]
    order = sorted(range(100), key=lambda at: at + 50 if at in delayed else at)
    panes = by_share(make(rows_at(order)))

    for start in range(0, 40, _TEN):
        mine = [pane[1:] for pane in panes if pane[0] == start]
        assert mine == [(_TEN - 1, "early"), (_TEN, "on_time")]
    assert {pane[0] for pane in panes if pane[1:] == (_TEN, "on_time")} == set(range(0, 100, _TEN))


def test_percentiles_wait_for_the_end_with_perfect() -> None:
    panes = by_share(rows_at(range(100)), watermark=Perfect())

    assert {pane[1] for pane in panes} == {_TEN}


def test_several_inputs_advance_together() -> None:
    """The input that is furthest behind is read next, so a join closes its windows early."""
    pipeline, seen, clock = Pipeline("join"), _Seen(), ManualClock()
    streams = {name: pipeline.inject(name, key="k", at="t") for name in ("left", "right")}
    strategy = WindowingStrategy(window_fn=FixedWindows(f"{_TEN}us"))
    co_group(streams, strategy, name="joined").apply(seen, name="seen")
    runner = LocalRunner(Store.in_memory(clock=clock, rng=SeededRng(1)), clock=clock, progress=False)
    runner.run(pipeline, {"left": rows_at(range(100)), "right": rows_at(range(60))})

    assert [start for start, _ in seen.panes] == list(range(0, 100, _TEN))
    assert len(set(seen.watermarks)) > 7


def test_row_without_a_time_does_not_hold_the_watermark() -> None:
    """The row becomes a dead letter."""
    rows: list[dict[str, Any]] = [*rows_at(range(30)), {"k": "only", "t": "soon"}, *rows_at(range(30, 60))]
    seen, summary = run(rows)

    assert [start for start, _ in seen.panes] == list(range(0, 60, _TEN))
    assert summary.totals.dead_letters == 1
    assert len(set(seen.watermarks)) > 3
