"""States with a schema: which values fit, what they become, and their way through Arrow and text."""

from __future__ import annotations

import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.rows.row import as_written, conform
from millpond.statestore.rows.state_schema import (
    SchemaCodec,
    cells_of,
    dict_maker,
    is_typed_column,
    state_columns_among,
    state_field,
    state_kind,
    struct_of,
    texts_of,
)

NAN: Final = math.nan
UTC_TIME: Final = pa.timestamp("us", "UTC")
LEAVES: Final = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(5, 2),
    pa.decimal128(38, 38),
    pa.string(),
    pa.binary(),
    pa.date32(),
    UTC_TIME,
)


def codec_of(kind: pa.DataType, *, nullable: bool = True) -> SchemaCodec:
    return SchemaCodec(pa.schema([pa.field("x", kind, nullable=nullable)]))


def cell(kind: pa.DataType, value: Any) -> Any:
    return codec_of(kind).encode({"x": value})[0]


def same(left: Any, right: Any) -> bool:
    """Compare by type and value, where all NaN are equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# What a value becomes, written out.
FITTING: Final[list[tuple[pa.DataType, Any, Any]]] = [
    (pa.bool_(), True, True),
    (pa.bool_(), np.bool_(False), False),
    (pa.int8(), -128, -128),
    (pa.int8(), 127, 127),
    (pa.int16(), np.int64(-5), -5),
    (pa.int32(), 3.0, 3),
    (pa.int32(), Decimal("7.000"), 7),
    (pa.int64(), -(2**63), -(2**63)),
    (pa.int64(), 2**63 - 1, 2**63 - 1),
    (pa.int64(), np.array(4), 4),
    (pa.uint8(), 255, 255),
    (pa.uint16(), 65_535, 65_535),
    (pa.uint32(), 2**32 - 1, 2**32 - 1),
    (pa.float64(), 3, 3.0),
    (pa.float64(), -(2**53), -(2.0**53)),
    (pa.float64(), math.inf, math.inf),
    (pa.float64(), -0.0, -0.0),
    (pa.float64(), NAN, NAN),
    (pa.float64(), np.float64("nan"), NAN),
    (pa.float64(), np.float32(0.5), 0.5),
    (pa.float32(), 0.1, 0.10000000149011612),
    (pa.float32(), 2**24, 16_777_216.0),
    (pa.float32(), -math.inf, -math.inf),
    (pa.float32(), NAN, NAN),
    (pa.decimal128(5, 2), Decimal("1.1"), Decimal("1.10")),
    (pa.decimal128(5, 2), Decimal("1.1000"), Decimal("1.10")),
    (pa.decimal128(5, 2), Decimal("1E+2"), Decimal("100.00")),
    (pa.decimal128(5, 2), -999, Decimal("-999.00")),
    (pa.decimal128(5, 2), np.int16(8), Decimal("8.00")),
    (pa.decimal128(38, 0), 10**38 - 1, Decimal(10**38 - 1)),
    (pa.string(), "Ærøskøbing 🌊", "Ærøskøbing 🌊"),
    (pa.string(), "a\x00b", "a\x00b"),
    (pa.string(), np.str_("n"), "n"),
    (pa.large_string(), "wide", "wide"),
    (pa.binary(), b"\x00\xff", b"\x00\xff"),
    (pa.binary(), bytearray(b"ab"), b"ab"),
    (pa.binary(), memoryview(b"abcdef")[::2], b"ace"),
    (pa.binary(), np.bytes_(b"n"), b"n"),
    (pa.large_binary(), b"wide", b"wide"),
    (pa.date32(), date(1, 1, 1), date(1, 1, 1)),
    (pa.date32(), date(9999, 12, 31), date(9999, 12, 31)),
    (pa.list_(pa.int8()), (1, None, 2.0), [1, None, 2]),
    (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
    (pa.list_(pa.int64()), pd.Series([1, 2]), [1, 2]),
    (pa.large_list(pa.string()), [], []),
    (pa.list_(pa.list_(pa.bool_())), [[True], None, []], [[True], None, []]),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), {"b": "t"}, {"a": None, "b": "t"}),
    (pa.struct([("a", pa.int64())]), OrderedDict(a=1), {"a": 1}),
    (pa.map_(pa.string(), pa.int64()), {"b": 1, "a": None}, {"b": 1, "a": None}),
    (pa.map_(pa.int32(), pa.float64()), {1.0: 2}, {1: 2.0}),
    (pa.map_(pa.date32(), pa.list_(pa.int8())), {date(2026, 1, 2): [1]}, {date(2026, 1, 2): [1]}),
    (pa.int64(), pd.NA, None),
    (UTC_TIME, pd.NaT, None),
    (UTC_TIME, np.datetime64("NaT"), None),
    *((kind, None, None) for kind in LEAVES),
    (pa.list_(pa.int8()), None, None),
    (pa.map_(pa.string(), pa.int8()), None, None),
    (pa.struct([("a", pa.int8())]), None, None),
]


@pytest.mark.parametrize(("kind", "value", "expected"), FITTING)
def test_fitting_value_becomes_the_cell_of_its_type(kind: pa.DataType, value: Any, expected: Any):
    assert same(cell(kind, value), expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.bool_(), 1),
        (pa.bool_(), "true"),
        (pa.int64(), True),
        (pa.int64(), np.bool_(True)),
        (pa.int64(), "5"),
        (pa.int64(), 5.5),
        (pa.int64(), NAN),
        (pa.int64(), math.inf),
        (pa.int64(), Decimal("NaN")),
        (pa.int64(), Decimal("sNaN")),
        (pa.int64(), Decimal("0.5")),
        (pa.int64(), Decimal("1E+999999999")),
        (pa.int64(), Fraction(4, 2)),
        (pa.int64(), 2**63),
        (pa.int64(), np.uint64(2**63)),
        (pa.int64(), np.array([1])),
        (pa.int8(), 128),
        (pa.int8(), -129),
        (pa.int16(), 2**15),
        (pa.int32(), 2**31),
        (pa.uint8(), 2**15),
        (pa.float64(), True),
        (pa.float64(), "1.0"),
        (pa.float64(), 2**53 + 1),
        (pa.float64(), 10**400),
        (pa.float64(), Decimal("1.5")),
        (pa.float32(), 1e300),
        (pa.float32(), 1e-300),
        (pa.float32(), 2**24 + 1),
        (pa.decimal128(5, 2), Decimal("1.001")),
        (pa.decimal128(5, 2), Decimal("1000.00")),
        (pa.decimal128(5, 2), Decimal("NaN")),
        (pa.decimal128(5, 2), Decimal("Infinity")),
        (pa.decimal128(5, 2), 1.5),
        (pa.decimal128(5, 2), True),
        (pa.decimal128(5, 2), "1.50"),
        (pa.decimal128(5, 2), 10**4000),
        (pa.string(), "\ud800"),
        (pa.string(), b"bytes"),
        (pa.string(), 5),
        (pa.binary(), "text"),
        (pa.binary(), [1, 2]),
        (pa.date32(), datetime(2026, 1, 1, tzinfo=UTC)),
        (pa.date32(), "2026-01-01"),
        (UTC_TIME, datetime(2026, 1, 1)),  # noqa: DTZ001 - refused
        (UTC_TIME, date(2026, 1, 1)),
        (UTC_TIME, np.datetime64("2026-01-01T00:00:00")),
        (UTC_TIME, pd.Timestamp("2026-01-01T00:00:00.000000001Z")),
        (UTC_TIME, datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))),
        (UTC_TIME, "2026-01-01T00:00:00Z"),
        (UTC_TIME, 5),
        (pa.list_(pa.int8()), "text"),
        (pa.list_(pa.int8()), {1}),
        (pa.list_(pa.int8()), {"a": 1}),
        (pa.list_(UTC_TIME), np.array(["2026-01-01T00:00:00.000000001"], "datetime64[ns]")),
        (pa.map_(pa.string(), pa.int8()), [("a", 1)]),
        (pa.map_(pa.string(), pa.int8()), {None: 1}),
        (pa.struct([("a", pa.int8())]), [1]),
        (pa.struct([("a", pa.int8())]), "text"),
    ],
)
def test_value_that_would_change_is_refused_with_its_part(kind: pa.DataType, value: Any):
    with pytest.raises(InvalidError, match=r"part=.state\.x"):
        cell(kind, value)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", ["UTC", "+05:30", "Europe/Oslo"])
def test_time_of_any_unit_and_zone_is_the_instant_in_utc(unit: str, zone: str):
    """The clock is turned back in the second of both moments."""
    for fold in (0, 1):
        local = datetime(2026, 10, 25, 2, 30, 0, 5, ZoneInfo("Europe/Oslo"), fold=fold)
        found = cell(pa.timestamp(unit, zone), local)
        assert found == local.astimezone(UTC)
        assert found.utcoffset() == timedelta()
        assert found.hour == 1 - (1 - fold)
    assert cell(pa.timestamp(unit, zone), pd.Timestamp("2026-01-01T00:00Z")) == datetime(
        2026, 1, 1, tzinfo=UTC
    )


def test_schema_is_stored_in_types_of_the_basic_protocol():
    declared = pa.struct(
        [
            ("a", pa.uint8()),
            ("b", pa.uint16()),
            ("c", pa.uint32()),
            ("d", pa.large_list(pa.large_string())),
            ("e", pa.timestamp("ns", "Asia/Tokyo")),
            ("f", pa.map_(pa.large_string(), pa.struct([("g", pa.large_binary())]))),
        ]
    )
    stored = pa.struct(
        [
            ("a", pa.int16()),
            ("b", pa.int32()),
            ("c", pa.int64()),
            ("d", pa.list_(pa.string())),
            ("e", UTC_TIME),
            ("f", pa.map_(pa.string(), pa.struct([("g", pa.binary())]))),
        ]
    )
    assert state_kind(declared) == stored
    assert SchemaCodec(declared).column == SchemaCodec(pa.schema(list(stored))).column


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (pa.schema([]), "needs a field"),
        (pa.schema([("a", pa.timestamp("us"))]), r"part=.state\.a. type=.timestamp\[us\]"),
        (pa.schema([("a", pa.duration("us"))]), r"part=.state\.a. type=.duration\[us\]"),
        (pa.schema([("a", pa.time64("us"))]), "type=.time64"),
        (pa.schema([("a", pa.uint64())]), "type=.uint64"),
        (pa.schema([("a", pa.null())]), "type=.null"),
        (pa.schema([("a", pa.float16())]), "type=.halffloat"),
        (pa.schema([("a", pa.date64())]), "type=.date64"),
        (pa.schema([("a", pa.binary(4))]), "type=.fixed_size_binary"),
        (pa.schema([("a", pa.list_(pa.int8(), 2))]), "type=.fixed_size_list"),
        (pa.schema([("a", pa.dictionary(pa.int8(), pa.string()))]), "type=.dictionary"),
        (pa.schema([("a", pa.decimal256(40, 2))]), "type=.decimal256"),
        (pa.schema([("a", pa.decimal128(5, -2))]), "type=.decimal128"),
        (pa.schema([("a", pa.list_(pa.struct([("b", pa.uint64())])))]), r"part=.state\.a\[\]\.b"),
        (pa.schema([("a", pa.map_(pa.string(), pa.uint64()))]), r"part=.state\.a\[value\]"),
        (pa.schema([("a", pa.map_(pa.uint64(), pa.string()))]), r"part=.state\.a\[key\]"),
        (pa.schema([("a", pa.map_(pa.list_(pa.int8()), pa.string()))]), r"keys of this type"),
        (pa.schema([("a", pa.map_(pa.struct([("b", pa.int8())]), pa.string()))]), r"keys of this type"),
        (pa.schema([("a b", pa.int8())]), r"field names with blanks"),
        (pa.schema([("", pa.int8())]), r"field names with blanks"),
        (pa.schema([("a", pa.struct([("b;", pa.int8())]))]), r"part=.state\.a\.b;"),
        (pa.schema([("a", pa.int8()), ("A", pa.int8())]), "apart by case"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "apart by case"),
    ],
)
def test_schema_that_delta_lacks_is_refused_with_its_part(schema: pa.Schema, message: str):
    with pytest.raises(InvalidError, match=message):
        SchemaCodec(schema)


ORDER: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("items", pa.list_(pa.struct([pa.field("price", pa.decimal128(9, 2), nullable=False)]))),
        ("notes", pa.map_(pa.string(), pa.list_(pa.int8()))),
        ("place", pa.struct([("city", pa.string()), ("since", UTC_TIME)])),
    ]
)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"id": 1, "items": [{"price": 1}] * 3 + [{"price": 0.5}]}, r"part=.state\.items\[3\]\.price"),
        ({"id": 1, "items": [{"price": 1}, {}]}, r"takes no null.*part=.state\.items\[1\]\.price"),
        ({"id": 1, "notes": {"a": [1, 999]}}, r"part=.state\.notes\['a'\]\[1\]. type=.int. value=.999"),
        ({"id": 1, "notes": {7: []}}, r"part=.state\.notes\[7\]"),
        ({"id": 1, "place": {"citty": "x"}}, r"no such field.*city.*part=.state\.place\.citty"),
        ({"id": 1, "item": []}, r"no such field.*items.*part=.state\.item"),
        ({"id": 1, 5: []}, r"no such field.*part=.state\.5"),
        ({"items": []}, r"takes no null.*part=.state\.id"),
        ({"id": None, "items": [], "notes": {}, "place": {}}, r"takes no null.*part=.state\.id"),
        (None, r"not a dict of the schema's fields part=.state. type=.NoneType"),
        ([1], r"not a dict of the schema's fields part=.state. type=.list"),
    ],
)
def test_refusal_names_the_part_of_the_state(state: Any, message: str):
    with pytest.raises(InvalidError, match=message):
        SchemaCodec(ORDER).encode(state)


def test_missing_field_is_null_and_fields_come_in_the_order_of_the_schema():
    codec = SchemaCodec(ORDER)
    place = {"since": None, "city": "Bergen"}
    assert codec.encode({"place": place, "id": 7}) == (7, None, None, {"city": "Bergen", "since": None})
    assert list(codec.decode(codec.encode({"id": 7}))) == ["id", "items", "notes", "place"]


def test_parts_of_lists_and_maps_take_no_null_where_the_schema_says_so():
    number = pa.field("item", pa.int8(), nullable=False)
    with pytest.raises(InvalidError, match=r"takes no null.*part=.state\.x\[1\]"):
        cell(pa.list_(number), [1, None])
    with pytest.raises(InvalidError, match=r"takes no null.*part=.state\.x\['a'\]"):
        cell(pa.map_(pa.string(), number), {"a": None})
    codec = pickle.loads(pickle.dumps(codec_of(pa.list_(number))))
    with pytest.raises(InvalidError, match="takes no null"):
        codec.encode({"x": [None]})


def test_column_allows_nulls_and_its_name_follows_from_names_and_types_alone():
    strict, lenient = codec_of(pa.int8(), nullable=False), codec_of(pa.int8())
    assert strict.column == lenient.column
    assert strict.column.type == pa.struct([("x", pa.int8())])
    assert is_typed_column(strict.column.name)
    assert codec_of(pa.int16()).column.name != strict.column.name
    assert state_columns_among(["state", "state_bytes", "state_version", strict.column.name, "state_1"]) == [
        strict.column.name
    ]


def test_unpickled_codec_is_the_same():
    codec = SchemaCodec(ORDER)
    again = pickle.loads(pickle.dumps(codec))
    assert (again.kind, again.column) == (codec.kind, codec.column)
    assert again.encode({"id": 1}) == codec.encode({"id": 1})


def test_mapping_whose_keys_become_one_is_refused():
    with pytest.raises(InvalidError, match="two keys of the map become one"):
        cell(pa.map_(pa.float64(), pa.int8()), {float("nan"): 1, float("nan"): 2})


NESTED: Final = pa.schema(
    [
        ("a", pa.list_(pa.list_(pa.int8()))),
        ("b", pa.map_(pa.string(), pa.list_(pa.int8()))),
        (
            "c",
            pa.struct([("d", pa.list_(pa.int8())), ("e", pa.struct([("f", pa.map_(pa.int8(), pa.int8()))]))]),
        ),
        ("g", pa.list_(pa.struct([("h", pa.int8())]))),
    ]
)


def test_decoded_state_shares_no_part_with_another():
    codec = SchemaCodec(NESTED)
    state = {"a": [[1]], "b": {"k": [1]}, "c": {"d": [1], "e": {"f": {1: 1}}}, "g": [{"h": 1}, None]}
    cells = codec.encode(state)
    first = codec.decode(cells)
    assert first == state
    first["a"][0].append(2)
    first["b"]["k"].append(2)
    first["b"]["l"] = []
    first["c"]["d"].append(2)
    first["c"]["e"]["f"][2] = 2
    first["g"][0]["h"] = 2
    first["g"].append(None)
    assert codec.decode(cells) == state
    state["a"][0].append(3)
    state["c"]["e"]["f"].clear()
    assert codec.decode(cells) == {**state, "a": [[1]], "c": {"d": [1], "e": {"f": {1: 1}}}}


def test_text_of_json_code_is_read_by_the_schema():
    codec = SchemaCodec(ORDER)
    text = JsonCodec().encode(
        {
            "id": 3.0,
            "items": [{"price": Decimal("1.5"), "gone": 1}],
            "notes": {"a": [1]},
            "place": {"since": datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Oslo")), "gone": {"x": 1}},
            "gone": [1],
        }
    )
    assert (
        codec.decode(text)
        == codec.decode(text.encode())
        == {
            "id": 3,
            "items": [{"price": Decimal("1.50")}],
            "notes": {"a": [1]},
            "place": {"city": None, "since": datetime(2025, 12, 31, 23, tzinfo=UTC)},
        }
    )


@pytest.mark.parametrize(
    "text", ["null", "3", "[]", "{}", '{"id":"x"}', '{"id":1,"items":{}}', "{", '  {"$types":{"/a":"?"}}']
)
def test_text_that_does_not_fit_is_an_error_of_the_store(text: str):
    with pytest.raises(DataError, match="raise state_version"):
        SchemaCodec(ORDER).decode(text)


# ------------------------------------------------------------- against Arrow, over random types


def kinds() -> st.SearchStrategy[pa.DataType]:
    keys = st.sampled_from(
        [pa.string(), pa.int32(), pa.date32(), pa.bool_(), pa.decimal128(5, 2), pa.binary()]
    )

    def nested(parts: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        names = st.lists(
            st.sampled_from(["a", "b", "value", "key", "$types", "ø.é"]), min_size=1, unique=True
        )
        structs = names.flatmap(
            lambda found: st.tuples(*[parts for _ in found]).map(
                lambda types: pa.struct(list(zip(found, types, strict=True)))
            )
        )
        return structs | parts.map(pa.list_) | st.builds(pa.map_, keys, parts)

    return st.recursive(st.sampled_from(LEAVES), nested, max_leaves=5)


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values that are their own cells."""
    if pa.types.is_struct(kind):
        made = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif pa.types.is_list(kind):
        made = st.lists(values_of(kind.value_type), max_size=3)
    elif pa.types.is_map(kind):
        keys = values_of(kind.key_type).filter(lambda key: key is not None)
        made = st.dictionaries(keys, values_of(kind.item_type), max_size=3)
    elif pa.types.is_decimal(kind):
        limit = 10**kind.precision - 1
        made = st.integers(-limit, limit).map(
            lambda digits: Decimal((digits < 0, [int(d) for d in str(abs(digits))], -kind.scale))
        )
    elif pa.types.is_integer(kind):
        made = st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    else:
        made = _PLAIN[kind]
    return st.none() | made


