"""Holds of states and timers at percentiles: what user code may do, and what is kept of it."""

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
    """Calls what each record brings."""

    percentiles = (50,)

    def process_record(self, context: Any, record: Any) -> None:
        """Call it."""
        record.value(context)

    def process_timer(self, context: Any, timer: Any) -> None:
        """Say which timer it was."""
        context.produce("out", [timer.tag, timer.percentile], at=context.state.held_at or timer.output_at)


def start(computation: Computation | None = None) -> IntervalRun:
    """A computation that stops at the first error."""
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
    """A bundle with one record at ``at`` (none without a hook), committed."""
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
    """The times of what was produced."""
    rows = [] if result.updates is None else result.updates.column("productions").to_pylist()
    return [round(production["at"].timestamp() * 1e6) for row in rows for production in row or []]


def test_a_hold_is_owed_until_it_is_released():
    """A hold is part of the row, with or without a state."""
    run = start()

    assert call(run, 10, lambda context: context.state.hold(10)).pending.hold == 10
    assert call(run, 30, lambda context: context.state.set(1), watermark=30).pending.hold == 10
    assert call(run, 40, lambda context: context.state.release()).pending.hold is None


def test_holds_have_names():
    """The oldest counts; setting one again replaces it."""
    run = start()

    def hook(context: Any) -> None:
        context.state.hold(20, "a")
        context.state.hold(30, "b")
        context.state.hold(50, "a")

    assert call(run, 10, hook).pending.hold == 30
    assert call(run, 60, lambda context: context.state.release("b")).pending.hold == 50


def test_deleting_the_state_releases_what_it_held():
    """Timers stay."""
    run = start()

    def hook(context: Any) -> None:
        context.state.set(1)
        context.state.hold(20)
        context.set_timer(90)

    call(run, 10, hook)

    assert call(run, 60, lambda context: context.state.delete()).pending.hold == 90


def test_the_key_may_produce_at_the_time_that_it_holds():
    """Though its input is later by now; not below that."""
    run = start()
    call(run, 10, lambda context: context.state.hold(10))

    made = call(run, 50, lambda context: context.produce("out", 1, at=10))

    assert times(made) == [10]
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 60, lambda context: context.produce("out", 1, at=9))


def test_a_timer_may_produce_at_the_time_that_is_held():
    """The hold is there when the timer fires."""
    run = start()

    def hook(context: Any) -> None:
        context.state.hold(10)
        context.set_timer(90)

    call(run, 10, hook)

    assert times(call(run, 0, None, watermark=90)) == [10]


def test_the_key_may_produce_at_the_time_that_a_timer_owes():
    """No watermark has passed it: so may a new timer, and a hook that replaces the timer."""
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


def test_a_horizon_goes_below_records_and_not_below_timers():
    """For a timer, only its output time has been held."""

    class Back(Call):
        late_data_horizon = 5

        def process_timer(self, context: Any, timer: Any) -> None:
            context.produce("out", 1, at=context.oldest_at)
            context.produce("out", 1, at=timer.output_at - 1)

    run = start(Back())

    assert times(call(run, 10, lambda context: context.produce("out", 1, at=5))) == [5]
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 10, lambda context: context.produce("out", 1, at=4))
    with pytest.raises(InvalidError, match="before the input"):
        call(run, 10, lambda context: context.set_timer(10), watermark=10)


def test_without_bound_anything_may_be_produced():
    """Openly late, from records and from timers."""

    class Back(Call):
        late_data_horizon = "unbounded"

        def process_timer(self, context: Any, timer: Any) -> None:
            context.produce("out", 1, at=timer.output_at - 2_000)

    def hook(context: Any) -> None:
        context.produce("out", 1, at=-1_000)
        context.set_timer(10)

    assert times(call(start(Back()), 10, hook, watermark=10)) == [-1_000, -1_990]


def test_a_hold_below_the_input_is_refused():
    """The watermark may have passed it already."""
    with pytest.raises(InvalidError, match="must not be before the input"):
        call(start(), 10, lambda context: context.state.hold(9))


def test_only_declared_percentiles_may_be_asked_for():
    """The others are not kept."""
    with pytest.raises(InvalidError, match="does not declare this percentile"):
        call(start(), 10, lambda context: context.watermark_at(60))
    with pytest.raises(InvalidError, match="does not declare this percentile"):
        call(start(), 10, lambda context: context.set_timer(20, percentile=60))
    with pytest.raises(InvalidError, match="only event time has percentiles"):
        call(start(), 10, lambda context: context.set_timer(20, domain="wall", percentile=50))
    with pytest.raises(InvalidError, match="event or wall"):
        call(start(), 10, lambda context: context.set_timer(20, domain="hold"))


def test_a_percentile_timer_fires_at_its_own_watermark():
    """Not before, and the low watermark is not waited for."""
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


def test_setting_a_timer_again_may_change_its_percentile():
    """Tag and domain are the timer's name, whatever it waits for."""
    run = start()
    call(run, 10, lambda context: context.set_timer(20, percentile=50))

    result = call(run, 10, lambda context: context.set_timer(20))

    assert (result.pending.next_event_timer, result.pending.next_percentile_timers) == (20, {})


def test_a_new_owner_finds_all_of_it():
    """Holds and percentile timers are in the committed files, for the driver and for a worker."""
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


def test_the_oldest_but_a_share():
    """At most the allowed percentage is left out, and never all."""
    at = np.array([5, 1, 4, 2, 3])

    assert oldest_but(at, [100, 81, 80, 50, 1]) == {100: 1, 81: 1, 80: 2, 50: 3, 1: 5}
    assert oldest_but(np.array([7]), [0.1]) == {0.1: 7}
