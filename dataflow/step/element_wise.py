"""Element-wise steps between windowed ones: values change, their windows and panes stay.

A retraction is processed like any other value and stays a retraction: the results of the
retracted value are retracted, whatever key they ended up on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Record
from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.event_time.late_data_horizon import LateDataHorizon
from millpond.executor.pipeline.key_extractor import KeyExtractor, extract_key, settled_key
from millpond.statestore.rows.codec import PlainObject
from millpond.statestore.rows.envelope import is_envelope


@dataclass(frozen=True, slots=True)
class PaneKey:
    """A key extractor that looks inside the envelope of a windowed step's result.

    Example:
        >>> PaneKey("team")({"team": "red"})
        'red'
    """

    extractor: KeyExtractor

    def __call__(self, value: Any) -> str:
        """The key of a value, or of the value inside an envelope."""
        inner = value["value"] if is_envelope(value) else value
        return extract_key(self.extractor, None, inner)

    @classmethod
    def of(cls, extractor: KeyExtractor) -> KeyExtractor:
        """Wrap an extractor; ``None``, the record's own key, stays ``None``."""
        return extractor if extractor is None else cls(settled_key(extractor))


class ElementWise(Computation):
    """Replaces each value by any number of values.

    Args:
        function: takes a value and returns the values that replace it.
        stream: the stream to produce them on.
    """

    in_order_of_arrival = True

    def __init__(self, function: Callable[[Any], Iterable[Any]], stream: str) -> None:
        self.function = function
        self.stream = stream

    def process_record(self, context: Context, record: Record) -> None:
        """Produce the function's results, each in the envelope of the value if it has one."""
        value = record.value
        if is_envelope(value):
            for result in self.function(value["value"]):
                context.produce(self.stream, {**value, "value": result})
            return
        for result in self.function(value):
            context.produce(self.stream, PlainObject(result) if is_envelope(result) else result)


class TimestampShift(Computation):
    """Gives each value a new event time (the windowing patent's timestamp setter).

    Args:
        function: takes a value and its time in microseconds, and returns the new time.
        stream: the stream to produce the values on.
        late_data_horizon: how far back a time may be moved.
    """

    in_order_of_arrival = True

    def __init__(
        self, function: Callable[[Any, int], Instant], stream: str, late_data_horizon: LateDataHorizon
    ) -> None:
        self.function = function
        self.stream = stream
        self.late_data_horizon: LateDataHorizon = late_data_horizon

    def process_record(self, context: Context, record: Record) -> None:
        """Produce the value at its new time; a pane moves, its window does not."""
        value = record.value
        if not is_envelope(value):
            context.produce(self.stream, value, at=instant_us(self.function(value, record.at)))
            return
        moved = instant_us(self.function(value["value"], value["at"]))
        # A record may carry a pane later than the pane's own time; moved back, it keeps that distance.
        at = record.at - max(0, value["at"] - moved)
        context.produce(self.stream, {**value, "at": moved}, at=max(at, moved))
