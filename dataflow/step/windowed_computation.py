"""
A windowed step as a computation: its state is the key's windows, its timers are their triggers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from millpond.dataflow.combiners.combine_fn import CombineFn, ValueExtractor, extract
from millpond.dataflow.step.key_windows import WINDOW_COUNTERS, Finish, KeyWindows
from millpond.dataflow.step.pane import WindowedValue
from millpond.dataflow.step.strategy import WindowingStrategy
from millpond.dataflow.step.window_timers import Wanted, add_wanted, parse_tag, set_hold, set_timers
from millpond.dataflow.windows.element import Element
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Record, Records
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.clocks import EXACT, Clocks
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros

__all__ = ["WindowedComputation", "as_of", "element_of"]


def as_of(timer: Timer, clocks: Clocks) -> Clocks:
    """
    What event time looks like at the moment a timer waited for.

    Panes follow from event time, not from the steps in which watermarks happened to move: a
    watermark is seen at the timer's time at most, and one that is less hasty than the timer's
    own is still before it.

    Example:
        >>> seen = as_of(
        ...     Timer("", TimeDomain.EVENT, at=10, output_at=10, percentile=90.0),
        ...     Clocks(watermark=25, wall_time=0, percentile_watermarks={90.0: 30, 50.0: 40}),
        ... )
        >>> seen.watermark, seen.percentile_watermarks
        (9, {90.0: 10, 50.0: 10})
    """

    def seen(percentile: float, mark: int) -> EventTimeMicros:
        return EventTimeMicros(min(mark, timer.at - 1 if percentile > timer.percentile else timer.at))

    percentile_watermarks = {each: seen(each, mark) for each, mark in clocks.percentile_watermarks.items()}
    return Clocks(
        watermark=seen(EXACT, clocks.watermark),
        wall_time=clocks.wall_time,
        percentile_watermarks=percentile_watermarks,
    )


def element_of(record: Record, of: ValueExtractor = None) -> Element:
    """
    What a record brings: its value and time, or those of the pane in its envelope.

    Args:
        record: the record.
        of: what of the value is meant.
    """
    value = record.value
    if not WindowedValue.is_envelope(value):
        return Element(value if of is None else extract(of, value), record.at, record.key)
    inner = value["value"]
    return Element(
        inner if of is None else extract(of, inner), value["at"], record.key, value["pane"]["is_retraction"]
    )


class WindowedComputation(Computation):
    """
    Groups records by key and window, and shows each window's panes on one stream.

    Args:
        strategy: where, when and how.
        combine: what becomes of the elements of a window.
        stream: where the panes go.
        of: what of a record's value is the element; ``None`` is all of it.
        finish: what becomes of the combined value; ``None`` shows it as it is.
    """

    counters: Collection[str] = WINDOW_COUNTERS

    def __init__(
        self,
        strategy: WindowingStrategy,
        combine: CombineFn,
        stream: str,
        *,
        of: ValueExtractor = None,
        finish: Finish | None = None,
    ) -> None:
        self.strategy = strategy
        self.percentiles: Collection[float] = tuple(sorted(strategy.trigger.percentiles))
        self.combine = combine
        self.stream = stream
        self.of = of
        self.finish = finish

    def element(self, record: Record) -> Element:
        """
        What a record brings to its windows.
        """
        return element_of(record, self.of)

    def process_records(self, context: Context, records: Records) -> None:
        """
        Add a bundle of elements; each window's trigger is asked once.
        """
        elements = [self.element(record) for record in records]
        self._turn(context, self._clocks(context), lambda windows: windows.add(elements))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """
        Ask the trigger whose timer it was, or let the window expire.
        """
        window, trigger_timer = parse_tag(timer.tag)
        clocks = self._clocks(context)
        if timer.domain is TimeDomain.EVENT:
            clocks = as_of(timer, clocks)

        def react(windows: KeyWindows) -> None:
            if trigger_timer is None:
                windows.expire(window)
            else:
                windows.on_timer(window, trigger_timer)

        self._turn(context, clocks, react, fired=timer.tag)

    def _clocks(self, context: Context) -> Clocks:
        percentile_watermarks = {each: context.watermark_at(each) for each in self.percentiles}
        return Clocks(
            watermark=context.watermark,
            wall_time=context.wall_time,
            percentile_watermarks=percentile_watermarks,
        )

    def _turn(
        self,
        context: Context,
        clocks: Clocks,
        react: Callable[[KeyWindows], None],
        fired: str = "",
    ) -> None:
        before: dict[str, Wanted] = {}
        seen, strategy = context.watermark, self.strategy
        windows = KeyWindows(
            strategy,
            self.combine,
            self.finish,
            context.state.get(),
            key=context.key,
            watermark=clocks.watermark,
            wall_time=clocks.wall_time,
            percentile_watermarks=clocks.percentile_watermarks,
            on_open=lambda state: add_wanted(before, strategy, state, seen),
        )
        owed_at = windows.windows.oldest_output_at()
        react(windows)
        before.pop(fired, None)
        after: dict[str, Wanted] = {}
        for state in windows.windows.opened():
            add_wanted(after, strategy, state, seen)
        oldest_at = context.oldest_at
        set_timers(context, before, after, oldest_at)
        set_hold(context, owed_at, windows.windows.oldest_output_at(), oldest_at)
        self._produce(context, windows)
        for counter, amount in windows.counts.items():
            if amount:
                context.count(counter, amount)
        self._keep(context, windows.to_json())

    def _produce(self, context: Context, windows: KeyWindows) -> None:
        if not windows.output:
            return
        oldest_at = context.oldest_at
        for shown in windows.output:
            context.produce(self.stream, shown.to_json(), at=max(shown.at, oldest_at))

    def _keep(self, context: Context, state: dict[str, Any] | None) -> None:
        if state is None:
            context.state.delete()
        else:
            context.state.set(state)
