"""Retractions behind a retracting step on the local runner."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.key_windows import KeyWindows, WindowStates
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.panes import ShownPanes


def _injected(pipeline: mp.Pipeline) -> mp.DataflowStream:
    return pipeline.inject("scores", key="player", at="at", watermark=mp.ManualWatermark())


def _maxima(scores: mp.DataflowStream, key: str = "player", field: str = "score") -> mp.DataflowStream:
    """Emit each player's greatest score so far, with retractions."""
    windowed = scores.window(
        mp.GlobalWindows(), trigger=mp.Repeatedly(mp.AfterCount(1)), accumulation="retracting"
    )
    return windowed.combine(
        mp.Max(field), name="maxima", key=key, result=lambda player, most, _: {"player": player, "most": most}
    )


def _score(player: str, score: float, at: int) -> dict[str, Any]:
    return {"player": player, "score": score, "at": at}


def _run(pipeline: mp.Pipeline, shown: mp.DataflowStream, *bundles: Any) -> tuple[ShownPanes, mp.RunSummary]:
    """Run the bundles one by one, then end the input."""
    shelf, clock = ShownPanes(), ManualClock()
    shown.sink("out", shelf)
    store = mp.Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = mp.LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, dead_letter_limit=None)
    run = runner.start(pipeline, stepping=True)
    for bundle in bundles:
        run.inject("scores", bundle)
        run.run_until_quiet()
    run.finish("scores")
    run.run_until_quiet()
    summary = run.summary()
    run.stop()
    return shelf, summary


_REVISED = [[_score("x", -1e17, 1)], [_score("y", 2.5, 2)], [_score("x", 0.0, 3)]]


@pytest.mark.parametrize(("combine", "shown"), [(mp.Sum("most"), 2.5), (mp.Mean("most"), 1.25)], ids=repr)
@pytest.mark.parametrize("accumulation", ["accumulating", "retracting"])
def test_retracted_float_leaves_no_rounding_error_in_a_total(
    combine: mp.CombineFn, shown: float, accumulation: str
) -> None:
    """Adding -1e17 to a float sum rounds 2.5 away; exact sums restore it."""
    pipeline = mp.Pipeline("p")
    windowed = _maxima(_injected(pipeline)).window(
        mp.FixedWindows("10us"),
        trigger=mp.Repeatedly(mp.AfterCount(1)),
        accumulation=accumulation,
        allowed_lateness="1ms",
    )
    total = _injected_total(windowed, combine)
    shelf, _ = _run(pipeline, total, *_REVISED)

    assert shelf.values[-1] == shown


def _injected_total(windowed: mp.WindowedStream, combine: mp.CombineFn) -> mp.DataflowStream:
    return windowed.combine(combine, name="totals", key=lambda _: "all")


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([float("inf"), 1.0], [float("inf")] * 2),
        ([float("nan"), 1.0], [float("nan")] * 2),
        ([1.7e308, 1.7e308], [1.7e308, float("inf")]),
        ([2**63, 2**63 - 1, 1, 1], [2**63, 2**64 - 1, 2**64, 2**64 + 1]),
    ],
    ids=str,
)
def test_total_that_json_lacks_is_shown_exactly(scores: list[Any], shown: list[Any]) -> None:
    pipeline = mp.Pipeline("p")
    windowed = _injected(pipeline).window(
        mp.FixedWindows("10us"), trigger=mp.Repeatedly(mp.AfterCount(1)), accumulation="retracting"
    )
    totals = windowed.combine(mp.Sum("score"), name="totals")
    bundles = [[_score("x", score, at)] for at, score in enumerate(scores)]
    shelf, summary = _run(pipeline, totals, *bundles)
    values = [one["value"] for one in shelf.envelopes if not one["pane"]["is_retraction"]]

    # Texts, because a NaN equals nothing.
    assert (repr(values), summary.totals.dead_letters) == (repr(shown), 0)


_LISTS = [
    (mp.ToList(), [["x"], ["y"]]),
    (mp.TopN(2, retractable=True), [["x"], ["y"]]),
    (mp.Max(retractable=True), ["x", "y"]),
    (mp.Quantiles(at=(1,)), [["x"], ["y"]]),
]


@pytest.mark.parametrize(("combine", "shown"), _LISTS, ids=str)
def test_retraction_of_shown_and_cleared_elements_is_ignored_by_lists(
    combine: mp.CombineFn, shown: list[Any]
) -> None:
    """In discarding mode a list shows only the elements since its last pane."""
    pipeline = mp.Pipeline("p")
    windowed = _maxima(_injected(pipeline)).window(
        mp.FixedWindows("10us"), trigger=mp.Repeatedly(mp.AfterCount(1)), allowed_lateness="1ms", of="most"
    )
    lists = windowed.combine(combine, name="lists", key=lambda _: "all")
    shelf, summary = _run(pipeline, lists, [_score("k", "x", 1)], [_score("k", "y", 2)])

    assert shelf.values == shown
    assert summary.totals.dead_letters == 0
    assert summary.totals.by_computation["lists"]["after_clear"] == 1


def test_discarding_join_accepts_retractions_of_cleared_elements() -> None:
    pipeline = mp.Pipeline("p")
    scores = _injected(pipeline)
    strategy = mp.windows.WindowingStrategy(
        window_fn=mp.FixedWindows("10us"), trigger=mp.Repeatedly(mp.AfterCount(1)), allowed_lateness="1ms"
    )
    both = mp.co_group({"most": _maxima(scores), "raw": scores}, strategy, name="both", of={"most": "most"})
    shelf, summary = _run(pipeline, both, [_score("k", 1, 1)], [_score("k", 2, 2)])

    assert [value["most"] for value in shelf.values if value["most"]] == [[1], [2]]
    assert summary.totals.dead_letters == 0


def test_retraction_without_its_element_is_a_dead_letter() -> None:
    """Where no pane clears the contents, an unmatched retraction is a mistake of the code."""
    windows, strategy = mp.FixedWindows("10us"), {"accumulation": "accumulating", "of": "most"}
    pipeline = mp.Pipeline("p")
    lists = _maxima(_injected(pipeline)).window(windows, **strategy).combine(_Forgetful(), name="lists")
    _, summary = _run(pipeline, lists, [_score("k", "x", 1)], [_score("k", "y", 2)])

    assert summary.totals.dead_letters == 1


@pytest.mark.parametrize(("combine", "stored"), [(mp.Sum(), 6.5), (mp.Mean(), [6.5, 2])], ids=str)
def test_windows_stored_by_an_earlier_version_continue(combine: mp.CombineFn, stored: Any) -> None:
    """Earlier versions stored a plain number as the accumulator."""
    strategy = mp.windows.WindowingStrategy(
        window_fn=mp.FixedWindows("10us"), trigger=mp.AfterCount(2), accumulation="accumulating"
    )
    row = {"window": [0, 10], "accumulator": stored, "news": 1, "trigger": {"": {"count": 0}}}
    windows = KeyWindows(
        strategy, combine, None, WindowStates({"windows": [row]}), Clocks(watermark=0, wall_time=0)
    )
    windows.add([mp.windows.Element(1e17, 1, "k"), mp.windows.Element(1e17, 1, "k", is_retraction=True)])

    assert [shown.value for shown in windows.output] == [combine.extract(stored)]


class _Forgetful(mp.ToList):
    """A list that loses its elements."""

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        return accumulator
