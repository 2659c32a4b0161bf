"""Triggers: when a window emits its contents (the low-level API of the triggering patent; Streaming 102).

A trigger is configuration. Its state and timers lie in the window, in a namespace that follows from the
trigger's position in the tree, so two `AfterCount` in one composite share nothing. A trigger is notified of
elements, merges, signals and timers, and then asked whether to fire. The answer depends on its state and the
clocks only, so a composite can combine the answers of its children freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, ClassVar, Final
from urllib.parse import quote, unquote

from millpond.executor.time.clocks import EXACT, PercentileTimes, clock_name, parse_clock
from millpond.executor.windows.combiners import CombineFn
from millpond.executor.windows.window import Element, Window, WindowState
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain

_NO_CHILDREN: Final[Mapping[str, Trigger]] = {}
_SEPARATOR: Final = "|"


class Contents(StrEnum):
    """A trigger's request about the window's contents when it fires."""

    DEFAULT = "default"
    KEEP = "keep"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class TriggerEvent:
    """One firing of one trigger.

    Attributes:
        path: the trigger's path in the tree; the root's is empty.
        label: the trigger's name in panes.
        asked: the request about the contents, of the trigger or of a descendant.
    """

    path: str
    label: str
    is_finished: bool
    asked: Contents = Contents.DEFAULT


@dataclass(frozen=True, slots=True)
class TriggerTimer:
    """The identity of a trigger's timer within its window.

    Attributes:
        path: the trigger's path in the tree.
        percentile: in the event-time domain, which watermark: 100 is the low watermark.
        at: once it has fired, the time it was set to, in microseconds.
    """

    path: str
    tag: str
    domain: TimeDomain
    percentile: float = EXACT
    at: int | None = field(default=None, compare=False)

    def to_text(self) -> str:
        """Return the timer's name within its window, such as ``0/||event@90.0``; `parse_timer` is the inverse.

        A separator within path or tag is quoted, and a last, empty part then marks the name as quoted:
        ``0/|a%7Cb|event|``.
        """
        clock = clock_name(self.domain, self.percentile)
        if _SEPARATOR in self.path or _SEPARATOR in self.tag:
            return _SEPARATOR.join((_quoted(self.path), _quoted(self.tag), clock, ""))
        return _SEPARATOR.join((self.path, self.tag, clock))


def _quoted(text: str) -> str:
    return quote(text, safe="/", errors="surrogatepass")


@lru_cache(maxsize=256)
def parse_timer(text: str) -> TriggerTimer:
    path, tag, clock, *is_quoted = text.split(_SEPARATOR)
    if is_quoted:
        path, tag = unquote(path, errors="surrogatepass"), unquote(tag, errors="surrogatepass")
    return TriggerTimer(path, tag, *parse_clock(clock))


@dataclass(slots=True)
class Firing:
    """The triggers of a tree that have fired in a hook, and the request about the contents."""

    events: list[TriggerEvent] = field(default_factory=list)
    contents: Contents = Contents.DEFAULT

    def label(self) -> str:
        """Return the labels of the innermost triggers that fired, joined by commas."""
        paths = [event.path for event in self.events]
        inner = [
            event.label
            for event in self.events
            if not any(path != event.path and path.startswith(event.path) for path in paths)
        ]
        return ", ".join(inner)


class TriggerContext:
    """One trigger's view of one window; valid only until the trigger's method returns.

    Attributes:
        watermark: the low watermark in microseconds; in an event timer's hook, the timer's time.
        wall_time: the wall time in microseconds.
        path: the trigger's path in the tree.
        firing: the firings of this hook so far.
    """

    __slots__ = (
        "_combine",
        "_percentile_watermarks",
        "_sources",
        "_state",
        "firing",
        "path",
        "wall_time",
        "watermark",
    )

    def __init__(
        self,
        window: WindowState,
        watermark: int,
        wall_time: int,
        *,
        percentile_watermarks: PercentileTimes | None = None,
        sources: tuple[WindowState, ...] = (),
        path: str = "",
        firing: Firing | None = None,
        combine: CombineFn | None = None,
    ) -> None:
        self._state = window
        self._combine = combine
        self._percentile_watermarks: PercentileTimes = (
            {} if percentile_watermarks is None else percentile_watermarks
        )
        self._sources = sources
        self.watermark: int = watermark
        self.wall_time: int = wall_time
        self.path: str = path
        self.firing: Firing = Firing() if firing is None else firing

    @property
    def window(self) -> Window:
        """The window's bounds."""
        return self._state.window

    def peek_value(self) -> Any:
        """Return the combined value of the window's contents, as a pane would show it now (the patent's ``peekValue``).

        In `Trigger.on_element` the value includes the element, in `Trigger.on_merge` the contents of all merged
        windows; the ``sources`` of a merge have none. The call costs as much as the combiner's ``extract``. Do not
        modify the value: it may be part of the window's state.
        """
        if self._combine is None:
            raise InvalidError("the contents of a window that was merged cannot be read", window=self.window)
        state = self._state
        return self._combine.extract(state.accumulator if state.has_contents else self._combine.create())

    def now(self, domain: TimeDomain) -> int:
        """Return the current time of a clock, in microseconds: the low watermark or the wall time."""
        return self.watermark if domain is TimeDomain.EVENT else self.wall_time

    def watermark_at(self, percentile: float) -> int:
        """Return the watermark of 100 or of a percentile listed in `Trigger.percentiles`, in microseconds."""
        if percentile == EXACT:
            return self.watermark
        if percentile not in self._percentile_watermarks:
            raise InvalidError(
                "a trigger must name a percentile before it reads its watermark", percentile=percentile
            )
        return self._percentile_watermarks[percentile]

    def percentile_at(self, at: int) -> float:
        """Return the greatest known percentile whose watermark has reached ``at``; 0 if none has."""
        if self.watermark >= at:
            return EXACT
        marks = self._percentile_watermarks.items()
        return max((percentile for percentile, mark in marks if mark >= at), default=0.0)

    def child(self, name: str | int) -> TriggerContext:
        """Return the context of a child trigger, with the child's namespace."""
        return TriggerContext(
            self._state,
            self.watermark,
            self.wall_time,
            percentile_watermarks=self._percentile_watermarks,
            sources=self._sources,
            path=f"{self.path}{name}/",
            firing=self.firing,
            combine=self._combine,
        )

    @property
    def sources(self) -> tuple[TriggerContext, ...]:
        """In `Trigger.on_merge`, this trigger's view of each merged window."""
        return tuple(
            TriggerContext(
                source,
                self.watermark,
                self.wall_time,
                percentile_watermarks=self._percentile_watermarks,
                path=self.path,
            )
            for source in self._sources
        )

    def merging(self, sources: Sequence[TriggerContext]) -> TriggerContext:
        """In `Trigger.on_merge`, return this context with only some of its `sources`."""
        context = copy(self)
        context._sources = tuple(source._state for source in sources)  # noqa: SLF001 - of the same class
        return context

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of the trigger's state; ``default`` if it is not set."""
        return self._state.trigger.get(self.path, {}).get(name, default)

    def set(self, name: str, value: Any) -> None:
        """Set a value of the trigger's state; it must be JSON data."""
        self._state.trigger.setdefault(self.path, {})[name] = value

    def clear(self) -> None:
        """Drop this trigger's state and timers, but not its children's."""
        self._state.trigger.pop(self.path, None)
        for text in [text for text in self._state.timers if parse_timer(text).path == self.path]:
            del self._state.timers[text]

    def set_timer(
        self, at: int, domain: TimeDomain = TimeDomain.EVENT, tag: str = "", *, percentile: float = EXACT
    ) -> None:
        """Have the trigger asked again once a clock reaches ``at``, in microseconds.

        Replaces the pending timer with the same tag and clock. In the event-time domain ``percentile`` is 100, or one
        of `Trigger.percentiles`.
        """
        self._state.timers[TriggerTimer(self.path, tag, domain, percentile).to_text()] = at

    def delete_timer(
        self, domain: TimeDomain = TimeDomain.EVENT, tag: str = "", *, percentile: float = EXACT
    ) -> None:
        """Delete a pending timer, if there is one."""
        self._state.timers.pop(TriggerTimer(self.path, tag, domain, percentile).to_text(), None)

    def timer(
        self, domain: TimeDomain = TimeDomain.EVENT, tag: str = "", *, percentile: float = EXACT
    ) -> int | None:
        """Return the time of a pending timer, in microseconds; ``None`` if it is not set."""
        return self._state.timers.get(TriggerTimer(self.path, tag, domain, percentile).to_text())

    def ask(self, contents: Contents) -> None:
        """Ask to keep or clear the contents, from `Trigger.on_fire`; only the ``…_BY_DEFAULT`` modes comply."""
        self.firing.contents = contents

    @property
    def history(self) -> tuple[TriggerEvent, ...]:
        """The direct children that have fired in this hook, in order."""
        depth = self.path.count("/") + 1
        return tuple(
            event
            for event in self.firing.events
            if event.path.startswith(self.path) and event.path.count("/") == depth
        )


