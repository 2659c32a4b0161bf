"""
Triggers on the data itself: so many elements, so many bytes, or whatever the user's code sees in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.dataflow.windows.element import Element
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec

__all__ = ["AfterBytes", "AfterCount", "ShouldEmit"]

_SEEN: Final = "seen"
_STATE: Final = "state"
_EMIT: Final = "emit"


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidError(f"{name} is a whole number of at least 1", value=count)


class _AfterAmount(Trigger):
    """
    Fires once, when the amounts of its window's elements add up to a bound.
    """

    @property
    def _bound(self) -> int:
        raise NotImplementedError

    def _amount(self, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        Add it up.
        """
        context.set(_SEEN, context.get(_SEEN, 0) + self._amount(element))

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """
        Add them up.
        """
        context.set(_SEEN, context.get(_SEEN, 0) + sum(map(self._amount, elements)))

    def on_merge(self, context: TriggerContext) -> None:
        """
        What the merged windows had adds up.
        """
        context.set(_SEEN, sum(source.get(_SEEN, 0) for source in context.sources))

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the bound is reached.
        """
        return bool(context.get(_SEEN, 0) >= self._bound)

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - once
        """
        Once is enough.
        """
        return True


@dataclass(frozen=True)
class AfterCount(_AfterAmount):
    """
    Fires once, when its window has got ``count`` elements.

    It is asked once per bundle, so a pane may have more of them.

    Raises:
        InvalidError: a count below 1.
    """

    count: int

    def __post_init__(self) -> None:
        """
        Refuse a count that cannot work while the caller is still near.
        """
        _check_count("a count", self.count)

    @property
    def _bound(self) -> int:
        return self.count

    def _amount(self, element: Element) -> int:  # noqa: ARG002 - each counts once
        return 1


@dataclass(frozen=True)
class AfterBytes(_AfterAmount):
    """
    Fires once, when the values of its window come to ``size`` bytes of JSON.

    Raises:
        InvalidError: a size below 1.
    """

    size: int

    def __post_init__(self) -> None:
        """
        Refuse a size that cannot work while the caller is still near.
        """
        _check_count("a size", self.size)

    @property
    def _bound(self) -> int:
        return self.size

    def _amount(self, element: Element) -> int:
        value = element.value
        return len(value) if isinstance(value, bytes) else len(JsonCodec().encode(value).encode())


@dataclass(frozen=True)
class ShouldEmit(Trigger):
    """
    Fires once, when the user's function says so of an element; repeat it to have it say so again.

    Args:
        function: given the element's value and the state so far (``None`` at first), returns
            whether to emit, and the new state, which JSON must be able to carry.
        merge: the state of a merged window from those of its sources, each ``None`` where the
            function has seen nothing yet or the trigger has started over; windows that merge need it.
    """

    function: Callable[[Any, Any], tuple[bool, Any]]
    merge: Callable[[Sequence[Any]], Any] | None = None

    @property
    def can_merge(self) -> bool:
        """
        Whether it was given a way to merge.
        """
        return self.merge is not None

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        Ask the function.
        """
        emit, state = self.function(element.value, context.get(_STATE))
        context.set(_STATE, state)
        if emit:
            context.set(_EMIT, value=True)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Merge what the function remembered.
        """
        if self.merge is None:
            raise InvalidError("windows merge, but the trigger was not told how to", trigger=self)
        context.set(_STATE, self.merge([source.get(_STATE) for source in context.sources]))
        if any(source.get(_EMIT) for source in context.sources):
            context.set(_EMIT, value=True)

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the function said so.
        """
        return bool(context.get(_EMIT, False))

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Once is enough; what the function remembers is kept until the trigger starts over.
        """
        context.set(_EMIT, value=False)
        return True