_PLAIN: Final[dict[pa.DataType, st.SearchStrategy[Any]]] = {
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.date32(): st.dates(),
    UTC_TIME: st.datetimes(timezones=st.sampled_from([UTC, ZoneInfo("America/Lima"), timezone(timedelta(hours=9))]),
                           min_value=datetime(2, 1, 1), max_value=datetime(9998, 1, 1)),  # noqa: DTZ001 - bounds have no zone
}  # fmt: skip


@st.composite
def tables(draw: Callable[..., Any]) -> tuple[SchemaCodec, list[dict[str, Any] | None]]:
    names = draw(st.lists(st.sampled_from(["n", "key", "state", "Day", "x_1"]), min_size=1, unique=True))
    kind = pa.struct([(name, draw(kinds())) for name in names])
    state = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    return SchemaCodec(kind), draw(st.lists(st.none() | state, max_size=4))


def with_pairs(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_map(kind):
        return [(key, with_pairs(item, kind.item_type)) for key, item in value.items()]
    if pa.types.is_list(kind):
        return [with_pairs(part, kind.value_type) for part in value]
    if pa.types.is_struct(kind):
        return {field.name: with_pairs(value[field.name], field.type) for field in kind}
    return value


def plain(value: Any) -> Any:
    """Return a value with each NaN as text, so that ``==`` compares it."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


@given(tables())
def test_states_pass_through_arrow_and_text_unchanged(table: tuple[SchemaCodec, list[dict[str, Any] | None]]):
    codec, states = table
    kind = codec.column.type
    cells = [None if state is None else codec.encode(state) for state in states]
    column = struct_of(cells, kind)

    assert column.equals(pa.array([with_pairs(state, kind) for state in states], kind)) or plain(
        column.to_pylist()
    ) == plain(pa.array([with_pairs(state, kind) for state in states], kind).to_pylist())
    assert column.type == kind
    column.validate(full=True)
    # Equal without help: a row is written again only if its cells differ, and NaN is no change.
    assert cells_of(column) == cells
    assert cells_of(pa.concat_arrays([column, column]).slice(len(cells))) == cells
    decoded = [None if one is None else codec.decode(one) for one in cells]
    assert plain(decoded) == plain(states)
    assert texts_of(column).to_pylist() == [
        None if state is None else JsonCodec().encode(state) for state in decoded
    ]
    texts = [None if state is None else codec.encode_text(state) for state in states]
    assert texts == texts_of(column).to_pylist()
    assert [None if text is None else codec.encode(codec.decode(text)) for text in texts] == cells


# Values of every kind, for every type: Arrow takes the same of them, or the codec refuses more.
ANY: Final = st.one_of(
    *[values_of(kind) for kind in LEAVES],
    st.integers(),
    st.decimals(),
    st.lists(st.integers(-200, 200), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@given(kind=st.sampled_from(LEAVES), value=ANY)
def test_accepted_value_is_the_one_that_arrow_stores(kind: pa.DataType, value: Any):
    try:
        found = cell(kind, value)
    except InvalidError:
        # All that Arrow takes without a change is taken, but for what is no value of the type.
        if type(value) in {bool, float, str, bytes, date, datetime} and type(value) is _OWN.get(kind):
            stored = pa.array([value], kind)[0].as_py()
            assert stored != value
        return
    assert plain([pa.array([found], kind)[0].as_py()]) == plain([found])
    assert plain([found]) == plain([value]) or kind == pa.float32()


_OWN: Final[dict[pa.DataType, type]] = {
    pa.bool_(): bool,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): bytes,
    pa.date32(): date,
    UTC_TIME: datetime,
}


# ------------------------------------------------------------- columns that other engines have rewritten


def test_times_that_another_engine_wrote_without_a_zone_are_read_in_utc():
    """Spark writes INT96 by default, which Parquet's readers give without a zone."""
    kind = pa.struct(
        [
            ("at", UTC_TIME),
            ("all", pa.list_(UTC_TIME)),
            ("by", pa.map_(pa.string(), pa.struct([("at", UTC_TIME)]))),
        ]
    )
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    codec = SchemaCodec(kind)
    cells = codec.encode({"at": moment, "all": [moment, None], "by": {"a": {"at": moment}}})
    column = struct_of([cells, None], codec.column.type)
    table = pa.table({codec.column.name: column})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, use_deprecated_int96_timestamps=True)
    read = pq.read_table(pa.BufferReader(sink.getvalue()), coerce_int96_timestamp_unit="us")
    assert read.schema.field(0).type != codec.column.type

    again = conform(read, ["state"], keeps_cells=True).column(codec.column.name).combine_chunks()
    assert cells_of(again) == [cells, None]
    assert cells_of(as_written(read.column(0).combine_chunks())) == [cells, None]
    assert conform(read, ["state"]).column("state").to_pylist() == texts_of(column).to_pylist()


