"""Invariants of windows for any order and bundles of elements, and a run on a real runner."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.combiners import Sum, ToList
from millpond.executor.windows.composite_triggers import AfterAll, AfterAny, AfterEach, OrFinally, Repeatedly
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.key_windows import KeyWindows, WindowStates
from millpond.executor.windows.pane import WindowedValue
from millpond.executor.windows.strategy import Accumulation, Asked, Closing, WindowingStrategy
from millpond.executor.windows.time_triggers import AfterWatermark, Default
from millpond.executor.windows.trigger import Trigger, parse_timer
from millpond.executor.windows.window import Element, TimestampCombiner, Window, WindowFn
from millpond.executor.windows.window_fns import FixedWindows, Sessions, SlidingWindows
from millpond.statestore.rows.row import TimeDomain
from millpond.testing.transcripts.runs import LocalTranscriptRun
from millpond.testing.transcripts.transcript import Arrived, pane_fields

_END = 1_000


def _micros(least: int, most: int) -> st.SearchStrategy[str]:
    return st.integers(least, most).map("{}us".format)


_WINDOWS: st.SearchStrategy[WindowFn] = st.one_of(
    st.builds(FixedWindows, _micros(1, 40)),
    st.builds(SlidingWindows, _micros(5, 40), _micros(5, 20)),
    st.builds(Sessions, _micros(1, 30)),
)

_LEAVES: st.SearchStrategy[Trigger] = st.one_of(
    st.builds(AfterCount, st.integers(1, 4)), st.just(AfterWatermark()), st.just(Default())
)

_TRIGGERS: st.SearchStrategy[Trigger] = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(Repeatedly, inner),
        st.builds(AfterAll, inner, inner),
        st.builds(AfterAny, inner, inner),
        st.builds(AfterEach, inner, inner),
        st.builds(OrFinally, inner, inner),
        st.builds(AfterWatermark, inner, inner),
    ),
    max_leaves=4,
)

_UNENDING = _TRIGGERS.map(Repeatedly)

_BUNDLES = st.lists(
    st.tuples(st.lists(st.integers(0, 200), min_size=1, max_size=5), st.integers(0, 60)), max_size=8
)
"""The times of a bundle's elements, and the advance of the watermark after it."""


class _Key:
    """A key's windows under a slow, obvious engine: state through JSON, timers in order."""

    def __init__(self, strategy: WindowingStrategy, combine: Any) -> None:
        self.strategy, self.combine = strategy, combine
        self.state: dict[str, Any] | None = None
        self.watermark = 0
        self.shown: list[WindowedValue] = []

    def _open(self, watermark: int) -> KeyWindows:
        states = WindowStates(self.state)
        return KeyWindows(self.strategy, self.combine, None, states, Clocks(watermark=watermark, wall_time=0))

    def _store(self, windows: KeyWindows) -> None:
        self.state = windows.windows.to_json()
        self.shown += windows.output

    def add(self, times: list[int]) -> None:
        windows = self._open(self.watermark)
        # Triggers asked after each element are asked in order of arrival.
        arrived = times if self.strategy.asked == "element" else sorted(times)
        windows.add([Element(value=at, at=at, key="k") for at in arrived])
        self._store(windows)
        self.advance(self.watermark)

    def advance(self, watermark: int) -> None:
        self.watermark = watermark
        while (due := self._first_due()) is not None:
            at, window, timer = due
            windows = self._open(at)
            if timer:
                windows.on_timer(window, parse_timer(timer))
            else:
                windows.expire(window)
            self._store(windows)

    def _first_due(self) -> tuple[int, Window, str] | None:
        windows = self._open(self.watermark).windows
        states = [windows.at(window) for window in sorted(windows.keys())]
        due = [(self.strategy.expires_at(state.window), 1, state.window, "") for state in states]
        for state in states:
            due += [
                (at, 0, state.window, text)
                for text, at in state.timers.items()
                if parse_timer(text).domain is TimeDomain.EVENT
            ]
        at, _, window, timer = min(due, default=(self.watermark + 1, 0, Window(0, 0), ""))
        return (at, window, timer) if at <= self.watermark else None


def _play(strategy: WindowingStrategy, bundles: list[tuple[list[int], int]], combine: Any) -> _Key:
    key = _Key(strategy, combine)
    for times, moved in bundles:
        key.add(times)
        key.advance(key.watermark + moved)
    key.advance(10 * _END)
    return key


def _strategy(
    window_fn: WindowFn, trigger: Trigger, accumulation: Accumulation, lateness: int = _END
) -> WindowingStrategy:
    return WindowingStrategy(
        window_fn=window_fn, trigger=trigger, accumulation=accumulation, allowed_lateness=f"{lateness}us"
    )


