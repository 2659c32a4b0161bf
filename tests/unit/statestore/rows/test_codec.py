"""Codecs, which return equal values or refuse."""

from __future__ import annotations

import datetime as dt
import enum
import pickle
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgpack
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


class Kind(enum.StrEnum):
    BUS = "bus"


class Stops(tuple[int, ...]):
    __slots__ = ()


def plain_values() -> st.SearchStrategy[Any]:
    """Values of Python, of which MessagePack cannot give all back."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(2**65), 2**65)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=[]), max_size=4)
        | st.binary(max_size=4)
        | st.sampled_from([Kind.BUS, Stops((1, 2)), msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)])
    )
    keys = st.recursive(
        scalars, lambda inner: st.tuples(inner) | st.frozensets(inner, max_size=2), max_leaves=3
    )

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(keys, inner, max_size=3)
        return (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | dicts
            | dicts.map(OrderedDict)
            | dicts.map(Counter)
            | st.sets(keys, max_size=2)
        )

    return st.recursive(scalars, grown, max_leaves=8)


def needs_refusal(value: Any) -> bool:
    match value:
        case msgpack.ExtType() | msgpack.Timestamp():
            return False
        case bool() | float() | bytes() | None:
            return False
        case int():
            return not -(2**63) <= value < 2**64
        case str():
            return any("\ud800" <= letter <= "\udfff" for letter in value)
        case dict():
            has_tuple = any(isinstance(key, tuple) and not isinstance(key, msgpack.ExtType) for key in value)
            return has_tuple or any(map(needs_refusal, [*value, *value.values()]))
        case list() | tuple():
            return any(map(needs_refusal, value))
    return True


def codec_refuses(codec: Codec, value: object) -> bool:
    try:
        codec.encode(value)
    except InvalidError:
        return True
    return False


def with_lists(value: Any) -> Any:
    match value:
        case msgpack.ExtType():
            return value
        case dict():
            return {key: with_lists(part) for key, part in value.items()}
        case list() | tuple():
            return [with_lists(part) for part in value]
    return value


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

    @given(plain_values())
    def test_what_msgpack_accepts_comes_back_equal(self, value: Any) -> None:
        codec = MsgpackCodec()
        try:
            encoded = codec.encode(value)
        except InvalidError:
            assert needs_refusal(value)
        else:
            assert codec.decode(encoded) == with_lists(value)
            assert not needs_refusal(value)

    @pytest.mark.parametrize(
        "deeper", [lambda value: [value], lambda value: (value,), lambda value: {1: value}]
    )
    @pytest.mark.parametrize("innermost", [0, [], {}])
    def test_msgpack_decodes_the_deepest_value_that_it_encodes(
        self, deeper: Callable[[object], object], innermost: object
    ) -> None:
        values, codec = [innermost], MsgpackCodec()
        while len(values) < 2_000:
            values.append(deeper(values[-1]))
        accepted = bisect(values, 0, key=lambda value: codec_refuses(codec, value))
        encoded = codec.encode(values[accepted - 1])

        assert 500 < accepted < 2_000
        assert codec.encode(codec.decode(encoded)) == encoded

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
            (MsgpackCodec(), {1, 2}, "set"),
            (MsgpackCodec(), 2**64, "int"),
            (MsgpackCodec(), {"seen": {(1, 2): 3}}, "dict"),
            (MsgpackCodec(), {Stops((1, 2)): 3}, "dict"),
            (MsgpackCodec(), ["\ud800"], "list"),
            (MsgpackCodec(), dt.datetime(2013, 2, 8, tzinfo=dt.UTC), "datetime"),
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
            (JsonCodec(), '  {"day":"2026-02-30","$types":{"/day":"date"}}'),
            (JsonCodec(), '  {"day":"2026-02-03"}'),
            (JsonCodec(), '  {"day":1,"$types":{"/night":"date"}}'),
            (JsonCodec(), '  {"day":1,"$types":{"/day":"weekday"}}'),
            (JsonCodec(), "  [1]"),
            (MsgpackCodec(), b""),
            (MsgpackCodec(), b"\x92\x01"),
            (MsgpackCodec(), b"\x01\x01"),
            (BytesCodec(), "text"),
        ],
    )
    def test_foreign_bytes_are_data_error(self, codec: Codec, encoded: str | bytes) -> None:
        with pytest.raises(DataError):
            codec.decode(encoded)
