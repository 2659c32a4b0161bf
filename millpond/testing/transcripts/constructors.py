"""Constructor text such as ``AfterWatermark(early=AfterCount(2))``, parsed without executing it.

Only calls, names and constants are accepted, and only names of the windowing library, so a
transcript cannot run code. Plain numbers in place of a duration or an instant are seconds, as in
Beam's format.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from millpond.executor.windows.combiners import CombineFn, LastN, ToList
from millpond.executor.windows.composite_triggers import (
    AfterAll,
    AfterAny,
    AfterEach,
    Never,
    OrFinally,
    RepeatCount,
    Repeatedly,
    RepeatUntil,
)
from millpond.executor.windows.count_triggers import AfterBytes, AfterCount, AfterSignal, ResultIs, ShouldEmit
from millpond.executor.windows.time_triggers import (
    AfterDelay,
    AfterProcessingTime,
    AfterWatermark,
    AtPeriod,
    Default,
    WatermarkPercentile,
)
from millpond.executor.windows.trigger import Contents, Trigger, TriggerContext
from millpond.executor.windows.window import Window, WindowFn
from millpond.executor.windows.window_fns import (
    CalendarWindows,
    FixedWindows,
    GlobalWindows,
    Sessions,
    SlidingWindows,
    UnalignedFixedWindows,
)
from millpond.statestore.durations import duration_text
from millpond.statestore.errors import InvalidError

SECOND_US: Final = 1_000_000


def seconds_us(seconds: float) -> int:
    """Seconds in microseconds, to the nearest.

    Example:
        >>> seconds_us(9.999999)
        9999999
    """
    return round(seconds * SECOND_US)


def duration_of(value: str | float) -> str:
    """A transcript's duration with its unit: a number is seconds.

    Example:
        >>> duration_of(9.5), duration_of("2m")
        ('9s500ms', '2m')
    """
    return value if isinstance(value, str) else duration_text(seconds_us(value))


class CustomTimestampingFixedWindowsWindowFn(FixedWindows):
    """Fixed windows in which an element counts as 100 seconds later (Beam's test window function)."""

    def output_at(self, window: Window, at: int) -> int:  # noqa: ARG002 - wherever it is
        """The time plus 100 seconds."""
        return at + 100 * SECOND_US


class UpTo(ShouldEmit):
    """A trigger with user code: emits when the elements add up to a bound."""

    def __init__(self, total: int) -> None:
        ShouldEmit.__init__(self, _Adder(total), sum_of)

    def __repr__(self) -> str:
        return "UpTo"


@dataclass(frozen=True, slots=True)
class _Adder:
    total: int

    def __call__(self, value: Any, state: Any) -> tuple[bool, Any]:
        added = (state or 0) + value
        return added >= self.total, added


def sum_of(states: Any) -> Any:
    """The sum over merged windows."""
    return sum(state or 0 for state in states)


class HashJoinTrigger(ShouldEmit):
    """The patent's example of a data-driven trigger: emits when both sides of a join have arrived.

    A value's side is its first word.
    """

    def __init__(self) -> None:
        ShouldEmit.__init__(self, _both_sides, _all_sides)

    def __repr__(self) -> str:
        return "HashJoinTrigger"


def _both_sides(value: Any, sides: Any) -> tuple[bool, Any]:
    seen = sorted({*(sides or ()), str(value).partition(" ")[0]})
    return len(seen) > 1, seen


def _all_sides(states: Any) -> Any:
    return sorted({side for sides in states for side in sides or ()})


class ResultIsOdd(ResultIs):
    """The patent's example of a trigger that looks at the contents: emits when the sum of the values is odd."""

    def __init__(self) -> None:
        ResultIs.__init__(self, _is_odd)

    def __repr__(self) -> str:
        return "ResultIsOdd"


def _is_odd(values: Sequence[int]) -> bool:
    return sum(values) % 2 == 1


class AskingTo(Repeatedly):
    """Repeats a trigger, and asks at each firing to ``keep`` or ``clear`` the contents."""

    asked: ClassVar[dict[str, Contents]] = {"keep": Contents.KEEP, "clear": Contents.CLEAR}

    def __init__(self, contents: str, trigger: Trigger) -> None:
        Repeatedly.__init__(self, trigger)
        object.__setattr__(self, "contents", self.asked[contents])

    def on_fire(self, context: TriggerContext) -> bool:
        """Ask, then fire."""
        context.ask(self.contents)  # type: ignore[attr-defined]
        return Repeatedly.on_fire(self, context)


_NAMES: Final[Mapping[str, Callable[..., Any]]] = {
    **{
        kind.__name__: kind
        for kind in (
            AfterAll,
            AfterAny,
            AfterBytes,
            AfterCount,
            AfterDelay,
            AfterEach,
            AfterSignal,
            AfterProcessingTime,
            AfterWatermark,
            AskingTo,
            AtPeriod,
            CalendarWindows,
            CustomTimestampingFixedWindowsWindowFn,
            Default,
            FixedWindows,
            GlobalWindows,
            HashJoinTrigger,
            LastN,
            Never,
            OrFinally,
            RepeatCount,
            RepeatUntil,
            Repeatedly,
            ResultIsOdd,
            Sessions,
            SlidingWindows,
            ToList,
            UnalignedFixedWindows,
            UpTo,
            WatermarkPercentile,
        )
    },
    "CalendarWindows.days": CalendarWindows.days,
    "CalendarWindows.months": CalendarWindows.months,
    "CalendarWindows.weeks": CalendarWindows.weeks,
    "CalendarWindows.years": CalendarWindows.years,
    "AtCount": AfterCount,
    "AtWatermark": WatermarkPercentile,
    "DefaultTrigger": Default,
    "FirstOf": AfterAny,
    "Repeat": Repeatedly,
    "SequenceOf": AfterEach,
}

_WORDS: Final = frozenset(
    (
        "event",
        "wall",
        "event_time",
        "wall_time",
        "stream_time",
        "processing_time",
        "days",
        "weeks",
        "months",
        "years",
    )
)
"""Words that need no quotes."""


def construct(text: str, kind: type[WindowFn | Trigger | CombineFn]) -> Any:
    """The window function, trigger or combiner that a text describes.

    Example:
        >>> construct("AfterEach(AfterCount(2), Default)", Trigger)
        AfterEach(AfterCount(count=2), Default())

    Raises:
        InvalidError: the text is not a constructor, or names something outside the library.
    """
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, ValueError) as cause:
        raise InvalidError("this is no constructor", text=text) from cause
    made = _built(tree, text)
    if not isinstance(made, kind):
        raise InvalidError(f"this is no {kind.__name__}", text=text)
    return made


