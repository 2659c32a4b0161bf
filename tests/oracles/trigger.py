"""The oracle's trigger protocol: notifications and questions; `tests.oracles.triggers` implements it.

A trigger is described by a plain tuple, its name and its arguments in seconds, for example
``("Repeatedly", ("AfterCount", 2))``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

TriggerSpec: TypeAlias = tuple[Any, ...]
"""A trigger's name and arguments; an argument may be a trigger."""

Alarm: TypeAlias = tuple[int, int]
"""When a trigger wants the question asked again, and on which clock: a watermark's percentile, or `WALL`."""

EXACT: Final = 100
"""The percentile of the low watermark itself."""

WALL: Final = 1_000
"""The wall clock, which sorts after all watermarks."""


def trigger_text(spec: Any) -> str:
    """Return a trigger as constructor text.

    Example:
        >>> trigger_text(("AfterAny", ("AfterCount", 2), ("Default",)))
        'AfterAny(AfterCount(2), Default())'
    """
    if isinstance(spec, tuple):
        return f"{spec[0]}({', '.join(map(trigger_text, spec[1:]))})"
    if isinstance(spec, dict):
        return ", ".join(f"{name}={trigger_text(value)}" for name, value in spec.items())
    return str(spec)


@dataclass(slots=True)
class Moment:
    """The clocks, the window's end and contents, and ``asked``: the trigger's request about the contents."""

    marks: Mapping[int, int]
    wall: int
    end: int
    asked: str | None = None
    values: Sequence[int] = ()

    @property
    def watermark(self) -> int:
        return self.marks[EXACT]

    @property
    def is_over(self) -> bool:
        """Return True if the low watermark has reached the window's end."""
        return self.has_passed(EXACT)

    def has_passed(self, percentile: int) -> bool:
        """Return True if a watermark has reached the window's end."""
        return self.marks[percentile] >= self.end

    @property
    def share(self) -> float:
        """Return the greatest percentile whose watermark has reached the window's end; 0 without any."""
        return max(
            (float(percentile) for percentile, mark in self.marks.items() if mark >= self.end), default=0.0
        )


class OracleTrigger:
    """Base class: passes notifications on to its parts and sets no alarms."""

    def __init__(self) -> None:
        self.alarms: set[Alarm] = set()

    def parts(self) -> Sequence[OracleTrigger]:
        """Return the child triggers that may have set alarms."""
        return ()

    def all_alarms(self) -> set[Alarm]:
        """Return every alarm in the tree."""
        return self.alarms.union(*(part.all_alarms() for part in self.parts()))

    def silence(self, alarm: Alarm) -> None:
        """Remove an alarm that has rung."""
        self.alarms.discard(alarm)
        for part in self.parts():
            part.silence(alarm)

    def arm(self, moment: Moment) -> None:
        """Start, because a sequence has reached this trigger or starts over."""
        for part in self.parts():
            part.arm(moment)

    def element(self, at: int, value: int, moment: Moment) -> None:
        """Handle the arrival of an element."""
        for part in self.parts():
            part.element(at, value, moment)

    def signal(self, moment: Moment) -> None:
        """Handle a signal for the window, in the triggers that listen."""
        for part in self.parts():
            part.signal(moment)

    def merge(self, sources: Sequence[Any], moment: Moment) -> None:
        """Take over the state of triggers of the same kind, whose windows have merged."""

    def is_ready(self, moment: Moment) -> bool:
        """Return True if it would fire."""
        raise NotImplementedError

    def fire(self, moment: Moment) -> bool:
        """Fire; return True if it has finished."""
        raise NotImplementedError


def waits_for_signal(spec: Any) -> bool:
    """Return True if a trigger waits for a signal from outside.

    Example:
        >>> waits_for_signal(("AfterAny", ("AfterSignal", "'go'"), ("Default",)))
        True
    """
    return _has(spec, lambda part: part[:1] == ("AfterSignal",))


def waits_in_event_time(spec: Any) -> bool:
    """Return True if a trigger waits for a time after the watermark at its first element.

    Example:
        >>> waits_in_event_time(("Repeatedly", ("AfterDelay", 0, "event")))
        True
    """
    return _has(spec, lambda part: part[:1] in (("AfterDelay",), ("AtPeriod",)) and "event" in part)


def _has(spec: Any, is_wanted: Callable[[TriggerSpec], bool]) -> bool:
    if isinstance(spec, dict):
        return _has(tuple(spec.values()), is_wanted)
    if not isinstance(spec, tuple):
        return False
    return is_wanted(spec) or any(_has(part, is_wanted) for part in spec)


def percentiles_of(spec: Any) -> set[int]:
    """Return the percentiles below 100 whose watermarks a trigger reads.

    Example:
        >>> percentiles_of(("AfterEach", ("WatermarkPercentile", 90), ("Default",)))
        {90}
    """
    if isinstance(spec, dict):
        return percentiles_of(tuple(spec.values()))
    if not isinstance(spec, tuple):
        return set()
    if spec[:1] == ("WatermarkPercentile",):
        return {spec[1]} - {EXACT}
    return set[int]().union(*map(percentiles_of, spec))
