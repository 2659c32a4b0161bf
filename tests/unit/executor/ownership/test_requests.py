"""Cuts by hand: a request waits until a commit answers it, and means the keys as they are by then."""

from __future__ import annotations

from millpond.executor.ownership.cuts import Cut, CutRequest, waiting_requests
from millpond.statestore.app_ids import AppId
from millpond.statestore.interval import Interval, intervals_from_boundaries

INTERVALS = intervals_from_boundaries("c d", ["g", "p"])


def test_a_request_waits_until_it_is_answered() -> None:
    """Asking again while it waits is the same request; after the answer it is a new one."""
    first = CutRequest.next({}, "c d", "split", "a/b")
    txns = {first.app_id: first.number}

    assert waiting_requests(txns) == (first,)
    assert CutRequest.next(txns, "c d", "split", "a/b") == first
    txns |= first.answer
    assert waiting_requests(txns) == ()
    second = CutRequest.next(txns, "c d", "split", "a/b")
    assert second.number > txns[second.app_id]
    assert waiting_requests({second.app_id: second.number}) == (second,)


def test_other_positions_are_no_requests() -> None:
    """Whatever their numbers are."""
    assert waiting_requests({"millpond/superstep/p": 4, Interval("c").app_id: 2}) == ()


def test_it_is_a_cut_of_the_intervals_of_then() -> None:
    """A split parts the interval that has the key; a merge joins those that meet there."""
    split = CutRequest(computation="c d", kind="split", key="h", number=2)
    merge = CutRequest(computation="c d", kind="merge", key="g", number=2)

    assert split.cut(INTERVALS) == Cut.split(INTERVALS[1], ["h"])
    assert merge.cut(INTERVALS) == Cut.merge(INTERVALS[:2])


def test_what_is_cut_like_that_already_is_no_cut() -> None:
    """The load may have called for the same meanwhile."""
    for kind, key in (("split", "g"), ("split", ""), ("merge", "h"), ("merge", "")):
        request = CutRequest(computation="c d", kind=kind, key=key, number=2)  # type: ignore[arg-type]
        assert request.cut(INTERVALS) is None


def test_names_are_quoted() -> None:
    """A key may hold any character."""
    assert AppId.CUT.of("c d", "split", "a/b") == "millpond/cut/c%20d/split/a%2Fb"
