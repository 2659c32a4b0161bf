"""A transcript: a windowed step described as data, with its input and the expected output.

This module parses documents and compares panes; `millpond.testing.transcripts.command` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millpond.executor.time.clocks import EXACT
from millpond.executor.time.observations import check_percentile
from millpond.executor.windows.pane import Timing, WindowedValue
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.trigger import Trigger
from millpond.executor.windows.window import WindowFn
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.testing.transcripts.constructors import SECOND_US, construct, duration_of, seconds_us
from millpond.testing.transcripts.setting import Stage, TranscriptSetting

STEPS: Final = ("input", "watermark", "clock", "signal", "expect", "expect_dropped", "state", "restart")
"""The actions of steps."""

_GLOBAL: Final = [-math.inf, math.inf]
_GLOBALS: Final = ("global", [-9_223_372_036_854, 9_223_371_950_454])
"""Other spellings of the global window; the second is Beam's."""

_TIMED: Final = ("value", "at", "key", "id")
_FIELDS: Final = (
    "name", "error", "transcript", "then", "window_fn", "trigger_fn", "accumulation_mode", "incremental",
    "allowed_lateness", "timestamp_combiner", "closing", "emit_empty_on_time", "asked", "combine", "by_arrival",
    "shift", "late_data_horizon",
)  # fmt: skip
"""The fields of a document; one of another name, such as Beam's ``broken_on``, says nothing here."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: an action and its argument."""

    action: str
    argument: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One document.

    Attributes:
        name: its name; need not be unique.
        error: part of the message with which it must fail; ``None`` if it must pass.
        document: the other fields, as read.
        steps: the steps.
    """

    name: str
    error: str | None
    document: Mapping[str, Any]
    steps: tuple[Step, ...]

    def strategy(self) -> WindowingStrategy:
        """The windowing strategy under test.

        Raises:
            InvalidError: the document does not describe one.
        """
        return _strategy(self.document)

    def stage(self) -> Stage:
        """The step with its surroundings: how elements get their times, and the steps that follow.

        Raises:
            InvalidError: the document describes an invalid setting.
        """
        following = self.document.get("then", [])
        if not isinstance(following, list) or not all(isinstance(step, dict) for step in following):
            raise InvalidError("`then` is a list of windowed steps", then=following)
        setting = TranscriptSetting.of(self.document, tuple(map(_strategy, following)))
        return Stage(self.strategy(), setting)


def _strategy(document: Mapping[str, Any]) -> WindowingStrategy:
    get = document.get
    for name in document:
        if name not in _FIELDS and (hint := did_you_mean(name, _FIELDS)):
            raise InvalidError(f"a transcript has no such field{hint}", field=name)
    return WindowingStrategy(
        window_fn=construct(get("window_fn", "GlobalWindows"), WindowFn),
        trigger=construct(get("trigger_fn", "Default"), Trigger),
        accumulation=get("accumulation_mode", "accumulating"),
        incremental=bool(get("incremental", False)),
        allowed_lateness=duration_of(get("allowed_lateness", 0)),
        timestamp_combiner=get("timestamp_combiner", "OUTPUT_AT_EOW"),
        closing=get("closing", "never"),
        emit_empty_on_time=bool(get("emit_empty_on_time", True)),
        asked=get("asked", "bundle"),
    )


def read_transcript(document: Any) -> Transcript:
    """A transcript from a YAML document.

    Raises:
        InvalidError: it has no steps, or steps of an unknown kind.
    """
    if not isinstance(document, dict) or not isinstance(document.get("transcript"), list):
        raise InvalidError("a transcript is a mapping with a list of steps under `transcript`")
    error = document.get("error")
    return Transcript(
        name=str(document.get("name", "unnamed")),
        error=None if error is None else str(error),
        document=document,
        steps=tuple(_steps(document["transcript"])),
    )


def _steps(listed: Sequence[Any]) -> Iterator[Step]:
    for entry in listed:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise InvalidError("a step is one word and its argument", step=entry)
        ((action, argument),) = entry.items()
        if action not in STEPS:
            raise InvalidError("no such step", step=action, steps=list(STEPS))
        yield Step(action, argument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """One element of an input."""

    value: Any
    at_us: int
    key: str
    id: str | None


def elements_of(argument: Any) -> tuple[Arrived, ...]:
    """The elements of an ``input`` step.

    Raises:
        InvalidError: an element is neither a number nor a mapping with a time.
    """
    if not isinstance(argument, list):
        raise InvalidError("an input is a list of elements", input=argument)
    return tuple(map(_element, argument))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """A signal from outside: its name, whose window, and its id."""

    name: str
    key: str = "k"
    window: tuple[int, int] | None = None
    id: str | None = None


def signal_of(argument: Any) -> Signalled:
    """The signal of a ``signal`` step: a name, or ``{name, key, window, id}`` with the window's start and end in seconds.

    Example:
        >>> signal_of({"name": "go", "window": [0, 10]})
        Signalled(name='go', key='k', window=(0, 10000000), id=None)

    Raises:
        InvalidError: it is neither.
    """
    fields = argument if isinstance(argument, dict) else {"name": argument}
    window = fields.get("window")
    if not set(fields) <= {"name", "key", "window", "id"} or "name" not in fields:
        raise InvalidError("a signal is a name, or {name, key, window, id}", signal=argument)
    try:
        bounds = None if window is None else tuple(map(seconds_us, window))
        return Signalled(**{**fields, "window": bounds})
    except TypeError as cause:
        raise InvalidError("a window is its start and end in seconds", window=window) from cause


def marks_of(argument: Any) -> dict[float, float]:
    """The watermarks of a ``watermark`` step in seconds, by percentile.

    Example:
        >>> marks_of(5), marks_of({90: 7, 100: 5})
        ({100.0: 5.0}, {90.0: 7.0, 100.0: 5.0})

    Raises:
        InvalidError: neither a number nor numbers by percentile.
    """
    marks = argument if isinstance(argument, dict) else {EXACT: argument}
    try:
        return {check_percentile(percentile): float(mark) for percentile, mark in marks.items()}
    except (TypeError, ValueError) as cause:
        raise InvalidError("a watermark is a number, or numbers by percentile", watermark=argument) from cause


def _element(value: Any) -> Arrived:
    fields = value if isinstance(value, dict) else {"value": value}
    at = fields.get("at", fields.get("value"))
    if isinstance(at, bool) or not isinstance(at, int | float) or not set(fields) <= set(_TIMED):
        raise InvalidError("an element is a time in seconds, or {value, at, key, id}", element=value)
    record_id = fields.get("id")
    return Arrived(
        value=fields.get("value", at),
        at_us=seconds_us(at),
        key=str(fields.get("key", "k")),
        id=None if record_id is None else str(record_id),
    )


# ------------------------------------------------------------------------------ panes


def pane_fields(key: str, shown: WindowedValue) -> dict[str, Any]:
    """A pane as transcripts write it: whole seconds, sorted values."""
    window, pane = shown.window, shown.pane
    bounds = _GLOBAL if window.is_global else [_cut(window.start), _cut(window.last_at)]
    return {
        "window": bounds,
        "values": sorted(shown.value, key=_order),
        "timestamp": _cut(shown.at),
        "index": pane.index,
        "nonspeculative_index": pane.nonspeculative_index,
        "early": pane.timing is Timing.EARLY,
        "late": pane.timing is Timing.LATE,
        "final": pane.is_last,
        "first": pane.is_first,
        "retraction": pane.is_retraction,
        "percentile": pane.watermark_percentile,
        "produced": _cut(pane.produced_at),
        "trigger": pane.trigger,
        "key": key,
    }


def _cut(micros: int) -> int:
    return micros // SECOND_US


def _order(value: Any) -> tuple[bool, Any]:
    is_number = isinstance(value, int | float)
    return (not is_number, value if is_number else str(value))


def matches(expected: Mapping[str, Any], pane: Mapping[str, Any]) -> bool:
    """Return True if a pane has every expected field.

    Example:
        >>> matches({"index": 0}, {"index": 0, "values": [1]})
        True
    """
    return all(
        name in pane and pane[name] == (_GLOBAL if name == "window" and value in _GLOBALS else value)
        for name, value in expected.items()
    )
