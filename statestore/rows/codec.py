"""Codecs: the conversion between a user's state and the bytes of a row.

A codec promises a round trip: ``decode(encode(value))`` equals ``value``, or ``encode`` refuses the value. Text codecs
fill the row's ``state`` column, which SQL can query; the others fill ``state_bytes`` (MillWheel §4.4: state is an opaque
byte string to the system).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import msgpack

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.value_text import decode_value, encode_value


@runtime_checkable
class Codec(Protocol):
    """Conversion of values into text or bytes and back; implementations are picklable and hold no state."""

    @property
    def name(self) -> str:
        """The codec's name in errors and in the catalog."""

    @property
    def is_text(self) -> bool:
        """True if `encode` returns ``str`` (column ``state``), false for ``bytes`` (``state_bytes``)."""

    def encode(self, value: Any) -> str | bytes:
        """Return the value's encoded form, or raise `InvalidError` if the codec cannot represent the value."""

    def decode(self, encoded: str | bytes) -> Any:
        """Return the value that was encoded, or raise `DataError` if ``encoded`` is not the codec's output."""


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

    It represents every value of the model: ``None``, booleans, whole numbers of any size, floats, decimals, text, bytes,
    dates, times with and without a zone, durations, UUIDs, lists, and dicts in their order. Tuples are decoded as lists,
    times with the offset of their zone, and NumPy's and Pandas' scalars as Python's. Where a type is none of JSON's, the text has
    what a reader expects, and the types besides, as ``$types``.

    Example:
        >>> JsonCodec().encode({"count": 3})
        '{"count":3}'
        >>> JsonCodec().encode({"day": date(2026, 1, 31)})
        '  {"day":"2026-01-31","$types":{"/day":"date"}}'
    """

    name: Final = "json"
    is_text: Final = True

    def encode(self, value: Any) -> str:
        """Encode as compact JSON, or raise `InvalidError`, which names the part, for a value that is in no model."""
        return encode_value(value)

    def decode(self, encoded: str | bytes) -> Any:
        """Parse JSON text, or raise `DataError`."""
        try:
            return decode_value(encoded)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise _damage(self, str(error)) from error


class MsgpackCodec:
    """MessagePack: smaller and faster than JSON, with bytes and any plain dict key.

    It represents JSON's types, NaN and infinities, bytes, and MessagePack's own extension types. Tuples are decoded as
    lists, so a tuple as a dict key is refused, as are integers beyond 64 bits and values of a thousand levels.

    Example:
        >>> MsgpackCodec().decode(MsgpackCodec().encode({7: b"raw"}))
        {7: b'raw'}
    """

    name: Final = "msgpack"
    is_text: Final = False

    def encode(self, value: Any) -> bytes:
        """Encode with distinct text and binary types, or raise `InvalidError` for a value that it could not decode."""
        try:
            encoded = _PACKER.pack(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refusal(self, value, str(error) or "nested too deeply") from error
        return encoded

    def decode(self, encoded: str | bytes) -> Any:
        """Parse a MessagePack byte string, or raise `DataError`."""
        try:
            return _unpacked(encoded)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise _damage(self, str(error) or type(error).__name__) from error


# The types whose subclasses are decoded as the type itself.
_BASES: Final[tuple[type[Any], ...]] = (dict, list, str, int, float, bytes, bytearray)


class _Packer(threading.local):
    """A packer for each thread, because making one costs more than packing a small state."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(default=self._plain, use_bin_type=True, strict_types=True)
        self._has_tuples = False

    def pack(self, value: object) -> bytes:
        self._has_tuples = False
        # In a list, because the packer allows one level more than the unpacker; the list's mark is one byte.
        encoded: bytes = self._packer.pack([value])[1:]
        if self._has_tuples:
            try:
                _unpacked(encoded)
            except TypeError:
                raise TypeError("a tuple cannot be a key, because it would be decoded as a list") from None
        return encoded

    def _plain(self, value: object) -> object:
        if isinstance(value, tuple):
            self._has_tuples = True
            return list(value)
        for base in _BASES:
            if isinstance(value, base):
                return base(value)
        raise TypeError(f"can not serialize {type(value).__name__!r} object")


_PACKER: Final = _Packer()


def _unpacked(encoded: str | bytes) -> Any:
    return msgpack.unpackb(encoded, raw=False, strict_map_key=False)


class BytesCodec:
    """No encoding: the state is a byte string that user code interprets."""

    name: Final = "bytes"
    is_text: Final = False

    def encode(self, value: Any) -> bytes:
        """Return the bytes; any other type raises `InvalidError`."""
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _refusal(self, value, "not bytes")
        return bytes(value)

    def decode(self, encoded: str | bytes) -> Any:
        """Return the bytes; text raises `DataError`."""
        if not isinstance(encoded, bytes):
            raise _damage(self, "text was stored where bytes belong")
        return encoded


# The end of msgspec's messages about a part of the value.
_AT: Final = re.compile(r"^(?P<reason>.*) - at `(?P<field>[^`]*)`$", re.DOTALL)


