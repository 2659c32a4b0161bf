"""Triggers: when a window emits its contents (the triggers API of the windowing patent; Streaming 102).

A trigger is configuration; its state and timers are in the `TriggerContext`, per window. It is
notified of elements, merges and timers, and then asked whether to fire: after each element or, if
the strategy says so, once per window and bundle, and once per timer. The answer is a function of its state and the clocks only, so a
composite can combine its children's answers freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from millpond.executor.windows.trigger_context import Contents, TriggerContext, TriggerEvent, TriggerTimer
from millpond.executor.windows.window import Element

_NO_CHILDREN: Final[Mapping[str, Trigger]] = {}


class Trigger:
    """Base class of triggers.

    Override `should_fire` and `on_fire`, and the notifications that the trigger needs. A composite
    names its children in `children` and forwards its notifications to them; every call to a child
    gets ``context.child(name)``.

    Example:
        >>> class OnAlarm(Trigger):
        ...     def on_element(self, context, element):
        ...         if element.value == "alarm":
        ...             context.set("alarm", True)
        ...     def should_fire(self, context):
        ...         return context.get("alarm", False)
        ...     def on_fire(self, context):
        ...         return True
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Undo an inherited `on_elements` in a subclass that overrides `on_element` alone.

        The inherited shortcut for bundles would bypass the subclass's ``on_element``.
        """
        super().__init_subclass__(**arguments)
        by_name = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
        if cls.__mro__.index(by_name["on_element"]) < cls.__mro__.index(by_name["on_elements"]):
            cls.on_elements = Trigger.on_elements  # type: ignore[method-assign]

    @property
    def children(self) -> Mapping[str, Trigger]:
        """The triggers that this one is composed of, by their names in the namespace."""
        return _NO_CHILDREN

    @property
    def can_merge(self) -> bool:
        """Whether the trigger and its children support merging windows."""
        return all(child.can_merge for child in self.children.values())

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentile watermarks below 100 that the trigger and its children read.

        The engine maintains only the percentiles that are named here; `TriggerContext.watermark_at`
        refuses any other.
        """
        return frozenset[float]().union(*(child.percentiles for child in self.children.values()))

    @property
    def signals(self) -> frozenset[str]:
        """The names of the signals from outside that the trigger and its children wait for."""
        return frozenset[str]().union(*(child.signals for child in self.children.values()))

    @property
    def waits_for_end(self) -> bool:
        """Whether it never fires before a watermark that it reads has passed the window's end, whatever elements come.

        A bundle of elements is then added at once, as no element of it can make the trigger fire.
        """
        return False

    # -- notifications ----------------------------------------------------------------------

    def on_arm(self, context: TriggerContext) -> None:
        """A composite has advanced to this trigger, or starts it over: it listens, whether or not elements follow."""

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """An element has been added to the window."""

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """A bundle of elements has been added; by default calls `on_element` for each."""
        for element in elements:
            self.on_element(context, element)

    def on_merge(self, context: TriggerContext) -> None:
        """``context.sources`` have merged into the window; afterwards their state and timers are dropped."""

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """A signal has come from outside for the window; by default tells the children.

        Args:
            context: the trigger's context.
            name: the signal's name, which the trigger must list in `signals`.
        """
        for child_name, child in self.children.items():
            child.on_signal(context.child(child_name), name)

    def on_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """A timer of this trigger has fired."""

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """A timer of this trigger or of a descendant has fired; by default calls its owner's `on_timer`."""
        below = timer.path.removeprefix(context.path)
        if not below:
            self.on_timer(context, timer)
            return
        name = below.partition("/")[0]
        if child := self.children.get(name):
            child.on_child_timer(context.child(name), timer)

    # -- decisions --------------------------------------------------------------------------

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the window is to emit its contents now; must not change state.

        Must be overridden.
        """
        raise NotImplementedError

    def on_fire(self, context: TriggerContext) -> bool:
        """The window emits its contents because this trigger fired; returns whether the trigger has finished.

        Must be overridden. May call `TriggerContext.ask` to keep or clear the contents.
        """
        raise NotImplementedError

    def fire(self, context: TriggerContext) -> bool:
        """Call `on_fire` and record the firing; a composite calls this on its children, never `on_fire`.

        Returns:
            Whether the trigger has finished.
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
        """Start over: drop the state and timers of the trigger and of its descendants."""
        for name, child in self.children.items():
            child.reset(context.child(name))
        context.clear()

    @property
    def label(self) -> str:
        """The trigger's name in panes."""
        return repr(self)
