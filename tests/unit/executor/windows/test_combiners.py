"""Combine functions over elements, merged parts and retractions."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.windows.combiners import (
    CombineFn,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Quantiles,
    Sum,
    ToList,
    TopN,
)
from millpond.executor.windows.sketches import ApproximateQuantiles
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import decode_value, encode_value

_NUMBERS = st.lists(st.integers(-100, 100), max_size=20)
_ALL = [
    Count(),
    Sum(),
    Mean(),
    Min(retractable=True),
    Max(retractable=True),
    TopN(3, retractable=True),
    CountDistinct(),
    Quantiles(at=(0, 0.5, 1)),
]


def _over(combine: CombineFn, values: list[Any]) -> Any:
    accumulator = combine.create()
    for value in values:
        accumulator = combine.add(accumulator, value)
        accumulator = json.loads(json.dumps(accumulator))
    return accumulator


@pytest.mark.parametrize("combine", _ALL, ids=repr)
@given(first=_NUMBERS, second=_NUMBERS)
def test_merged_parts_equal_one_accumulator(combine: CombineFn, first: list[int], second: list[int]) -> None:
    merged = combine.merge([_over(combine, first), _over(combine, second)])

    assert combine.extract(merged) == combine.extract(_over(combine, first + second))


@pytest.mark.parametrize("combine", _ALL, ids=repr)
@given(stays=_NUMBERS, goes=st.integers(-100, 100))
def test_adding_and_retracting_an_element_changes_nothing(
    combine: CombineFn, stays: list[int], goes: int
) -> None:
    accumulator = combine.uncombine(_over(combine, [goes, *stays]), goes)

    assert combine.extract(accumulator) == combine.extract(_over(combine, stays))


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        (Count(), 4),
        (Sum(), 10),
        (Mean(), 2.5),
        (Min(), 1),
        (Max(), 4),
        (TopN(2), [4, 3]),
        (TopN(2, smallest=True), [1, 2]),
        (ToList(), [3, 1, 4, 2]),
        (CountDistinct(), 4),
        (Quantiles(at=(0.25, 0.5, 1)), [1, 2, 4]),
    ],
    ids=repr,
)
def test_combiners_compute_the_value_in_their_name(combine: CombineFn, expected: Any) -> None:
    assert combine.extract(_over(combine, [3, 1, 4, 2])) == expected


@pytest.mark.parametrize("combine", [Max(), Min(), TopN(2), TopN(9, retractable=True)], ids=repr)
@pytest.mark.parametrize("missing", [[math.nan], [None], [Decimal("NaN")], [math.nan, None]])
def test_null_and_nan_have_no_place_in_an_order(combine: CombineFn, missing: list[Any]) -> None:
    numbers: list[Any] = [1.0, 4.0, 3.0]
    expected = combine.extract(_over(combine, numbers))

    for place in range(4):
        assert combine.extract(_over(combine, [*numbers[:place], *missing, *numbers[place:]])) == expected
    parts = [_over(combine, missing), _over(combine, numbers[:1]), _over(combine, numbers[1:])]
    assert combine.extract(combine.merge(parts)) == expected
    if combine.can_uncombine:
        assert combine.extract(combine.uncombine(_over(combine, numbers), missing[0])) == expected


def test_distinct_values_of_other_types_than_json_has_are_counted_apart() -> None:
    elements: list[Any] = [
        math.nan,
        math.nan,
        None,
        math.inf,
        Decimal("1.1"),
        "1.1",
        date(2026, 1, 31),
        "2026-01-31",
    ]

    assert CountDistinct().extract(_over(CountDistinct(), elements)) == 7


_NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
_VALUES: list[tuple[str, Any]] = [
    ("one", 1),
    ("one", 1.0),
    ("one", Decimal("1.00")),
    ("one", np.int64(1)),
    ("true", True),
    ("text", "1"),
    ("zero", 0.0),
    ("zero", -0.0),
    ("zero", Decimal("-0.0")),
    ("half", 0.5),
    ("half", Decimal("0.50")),
    ("half", np.float32(0.5)),
    ("a tenth, as a float", 0.1),
    ("a tenth", Decimal("0.1")),
    ("a tenth", Decimal("0.10")),
    ("0.15, as a float", 0.15),
    ("0.15", Decimal("0.150")),
    ("2**70", 2**70),
    ("2**70", float(2**70)),
    ("2**70", Decimal(2**70)),
    ("1e22", 1e22),
    ("1e22", Decimal("1E+22")),
    ("large", Decimal("1E+99999")),
    ("small", Decimal("5E-99999")),
    ("NaN", math.nan),
    ("NaN", Decimal("NaN")),
    ("endless", math.inf),
    ("endless", Decimal("Infinity")),
    ("null", None),
    ("list", [1, {"a": 2.0, "b": math.nan}]),
    ("list", (1.0, {"b": Decimal("NaN"), "a": 2})),
    ("other list", [True, {"a": 2.0, "b": math.nan}]),
    ("map", {1: "x", (2, 3): "y"}),
    ("map", {(2.0, 3): "y", 1.0: "x"}),
    ("instant", _NEW_YEAR),
    ("instant", _NEW_YEAR.astimezone(timezone(timedelta(hours=-5)))),
    ("time without a zone", _NEW_YEAR.replace(tzinfo=None)),
    ("day", date(2026, 1, 1)),
    ("first", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
]
"""Values, and what they are: those that are one have one name."""


@given(elements=st.lists(st.sampled_from(_VALUES)), goes=st.lists(st.sampled_from(_VALUES)), data=st.data())
def test_equal_values_are_one_in_any_cut(
    elements: list[tuple[str, Any]], goes: list[tuple[str, Any]], data: st.DataObject
) -> None:
    combine, values = CountDistinct(), [value for _, value in elements + goes]
    cut = data.draw(st.integers(0, len(values)))
    accumulator = combine.merge([_over(combine, values[:cut]), _over(combine, values[cut:])])
    for _, value in data.draw(st.permutations(goes)):
        accumulator = combine.uncombine(accumulator, value)

    assert combine.extract(accumulator) == len({name for name, _ in elements})


@pytest.mark.parametrize(
    ("stored", "distinct"),
    [
        ({"1": 2, "1.0": 1, "true": 1, '"1"': 1}, 3),
        ({"0.0": 1, "-0.0": 1, "1e22": 1, '  {"$value":"10000000000000000000000","$types":{"":"int"}}': 1}, 2),
        ({"0.5": 1, '  {"$value":"0.50","$types":{"":"decimal"}}': 1}, 1),
        ({f'  {{"$value":"{digits}","$types":{{"":"decimal"}}}}': 1 for digits in ("1.0", "1.00", "1.1")}, 2),
        ({'  {"$value":"1E+2","$types":{"":"decimal"}}': 1, "100": 1}, 1),
        ({f'  {{"$value":"{text}","$types":{{"":"{kind}"}}}}': 1 for text, kind in (("nan", "float"), ("NaN", "decimal"))}, 1),
        ({'{"a":1,"b":[2.0]}': 1, '{"a":1.0,"b":[2]}': 1, '{"a":true,"b":[2]}': 1}, 2),
        ({'  {"$value":"2026-01-01T01:00:00+01:00","$types":{"":"datetime"}}': 1, '  {"$value":"2026-01-01T00:00:00+00:00","$types":{"":"datetime"}}': 1, '  {"$value":"2026-01-01T00:00:00","$types":{"":"datetime"}}': 1}, 2),
        ({"1": 1, "1.0": -1}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_distinct_values_of_earlier_versions_are_joined(stored: dict[str, int], distinct: int) -> None:
    combine = CountDistinct()
    added = combine.add_all(dict(stored), [7, 7.0])

    assert combine.extract(stored) == combine.extract(combine.merge([stored, {}])) == distinct
    assert combine.extract(added) == distinct + 1
    assert combine.extract(combine.uncombine(combine.uncombine(added, 7), 7)) == distinct


def test_values_of_earlier_versions_can_be_retracted() -> None:
    combine, accumulator = CountDistinct(), {"5": 1, "5.0": 1, "-0.0": 1}
    for value, distinct in ((5, 2), (0.0, 1), (Decimal(5), 0)):
        accumulator = combine.uncombine(accumulator, value)
        assert combine.extract(accumulator) == distinct


@pytest.mark.parametrize(
    ("elements", "goes", "rest"),
    [
        ([math.nan, 1.0], math.nan, [1.0]),
        ([1.0, Decimal("NaN")], Decimal("NaN"), [1.0]),
        ([math.nan, Decimal("NaN")], Decimal("NaN"), [math.nan]),
        ([True, 1], 1, [True]),
        ([1, True], True, [1]),
        ([1.0, 1], 1, [1.0]),
        ([0.0, -0.0], -0.0, [0.0]),
        ([Decimal("1.00"), Decimal("1.0")], Decimal("1.0"), [Decimal("1.00")]),
        ([1.0, 2], 1, [2]),
        ([[1, 2], 3], (1, 2), [3]),
        ([(1, 2), 3], [1, 2], [3]),
        ([{"a": True}, {"a": 1}], {"a": 1}, [{"a": True}]),
        ([{"a": math.nan, "b": 1}, 3], {"b": 1, "a": math.nan}, [3]),
        (["a", "b", "a"], "a", ["b", "a"]),
        ([5], np.int64(5), []),
        ([None, 1], None, [1]),
    ],
    ids=repr,
)
def test_retraction_finds_the_element_that_it_means(elements: list[Any], goes: Any, rest: list[Any]) -> None:
    """Decoded elements are other objects than the retraction, which matters for a NaN."""
    for combine in (ToList(), Quantiles()):
        stored = decode_value(encode_value(elements))
        assert repr(combine.uncombine(stored, goes)) == repr(rest)


@pytest.mark.parametrize(
    ("elements", "goes"),
    [([1, 0], True), ([True], 1), ([1.5], math.nan), ([{"a": True}], {"a": 1}), (["1"], 1), ([[1]], [2])],
)
def test_retraction_of_another_value_is_refused(elements: list[Any], goes: Any) -> None:
    assert ToList().uncombine_if_held(elements, goes) == (elements, False)
    with pytest.raises(InvalidError, match="matches no element"):
        ToList().uncombine(elements, goes)


@pytest.mark.parametrize("combine", [Quantiles(at=(0, 1)), ApproximateQuantiles(at=(0, 1))], ids=repr)
@pytest.mark.parametrize("missing", [[math.nan], [None], [Decimal("NaN")], [math.nan, None, Decimal("NaN")]])
@pytest.mark.parametrize("numbers", [[3.0, 1.0], [3, 1], [Decimal(3), Decimal(1)]])
def test_quantiles_leave_out_null_and_nan(combine: CombineFn, missing: list[Any], numbers: list[Any]) -> None:
    for elements in ([*missing, *numbers], [*numbers, *missing], [numbers[0], *missing, numbers[1]]):
        assert combine.extract(combine.add_all(combine.create(), elements)) == [1, 3]
    assert combine.extract(combine.add_all(combine.create(), missing)) is None


def test_lists_with_a_null_or_nan_have_no_place_in_an_order() -> None:
    """They are what ``top`` ranks: a value and its key."""
    best, worst = TopN(2, retractable=True), [math.nan, "a"]
    accumulator = best.add_all([], [[1.0, "b"], worst, [3.0, "c"], [None, "d"], [2.0, "e"]])

    assert best.extract(accumulator) == [[3.0, "c"], [2.0, "e"]]
    assert best.uncombine(accumulator, worst) == accumulator


def test_combiner_of_a_field_reads_that_field_only() -> None:
    assert Sum("score").add(0, {"score": 7, "team": "red"}) == 7
    assert Max(lambda value: value["score"]).extract([7]) == 7


def test_sum_accepts_booleans_and_numpy_numbers() -> None:
    numbers = [True, False, np.int64(3), np.float64(0.5), 2]

    assert Sum().extract(_over(Sum(), numbers)) == 6.5
    assert Sum().extract(Sum().uncombine(_over(Sum(), numbers), np.float64(0.5))) == 6
    assert Sum().extract(Sum().add_all(0, [True, 2, 3.5])) == 6.5


@pytest.mark.parametrize("combine", [Sum(), Mean()])
def test_sum_and_mean_leave_out_null(combine: CombineFn) -> None:
    accumulator = _over(combine, [1, None, 3])

    assert combine.extract(accumulator) == combine.extract(_over(combine, [1, 3]))
    assert combine.uncombine(accumulator, None) == accumulator


def test_statistics_of_no_elements_are_null() -> None:
    assert [combiner.extract(combiner.create()) for combiner in (Mean(), Min(), Max(), Quantiles())] == [
        None
    ] * 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: Sum("score").add(0, {"team": "red"}),
        lambda: Sum(of=5),  # type: ignore[arg-type]
        lambda: TopN(0),
        lambda: Quantiles(at=(2,)),
        lambda: Max().uncombine([3], 3),
        lambda: ToList().uncombine([3], 4),
        lambda: Sum().add_all(0, [1, "2"]),
        lambda: Mean().add([0, 0], "0.1"),
    ],
)
def test_invalid_arguments_and_values_are_refused(attempt) -> None:
    with pytest.raises(InvalidError):
        attempt()