class ModelCodec:
    """JSON text of objects of one class, checked against the class's fields on each write and each read.

    The class is a dataclass, a ``msgspec.Struct``, an attrs class (these need ``millpond[models]``), or a class with
    ``model_validate_json`` and ``model_dump_json``, such as Pydantic's models. SQL reads the text like that of `JsonCodec`
    (``state ->> 'count'``).

    An object whose fields lack the declared types is refused. So is an object that would be decoded as a different one:
    NaN, or an object of a subclass with more fields. A new field needs a default, or a higher ``state_version``, because
    old rows lack it. A field that the class no longer has is ignored in old rows.

    Example::

        @dataclass
        class Visit:
            pages: int = 0
            countries: list[str] = field(default_factory=list)

        class Visits(mp.Computation):
            codec = mp.ModelCodec(Visit)

            def process_record(self, context, record):
                visit = context.state.get() or Visit()
                visit.pages += 1
                context.state.set(visit)
    """

    name: Final = "model"
    is_text: Final = True

    def __init__(self, model: type) -> None:
        self._model = model
        self._dump: Callable[[Any], str | bytes]
        self._load: Callable[[str | bytes], Any]
        if not inspect.isclass(model):
            raise InvalidError(f"ModelCodec needs a class, got an instance of `{type(model).__qualname__}`")
        if hasattr(model, "model_validate_json") and hasattr(model, "model_dump_json"):
            self._dump, self._load = model.model_dump_json, model.model_validate_json
        else:
            self._dump, self._load = _with_msgspec(model)
        # Without `__eq__` equal objects compare as different, so encode cannot check the round trip.
        self._has_equality = model.__eq__ is not object.__eq__

    def __repr__(self) -> str:
        return f"ModelCodec({self._model.__qualname__})"

    def __reduce__(self) -> tuple[type[ModelCodec], tuple[type]]:
        return ModelCodec, (self._model,)

    def encode(self, value: Any) -> str:
        """Encode as JSON; an unfit value raises `InvalidError`, which names the field."""
        if not isinstance(value, self._model):
            self._refuse(value, "", "not an object of the model")
        try:
            encoded = self._dump(value)
            text = encoded if isinstance(encoded, str) else encoded.decode()
            decoded = self._load(text)
        except Exception as error:  # noqa: BLE001 - each library has its own
            self._refuse(value, *_field_and_reason(error), cause=error)
        if self._has_equality and decoded != value:
            names = getattr(type(value), "__annotations__", {})
            unlike = (name for name in names if getattr(value, name, None) != getattr(decoded, name, None))
            self._refuse(value, next(unlike, ""), "it would come back as another value")
        return text

    def decode(self, encoded: str | bytes) -> Any:
        """Return the object that was encoded; unfit text raises `DataError`, which names the field."""
        try:
            return self._load(encoded)
        except Exception as error:
            field, reason = _field_and_reason(error)
            raise DataError(
                "the stored state does not fit its model: give new fields a default, or raise state_version",
                model=self._model.__qualname__,
                **({"field": field} if field else {}),
                reason=reason,
            ) from error

    def _refuse(self, value: object, field: str, reason: str, cause: Exception | None = None) -> NoReturn:
        raise InvalidError(
            "the state does not fit its model",
            model=self._model.__qualname__,
            type=type(value).__qualname__,
            **({"field": field} if field else {}),
            reason=reason,
        ) from cause


def _with_msgspec(model: type) -> tuple[Callable[[Any], bytes], Callable[[str | bytes], Any]]:
    try:
        import msgspec
    except ImportError as error:
        raise InvalidError(
            "states of this class need msgspec: pip install 'millpond[models]'", model=model.__qualname__
        ) from error
    is_known = dataclasses.is_dataclass(model) or hasattr(model, "__attrs_attrs__")
    if not (is_known or issubclass(model, msgspec.Struct)):
        raise InvalidError(
            "a model must be a dataclass, a msgspec.Struct, an attrs class, or have model_validate_json and model_dump_json",
            model=model.__qualname__,
        )
    try:
        classes = _classes_in(msgspec.inspect.type_info(model))
        decode: Callable[[str | bytes], Any] = msgspec.json.Decoder(model).decode
    except (TypeError, NameError) as error:
        raise InvalidError(
            "msgspec cannot decode this class", model=model.__qualname__, reason=error
        ) from error
    # The decoder needs what it has left at the classes no more, and a class of a script could not travel with it.
    for each in classes:
        if "__msgspec_cache__" in vars(each):
            delattr(each, "__msgspec_cache__")
    return msgspec.json.Encoder().encode, decode


def _classes_in(info: Any) -> set[type]:
    """Return the classes that a type of msgspec's inspection mentions, at any depth."""
    found, waiting, seen = set[type](), [info], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, type):
            continue
        seen.add(id(node))
        if isinstance(kind := getattr(node, "cls", None), type):
            found.add(kind)
        waiting += (
            node
            if isinstance(node, tuple)
            else [getattr(node, name) for name in getattr(node, "__struct_fields__", ())]
        )
    return found


def _field_and_reason(error: Exception) -> tuple[str, str]:
    """Return the field that an error is about, as in ``trips[0].port``, and the reason."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (first := next(iter(errors()), None)):
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first.get("loc", ()))
        return path.removeprefix("."), str(first.get("msg", error))
    found = _AT.match(str(error))
    if found is None:
        return "", str(error) or type(error).__name__
    return found["field"].removeprefix("$").removeprefix("."), found["reason"]
