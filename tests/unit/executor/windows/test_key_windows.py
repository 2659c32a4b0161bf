"""The windows of a key, without an engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.combiners import Sum, ToList
from millpond.executor.windows.composite_triggers import AfterEach, Repeatedly
from millpond.executor.windows.count_triggers import AfterCount, ShouldEmit
from millpond.executor.windows.key_windows import KeyWindows, WindowStates
from millpond.executor.windows.pane import Timing
from millpond.executor.windows.strategy import Accumulation, WindowingStrategy
from millpond.executor.windows.time_triggers import AfterWatermark, Default
from millpond.executor.windows.window import Element, Window, WindowFn
from millpond.executor.windows.window_fns import FixedWindows, Sessions
from millpond.statestore.errors import InvalidError


class _Key:
    """One key's windows, loaded and stored at every step."""

    def __init__(self, strategy: WindowingStrategy, combine: Any = None) -> None:
        self.strategy = strategy
        self.combine = combine or ToList()
        self.state: dict[str, Any] | None = None

        self.counts: Counter[str] = Counter()

    def open(self, watermark: int = 0) -> KeyWindows:
        states = WindowStates(self.state)
        return KeyWindows(self.strategy, self.combine, None, states, Clocks(watermark=watermark, wall_time=0))

    def add(self, *values: int, watermark: int = 0, retract: bool = False) -> list[Any]:
        windows = self.open(watermark)
        windows.add([Element(value=value, at=value, key="k", is_retraction=retract) for value in values])
        self.state = windows.windows.to_json()
        self.counts.update(windows.counts)
        return windows.output


def test_stored_windows_survive_a_round_trip() -> None:
    key = _Key(WindowingStrategy(window_fn=FixedWindows("10us"), trigger=AfterWatermark(early=AfterCount(2))))
    key.add(1, 12)

    assert key.open().windows.to_json() == key.state


def test_key_has_no_state_after_its_last_window_expires() -> None:
    key = _Key(WindowingStrategy(window_fn=FixedWindows("10us")))
    key.add(1)
    windows = key.open(11)
    windows.expire(Window(0, 10))

    assert windows.windows.to_json() is None


def test_element_too_late_for_its_windows_is_counted_as_dropped() -> None:
    key = _Key(WindowingStrategy(window_fn=FixedWindows("10us")))
    key.add(1, 2, watermark=11)

    assert key.counts["dropped"] == 2
    assert key.state is None


def test_elements_after_the_last_pane_have_their_own_counter() -> None:
    key = _Key(WindowingStrategy(window_fn=FixedWindows("10us"), trigger=AfterCount(1)))
    key.add(1)
    key.add(2, 3)

    assert key.counts["after_last"] == 2


def test_session_merged_with_a_finished_one_can_still_fire() -> None:
    """The elements that the finished session has already shown are not shown again."""
    key = _Key(WindowingStrategy(window_fn=Sessions("4us"), trigger=AfterCount(2)))
    first = key.add(0, 1)
    key.add(6)
    joined = key.add(4)

    assert [value.value for value in first + joined] == [[0, 1], [6, 4]]
    assert key.counts["after_last"] == 0


def test_session_merged_from_finished_ones_stays_finished() -> None:
    key = _Key(WindowingStrategy(window_fn=Sessions("4us"), trigger=AfterCount(1)))
    key.add(0)
    key.add(6)
    joined = key.add(3)

    assert joined == []
    assert key.counts["after_last"] == 1


@pytest.mark.parametrize("window", [Window(10, 10), Window(10, 0), (0, 10)])
def test_window_fn_must_assign_non_empty_windows(window: Any) -> None:
    class Wrong(WindowFn):
        def assign(self, element: Element) -> Any:
            return (window,)

    with pytest.raises(InvalidError, match="non-empty windows"):
        _Key(WindowingStrategy(window_fn=Wrong())).add(1)


def test_retraction_uncombines_its_element() -> None:
    strategy = WindowingStrategy(trigger=Repeatedly(AfterCount(1)), accumulation=Accumulation.ACCUMULATING)
    key = _Key(strategy, Sum())
    key.add(5, 7)

    assert [value.value for value in key.add(5, retract=True)] == [7]


def test_pane_names_the_innermost_trigger_that_fired() -> None:
    strategy = WindowingStrategy(trigger=Repeatedly(AfterEach(AfterCount(1), AfterCount(2))))
    key = _Key(strategy)

    assert [value.pane.trigger for value in key.add(1)] == ["AfterCount(count=1)"]
    assert [value.pane.trigger for value in key.add(2, 3)] == ["AfterCount(count=2)"]


def test_merged_session_has_contents_counts_and_trigger_state_of_its_parts() -> None:
    key = _Key(WindowingStrategy(window_fn=Sessions("10us"), trigger=AfterCount(3)), Sum())
    key.add(1)
    key.add(15)
    (shown,) = key.add(8)

    assert (shown.value, shown.window, shown.pane.timing) == (24, Window(1, 25), Timing.EARLY)


def test_session_that_absorbs_others_continues_its_pane_count() -> None:
    key = _Key(WindowingStrategy(window_fn=Sessions("4us"), trigger=Repeatedly(AfterCount(2))))
    shown = key.add(0, 3) + key.add(1, 2)

    assert [(value.window, value.pane.index) for value in shown] == [(Window(0, 7), 0), (Window(0, 7), 1)]


def test_merging_windows_need_a_trigger_that_can_merge() -> None:
    trigger = ShouldEmit(lambda value, state: (True, state))

    assert WindowingStrategy(window_fn=FixedWindows("10us"), trigger=trigger).trigger is trigger
    with pytest.raises(InvalidError, match="merge"):
        WindowingStrategy(window_fn=Sessions("10us"), trigger=Repeatedly(trigger))


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_fn": 5},
        {"trigger": Default},
        {"closing": "perhaps"},
        {"accumulation": "hoarding"},
        {"timestamp_combiner": "NOON"},
        {"allowed_lateness": "-1us"},
        {"allowed_lateness": 1},
    ],
    ids=repr,
)
def test_strategy_refuses_invalid_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        WindowingStrategy(**arguments)
