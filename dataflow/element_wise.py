"""
Element-wise steps between windowed ones: values change, their windows and panes stay.

A retraction goes through like any value, and its consumers learn that it is one: what was made
of a value that is taken back is taken back, on whatever key it had ended up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from millpond.dataflow.pane import WindowedValue
from millpond.executor.computation import Computation
from millpond.executor.context import Context
from millpond.executor.key_extractor import KeyExtractor, extract_key
from millpond.executor.record import Record

__all__ = ["ElementWise", "PaneKey"]


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
