"""Mergeable estimates in bounded memory."""

from __future__ import annotations

from decimal import Decimal

import pytest

from millpond.executor.windows.sketches import ApproximateCountDistinct, ApproximateQuantiles
from millpond.statestore.errors import InvalidError


def test_distinct_count_is_within_five_percent() -> None:
    combine = ApproximateCountDistinct("id")
    parts = [combine.create(), combine.create()]
    for number in range(2_000):
        for part in range(2):
            parts[part] = combine.add(parts[part], {"id": number})

    assert combine.extract(combine.merge(parts)) == pytest.approx(2_000, rel=0.05)


def test_quantiles_are_within_two_percent() -> None:
    combine = ApproximateQuantiles(at=(0.1, 0.5, 0.9))
    parts = [combine.create(), combine.create()]
    for number in range(1_000):
        parts[number % 2] = combine.add(parts[number % 2], number)

    assert combine.extract(combine.merge(parts)) == pytest.approx([100, 500, 900], abs=20)
    assert combine.extract(combine.create()) is None


def test_sketches_do_not_support_retractions() -> None:
    for combine in (ApproximateCountDistinct(), ApproximateQuantiles()):
        assert not combine.can_uncombine
        with pytest.raises(InvalidError):
            combine.uncombine(combine.create(), 1)


@pytest.mark.parametrize(
    "make", [lambda: ApproximateCountDistinct(precision=3), lambda: ApproximateQuantiles(at=(1.5,))]
)
def test_arguments_out_of_bounds_are_refused(make) -> None:
    with pytest.raises(InvalidError):
        make()


def test_equal_numbers_are_one() -> None:
    combine = ApproximateCountDistinct()
    accumulator = combine.add_all(combine.create(), [1, 1.0, Decimal("1.00"), True, 0.0, -0.0])

    assert combine.extract(accumulator) == 3
