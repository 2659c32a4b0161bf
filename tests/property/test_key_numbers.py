"""Keys by their numbers, against a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.key_numbers import KeyNumbers
from millpond.statestore.rows.record_ids import Fingerprints, fingerprints

KEYS = st.lists(st.text("ab\0é", max_size=6), unique=True, max_size=40)
Steps = Sequence[tuple[list[str], bool, int | None]]


def with_bits(bits: int) -> Callable[[pa.Array], Fingerprints]:
    return lambda keys: fingerprints(keys) & np.uint64(2**bits - 1)


@pytest.mark.parametrize("bits", [64, 3, 0])
@given(st.lists(st.tuples(KEYS, st.booleans(), st.none() | st.integers(1, 4)), max_size=12))
def test_a_key_has_one_number_until_others_are_forgotten(bits: int, steps: Steps) -> None:
    """Also keys that share a fingerprint, from texts and from a part of a column."""
    known, names = dict[str, int](), list[str]()
    with patch("millpond.executor.computation.key_numbers.fingerprints", with_bits(bits)):
        numbers = KeyNumbers()
        for keys, is_column, kept in steps:
            for key in keys:
                if key not in known:
                    known[key] = len(names)
                    names.append(key)
            given_keys = pa.array(["x", *keys], pa.string()).slice(1) if is_column else keys
            assert numbers.of(given_keys).tolist() == [known[key] for key in keys]
            if kept is not None:
                left = np.arange(0, len(names), kept)
                numbers.keep(left)
                names = [names[number] for number in left]
                known = {key: number for number, key in enumerate(names)}
            assert numbers.names(np.arange(len(numbers))).to_pylist() == names
            has_row = np.arange(len(names)) % 2 == 0
            asked = ["a", "b", "", "ab", *keys]
            assert numbers.among(asked, has_row) == [key for key in asked if known.get(key, 1) % 2 == 0]


def test_a_key_takes_sixty_bytes() -> None:
    numbers = KeyNumbers()
    for start in range(0, 100_000, 1_000):
        numbers.of([f"user {number}" for number in range(start, start + 1_000)])

    assert numbers.size_bytes < 60 * 100_000
    assert numbers.has_many_besides(70_000)
    assert not numbers.has_many_besides(90_000)
