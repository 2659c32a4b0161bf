"""Triggers that fire repeatedly, and the trigger that never fires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.dataflow.windows.element import Element
from millpond.statestore.errors import InvalidError

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
