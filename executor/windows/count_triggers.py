"""Data-driven triggers: a number of elements, a number of bytes, or a user function of the values.

Triggers that look at what a window holds: its combined value, element by element.

Triggers that wait for the outside: an operator, another program, a calendar of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millpond.executor.pipeline.checks import check_name
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.trigger_context import TriggerContext
from millpond.executor.windows.window import Element
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec

_SEEN: Final = "seen"
_STATE: Final = "state"
_EMIT: Final = "emit"


def _check_count(name: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidError(f"{name} must be an integer of at least 1", value=count)


class _AfterAmount(Trigger):
    """Fires once, when the amounts of the window's elements add up to a bound."""

    @property
    def _bound(self) -> int:
        raise NotImplementedError

    def _amount(self, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Add the element's amount."""
        context.set(_SEEN, context.get(_SEEN, 0) + self._amount(element))

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Add the amounts of a bundle."""
        context.set(_SEEN, context.get(_SEEN, 0) + sum(map(self._amount, elements)))

    def on_merge(self, context: TriggerContext) -> None:
        """Add up the amounts of the merged windows."""
        context.set(_SEEN, sum(source.get(_SEEN, 0) for source in context.sources))

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the bound is reached."""
        return bool(context.get(_SEEN, 0) >= self._bound)

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - fires once
        """Finished after one firing."""
        return True


@dataclass(frozen=True)
class AfterCount(_AfterAmount):
    """Fires once, when the window has received ``count`` elements.

    Where triggers are asked once per bundle (``asked="bundle"``), a pane may hold more than ``count``.

    Args:
        count: number of elements, at least 1.

    Raises:
        InvalidError: a count that is not an integer of at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        """Validate the count at construction."""
        _check_count("a count", self.count)

    @property
    def _bound(self) -> int:
        return self.count

    def _amount(self, element: Element) -> int:  # noqa: ARG002 - each counts once
        return 1


@dataclass(frozen=True)
class AfterBytes(_AfterAmount):
    """Fires once, when the values of the window's elements add up to ``size`` bytes of JSON.

    Args:
        size: number of bytes, at least 1; a value of type ``bytes`` counts with its own length.

    Raises:
        InvalidError: a size that is not an integer of at least 1.
    """

    size: int

    def __post_init__(self) -> None:
        """Validate the size at construction."""
        _check_count("a size", self.size)

    @property
    def _bound(self) -> int:
        return self.size

    def _amount(self, element: Element) -> int:
        value = element.value
        return len(value) if isinstance(value, bytes) else len(JsonCodec().encode(value).encode())


@dataclass(frozen=True)
class ShouldEmit(Trigger):
    """Fires once, when a user function accepts an element; wrap it in `Repeatedly` to fire again.

    Args:
        function: takes the element's value and the state so far (``None`` at first), and returns
            whether to fire, and the new state, which must be JSON data.
        merge: takes the states of the merged windows, each ``None`` where the function has seen no
            element since the trigger started, and returns the merged state; required if windows merge.

    Example:
        >>> big = ShouldEmit(lambda value, total: ((total or 0) + value >= 100, (total or 0) + value))
    """

    function: Callable[[Any, Any], tuple[bool, Any]]
    merge: Callable[[Sequence[Any]], Any] | None = None

    @property
    def can_merge(self) -> bool:
        """Whether a merge function was given."""
        return self.merge is not None

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Call the function with the element's value and the state."""
        emit, state = self.function(element.value, context.get(_STATE))
        context.set(_STATE, state)
        if emit:
            context.set(_EMIT, value=True)

    def on_merge(self, context: TriggerContext) -> None:
        """Merge the function's states; fires if any source was about to fire.

        Raises:
            InvalidError: no merge function was given.
        """
        if self.merge is None:
            raise InvalidError("windows merge, but the trigger has no merge function", trigger=self)
        context.set(_STATE, self.merge([source.get(_STATE) for source in context.sources]))
        if any(source.get(_EMIT) for source in context.sources):
            context.set(_EMIT, value=True)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the function has accepted an element."""
        return bool(context.get(_EMIT, False))

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing; the function's state is kept until the trigger is reset."""
        context.set(_EMIT, value=False)
        return True


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


_GIVEN: Final = "given"


@dataclass(frozen=True)
class AfterSignal(Trigger):
    """Fires once, when a signal of this name comes for the window; wrap it in `Repeatedly` to fire again.

    ``run.signal(name, key, window)`` gives the signal, on either runner. It goes through a superstep and its
    fenced commit as records do, so it takes effect exactly once. A signal for a window without elements has
    nothing to show: it is counted as ``signals_missed`` of the step.

    Args:
        name: the signal's name: letters, digits and ``_ - .``.

    Raises:
        InvalidError: the name is malformed.

    Example:
        >>> AfterAny(AfterSignal("release"), AfterWatermark())
        AfterAny(AfterSignal(name='release'), AfterWatermark(early=None, late=None))
    """

    name: str

    def __post_init__(self) -> None:
        """Validate the name at construction."""
        check_name("signal", self.name, reserved=frozenset())

    @property
    def signals(self) -> frozenset[str]:
        """Its name."""
        return frozenset({self.name})

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Note a signal of its name."""
        if name == self.name:
            context.set(_GIVEN, value=True)

    def on_merge(self, context: TriggerContext) -> None:
        """The signal has come if it has for any of the merged windows."""
        if any(source.get(_GIVEN) for source in context.sources):
            context.set(_GIVEN, value=True)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the signal has come."""
        return bool(context.get(_GIVEN, False))

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.set(_GIVEN, value=False)
        return True
