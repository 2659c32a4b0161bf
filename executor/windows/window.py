"""Windows, their elements, and how window functions assign and merge them (Dataflow model; Streaming 102).

A window is only its bounds. A `WindowFn` decides which elements belong to it, a `Trigger` when
its contents are emitted. `WindowState` is the part that a row stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple, Self

from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


class Window(NamedTuple):
    """The event times ``start <= at < end``, in microseconds since 1970 UTC."""

    start: int
    end: int

    @property
    def last_at(self) -> int:
        """The last instant of the window that a record can carry."""
        return min(self.end - 1, INSTANT_MAX_US)

    def overlaps(self, other: Window) -> bool:
        """Return True if the windows share an instant; adjacent windows do not."""
        return self.start < other.end and other.start < self.end

    def span(self, other: Window) -> Window:
        """Return the smallest window that contains both."""
        return Window(min(self.start, other.start), max(self.end, other.end))

    @property
    def is_global(self) -> bool:
        """True for `GLOBAL_WINDOW`."""
        return self == GLOBAL_WINDOW


GLOBAL_WINDOW: Final = Window(TIME_MIN_US, TIME_MAX_US)
"""All of event time; it ends when all input has ended."""


class Element(NamedTuple):
    """One value to be windowed.

    Attributes:
        value: the value; of a record from an earlier windowed step, the value inside the envelope.
        at: its event time, in microseconds since 1970 UTC.
        key: the key it is grouped by.
        is_retraction: whether it retracts an earlier value, which combiners then uncombine.
    """

    value: Any
    at: int
    key: str
    is_retraction: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Windows that merge into ``result``, which may be among them and must contain them all."""

    sources: tuple[Window, ...]
    result: Window


class WindowFn:
    """Base class of window functions; override `assign`, and `merge` if the windows merge.

    A window function is stateless, picklable configuration: a pure function of the element and of the windows it
    is given. It is deterministic in the sense of the windowing patent if every window that it could merge with
    another is known by the time either is emitted. The library's functions are: they depend only on bounds,
    and a merged window never ends before its sources.

    Example:
        >>> class Evens(WindowFn):
        ...     def assign(self, element):
        ...         start = element.at - element.at % 2
        ...         return (Window(start, start + 2),)
        >>> Evens().assign(Element(value="x", at=5, key="k"))
        (Window(start=4, end=6),)
    """

    version: ClassVar[int] = 0
    """Raise it when the function assigns other windows than before; see `CombineFn`."""

    is_merging: ClassVar[bool] = False
    """Whether `merge` is called when a key gets new windows."""

    merges_overlapping_only: ClassVar[bool] = False
    """Whether exactly the overlapping windows merge.

    `merge` is then given only the new windows and their neighbours, which costs less for a key of many windows.
    """

    def assign(self, element: Element) -> Sequence[Window]:
        """Return the windows that an element belongs to; an empty sequence drops the element. Must be overridden."""
        raise NotImplementedError

    def merge(self, windows: Sequence[Window]) -> Iterable[Merge]:  # noqa: ARG002 - for subclasses
        """Return the merges to apply when a key gets new windows; each window may be a source of at most one."""
        return ()

    def output_at(self, window: Window, at: int) -> int:  # noqa: ARG002 - for subclasses
        """Return the time that an element at ``at`` contributes to its pane under ``EARLIEST_TRANSFORMED``."""
        return at


def check_window(window: object) -> Window:
    if type(window) is Window and window.start < window.end:
        return window
    raise InvalidError("a window function must assign elements to non-empty windows", window=window)


def check_merges(windows: Sequence[Window], merges: Iterable[Merge]) -> tuple[Merge, ...]:
    """Return the merges if they can be applied to ``windows``; refuse them otherwise."""
    checked, unmerged = tuple(merges), set(windows)
    for merge in checked:
        for source in merge.sources:
            if source not in unmerged:
                raise InvalidError("a merged window is unknown or merged twice", window=source)
            unmerged.remove(source)
            if not (merge.result.start <= source.start and source.end <= merge.result.end):
                raise InvalidError(
                    "a merged window must contain its sources", window=merge.result, source=source
                )
    for merge in checked:
        if merge.result in unmerged:
            raise InvalidError(
                "windows merge into an existing window that is not among the sources", window=merge.result
            )
    return checked


class TimestampCombiner(StrEnum):
    """How a pane's event time follows from its elements; elements behind the watermark on arrival do not count.

    ``END_OF_WINDOW`` is the last instant of the window; ``EARLIEST`` and ``LATEST`` are the least and
    greatest element times; ``EARLIEST_TRANSFORMED`` is the least of the times that
    `WindowFn.output_at` maps the elements to.
    """

    END_OF_WINDOW = "OUTPUT_AT_EOW"
    EARLIEST = "OUTPUT_AT_EARLIEST"
    LATEST = "OUTPUT_AT_LATEST"
    EARLIEST_TRANSFORMED = "OUTPUT_AT_EARLIEST_TRANSFORMED"


def combined(combiner: TimestampCombiner, first: int | None, second: int | None) -> int | None:
    """Combine two optional times; ``None`` is neutral."""
    if first is None or second is None:
        return second if first is None else first
    return max(first, second) if combiner is TimestampCombiner.LATEST else min(first, second)


# Stored only where they differ from their default.
_OMITTED_WHEN_EMPTY: Final = (
    "news",
    "index",
    "nonspeculative_index",
    "has_ended",
    "is_held",
    "trigger",
    "timers",
    "emitted",
    "is_closed",
)


@dataclass(slots=True, kw_only=True)
class WindowState:
    """The persistent state of one window of one key: plain JSON data in the row's state, where SQL can read it.

    Attributes:
        news: number of elements since the last pane.
        index: number of panes so far; ``nonspeculative_index`` counts those that were not early.
        has_ended: a trigger has fired at or after the window's end.
        output_at: the next pane's event time as far as elements determine it, in microseconds.
        is_held: the output watermark is held for a pane of elements that arrived in time.
        trigger: trigger state, by the trigger's path in the tree.
        timers: pending trigger timers, by `TriggerTimer.to_text`.
        emitted: envelopes that the next pane retracts, in retracting mode.
        is_closed: the trigger has finished, so later elements are dropped.
    """

    window: Window
    accumulator: Any = None
    has_contents: bool = False
    news: int = 0
    index: int = 0
    nonspeculative_index: int = 0
    has_ended: bool = False
    output_at: int | None = None
    is_held: bool = False
    trigger: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: dict[str, int] = field(default_factory=dict)
    emitted: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False

    def close(self) -> None:
        """Reduce the state to a tombstone, which makes later elements countable as dropped."""
        self.is_closed = True
        self.clear_contents()
        self.output_at = None
        self.trigger, self.timers, self.emitted = {}, {}, []

    def clear_contents(self) -> None:
        self.accumulator, self.has_contents, self.news = None, False, 0
        self.is_held = False

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"window": list(self.window)}
        if self.has_contents:
            fields["accumulator"] = self.accumulator
        for name in _OMITTED_WHEN_EMPTY:
            if value := getattr(self, name):
                fields[name] = value
        if self.output_at is not None:
            fields["output_at"] = self.output_at
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        start, end = fields["window"]
        rest = {name: value for name, value in fields.items() if name != "window"}
        return cls(window=Window(start, end), has_contents="accumulator" in fields, **rest)
