"""The error tree."""

from __future__ import annotations

import pickle

import pytest

from millpond.statestore import errors
from millpond.statestore.errors import ErrorKind, FencedError, InvalidError, MillpondError

CLASSES = [value for name, value in vars(errors).items() if name.endswith("Error") and name != "PickleError"]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_one_root_and_stable_kind(kind: type[MillpondError]) -> None:
    assert issubclass(kind, MillpondError)
    assert isinstance(kind.kind, ErrorKind)


@pytest.mark.parametrize("kind", CLASSES)
def test_pickled_error_keeps_class_message_details_and_notes(kind: type[MillpondError]) -> None:
    error = kind("something is wrong", path="a/b", version=3)
    error.add_note("more")

    received = pickle.loads(pickle.dumps(error))

    assert type(received) is kind
    assert str(received) == "something is wrong path=`a/b` version=`3`"
    assert received.details == {"path": "a/b", "version": 3}
    assert received.__notes__ == ["more"]


def test_error_without_details_is_only_its_message() -> None:
    assert str(InvalidError("fix the call")) == "fix the call"


def test_docstring_tree_names_every_class() -> None:
    drawing = errors.__doc__ or ""

    assert all(kind.__name__ in drawing for kind in CLASSES)
    assert issubclass(FencedError, Exception)
