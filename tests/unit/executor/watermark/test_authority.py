"""Low watermarks of computations."""

from __future__ import annotations

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.watermark.authority import IntervalMap, WatermarkAuthority, solve_inputs
from millpond.statestore.errors import FencedError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


def a_chain() -> WatermarkAuthority:
    """Chain stream s → a → b."""
    pipeline = EnginePipeline("p")
    pipeline.inject("s", key="k", at="t").apply(Computation(), name="a").apply(Computation(), name="b")
    return WatermarkAuthority(pipeline.check())


class TestEquations:
    def test_watermarks_start_before_all_time(self):
        authority = a_chain()

        assert authority.input_watermark("b") == TIME_MIN_US
        assert authority.injected["s"] == TIME_MIN_US

    def test_injector_watermark_reaches_the_end_of_the_chain(self):
        """Nothing is pending."""
        authority = a_chain()

        authority.update_injector("s", 100)

        assert authority.input_watermarks() == {"a": 100, "b": 100}
        assert authority.output_watermarks()["b"] == 100

    def test_hold_binds_the_output_but_not_the_input(self):
        """Otherwise a pending timer would keep itself from firing."""
        authority = a_chain()
        authority.update_interval(Interval("a"), 1, 40)

        authority.update_injector("s", 100)

        assert authority.input_watermark("a") == 100
        assert authority.output_watermarks()["a"] == 40
        assert authority.input_watermark("b") == 40

    def test_undelivered_production_binds_its_consumer(self):
        """It counts until consumed, even when its producer has no holds."""
        authority = a_chain()
        authority.set_undelivered({"a": 30})
        authority.update_injector("s", 100)

        assert authority.output_watermarks()["a"] == 100
        assert authority.input_watermark("b") == 30
        authority.set_undelivered({})
        assert authority.input_watermark("b") == 100

    def test_published_watermark_never_falls(self):
        """Later work with an older time binds only above the published value."""
        authority = a_chain()
        authority.update_injector("s", 100)
        assert authority.input_watermark("b") == 100

        authority.update_interval(Interval("a"), 1, 20)
        authority.update_injector("s", 200)

        assert authority.input_watermark("b") == 100
        assert authority.output_watermarks()["a"] == 100
        authority.update_interval(Interval("a"), 1, 150)
        assert authority.input_watermark("b") == 150

    def test_slowest_of_several_inputs_decides(self):
        pipeline = EnginePipeline("p")
        for name in ("s", "t"):
            pipeline.inject(name, key="k", at="t")
        pipeline.add(Computation(), name="join", subscribes={"s": None, "t": None})
        authority = WatermarkAuthority(pipeline.check())

        authority.update_injector("s", 100)
        assert authority.input_watermark("join") == TIME_MIN_US
        authority.update_injector("t", 70)
        assert authority.input_watermark("join") == 70

    def test_cycle_takes_the_greatest_solution(self):
        """The computation waits only for its productions and holds."""
        pipeline = EnginePipeline("p")
        pipeline.inject("s", key="k", at="t")
        pipeline.add(Computation(), name="loop", subscribes={"s": None, "again": None}, produces=["again"])
        authority = WatermarkAuthority(pipeline.check())

        authority.update_injector("s", 100)
        assert authority.input_watermark("loop") == 100
        authority.set_undelivered({"again": 120})
        authority.update_interval(Interval("loop"), 1, 130)
        authority.update_injector("s", TIME_MAX_US)
        assert authority.input_watermark("loop") == 120
        authority.set_undelivered({})
        assert authority.input_watermark("loop") == 130

    def test_consumer_of_dead_letters_waits_for_every_computation(self):
        """Any of them may still produce a letter."""
        pipeline = EnginePipeline("p")
        pipeline.inject("s", key="k", at="t").apply(Computation(), name="a")
        pipeline.inject("idle", key="k", at="t")
        pipeline.stream(DEAD_LETTERS).apply(Computation(), name="mourner")
        authority = WatermarkAuthority(pipeline.check())
        authority.update_injector("s", 100)

        assert authority.input_watermark("mourner") == TIME_MIN_US
        authority.update_injector("idle", 200)
        assert authority.input_watermark("mourner") == 100
        authority.update_interval(Interval("a"), 1, 50)
        authority.update_injector("s", 300)
        assert authority.input_watermark("mourner") == 100

    def test_cycles_that_share_a_computation_are_solved(self):
        """The least bound on any path to a computation is its input."""
        consumers = {"a": ["b", "c"], "b": ["a"], "c": ["a"]}
        inputs = solve_inputs(consumers, {"a": 90, "b": 80, "c": 95}, {"a": 85, "b": 99, "c": 70})

        assert inputs == {"a": 70, "b": 70, "c": 70}

    def test_late_data_horizon_lowers_the_watermarks_downstream(self):
        """The longer path may give the lower bound; the ends of time are not shifted."""
        consumers = {"a": ["b", "c"], "b": ["c"], "c": []}
        free = dict.fromkeys("abc", TIME_MAX_US)

        def inputs(base: int) -> dict[str, int]:
            return solve_inputs(consumers, {**free, "a": base}, free, {"a": 10, "b": 5})

        assert inputs(90) == {"a": 90, "b": 80, "c": 75}
        assert inputs(TIME_MIN_US) == dict.fromkeys("abc", TIME_MIN_US)
        assert inputs(TIME_MAX_US) == free


