"""A trigger's view of one window: its own state, its own timers, and the clocks.

Every trigger in a tree has a namespace that follows from its position, so two `AfterCount` in
one composite never share state (the low-level API of the triggering patent).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote, unquote

from millpond.executor.time.clocks import EXACT, PercentileTimes, clock_name, parse_clock
from millpond.executor.windows.combine_fn import CombineFn
from millpond.executor.windows.window import Window
from millpond.executor.windows.window_state import WindowState
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain

_SEPARATOR: Final = "|"


class Contents(StrEnum):
    """What a trigger asks to do with a window's contents when it fires."""

    DEFAULT = "default"
    KEEP = "keep"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class TriggerEvent:
    """One firing of one trigger.

    Attributes:
        path: the trigger's path in the tree; the root's is empty.
        label: the trigger's name in panes.
        is_finished: whether it has fired for the last time.
        asked: what it, or a descendant, asked to do with the contents.
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
        tag: the timer's name within the trigger.
        domain: the clock it waits for.
        percentile: in the event-time domain, which watermark: 100 is the low watermark.
        at: once it has fired, the time it was set to, in microseconds.
    """

    path: str
    tag: str
    domain: TimeDomain
    percentile: float = EXACT
    at: int | None = field(default=None, compare=False)

    def to_text(self) -> str:
        """The timer's name within its window; `parse_timer` is the inverse.

        Where path or tag has a separator, both are quoted, and a last empty part says so.

        Example:
            >>> TriggerTimer("0/", "", TimeDomain.EVENT, 90.0).to_text()
            '0/||event@90.0'
            >>> TriggerTimer("0/", "a|b", TimeDomain.EVENT).to_text()
            '0/|a%7Cb|event|'
        """
        clock = clock_name(self.domain, self.percentile)
        if _SEPARATOR in self.path or _SEPARATOR in self.tag:
            return _SEPARATOR.join((_quoted(self.path), _quoted(self.tag), clock, ""))
        return _SEPARATOR.join((self.path, self.tag, clock))


def _quoted(text: str) -> str:
    return quote(text, safe="/", errors="surrogatepass")


@lru_cache(maxsize=256)
def parse_timer(text: str) -> TriggerTimer:
    """The inverse of `TriggerTimer.to_text`."""
    path, tag, clock, *is_quoted = text.split(_SEPARATOR)
    if is_quoted:
        path, tag = unquote(path, errors="surrogatepass"), unquote(tag, errors="surrogatepass")
    return TriggerTimer(path, tag, *parse_clock(clock))


@dataclass(slots=True)
class Firing:
    """The outcome of asking a tree of triggers: which fired, and the request about the contents."""

    events: list[TriggerEvent] = field(default_factory=list)
    contents: Contents = Contents.DEFAULT

    def label(self) -> str:
        """The labels of the innermost triggers that fired, joined by commas."""
        paths = [event.path for event in self.events]
        inner = [
            event.label
            for event in self.events
            if not any(path != event.path and path.startswith(event.path) for path in paths)
        ]
        return ", ".join(inner)


class TriggerContext:
    """One trigger's view of one window; valid only until the trigger's method returns.

    Args:
        window: the window's state.
        watermark: the low watermark in microseconds; in an event timer's hook, the timer's time.
        wall_time: the wall time in microseconds.
        percentile_watermarks: the percentile watermarks that the step's triggers request.
        sources: after a merge, the states of the merged windows.
        path: the trigger's path in the tree.
        firing: collects the firings.
        combine: combines the window's elements, for `peek_value`.
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
        """The combined value of the window's contents, as a pane would show it now (the patent's ``peekValue``).

        In `Trigger.on_element` it includes the element, and in `Trigger.on_merge` the contents of all merged
        windows. It costs what the combiner's ``extract`` does. The value may be part of the window's state:
        do not modify it.

        Raises:
            InvalidError: the context is of one of the ``sources`` of a merge, whose contents are gone.
        """
        if self._combine is None:
            raise InvalidError("the contents of a window that was merged cannot be read", window=self.window)
        state = self._state
        return self._combine.extract(state.accumulator if state.has_contents else self._combine.create())

    def now(self, domain: TimeDomain) -> int:
        """The current time of a clock, in microseconds: the low watermark or the wall time."""
        return self.watermark if domain is TimeDomain.EVENT else self.wall_time

    def watermark_at(self, percentile: float) -> int:
        """A percentile watermark, in microseconds.

        Args:
            percentile: 100, or a percentile that the trigger names in `Trigger.percentiles`.

        Raises:
            InvalidError: the trigger does not name the percentile.
        """
        if percentile == EXACT:
            return self.watermark
        if percentile not in self._percentile_watermarks:
            raise InvalidError(
                "a trigger must name a percentile before it reads its watermark", percentile=percentile
            )
        return self._percentile_watermarks[percentile]

    def percentile_at(self, at: int) -> float:
        """The greatest known percentile whose watermark has reached ``at``; 0 if none has."""
        if self.watermark >= at:
            return EXACT
        marks = self._percentile_watermarks.items()
        return max((percentile for percentile, mark in marks if mark >= at), default=0.0)

    def child(self, name: str | int) -> TriggerContext:
        """The context of a child trigger, with its own namespace."""
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
        """In `Trigger.on_merge`: this trigger's view of each merged window."""
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
        """In `Trigger.on_merge`: the same context with only these of its `sources`, for a child that listens in them alone."""
        return TriggerContext(
            self._state,
            self.watermark,
            self.wall_time,
            percentile_watermarks=self._percentile_watermarks,
            sources=tuple(source._state for source in sources),  # noqa: SLF001 - of the same class
            path=self.path,
            firing=self.firing,
            combine=self._combine,
        )

    # -- state -----------------------------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the trigger's state; ``default`` if it is not set."""
        return self._state.trigger.get(self.path, {}).get(name, default)

    def set(self, name: str, value: Any) -> None:
        """Set a value of the trigger's state; it must be JSON data."""
        self._state.trigger.setdefault(self.path, {})[name] = value

    def clear(self) -> None:
        """Drop this trigger's state and timers, but not its children's."""
        self._state.trigger.pop(self.path, None)
        for text in [text for text in self._state.timers if parse_timer(text).path == self.path]:
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
        """Have the trigger asked again once a clock reaches ``at``.

        Replaces the pending timer with the same tag and clock.

        Args:
            at: when, in microseconds.
            domain: on which clock.
            tag: the timer's name within the trigger.
            percentile: in the event-time domain, which watermark: 100, or one of `Trigger.percentiles`.
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
        """The time of a pending timer, in microseconds; ``None`` if it is not set."""
        return self._state.timers.get(TriggerTimer(self.path, tag, domain, percentile).to_text())

    # -- firing ----------------------------------------------------------------------------

    def ask(self, contents: Contents) -> None:
        """From `Trigger.on_fire`: ask to keep or clear the contents.

        Only the two ``…_BY_DEFAULT`` modes of `Accumulation` honour the request.
        """
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
