"""Names of triggers' timers, as rows store them."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.composite_triggers import Repeatedly
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.trigger import Trigger, TriggerContext, TriggerTimer, parse_timer
from millpond.executor.windows.window import Window, WindowState
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class _AtTag(Trigger):
    """A trigger that fires five microseconds after each element, by a timer with the given tag."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def on_element(self, context, element) -> None:
        context.set_timer(element.at + 5, tag=self.tag)

    def on_timer(self, context, timer) -> None:
        context.set("due", timer.tag)

    def should_fire(self, context) -> bool:
        return context.get("due") == self.tag

    def on_fire(self, context) -> bool:
        context.clear()
        return True


class _Keep(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


@pytest.mark.parametrize("tag", ["a|b", "|", "a%7Cb", "50%", "~x", "ü|ß", ""])
def test_triggers_timer_fires_with_any_tag(tag):
    pipeline = Pipeline("p")
    stream = pipeline.inject("in", key="k", at="at")
    counts = stream.window(FixedWindows("100us"), trigger=Repeatedly(_AtTag(tag))).combine(
        Count(), name="counts"
    )
    counts.apply(_Keep(), name="kept")
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    rows = [{"k": "a", "at": at} for at in (1, 2, 50)]

    LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"in": rows})

    assert not len(store.rows_view("dead_letters").to_arrow())
    [row] = store.rows_view("kept").to_arrow().to_pylist()
    assert orjson.loads(row["state"]) == [3]


@given(
    st.text(),
    st.text(),
    st.sampled_from([(TimeDomain.EVENT, 100.0), (TimeDomain.EVENT, 99.5), (TimeDomain.WALL, 100.0)]),
)
def test_timer_text_survives_a_round_trip(path, tag, clock):
    timer = TriggerTimer(path, tag, *clock)

    assert parse_timer(timer.to_text()) == timer


@pytest.mark.parametrize("tag", ["", "end", "50%", "a%7Cb"])
def test_timer_text_without_separators_is_unescaped(tag):
    """Existing stores contain such texts."""
    assert TriggerTimer("0/", tag, TimeDomain.EVENT).to_text() == f"0/|{tag}|event"
    assert parse_timer(f"0/|{tag}|event").tag == tag


def test_clear_deletes_only_the_triggers_own_timers():
    state = WindowState(window=Window(0, 10))
    root = TriggerContext(state, 0, 0)
    for context in (root, root.child(1), root.child("1|")):
        context.set_timer(5, tag="a|b")
        context.set_timer(5, tag="plain")

    root.child(1).clear()

    assert sorted({parse_timer(text).path for text in state.timers}) == ["", "1|/"]
