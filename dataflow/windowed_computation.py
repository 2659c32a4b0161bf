"""
A windowed step as a computation: its state is the key's windows, its timers are their triggers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpond.dataflow.combine_fn import CombineFn, ValueExtractor, extract
from millpond.dataflow.element import Element
from millpond.dataflow.key_windows import Finish, KeyWindows
from millpond.dataflow.pane import WindowedValue
from millpond.dataflow.strategy import WindowingStrategy
from millpond.dataflow.window_timers import parse_tag, set_timers, wanted_timers
from millpond.executor.computation import Computation
from millpond.executor.context import Context
from millpond.executor.record import Record, Records
from millpond.executor.timer import Timer
from millpond.statestore.row import TimeDomain

__all__ = ["WindowedComputation", "element_of"]


def element_of(record: Record, of: ValueExtractor = None) -> Element:
    """
    What a record brings: its value and time, or those of the pane in its envelope.

    Args:
        record: the record.
        of: what of the value is meant.
    """
    value = record.value
    if not WindowedValue.is_envelope(value):
        return Element(value=extract(of, value), at=record.at, key=record.key)
    return Element(
        value=extract(of, value["value"]),
        at=value["at"],
        key=record.key,
        is_retraction=value["pane"]["is_retraction"],
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
        self._turn(context, records[0].at, context.watermark, lambda windows: windows.add(elements))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """
        Ask the trigger whose timer it was, or let the window expire.
        """
        parsed = parse_tag(timer.tag)
        if parsed is None:
            return
        window, trigger_timer = parsed
        watermark = context.watermark
        if timer.domain is TimeDomain.EVENT:
            # Panes follow from event time, not from the steps in which the watermark happened to move.
            watermark = min(watermark, timer.at)  # type: ignore[assignment]

        def react(windows: KeyWindows) -> None:
            if trigger_timer is None:
                windows.expire(window)
            else:
                windows.on_timer(window, trigger_timer)

        self._turn(context, timer.output_at, watermark, react, fired=timer.tag)

    def _turn(
        self,
        context: Context,
        floor: int,
        watermark: int,
        react: Callable[[KeyWindows], None],
        fired: str = "",
    ) -> None:
        windows = KeyWindows(
            self.strategy,
            self.combine,
            self.finish,
            context.state.get(),
            watermark=watermark,
            wall_time=context.wall_time,
            key=context.key,
        )
        before = wanted_timers(self.strategy, windows.windows.values(), context.watermark)
        before.pop(fired, None)
        react(windows)
        after = wanted_timers(self.strategy, windows.windows.values(), context.watermark)
        set_timers(context, before, after, floor)
        self._produce(context, windows, floor)
        self._keep(context, windows.to_json())

    def _produce(self, context: Context, windows: KeyWindows, floor: int) -> None:
        for shown in windows.output:
            context.produce(self.stream, shown.to_json(), at=max(shown.at, floor))

    def _keep(self, context: Context, state: dict[str, Any] | None) -> None:
        if state is None:
            context.state.delete()
        else:
            context.state.set(state)
