"""
Triggers: when a window shows its contents (the triggers API of the windowing patent).

A trigger is configuration; its memory and timers are in the `TriggerContext`, per window. It
is told of elements, merges and timers, and is then asked whether to fire: once per window and
bundle, and once per timer. Its answer is a function of its memory and of the clocks, so a
composition can put the answers of its children together in any way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from millpond.dataflow.triggers.trigger_context import Contents, TriggerContext, TriggerEvent, TriggerTimer
from millpond.dataflow.windows.element import Element

__all__ = ["Trigger"]

_NO_CHILDREN: Final[Mapping[str, Trigger]] = {}


class Trigger:
    """
    Base class of triggers; a user's own overrides what it needs.

    A composition names its children in `children` and forwards what it is told; whatever it
    tells a child goes through ``context.child(name)``.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """
        An inherited short cut for bundles must not pass over a subclass's own ``on_element``.
        """
        super().__init_subclass__(**arguments)
        by_name = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
        if cls.__mro__.index(by_name["on_element"]) < cls.__mro__.index(by_name["on_elements"]):
            cls.on_elements = Trigger.on_elements  # type: ignore[method-assign]

    @property
    def children(self) -> Mapping[str, Trigger]:
        """
        The triggers that this one is made of, by their names in the namespace.
        """
        return _NO_CHILDREN

    @property
    def can_merge(self) -> bool:
        """
        Whether it knows what to do when windows merge.
        """
        return all(child.can_merge for child in self.children.values())

    @property
    def percentiles(self) -> frozenset[float]:
        """
        The percentile watermarks below 100 that it and those below it ask for.

        What is not named here cannot be asked for: the engine keeps no other ones.
        """
        return frozenset[float]().union(*(child.percentiles for child in self.children.values()))

    # -- what it is told -------------------------------------------------------------------

    def on_arm(self, context: TriggerContext) -> None:
        """
        A sequence has come to this trigger, so it listens from now on; elements may come or not.
        """

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        An element has been added to the window.
        """

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """
        A bundle of elements has been added; whoever overrides `on_element` alone is told of each.
        """
        for element in elements:
            self.on_element(context, element)

    def on_merge(self, context: TriggerContext) -> None:
        """
        ``context.sources`` have become the window; their memory and timers are about to go.
        """

    def on_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """
        A timer of this trigger has fired.
        """

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """
        A timer of this trigger or of one below it has fired; by default its owner is told.
        """
        below = timer.path.removeprefix(context.path)
        if not below:
            self.on_timer(context, timer)
            return
        name = below.partition("/")[0]
        if child := self.children.get(name):
            child.on_child_timer(context.child(name), timer)

    # -- what it decides -------------------------------------------------------------------

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the window is to show its contents now.
        """
        raise NotImplementedError

    def on_fire(self, context: TriggerContext) -> bool:
        """
        The window shows its contents because this trigger said so; returns whether it has finished.
        """
        raise NotImplementedError

    def fire(self, context: TriggerContext) -> bool:
        """
        Call `on_fire` and note it; what compositions call on their children.
        """
        firing = context.firing
        before, firing.contents = firing.contents, Contents.DEFAULT
        finished = self.on_fire(context)
        asked = firing.contents
        if asked is Contents.DEFAULT:
            firing.contents = before
        firing.events.append(TriggerEvent(context.path, self.label, finished, asked))
        return finished

    def reset(self, context: TriggerContext) -> None:
        """
        Start over: forget memory and timers, the children's too.
        """
        for name, child in self.children.items():
            child.reset(context.child(name))
        context.clear()

    @property
    def label(self) -> str:
        """
        What panes call it.
        """
        return repr(self)
