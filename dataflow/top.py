"""The top N of a window: the best of the combined values of all its keys.

Two steps. The first combines each key's elements, and takes back what it has shown before when it shows more; the
second gathers what the first has shown of one window, and keeps the best. So a list stays right when late elements
change what was in it, and when a value falls and another one moves up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millpond.dataflow.combiners.combiners import TopN
from millpond.dataflow.step.strategy import Accumulation, WindowingStrategy
from millpond.dataflow.windows.element import Element
from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_fn import WindowFn

_ALL = "all"


def entry_of(key: str, value: Any, window: Window) -> dict[str, Any]:
    """What the first step shows of a key: its value, and the window that it is of."""
    return {"key": key, "value": value, "window": list(window)}


@dataclass(frozen=True, slots=True)
class _WindowOfEntry(WindowFn):
    """Puts an entry into the window that it is of, whatever made that."""

    def assign(self, element: Element) -> Sequence[Window]:
        """The entry's own window."""
        start, end = element.value["window"]
        return (Window(start, end),)


def of_each_key(strategy: WindowingStrategy) -> WindowingStrategy:
    """The strategy of the first step: each value takes back the one before it."""
    return replace(strategy, accumulation=Accumulation.RETRACTING)


def of_all_keys(strategy: WindowingStrategy) -> WindowingStrategy:
    """The strategy of the second step: the same triggers, over whole lists, asked when a bundle's changes are all in."""
    is_retracting = strategy.accumulation is Accumulation.RETRACTING
    return replace(
        strategy,
        window_fn=_WindowOfEntry(),
        accumulation=Accumulation.RETRACTING if is_retracting else Accumulation.ACCUMULATING,
        asked="bundle",
    )


def ranked(entry: Any) -> list[Any]:
    """What entries are compared by: their values, and where these are equal their keys."""
    return [entry["value"], entry["key"]]


def group_of(among: Callable[[str], str] | None) -> Callable[[Any], str]:
    """The group in which an entry is ranked; one for all keys without ``among``."""
    return lambda entry: _ALL if among is None else among(entry["key"])


def best_of(count: int, *, smallest: bool) -> TopN:
    """The combiner of the second step."""
    return TopN(count, of=ranked, smallest=smallest, retractable=True)
