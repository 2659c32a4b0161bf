"""Requests for cuts."""

from __future__ import annotations

from millpond.executor.ownership.cuts import Cut, CutRequest, waiting_requests
from millpond.statestore.app_ids import AppId
from millpond.statestore.interval import Interval, intervals_from_boundaries

INTERVALS = intervals_from_boundaries("c d", ["g", "p"])


def test_request_waits_until_answered() -> None:
    """A repeated request is the same until answered."""
    first = CutRequest.next({}, "c d", "split", "a/b")
    txns = {first.app_id: first.number}

    assert waiting_requests(txns) == (first,)
    assert CutRequest.next(txns, "c d", "split", "a/b") == first
    txns |= first.answer
    assert waiting_requests(txns) == ()
    second = CutRequest.next(txns, "c d", "split", "a/b")
    assert second.number > txns[second.app_id]
    assert waiting_requests({second.app_id: second.number}) == (second,)


def test_other_positions_are_not_requests() -> None:
    assert waiting_requests({"millpond/superstep/p": 4, Interval("c").app_id: 2}) == ()


def test_request_cuts_the_current_intervals() -> None:
    """A split divides the interval with the key; a merge joins the intervals that meet there."""
    split = CutRequest(computation="c d", kind="split", key="h", number=2)
    merge = CutRequest(computation="c d", kind="merge", key="g", number=2)

    assert split.cut(INTERVALS) == Cut.split(INTERVALS[1], ["h"])
    assert merge.cut(INTERVALS) == Cut.merge(INTERVALS[:2])


def test_fulfilled_request_makes_no_cut() -> None:
    """The balancer may have made the same cut."""
    for kind, key in (("split", "g"), ("split", ""), ("merge", "h"), ("merge", "")):
        request = CutRequest(computation="c d", kind=kind, key=key, number=2)  # type: ignore[arg-type]
        assert request.cut(INTERVALS) is None


def test_app_id_quotes_names_and_keys() -> None:
    """A key may contain any character."""
    assert AppId.CUT.of("c d", "split", "a/b") == "millpond/cut/c%20d/split/a%2Fb"
