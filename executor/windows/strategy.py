"""The windowing, triggering and accumulation settings of one step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Final, Literal, TypeAlias

from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.time.instants import instant_us
from millpond.executor.windows.combiners import CombineFields, CombineFn
from millpond.executor.windows.time_triggers import Default, domain_of
from millpond.executor.windows.trigger import Contents, Trigger
from millpond.executor.windows.window import TimestampCombiner, Window, WindowFn
from millpond.executor.windows.window_fns import GlobalWindows
from millpond.statestore.arguments import check_count, check_flags, check_function
from millpond.statestore.durations import Duration, duration_text, duration_us
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.types import TIME_MAX_US


class Accumulation(StrEnum):
    """The relation of a window's panes to each other (the Dataflow paper's refinement modes).

    ``DISCARDING``: a pane holds the elements since the previous pane. ``ACCUMULATING``: a pane holds
    all elements so far. ``RETRACTING``: accumulating and incremental, so a pane follows a retraction of the previous
    pane. ``CLEAR_BY_DEFAULT`` and ``ACCUMULATE_BY_DEFAULT`` follow the trigger's request, if any
    (see `TriggerContext.ask`), and otherwise discard or accumulate.
    """

    DISCARDING = "discarding"
    ACCUMULATING = "accumulating"
    RETRACTING = "retracting"
    CLEAR_BY_DEFAULT = "clear_by_default"
    ACCUMULATE_BY_DEFAULT = "accumulate_by_default"

    @property
    def may_clear(self) -> bool:
        """True if a pane may clear the contents."""
        return self not in (Accumulation.ACCUMULATING, Accumulation.RETRACTING)

    def clears(self, asked: Contents) -> bool:
        """Return True if contents are cleared after a pane, given the trigger's request."""
        if self is Accumulation.CLEAR_BY_DEFAULT:
            return asked is not Contents.KEEP
        if self is Accumulation.ACCUMULATE_BY_DEFAULT:
            return asked is Contents.CLEAR
        return self is Accumulation.DISCARDING


Closing: TypeAlias = Literal["never", "if_non_empty", "always"]
"""Condition for an expiring window's last pane: never, if it holds elements that no pane has shown, or always."""

Asked: TypeAlias = Literal["element", "bundle"]
"""When a window's trigger is asked: after each element, or once per bundle of elements."""


