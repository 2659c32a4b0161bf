"""Checks of arguments in the call that passes them: what Python would take for another meaning is refused by name.

Text such as ``"no"`` is true, a class has the methods of its instances, ``True`` is the number 1, and NaN lies within
every bound that is written as ``value < least``.
"""

from __future__ import annotations

import inspect
from math import inf

from millpond.statestore.errors import InvalidError


def check_flag(name: str, value: object, **subject: object) -> None:
    if not isinstance(value, bool):
        raise InvalidError(f"{name} must be true or false", **subject, value=value)


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        check_flag(name, value)


def check_count(name: str, value: object, *, least: int = 1, **subject: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidError(f"{name} must be a whole number of at least {least}", **subject, value=value)


def check_number(name: str, value: object, *, least: float, most: float = inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"from {least} to {most}" if most < inf else f"of at least {least}"
        raise InvalidError(f"{name} must be a number {bounds}", value=value)


def check_instance(
    name: str, value: object, kind: type, *, optional: bool = False, **subject: object
) -> None:
    """Refuse what is no instance; a class is none, even of a protocol whose methods it has."""
    if optional and value is None:
        return
    if inspect.isclass(value) or not isinstance(value, kind):
        given = value.__qualname__ if inspect.isclass(value) else type(value).__name__
        expected = f"{kind.__name__} instance{' or None' if optional else ''}"
        raise InvalidError(f"{name} must be a {expected}", **subject, type=given)
    check_own_members(name, value, kind, **subject)


def check_own_members(name: str, value: object, protocol: type, **subject: object) -> None:
    """Refuse a subclass of a protocol that inherits one of its members: their bodies are empty, and return None."""
    members = vars(protocol).items() if getattr(protocol, "_is_protocol", False) else ()
    for member, empty in members:
        if not member.startswith("_") and getattr(type(value), member, None) is empty:
            given = type(value).__name__
            raise InvalidError(
                f"{name} must define {member}: that of {protocol.__name__} is empty", **subject, type=given
            )


def check_function(name: str, value: object, *, optional: bool = False, **subject: object) -> None:
    if not callable(value) and not (optional and value is None):
        expected = f"a function{' or None' if optional else ''}"
        raise InvalidError(f"{name} must be {expected}", **subject, type=type(value).__name__)
