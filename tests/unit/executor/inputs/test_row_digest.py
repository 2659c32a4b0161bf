"""The digest of consumed rows: equal for equal rows, in every form and cut; other for others."""

from __future__ import annotations

import decimal
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.inputs.row_digest import added, rows_digest, unordered_digest

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
VALUES: list[Any] = [
    None, True, 0, -1, 7, 2**62, 2**63, 2**70, 0.5, 1e300, float("inf"), "", "a", "12345678", "123456789", "é" * 400,
    b"\xff", NOON, NOON.replace(tzinfo=None), date(2026, 3, 1), time(12), timedelta(seconds=1), decimal.Decimal("1.5"),
    [], [1], [1, 2], [2, 1], [None], {"x": 1}, {"x": {"y": "z"}}, complex(1, 2), "\ud800",
]  # fmt: skip
ROWS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from("abc"), st.sampled_from(VALUES), max_size=3), st.just("no mapping")
    ),
    max_size=90,
)


@given(ROWS, st.data())
def test_parts_add_up_however_rows_are_cut(rows: list[Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(rows)))

    parts = rows_digest(rows[:cut], 0), rows_digest(rows[cut:], cut)
    assert added(*parts) == rows_digest(rows, 0)


@pytest.mark.parametrize("value", VALUES[1:])
def test_every_value_counts(value: Any) -> None:
    """Each differs from the others, from a null, and from itself in another field or row."""
    digest = rows_digest([{"a": value}], 0)
    equal = [other for other in VALUES if rows_digest([{"a": other}], 0) == digest]

    # The two forms of one instant, because a frame may say its zone or not.
    assert equal == [value] or {*map(str, equal)} == {str(NOON), str(NOON)[:-6]}
    assert digest != rows_digest([{"b": value}], 0)
    assert digest != rows_digest([{"a": value}], 1)


@pytest.mark.parametrize(
    "other",
    [
        pa.table({"k": ["a", None], "n": pa.array([1, 2], pa.int16()), "at": pa.array([NOON] * 2, pa.timestamp("ns", "UTC"))}),
        pa.table({"n": [1.0, 2.0], "k": pa.array(["a", None], pa.large_string()), "at": pa.array([NOON] * 2)}),
        pa.table({"n": [1, 2], "k": pa.array(["a", None]).dictionary_encode(), "at": [NOON] * 2, "new": pa.nulls(2)}),
        [{"at": NOON, "k": "a", "n": 1}, {"n": 2.0, "at": NOON}],
    ],
    ids=["narrow", "floats", "dictionary", "mappings"],
)  # fmt: skip
def test_form_of_rows_does_not_count(other: Any) -> None:
    """A frame makes floats of whole numbers once one is missing, and a column may be added."""
    rows = [{"k": "a", "n": 1, "at": NOON}, {"k": None, "n": 2, "at": NOON}]

    assert rows_digest(other, 5) == rows_digest(rows, 5)
    assert rows_digest(rows[::-1], 5) != rows_digest(rows, 5)


def test_sliced_and_chunked_columns_are_read_from_their_places() -> None:
    rows = [
        {"k": f"k{n % 7}", "list": [n] * (n % 3), "deep": {"n": [{"m": str(n)}]}, "b": n % 2 == 0}
        for n in range(99)
    ]
    table = pa.Table.from_pylist(rows)
    chunked = pa.concat_tables([table.slice(0, 13), table.slice(13, 50), table.slice(63)])

    assert rows_digest(table.slice(20, 40), 20) == rows_digest(rows[20:60], 20)
    assert rows_digest(chunked, 0) == rows_digest(rows, 0)
    assert rows_digest(table.slice(0, 0), 3) == 0


def test_digest_without_order_counts_each_row() -> None:
    rows = [{"k": f"k{n % 7}", "n": n % 5} for n in range(50)]
    digest = unordered_digest(rows)

    assert unordered_digest(pa.Table.from_pylist(rows[::-1])) == digest
    assert added(unordered_digest(rows[20:]), unordered_digest(rows[:20])) == digest
    assert len({digest, unordered_digest(rows[1:]), unordered_digest([*rows, {"k": None}])}) == 3


def test_maps_are_lists_of_their_pairs() -> None:
    kind = pa.map_(pa.string(), pa.int64())
    maps = pa.array([[("a", 1), ("b", 2)], None, [], [("a", 1)], [("b", 1)]], kind)
    table = pa.table({"n": [1, 2, 3, 4, 5], "m": maps})

    assert added(rows_digest(table[:3], 0), rows_digest(table[3:], 3)) == rows_digest(table, 0)
    digests = [rows_digest(pa.table({"m": maps.slice(row, 1)}), 0) for row in range(5)]
    assert len({*digests}) == 5


def test_value_of_very_many_levels_has_a_digest() -> None:
    deep: object = 1
    for _ in range(3_000):
        deep = [deep]
    kind = pa.int64()
    for _ in range(1_200):
        kind = pa.list_(kind)

    assert rows_digest([{"a": deep}], 0) != 0
    assert rows_digest(pa.table({"a": pa.nulls(2, kind)}), 0) is not None


class Unshown:
    """An object that shows nothing of itself."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError


def test_object_counts_without_its_address_and_whatever_it_raises() -> None:
    """Another run makes the objects anew, at other addresses."""
    kept = [object() for _ in range(3)]

    assert len({rows_digest([{"a": one}], 0) for one in kept}) == 1
    assert rows_digest([{"a": Unshown()}], 0) != rows_digest([{"a": kept[0]}], 0)
