from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import decode_key, encode_key, is_typed
from tests.fixtures.typed_keys import compare_keys, key_types, key_values, same_key

KINDS = st.lists(key_types(), min_size=1, max_size=3)


@given(st.data())
def test_key_text_round_trips(data: st.DataObject) -> None:
    values = tuple(data.draw(key_values(kind)) for kind in data.draw(KINDS))

    decoded = decode_key(encode_key(values))

    assert same_key(values, decoded)


@given(st.data())
def test_texts_sort_like_tuples(data: st.DataObject) -> None:
    kinds = data.draw(KINDS)
    left, right = (tuple(data.draw(key_values(kind)) for kind in kinds) for _ in range(2))

    texts = encode_key(left), encode_key(right)
    utf8 = [text.encode() for text in texts]

    assert compare_keys(left, right) == (texts[0] > texts[1]) - (texts[0] < texts[1])
    assert compare_keys(left, right) == (utf8[0] > utf8[1]) - (utf8[0] < utf8[1])


@given(st.data())
def test_texts_have_no_other_control_characters(data: st.DataObject) -> None:
    values = tuple(data.draw(key_values(kind)) for kind in data.draw(KINDS))

    text = encode_key(values)

    assert is_typed(text)
    assert {character for character in text if character < " "} <= {"\t", "\x1f"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (("no", 4711), "\t=no\td4711"),
        ((None, True, False), "\t!\t?1\t?0"),
        ((0, -1, -4711), "\ta0\tZ8\tW5288"),
        ((2**63 - 1, -(2**63)), "\ts9223372036854775807\tH0776627963145224191"),
        ((Decimal("12.50"), Decimal("-12.5"), Decimal("-0.00")), "\t#b12.5\t#Y87.4~\t#a0"),
        ((Decimal("-" + "9" * 38),), "\t#An" + "0" * 38 + "~"),
        ((1.5, -1.5, math.nan), "\t~BFF8000000000000\t~4007FFFFFFFFFFFF\t~FFF8000000000000"),
        ((dt.date(2026, 11, 23),), "\t@2026-11-23"),
        ((dt.datetime(2026, 11, 23, 17, 36, 50, 500_000, dt.UTC),), "\tz2026-11-23 17:36:50.5"),
        ((dt.datetime.fromisoformat("0001-01-01"),), "\tt0001-01-01 00:00:00"),
        ((b"\x00\xff", "a\tb"), "\tx00FF\t=a\x1fIb"),
        (({"a": 1, "b,": None}, "z"), "\t{a,b\x1fl\ta1\t!\t=z"),
    ],
)
def test_texts_are_stable(values: tuple[Any, ...], text: str) -> None:
    """Stores keep them indefinitely."""
    assert encode_key(values) == text
    assert same_key(values, decode_key(text))


def test_values_grouped_by_spark_share_text() -> None:
    """These are both zeros, all NaNs, instants in any zone, and decimals."""
    later = dt.timezone(dt.timedelta(hours=2))
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0),
        (math.nan, -math.nan),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, 2, tzinfo=later)),
        (Decimal("1.5"), Decimal("1.500")),
        (Decimal(100), Decimal("1E+2")),
    ]

    assert [encode_key([one]) == encode_key([other]) for one, other in pairs] == [True] * len(pairs)


def test_plain_key_is_tuple_of_its_text() -> None:
    assert [decode_key(text) for text in ("no", "", "a1", "é")] == [("no",), ("",), ("a1",), ("é",)]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((), "at least one value"),
        ("no", "a tuple"),
        (([1],), "no values of this type"),
        ((2**63,), "64 bits"),
        ((Decimal("NaN"),), "must be finite"),
        ((Decimal("1E+38"),), "38 digits"),
        ((Decimal("1E-39"),), "38 digits"),
        ((Decimal("1E+999999"),), "38 digits"),
        (("\ud800",), "no UTF-8 form"),
        (({},), "at least one field"),
        (({1: 2},), "must be text"),
        ((dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),), "years 1 to 9999"),
    ],
)
def test_value_that_no_key_can_hold_is_refused(values: Any, says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        encode_key(values)


@pytest.mark.parametrize(
    "text",
    [
        "\t",
        "\tno",
        "\t!x",
        "\t?2",
        "\t#",
        "\t#12",
        "\t~00",
        "\t~" + "g" * 16,
        "\t@today",
        "\tz1",
        "\tx0",
        "\t{a",
        "\tt0",
    ],
)
def test_malformed_typed_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="not the text of a typed key"):
        decode_key(text)
