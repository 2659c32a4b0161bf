"""Triggers on their own, and their low-level API."""

from __future__ import annotations

import pickle

import pytest

from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.combiners import ToList
from millpond.executor.windows.composite_triggers import (
    AfterAll,
    AfterAny,
    AfterEach,
    Never,
    OrFinally,
    RepeatCount,
    Repeatedly,
    RepeatUntil,
)
from millpond.executor.windows.count_triggers import AfterBytes, AfterCount
from millpond.executor.windows.key_windows import KeyWindows, WindowStates
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.time_triggers import (
    AfterDelay,
    AfterProcessingTime,
    AfterWatermark,
    AtPeriod,
    Default,
    WatermarkPercentile,
    next_stroke,
)
from millpond.executor.windows.trigger import (
    Contents,
    Firing,
    Trigger,
    TriggerContext,
    TriggerEvent,
    TriggerTimer,
    parse_timer,
)
from millpond.executor.windows.window import Element, Window, WindowState
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros

_ALL: list[Trigger] = [
    AfterAll(AfterCount(1), AfterCount(2)),
    AfterAny(AfterCount(1), AfterBytes(2)),
    AfterDelay("1s"),
    AfterEach(AfterCount(1), AtPeriod(0, "1s")),
    AfterProcessingTime("1s", align_to="1m"),
    AfterWatermark(early=AfterCount(1), late=AfterCount(1)),
    Default(),
    Never(),
    OrFinally(Repeatedly(AfterCount(2)), AfterCount(5)),
    RepeatCount(AfterCount(1), 3),
    RepeatUntil(AfterCount(1), AfterDelay("1s", "event")),
    AfterEach(WatermarkPercentile(90), WatermarkPercentile(100)),
    WatermarkPercentile(100),
]

_MARKS = {90.0: EventTimeMicros(0)}


def _state() -> WindowState:
    return WindowState(window=Window(0, 10))


def _one(at: int = 1) -> Element:
    return Element(value=at, at=at, key="k")


@pytest.mark.parametrize("trigger", _ALL, ids=repr)
def test_trigger_survives_pickling(trigger: Trigger) -> None:
    assert pickle.loads(pickle.dumps(trigger)) == trigger


@pytest.mark.parametrize("trigger", _ALL, ids=repr)
def test_reset_deletes_state_and_timers(trigger: Trigger) -> None:
    """The timer at the window's end stays."""
    state = _state()
    context = TriggerContext(state, 0, 0, percentile_watermarks=_MARKS)
    trigger.on_element(context, _one())
    trigger.reset(context)

    assert state.trigger == {}
    assert set(state.timers.values()) <= {10}


@pytest.mark.parametrize("trigger", _ALL, ids=repr)
def test_bundle_has_the_same_effect_as_its_elements_one_by_one(trigger: Trigger) -> None:
    at_once, one_by_one = _state(), _state()
    elements = [_one(), _one(), _one()]
    trigger.on_elements(TriggerContext(at_once, 0, 0, percentile_watermarks=_MARKS), elements)
    for element in elements:
        trigger.on_element(TriggerContext(one_by_one, 0, 0, percentile_watermarks=_MARKS), element)

    assert (at_once.trigger, at_once.timers) == (one_by_one.trigger, one_by_one.timers)


def test_overridden_on_element_is_called_for_each_element_of_a_bundle() -> None:
    """The library's triggers have a faster `on_elements`, which would skip the override."""

    class Told(Default):
        def on_element(self, context: TriggerContext, element: Element) -> None:
            context.set("told", context.get("told", 0) + 1)

    state = _state()
    Told().on_elements(TriggerContext(state, 0, 0), [_one(), _one()])

    assert state.trigger == {"": {"told": 2}}


def test_mixins_on_element_is_called_for_each_element_of_a_bundle() -> None:
    class Doubling:
        def on_element(self, context: TriggerContext, element: Element) -> None:
            context.set("seen", context.get("seen", 0) + 2)

    class Doubled(Doubling, AfterCount):
        pass

    state = _state()
    Doubled(10).on_elements(TriggerContext(state, 0, 0), [_one(), _one()])

    assert TriggerContext(state, 0, 0).get("seen") == 4


def test_equal_children_count_separately() -> None:
    state = _state()
    trigger = AfterEach(AfterAll(AfterCount(2), AfterCount(2)), AfterCount(2))
    trigger.on_element(TriggerContext(state, 0, 0), _one())

    assert state.trigger == {"0/0/": {"seen": 1}, "0/1/": {"seen": 1}}


def test_timer_text_has_path_tag_and_clock() -> None:
    state = _state()
    Repeatedly(AfterProcessingTime("5us")).on_element(TriggerContext(state, 0, 100), _one())

    assert state.timers == {"r/||wall": 105}
    assert parse_timer("r/||wall") == TriggerTimer("r/", "", TimeDomain.WALL)


