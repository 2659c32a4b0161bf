"""Figures over corrected figures: a retracting step, and a step of any mode behind it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.panes import ShownPanes

_SCORES = st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.sampled_from([1e17, -1e17, 2.5, 1e-300]))
_ROWS = st.lists(st.tuples(st.sampled_from("xyz"), _SCORES), min_size=1, max_size=8)
_EACH = mp.Repeatedly(mp.AfterCount(1))


def _shown(
    mode: mp.windows.Accumulation, bundles: list[list[tuple[str, Any]]]
) -> tuple[list[dict[str, Any]], int]:
    """Return the panes of a step over the players' last scores, and the number of dead letters."""
    pipeline, shelf, clock = mp.Pipeline("p"), ShownPanes(), ManualClock()
    scores = pipeline.inject("scores", key="player", at="at", at_unit="us", watermark=mp.ManualWatermark())
    last = scores.window(mp.GlobalWindows(), trigger=_EACH, accumulation="retracting").process_windows(
        lambda rows, window, pane: [rows[-1]["score"]], name="last"
    )
    figures = last.window(mp.FixedWindows("1h"), trigger=_EACH, accumulation=mode, allowed_lateness="1000d")
    figures.combine(
        total=mp.Sum(),
        mean=mp.Mean(),
        players=mp.Count(),
        all=mp.ToList(),
        best=mp.TopN(2, retractable=True),
        name="figures",
        key=lambda _: "all",
    ).sink("out", shelf)
    store = mp.Store.in_memory(clock=clock, rng=SeededRng(1))
    runner = mp.LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False, dead_letter_limit=None)
    run = runner.start(pipeline, stepping=True)
    for bundle in bundles:
        run.inject("scores", [{"player": player, "score": score, "at": 1} for player, score in bundle])
        run.run_until_quiet()
    letters = run.summary().totals.dead_letters
    run.stop()
    return shelf.envelopes, letters


@given(mode=st.sampled_from(mp.windows.Accumulation), bundles=st.lists(_ROWS, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_corrected_figures_equal_figures_right_at_once(
    mode: mp.windows.Accumulation, bundles: list[list[tuple[str, Any]]]
) -> None:
    """Accumulating panes end with the last scores; discarding panes add up to them."""
    envelopes, letters = _shown(mode, bundles)
    shown = [one["value"] for one in envelopes if not one["pane"]["is_retraction"]]
    last = {player: score for bundle in bundles for player, score in bundle}.values()
    exact = sum(map(Fraction, last))

    assert letters == 0
    if mode in ("accumulating", "retracting", "accumulate_by_default"):
        assert shown[-1]["total"] == float(exact)
        assert shown[-1]["mean"] == float(exact / len(last))
        assert sorted(shown[-1]["all"]) == sorted(last)
        assert shown[-1]["best"] == sorted(last, reverse=True)[:2]
        assert shown[-1]["players"] == len(last)
    else:
        assert sum(value["players"] for value in shown) == len(last)
