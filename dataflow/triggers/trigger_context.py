"""
What a trigger may do: its own memory, its own timers, and the clocks, for one window.

Every trigger of a tree has a namespace that follows from its place in the tree, so two
`AfterCount` in one composition never meet (the low-level API of the triggering patent).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from millpond.dataflow.windows.window import Window
from millpond.dataflow.windows.window_state import WindowState
from millpond.executor.event_time.clocks import EXACT, PercentileTimes, clock_name, parse_clock
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain

__all__ = ["Contents", "Firing", "TriggerContext", "TriggerEvent", "TriggerTimer", "parse_timer"]

_SEPARATOR: Final = "|"


class Contents(StrEnum):
    """
    What becomes of a window's contents when its trigger fires.
    """

    DEFAULT = "default"
    KEEP = "keep"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class TriggerEvent:
    """
    A trigger that fired.

    Attributes:
        path: its place in the tree; the root's is empty.
        label: what it is.
        is_finished: whether it has fired for the last time.
        asked: what it, or one below it, asked to do with the contents.
    """

    path: str
    label: str
    is_finished: bool
    asked: Contents = Contents.DEFAULT


@dataclass(frozen=True, slots=True)
class TriggerTimer:
    """
    A timer of a trigger: whose it is, its tag, and its clock.

    Attributes:
        path: the trigger's place in the tree.
        tag: the timer's name within it.
        domain: which clock it waits for.
        percentile: in event time, which watermark: 100 is the low watermark.
        at: once it has fired, the time that it had been set to.
    """

    path: str
    tag: str
    domain: TimeDomain
    percentile: float = EXACT
    at: int | None = field(default=None, compare=False)

    def to_text(self) -> str:
        """
        The timer's name within its window.

        Example:
            >>> TriggerTimer("0/", "", TimeDomain.EVENT, 90.0).to_text()
            '0/||event@90.0'
        """
        return _SEPARATOR.join((self.path, self.tag, clock_name(self.domain, self.percentile)))


def parse_timer(text: str) -> TriggerTimer:
    """
    The timer that `TriggerTimer.to_text` named.
    """
    path, tag, clock = text.split(_SEPARATOR)
    return TriggerTimer(path, tag, *parse_clock(clock))


@dataclass(slots=True)
class Firing:
    """
    What came of asking a tree of triggers: who fired, and what they want done with the contents.
    """

    events: list[TriggerEvent] = field(default_factory=list)
    contents: Contents = Contents.DEFAULT

    def label(self) -> str:
        """
        The innermost triggers that fired.
        """
        paths = [event.path for event in self.events]
        inner = [
            event.label
            for event in self.events
            if not any(path != event.path and path.startswith(event.path) for path in paths)
        ]
        return ", ".join(inner)


class TriggerContext:
    """
    One trigger's view of one window; valid only until its hook returns.

    Args:
        window: the window's state.
        watermark: event time, as far as the trigger may know: the low watermark, or the time
            of the event timer at hand.
        wall_time: the wall time.
        percentile_watermarks: the percentile watermarks that the step's triggers ask for.
        sources: after a merge, the windows that were merged.
        path: the trigger's place in the tree.
        firing: where firings are noted.
    """

    __slots__ = ("_percentile_watermarks", "_sources", "_state", "firing", "path", "wall_time", "watermark")

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
    ) -> None:
        self._state = window
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
        """
        The window's bounds.
        """
        return self._state.window

    def now(self, domain: TimeDomain) -> int:
        """
        How far a clock has come.
        """
        return self.watermark if domain is TimeDomain.EVENT else self.wall_time

    def watermark_at(self, percentile: float) -> int:
        """
        How far the watermark of a share of the input has come, as far as the trigger may know.

        Args:
            percentile: 100, or one that the trigger names in its `Trigger.percentiles`.

        Raises:
            InvalidError: it names no such percentile.
        """
        if percentile == EXACT:
            return self.watermark
        if percentile not in self._percentile_watermarks:
            raise InvalidError("a trigger asks for a percentile that it does not name", percentile=percentile)
        return self._percentile_watermarks[percentile]

    def percentile_at(self, at: int) -> float:
        """
        The greatest known share of the input that is in up to ``at``; 0 when none is.
        """
        if self.watermark >= at:
            return EXACT
        return max((each for each, mark in self._percentile_watermarks.items() if mark >= at), default=0.0)

    def child(self, name: str | int) -> TriggerContext:
        """
        The context of a child, with a namespace of its own.
        """
        return TriggerContext(
            self._state,
            self.watermark,
            self.wall_time,
            percentile_watermarks=self._percentile_watermarks,
            sources=self._sources,
            path=f"{self.path}{name}/",
            firing=self.firing,
        )

    @property
    def sources(self) -> tuple[TriggerContext, ...]:
        """
        In `Trigger.on_merge`: this trigger's view of each window that was merged.
        """
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

    # -- memory ----------------------------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        """
        Read from the trigger's memory.
        """
        return self._state.trigger.get(self.path, {}).get(name, default)

    def set(self, name: str, value: Any) -> None:
        """
        Write to the trigger's memory; JSON must be able to carry the value.
        """
        self._state.trigger.setdefault(self.path, {})[name] = value

    def clear(self) -> None:
        """
        Forget memory and timers of this trigger, but not its children's.
        """
        self._state.trigger.pop(self.path, None)
        prefix = self.path + _SEPARATOR
        for text in [text for text in self._state.timers if text.startswith(prefix)]:
            del self._state.timers[text]

    # -- timers ----------------------------------------------------------------------------

    def set_timer(
        self,
        at: int,
        domain: TimeDomain = TimeDomain.EVENT,
        tag: str = "",
        *,
        percentile: float = EXACT,
    ) -> None:
        """
        Have the trigger asked again once a clock reaches ``at``.

        It replaces the timer of the same tag and clock.

        Args:
            at: when, in microseconds.
            domain: on which clock.
            tag: the timer's name within the trigger.
            percentile: in event time, which watermark: 100, or one of `Trigger.percentiles`.
        """
        self._state.timers[TriggerTimer(self.path, tag, domain, percentile).to_text()] = at

    def delete_timer(
        self, domain: TimeDomain = TimeDomain.EVENT, tag: str = "", *, percentile: float = EXACT
    ) -> None:
        """
        Remove a pending timer, if there is one.
        """
        self._state.timers.pop(TriggerTimer(self.path, tag, domain, percentile).to_text(), None)

    def timer(
        self, domain: TimeDomain = TimeDomain.EVENT, tag: str = "", *, percentile: float = EXACT
    ) -> int | None:
        """
        When a pending timer fires.
        """
        return self._state.timers.get(TriggerTimer(self.path, tag, domain, percentile).to_text())

    # -- firing ----------------------------------------------------------------------------

    def ask(self, contents: Contents) -> None:
        """
        Ask, from `Trigger.on_fire`, to keep or to clear the contents; modes *by default* listen.
        """
        self.firing.contents = contents

    @property
    def history(self) -> tuple[TriggerEvent, ...]:
        """
        Direct children that have fired in this hook, in order.
        """
        depth = self.path.count("/") + 1
        return tuple(
            event
            for event in self.firing.events
            if event.path.startswith(self.path) and event.path.count("/") == depth
        )
