"""Codecs, which return equal values or refuse."""

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
    def test_json_round_trips_any_json_value(self, value: Any) -> None:
        """The order of keys stays."""
        decoded = JsonCodec().decode(JsonCodec().encode(value))

        assert value == decoded
        if isinstance(value, dict):
            assert list(value) == list(decoded)

    @given(json_values(SCALARS | st.binary()))
    def test_msgpack_round_trips_json_and_bytes(self, value: Any) -> None:
        assert value == MsgpackCodec().decode(MsgpackCodec().encode(value))

    @given(st.binary())
    def test_bytes_codec_copies_mutable_input(self, value: bytes) -> None:
        assert value == BytesCodec().decode(BytesCodec().encode(bytearray(value)))


class TestForm:
    @pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
    def test_is_text_matches_encoded_form(self, codec: Codec) -> None:
        assert isinstance(codec.encode(b"x" if codec.name == "bytes" else 1), str) is codec.is_text

    @pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
    def test_codec_is_picklable(self, codec: Codec) -> None:
        copy = pickle.loads(pickle.dumps(codec))

        assert isinstance(copy, Codec)
        assert codec.name == copy.name

    def test_none_is_state(self) -> None:
        """It is text, not an absent state."""
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
    def test_value_that_would_change_is_refused(self, codec: Codec, value: object, type_name: str) -> None:
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
    def test_foreign_bytes_are_data_error(self, codec: Codec, encoded: str | bytes) -> None:
        with pytest.raises(DataError):
            codec.decode(encoded)
