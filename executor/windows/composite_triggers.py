"""Composite triggers: all of several triggers, any of them, or one after another.

Triggers that fire repeatedly, and the trigger that never fires.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.trigger_context import TriggerContext, TriggerTimer
from millpond.executor.windows.window import Element
from millpond.statestore.errors import InvalidError

_POSITION: Final = "position"


class _Composite(Trigger):
    """A trigger of one or more children, named by their position."""

    def __init__(self, *triggers: Trigger) -> None:
        if not triggers:
            raise InvalidError("a composite trigger needs triggers", trigger=type(self).__name__)
        for trigger in triggers:
            if not isinstance(trigger, Trigger):
                raise InvalidError("a composite takes triggers only", trigger=trigger, of=type(self).__name__)
        self.triggers = triggers
        self._children = {str(position): trigger for position, trigger in enumerate(triggers)}

    @property
    def children(self) -> Mapping[str, Trigger]:
        """The triggers, by position."""
        return self._children

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.triggers))})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _Composite) and self.triggers == other.triggers

    def __hash__(self) -> int:
        return hash((type(self), self.triggers))


class _Parallel(_Composite):
    """A composite whose children all listen at the same time."""

    def on_arm(self, context: TriggerContext) -> None:
        """Arm every child."""
        for name, trigger in self.children.items():
            trigger.on_arm(context.child(name))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify every child."""
        for name, trigger in self.children.items():
            trigger.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Notify every child of the bundle."""
        for name, trigger in self.children.items():
            trigger.on_elements(context.child(name), elements)

    def on_merge(self, context: TriggerContext) -> None:
        """Notify every child."""
        for name, trigger in self.children.items():
            trigger.on_merge(context.child(name))

    def _fire_ready(self, context: TriggerContext) -> list[bool]:
        return [
            trigger.fire(context.child(name))
            for name, trigger in self.children.items()
            if trigger.should_fire(context.child(name))
        ]


class AfterAny(_Parallel):
    """Fires when any of its triggers fires; finishes when any of them has finished.

    Args:
        triggers: one or more triggers.

    Raises:
        InvalidError: no triggers, or an argument that is not a trigger.

    Example:
        >>> AfterAny(AfterCount(100), AfterProcessingTime("1m"))
        AfterAny(AfterCount(count=100), AfterProcessingTime(delay='1m', domain=<TimeDomain.WALL: 'wall'>, align_to=None))
    """

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether any child would fire."""
        return any(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire every child that is ready; finished if any of them is."""
        return any(self._fire_ready(context))


class OrFinally(AfterAny):
    """Fires as ``trigger`` does, until ``until`` fires, which ends both.

    Args:
        trigger: the trigger to follow.
        until: the trigger whose firing is the last one.
    """

    def __init__(self, trigger: Trigger, until: Trigger) -> None:
        super().__init__(trigger, until)


class AfterAll(_Parallel):
    """Fires when all of its triggers are ready; finishes when all of them have finished.

    Args:
        triggers: one or more triggers.

    Raises:
        InvalidError: no triggers, or an argument that is not a trigger.
    """

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether all children would fire."""
        return all(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire every child; finished if all of them are."""
        return all(self._fire_ready(context))


class AfterEach(_Composite):
    """Fires as its first trigger until that has finished, then as its second, and so on.

    A merged window continues from the least advanced of its sources.

    Args:
        triggers: one or more triggers, in order.

    Raises:
        InvalidError: no triggers, or an argument that is not a trigger.
    """

    def _position(self, context: TriggerContext) -> int:
        return int(context.get(_POSITION, 0))

    def _current(self, context: TriggerContext) -> tuple[Trigger, TriggerContext] | None:
        position = self._position(context)
        return (self.triggers[position], context.child(position)) if position < len(self.triggers) else None

    def on_arm(self, context: TriggerContext) -> None:
        """Arm the current trigger."""
        if current := self._current(context):
            current[0].on_arm(current[1])

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify the current trigger."""
        if current := self._current(context):
            current[0].on_element(current[1], element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Notify the current trigger of the bundle."""
        if current := self._current(context):
            current[0].on_elements(current[1], elements)

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Notify the current trigger."""
        if current := self._current(context):
            current[0].on_signal(current[1], name)

    def on_merge(self, context: TriggerContext) -> None:
        """Continue from the least advanced source: the others have not yet shown what it waits to show."""
        position = min(map(self._position, context.sources), default=0)
        context.set(_POSITION, position)
        there = [source for source in context.sources if self._position(source) == position]
        if current := self._current(context.merging(there)):
            current[0].on_merge(current[1])

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """Deliver timers of the current trigger only."""
        if timer.path == context.path or timer.path.startswith(f"{context.path}{self._position(context)}/"):
            Trigger.on_child_timer(self, context, timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the current trigger would fire."""
        current = self._current(context)
        return current is not None and current[0].should_fire(current[1])

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire the current trigger, and advance to the next when it has finished."""
        current = self._current(context)
        if current is None or not current[0].fire(current[1]):
            return current is None
        current[0].reset(current[1])
        position = self._position(context) + 1
        context.set(_POSITION, position)
        self.on_arm(context)
        return position == len(self.triggers)


_INNER: Final = "r"
_UNTIL: Final = "u"
_COUNT: Final = "fired"


@dataclass(frozen=True)
class Never(Trigger):
    """Never fires; the window's contents are emitted only when it expires, if its ``closing`` says so."""

    @property
    def waits_for_end(self) -> bool:
        """It waits for longer than that."""
        return type(self) is Never

    def should_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - never fires
        """Always false."""
        return False

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - never fires
        """Not reached; finished if it is."""
        return True


@dataclass(frozen=True)
class Repeatedly(Trigger):
    """Restarts a trigger each time it finishes; never finishes itself.

    Args:
        trigger: the trigger to repeat.

    Example:
        >>> Repeatedly(AfterCount(10))
        Repeatedly(trigger=AfterCount(count=10))
    """

    trigger: Trigger

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """The repeated trigger."""
        return {_INNER: self.trigger}

    @property
    def waits_for_end(self) -> bool:
        """As the trigger that it repeats."""
        return type(self) in {Repeatedly, RepeatCount} and self.trigger.waits_for_end

    def on_arm(self, context: TriggerContext) -> None:
        """Arm the repeated trigger."""
        self.trigger.on_arm(context.child(_INNER))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify the repeated trigger."""
        self.trigger.on_element(context.child(_INNER), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Notify the repeated trigger."""
        self.trigger.on_elements(context.child(_INNER), elements)

    def on_merge(self, context: TriggerContext) -> None:
        """Notify the repeated trigger."""
        self.trigger.on_merge(context.child(_INNER))

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the repeated trigger would fire."""
        return self.trigger.should_fire(context.child(_INNER))

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire the repeated trigger; if it has finished, start it over and arm it. Never finished itself."""
        inner = context.child(_INNER)
        if self.trigger.fire(inner):
            self.trigger.reset(inner)
            # What it waits for at the window's end comes whether or not elements do.
            self.trigger.on_arm(inner)
        return False


@dataclass(frozen=True)
class RepeatCount(Repeatedly):
    """Repeats a trigger until it has fired ``count`` times.

    A merged window continues from the least advanced of its sources.

    Args:
        trigger: the trigger to repeat.
        count: number of firings, at least 1.

    Raises:
        InvalidError: a count below 1.
    """

    count: int = 1

    def __post_init__(self) -> None:
        """Validate the count at construction."""
        if self.count < 1:
            raise InvalidError("a trigger is repeated at least once", count=self.count)

    def on_merge(self, context: TriggerContext) -> None:
        """Continue from the least advanced source."""
        context.set(_COUNT, min((source.get(_COUNT, 0) for source in context.sources), default=0))
        Repeatedly.on_merge(self, context)

    def on_fire(self, context: TriggerContext) -> bool:
        """Count the firing; finished with the last."""
        Repeatedly.on_fire(self, context)
        fired = context.get(_COUNT, 0) + 1
        context.set(_COUNT, fired)
        return bool(fired >= self.count)


@dataclass(frozen=True)
class RepeatUntil(Repeatedly):
    """Repeats a trigger until another fires; that firing emits a last pane.

    Args:
        trigger: the trigger to repeat.
        until: the trigger that ends it.
    """

    until: Trigger

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """The repeated trigger and the one that ends it."""
        return {_INNER: self.trigger, _UNTIL: self.until}

    def on_arm(self, context: TriggerContext) -> None:
        """Arm both."""
        Repeatedly.on_arm(self, context)
        self.until.on_arm(context.child(_UNTIL))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify both."""
        Repeatedly.on_element(self, context, element)
        self.until.on_element(context.child(_UNTIL), element)

    def on_merge(self, context: TriggerContext) -> None:
        """Notify both."""
        Repeatedly.on_merge(self, context)
        self.until.on_merge(context.child(_UNTIL))

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether either would fire."""
        return Repeatedly.should_fire(self, context) or self.until.should_fire(context.child(_UNTIL))

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire those that are ready; finished if ``until`` is."""
        is_over = self.until.should_fire(context.child(_UNTIL))
        if Repeatedly.should_fire(self, context):
            Repeatedly.on_fire(self, context)
        if is_over:
            self.until.fire(context.child(_UNTIL))
        return is_over
