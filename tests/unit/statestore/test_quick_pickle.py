"""Values that pickle quickly."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest

from millpond.statestore.errors import InternalError
from millpond.statestore.types import quickly_pickled


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    street: str
    number: int | None = None
    names: tuple[str, ...] = ()


@quickly_pickled
@dataclass(frozen=True, slots=True)
class Pair:
    left: object
    right: object


def test_value_round_trips() -> None:
    pair = Pair(Place(street="a"), [Place(street="b", number=0, names=("c",)), None])

    assert pickle.loads(pickle.dumps(pair)) == pair


def test_unpickled_value_is_frozen() -> None:
    place: Place = pickle.loads(pickle.dumps(Place(street="a")))

    with pytest.raises(FrozenInstanceError):
        place.street = "b"  # type: ignore[misc]  # the fact


def test_fields_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Pair.__new__(Pair).__setstate__((1,))  # type: ignore[attr-defined]  # the decorator adds it


def test_class_with_one_field_is_refused() -> None:
    """Its state would look like a tuple of fields."""

    @dataclass(frozen=True, slots=True)
    class One:
        field: int

    with pytest.raises(InternalError):
        quickly_pickled(One)