class TestAuthority:
    def test_report_of_a_former_owner_is_fenced(self):
        authority = a_chain()
        authority.update_interval(Interval("a"), 7, 10)

        with pytest.raises(FencedError, match="sequencer=`6`"):
            authority.update_interval(Interval("a"), 6, 99)

    def test_restored_watermarks_are_the_start(self):
        """Those of removed computations are ignored."""
        authority = a_chain()

        authority.restore({"a": 80, "gone": 5})

        assert authority.input_watermark("a") == 80
        assert authority.input_watermark("b") == TIME_MIN_US

    def test_lower_injector_watermark_is_ignored(self):
        authority = a_chain()
        authority.update_injector("s", 100)

        authority.update_injector("s", 60)

        assert authority.injected["s"] == 100

    def test_unknown_streams_and_computations_are_refused(self):
        with pytest.raises(InvalidError, match="stream=`x`"):
            a_chain().update_injector("x", 1)
        with pytest.raises(InvalidError, match="computation=`x`"):
            a_chain().update_interval(Interval("x"), 1, None)


class TestIntervalMap:
    def test_oldest_hold_of_all_intervals_counts(self):
        holds = IntervalMap()
        assert holds.least == TIME_MAX_US
        holds.report(Interval("c", "", "m"), 1, 30)
        holds.report(Interval("c", "m"), 1, 20)
        assert holds.least == 20
        holds.report(Interval("c", "m"), 1, None)
        assert holds.least == 30

    def test_report_after_a_split_replaces_only_its_keys(self):
        holds = IntervalMap()
        holds.report(Interval("c"), 1, 10)

        holds.report(Interval("c", "g", "p"), 2, 50)
        assert (len(holds._pieces), holds.least) == (3, 10)
        holds.report(Interval("c", "", "g"), 2, 60)
        assert holds.least == 10
        holds.report(Interval("c", "p"), 2, 70)
        assert holds.least == 50

    def test_report_after_a_merge_replaces_all_parts(self):
        holds = IntervalMap()
        for low, high in (("", "g"), ("g", "p"), ("p", None)):
            holds.report(Interval("c", low, high), 3, 10)

        holds.report(Interval("c"), 4, 90)

        assert (len(holds._pieces), holds.least) == (1, 90)

    def test_report_with_a_lost_part_is_fenced(self):
        """Nothing may change, not even its other parts."""
        holds = IntervalMap()
        holds.report(Interval("c"), 1, 10)
        holds.report(Interval("c", "m"), 5, 40)

        with pytest.raises(FencedError):
            holds.report(Interval("c"), 4, 90)

        assert (len(holds._pieces), holds.least) == (2, 10)

    def test_heap_does_not_grow_with_the_number_of_reports(self):
        holds = IntervalMap()
        for hold in range(10_000, 0, -1):
            holds.report(Interval("c"), 1, hold)

        assert holds.least == 1
        assert len(holds._heap) < 200