def _built(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name.lower() in _WORDS:
            return name.lower()
        case ast.Name(id=name):
            return _called(name, [], {}, text)
        case ast.Call(func=ast.Name() | ast.Attribute() as function, args=arguments, keywords=keywords):
            name = ast.unparse(function)
            named = {word.arg: _built(word.value, text) for word in keywords if word.arg is not None}
            if len(named) == len(keywords):
                return _called(name, [_built(argument, text) for argument in arguments], named, text)
    raise InvalidError("a constructor has names, numbers, texts and constructors in it", text=text)


def _called(name: str, arguments: list[Any], named: dict[str, Any], text: str) -> Any:
    if name not in _NAMES:
        raise InvalidError("no window function and no trigger has this name", name=name, text=text)
    function = _NAMES[name]
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*arguments, **named)
    except TypeError as cause:
        raise InvalidError(f"these are not the arguments of {name}: {cause}", text=text) from cause
    for parameter, value in bound.arguments.items():
        annotation = str(signature.parameters[parameter].annotation)
        if isinstance(value, int | float) and ("Duration" in annotation or "Instant" in annotation):
            convert = duration_of if "Duration" in annotation else seconds_us
            bound.arguments[parameter] = convert(value)
    try:
        return function(*bound.args, **bound.kwargs)
    except TypeError as cause:
        raise InvalidError(f"{name} cannot be made so: {cause}", text=text) from cause