@given(window_fn=_WINDOWS, trigger=_TRIGGERS, bundles=_BUNDLES, lateness=st.integers(0, 50))
def test_key_has_no_state_behind_all_windows(
    window_fn: WindowFn, trigger: Trigger, bundles: list[tuple[list[int], int]], lateness: int
) -> None:
    key = _play(_strategy(window_fn, trigger, Accumulation.DISCARDING, lateness), bundles, ToList())

    assert key.state is None


@given(window_fn=_WINDOWS, trigger=_TRIGGERS, bundles=_BUNDLES)
def test_indices_count_the_panes(
    window_fn: WindowFn, trigger: Trigger, bundles: list[tuple[list[int], int]]
) -> None:
    """Non-early panes have indices of their own too."""
    key = _play(_strategy(window_fn, trigger, Accumulation.ACCUMULATING), bundles, ToList())
    for window in {value.window for value in key.shown}:
        panes = [value.pane for value in key.shown if value.window == window]
        settled = [pane.nonspeculative_index for pane in panes if pane.nonspeculative_index >= 0]

        assert [pane.index for pane in panes] == list(range(len(panes)))
        assert settled == list(range(len(settled)))
        assert not any(pane.is_last for pane in panes[:-1])


@given(size=st.integers(1, 40), trigger=_UNENDING, bundles=_BUNDLES)
def test_discarding_panes_have_each_element_once(
    size: int, trigger: Trigger, bundles: list[tuple[list[int], int]]
) -> None:
    key = _play(_strategy(FixedWindows(f"{size}us"), trigger, Accumulation.DISCARDING), bundles, ToList())
    shown = Counter(element for value in key.shown for element in value.value)

    assert shown == Counter(at for times, _ in bundles for at in times)


@given(window_fn=_WINDOWS, trigger=_UNENDING, bundles=_BUNDLES)
def test_panes_less_retractions_sum_to_the_last_panes(
    window_fn: WindowFn, trigger: Trigger, bundles: list[tuple[list[int], int]]
) -> None:
    """Windows may merge."""
    key = _play(_strategy(window_fn, trigger, Accumulation.RETRACTING), bundles, Sum())
    net = sum(-value.value if value.pane.is_retraction else value.value for value in key.shown)
    windows = [len(window_fn.assign(Element(value=0, at=at, key="k"))) * at for t, _ in bundles for at in t]

    assert net == sum(windows)


@given(window_fn=_WINDOWS, times=st.lists(st.integers(0, 200), min_size=1, max_size=12), data=st.data())
def test_final_values_do_not_depend_on_the_order_of_arrival(
    window_fn: WindowFn, times: list[int], data: st.DataObject
) -> None:
    strategy = _strategy(window_fn, Default(), Accumulation.ACCUMULATING)
    shuffled = data.draw(st.permutations(times))
    one_by_one = _play(strategy, [([at], 0) for at in shuffled], Sum())
    at_once = _play(strategy, [(times, 0)], Sum())

    assert sorted((value.window, value.value) for value in one_by_one.shown) == sorted(
        (value.window, value.value) for value in at_once.shown
    )


@given(
    window_fn=_WINDOWS,
    trigger=_TRIGGERS,
    accumulation=st.sampled_from(Accumulation),
    bundles=_BUNDLES,
    lateness=st.integers(0, 60),
    combiner=st.sampled_from(TimestampCombiner),
    closing=st.sampled_from(["never", "if_non_empty", "always"]),
    restart=st.booleans(),
    asked=st.sampled_from(["element", "bundle"]),
)
@settings(max_examples=40)
def test_local_runner_equals_a_slow_engine(
    window_fn: WindowFn,
    trigger: Trigger,
    accumulation: Accumulation,
    bundles: list[tuple[list[int], int]],
    lateness: int,
    combiner: TimestampCombiner,
    closing: Closing,
    restart: bool,
    asked: Asked,
) -> None:
    """Its state, timers and holds are real."""
    strategy = WindowingStrategy(
        window_fn=window_fn,
        trigger=trigger,
        accumulation=accumulation,
        allowed_lateness=f"{lateness}us",
        timestamp_combiner=combiner,
        closing=closing,
        asked=asked,
    )
    run, shown = LocalTranscriptRun(strategy), []
    run.advance_watermark(0)
    watermark = 0
    for times, moved in bundles:
        run.inject([Arrived(value=at, at_us=at, key="k", id=None) for at in times])
        watermark += moved
        run.advance_watermark(watermark)
        shown += run.panes()
        if restart:
            run.restart()
    run.advance_watermark(10 * _END)
    shown += run.panes()
    run.close()

    expected = [pane_fields("k", value) for value in _play(strategy, bundles, ToList()).shown]
    assert sorted(map(str, shown)) == sorted(map(str, expected))
