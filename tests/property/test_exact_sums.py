"""Exactness of sums and means in any order, cut and merge, against `fractions.Fraction`."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.windows.combiners import Mean, Sum
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec

_NUMBERS = st.one_of(
    st.floats(-1e3, 1e3),
    st.floats(),
    st.integers(-1_000, 1_000),
    st.integers(-(2**70), 2**70),
    st.decimals(-1_000, 1_000, places=2),
    st.decimals(places=9, allow_nan=False, allow_infinity=False),
    st.sampled_from([Decimal("1.10"), Decimal("1E+3"), Decimal("-0.0"), Decimal("Infinity"), Decimal("NaN")]),
    st.sampled_from([-1e17, 2.5, 0.1, 1e308, -1e308, 1.7976931348623157e308, 5e-324, 2**53 + 1, 2**63]),
)
_MANY = st.lists(_NUMBERS, max_size=12)
_BOTH = pytest.mark.parametrize("combine", [Sum(), Mean()], ids=repr)


def _stored(accumulator: Any) -> Any:
    codec = JsonCodec()
    return codec.decode(codec.encode(accumulator))


def _over(combine: Sum | Mean, numbers: list[Any]) -> Any:
    return combine.add_all(combine.create(), numbers)


def _is_exact(number: Any) -> bool:
    return isinstance(number, int) or (isinstance(number, Decimal) and number.is_finite())


def _decimal(combine: Sum | Mean, numbers: list[Any], scale: int) -> Decimal:
    count, scale = (len(numbers), scale + 4) if isinstance(combine, Mean) else (1, scale)
    exact = sum(map(Fraction, numbers)) / count * 10**scale
    half_up = math.floor(abs(exact) + Fraction(1, 2))
    return Decimal(f"{'-' if exact < 0 else ''}{half_up}E-{scale}")


def _exact(combine: Sum | Mean, numbers: list[Any]) -> int | float | Decimal | None:
    """Return the sum or mean in fractions, rounded once; infinities and NaN follow IEEE 754."""
    count = len(numbers) if isinstance(combine, Mean) else 1
    if not count:
        return None
    floats = [float(number) for number in numbers if not _is_exact(number)]
    decimals = [number for number in numbers if isinstance(number, Decimal)]
    if not floats and decimals:
        return _decimal(combine, numbers, max(0, *(-int(number.as_tuple().exponent) for number in decimals)))
    if not floats and isinstance(combine, Sum):
        return sum(numbers)
    endless = {number for number in floats if math.isinf(number)}
    if len(endless) == 2 or any(map(math.isnan, floats)):
        return math.nan
    if endless:
        return endless.pop()
    exact = sum(map(Fraction, numbers)) / Fraction(count)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def _same(shown: Any, expected: Any) -> bool:
    both_nan = shown is not None and expected is not None and math.isnan(shown) and math.isnan(expected)
    if isinstance(shown, Decimal) and isinstance(expected, Decimal):
        return shown.as_tuple()[1:] == expected.as_tuple()[1:] and shown == expected
    return type(shown) is type(expected) and (shown == expected or both_nan)


@_BOTH
@given(numbers=_MANY)
def test_sum_is_rounded_once(combine: Sum | Mean, numbers: list[Any]) -> None:
    shown, expected = combine.extract(_stored(_over(combine, numbers))), _exact(combine, numbers)

    assert _same(shown, expected), (shown, expected)


@_BOTH
@given(stays=_MANY, goes=_MANY, data=st.data())
def test_retraction_leaves_no_trace(
    combine: Sum | Mean, stays: list[Any], goes: list[Any], data: st.DataObject
) -> None:
    """Accumulators are equal bit for bit."""
    accumulator = combine.create()
    moves = [(number, False) for number in stays + goes] + [(number, True) for number in goes]
    for number, is_retraction in data.draw(st.permutations(moves)):
        change = combine.uncombine if is_retraction else combine.add
        accumulator = _stored(change(accumulator, number))

    assert accumulator == _stored(_over(combine, stays))
    assert _same(combine.extract(accumulator), _exact(combine, stays))


def test_decimals_may_be_retracted_before_they_come() -> None:
    combine, accumulator = Sum(), Sum().create()
    for number, is_retraction in (
        ("0.00", True),
        ("75.00", False),
        ("1.25", True),
        ("0.00", False),
        ("1.25", False),
    ):
        change = combine.uncombine if is_retraction else combine.add
        accumulator = _stored(change(accumulator, Decimal(number)))

    assert accumulator == _stored(_over(combine, [Decimal("75.00")]))


@_BOTH
@given(numbers=_MANY, data=st.data())
def test_cuts_orders_and_merges_do_not_matter(
    combine: Sum | Mean, numbers: list[Any], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(numbers))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=4)))
    parts = [
        _stored(_over(combine, shuffled[start:end]))
        for start, end in zip([0, *cuts], [*cuts, len(numbers)], strict=True)
    ]

    assert _stored(combine.merge(parts)) == _stored(_over(combine, numbers))


@pytest.mark.parametrize(
    ("combine", "old", "goes", "shown"),
    [
        (Sum(), 6.5, 2.5, 4.0),
        (Sum(), 7, 3, 4),
        (Mean(), [6.5, 2], 2.5, 4.0),
        (Mean(), [7, 2], 3, 4.0),
    ],
    ids=str,
)
def test_accumulators_of_earlier_versions_continue(
    combine: Sum | Mean, old: Any, goes: Any, shown: Any
) -> None:
    """They are plain numbers."""
    added = combine.extract(combine.uncombine(combine.add(old, 10.25), 10.25))
    merged = combine.extract(combine.merge([old, combine.create()]))

    assert added == merged == combine.extract(old)
    assert combine.extract(combine.uncombine(old, goes)) == shown


_DURATIONS = st.lists(st.timedeltas(timedelta(-9), timedelta(9)), max_size=9)


@given(stays=_DURATIONS, goes=_DURATIONS, data=st.data())
def test_sums_of_durations_are_exact(
    stays: list[timedelta], goes: list[timedelta], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(stays + goes)))
    shuffled = data.draw(st.permutations(stays + goes))
    for combine in (Sum(), Mean()):
        parts = [_stored(_over(combine, part)) for part in (shuffled[:cut], shuffled[cut:])]
        accumulator = combine.merge(parts)
        for length in data.draw(st.permutations(goes)):
            accumulator = _stored(combine.uncombine(accumulator, length))
        assert accumulator == _stored(_over(combine, stays))
        total = sum(stays, timedelta())
        if stays:
            assert repr(combine.extract(accumulator)) == repr(
                total if combine == Sum() else total / len(stays)
            )


@pytest.mark.parametrize("number", [1, 0.5, math.nan, Decimal("1.5")])
def test_durations_and_numbers_do_not_add_up(number: Any) -> None:
    for numbers in ([timedelta(1), number], [number, timedelta(1)]):
        with pytest.raises(InvalidError, match="durations"):
            _over(Sum(), numbers)
        with pytest.raises(InvalidError, match="durations"):
            Sum().merge([_over(Sum(), [one]) for one in numbers])


def test_durations_of_numpy_and_pandas_add_up() -> None:
    lengths = [np.timedelta64(1, "s"), pd.Timedelta("2s"), timedelta(seconds=4)]

    assert Sum().extract(_over(Sum(), lengths)) == timedelta(seconds=7)
    with pytest.raises(InvalidError, match="microseconds"):
        _over(Sum(), [pd.Timedelta(1, "ns")])


def test_sum_of_durations_beyond_64_bits_is_kept() -> None:
    largest = timedelta.max
    accumulator = _stored(_over(Mean(), [largest] * 3))

    assert Mean().extract(accumulator) == largest
