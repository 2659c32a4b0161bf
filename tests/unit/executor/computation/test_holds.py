"""Holds of states, and timers at percentiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.timers import oldest_but
from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.ownership.ownership import scan_interval
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from tests.fixtures.interval_run import IntervalRun

INTERVAL = Interval("c")
Hook = Callable[[Any], None]


class Call(Computation):
    """A computation that calls the function in each record."""

    percentiles = (50,)

    def process_record(self, context: Any, record: Any) -> None:
        record.value(context)

    def process_timer(self, context: Any, timer: Any) -> None:
        context.produce("out", [timer.tag, timer.percentile], at=context.state.held_at or timer.output_at)


def start(computation: Computation | None = None) -> IntervalRun:
    node = ComputationNode(
        name="c",
        computation=computation or Call(),
        subscriptions=(),
        produces=("out",),
        retries=0,
        on_error="stop",
    )
    return IntervalRun(node, INTERVAL)


def call(run: IntervalRun, at: int, hook: Hook | None, watermark: int = 0, mark: int = 0) -> BundleResult:
    deliveries = []
    if hook is not None:
        keys = pa.array(["k"])
        deliveries = [Deliveries(stream="s", keys=keys, at=np.array([at]), values=PythonValues([hook]))]
    bundle = run.bundle(deliveries, watermark)
    bundle = replace(bundle, plan=replace(bundle.plan, percentile_watermarks={50.0: max(mark, watermark)}))
    attempt = run.attempt(bundle)
    run.commit(attempt)
    return attempt.result


def times(result: BundleResult) -> list[int]:
    rows = [] if result.updates is None else result.updates.column("productions").to_pylist()
    return [round(production["at"].timestamp() * 1e6) for row in rows for production in row or []]


def test_hold_lasts_until_released_with_or_without_state():
    run = start()

    assert call(run, 10, lambda context: context.state.hold(10)).pending.hold == 10
    assert call(run, 30, lambda context: context.state.set(1), watermark=30).pending.hold == 10
    assert call(run, 40, lambda context: context.state.release()).pending.hold is None


def test_oldest_of_the_named_holds_counts():
    """A second hold of the same name replaces the first."""
    run = start()

    def hook(context: Any) -> None:
        context.state.hold(20, "a")
        context.state.hold(30, "b")
        context.state.hold(50, "a")

    assert call(run, 10, hook).pending.hold == 30
    assert call(run, 60, lambda context: context.state.release("b")).pending.hold == 50


def test_deleting_the_state_releases_holds_but_not_timers():
    run = start()

    def hook(context: Any) -> None:
        context.state.set(1)
        context.state.hold(20)
        context.set_timer(90)

    call(run, 10, hook)

    assert call(run, 60, lambda context: context.state.delete()).pending.hold == 90


def test_production_time_may_go_back_to_the_hold():
    run = start()
    call(run, 10, lambda context: context.state.hold(10))

    made = call(run, 50, lambda context: context.produce("out", 1, at=10))

    assert times(made) == [10]
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 60, lambda context: context.produce("out", 1, at=9))


def test_timers_production_time_may_go_back_to_the_hold():
    run = start()

    def hook(context: Any) -> None:
        context.state.hold(10)
        context.set_timer(90)

    call(run, 10, hook)

    assert times(call(run, 0, None, watermark=90)) == [10]


def test_production_time_may_go_back_to_a_pending_timers_output():
    """No watermark has passed that time, so a new timer may hold it too."""
    run = start()
    call(run, 10, lambda context: context.set_timer(90, output_at=20))

    def hook(context: Any) -> None:
        context.set_timer(90, output_at=70)
        context.produce("out", 1, at=context.oldest_at)
        context.set_timer(80, "other", output_at=30)

    made = call(run, 60, hook)

    assert times(made) == [20]
    assert made.pending.hold == 30
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 65, lambda context: context.produce("out", 1, at=29))


def test_late_data_horizon_applies_to_records_but_not_timers():
    """For a timer only its output time has been held."""

    class Back(Call):
        late_data_horizon = "5us"

        def process_timer(self, context: Any, timer: Any) -> None:
            context.produce("out", 1, at=context.oldest_at)
            context.produce("out", 1, at=timer.output_at - 1)

    run = start(Back())

    assert times(call(run, 10, lambda context: context.produce("out", 1, at=5))) == [5]
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 10, lambda context: context.produce("out", 1, at=4))
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 10, lambda context: context.set_timer(10), watermark=10)


def test_unbounded_horizon_allows_any_production_time():
    class Back(Call):
        late_data_horizon = "unbounded"

        def process_timer(self, context: Any, timer: Any) -> None:
            context.produce("out", 1, at=timer.output_at - 2_000)

    def hook(context: Any) -> None:
        context.produce("out", 1, at=-1_000)
        context.set_timer(10)

    assert times(call(start(Back()), 10, hook, watermark=10)) == [-1_000, -1_990]


def test_hold_below_the_input_is_refused():
    """The watermark may already have passed that time."""
    with pytest.raises(InvalidError, match="must not be before the input"):
        call(start(), 10, lambda context: context.state.hold(9))


def test_undeclared_percentile_is_refused():
    """The engine keeps watermarks only for declared percentiles."""
    with pytest.raises(InvalidError, match="does not declare this percentile"):
        call(start(), 10, lambda context: context.watermark_at(60))
    with pytest.raises(InvalidError, match="does not declare this percentile"):
        call(start(), 10, lambda context: context.set_timer(20, percentile=60))
    with pytest.raises(InvalidError, match="only event time has percentiles"):
        call(start(), 10, lambda context: context.set_timer(20, domain="wall", percentile=50))
    with pytest.raises(InvalidError, match="event or wall"):
        call(start(), 10, lambda context: context.set_timer(20, domain="hold"))


def test_percentile_timer_does_not_wait_for_the_low_watermark():
    run = start()
    result = call(run, 10, lambda context: context.set_timer(20, "early", percentile=50), mark=19)

    assert (result.pending.next_event_timer, result.pending.next_percentile_timers, result.pending.hold) == (
        None,
        {50.0: 20},
        20,
    )
    fired = call(run, 0, None, watermark=5, mark=20)

    assert (fired.statistics.timers, fired.pending.next_percentile_timers, fired.pending.hold) == (
        1,
        {},
        None,
    )


def test_setting_a_timer_again_can_change_its_percentile():
    """Tag and domain alone identify a timer."""
    run = start()
    call(run, 10, lambda context: context.set_timer(20, percentile=50))

    result = call(run, 10, lambda context: context.set_timer(20))

    assert (result.pending.next_event_timer, result.pending.next_percentile_timers) == (20, {})


def test_new_owner_reads_holds_and_percentile_timers_from_files():
    run = start()

    def hook(context: Any) -> None:
        context.state.hold(10)
        context.set_timer(20, percentile=50)

    call(run, 10, hook)
    summary = scan_interval(run.objects, INTERVAL, run.files, (50.0,))
    run.soft_state().reset()

    assert (summary.hold, summary.next_percentile_timers, summary.percentile_holds) == (
        10,
        {50.0: 20},
        {50.0: 10},
    )
    assert (summary.next_event_timer, summary.next_wall_timer) == (None, None)
    result = call(run, 0, None, watermark=5, mark=20)
    assert (result.statistics.timers, result.pending.hold, times(result)) == (1, 10, [10])


def test_oldest_but_omits_at_most_the_allowed_share():
    """At least one time always remains."""
    at = np.array([5, 1, 4, 2, 3])

    assert oldest_but(at, [100, 81, 80, 50, 1]) == {100: 1, 81: 1, 80: 2, 50: 3, 1: 5}
    assert oldest_but(np.array([7]), [0.1]) == {0.1: 7}
