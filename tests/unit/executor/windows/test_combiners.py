"""Combine functions over elements, merged parts and retractions."""

from __future__ import annotations

import json
import math
from datetime import date
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
from millpond.statestore.errors import InvalidError

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


def test_combiner_of_a_field_reads_that_field_only() -> None:
    assert Sum("score").add(0, {"score": 7, "team": "red"}) == 7
    assert Max(lambda value: value["score"]).extract([7]) == 7


def test_sum_accepts_booleans_and_numpy_numbers() -> None:
    numbers = [True, False, np.int64(3), np.float64(0.5), 2]

    assert Sum().extract(_over(Sum(), numbers)) == 6.5
    assert Sum().extract(Sum().uncombine(_over(Sum(), numbers), np.float64(0.5))) == 6
    assert Sum().extract(Sum().add_all(0, [True, 2, 3.5])) == 6.5


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
        lambda: Sum().add(0, None),
        lambda: Sum().add_all(0, [1, "2"]),
        lambda: Mean().add([0, 0], "0.1"),
    ],
)
def test_invalid_arguments_and_values_are_refused(attempt) -> None:
    with pytest.raises(InvalidError):
        attempt()
