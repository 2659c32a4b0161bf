from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.rows.record_ids import _SPREAD, Fingerprints, RecordIdFilter, fingerprints, mix


def distinct(start: int, count: int) -> Fingerprints:
    return mix(np.arange(start, start + count, dtype=np.uint64))


def expected_error(bits_per_id: float) -> float:
    mean = 512 / bits_per_id
    total = 0.0
    for ids in range(int(mean + 12 * math.sqrt(mean)) + 20):
        used = np.arange(ids + 1)
        chances = np.array([math.comb(ids, int(k)) for k in used], dtype=np.float64) * 0.5**ids
        word = (1 - (1 - 1 / 64) ** (3.0 * used)) ** 3
        weight = math.exp(ids * math.log(mean) - mean - math.lgamma(ids + 1))
        total += weight * float((chances * word).sum()) ** 4
    return total


class TestMembership:
    @given(st.lists(st.binary(max_size=20)), st.lists(st.binary(max_size=20)))
    def test_added_id_is_never_fresh(self, added: list[bytes], others: list[bytes]) -> None:
        seen = RecordIdFilter(capacity=4)
        for ids in (added, others):
            seen.add(pa.array(ids, pa.binary()))

        assert seen.might_contain(pa.array(added + others, pa.binary())).all()

    def test_growth_forgets_no_id(self) -> None:
        seen = RecordIdFilter(capacity=100)
        for start in range(0, 60_000, 1_500):
            seen.add(distinct(start, 1_500))

        assert seen.count == 60_000
        assert seen.might_contain(distinct(0, 60_000)).all()

    def test_empty_filter_holds_no_memory(self) -> None:
        seen = RecordIdFilter()

        assert not seen.might_contain(distinct(0, 1_000)).any()
        assert seen.size_bytes == 0

    def test_ids_and_fingerprints_are_interchangeable(self) -> None:
        seen = RecordIdFilter()
        ids = pa.array([b"a", b"b"])
        seen.add(ids)

        assert seen.might_contain(fingerprints(ids)).tolist() == [True, True]


class TestErrorRate:
    @pytest.mark.parametrize("error_rate", [1e-2, 1e-3])
    def test_false_positives_stay_within_rate(self, error_rate: float) -> None:
        seen = RecordIdFilter(capacity=5_000, error_rate=error_rate)
        for start in range(0, 105_000, 5_000):
            seen.add(distinct(start, 5_000))
        hits = int(seen.might_contain(distinct(10**9, 200_000)).sum())

        assert seen.count == seen.capacity
        assert hits <= 200_000 * error_rate

    def test_default_rate_hits_no_fresh_id_of_100000(self) -> None:
        seen = RecordIdFilter(capacity=100_000)
        seen.add(distinct(0, 100_000))

        assert seen.might_contain(distinct(10**9, 200_000)).sum() <= 3

    @pytest.mark.parametrize("exponent", _SPREAD)
    def test_expected_rate_includes_uneven_blocks(self, exponent: int) -> None:
        """Blocks hold different numbers of ids."""
        scattered = exponent * math.log(10) / math.log(2) ** 2

        assert expected_error(scattered * _SPREAD[exponent]) <= 10.0**-exponent


class TestBounds:
    def test_grown_filter_needs_10_bytes_per_id(self) -> None:
        seen = RecordIdFilter(capacity=1_000)
        seen.add(distinct(0, 1_000))
        seen.add(distinct(1_000, 100_000))

        assert seen.size_bytes <= 10 * seen.capacity

    def test_memory_is_bounded(self) -> None:
        """Past the bound only the rate of false positives rises."""
        seen = RecordIdFilter(capacity=1_000, capacity_max=2_000)
        seen.add(distinct(0, 1_500))
        seen.add(distinct(1_500, 1_500))
        size_bytes = seen.size_bytes
        seen.add(distinct(3_000, 50_000))

        assert (seen.capacity, seen.size_bytes) == (2_000, size_bytes)
        assert seen.might_contain(distinct(0, 53_000)).all()

    def test_capacity_is_cut_to_bound(self) -> None:
        seen = RecordIdFilter(capacity=10_000, capacity_max=1_000)
        seen.add(distinct(0, 5_000))

        assert (seen.capacity, seen.count) == (1_000, 5_000)
        assert seen.might_contain(distinct(0, 5_000)).all()

    @pytest.mark.parametrize(
        ("capacity", "error_rate"), [(0, 1e-6), (1, 0.0), (1, 1e-7), (1, 0.1), (-1, 1e-6)]
    )
    def test_impossible_size_and_rate_are_refused(self, capacity: int, error_rate: float) -> None:
        with pytest.raises(InvalidError):
            RecordIdFilter(capacity, error_rate)

    def test_array_without_fingerprints_is_internal_error(self) -> None:
        with pytest.raises(InternalError):
            RecordIdFilter().add(np.array([1, 2], dtype=np.int64))
