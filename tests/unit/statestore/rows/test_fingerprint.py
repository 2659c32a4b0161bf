from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.record_ids import fingerprints, mix

IDS = st.lists(st.binary(max_size=40) | st.binary(min_size=250, max_size=300))


@given(IDS)
def test_equal_ids_have_equal_fingerprints(ids: list[bytes]) -> None:
    together = fingerprints(pa.array(ids, pa.binary()))
    alone = [int(fingerprints(pa.array([one], pa.binary()))[0]) for one in ids]

    assert alone == together.tolist()
    assert len(set(ids)) == len(set(together.tolist()))


@given(IDS, st.integers(0, 3))
def test_arrow_layout_does_not_matter(ids: list[bytes], cut: int) -> None:
    column = pa.array(ids, pa.binary())
    expected = fingerprints(column).tolist()

    assert expected[cut:] == fingerprints(column.slice(cut)).tolist()
    assert expected == fingerprints(pa.chunked_array([column.slice(0, cut), column.slice(cut)])).tolist()
    for type_ in (pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())):
        assert expected == fingerprints(column.cast(type_)).tolist()


def test_fixed_size_binary_hashes_like_binary() -> None:
    ids = [bytes([number] * 16) for number in range(9)]
    column = pa.array(ids, pa.binary(16)).slice(2)

    assert fingerprints(pa.array(ids[2:])).tolist() == fingerprints(column).tolist()


def test_text_hashes_as_utf8() -> None:
    assert fingerprints(pa.array(["ä", ""])).tolist() == fingerprints(pa.array(["ä".encode(), b""])).tolist()


def test_fingerprints_are_stable() -> None:
    """They are the same in every process and release."""
    ids = pa.array([b"", b"a", b"flight-1234567", b"x" * 300])

    assert [hex(value) for value in fingerprints(ids)] == [
        "0x9ca066f1a4ab2eea",
        "0xddeea62006f72708",
        "0x7695cbcf0992e98f",
        "0x936f6647b531d22d",
    ]


def test_trailing_zero_bytes_count() -> None:
    ids = pa.array([b"\0" * length for length in range(40)])

    assert len(set(fingerprints(ids).tolist())) == 40


def test_mix_is_bijective() -> None:
    mixed = mix(np.arange(100_000, dtype=np.uint64))
    halves = mixed >> np.uint64(32)

    assert len(np.unique(mixed)) == 100_000
    assert len(np.unique(halves)) > 99_990


@pytest.mark.parametrize(
    "ids",
    [pa.array([b"a", None]), pa.array([1, 2]), pa.array([1.5]), pa.array([[b"a"]]), pa.nulls(1)],
    ids=["null", "integers", "floats", "lists", "nothing"],
)
def test_null_and_other_types_are_refused(ids: pa.Array) -> None:
    with pytest.raises(InvalidError):
        fingerprints(ids)


def test_empty_column_has_no_fingerprints() -> None:
    assert fingerprints(pa.array([], pa.binary())).tolist() == []
    assert fingerprints(pa.chunked_array([], pa.binary())).tolist() == []
