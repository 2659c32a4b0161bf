"""Triggers that look at what a window holds: its combined value, element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.dataflow.windows.element import Element
from millpond.statestore.errors import InvalidError

_HOLDS: Final = "holds"


@dataclass(frozen=True)
class ResultIs(Trigger):
    """Fires once, when the window's combined value satisfies a condition (after the patent's ``ResultIsOdd``).

    The value is what a pane would show: of the elements since the last pane where panes discard, of all
    elements so far where they accumulate. It is looked at after each element and each merge; a value that
    satisfied the condition and no longer does, as elements have come since, does not count. Wrap it in
    `Repeatedly` to fire again.

    Args:
        condition: takes the combined value and returns whether to fire; it must not modify the value.

    Raises:
        InvalidError: the condition is not callable.

    Example:
        >>> odd = ResultIs(lambda total: total % 2 == 1)
    """

    condition: Callable[[Any], bool]

    def __post_init__(self) -> None:
        """Validate the condition at construction."""
        if not callable(self.condition):
            raise InvalidError("a condition is a function of the combined value", condition=self.condition)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - any element
        """Look at the value with the element in it."""
        self._look(context)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - any elements
        """Look at the value with all elements of the bundle in it."""
        self._look(context)

    def on_merge(self, context: TriggerContext) -> None:
        """Look at the value of all merged windows together."""
        self._look(context)

    def _look(self, context: TriggerContext) -> None:
        context.set(_HOLDS, value=bool(self.condition(context.peek_value())))

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the value satisfied the condition when it last changed."""
        return bool(context.get(_HOLDS, False))

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.set(_HOLDS, value=False)
        return True
