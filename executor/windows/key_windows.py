"""The windows of one key: assign and add elements, merge windows, ask triggers, emit panes.

The complete semantics of windowing, independent of the engine: plain data in, plain data out.
`WindowedComputation` around it reads and writes the state, sets the timers and produces
`KeyWindows.output` (the windowing and triggering patent; Streaming 102).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from millpond.executor.computation.context import Context
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import copied
from millpond.executor.time.clocks import EXACT, Clocks
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.windows.combiners import CombineFn
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.strategy import Accumulation, WindowingStrategy
from millpond.executor.windows.trigger import Firing, TriggerContext, TriggerTimer, parse_timer
from millpond.executor.windows.window import (
    Element,
    Merge,
    TimestampCombiner,
    Window,
    WindowState,
    check_merges,
    check_window,
    combined,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

OnOpen: TypeAlias = Callable[[WindowState], None]
"""Called with each known window when a hook first touches it, before it changes."""

_WINDOWS: Final = "windows"
_UPGRADED: Final = "is_upgraded"


def stored_windows(state: Any) -> list[dict[str, Any]]:
    """Return the windows of a key's state, or refuse a state that code of another kind has written."""
    try:
        windows: list[dict[str, Any]] = state[_WINDOWS]
    except (KeyError, TypeError) as cause:
        raise InvalidError(
            "the key's state was not written by a windowed step: give the step another name, and drop= the former "
            "computation in the pipeline",
            type=type(state).__name__,
        ) from cause
    return windows


def upgraded_windows(windows: Any) -> dict[str, Any] | None:
    """Return the state of windows that a user's upgrade returned, or refuse anything else."""
    try:
        states = [WindowState.from_json(one) for one in windows]
        rows = {check_window(one.window): one.to_json() for one in states}
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise InvalidError("upgrade_state must return a list of windows in the form that it got") from cause
    return {_WINDOWS: [rows[window] for window in sorted(rows)], _UPGRADED: True}


class WindowStates:
    """The windows of a key during its turn, by their bounds.

    A key may have thousands of windows while a timer concerns only one. So the row is decoded once a turn, a hook
    opens the windows that it touches, and the others are written back unchanged.
    """

    __slots__ = ("_on_open", "_open", "_order", "_owed", "_owed_at", "_rows", "_touched", "is_upgraded")

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        rows = () if state is None else stored_windows(state)
        # The row's timers and hold belong to the windows before their upgrade.
        self.is_upgraded: bool = state is not None and _UPGRADED in state
        self._rows: dict[Window, Mapping[str, Any]] = {Window(*row["window"]): row for row in rows}
        self._open: dict[Window, WindowState] = {}
        self._touched: set[Window] = set()
        self._order: list[Window] | None = None
        self._on_open: OnOpen | None = None
        self._owed_at: dict[Window, int] = {
            window: row["output_at"] for window, row in self._rows.items() if "output_at" in row
        }
        self._owed = [(at, window) for window, at in self._owed_at.items()]
        heapify(self._owed)

    def begin_hook(self, on_open: OnOpen) -> None:
        self._record_owed()
        self._touched.clear()
        self._on_open = on_open

    def keys(self) -> KeysView[Window]:
        return self._rows.keys()

    def get(self, window: Window) -> WindowState | None:
        """Open the window with these bounds; return None if there is none."""
        state = self._open.get(window)
        if state is None:
            row = self._rows.get(window)
            if row is None:
                return None
            state = self._open[window] = WindowState.from_json(row)
        if window not in self._touched:
            self._touched.add(window)
            if self._on_open is not None:
                self._on_open(state)
        return state

    def at(self, window: Window) -> WindowState:
        return self.get(window) or self.add(window)

    def add(self, window: Window) -> WindowState:
        """Start an empty window in place of any with the same bounds."""
        state = self._open[window] = WindowState(window=window)
        if self._order is not None and window not in self._rows:
            insort(self._order, window)
        self._rows[window] = {}
        self._touched.add(window)
        return state

    def pop(self, window: Window) -> WindowState | None:
        state = self.get(window)
        if state is not None:
            del self._open[window], self._rows[window]
            if self._order is not None:
                del self._order[bisect_left(self._order, window)]
        return state

    def overlapping(self, window: Window) -> list[Window]:
        """Return the windows that overlap ``window``; the key's windows must not overlap each other."""
        order = self._order
        if order is None:
            order = self._order = sorted(self._rows)
        first = bisect_left(order, window)
        if first and order[first - 1].overlaps(window):
            first -= 1
        last = first
        while last < len(order) and order[last].start < window.end:
            last += 1
        return order[first:last]

    def touched(self) -> list[WindowState]:
        states = self._open
        return [states[window] for window in self._touched if window in states]

    def oldest_output_at(self) -> int | None:
        """Return the least event time of any pane still to be emitted; ``None`` if no window determines one."""
        self._record_owed()
        owed, owed_at = self._owed, self._owed_at
        while owed and owed_at.get(owed[0][1]) != owed[0][0]:
            heappop(owed)
        return owed[0][0] if owed else None

    def _record_owed(self) -> None:
        # Outdated entries stay in the heap until `oldest_output_at` meets them.
        for window in self._touched:
            state = self._open.get(window)
            at = None if state is None else state.output_at
            if at == self._owed_at.get(window):
                continue
            if at is None:
                del self._owed_at[window]
            else:
                self._owed_at[window] = at
                heappush(self._owed, (at, window))

    def to_json(self) -> dict[str, Any] | None:
        """Return the state to store, its windows ordered by their bounds; ``None`` if no window is left."""
        states = self._open
        windows = [
            states[window].to_json() if window in states else self._rows[window]
            for window in sorted(self._rows)
        ]
        return {_WINDOWS: windows} if windows else None


