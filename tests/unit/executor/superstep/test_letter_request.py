"""Requests for dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.executor.superstep.letter_retries import (
    LetterRequest,
    LetterSelection,
    StoredLetter,
    waiting_letter_requests,
)
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError

ALL = LetterSelection()


def letter(name: str = "a/b/0000000003/000001", **fields: Any) -> StoredLetter:
    """Make a letter of the pipeline ``a/b``."""
    told = {
        "computation": "c",
        "stream": "in",
        "key": "k",
        "error": "ValueError: bad",
        "failed_at": "2026-02-08T10:00:00+00:00",
    }
    return StoredLetter(name, {**told, **fields})


def test_request_for_letters_waits_until_answered() -> None:
    """A repeated request is the same while it waits and covers the same supersteps."""
    txns = {AppId.SUPERSTEP.of("a/b"): 5}
    first = LetterRequest.next(txns, "a/b", "retry", ALL)
    txns |= {first.app_id: first.number}
    assert waiting_letter_requests(txns) == (first,)
    assert LetterRequest.next(txns, "a/b", "retry", ALL) == first

    txns |= first.answer
    assert waiting_letter_requests(txns) == ()
    again = LetterRequest.next(txns, "a/b", "retry", ALL)
    assert (again.number > txns[again.app_id], again.until) == (True, 5)

    txns |= {AppId.SUPERSTEP.of("a/b"): 6, again.app_id: again.number}
    later = LetterRequest.next(txns, "a/b", "retry", ALL)
    assert (later.number > again.number, later.until) == (True, 6)


def test_requests_differ_by_action_selection_and_pipeline() -> None:
    """Drops come first, then the oldest."""
    of_key = LetterSelection(key="k/%\N{SNOWMAN}")
    later, other = {AppId.SUPERSTEP.of("p"): 7}, {AppId.SUPERSTEP.of("q"): 9}
    requests = [
        LetterRequest.next(later, "p", "drop", ALL),
        LetterRequest.next({}, "p", "retry", of_key),
        LetterRequest.next(later, "p", "retry", ALL),
        LetterRequest.next(other, "q", "retry", ALL),
    ]
    txns = {request.app_id: request.number for request in reversed(requests)}

    assert waiting_letter_requests(txns | {"millpond/superstep/p": 4}) == tuple(requests)
    assert waiting_letter_requests(txns, "q") == tuple(requests[3:])


def test_request_covers_letters_of_its_pipeline_up_to_its_superstep() -> None:
    """A letter that fails again has a later superstep, so it is not retried indefinitely."""
    request = LetterRequest.next({AppId.SUPERSTEP.of("a/b"): 3}, "a/b", "retry", ALL)

    assert request.has(letter())
    assert not request.has(letter("a/b/0000000004/000000"))
    assert not request.has(letter("a/0000000003/000001"))


@pytest.mark.parametrize(
    ("selection", "is_meant"),
    [
        (ALL, True),
        (LetterSelection(computation="c", stream="in", key="k", error="bad"), True),
        (LetterSelection(computation="c", key="other"), False),
        (LetterSelection(stream=""), False),
        (LetterSelection(error="good"), False),
        (LetterSelection(letter="a/b/0000000003/000001"), True),
        (LetterSelection(letter="a/b/0000000003/000002"), False),
        (LetterSelection(before_us=1_770_544_800_000_000), False),
        (LetterSelection(before_us=1_770_544_800_000_001), True),
    ],
)
def test_selection_matches_letters_that_meet_all_its_conditions(
    selection: LetterSelection, *, is_meant: bool
) -> None:
    """Its text form must match the same letters."""
    assert selection.has(letter()) is is_meant
    assert LetterSelection.of(selection.text) == selection


def test_letters_without_a_time_of_failure_are_old() -> None:
    """The first versions did not store the time."""
    assert LetterSelection(before_us=0).has(letter(failed_at=None))


def test_selection_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(InvalidError, match="wrong type"):
        LetterSelection(key=7)  # type: ignore[arg-type]
