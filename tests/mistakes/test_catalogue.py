"""The correspondence between the table of mistakes and its tests."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mistakes.catalogue import Mistake, documented, names_of_tests

ROW = Mistake("a-row", "…", "InvalidError", ("no such column", "did you mean"), "…")


def test_each_row_has_one_test() -> None:
    rows = [row.name for row in documented()]

    assert Counter(rows) == Counter(names_of_tests())
    assert set(Counter(rows).values()) == {1}


def test_catalogue_has_at_least_fifty_mistakes() -> None:
    rows = documented()

    assert len(rows) >= 50
    assert all(row.made and row.mended for row in rows)


def test_message_has_at_least_four_constant_words() -> None:
    """Each row quotes at least four words common to all cases."""
    assert [row.name for row in documented() if len(" ".join(row.words).split()) < 4] == []


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("DataError", "no such column; did you mean 'a'? column=`b`", ["b"]),
        ("InvalidError", "did you mean 'a'? no such column column=`b`", ["b"]),
        ("InvalidError", "no such column; did you mean 'a'? column=`b`", ["z"]),
        ("InvalidError", "no such column; did you mean 'a'? column=`b`", []),
    ],
)
def test_deviations_from_the_row_are_found(kind: str, text: str, names: list[str]) -> None:
    """Another class, other words, another order, a missing name, and no names each fail the test."""
    ROW.check("InvalidError", "no such column; did you mean 'a'? column=`b`", ["b"])

    with pytest.raises(AssertionError):
        ROW.check(kind, text, names)