# "~" sorts after digits: among timers due at the same time, expiry fires last.
EXPIRY: Final = "~"
HOLD: Final = "panes"


class Wanted(NamedTuple):
    """A timer that a window needs; the output watermark is held at ``output_at``, the event time of its pane."""

    at: int
    domain: TimeDomain
    output_at: int
    percentile: float = EXACT


def add_wanted(
    wanted: dict[str, Wanted], strategy: WindowingStrategy, state: WindowState, watermark: int
) -> None:
    window = state.window
    expires_at = strategy.expires_at(window)
    # The global window ends beyond any time that a record can carry.
    late_at = min(expires_at, INSTANT_MAX_US)
    closing_at = _pane_at(state) if state.is_held else late_at
    wanted[f"{EXPIRY}{window.start}/{window.end}"] = Wanted(expires_at, TimeDomain.EVENT, closing_at)
    for text, at in state.timers.items():
        timer, due = parse_timer(text), min(at, TIME_MAX_US)
        is_for_late = due > window.end if timer.domain is TimeDomain.EVENT else watermark >= window.end
        # A pane after the end is late anyway: a hold at its time would stall all consumers.
        output_at = late_at if is_for_late else _pane_at(state)
        wanted[tag_of(window, text)] = Wanted(due, timer.domain, output_at, timer.percentile)


def _pane_at(state: WindowState) -> int:
    last_at = state.window.last_at
    return last_at if state.output_at is None else min(state.output_at, last_at)


def set_timers(context: Context, before: dict[str, Wanted], after: dict[str, Wanted], oldest_at: int) -> None:
    """Pass the changes from ``before`` (without the timer that fired) to ``after`` on to the engine.

    No hold lies below ``oldest_at``, the least event time at which the hook may produce.
    """
    for tag, wanted in before.items():
        if tag not in after:
            context.delete_timer(tag, wanted.domain)
    for tag, wanted in after.items():
        if before.get(tag) != wanted:
            output_at = max(wanted.output_at, oldest_at)
            context.set_timer(wanted.at, tag, wanted.domain, output_at, wanted.percentile)


