"""The windows of a key, without an engine: plain data in, plain data out."""

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
    """One key's windows, loaded and stored for every step."""

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


def test_what_is_stored_comes_back() -> None:
    """Windows loaded from stored state are stored as the same state."""
    key = _Key(WindowingStrategy(window_fn=FixedWindows(10), trigger=AfterWatermark(early=AfterCount(2))))
    key.add(1, 12)

    assert key.open().windows.to_json() == key.state


def test_a_key_without_windows_keeps_nothing() -> None:
    """After its last window has expired, a key has no state."""
    key = _Key(WindowingStrategy(window_fn=FixedWindows(10)))
    key.add(1)
    windows = key.open(11)
    windows.expire(Window(0, 10))

    assert windows.windows.to_json() is None


def test_drops_are_counted() -> None:
    """An element that is too late for all its windows is counted, and leaves no state."""
    key = _Key(WindowingStrategy(window_fn=FixedWindows(10)))
    key.add(1, 2, watermark=11)

    assert key.counts["dropped"] == 2
    assert key.state is None


def test_elements_for_a_closed_window_are_counted_apart() -> None:
    """Elements after the last pane have a counter of their own, and are not emitted."""
    key = _Key(WindowingStrategy(window_fn=FixedWindows(10), trigger=AfterCount(1)))
    key.add(1)
    key.add(2, 3)

    assert key.counts["after_last"] == 2


def test_a_finished_session_ends_no_other() -> None:
    """Sessions that a late element joins to a finished one are shown; only what was shown already is not."""
    key = _Key(WindowingStrategy(window_fn=Sessions(4), trigger=AfterCount(2)))
    first = key.add(0, 1)
    key.add(6)
    joined = key.add(4)

    assert [value.value for value in first + joined] == [[0, 1], [6, 4]]
    assert key.counts["after_last"] == 0


def test_sessions_that_had_all_finished_stay_finished() -> None:
    """A merged session is finished where all its sources were, and counts what comes for it."""
    key = _Key(WindowingStrategy(window_fn=Sessions(4), trigger=AfterCount(1)))
    key.add(0)
    key.add(6)
    joined = key.add(3)

    assert joined == []
    assert key.counts["after_last"] == 1


@pytest.mark.parametrize("window", [Window(10, 10), Window(10, 0), (0, 10)])
def test_an_assignment_to_an_invalid_window_is_refused(window: Any) -> None:
    """A user's window function must return windows that end after they start."""

    class Wrong(WindowFn):
        def assign(self, element: Element) -> Any:
            return (window,)

    with pytest.raises(InvalidError, match="non-empty windows"):
        _Key(WindowingStrategy(window_fn=Wrong())).add(1)


def test_a_retraction_is_uncombined() -> None:
    """An element that is a retraction is uncombined."""
    strategy = WindowingStrategy(trigger=Repeatedly(AfterCount(1)), accumulation=Accumulation.ACCUMULATING)
    key = _Key(strategy, Sum())
    key.add(5, 7)

    assert [value.value for value in key.add(5, retract=True)] == [7]


def test_a_pane_names_the_trigger_that_fired() -> None:
    """A pane names the innermost trigger that fired."""
    strategy = WindowingStrategy(trigger=Repeatedly(AfterEach(AfterCount(1), AfterCount(2))))
    key = _Key(strategy)

    assert [value.pane.trigger for value in key.add(1)] == ["AfterCount(count=1)"]
    assert [value.pane.trigger for value in key.add(2, 3)] == ["AfterCount(count=2)"]


def test_a_merged_session_has_all_that_its_parts_had() -> None:
    """A merged window has the contents, counts and trigger state of all its sources."""
    key = _Key(WindowingStrategy(window_fn=Sessions(10), trigger=AfterCount(3)), Sum())
    key.add(1)
    key.add(15)
    (shown,) = key.add(8)

    assert (shown.value, shown.window, shown.pane.timing) == (24, Window(1, 25), Timing.EARLY)


def test_merging_windows_need_a_trigger_that_can_follow() -> None:
    """A strategy with merging windows refuses a trigger without a merge function."""
    trigger = ShouldEmit(lambda value, state: (True, state))

    assert WindowingStrategy(window_fn=FixedWindows(10), trigger=trigger).trigger is trigger
    with pytest.raises(InvalidError, match="merge"):
        WindowingStrategy(window_fn=Sessions(10), trigger=Repeatedly(trigger))


@pytest.mark.parametrize(
    "arguments",
    [
        {"window_fn": 5},
        {"trigger": Default},
        {"closing": "perhaps"},
        {"accumulation": "hoarding"},
        {"timestamp_combiner": "NOON"},
        {"allowed_lateness": -1},
    ],
    ids=repr,
)
def test_a_strategy_refuses_invalid_arguments(arguments: dict[str, Any]) -> None:
    """Each invalid argument of a strategy is refused at construction."""
    with pytest.raises(InvalidError):
        WindowingStrategy(**arguments)
