"""Windowed steps as computations: the state is the key's windows, the timers are their triggers' timers.

Element-wise steps between windowed ones keep windows and panes. A retraction passes through them like any other
value: the results of the retracted value are retracted, whatever key they ended up on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from types import GeneratorType
from typing import Any, Final

from millpond.executor.computation.column_rows import ColumnRows
from millpond.executor.computation.computation import Computation, Way
from millpond.executor.computation.context import Context
from millpond.executor.computation.quick_turn import QuickTurns
from millpond.executor.computation.records import Record, RecordColumns, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.nodes import SIGNALS
from millpond.executor.pipeline.signals import read_signal
from millpond.executor.time.clocks import Clocks, LateDataHorizon
from millpond.executor.time.instants import Instant, instant_us
from millpond.executor.windows.accumulator_columns import has_column, keeps_no_order
from millpond.executor.windows.calendar_columns import CalendarColumns
from millpond.executor.windows.combiners import CombineFn, ValueExtractor, extract
from millpond.executor.windows.key_windows import (
    HOLD,
    WINDOW_COUNTERS,
    Finish,
    KeyWindows,
    Wanted,
    WindowStates,
    add_wanted,
    as_of,
    parse_tag,
    set_hold,
    set_timers,
    stored_windows,
    upgraded_windows,
)
from millpond.executor.windows.session_columns import SessionColumns
from millpond.executor.windows.strategy import WindowingStrategy, described
from millpond.executor.windows.waiting_columns import WaitingColumns
from millpond.executor.windows.waiting_windows import WaitingWindows, has_short_turns, more_than_waiting
from millpond.executor.windows.window import Element, Window, WindowFn
from millpond.executor.windows.window_fns import CalendarWindows, FixedWindows, Sessions, SlidingWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain, is_envelope
from millpond.statestore.rows.value_text import PlainObject


def element_of(record: Record, of: ValueExtractor = None) -> Element:
    value = record.value
    if not is_envelope(value):
        return Element(value if of is None else extract(of, value), record.at, record.key)
    inner = value["value"]
    return Element(
        inner if of is None else extract(of, inner), value["at"], record.key, value["pane"]["is_retraction"]
    )


_COLUMNS: Final[Mapping[type[WindowFn], type[WaitingColumns]]] = {
    FixedWindows: WaitingColumns,
    SlidingWindows: WaitingColumns,
    Sessions: SessionColumns,
    CalendarWindows: CalendarColumns,
}


class WindowedComputation(Computation):
    """A step that groups records by key and window, and produces each window's panes on one stream."""

    counters: Collection[str] = WINDOW_COUNTERS
    holds_watermark: bool = True
    late_stream: str | None = None

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
        self.in_order_of_arrival: bool = strategy.asked == "element"
        self.percentiles: Collection[float] = tuple(sorted(strategy.trigger.percentiles))
        self.signals: frozenset[str] = strategy.trigger.signals
        self.combine = combine
        self.stream = stream
        self.of = of
        self.finish = finish
        self.state_version: int = strategy.state_version

    @property
    def fingerprint(self) -> Mapping[str, str]:  # type: ignore[override]  # a constant of the class elsewhere
        of = {} if self.of is None else {"of": described(self.of)}
        return self.strategy.fingerprint(self.combine) | of

    def upgrade_state(self, state: Any, version: int) -> Any:
        if self.strategy.upgrade_state is None:
            return super().upgrade_state(state, version)
        return upgraded_windows(self.strategy.upgrade_state(stored_windows(state), version))

    def quick_turns(self, clocks: Clocks, columns: RecordColumns) -> QuickTurns | None:
        """Return the turns of keys whose windows only wait for their end; ``None`` for other strategies."""
        if self._needs_hooks is not None or not has_short_turns(self.strategy):
            return None
        return WaitingWindows(
            self.strategy, self.combine, self.stream, clocks, columns, of=self.of, finish=self.finish
        )

    def column_rows(self, streams: Mapping[str, str]) -> ColumnRows | None:
        """Return rows for windows that only wait, if their accumulators can be a column."""
        if self._needs_hooks is not None or self._not_in_columns is not None:
            return None
        columns = _COLUMNS[type(self.strategy.window_fn)]
        return columns(self.strategy, self.combine, streams[self.stream], self.finish)

    def way(self) -> Way:
        reason = self._needs_hooks
        if reason is not None:
            return Way("hooks", reason, "makes")
        reason = self._not_in_columns
        if reason is None:
            return Way("columns", "", "makes")
        return Way("short turns" if has_short_turns(self.strategy) else "hooks", reason, "makes")

    @property
    def _not_in_columns(self) -> str | None:
        """The reason why windows that only wait are no columns; ``None`` if they are."""
        if self.of is not None:
            return "of= gives the values"
        kind = type(self.strategy.window_fn)
        if kind not in _COLUMNS:
            return f"{kind.__name__} begin at times of their keys"
        if not has_column(self.combine):
            return f"{type(self.combine).__name__} of these arguments is no column"
        if kind is Sessions and not keeps_no_order(self.combine):
            return f"{type(self.combine).__name__} of sessions depends on order"
        return None

    @property
    def _needs_hooks(self) -> str | None:
        """The reason why keys need hooks; ``None`` if their windows mostly wait for their end."""
        if type(self) is not WindowedComputation:
            return "the step joins streams"
        if self.signals:
            return "it waits for signals"
        if self.late_stream is not None:
            return "it has a stream of late records"
        kind = type(self.strategy.window_fn)
        if kind not in _COLUMNS and not has_short_turns(self.strategy):
            return f"{kind.__name__} are not of one size"
        return more_than_waiting(self.strategy)

    def element(self, record: Record) -> Element:
        return element_of(record, self.of)

    def process_records(self, context: Context, records: Records) -> None:
        if not self.signals:
            self._add(context, records)
            return
        # In the order of arrival, because a signal acts only on the elements before it.
        for is_signal, run in groupby(records, lambda record: record.stream == SIGNALS):
            if is_signal:
                for record in run:
                    self._signal(context, record)
            else:
                self._add(context, run)

    def _add(self, context: Context, records: Iterable[Record]) -> None:
        late_stream = self.late_stream
        arrived = records if late_stream is None else list(records)
        elements = [self.element(record) for record in arrived]
        windows = self._run(context, self._clocks(context), lambda windows: windows.add(elements))
        if late_stream is not None and windows.late:
            late = set(map(id, windows.late))
            for element, record in zip(elements, arrived, strict=True):
                if id(element) in late:
                    context.produce(late_stream, record.value, at=record.at)

    def _signal(self, context: Context, record: Record) -> None:
        signal = read_signal(record.value, self.stream)
        if signal is not None and signal[0] in self.signals:
            name, bounds = signal
            window = None if bounds is None else Window(*bounds)
            self._run(context, self._clocks(context), lambda windows: windows.signal(name, window))

    def process_timer(self, context: Context, timer: Timer) -> None:
        window, trigger_timer = parse_tag(timer.tag)
        clocks = self._clocks(context)
        if timer.domain is TimeDomain.EVENT:
            # Otherwise panes would depend on how far the watermark happened to jump.
            clocks = as_of(timer, clocks)

        def react(windows: KeyWindows) -> None:
            if trigger_timer is None:
                windows.expire(window)
            else:
                windows.on_timer(window, trigger_timer)

        self._run(context, clocks, react, fired=timer.tag)

    def _clocks(self, context: Context) -> Clocks:
        percentiles = {percentile: context.watermark_at(percentile) for percentile in self.percentiles}
        return Clocks(
            watermark=context.watermark, wall_time=context.wall_time, percentile_watermarks=percentiles
        )

    def _run(
        self, context: Context, clocks: Clocks, react: Callable[[KeyWindows], None], fired: str = ""
    ) -> KeyWindows:
        before: dict[str, Wanted] = {}
        watermark, strategy = context.watermark, self.strategy
        states = context.state.open(WindowStates)
        # The timers of each window before the hook changes it, so that only differences go to the engine.
        states.begin_hook(lambda state: add_wanted(before, strategy, state, watermark))
        windows = KeyWindows(strategy, self.combine, self.finish, states, clocks, context.key)
        output_at = states.oldest_output_at()
        if states.is_upgraded:
            windows.resume()
            # The row has the timers and the hold of other code, so all of them are set again.
            before.clear()
            context.state.release(HOLD)
            output_at = None
        react(windows)
        # The engine has dropped the timer that fired: where it is still wanted, it must be set again.
        before.pop(fired, None)
        after: dict[str, Wanted] = {}
        for state in states.touched():
            add_wanted(after, strategy, state, watermark)
        oldest_at = context.oldest_at
        set_timers(context, before, after, oldest_at)
        set_hold(context, output_at, states.oldest_output_at(), oldest_at)
        for shown in windows.output:
            context.produce(self.stream, shown.to_json(), at=max(shown.at, oldest_at))
        for counter, amount in windows.counts.items():
            if amount:
                context.count(counter, amount)
        return windows


