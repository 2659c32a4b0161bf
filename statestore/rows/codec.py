"""Codecs: the conversion between a user's state and the bytes of a row.

A codec promises a round trip: ``decode(encode(value))`` equals ``value``, or
``encode`` refuses it. Text codecs fill the row's ``state`` column, which SQL
can query; the others fill ``state_bytes`` (MillWheel §4.4: state is an opaque
byte string to the system).
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol, runtime_checkable

import msgpack
import orjson

from millpond.statestore.errors import DataError, InvalidError


class PlainObject(dict[str, Any]):
    """An object of plain fields: codecs encode it as a ``dict``, and never read it as anything else."""

    __slots__ = ()


@runtime_checkable
class Codec(Protocol):
    """Converts values into text or bytes and back.

    Implementations are picklable and hold no state.
    """

    @property
    def name(self) -> str:
        """The codec's name in errors and in the catalog."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether `encode` returns ``str`` (column ``state``) rather than ``bytes`` (``state_bytes``)."""
        ...

    def encode(self, value: Any) -> str | bytes:
        """The value's encoded form.

        Raises:
            InvalidError: the codec cannot represent this value.
        """
        ...

    def decode(self, encoded: str | bytes) -> Any:
        """The value that was encoded.

        Raises:
            DataError: ``encoded`` is not the codec's output.
        """
        ...


def _refusal(codec: Codec, value: object, reason: str) -> InvalidError:
    return InvalidError(
        "the codec cannot encode this value: change the value or choose another codec",
        codec=codec.name,
        type=type(value).__qualname__,
        reason=reason,
    )


def _damage(codec: Codec, reason: str) -> DataError:
    return DataError("the codec cannot decode the stored state", codec=codec.name, reason=reason)


class JsonCodec:
    """JSON text, the default: SQL can read it (``state ->> 'count'``).

    It represents JSON's types: ``None``, booleans, 64-bit integers, finite floats,
    strings, lists, and dicts with string keys, in their order. Tuples come back
    as lists. Dates, dataclasses, NaN and infinities are refused, since they
    would come back as other values.

    Example:
        >>> JsonCodec().encode({"count": 3})
        '{"count":3}'
    """

    name: Final = "json"
    is_text: Final = True

    # By default orjson silently converts these into strings, dicts and bare base types.
    _OPTIONS: Final = (
        orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
    )

    def encode(self, value: Any) -> str:
        """Encode as compact JSON with keys in their own order.

        Raises:
            InvalidError: the value contains a type that JSON lacks, NaN or an infinity.
        """
        try:
            encoded = orjson.dumps(value, _as_dict, self._OPTIONS)
        except TypeError as error:
            raise _refusal(self, value, str(error)) from error
        # orjson writes NaN and infinities as null, so the value is searched only if there is a null.
        if b"null" in encoded and has_non_finite(value):
            raise _refusal(self, value, "not a finite number")
        return encoded.decode()

    def decode(self, encoded: str | bytes) -> Any:
        """Parse JSON text.

        Raises:
            DataError: the text is not JSON.
        """
        try:
            return orjson.loads(encoded)
        except orjson.JSONDecodeError as error:
            raise _damage(self, str(error)) from error


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, PlainObject):
        return dict(value)
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def has_non_finite(value: object) -> bool:
    """Whether a float in the value is NaN or an infinity, which JSON cannot say."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(has_non_finite, value.values()))
    return isinstance(value, list | tuple) and any(map(has_non_finite, value))


class MsgpackCodec:
    """MessagePack: smaller and faster than JSON, with bytes and any plain dict key.

    Tuples come back as lists.
    """

    name: Final = "msgpack"
    is_text: Final = False

    def encode(self, value: Any) -> bytes:
        """Encode as MessagePack with distinct text and binary types.

        Raises:
            InvalidError: the value contains a type that MessagePack lacks.
        """
        try:
            encoded: bytes = msgpack.packb(value, use_bin_type=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refusal(self, value, str(error)) from error
        return encoded

    def decode(self, encoded: str | bytes) -> Any:
        """Parse a MessagePack byte string.

        Raises:
            DataError: the bytes are not MessagePack.
        """
        try:
            return msgpack.unpackb(encoded, raw=False, strict_map_key=False)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise _damage(self, str(error) or type(error).__name__) from error


class BytesCodec:
    """No encoding: the state is a byte string that user code interprets."""

    name: Final = "bytes"
    is_text: Final = False

    def encode(self, value: Any) -> bytes:
        """The bytes themselves."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _refusal(self, value, "not bytes")
        return bytes(value)

    def decode(self, encoded: str | bytes) -> Any:
        """The bytes themselves."""
        if not isinstance(encoded, bytes):
            raise _damage(self, "text was stored where bytes belong")
        return encoded
