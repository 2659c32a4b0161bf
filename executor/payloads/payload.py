"""What every kind of payload has in common: the column that holds it, and how it is declared, compared and sent to workers.

A declaration is small: text of a schema, the name of a message. What decodes is made of it where it is first used, and
kept for as long as the process lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, Final

import cloudpickle

from millpond.statestore.errors import InvalidError

Decoder = Callable[[bytes], Mapping[str, Any]]
"""What makes the fields of a value of its bytes; what it raises is why they do not fit."""

_MADE: Final = frozenset({"_decoder", "_pickled"})
_REASON_MAX: Final = 300


class Payload(ABC):
    """Encoded values in a column of a stream's rows, as those of a Kafka topic: what `Pipeline.inject` decodes.

    `AvroPayload`, `ProtobufPayload` and `JsonPayload` are the kinds that there are. A subclass with a `decoder` is
    one more.

    Args:
        column: the column that holds the encoded values: bytes, or text.

    Raises:
        InvalidError: ``column`` is no name.

    Example::

        class MessagePack(mp.Payload):
            def decoder(self):
                import msgpack
                return msgpack.unpackb

        pipeline.inject("payments", key="card", at="paid_at", payload=MessagePack("value"))
    """

    def __init__(self, column: str = "value") -> None:
        if not (isinstance(column, str) and column):
            raise InvalidError(
                "the column of a payload is a name", payload=type(self).__name__, column=column
            )
        self.column: str = column
        self._decoder: Decoder | None = None
        self._pickled: bytes | None = None

    @abstractmethod
    def decoder(self) -> Decoder:
        """Make what decodes a payload: a function of its bytes that returns a mapping of fields.

        It is called once in each process that decodes. An `InvalidError` of the function is the reason that a
        dead letter has, and so is any other exception except an `UnavailableError`, which ends the run.
        """

    def fields(self) -> Collection[str] | None:
        """The names that a value's fields can have; ``None`` if the declaration does not say."""
        return None

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The value of a payload.

        Args:
            payload: its bytes.

        Raises:
            InvalidError: it cannot be decoded; says which schema and field, and why.
            UnavailableError: a schema could not be looked up.
        """
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = self.decoder()
        value = decoder(payload)
        if type(value) is dict:
            return value
        if not isinstance(value, Mapping):
            raise InvalidError("the payload is no object with fields", type=type(value).__name__)
        return dict(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._declared() == other._declared()

    def __hash__(self) -> int:
        return hash((type(self), self.column))

    def _declared(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a declaration; a process that gets it again has the object of the first time, and what that has made."""
        if self._pickled is None:
            self._pickled = cloudpickle.dumps((type(self), self._declared()))
        return _restored, (self._pickled,)


@lru_cache(maxsize=64)
def _restored(pickled: bytes) -> Payload:
    kind, declared = cloudpickle.loads(pickled)
    payload: Payload = kind.__new__(kind)
    vars(payload).update(declared, _decoder=None, _pickled=pickled)
    return payload


def misfit(schema: str, reason: object, field: str = "") -> InvalidError:
    """Why a payload cannot be decoded.

    Args:
        schema: the name of the schema.
        reason: what is wrong, cut to a bounded length.
        field: the path of the field that is wrong, if that is known.
    """
    text = " ".join(str(reason).split()) or type(reason).__name__
    return InvalidError(
        "the payload does not fit its schema",
        schema=schema,
        **({"field": field} if field else {}),
        reason=text if len(text) <= _REASON_MAX else f"{text[:_REASON_MAX]}…",
    )


def missing_package(payload: Payload, package: str, extra: str) -> InvalidError:
    """What says that a package is to be installed."""
    return InvalidError(f"{type(payload).__name__} needs {package}: pip install 'millpond[{extra}]'")
