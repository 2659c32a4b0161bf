"""Checks of an injector's arguments that its line alone shows, and what errors about its rows say of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.payloads.decoded_rows import ROW_PREFIX
from millpond.executor.payloads.payload import Payload
from millpond.executor.pipeline.injector_node import FieldExtractor
from millpond.executor.pipeline.key_extractor import check_key_extractor
from millpond.statestore.errors import InvalidError, did_you_mean


def check_field(argument: str, field: object, stream: str) -> None:
    """Refuse what names no field of a row.

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
    """Refuse what names no key of a row.

    Raises:
        InvalidError: it is neither a column's name, nor a list of names, nor a function.
    """
    if isinstance(key, list | tuple):
        check_key_extractor(key, stream=stream, argument="key")
    else:
        check_field("key", key, stream)


def positive_us(stream: str, argument: str, duration: Duration) -> int:
    """A duration in microseconds.

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
    """Refuse options that a stream by time of arrival does not have.

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
    """Refuse members without a way to tell them, or the other way about.

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


def check_payload(stream: str, payload: object, change: str | None, extractors: Sequence[object]) -> None:
    """Refuse what decodes nothing, and names that are no fields of its values.

    Args:
        stream: the stream.
        payload: what was given.
        change: the column of the kind of a change, if the rows are changes.
        extractors: where key, time, id and sender are, as they were given.

    Raises:
        InvalidError: says what does not fit.
    """
    if payload is None:
        return
    if not isinstance(payload, Payload):
        raise InvalidError(
            "a payload is an AvroPayload, a ProtobufPayload or a JsonPayload",
            stream=stream,
            type=payload.__qualname__ if inspect.isclass(payload) else type(payload).__qualname__,
        )
    if change is not None:
        raise InvalidError(
            "a stream of changes takes no payload: decode it in the frame, for example with Spark's from_avro",
            stream=stream,
        )
    known = payload.fields()
    for extractor in extractors:
        for name in extractor if isinstance(extractor, list | tuple) else [extractor]:
            if known is None or not isinstance(name, str) or name in known or name.startswith(ROW_PREFIX):
                continue
            hint = did_you_mean(name, known) or f": columns of the row have {ROW_PREFIX} before their names"
            raise InvalidError(
                f"the payload's schema has no such field{hint}",
                stream=stream,
                field=name,
                fields=sorted(known),
            )


@contextmanager
def told_of_stream(stream: str) -> Iterator[None]:
    """Let an error about the columns of some rows name the stream that they are for.

    Args:
        stream: the injected stream.

    Raises:
        InvalidError: that error, with the stream as its last detail.
    """
    try:
        yield
    except InvalidError as error:
        raise InvalidError(error.message, **{**error.details, "stream": stream}) from error