def set_hold(context: Context, before: int | None, after: int | None, oldest_at: int) -> None:
    """Hold the output watermark at the event time of the oldest pane still to be emitted (MillWheel §5.2).

    ``before`` is that time when the hook began, ``after`` that time now; ``None`` if no pane is pending.
    """
    if after is None:
        if before is not None:
            context.state.release(HOLD)
    elif after != before:
        context.state.hold(max(after, oldest_at), HOLD)


def as_of(timer: Timer, clocks: Clocks) -> Clocks:
    """Return the clocks at the moment that an event timer waited for.

    Panes must follow from event time, not from the steps in which watermarks happen to advance. So
    a watermark counts as no further than the timer's time, and a watermark of a higher percentile than the
    timer's counts as still before it.
    """

    def bounded(percentile: float, watermark: int) -> EventTimeMicros:
        return EventTimeMicros(min(watermark, timer.at - 1 if percentile > timer.percentile else timer.at))

    marks = {
        percentile: bounded(percentile, mark) for percentile, mark in clocks.percentile_watermarks.items()
    }
    return replace(clocks, watermark=bounded(EXACT, clocks.watermark), percentile_watermarks=marks)


def tag_of(window: Window, text: str) -> str:
    return f"{window.start}/{window.end}|{text}"


def parse_tag(tag: str) -> tuple[Window, TriggerTimer | None]:
    """Return the window and the trigger timer of a tag; no timer for the window's expiry."""
    name, _, text = tag.removeprefix(EXPIRY).partition("|")
    start, _, end = name.partition("/")
    return Window(int(start), int(end)), parse_timer(text) if text else None


Finish: TypeAlias = Callable[[str, Any, Window, Pane], Iterable[Any]]
"""Takes key, combined value, window and pane, and returns the values to emit: one pane each."""

_RINGS_MAX: Final = 100_000
DROPPED: Final = "dropped"
_AFTER_LAST: Final = "after_last"
_AFTER_CLEAR: Final = "after_clear"
_SIGNALS_MISSED: Final = "signals_missed"
WINDOW_COUNTERS: Final = (DROPPED, _AFTER_LAST, _AFTER_CLEAR, _SIGNALS_MISSED)
"""Counters of elements that no pane shows, and of signals that found no window.

``dropped``: all windows of the element had expired. ``after_last``: the trigger of its window had finished.
``after_clear``: a retraction of an element that a pane has shown and cleared, so the combiner holds it no more.
"""


