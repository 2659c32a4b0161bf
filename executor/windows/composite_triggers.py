"""Composite triggers: all of several triggers, any of them, one after another, or one again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.windows.trigger import Trigger, TriggerContext, TriggerTimer
from millpond.executor.windows.window import Element
from millpond.statestore.arguments import check_count
from millpond.statestore.errors import InvalidError

_POSITION: Final = "position"
_INNER: Final = "r"
_UNTIL: Final = "u"
_COUNT: Final = "fired"
_FINISHED: Final = "finished"


def check_triggers(composite: Trigger, *triggers: object) -> None:
    for trigger in triggers:
        if not isinstance(trigger, Trigger):
            raise InvalidError(
                "a composite takes triggers only", trigger=trigger, of=type(composite).__name__
            )
        check_overrides(Trigger, trigger)


class _NotifyingAll(Trigger):
    """A composite whose children listen at the same time."""

    def listening(self, context: TriggerContext) -> Mapping[str, Trigger]:  # noqa: ARG002 - for subclasses
        return self.children

    def on_arm(self, context: TriggerContext) -> None:
        for name, trigger in self.listening(context).items():
            trigger.on_arm(context.child(name))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        for name, trigger in self.listening(context).items():
            trigger.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        for name, trigger in self.listening(context).items():
            trigger.on_elements(context.child(name), elements)

    def on_signal(self, context: TriggerContext, name: str) -> None:
        for child_name, trigger in self.listening(context).items():
            trigger.on_signal(context.child(child_name), name)

    def on_merge(self, context: TriggerContext) -> None:
        for name, trigger in self.listening(context).items():
            trigger.on_merge(context.child(name))


class NotifyingActive(Trigger):
    """A composite of which one child at a time listens; the others miss elements, signals and timers."""

    def active(self, context: TriggerContext) -> str:
        """Return the name of the listening child; there need not be a child of that name."""
        raise NotImplementedError

    def on_element(self, context: TriggerContext, element: Element) -> None:
        name = self.active(context)
        if child := self.children.get(name):
            child.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        name = self.active(context)
        if child := self.children.get(name):
            child.on_elements(context.child(name), elements)

    def on_signal(self, context: TriggerContext, name: str) -> None:
        active = self.active(context)
        if child := self.children.get(active):
            child.on_signal(context.child(active), name)

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        # Timers of a child that has had its turn mean nothing any more.
        if timer.path == context.path or timer.path.startswith(f"{context.path}{self.active(context)}/"):
            super().on_child_timer(context, timer)


class _Composite(Trigger):
    """A trigger of one or more children, named by their position."""

    def __init__(self, *triggers: Trigger) -> None:
        if not triggers:
            raise InvalidError("a composite trigger needs triggers", trigger=type(self).__name__)
        check_triggers(self, *triggers)
        self.triggers = triggers
        self._children = {str(position): trigger for position, trigger in enumerate(triggers)}

    @property
    def children(self) -> Mapping[str, Trigger]:
        return self._children

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.triggers))})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, _Composite) and self.triggers == other.triggers

    def __hash__(self) -> int:
        return hash((type(self), self.triggers))


class AfterAny(_Composite, _NotifyingAll):
    """A trigger that fires once, when the first of its triggers does; at most one of them fires (the patent's ``FirstOf``).

    Example:
        >>> AfterAny(AfterCount(100), AfterProcessingTime("1m"))
        AfterAny(AfterCount(count=100), AfterProcessingTime(delay='1m', domain=<TimeDomain.WALL: 'wall'>, align_to=None))
    """

    def should_fire(self, context: TriggerContext) -> bool:
        return any(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        for name, trigger in self.children.items():
            if trigger.should_fire(context.child(name)):
                trigger.fire(context.child(name))
                break
        return True


class OrFinally(_Composite, _NotifyingAll):
    """A trigger that fires as ``trigger`` does, and a last time when ``until`` fires; it ends with either."""

    def __init__(self, trigger: Trigger, until: Trigger) -> None:
        super().__init__(trigger, until)
        self.trigger: Trigger = trigger
        self.until: Trigger = until

    def should_fire(self, context: TriggerContext) -> bool:
        return any(trigger.should_fire(context.child(name)) for name, trigger in self.children.items())

    def on_fire(self, context: TriggerContext) -> bool:
        inner, until = (context.child(name) for name in self.children)
        # Asked before anything fires, because a firing may change the answer.
        is_over = self.until.should_fire(until)
        has_finished = self.trigger.should_fire(inner) and self.trigger.fire(inner)
        if is_over:
            self.until.fire(until)
        return is_over or has_finished


class AfterAll(_Composite, _NotifyingAll):
    """A trigger that fires when all of its triggers are ready or have finished, and finishes with the last of them.

    A merged window waits for those that have not finished in one of its sources.
    """

    def listening(self, context: TriggerContext) -> Mapping[str, Trigger]:
        """Return the triggers that have not finished, by name."""
        finished = context.get(_FINISHED, ())
        return {name: trigger for name, trigger in self.children.items() if name not in finished}

    def on_merge(self, context: TriggerContext) -> None:
        by_source = [(source, self.listening(source)) for source in context.sources]
        waiting = set[str]().union(*(listening for _, listening in by_source))
        self._record(context, waiting)
        for name in self.listening(context):
            there = [source for source, listening in by_source if name in listening]
            self.children[name].on_merge(context.merging(there).child(name))

    def should_fire(self, context: TriggerContext) -> bool:
        return all(
            trigger.should_fire(context.child(name)) for name, trigger in self.listening(context).items()
        )

    def on_fire(self, context: TriggerContext) -> bool:
        waiting = set[str]()
        for name, trigger in self.listening(context).items():
            if trigger.fire(context.child(name)):
                trigger.reset(context.child(name))
            else:
                waiting.add(name)
        self._record(context, waiting)
        return not waiting

    def _record(self, context: TriggerContext, waiting: Collection[str]) -> None:
        if finished := [name for name in self.children if name not in waiting]:
            context.set(_FINISHED, finished)


class AfterEach(_Composite, NotifyingActive):
    """A trigger that fires as its first trigger until that one has finished, then as its second, and so on.

    A merged window continues from the least advanced of its sources.
    """

    def active(self, context: TriggerContext) -> str:
        return str(self._position(context))

    def _position(self, context: TriggerContext) -> int:
        return int(context.get(_POSITION, 0))

    def _current(self, context: TriggerContext) -> tuple[Trigger, TriggerContext] | None:
        position = self._position(context)
        return (self.triggers[position], context.child(position)) if position < len(self.triggers) else None

    def on_arm(self, context: TriggerContext) -> None:
        if current := self._current(context):
            current[0].on_arm(current[1])

    def on_merge(self, context: TriggerContext) -> None:
        # The more advanced sources have already fired triggers that the least advanced source still waits for.
        position = min(map(self._position, context.sources), default=0)
        context.set(_POSITION, position)
        there = [source for source in context.sources if self._position(source) == position]
        if current := self._current(context.merging(there)):
            current[0].on_merge(current[1])

    def should_fire(self, context: TriggerContext) -> bool:
        current = self._current(context)
        return current is not None and current[0].should_fire(current[1])

    def on_fire(self, context: TriggerContext) -> bool:
        current = self._current(context)
        if current is None or not current[0].fire(current[1]):
            return current is None
        current[0].reset(current[1])
        position = self._position(context) + 1
        context.set(_POSITION, position)
        self.on_arm(context)
        return position == len(self.triggers)


@dataclass(frozen=True)
class Never(Trigger):
    """A trigger that never fires; the window emits its contents only when it expires, if its ``closing`` allows."""

    @property
    def waits_for_end(self) -> bool:
        return type(self) is Never

    def should_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - never fires
        return False

    def on_fire(self, context: TriggerContext) -> bool:  # noqa: ARG002 - never fires
        return True


@dataclass(frozen=True)
class Repeatedly(_NotifyingAll):
    """A trigger that restarts another each time it finishes, and never finishes itself."""

    trigger: Trigger

    def __post_init__(self) -> None:
        check_triggers(self, self.trigger)

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        return {_INNER: self.trigger}

    @property
    def waits_for_end(self) -> bool:
        return type(self) in {Repeatedly, RepeatCount} and self.trigger.waits_for_end

    def should_fire(self, context: TriggerContext) -> bool:
        return self.trigger.should_fire(context.child(_INNER))

    def on_fire(self, context: TriggerContext) -> bool:
        inner = context.child(_INNER)
        if self.trigger.fire(inner):
            self.trigger.reset(inner)
            # Its timer at the window's end must be set again even if no more elements arrive.
            self.trigger.on_arm(inner)
        return False


@dataclass(frozen=True)
class RepeatCount(Repeatedly):
    """A trigger that repeats another until it has fired ``count`` times, at least once.

    A merged window continues from the least advanced of its sources.
    """

    count: int = 1

    def __post_init__(self) -> None:
        check_triggers(self, self.trigger)
        check_count("the count of a repetition", self.count)

    def on_merge(self, context: TriggerContext) -> None:
        context.set(_COUNT, min((source.get(_COUNT, 0) for source in context.sources), default=0))
        Repeatedly.on_merge(self, context)

    def on_fire(self, context: TriggerContext) -> bool:
        Repeatedly.on_fire(self, context)
        fired = context.get(_COUNT, 0) + 1
        context.set(_COUNT, fired)
        return bool(fired >= self.count)


@dataclass(frozen=True)
class RepeatUntil(Repeatedly):
    """A trigger that repeats another until ``until`` fires; that firing emits a last pane."""

    until: Trigger

    def __post_init__(self) -> None:
        check_triggers(self, self.trigger, self.until)

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        return {_INNER: self.trigger, _UNTIL: self.until}

    def should_fire(self, context: TriggerContext) -> bool:
        return Repeatedly.should_fire(self, context) or self.until.should_fire(context.child(_UNTIL))

    def on_fire(self, context: TriggerContext) -> bool:
        # Asked before anything fires, because a firing may change the answer.
        is_over = self.until.should_fire(context.child(_UNTIL))
        if Repeatedly.should_fire(self, context):
            Repeatedly.on_fire(self, context)
        if is_over:
            self.until.fire(context.child(_UNTIL))
        return is_over