def test_column_of_another_schema_than_its_name_says_is_damage():
    codec = codec_of(pa.int8())
    column = struct_of([(1,)], codec.column.type)
    other = state_field(state_kind(pa.schema([("y", pa.int8())])))
    with pytest.raises(DataError, match="another schema in a column"):
        conform(pa.table({other.name: column}), ["state"])
    with pytest.raises(DataError, match="no rows of fields"):
        conform(pa.table({other.name: [1]}), ["state"])


def test_text_of_a_state_is_plain_json_for_other_readers():
    codec = SchemaCodec(pa.schema([("day", pa.date32()), ("n", pa.int64())]))
    (text,) = texts_of(
        struct_of([codec.encode({"n": 1, "day": date(2026, 1, 2)})], codec.column.type)
    ).to_pylist()
    assert orjson.loads(text) == {"day": "2026-01-02", "n": 1, "$types": {"/day": "date"}}


@pytest.mark.parametrize("count", [*range(10), 300])
def test_dict_of_any_number_of_cells(count: int) -> None:
    names = [f"field {number}" for number in range(count)]

    assert dict_maker(names)(tuple(range(count))) == {name: number for number, name in enumerate(names)}


def test_last_of_two_equal_names_counts() -> None:
    assert dict_maker(["a", "b", "a"])((1, 2, 3)) == {"a": 3, "b": 2}
