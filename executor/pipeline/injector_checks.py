"""
Checks of an injector's arguments that its line alone shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.pipeline.key_extractor import check_key_extractor
from millpond.executor.pipeline.nodes import FieldExtractor
from millpond.statestore.errors import InvalidError

__all__ = ["check_field", "check_ingress", "check_key_field", "check_members", "positive_us"]


def check_field(argument: str, field: object, stream: str) -> None:
    """
    Refuse what names no field of a row.

    Raises:
        InvalidError: it is neither a column's name nor a function.
    """
    if not (callable(field) or (isinstance(field, str) and field)):
        raise InvalidError(
            "an injector's argument is a column's name or a function of the row",
            stream=stream,
            argument=argument,
            type=field.__qualname__ if inspect.isclass(field) else type(field).__qualname__,
        )


def check_key_field(key: object, stream: str) -> None:
    """
    Refuse what names no key of a row.

    Raises:
        InvalidError: it is neither a column's name, nor a list of names, nor a function.
    """
    if isinstance(key, list | tuple):
        check_key_extractor(key, stream=stream, argument="key")
    else:
        check_field("key", key, stream)


def positive_us(stream: str, argument: str, duration: Duration) -> int:
    """
    A duration in microseconds.

    Raises:
        InvalidError: it is not positive, or no duration.
    """
    micros = duration_us(duration)
    if micros <= 0:
        raise InvalidError(f"{argument} must be positive", stream=stream, value=duration)
    return micros


def check_ingress(
    stream: str,
    watermark: WatermarkPolicy | None,
    idle_after: Duration | None,
    members: Sequence[str],
    skew_limit: Duration | None,
) -> None:
    """
    Refuse options that a stream by time of arrival does not have.

    Raises:
        InvalidError: one of them is given.
    """
    has_own = watermark is not None and not isinstance(watermark, IngressTime)
    if has_own or idle_after is not None or members or skew_limit is not None:
        raise InvalidError(
            "a stream by time of arrival has its own watermark, and does not hold others back: "
            "it takes no watermark, idle_after, members or skew_limit",
            stream=stream,
        )


def check_members(stream: str, members: Sequence[str], member: FieldExtractor | None) -> None:
    """
    Refuse members without a way to tell them, or the other way about.

    Raises:
        InvalidError: says what does not fit.
    """
    if isinstance(members, str) or not all(isinstance(name, str) and name for name in members):
        raise InvalidError("members is a list of names", stream=stream, members=members)
    if len(set(members)) < len(members):
        raise InvalidError("a member is named twice", stream=stream, members=list(members))
    if bool(members) != (member is not None):
        raise InvalidError("members and member belong together", stream=stream)
    if member is not None:
        check_field("member", member, stream)
