"""Triggers on a window's contents (counts, bytes, user functions, the combined value) and on signals from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from millpond.executor.pipeline.checks import check_name
from millpond.executor.windows.trigger import Trigger, TriggerContext
from millpond.executor.windows.window import Element
from millpond.statestore.arguments import check_count, check_function
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec

_SEEN: Final = "seen"
_STATE: Final = "state"


class _AfterAmount(Trigger):
    """A trigger that fires once, when the amounts of the window's elements add up to a bound."""

    def _amount(self, element: Element) -> int:
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        context.set(_SEEN, context.get(_SEEN, 0) + self._amount(element))

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        context.set(_SEEN, context.get(_SEEN, 0) + sum(map(self._amount, elements)))

    def on_merge(self, context: TriggerContext) -> None:
        context.set(_SEEN, sum(source.get(_SEEN, 0) for source in context.sources))

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - fires once
        return True


@dataclass(frozen=True)
class AfterCount(_AfterAmount):
    """A trigger that fires once, when the window has received ``count`` elements, at least 1.

    Where triggers are asked once per bundle (``asked="bundle"``), a pane may hold more than ``count``.
    """

    count: int

    def __post_init__(self) -> None:
        check_count("a count", self.count)

    def _amount(self, element: Element) -> int:  # noqa: ARG002 - each counts once
        return 1

    def should_fire(self, context: TriggerContext) -> bool:
        return bool(context.get(_SEEN, 0) >= self.count)


@dataclass(frozen=True)
class AfterBytes(_AfterAmount):
    """A trigger that fires once, when the values of the window's elements add up to ``size`` bytes, at least 1.

    A value of type ``bytes`` counts with its length, any other with the length of its JSON.
    """

    size: int

    def __post_init__(self) -> None:
        check_count("a size", self.size)

    def _amount(self, element: Element) -> int:
        value = element.value
        return len(value) if isinstance(value, bytes) else len(JsonCodec().encode(value).encode())

    def should_fire(self, context: TriggerContext) -> bool:
        return bool(context.get(_SEEN, 0) >= self.size)


class _OnFlag(Trigger):
    """A trigger that fires once, while a flag in its state is set; the flag outlasts a merge."""

    _flag: ClassVar[str]

    def on_merge(self, context: TriggerContext) -> None:
        if any(source.get(self._flag) for source in context.sources):
            context.set(self._flag, value=True)

    def should_fire(self, context: TriggerContext) -> bool:
        return bool(context.get(self._flag, False))

    def on_fire(self, context: TriggerContext) -> bool:
        context.set(self._flag, value=False)
        return True


@dataclass(frozen=True)
class ShouldEmit(_OnFlag):
    """A trigger that fires once, when a user function accepts an element; wrap it in `Repeatedly` to fire again.

    Args:
        function: takes the element's value and the state so far (``None`` at first). Returns whether to fire,
            and the new state, which must be JSON data and is kept until the trigger is reset.
        merge: takes the states of the merged windows, each ``None`` where the function has seen no
            element since the trigger started, and returns the merged state; required if windows merge.

    Example:
        >>> big = ShouldEmit(lambda value, total: ((total or 0) + value >= 100, (total or 0) + value))
    """

    _flag: ClassVar[str] = "emit"

    function: Callable[[Any, Any], tuple[bool, Any]]
    merge: Callable[[Sequence[Any]], Any] | None = None

    def __post_init__(self) -> None:
        check_function("function", self.function)
        check_function("merge", self.merge, optional=True)

    @property
    def can_merge(self) -> bool:
        return self.merge is not None

    def on_element(self, context: TriggerContext, element: Element) -> None:
        emit, state = self.function(element.value, context.get(_STATE))
        context.set(_STATE, state)
        if emit:
            context.set(self._flag, value=True)

    def on_merge(self, context: TriggerContext) -> None:
        if self.merge is None:
            raise InvalidError("windows merge, but the trigger has no merge function", trigger=self)
        context.set(_STATE, self.merge([source.get(_STATE) for source in context.sources]))
        _OnFlag.on_merge(self, context)


@dataclass(frozen=True)
class ResultIs(_OnFlag):
    """A trigger that fires once, when the window's combined value satisfies a condition (the patent's ``ResultIsOdd``).

    The value is the one a pane would show: where panes discard, of the elements since the last pane, and where they
    accumulate, of all elements so far. The condition is evaluated after each element and each merge. A value that
    satisfied it only in between does not count. Wrap the trigger in `Repeatedly` to fire again.

    Args:
        condition: takes the combined value and returns whether to fire; it must not modify the value.

    Example:
        >>> odd = ResultIs(lambda total: total % 2 == 1)
    """

    _flag: ClassVar[str] = "holds"

    condition: Callable[[Any], bool]

    def __post_init__(self) -> None:
        if not callable(self.condition):
            raise InvalidError("a condition is a function of the combined value", condition=self.condition)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - any element
        self.on_merge(context)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - any elements
        self.on_merge(context)

    def on_merge(self, context: TriggerContext) -> None:
        context.set(self._flag, value=bool(self.condition(context.peek_value())))


@dataclass(frozen=True)
class AfterSignal(_OnFlag):
    """A trigger that fires once, when a signal of this name arrives for the window; to fire again, use `Repeatedly`.

    ``run.signal(name, key, window)`` gives the signal, on either runner. The signal goes through a superstep and its
    fenced commit as records do, so it takes effect exactly once. A signal for a window without elements has
    no effect; the step counts it as ``signals_missed``.

    Args:
        name: the signal's name: letters, digits and ``_ - .``.

    Example:
        >>> AfterAny(AfterSignal("release"), AfterWatermark())
        AfterAny(AfterSignal(name='release'), AfterWatermark(early=None, late=None))
    """

    _flag: ClassVar[str] = "given"

    name: str

    def __post_init__(self) -> None:
        check_name("signal", self.name, reserved=frozenset())

    @property
    def signals(self) -> frozenset[str]:
        return frozenset({self.name})

    def on_signal(self, context: TriggerContext, name: str) -> None:
        if name == self.name:
            context.set(self._flag, value=True)
