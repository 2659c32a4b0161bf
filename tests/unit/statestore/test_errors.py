"""The error tree: one root, stable kinds, short messages, safe journeys between processes."""

from __future__ import annotations

import pickle

import pytest

from millpond.statestore import errors
from millpond.statestore.errors import ErrorKind, FencedError, InvalidError, MillpondError

CLASSES = [value for name, value in vars(errors).items() if name.endswith("Error") and name != "PickleError"]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_one_root_and_a_stable_kind(kind: type[MillpondError]) -> None:
    """A handler of `MillpondError` catches every error, and each error has its kind."""
    assert issubclass(kind, MillpondError)
    assert isinstance(kind.kind, ErrorKind)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_travels_between_processes_whole(kind: type[MillpondError]) -> None:
    """Pickling keeps class, text, details and notes."""
    error = kind("something is wrong", path="a/b", version=3)
    error.add_note("more")

    received = pickle.loads(pickle.dumps(error))

    assert type(received) is kind
    assert str(received) == "something is wrong path=`a/b` version=`3`"
    assert received.details == {"path": "a/b", "version": 3}
    assert received.__notes__ == ["more"]


def test_an_error_without_details_is_just_its_message() -> None:
    """No empty pairs are printed."""
    assert str(InvalidError("fix the call")) == "fix the call"


def test_the_tree_in_the_docstring_names_every_class() -> None:
    """The drawing at the top of the module is complete."""
    drawing = errors.__doc__ or ""

    assert all(kind.__name__ in drawing for kind in CLASSES)
    assert issubclass(FencedError, Exception)
