"""The combiner of the last N elements."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millpond as mp


@given(n=st.integers(1, 5), pieces=st.lists(st.lists(st.integers(), max_size=6)))
def test_value_is_of_the_last_elements_however_they_are_batched(n: int, pieces: list[list[int]]) -> None:
    total = mp.LastN(n, mp.Sum())
    accumulator = total.create()
    for piece in pieces:
        accumulator = total.add_all(accumulator, piece)
    merged = total.merge([total.add_all(total.create(), piece) for piece in pieces]) if pieces else []
    values = [value for piece in pieces for value in piece]

    assert accumulator == values[-n:]
    assert total.extract(merged) == sum(values[-n:])
    assert accumulator == values[-n:], "extracting changes nothing"


@pytest.mark.parametrize("arguments", [(0,), (True,), ("3",), (3, mp.Sum)])
def test_malformed_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(mp.InvalidError, match=r"must be a whole number|takes an instance"):
        mp.LastN(*arguments)


def test_retractions_are_refused() -> None:
    """The elements that the retracted one pushed out are gone."""
    last = mp.LastN(2)

    assert not last.can_uncombine
    with pytest.raises(mp.InvalidError, match="does not support retractions"):
        last.uncombine([1, 2], 2)