class Trigger:
    """Base class of triggers.

    Override `should_fire` and `on_fire`, and the notifications that the trigger needs. A composite
    names its children in `children` and forwards its notifications to them. Every call to a child
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

    version: ClassVar[int] = 0
    """Raise it when the trigger's state of earlier code means something else; see `CombineFn`."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        by_name = {name: base for base in reversed(cls.__mro__) for name in vars(base)}
        # An inherited shortcut for bundles would bypass an `on_element` that the subclass overrides alone.
        if cls.__mro__.index(by_name["on_element"]) < cls.__mro__.index(by_name["on_elements"]):
            cls.on_elements = Trigger.on_elements  # type: ignore[method-assign]

    @property
    def children(self) -> Mapping[str, Trigger]:
        """The parts of a composite, by their names in the namespace."""
        return _NO_CHILDREN

    @property
    def can_merge(self) -> bool:
        """True if the trigger and its children support merging windows."""
        return all(child.can_merge for child in self.children.values())

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentile watermarks below 100 that the trigger and its children read, the only ones maintained."""
        return frozenset[float]().union(*(child.percentiles for child in self.children.values()))

    @property
    def signals(self) -> frozenset[str]:
        """The names of the signals from outside that the trigger and its children wait for."""
        return frozenset[str]().union(*(child.signals for child in self.children.values()))

    @property
    def waits_for_end(self) -> bool:
        """True if nothing fires before a watermark passes the window's end, so that a bundle may be added at once."""
        return False

    def on_arm(self, context: TriggerContext) -> None:
        """Start to listen: a composite has advanced to this trigger or restarts it, and no element may follow."""

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Handle an element that has been added to the window."""

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Handle a bundle of elements that has been added; by default, call `on_element` for each."""
        for element in elements:
            self.on_element(context, element)

    def on_merge(self, context: TriggerContext) -> None:
        """Join the state of ``context.sources``, which have merged into the window and are dropped afterwards."""

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Handle a signal from outside, whose name is in `signals`; by default, pass it to the children."""
        for child_name, child in self.children.items():
            child.on_signal(context.child(child_name), name)

    def on_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """Handle a timer of this trigger that has fired."""

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """Pass a timer that has fired to its owner, this trigger or a descendant; by default, to `on_timer`."""
        below = timer.path.removeprefix(context.path)
        if not below:
            self.on_timer(context, timer)
            return
        name = below.partition("/")[0]
        if child := self.children.get(name):
            child.on_child_timer(context.child(name), timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """Return True if the window is to emit its contents now. Must be overridden, and must not change state."""
        raise NotImplementedError

    def on_fire(self, context: TriggerContext) -> bool:
        """Handle the firing of this trigger, and return True if it has finished. Must be overridden."""
        raise NotImplementedError

    def fire(self, context: TriggerContext) -> bool:
        """Call `on_fire`, record the firing, and return True if it was the last; composites call this on children."""
        firing = context.firing
        before, firing.contents = firing.contents, Contents.DEFAULT
        finished = self.on_fire(context)
        asked = firing.contents
        if asked is Contents.DEFAULT:
            firing.contents = before
        firing.events.append(TriggerEvent(context.path, self.label, finished, asked))
        return finished

    def reset(self, context: TriggerContext) -> None:
        """Drop the state and timers of the trigger and of its descendants."""
        for name, child in self.children.items():
            child.reset(context.child(name))
        context.clear()

    @property
    def label(self) -> str:
        """The trigger's name in panes."""
        return repr(self)
