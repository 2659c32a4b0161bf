"""Codecs carry a value there and back, or refuse it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.codec import BytesCodec, Codec, JsonCodec, MsgpackCodec

CODECS: list[Codec] = [JsonCodec(), MsgpackCodec(), BytesCodec()]


def json_values(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested lists and dicts over the scalars."""
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)


@dataclasses.dataclass
class Point:
    x: int


class TestRoundTrip:
    @given(json_values(SCALARS))
    def test_json(self, value: Any) -> None:
        """JSON gives back any JSON value, with the keys in their order."""
        decoded = JsonCodec().decode(JsonCodec().encode(value))

        assert value == decoded
        if isinstance(value, dict):
            assert list(value) == list(decoded)

    @given(json_values(SCALARS | st.binary()))
    def test_msgpack(self, value: Any) -> None:
        """MessagePack gives back JSON values and bytes."""
        assert value == MsgpackCodec().decode(MsgpackCodec().encode(value))

    @given(st.binary())
    def test_bytes(self, value: bytes) -> None:
        """The bytes codec gives back bytes, and copies what could change later."""
        assert value == BytesCodec().decode(BytesCodec().encode(bytearray(value)))


class TestForm:
    @pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
    def test_is_text(self, codec: Codec) -> None:
        """`is_text` tells the type of the encoded form."""
        assert isinstance(codec.encode(b"x" if codec.name == "bytes" else 1), str) is codec.is_text

    @pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
    def test_travels(self, codec: Codec) -> None:
        """Codecs are picklable and satisfy the protocol."""
        copy = pickle.loads(pickle.dumps(codec))

        assert isinstance(copy, Codec)
        assert codec.name == copy.name

    def test_none_is_a_value(self) -> None:
        """A state of None is text, not an absent state."""
        assert JsonCodec().encode(None) == "null"


class TestRefusal:
    @pytest.mark.parametrize(
        ("codec", "value", "type_name"),
        [
            (JsonCodec(), {1, 2}, "set"),
            (JsonCodec(), {1: "a"}, "dict"),
            (JsonCodec(), 2**64, "int"),
            (JsonCodec(), math.nan, "float"),
            (JsonCodec(), {"a": [1.0, (math.inf,)]}, "dict"),
            (JsonCodec(), dt.datetime(2013, 2, 8, tzinfo=dt.UTC), "datetime"),
            (JsonCodec(), Point(1), "Point"),
            (JsonCodec(), "\ud800", "str"),
            (MsgpackCodec(), {1, 2}, "set"),
            (MsgpackCodec(), 2**64, "int"),
            (BytesCodec(), "text", "str"),
        ],
    )
    def test_named(self, codec: Codec, value: object, type_name: str) -> None:
        """What would not come back equal is refused, naming the codec and the type."""
        with pytest.raises(InvalidError) as caught:
            codec.encode(value)

        assert caught.value.details["type"] == type_name
        assert caught.value.details["codec"] == codec.name

    @pytest.mark.parametrize(
        ("codec", "encoded"),
        [
            (JsonCodec(), '{"count":'),
            (MsgpackCodec(), b""),
            (MsgpackCodec(), b"\x92\x01"),
            (MsgpackCodec(), b"\x01\x01"),
            (BytesCodec(), "text"),
        ],
    )
    def test_damage(self, codec: Codec, encoded: str | bytes) -> None:
        """What no codec has written is a data error."""
        with pytest.raises(DataError):
            codec.decode(encoded)
