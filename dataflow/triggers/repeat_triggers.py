"""
Triggers that fire again and again, and the one that never does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.dataflow.windows.element import Element
from millpond.statestore.errors import InvalidError

__all__ = ["Never", "RepeatCount", "RepeatUntil", "Repeatedly"]

_INNER: Final = "r"
_UNTIL: Final = "u"
_COUNT: Final = "fired"


@dataclass(frozen=True)
class Never(Trigger):
    """
    Does not fire: what its window has to show comes when it closes, if at all.
    """

    def should_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - whatever it is
        """
        No.
        """
        return False

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - whatever it is
        """
        It cannot come to this; then it is done.
        """
        return True


@dataclass(frozen=True)
class Repeatedly(Trigger):
    """
    Starts a trigger over whenever it has finished, for ever.
    """

    trigger: Trigger

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """
        What is repeated.
        """
        return {_INNER: self.trigger}

    def on_arm(self, context: TriggerContext) -> None:
        """
        Pass it on.
        """
        self.trigger.on_arm(context.child(_INNER))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        Pass it on.
        """
        self.trigger.on_element(context.child(_INNER), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """
        Pass them on.
        """
        self.trigger.on_elements(context.child(_INNER), elements)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Pass it on.
        """
        self.trigger.on_merge(context.child(_INNER))

    def should_fire(self, context: TriggerContext) -> bool:
        """
        When the trigger does.
        """
        return self.trigger.should_fire(context.child(_INNER))

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Start over if the trigger has finished.
        """
        inner = context.child(_INNER)
        if self.trigger.fire(inner):
            self.trigger.reset(inner)
        return False


@dataclass(frozen=True)
class RepeatCount(Repeatedly):
    """
    Repeats a trigger until it has fired ``count`` times. After a merge the furthest window counts.

    Raises:
        InvalidError: a count below 1.
    """

    count: int = 1

    def __post_init__(self) -> None:
        """
        Refuse a count that cannot work while the caller is still near.
        """
        if self.count < 1:
            raise InvalidError("a trigger is repeated at least once", count=self.count)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Go on from the furthest.
        """
        context.set(_COUNT, max((source.get(_COUNT, 0) for source in context.sources), default=0))
        Repeatedly.on_merge(self, context)

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Count, and finish with the last.
        """
        Repeatedly.on_fire(self, context)
        fired = context.get(_COUNT, 0) + 1
        context.set(_COUNT, fired)
        return bool(fired >= self.count)


@dataclass(frozen=True)
class RepeatUntil(Repeatedly):
    """
    Repeats a trigger until another one fires; that one shows what is new, and ends it.

    Args:
        trigger: what is repeated.
        until: what ends it.
    """

    until: Trigger

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """
        What is repeated, and what ends it.
        """
        return {_INNER: self.trigger, _UNTIL: self.until}

    def on_arm(self, context: TriggerContext) -> None:
        """
        Both listen.
        """
        Repeatedly.on_arm(self, context)
        self.until.on_arm(context.child(_UNTIL))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        Both are told.
        """
        Repeatedly.on_element(self, context, element)
        self.until.on_element(context.child(_UNTIL), element)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Both are told.
        """
        Repeatedly.on_merge(self, context)
        self.until.on_merge(context.child(_UNTIL))

    def should_fire(self, context: TriggerContext) -> bool:
        """
        When either does.
        """
        return Repeatedly.should_fire(self, context) or self.until.should_fire(context.child(_UNTIL))

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Finished once the other one fires.
        """
        is_over = self.until.should_fire(context.child(_UNTIL))
        if Repeatedly.should_fire(self, context):
            Repeatedly.on_fire(self, context)
        if is_over:
            self.until.fire(context.child(_UNTIL))
        return is_over
