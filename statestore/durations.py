"""Lengths of time: the one notation that users write, ``"30s"`` or a `timedelta`, and the names of options that had a unit.

A number is refused, because its unit would be a guess. Only zero needs none.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, Final, Literal, SupportsIndex, TypeAlias, TypeVar, cast

from millpond.statestore.errors import InvalidError

_Function = TypeVar("_Function", bound=Callable[..., Any])

Duration: TypeAlias = Literal[0] | str | timedelta
"""A length of time: text such as ``"250ms"`` or ``"1h30m"``, a `timedelta`, or 0, which needs no unit."""

_OLD_NAMES: Final = {
    "timeout_ms": "timeout",
    "session_timeout_ms": "session_timeout",
    "pause_timeout_ms": "pause_timeout",
    "tick_ms": "tick",
    "checkpoint_weak_after_ms": "checkpoint_weak_after",
    "user_code_timeout_ms": "user_code_timeout",
    "least_ms": "least_work",
}
"""Options that were milliseconds until 0.1, and their present names."""

MICROSECOND: Final = timedelta(microseconds=1)
INT64_MAX: Final = 2**63 - 1
_UNITS_US: Final[Mapping[str, int]] = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_TERM: Final = re.compile(r"(\d+)(?:\.(\d+))?\s*(us|ms|min|s|m|h|d)\s*")
_TERMS: Final = re.compile(f"(?:{_TERM.pattern})+")


def duration_us(value: Duration) -> int:
    """Convert a duration to microseconds: text has numbers with units ``us ms s m min h d``, in any order."""
    match value:
        case timedelta():
            duration = value // MICROSECOND
        case str():
            duration = _parse_duration_us(value)
        case int() if value == 0 and not isinstance(value, bool):
            return 0
        case _:
            raise InvalidError(
                f"a duration must be text with a unit, or a timedelta{_with_unit(value)}",
                value=value,
                type=type(value).__name__,
            )
    if abs(duration) > INT64_MAX:
        raise InvalidError("the duration is too long", value=value)
    return duration


def _with_unit(value: object) -> str:
    """Return a hint that writes a number with the unit that makes it a usual, round length: a second to a year."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= INT64_MAX:
        return ""
    lengths = {unit: int(abs(value) * _UNITS_US[unit]) for unit in ("s", "ms", "us")}
    usual = [unit for unit, length in lengths.items() if _UNITS_US["s"] <= length <= 366 * _UNITS_US["d"]]
    unit = min(
        usual or ["us" if abs(value) > 1 else "s"],
        key=lambda unit: len(_TERM.findall(duration_text(lengths[unit]))),
    )
    return f"; did you mean '{value}{unit}'?"


def duration_text(duration: int) -> str:
    """Return a duration in microseconds as text that `duration_us` reads."""
    text, rest = "", abs(duration)
    for unit, size in sorted(_UNITS_US.items(), key=lambda item: -item[1]):
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return ("-" if duration < 0 else "") + (text or "0s")


def _parse_duration_us(text: str) -> int:
    terms = text.strip().removeprefix("-").strip()
    if not _TERMS.fullmatch(terms):
        raise InvalidError("not a duration: write a number and a unit of us, ms, s, m, h, d", value=text)
    total = 0
    for whole, fraction, unit in _TERM.findall(terms):
        numerator = _UNITS_US[unit] * int(whole + fraction)
        scale: int = 10 ** len(fraction)
        if numerator % scale:
            raise InvalidError("a duration must be a whole number of microseconds", value=text)
        total += numerator // scale
    return -total if text.strip().startswith("-") else total


def duration_ms(name: str, value: str | timedelta, *, least: str | None = "0s") -> float:
    """Convert an option to milliseconds; a number is refused, because its unit would be a guess."""
    if not isinstance(value, str | timedelta):
        raise InvalidError(
            f"{name} must be text such as '30s' or a timedelta{_with_unit(value)}",
            value=value,
            type=type(value).__name__,
        )
    duration = duration_us(value)
    if least is not None and duration < duration_us(least):
        raise InvalidError(f"{name} must be at least {least}", value=value)
    return duration / 1_000


def timeout_ms(timeout: str | timedelta | None) -> float | None:
    """Convert the longest wait of a call to milliseconds; ``None`` is no limit."""
    return None if timeout is None else duration_ms("timeout", timeout, least=None)


def accepts_old_durations(function: _Function) -> _Function:
    """Let a function accept durations in milliseconds under their old names, with a warning."""

    @wraps(function)
    def accept(*args: Any, **options: Any) -> Any:
        if not _OLD_NAMES.keys().isdisjoint(options):
            options = with_new_names(options)
        return function(*args, **options)

    return cast(_Function, accept)


def with_new_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with durations in milliseconds under their new names, as `timedelta`."""
    renamed = dict(options)
    for old, new in _OLD_NAMES.items():
        # Anything but a number is another option of that name, such as a field of `combine`.
        if isinstance(options.get(old), int | float):
            warnings.warn(f'{old} is now {new}, with a unit: {new}="30s"', DeprecationWarning, stacklevel=3)
            renamed[new] = timedelta(milliseconds=renamed.pop(old))
    return renamed


def whole_number(value: object, message: str) -> int:
    if type(value) is int:
        # Runs for every record; the protocol check takes ten times as long.
        return value
    if isinstance(value, SupportsIndex) and not isinstance(value, bool | type):
        return value.__index__()
    raise InvalidError(message, value=value, type=type(value).__name__)
