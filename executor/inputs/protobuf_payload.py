"""Payloads that are Protobuf messages, of a type that a descriptor set describes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

from millpond.executor.inputs.payload import (
    CONFLUENT_HEADER,
    Decoder,
    Payload,
    misfit,
    missing_package,
    read_schema_file,
    schema_id,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.objects.obstore import file_here

ProtobufFraming = Literal["plain", "confluent"]
"""The bytes before the message: none, or the number of its schema and its place in that schema."""


class ProtobufPayload(Payload):
    """Protobuf messages of one type, which a descriptor set describes.

    A value has the fields under their names in the ``.proto`` file. A field that is not set is its type's
    default, or ``None`` where the message records presence (``optional``, messages, members of a ``oneof``).
    An enum is the name of its value, or the number of an unknown one; a ``Timestamp`` is a ``datetime`` in
    UTC and a ``Duration`` a ``timedelta``, both with microseconds; a wrapper is its value or ``None``; a
    ``Struct`` is plain JSON. Unknown fields are skipped, because a newer writer may add them. Needs
    ``millpond[protobuf]``.

    Args:
        descriptor_set: the path of the file that ``protoc --include_imports --descriptor_set_out=FILE``
            writes, or its bytes.
        message: the type's full name, ``shop.Payment``.
        column: the column with the bytes.
        framing: ``"plain"``: the message alone; ``"confluent"``: after a zero byte, the four bytes of a
            schema's number and the message's place in that schema. All of these are skipped, because a type
            can read messages of its other versions.

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
                "unknown framing of Protobuf", framing=framing, framings=list(get_args(ProtobufFraming))
            )
        self._descriptors: bytes = (
            descriptor_set
            if isinstance(descriptor_set, bytes)
            else read_schema_file(file_here(descriptor_set), "the descriptor set")
        )
        self._message = message
        self._framing = framing
        self._decoder = self.decoder()

    def __repr__(self) -> str:
        return f"ProtobufPayload({self._message!r}, column={self.column!r}, framing={self._framing!r})"

    def fields(self) -> Collection[str]:
        """Return the names of the message's fields."""
        return [field.name for field in self._type().fields]

    def _type(self) -> Any:
        try:
            from millpond.executor.inputs.protobuf_messages import message_type
        except ImportError as cause:
            raise missing_package(self, "protobuf", "protobuf") from cause
        return message_type(self._descriptors, self._message)

    def decoder(self) -> Decoder:
        """Return a function that parses a message and reads its fields."""
        descriptor = self._type()
        from millpond.executor.inputs.protobuf_messages import read_varint, reader_of

        read = reader_of(descriptor)
        if self._framing == "plain":
            return read

        def read_framed(payload: bytes) -> dict[str, Any]:
            schema_id(payload)
            # The message's place in its file: a count, then as many numbers; all zigzag, with the sign in the last bit.
            count, at = read_varint(payload, CONFLUENT_HEADER)
            for _ in range(count >> 1):
                _, at = (0, None) if at is None else read_varint(payload, at)
            if at is None:
                raise misfit(self._message, "the payload ends before the message, or has no place of it")
            return read(payload[at:])

        return read_framed
