"""Low watermarks: the equations, the interval map, and what a restart keeps."""

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
    """The stream s is injected, a consumes it, b consumes a."""
    pipeline = EnginePipeline("p")
    pipeline.inject("s", key="k", at="t").apply(Computation(), name="a").apply(Computation(), name="b")
    return WatermarkAuthority(pipeline.check())


class TestEquations:
    def test_nothing_is_known_at_first(self):
        """Before an injector says anything every watermark is before all time."""
        authority = a_chain()

        assert authority.input_watermark("b") == TIME_MIN_US
        assert authority.injector_watermark("s") == TIME_MIN_US

    def test_the_injector_reaches_the_end_of_the_chain(self):
        """With nothing pending, every computation is as far as the injector."""
        authority = a_chain()

        authority.update_injector("s", 100)

        assert authority.input_watermarks() == {"a": 100, "b": 100}
        assert authority.output_watermark("b") == 100

    def test_a_hold_binds_the_output_and_not_the_input(self):
        """A pending timer holds what follows, and never its own firing."""
        authority = a_chain()
        authority.update_interval(Interval("a"), 1, 40)

        authority.update_injector("s", 100)

        assert authority.input_watermark("a") == 100
        assert authority.output_watermark("a") == 40
        assert authority.input_watermark("b") == 40

    def test_an_undelivered_production_binds_its_consumer(self):
        """A production counts until it has been consumed, also once its producer owes nothing."""
        authority = a_chain()
        authority.set_undelivered({"a": 30})
        authority.update_injector("s", 100)

        assert authority.output_watermark("a") == 100
        assert authority.input_watermark("b") == 30
        authority.set_undelivered({})
        assert authority.input_watermark("b") == 100

    def test_a_published_watermark_never_falls(self):
        """Late work holds nothing back that has been published, and counts again above it."""
        authority = a_chain()
        authority.update_injector("s", 100)
        assert authority.input_watermark("b") == 100

        authority.update_interval(Interval("a"), 1, 20)
        authority.update_injector("s", 200)

        assert authority.input_watermark("b") == 100
        assert authority.output_watermark("a") == 100
        authority.update_interval(Interval("a"), 1, 150)
        assert authority.input_watermark("b") == 150

    def test_the_slowest_of_several_inputs_counts(self):
        """A computation with two inputs waits for both."""
        pipeline = EnginePipeline("p")
        for name in ("s", "t"):
            pipeline.inject(name, key="k", at="t")
        pipeline.add(Computation(), name="join", subscribes={"s": None, "t": None})
        authority = WatermarkAuthority(pipeline.check())

        authority.update_injector("s", 100)
        assert authority.input_watermark("join") == TIME_MIN_US
        authority.update_injector("t", 70)
        assert authority.input_watermark("join") == 70

    def test_a_cycle_takes_the_greatest_solution(self):
        """A computation that feeds itself waits for its productions and holds only."""
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

    def test_dead_letters_come_from_every_computation(self):
        """A consumer of dead letters waits for all computations and all injectors."""
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

    def test_two_cycles_that_share_a_computation_are_solved(self):
        """The least bound on any way to a computation is its input."""
        consumers = {"a": ["b", "c"], "b": ["a"], "c": ["a"]}
        inputs = solve_inputs(consumers, {"a": 90, "b": 80, "c": 95}, {"a": 85, "b": 99, "c": 70})

        assert inputs == {"a": 70, "b": 70, "c": 70}

    def test_a_horizon_holds_back_all_that_follows(self):
        """Also where the longer way round is the older one; the ends of time are not shifted."""
        consumers = {"a": ["b", "c"], "b": ["c"], "c": []}
        free = dict.fromkeys("abc", TIME_MAX_US)

        def inputs(base: int) -> dict[str, int]:
            return solve_inputs(consumers, {**free, "a": base}, free, {"a": 10, "b": 5})

        assert inputs(90) == {"a": 90, "b": 80, "c": 75}
        assert inputs(TIME_MIN_US) == dict.fromkeys("abc", TIME_MIN_US)
        assert inputs(TIME_MAX_US) == free


class TestAuthority:
    def test_a_former_owner_is_refused(self):
        """Only the newest owner of an interval may speak for it."""
        authority = a_chain()
        authority.update_interval(Interval("a"), 7, 10)

        with pytest.raises(FencedError, match="sequencer=`6`"):
            authority.update_interval(Interval("a"), 6, 99)

    def test_a_restart_never_falls_below_the_journal(self):
        """Journaled watermarks stand from the start; those of vanished computations are ignored."""
        authority = a_chain()

        authority.restore({"a": 80, "gone": 5})

        assert authority.input_watermark("a") == 80
        assert authority.input_watermark("b") == TIME_MIN_US

    def test_an_injector_that_falls_back_changes_nothing(self):
        """Injector watermarks are taken at their highest."""
        authority = a_chain()
        authority.update_injector("s", 100)

        authority.update_injector("s", 60)

        assert authority.injector_watermark("s") == 100

    def test_strangers_are_refused_by_name(self):
        """Streams and computations that the pipeline does not have are mistakes."""
        with pytest.raises(InvalidError, match="stream=`x`"):
            a_chain().update_injector("x", 1)
        with pytest.raises(InvalidError, match="computation=`x`"):
            a_chain().update_interval(Interval("x"), 1, None)


class TestIntervalMap:
    def test_the_oldest_hold_of_all_intervals_counts(self):
        """The minimum follows every report."""
        holds = IntervalMap()
        assert holds.least == TIME_MAX_US
        holds.report(Interval("c", "", "m"), 1, 30)
        holds.report(Interval("c", "m"), 1, 20)
        assert holds.least == 20
        holds.report(Interval("c", "m"), 1, None)
        assert holds.least == 30

    def test_a_split_replaces_exactly_its_keys(self):
        """Keys that a new interval does not cover keep what was last said of them."""
        holds = IntervalMap()
        holds.report(Interval("c"), 1, 10)

        holds.report(Interval("c", "g", "p"), 2, 50)
        assert (len(holds), holds.least) == (3, 10)
        holds.report(Interval("c", "", "g"), 2, 60)
        assert holds.least == 10
        holds.report(Interval("c", "p"), 2, 70)
        assert holds.least == 50

    def test_a_merge_replaces_all_that_it_covers(self):
        """One owner of all keys speaks for all of them."""
        holds = IntervalMap()
        for low, high in (("", "g"), ("g", "p"), ("p", None)):
            holds.report(Interval("c", low, high), 3, 10)

        holds.report(Interval("c"), 4, 90)

        assert (len(holds), holds.least) == (1, 90)

    def test_an_owner_is_fenced_by_any_part_that_it_lost(self):
        """A report is refused whole, and nothing changes, if a part of it has a newer owner."""
        holds = IntervalMap()
        holds.report(Interval("c"), 1, 10)
        holds.report(Interval("c", "m"), 5, 40)

        with pytest.raises(FencedError):
            holds.report(Interval("c"), 4, 90)

        assert (len(holds), holds.least) == (2, 10)

    def test_memory_does_not_grow_with_the_number_of_reports(self):
        """Dead entries of the heap are swept out."""
        holds = IntervalMap()
        for hold in range(10_000, 0, -1):
            holds.report(Interval("c"), 1, hold)

        assert holds.least == 1
        assert len(holds._heap) < 200