def test_custom_trigger_has_state_and_timers() -> None:
    class Debounce(Trigger):
        def on_element(self, context: TriggerContext, element: Element) -> None:
            context.set_timer(context.wall_time + 5, TimeDomain.WALL, "quiet")

        def on_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
            context.set("quiet", timer.tag == "quiet")

        def should_fire(self, context: TriggerContext) -> bool:
            return bool(context.get("quiet", False))

        def on_fire(self, context: TriggerContext) -> bool:
            return True

    state, trigger = _state(), Repeatedly(Debounce())
    trigger.on_element(TriggerContext(state, 0, 0), _one())
    trigger.on_element(TriggerContext(state, 0, 3), _one())
    context = TriggerContext(state, 0, 8)
    trigger.on_child_timer(context, parse_timer("r/|quiet|wall"))

    assert state.timers == {"r/|quiet|wall": 8}
    assert trigger.should_fire(context)
    assert trigger.fire(context) is False
    assert [event.path for event in context.history] == ["r/"]
    assert state.trigger == {}


def test_firing_label_names_the_innermost_triggers() -> None:
    events = [TriggerEvent("0/", "a", True), TriggerEvent("1/", "b", True), TriggerEvent("", "all", True)]

    assert Firing(events).label() == "a, b"


def test_sequence_ignores_timers_of_other_steps() -> None:
    """Here the second trigger's timer fires while the first is current."""
    state = _state()
    trigger = AfterEach(AfterCount(1), AfterProcessingTime("5us"))
    context = TriggerContext(state, 0, 0)
    trigger.on_element(context, _one())
    trigger.on_child_timer(context, TriggerTimer("1/", "", TimeDomain.WALL))

    assert trigger.should_fire(context)


@pytest.mark.parametrize(("now", "expected"), [(0, 5), (4, 5), (5, 15), (-6, -5), (-5, 5)])
def test_next_stroke_is_later_than_now(now: int, expected: int) -> None:
    assert next_stroke(now, 25, 10) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: AfterCount(0),
        lambda: AfterCount(True),
        lambda: AfterBytes(-1),
        AfterAny,
        lambda: AfterAll(AfterCount),  # type: ignore[arg-type]
        lambda: RepeatCount(AfterCount(1), 0),
        lambda: AfterDelay("-1us"),
        lambda: AfterDelay("1us", "lunar"),  # type: ignore[arg-type]
        lambda: AfterProcessingTime("1us", "event"),
        lambda: AtPeriod(0, 0),
        lambda: WatermarkPercentile(0),
        lambda: WatermarkPercentile(101),
        lambda: WatermarkPercentile(True),
    ],
)
def test_invalid_triggers_are_refused(make) -> None:
    with pytest.raises(InvalidError):
        make()


def test_composite_declares_the_percentiles_of_its_descendants() -> None:
    """The low watermark, percentile 100, needs no declaration."""
    tree = Repeatedly(
        OrFinally(
            AfterWatermark(early=WatermarkPercentile(50)),
            AfterEach(WatermarkPercentile(90), WatermarkPercentile(100)),
        )
    )

    assert tree.percentiles == {50.0, 90.0}
    assert Repeatedly(AfterCount(2)).percentiles == frozenset()


def test_each_percentile_has_its_own_watermark_and_timers() -> None:
    context = TriggerContext(
        _state(), 3, 0, percentile_watermarks={90.0: EventTimeMicros(12), 50.0: EventTimeMicros(20)}
    )
    context.set_timer(30)
    context.set_timer(40, percentile=90)

    assert [context.watermark_at(percentile) for percentile in (100, 90, 50)] == [3, 12, 20]
    with pytest.raises(InvalidError, match="must name a percentile"):
        context.watermark_at(75)
    assert [context.percentile_at(at) for at in (3, 12, 13, 21)] == [100, 90, 50, 0]
    assert (context.timer(), context.timer(percentile=90)) == (30, 40)
    context.delete_timer(percentile=90)
    assert (context.timer(), context.timer(percentile=90)) == (30, None)


def test_composite_sees_the_requests_of_its_direct_children() -> None:
    """The last request decides what happens to the contents."""

    class Asks(AfterCount):
        def on_fire(self, context: TriggerContext) -> bool:
            context.ask(Contents.CLEAR if self.count == 1 else Contents.KEEP)
            return True

    class Both(AfterAll):
        def on_fire(self, context: TriggerContext) -> bool:
            finished = AfterAll.on_fire(self, context)
            seen.extend((event.path, event.asked, event.is_finished) for event in context.history)
            return finished

    seen: list[tuple[str, Contents, bool]] = []
    both, state = Both(AfterAll(Asks(1)), Asks(2), AfterCount(1)), _state()
    context = TriggerContext(state, 0, 0)
    both.on_elements(context, [_one(), _one()])

    assert both.should_fire(context)
    assert both.fire(context)
    assert seen == [("0/", Contents.CLEAR, True), ("1/", Contents.KEEP, True), ("2/", Contents.DEFAULT, True)]
    assert context.firing.contents is Contents.KEEP


def test_fired_timer_has_the_time_it_was_set_to() -> None:
    class Due(Trigger):
        def on_element(self, context: TriggerContext, element: Element) -> None:
            context.set_timer(7, TimeDomain.WALL)

        def on_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
            context.set("due", timer.at)

        def should_fire(self, context: TriggerContext) -> bool:
            return False

    windows = KeyWindows(
        WindowingStrategy(window_fn=FixedWindows("10us"), trigger=Due()),
        ToList(),
        None,
        WindowStates(),
        Clocks(watermark=0, wall_time=99),
    )
    windows.add([_one()])
    windows.on_timer(Window(0, 10), parse_timer("||wall"))

    assert windows.windows.to_json() is not None
    assert windows.windows.at(Window(0, 10)).trigger == {"": {"due": 7}}
