"""Windows and timers in cycles, and feedback streams."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.time_triggers import AfterWatermark
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.feedback import DAY_US, pages, pages_by_day


class _Late(Computation):
    """An event timer at ten that holds a production at five."""

    def __init__(self, holds: bool = True, at: int = 10) -> None:
        self.holds = holds
        self.at = at

    def process_record(self, context: Context, record: Record) -> None:
        context.set_timer(self.at, "end", output_at=max(5, record.at), holds=self.holds)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set(timer.output_at)


def _looping(computation: Computation, **options: Any) -> Pipeline:
    pipeline = Pipeline("loops")
    pipeline.inject("in", key="k", at="t")
    pipeline.add(
        computation, name="late", subscribes={"in": None, "again": None}, produces=["out"], **options
    )
    pipeline.stream("out").map(lambda value: value, name="again")
    return pipeline


def _run(pipeline: Pipeline, stream: str, rows: list[dict[str, Any]]) -> Store:
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {stream: rows})
    return store


class TestRefusedCycles:
    """Topologies in which a step would wait for its own output."""

    def test_windows_in_a_cycle_are_refused_and_the_cycle_is_named(self):
        """The window would wait for a watermark that it holds itself; the error names `feedback` as the way
        out.
        """
        with pytest.raises(InvalidError) as refusal:
            pages_by_day(feedback=False).check()

        text = str(refusal.value)
        assert "computation=`days`" in text
        assert "`['days', 'next_pages', 'days']`" in text
        assert "`['days', 'urls']`" in text
        assert "feedback" in text

    def test_windows_over_dead_letters_are_refused_unless_their_own_are_a_feedback(self):
        """A step that reads dead letters is in a cycle with its own."""
        for feedback, is_refused in (((), True), ((DEAD_LETTERS,), False)):
            pipeline = Pipeline("letters")
            pipeline.inject("in", key="k", at="t").map(lambda value: value, name="copy")
            letters = pipeline.stream(DEAD_LETTERS).window(FixedWindows("10us"))
            letters.combine(Count(), name="by_day", feedback=feedback)
            if is_refused:
                with pytest.raises(InvalidError, match="dead_letters"):
                    pipeline.check()
            else:
                pipeline.check()

    def test_timer_that_waits_for_itself_in_a_cycle_stops_the_run(self):
        """The timer holds the watermark below its own time, so it could never fire."""
        with pytest.raises(InvalidError, match=r"(?s)cycle.*`\['late', 'again', 'late'\]`"):
            _run(_looping(_Late()), "in", [{"k": "a", "t": 1}])

    @pytest.mark.parametrize(
        ("computation", "options"),
        [(_Late(holds=False), {}), (_Late(at=5), {}), (_Late(), {"feedback": ["again"]})],
    )
    def test_other_timers_in_a_cycle_fire(self, computation, options):
        """The timer holds nothing, holds its own time, or its cycle has a feedback."""
        store = _run(_looping(computation, **options), "in", [{"k": "a", "t": 1}])

        assert [row["key"] for row in store.rows_view("late").to_arrow().to_pylist() if row["state"]] == ["a"]

    def test_bounded_run_warns_of_unreleased_holds(self, caplog):
        """Code that holds a time before its event timers keeps them from firing."""

        class Holding(_Late):
            def process_record(self, context: Context, record: Record) -> None:
                context.state.hold(record.at)
                context.set_timer(record.at + 10)

        _run(_looping(Holding()), "in", [{"k": "a", "t": 1}])

        [warning] = caplog.messages
        assert "watermarks=`{'late': 1, 'again': 1}`" in warning

    def test_feedback_must_be_an_input_that_closes_a_cycle(self):
        with pytest.raises(InvalidError, match="feedback must name streams that the computation consumes"):
            _looping(_Late(), feedback=["elsewhere"])
        with pytest.raises(InvalidError, match="no output of the computation ever returns"):
            _looping(_Late(), feedback=["in", "again"]).check()
        with pytest.raises(InvalidError, match="list of streams"):
            _looping(_Late(), feedback="again")

    def test_feedback_must_not_be_the_only_input(self):
        """With feedbacks only, nothing would hold the watermark, and every record would be late."""
        pipeline = Pipeline("loops")
        pipeline.inject("in", key="k", at="t")
        pipeline.add(Computation(), name="first", subscribes={"in": None, "again": None}, produces=["out"])
        pipeline.add(
            Computation(), name="second", subscribes={"out": None}, produces=["again"], feedback=["out"]
        )
        with pytest.raises(InvalidError, match=r"(?s)would be late.*computation=`second`.*`\['out'\]`"):
            pipeline.check()


class TestFeedback:
    """A cycle in which one edge does not hold the watermark."""

    def test_bounded_run_emits_every_window_of_a_cycle(self):
        store = _run(pages_by_day(feedback=True), "pages", pages(3))

        counts = {row["key"]: row for row in store.rows_view("seen").to_arrow().to_pylist()}
        assert {key: row["state"] for key, row in counts.items()} == {"page": "[[0,1],[1,2],[2,2]]"}

    def test_production_on_a_feedback_holds_the_watermark_until_delivered(self):
        """So a feedback's record is late only if the watermark had already passed its time."""
        clock = ManualClock()
        store = Store.in_memory(clock=clock, rng=SeededRng(1))
        run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(
            pages_by_day(feedback=True), stepping=True
        )
        run.inject("pages", pages(1))
        run.step()
        run.advance_watermark("pages", 3 * DAY_US)
        run.run_until_quiet()

        assert run.watermark("days") == 3 * DAY_US
        run.finish("pages")
        assert run.run_until_quiet()
        assert run.watermark("days") == TIME_MAX_US
        run.stop()


def test_windows_next_to_a_cycle_need_no_feedback():
    pipeline = _looping(_Late(at=5))
    pipeline.stream("out").window(FixedWindows("10us"), trigger=AfterWatermark()).combine(
        Count(), name="counts"
    )

    assert pipeline.check().computations["counts"].cycle == ()
    assert pipeline.check().computations["late"].cycle == ("late", "again", "late")