@dataclass(slots=True)
class KeyWindows:
    """The windows of one key during one hook; ``output`` is to be produced, in order, and ``counts`` added.

    ``late`` are the elements all of whose windows had expired.
    """

    _strategy: WindowingStrategy
    _combine: CombineFn
    _finish: Finish | None
    windows: WindowStates
    _clocks: Clocks
    _key: str = ""
    _is_cut: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WINDOW_COUNTERS, 0))
    output: list[WindowedValue] = field(default_factory=list)
    late: list[Element] = field(default_factory=list)

    def add(self, elements: Iterable[Element]) -> None:
        """Add a bundle of elements: assign, drop late ones, merge, combine, and ask each trigger.

        The strategy decides whether the triggers are asked once or after each element.
        """
        strategy = self._strategy
        if strategy.asked == "bundle":
            self._add_together(elements)
            return
        arrived = list(elements)
        if strategy.trigger.waits_for_end and not strategy.window_fn.is_merging:
            assigned, late = self._assign(arrived)
            latest = max(self._clocks.watermark, *self._clocks.percentile_watermarks.values(), TIME_MIN_US)
            if latest < min((window.end for window in assigned), default=TIME_MAX_US):
                # No trigger can fire before the windows end, so asking after each element would change nothing.
                self._add_assigned(assigned, late)
                return
        self._is_cut = len(arrived) > 1
        for element in arrived:
            # Timers due between two elements fire between them, so that panes do not depend on how input is cut.
            self._ring(self._add_together((element,)))

    def _add_together(self, elements: Iterable[Element]) -> list[WindowState]:
        return self._add_assigned(*self._assign(elements))

    def _add_assigned(
        self, assigned: dict[Window, list[Element]], late: Sequence[Element]
    ) -> list[WindowState]:
        if late:
            self.counts[DROPPED] += len(late)
            self.late += late
        if self._strategy.window_fn.is_merging and not assigned.keys() <= self.windows.keys():
            assigned = self._merge_all(assigned)
        states = [self.windows.at(window) for window in assigned]
        for state, members in zip(states, assigned.values(), strict=True):
            if state.is_closed:
                self.counts[_AFTER_LAST] += len(members)
            else:
                self._add(state, members)
                self._ask(state, by_event_timer=False)
        return states

    def _assign(self, elements: Iterable[Element]) -> tuple[dict[Window, list[Element]], list[Element]]:
        """Return the elements by window, and those all of whose windows have expired."""
        assigned: dict[Window, list[Element]] = {}
        late: list[Element] = []
        strategy = self._strategy
        watermark, assign, expires_at = self._clocks.watermark, strategy.window_fn.assign, strategy.expires_at
        for element in elements:
            windows = assign(element)
            # An element without windows was dropped by the window function, not because it is late.
            is_accepted = not windows
            for window in windows:
                members = assigned.get(window)
                if members is not None:
                    members.append(element)
                elif watermark < expires_at(check_window(window)):
                    assigned[window] = [element]
                else:
                    continue
                is_accepted = True
            if not is_accepted:
                late.append(element)
        return assigned, late

    def _add(self, state: WindowState, members: Sequence[Element]) -> None:
        strategy, combiner = self._strategy, self._strategy.timestamp_combiner
        if combiner is not TimestampCombiner.END_OF_WINDOW:
            is_transformed, output_at = (
                combiner is TimestampCombiner.EARLIEST_TRANSFORMED,
                strategy.window_fn.output_at,
            )
            for element in members:
                at = output_at(state.window, element.at) if is_transformed else element.at
                if at >= self._clocks.watermark:
                    state.output_at = combined(combiner, state.output_at, at)
        accumulator = state.accumulator if state.has_contents else self._combine.create()
        state.accumulator, without_effect = self._combined(accumulator, members)
        state.has_contents = True
        state.news += len(members) - without_effect
        self.counts[_AFTER_CLEAR] += without_effect
        state.is_held |= self._clocks.watermark < state.window.end and strategy.closing != "never"
        # After the combiner, because triggers may look at the contents.
        strategy.trigger.on_elements(self._context(state), members)

    def _combined(self, accumulator: Any, members: Sequence[Element]) -> tuple[Any, int]:
        """Return the accumulator with the elements in it, and the number of retractions without effect."""
        combine, may_clear, without_effect = self._combine, self._strategy.accumulation.may_clear, 0
        for is_retraction, run in groupby(members, attrgetter("is_retraction")):
            if not is_retraction:
                accumulator = combine.add_all(accumulator, [element.value for element in run])
                continue
            for element in run:
                if may_clear:
                    accumulator, has_effect = combine.uncombine_if_held(accumulator, element.value)
                    without_effect += not has_effect
                else:
                    accumulator = combine.uncombine(accumulator, element.value)
        return accumulator, without_effect

    def _merge_all(self, assigned: dict[Window, list[Element]]) -> dict[Window, list[Element]]:
        if self._strategy.window_fn.merges_overlapping_only:
            known = {near for window in assigned for near in self.windows.overlapping(window)}
        else:
            known = set(self.windows.keys())
        windows = sorted(known | assigned.keys())
        targets = {window: window for window in windows}
        for merge in check_merges(windows, self._strategy.window_fn.merge(windows)):
            self._merge(merge)
            targets.update(dict.fromkeys(merge.sources, merge.result))
        merged: dict[Window, list[Element]] = {}
        for window, members in assigned.items():
            merged.setdefault(targets[window], []).extend(members)
        return merged

    def _merge(self, merge: Merge) -> None:
        popped = [self.windows.pop(window) for window in merge.sources]
        sources = [source for source in popped if source is not None]
        if not sources:
            return
        result = self.windows.add(merge.result)
        for source in sources:
            if source.window == merge.result:
                # A window that absorbs others stays the same window to consumers: its pane count continues.
                result.index, result.nonspeculative_index = source.index, source.nonspeculative_index
                result.has_ended = source.has_ended
        live = [source for source in sources if not source.is_closed]
        if not live:
            result.close()
            return
        # Only the live sources: a source whose trigger has finished is empty, and must not finish the others.
        self._join(result, live)
        self._strategy.trigger.on_merge(self._context(result, tuple(live)))

    def _join(self, result: WindowState, sources: Sequence[WindowState]) -> None:
        accumulators = [source.accumulator for source in sources if source.has_contents]
        if accumulators:
            result.accumulator, result.has_contents = self._combine.merge(accumulators), True
        result.news = sum(source.news for source in sources)
        result.is_held = any(source.is_held for source in sources)
        for source in sources:
            result.output_at = combined(self._strategy.timestamp_combiner, result.output_at, source.output_at)
            result.emitted += source.emitted

    def signal(self, name: str, window: Window | None) -> None:
        """Deliver a signal from outside to the triggers of ``window``, and ask them.

        Where windows merge, the signal is for all windows that overlap ``window``; without one, for all of the key.
        """
        if window is None:
            addressed = sorted(self.windows.keys())
        elif self._strategy.window_fn.is_merging:
            addressed = sorted(filter(window.overlaps, self.windows.keys()))
        else:
            addressed = [window]
        states = map(self.windows.get, addressed)
        listening = [state for state in states if state is not None and not state.is_closed]
        if not listening:
            self.counts[_SIGNALS_MISSED] += 1
        for state in listening:
            self._strategy.trigger.on_signal(self._context(state), name)
            self._ask(state, by_event_timer=False)
        if self._strategy.asked == "element":
            self._ring(listening)

    def on_timer(self, window: Window, timer: TriggerTimer) -> None:
        state = self.windows.get(window)
        at = None if state is None else state.timers.pop(timer.to_text(), None)
        if state is None or at is None:
            return
        self._strategy.trigger.on_child_timer(self._context(state), replace(timer, at=at))
        self._ask(state, by_event_timer=timer.domain is TimeDomain.EVENT)

    def _ring(self, states: Sequence[WindowState]) -> None:
        """Deliver the timers of these windows that are already due, in the engine's order."""
        for _ in range(_RINGS_MAX):
            due = min(self._due(states), default=None)
            if due is None:
                return
            at, domain, percentile, _, window, text = due
            known = self._clocks
            if domain is TimeDomain.EVENT:
                self._clocks = as_of(Timer("", domain, at, at, percentile), known)
            self.on_timer(window, parse_timer(text))
            self._clocks = known
        raise InvalidError(
            "a trigger keeps setting timers that are due already", trigger=self._strategy.trigger
        )

    def _due(
        self, states: Sequence[WindowState]
    ) -> Iterator[tuple[int, TimeDomain, float, str, Window, str]]:
        for state in states:
            for text, at in state.timers.items():
                timer = parse_timer(text)
                if at <= self._clocks.of(timer.domain, timer.percentile):
                    yield at, timer.domain, timer.percentile, tag_of(state.window, text), state.window, text

    def resume(self) -> None:
        """Let the trigger of each window that an upgrade left without trigger state listen from now on."""
        for window in list(self.windows.keys()):
            state = self.windows.get(window)
            if state is not None and not (state.is_closed or state.trigger or state.timers):
                self._strategy.trigger.on_arm(self._context(state))
        self.windows.is_upgraded = False

    def expire(self, window: Window) -> None:
        state = self.windows.get(window)
        # The timer is early where code with another lateness has set it; it is then set again.
        if state is None or self._clocks.watermark < self._strategy.expires_at(window):
            return
        closing = self._strategy.closing
        if not state.is_closed and (closing == "always" or (closing == "if_non_empty" and state.news)):
            self._show(state, Firing(), is_last=True, by_event_timer=True, even_empty=True)
        self.windows.pop(window)

    def _context(self, state: WindowState, sources: tuple[WindowState, ...] = ()) -> TriggerContext:
        return TriggerContext(
            state,
            self._clocks.watermark,
            self._clocks.wall_time,
            percentile_watermarks=self._clocks.percentile_watermarks,
            sources=sources,
            combine=self._combine,
        )

    def _ask(self, state: WindowState, *, by_event_timer: bool) -> None:
        trigger, context = self._strategy.trigger, self._context(state)
        if not trigger.should_fire(context):
            return
        finished = trigger.fire(context)
        self._show(state, context.firing, is_last=finished, by_event_timer=by_event_timer)
        if finished:
            state.close()

    def _show(
        self,
        state: WindowState,
        firing: Firing,
        *,
        is_last: bool,
        by_event_timer: bool,
        even_empty: bool = False,
    ) -> None:
        strategy = self._strategy
        pane = self._pane(state, firing, is_last=is_last, by_event_timer=by_event_timer)
        state.has_ended |= pane.timing is not Timing.EARLY
        is_retracting = strategy.is_incremental
        if pane.timing is Timing.ON_TIME and strategy.emit_empty_on_time and not is_retracting:
            even_empty = True
        if not (state.news or even_empty):
            return
        values = self._values(state, pane)
        if is_retracting:
            # Retractions go first, so that consumers never hold two panes of the window.
            retracted = [WindowedValue.from_json(envelope) for envelope in state.emitted]
            self.output += [value.retraction(pane) for value in retracted]
            state.emitted = [value.to_json() for value in values]
        self.output += values
        state.index += 1
        state.nonspeculative_index += pane.timing is not Timing.EARLY
        state.output_at, state.news, state.is_held = None, 0, False
        if strategy.accumulation.clears(firing.contents):
            state.clear_contents()

    def _pane(self, state: WindowState, firing: Firing, *, is_last: bool, by_event_timer: bool) -> Pane:
        if self._clocks.watermark < state.window.end:
            timing = Timing.EARLY
        elif by_event_timer and not state.has_ended:
            timing = Timing.ON_TIME
        else:
            timing = Timing.LATE
        share = self._context(state).percentile_at(state.window.end)
        return Pane(
            index=state.index,
            nonspeculative_index=-1 if timing is Timing.EARLY else state.nonspeculative_index,
            timing=timing,
            is_last=is_last,
            watermark_percentile=None if timing is Timing.LATE else share,
            produced_at=self._clocks.wall_time,
            trigger=firing.label(),
        )

    def _values(self, state: WindowState, pane: Pane) -> list[WindowedValue]:
        accumulator = state.accumulator if state.has_contents else self._combine.create()
        value = self._combine.extract(accumulator)
        is_retracting = self._strategy.is_incremental
        # A user's function may change its argument.
        is_given = self._finish is not None and self._strategy.accumulation is not Accumulation.DISCARDING
        if (self._is_cut or is_retracting or is_given) and isinstance(value, dict | list):
            # The value may be part of the accumulator, which may change before the pane is stored.
            value = copied(value)
        shown = WindowedValue(
            value=value,
            window=state.window,
            at=state.window.last_at if state.output_at is None else state.output_at,
            pane=pane,
        )
        if self._finish is None:
            return [shown]
        return [replace(shown, value=result) for result in self._finish(self._key, value, state.window, pane)]
