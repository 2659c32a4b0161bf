"""
Element-wise steps between windowed ones: values change, their windows and panes stay.

A retraction goes through like any value, and its consumers learn that it is one: what was made
of a value that is taken back is taken back, on whatever key it had ended up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from millpond.dataflow.step.pane import WindowedValue
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Record
from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.event_time.late_data_horizon import LateDataHorizon
from millpond.executor.pipeline.key_extractor import KeyExtractor, extract_key

__all__ = ["ElementWise", "PaneKey", "TimestampShift"]


@dataclass(frozen=True, slots=True)
class PaneKey:
    """
    A key extractor that looks for the key inside the envelope, where there is one.

    Example:
        >>> PaneKey("team")({"team": "red"})
        'red'
    """

    extractor: Callable[[Any], str] | str

    def __call__(self, value: Any) -> str:
        """
        The key of a value.
        """
        inner = value["value"] if WindowedValue.is_envelope(value) else value
        return extract_key(self.extractor, None, inner)

    @classmethod
    def of(cls, extractor: KeyExtractor) -> KeyExtractor:
        """
        The extractor that looks inside; ``None`` stays the record's own key.
        """
        return extractor if extractor is None else cls(extractor)


class ElementWise(Computation):
    """
    Makes any number of values of each one.

    Args:
        function: given a value, gives values.
        stream: where they go.
    """

    def __init__(self, function: Callable[[Any], Iterable[Any]], stream: str) -> None:
        self.function = function
        self.stream = stream

    def process_record(self, context: Context, record: Record) -> None:
        """
        Hand on what the function makes of the value, in its envelope.
        """
        value = record.value
        is_envelope = WindowedValue.is_envelope(value)
        for made in self.function(value["value"] if is_envelope else value):
            context.produce(self.stream, {**value, "value": made} if is_envelope else made)


class TimestampShift(Computation):
    """
    Gives every value another event time (the windowing patent's timestamp setter).

    Args:
        function: given a value and its time in microseconds, gives the new time.
        stream: where the values go.
        late_data_horizon: how far back a time may be moved.
    """

    def __init__(
        self, function: Callable[[Any, int], Instant], stream: str, late_data_horizon: LateDataHorizon
    ) -> None:
        self.function = function
        self.stream = stream
        self.late_data_horizon: LateDataHorizon = late_data_horizon

    def process_record(self, context: Context, record: Record) -> None:
        """
        Hand the value on at its new time; a pane is moved, its window is not.
        """
        value = record.value
        if not WindowedValue.is_envelope(value):
            context.produce(self.stream, value, at=instant_us(self.function(value, record.at)))
            return
        moved = instant_us(self.function(value["value"], value["at"]))
        # A pane may travel later than its own time says; it may not travel earlier for that.
        at = record.at - max(0, value["at"] - moved)
        context.produce(self.stream, {**value, "at": moved}, at=max(at, moved))
