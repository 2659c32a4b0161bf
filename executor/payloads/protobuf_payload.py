"""Payloads that are Protobuf messages, of a type that a descriptor set describes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

from millpond.executor.payloads.payload import Decoder, Payload, misfit, missing_package
from millpond.executor.payloads.schema_lookup import CONFLUENT_HEADER, schema_id
from millpond.executor.payloads.schema_text import read_schema_file
from millpond.statestore.errors import InvalidError

ProtobufFraming = Literal["plain", "confluent"]
"""What stands before the message: nothing, or the number of its schema and its place in that."""

_VARINT_BYTES_MAX: Final = 10


class ProtobufPayload(Payload):
    """Protobuf messages, each payload one of a type that a descriptor set describes.

    A value has the fields under their names in the ``.proto`` file. A field that is not set is its type's default, or
    ``None`` where the message can tell (``optional``, messages, members of a ``oneof``). An enum is the name of its
    value, or the number of an unknown one; a ``Timestamp`` a ``datetime`` in UTC, a ``Duration`` a ``timedelta``, both
    with microseconds; a wrapper its value or ``None``; a ``Struct`` what JSON makes of it. Fields that the type does not
    have are skipped, as they are those of a newer writer. Needs ``millpond[protobuf]``.

    Args:
        descriptor_set: the path of the file that ``protoc --include_imports --descriptor_set_out=FILE`` writes, or its
            bytes.
        message: the type's full name, ``shop.Payment``.
        column: the column with the bytes.
        framing: ``"plain"``: the message alone; ``"confluent"``: a zero byte, the four bytes of a schema's number and
            the message's place in it, all of which are skipped, since a type can read what its other versions wrote.

    Raises:
        InvalidError: the file cannot be read or is none, it does not have the type, or the package is not installed.

    Example::

        payload = mp.ProtobufPayload("shop.desc", "shop.Payment")
        pipeline.inject("payments", key="card", at="paid_at", payload=payload)
    """

    def __init__(
        self,
        descriptor_set: str | Path | bytes,
        message: str,
        *,
        column: str = "value",
        framing: ProtobufFraming = "plain",
    ) -> None:
        super().__init__(column)
        if framing not in get_args(ProtobufFraming):
            raise InvalidError(
                "no such framing of Protobuf", framing=framing, framings=list(get_args(ProtobufFraming))
            )
        self._descriptors: bytes = (
            descriptor_set
            if isinstance(descriptor_set, bytes)
            else read_schema_file(Path(descriptor_set), "the descriptor set")
        )
        self._message = message
        self._framing = framing
        self._decoder = self.decoder()

    def __repr__(self) -> str:
        return f"ProtobufPayload({self._message!r}, column={self.column!r}, framing={self._framing!r})"

    def fields(self) -> Collection[str]:
        """The names of the message's fields."""
        return [field.name for field in self._type().fields]

    def _type(self) -> Any:
        try:
            from millpond.executor.payloads.protobuf_types import message_type
        except ImportError as cause:
            raise missing_package(self, "protobuf", "protobuf") from cause
        return message_type(self._descriptors, self._message)

    def decoder(self) -> Decoder:
        """Make what parses a message and reads its fields.

        Raises:
            InvalidError: the descriptor set is none, it does not have the type, or the package is not installed.
        """
        descriptor = self._type()
        from millpond.executor.payloads.protobuf_values import reader_of

        read = reader_of(descriptor)
        return read if self._framing == "plain" else partial(_confluent, read, self._message)


def _confluent(read: Callable[[bytes], dict[str, Any]], name: str, payload: bytes) -> dict[str, Any]:
    schema_id(payload)
    # The message's place in its file: how many numbers follow, and these; all with their sign in the last bit.
    count, at = _varint(name, payload, CONFLUENT_HEADER)
    for _ in range(count >> 1):
        _, at = _varint(name, payload, at)
    return read(payload[at:])


def _varint(name: str, payload: bytes, at: int) -> tuple[int, int]:
    number = 0
    for place in range(_VARINT_BYTES_MAX):
        if at + place >= len(payload):
            break
        byte = payload[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise misfit(name, "the payload ends before the message, or has no place of it")
