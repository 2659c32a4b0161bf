"""Values of dead letters."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.interval.letters import VALUE_MAX, describe_value, letter_value
from millpond.statestore.errors import InvalidError

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    # ISO text cannot distinguish two equal local times; a record's own time has a zone.
    st.datetimes().map(lambda moment: moment.replace(fold=0)),
    st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(fold=0)),
    st.dates(),
    st.times().map(lambda moment: moment.replace(fold=0)),
    st.timedeltas(),
    st.decimals(allow_nan=False),
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.sampled_from(["a/b", "~", "~1", "", "0"])), inner, max_size=4
        ),
        st.dictionaries(st.one_of(st.integers(), st.dates()), inner, max_size=3),
    ),
    max_leaves=12,
)


def kept(value: Any) -> dict[str, Any]:
    described = describe_value(lambda: value)
    letter: dict[str, Any] = orjson.loads(
        orjson.dumps({"value": described.text, "value_types": dict(described.types)})
    )
    return letter


@given(VALUES)
def test_value_of_a_letter_is_restored_with_its_types(value: Any) -> None:
    again = letter_value(kept(value))

    assert again == value
    assert repr(again) == repr(value)


def test_stored_value_is_plain_json() -> None:
    """SQL and other languages can read ISO text, but not Python's repr."""
    value = {
        "at": datetime(2013, 2, 8, 10, tzinfo=timezone(timedelta(hours=1))),
        "on": date(2013, 2, 8),
        "by": time(9, 30),
        "paid": Decimal("1.10"),
        "raw": b"\xff",
        "took": timedelta(seconds=1),
        "rate": math.inf,
        "name": "Bodø",
    }
    letter = kept(value)

    assert orjson.loads(letter["value"]) == {
        "at": "2013-02-08T10:00:00+01:00",
        "on": "2013-02-08",
        "by": "09:30:00",
        "paid": "1.10",
        "raw": "/w==",
        "took": 1_000_000,
        "rate": "inf",
        "name": "Bodø",
    }
    assert letter["value_types"]["/at"] == "datetime"
    assert letter_value(letter) == value


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: "x" * (VALUE_MAX + 1), "cut"),
        (lambda: {"a": [object()]}, "repr"),
        (lambda: 1 / 0, "unreadable"),
    ],
)
def test_incomplete_value_is_refused(read: Any, reason: str) -> None:
    """Part of a value must never pass for the whole."""
    described = describe_value(read)

    assert len(described.text) <= VALUE_MAX
    with pytest.raises(InvalidError, match=rf"does not have the whole value.*`{reason}`"):
        letter_value({"value": described.text, "value_types": described.types})


def test_letter_of_an_older_version_is_read_if_it_is_json() -> None:
    """Older versions fell back to Python's repr."""
    assert letter_value({"value": '{"a":1}'}) == {"a": 1}
    with pytest.raises(InvalidError, match="not JSON"):
        letter_value({"value": "{'a': datetime.datetime(2013, 2, 8)}"})


class Color(enum.IntEnum):
    RED = 1


class Bus(enum.StrEnum):
    NIGHT = "N1"


class Spot(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "shown", "pointer"),
    [
        ({"v": Color.RED}, {"v": 1}, "/v"),
        ({"v": [Bus.NIGHT]}, {"v": ["N1"]}, "/v/0"),
        ({"v": Spot(1, 2)}, {"v": [1, 2]}, "/v"),
        (OrderedDict(v={"at": date(2026, 1, 1)}), {"v": {"at": "2026-01-01"}}, ""),
        ({Bus.NIGHT: 1}, [["N1", 1]], "/0/0"),
    ],
)
def test_object_of_a_class_is_readable_but_not_restored_as_another_value(
    value: Any, shown: Any, pointer: str
) -> None:
    """A retry would give the code a value that the record never had."""
    letter = kept(value)

    assert orjson.loads(letter["value"]) == shown
    with pytest.raises(InvalidError, match="whole value") as refused:
        letter_value(letter)
    assert refused.value.details["pointer"] == pointer


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ('{"a":1}', {"/b": "decimal"}),
        ('{"a":"x"}', {"/a": "decimal"}),
        ('{"a":1}', {"/a": "of a later version"}),
        ('[[{"x":1},1]]', {"": "mapping"}),
    ],
)
def test_letter_that_cannot_be_restored_says_so(text: str, types: dict[str, str]) -> None:
    """Other errors would stop the retry of all letters."""
    with pytest.raises(InvalidError, match="cannot be restored"):
        letter_value({"value": text, "value_types": types})


class Awkward:
    """Raises wherever it is looked at."""

    def __index__(self) -> int:
        raise TypeError("no index")

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def nested(depth: int) -> Any:
    value: Any = {1: "x"}
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "restored"),
    [
        ({"tags": np.array([1, 2]), "at": 7}, {"tags": [1, 2], "at": 7}),
        ({"grid": np.array([[1.5], [float("inf")]])}, {"grid": [[1.5], [float("inf")]]}),
        ({"n": np.int32(7), "x": np.float32(0.5), "yes": np.bool_(True)}, {"n": 7, "x": 0.5, "yes": True}),
        (np.array(["a", None], dtype=object), ["a", None]),
    ],
)
def test_arrays_and_scalars_of_numpy_are_their_values(value: Any, restored: Any) -> None:
    assert letter_value(kept(value)) == restored


def test_array_of_one_number_stays_a_list() -> None:
    """It could be taken for the number."""
    assert letter_value(kept({"n": np.array([7])})) == {"n": [7]}


@pytest.mark.parametrize(
    "value",
    [
        Awkward(),
        {"a": Awkward()},
        {Awkward(): 1},
        nested(100_000),
        np.array([Awkward()], dtype=object),
        {"a": 10**5_000},
        {1: [[]] * 1_000_000},
    ],
    ids=["object", "field", "name", "depth", "array", "number", "parts"],
)
def test_letter_can_be_made_of_anything(value: Any) -> None:
    letter = kept(value)

    assert len(letter["value"]) < 2 * VALUE_MAX
    with pytest.raises(InvalidError, match="whole value"):
        letter_value(letter)