UpgradeWindows: TypeAlias = Callable[[list[dict[str, Any]], int], list[dict[str, Any]]]
"""Returns a key's windows in today's form, given those that an earlier ``state_version`` stored, and that version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowingStrategy:
    """Windowing, triggering and accumulation of a step; the fields are the arguments of `DataflowStream.window`.

    Example:
        >>> strategy = WindowingStrategy(window_fn=FixedWindows("1h"), trigger=AfterWatermark(late=AfterCount(1)))
        >>> strategy.accumulation
        <Accumulation.DISCARDING: 'discarding'>
    """

    window_fn: WindowFn = field(default_factory=GlobalWindows)
    trigger: Trigger = field(default_factory=Default)
    accumulation: Accumulation = None  # type: ignore[assignment]  # `Pipeline.check` may choose where it is not given
    incremental: bool = False
    allowed_lateness: Duration = 0
    timestamp_combiner: TimestampCombiner = TimestampCombiner.END_OF_WINDOW
    closing: Closing = "if_non_empty"
    emit_empty_on_time: bool = True
    asked: Asked = "element"
    state_version: int = 0
    upgrade_state: UpgradeWindows | None = None
    allowed_lateness_us: int = field(init=False, repr=False, compare=False)
    is_accumulation_given: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("window_fn", WindowFn), ("trigger", Trigger)):
            if not isinstance(getattr(self, name), kind):
                example = "FixedWindows('1h')" if kind is WindowFn else "AfterWatermark()"
                raise InvalidError(
                    f"{name} must be a {kind.__name__}, such as {example}", value=getattr(self, name)
                )
        check_overrides(WindowFn, self.window_fn)
        check_overrides(Trigger, self.trigger)
        if self.window_fn.is_merging != (type(self.window_fn).merge is not WindowFn.merge):
            raise InvalidError(
                "a window function must have both a merge and is_merging = True, or neither: without is_merging "
                "nothing calls merge",
                window_fn=type(self.window_fn).__qualname__,
                is_merging=self.window_fn.is_merging,
            )
        check_flags(incremental=self.incremental, emit_empty_on_time=self.emit_empty_on_time)
        if self.closing not in ("never", "if_non_empty", "always"):
            raise InvalidError("closing must be never, if_non_empty or always", closing=self.closing)
        if self.asked not in ("element", "bundle"):
            raise InvalidError("a trigger is asked after each element or once a bundle", asked=self.asked)
        object.__setattr__(self, "is_accumulation_given", self.accumulation is not None)
        accumulation = self.accumulation if self.is_accumulation_given else Accumulation.DISCARDING
        object.__setattr__(self, "accumulation", _member(Accumulation, accumulation))
        combiner = _member(TimestampCombiner, self.timestamp_combiner)
        object.__setattr__(self, "timestamp_combiner", combiner)
        object.__setattr__(self, "allowed_lateness_us", duration_us(self.allowed_lateness))
        if self.allowed_lateness_us < 0:
            raise InvalidError(
                "the allowed lateness must not be negative: 0 drops every late record",
                value=self.allowed_lateness,
            )
        check_count("state_version", self.state_version, least=0)
        check_function("upgrade_state", self.upgrade_state, optional=True)
        if bool(self.state_version) != (self.upgrade_state is not None):
            raise InvalidError(
                "state_version and upgrade_state must be given together: a number above 0, and a function of a key's "
                "windows and the version that stored them",
                state_version=self.state_version,
                upgrade_state=self.upgrade_state,
            )
        if self.window_fn.is_merging and not self.trigger.can_merge:
            raise InvalidError(
                "windows merge, but the trigger has no merge function: give it one, or take windows that do not merge",
                trigger=self.trigger,
            )

    @property
    def is_incremental(self) -> bool:
        """True if each pane is preceded by retractions of the previous pane."""
        return self.incremental or self.accumulation is Accumulation.RETRACTING

    def expires_at(self, window: Window) -> int:
        """Return the watermark, in microseconds, from which the window accepts no more elements."""
        return min(window.end + self.allowed_lateness_us + 1, TIME_MAX_US)

    def fingerprint(self, combine: CombineFn) -> dict[str, str]:
        """Return what the stored windows depend on, by part; the rest may change while windows are open."""
        is_more = self.incremental and self.accumulation is not Accumulation.RETRACTING
        fields = combine.fields.items() if isinstance(combine, CombineFields) else ()
        return {
            "windows": described(self.window_fn),
            "trigger": described(self.trigger),
            "accumulation": f"{self.accumulation}{', incremental' if is_more else ''}",
            "timestamp_combiner": str(self.timestamp_combiner),
            **(
                {f"combine.{name}": described(one) for name, one in fields} or {"combine": described(combine)}
            ),
        }


_NORMAL: Final[Mapping[str, Callable[[Any], Any]]] = {
    # A window function of the user's may keep its own number of microseconds under an argument's name.
    "Duration": lambda value: timedelta(microseconds=value if isinstance(value, int) else duration_us(value)),
    "Instant": instant_us,
    "Domain": domain_of,
}


def described(value: object) -> str:
    """Return a value of a declaration as text that equal declarations share, without the arguments left at default.

    Functions and other objects count by their names, because their code may change without another meaning. A partial
    function and a getter have arguments.

    Example:
        >>> described(Default()), described(WindowingStrategy(allowed_lateness="60s").window_fn)
        ('Default()', 'GlobalWindows()')
    """
    if isinstance(value, WindowFn | Trigger | CombineFn):
        version = f" version {value.version}" if value.version else ""
        return f"{type(value).__qualname__}({', '.join(_arguments(value))}){version}"
    if isinstance(value, Enum):
        return described(value.value)
    if isinstance(value, timedelta):
        return duration_text(duration_us(value))
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{name}: {described(one)}' for name, one in value.items()))}}}"
    if isinstance(value, Collection):
        each = map(described, value)
        return f"[{', '.join(sorted(each) if isinstance(value, set | frozenset) else each)}]"
    if isinstance(value, partial):
        return f"partial({described(value.func)}, {described(value.args)}, {described(value.keywords)})"
    if isinstance(value, attrgetter | itemgetter | methodcaller):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__qualname__))


def _arguments(declared: WindowFn | Trigger | CombineFn) -> Iterator[str]:
    for name, parameter in inspect.signature(type(declared)).parameters.items():
        if not hasattr(declared, name):
            continue
        kinds = (convert for word, convert in _NORMAL.items() if word in str(parameter.annotation))
        convert = next(kinds, None)
        given, default = (
            described(
                value if convert is None or value in (None, inspect.Parameter.empty) else convert(value)
            )
            for value in (getattr(declared, name), parameter.default)
        )
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from map(described, getattr(declared, name))
        elif parameter.default is inspect.Parameter.empty:
            yield given
        elif given != default:
            yield f"{name}={given}"


def _member(kind: type[StrEnum], value: object) -> StrEnum:
    try:
        return kind(value)  # type: ignore[arg-type]  # unchecked user input
    except ValueError as cause:
        choices = [str(choice) for choice in kind]
        raise InvalidError(
            f"no such choice{did_you_mean(value, choices)}", value=value, choices=choices
        ) from cause
