"""The windows of one key: assign and add elements, merge windows, ask triggers, emit panes.

The complete semantics of windowing, independent of the engine: plain data in, plain data out.
`WindowedComputation` around it reads and writes the state, sets the timers and produces
`KeyWindows.output` (the windowing and triggering patent; Streaming 102).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeAlias

from millpond.dataflow.combiners.combine_fn import CombineFn
from millpond.dataflow.step.pane import Pane, Timing, WindowedValue
from millpond.dataflow.step.strategy import WindowingStrategy
from millpond.dataflow.step.window_states import WindowStates
from millpond.dataflow.step.window_timers import as_of, tag_of
from millpond.dataflow.triggers.trigger_context import Firing, TriggerContext, TriggerTimer, parse_timer
from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.timestamp_combiner import TimestampCombiner, combined, element_output_at
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import Merge, check_merges, check_window
from millpond.dataflow.windows.window_state import WindowState
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.clocks import Clocks, PercentileTimes
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

Finish: TypeAlias = Callable[[str, Any, Window, Pane], Iterable[Any]]
"""Takes key, combined value, window and pane, and returns the values to emit: one pane each."""

_RINGS_MAX: Final = 100_000
_DROPPED: Final = "dropped"
_AFTER_LAST: Final = "after_last"
_AFTER_CLEAR: Final = "after_clear"
_SIGNALS_MISSED: Final = "signals_missed"
WINDOW_COUNTERS: Final = (_DROPPED, _AFTER_LAST, _AFTER_CLEAR, _SIGNALS_MISSED)
"""
Counters of elements that no pane shows: ``dropped``, all of whose windows had expired;
``after_last``, whose window's trigger had finished; and ``after_clear``, retractions of elements that
a pane has shown and cleared, where the combiner has nothing left to take back. ``signals_missed`` are
signals that found no window.
"""


class KeyWindows:
    """The windows of one key during one hook.

    Args:
        strategy: windowing, triggering and accumulation.
        combine: combines the elements of a window.
        finish: turns a combined value into the values to emit; ``None`` emits it as it is.
        windows: the key's windows.
        watermark: the low watermark; in an event timer's hook, the timer's time.
        wall_time: the wall time.
        key: the key, for ``finish``.
        percentile_watermarks: the percentile watermarks that the triggers request.

    Attributes:
        output: the values to produce, in order.
        counts: the counts of this hook, by `WINDOW_COUNTERS`.
    """

    def __init__(
        self,
        strategy: WindowingStrategy,
        combine: CombineFn,
        finish: Finish | None,
        windows: WindowStates,
        *,
        watermark: int,
        wall_time: int,
        key: str = "",
        percentile_watermarks: PercentileTimes | None = None,
    ) -> None:
        self._strategy = strategy
        self._combine = combine
        self._finish = finish
        self._watermark = watermark
        self._wall_time = wall_time
        self._key = key
        self._percentile_watermarks: PercentileTimes = (
            {} if percentile_watermarks is None else percentile_watermarks
        )
        self._is_cut = False
        self.windows: WindowStates = windows
        self.counts: dict[str, int] = dict.fromkeys(WINDOW_COUNTERS, 0)
        self.output: list[WindowedValue] = []

    # -- elements --------------------------------------------------------------------------

    def add(self, elements: Iterable[Element]) -> None:
        """Add a bundle of elements: assign, drop what is too late, merge, combine, and ask each trigger.

        The triggers are asked once, or after each element, as the strategy says.
        """
        strategy = self._strategy
        if strategy.asked == "bundle":
            self._add_together(elements)
            return
        arrived = list(elements)
        if strategy.trigger.waits_for_end and not strategy.window_fn.is_merging:
            assigned, dropped = self._assign(arrived)
            if self._latest_clock() < min((window.end for window in assigned), default=TIME_MAX_US):
                # The answer is known for each element: nothing is shown before the windows end.
                self._add_assigned(assigned, dropped)
                return
        self._is_cut = len(arrived) > 1
        for element in arrived:
            self._ring(self._add_together((element,)))

    def _latest_clock(self) -> int:
        return max(self._watermark, *self._percentile_watermarks.values(), TIME_MIN_US)

    def _add_together(self, elements: Iterable[Element]) -> list[WindowState]:
        return self._add_assigned(*self._assign(elements))

    def _add_assigned(self, assigned: dict[Window, list[Element]], dropped: int) -> list[WindowState]:
        self.counts[_DROPPED] += dropped
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

    def _assign(self, elements: Iterable[Element]) -> tuple[dict[Window, list[Element]], int]:
        """The elements by window, and how many are too late for all of theirs."""
        assigned: dict[Window, list[Element]] = {}
        dropped = 0
        strategy = self._strategy
        watermark, assign, expires_at = self._watermark, strategy.window_fn.assign, strategy.expires_at
        for element in elements:
            windows = assign(element)
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
                dropped += 1
        return assigned, dropped

    def _add(self, state: WindowState, members: Sequence[Element]) -> None:
        strategy = self._strategy
        if strategy.timestamp_combiner is not TimestampCombiner.END_OF_WINDOW:
            self._note_times(state, members)
        accumulator = state.accumulator if state.has_contents else self._combine.create()
        state.accumulator, without_effect = self._combined(accumulator, members)
        state.has_contents = True
        state.news += len(members) - without_effect
        self.counts[_AFTER_CLEAR] += without_effect
        state.is_held |= self._watermark < state.window.end and strategy.closing != "never"
        # Elements are in the contents by now: triggers may look at them.
        strategy.trigger.on_elements(self._context(state), members)

    def _note_times(self, state: WindowState, members: Sequence[Element]) -> None:
        strategy = self._strategy
        for element in members:
            at = element_output_at(strategy.timestamp_combiner, strategy.window_fn, state.window, element.at)
            if at is not None and at >= self._watermark:
                state.output_at = combined(strategy.timestamp_combiner, state.output_at, at)

    def _combined(self, accumulator: Any, members: Sequence[Element]) -> tuple[Any, int]:
        """The accumulator with the elements in it, and how many retractions among them had no effect."""
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

    # -- merging ---------------------------------------------------------------------------

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
                # A window that only absorbs others continues its pane count.
                result.index, result.nonspeculative_index = source.index, source.nonspeculative_index
                result.has_ended = source.has_ended
        live = [source for source in sources if not source.is_closed]
        if not live:
            result.close()
            return
        # A source whose trigger has finished holds nothing any more, and does not finish the others.
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

    # -- signals ---------------------------------------------------------------------------

    def signal(self, name: str, window: Window | None) -> None:
        """Deliver a signal from outside to the triggers of the windows that it is for, and ask them.

        Args:
            name: the signal's name.
            window: whose; where windows merge, all that overlap it; ``None`` for all windows of the key.
        """
        states = [state for bounds in self._addressed(window) if (state := self.windows.get(bounds))]
        listening = [state for state in states if not state.is_closed]
        if not listening:
            self.counts[_SIGNALS_MISSED] += 1
        for state in listening:
            self._strategy.trigger.on_signal(self._context(state), name)
            self._ask(state, by_event_timer=False)
        if self._strategy.asked == "element":
            self._ring(listening)

    def _addressed(self, window: Window | None) -> list[Window]:
        if window is None:
            return sorted(self.windows.keys())
        if self._strategy.window_fn.is_merging:
            return sorted(filter(window.overlaps, self.windows.keys()))
        return [window]

    # -- timers ----------------------------------------------------------------------------

    def on_timer(self, window: Window, timer: TriggerTimer) -> None:
        """Deliver a trigger's timer to its owner, then ask the window's trigger.

        A timer that is no longer pending is ignored.
        """
        state = self.windows.get(window)
        at = None if state is None else state.timers.pop(timer.to_text(), None)
        if state is None or at is None:
            return
        self._strategy.trigger.on_child_timer(self._context(state), replace(timer, at=at))
        self._ask(state, by_event_timer=timer.domain is TimeDomain.EVENT)

    def _ring(self, states: Sequence[WindowState]) -> None:
        """Deliver the timers of these windows that are due already, in the order in which the engine would."""
        for _ in range(_RINGS_MAX):
            due = min(self._due(states), default=None)
            if due is None:
                return
            at, domain, percentile, _, window, text = due
            known = self._watermark, self._percentile_watermarks
            if domain is TimeDomain.EVENT:
                clocks = as_of(Timer("", domain, at, at, percentile), self._clocks())
                self._watermark, self._percentile_watermarks = clocks.watermark, clocks.percentile_watermarks
            self.on_timer(window, parse_timer(text))
            self._watermark, self._percentile_watermarks = known
        raise InvalidError(
            "a trigger keeps setting timers that are due already", trigger=self._strategy.trigger
        )

    def _due(
        self, states: Sequence[WindowState]
    ) -> Iterator[tuple[int, TimeDomain, float, str, Window, str]]:
        for state in states:
            for text, at in state.timers.items():
                timer = parse_timer(text)
                clock = self._clocks().of(timer.domain, timer.percentile)
                if at <= clock:
                    yield at, timer.domain, timer.percentile, tag_of(state.window, text), state.window, text

    def _clocks(self) -> Clocks:
        return Clocks(
            watermark=self._watermark,
            wall_time=self._wall_time,
            percentile_watermarks=self._percentile_watermarks,
        )

    def expire(self, window: Window) -> None:
        """Emit the window's last pane if the strategy asks for one, and drop the window."""
        state = self.windows.get(window)
        if state is None:
            return
        closing = self._strategy.closing
        if not state.is_closed and (closing == "always" or (closing == "if_non_empty" and state.news)):
            self._show(state, Firing(), is_last=True, by_event_timer=True, even_empty=True)
        self.windows.pop(window)

    # -- firing ----------------------------------------------------------------------------

    def _context(self, state: WindowState, sources: tuple[WindowState, ...] = ()) -> TriggerContext:
        return TriggerContext(
            state,
            self._watermark,
            self._wall_time,
            percentile_watermarks=self._percentile_watermarks,
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
        if self._watermark < state.window.end:
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
            produced_at=self._wall_time,
            trigger=firing.label(),
        )

    def _values(self, state: WindowState, pane: Pane) -> list[WindowedValue]:
        accumulator = state.accumulator if state.has_contents else self._combine.create()
        value = self._combine.extract(accumulator)
        is_retracting = self._strategy.is_incremental
        if (self._is_cut or is_retracting) and isinstance(value, dict | list):
            # More elements may be added to the accumulator, of which this may be a part, before it is stored.
            value = deepcopy(value)
        shown = WindowedValue(
            value=value,
            window=state.window,
            at=state.window.last_at if state.output_at is None else state.output_at,
            pane=pane,
        )
        if self._finish is None:
            return [shown]
        return [replace(shown, value=result) for result in self._finish(self._key, value, state.window, pane)]