_MANY: Final = frozenset({list, tuple, GeneratorType})


def refuse_one_value(results: Iterable[Any], method: str) -> None:
    """Refuse one value in place of several: its letters, field names or columns would be the results."""
    if isinstance(results, str | bytes | bytearray | Mapping) or hasattr(results, "columns"):
        raise InvalidError(
            f"{method}'s function must return an iterable of values, such as a list, got a {type(results).__name__}"
        )


class ElementWise(Computation):
    """A step that replaces each value by any number of values, each in the envelope of the value if it has one."""

    in_order_of_arrival = True

    def __init__(
        self, function: Callable[[Any], Iterable[Any]], stream: str, *, is_one_to_one: bool = False
    ) -> None:
        self.function = function
        self.stream = stream
        self.is_one_to_one = is_one_to_one

    def way(self) -> Way:
        return replace(super().way(), panes="keeps")

    def process_record(self, context: Context, record: Record) -> None:
        value = record.value
        is_pane = is_envelope(value)
        results = self.function(value["value"] if is_pane else value)
        if type(results) not in _MANY:
            refuse_one_value(results, "flat_map")
        if is_pane:
            for result in results:
                context.produce(self.stream, {**value, "value": result})
            return
        for result in results:
            context.produce(self.stream, PlainObject(result) if is_envelope(result) else result)


class TimestampShift(Computation):
    """A step that gives each value a new event time (the windowing patent's timestamp setter)."""

    in_order_of_arrival = True
    is_one_to_one = True

    def __init__(
        self, function: Callable[[Any, int], Instant], stream: str, late_data_horizon: LateDataHorizon
    ) -> None:
        self.function = function
        self.stream = stream
        self.late_data_horizon: LateDataHorizon = late_data_horizon

    def way(self) -> Way:
        return replace(super().way(), panes="keeps")

    def process_record(self, context: Context, record: Record) -> None:
        value = record.value
        if not is_envelope(value):
            context.produce(self.stream, value, at=instant_us(self.function(value, record.at)))
            return
        moved = instant_us(self.function(value["value"], value["at"]))
        # The record is later than its pane where the watermark had passed the pane's time. It keeps that distance.
        at = record.at - max(0, value["at"] - moved)
        context.produce(self.stream, {**value, "at": moved}, at=max(at, moved))
