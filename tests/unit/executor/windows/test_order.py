"""The order of a key's elements behind element-wise steps."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from tests.fixtures.panes import SeenPanes


def pairs(size: int, step: str) -> list[Any]:
    """Sum pairs of out-of-order elements behind a step, in bundles of ``size``."""
    pipeline, seen = mp.Pipeline("order"), SeenPanes()
    rows = pipeline.inject("in", key="k", at="at", at_unit="us", watermark=mp.ManualWatermark())
    if step == "map":
        rows = rows.map(dict, name="same")
    else:
        rows = rows.with_timestamps(lambda _, at: at + 1, name="same")
    windows = rows.window(mp.GlobalWindows(), trigger=mp.Repeatedly(mp.AfterCount(2)))
    windows.combine(mp.ToList("at"), name="pairs").apply(seen, name="seen")
    times = [5, 1, 4, 2, 3, 0]
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        for start in range(0, len(times), size):
            run.inject("in", [{"k": "k", "at": at} for at in times[start : start + size]])
            run.run_until_quiet()
    return seen.values


@pytest.mark.parametrize("step", ["map", "with_timestamps"])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_panes_behind_a_step_do_not_depend_on_bundles(size: int, step: str) -> None:
    """Steps keep the order of arrival."""
    assert pairs(size, step) == [[5, 1], [4, 2], [3, 0]]
