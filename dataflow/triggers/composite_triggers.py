"""
Triggers made of others: all of them, the first of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext, TriggerTimer
from millpond.dataflow.windows.element import Element
from millpond.statestore.errors import InvalidError

__all__ = ["AfterAll", "AfterAny", "AfterEach", "OrFinally"]

_POSITION: Final = "position"


class _Composite(Trigger):
    """
    A trigger of at least one other, each under its number.
    """

    def __init__(self, *triggers: Trigger) -> None:
        if not triggers:
            raise InvalidError("a composite trigger needs triggers", trigger=type(self).__name__)
        for trigger in triggers:
            if not isinstance(trigger, Trigger):
                raise InvalidError("this is no trigger", trigger=trigger, of=type(self).__name__)
        self.triggers = triggers
        self._children = {str(number): trigger for number, trigger in enumerate(triggers)}

    @property
    def children(self) -> Mapping[str, Trigger]:
        """
        What it is made of.
        """
        return self._children

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.triggers))})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _Composite) and self.triggers == other.triggers

    def __hash__(self) -> int:
        return hash((type(self), self.triggers))


class _Parallel(_Composite):
    """
    A trigger whose children all listen at the same time.
    """

    def on_arm(self, context: TriggerContext) -> None:
        """
        All of them listen.
        """
        for name, trigger in self.children.items():
            trigger.on_arm(context.child(name))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        All of them are told.
        """
        for name, trigger in self.children.items():
            trigger.on_element(context.child(name), element)

    def on_merge(self, context: TriggerContext) -> None:
        """
        All of them are told.
        """
        for name, trigger in self.children.items():
            trigger.on_merge(context.child(name))

    def _fire_ready(self, context: TriggerContext) -> list[bool]:
        return [
            trigger.fire(context.child(name))
            for name, trigger in self.children.items()
            if trigger.should_fire(context.child(name))
        ]


class AfterAny(_Parallel):
    """
    Fires when any of its triggers does, and has finished when any of them has: the first of them.
    """

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether any would.
        """
        return any(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Those that would, do.
        """
        return any(self._fire_ready(context))


class OrFinally(AfterAny):
    """
    Fires as the first trigger does, until the second one fires for the last time.

    Args:
        trigger: what fires.
        until: what ends it.
    """

    def __init__(self, trigger: Trigger, until: Trigger) -> None:
        super().__init__(trigger, until)


class AfterAll(_Parallel):
    """
    Fires when all of its triggers would, and has finished when all of them have.
    """

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether all would.
        """
        return all(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        """
        All do.
        """
        return all(self._fire_ready(context))


class AfterEach(_Composite):
    """
    Fires as its first trigger does until that has finished, then as its second does, and so on.

    When windows merge, the furthest of them counts.
    """

    def _place(self, context: TriggerContext) -> int:
        return int(context.get(_POSITION, 0))

    def _current(self, context: TriggerContext) -> tuple[Trigger, TriggerContext] | None:
        place = self._place(context)
        return (self.triggers[place], context.child(place)) if place < len(self.triggers) else None

    def on_arm(self, context: TriggerContext) -> None:
        """
        The one whose turn it is listens.
        """
        if current := self._current(context):
            current[0].on_arm(current[1])

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        The one whose turn it is is told.
        """
        if current := self._current(context):
            current[0].on_element(current[1], element)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Go on from the furthest.
        """
        context.set(_POSITION, max((self._place(source) for source in context.sources), default=0))
        if current := self._current(context):
            current[0].on_merge(current[1])

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """
        Only the one whose turn it is hears its timers.
        """
        if timer.path == context.path or timer.path.startswith(f"{context.path}{self._place(context)}/"):
            Trigger.on_child_timer(self, context, timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the one whose turn it is would.
        """
        current = self._current(context)
        return current is not None and current[0].should_fire(current[1])

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Go on to the next when this one has finished.
        """
        current = self._current(context)
        if current is None or not current[0].fire(current[1]):
            return current is None
        current[0].reset(current[1])
        place = self._place(context) + 1
        context.set(_POSITION, place)
        self.on_arm(context)
        return place == len(self.triggers)
