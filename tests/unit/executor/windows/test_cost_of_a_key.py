"""The cost of a key's windows, which must grow linearly."""

from __future__ import annotations

from cProfile import Profile
from typing import TYPE_CHECKING

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows, Sessions, SlidingWindows, UnalignedFixedWindows
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from millpond.executor.windows.window import WindowFn

_MINUTE_US = 60_000_000
_WINDOWS = 400


def calls(window_fn: WindowFn, rows: int) -> int:
    """Count the function calls of a bounded run over rows of one key, each in its own window."""
    clock, profile = ManualClock(), Profile()
    pipeline = Pipeline("one_key")
    stream = pipeline.inject("s", key="k", at="t")
    stream.window(window_fn, timestamp_combiner="OUTPUT_AT_EARLIEST").combine(Count(), name="counts")
    runner = LocalRunner(
        Store.in_memory(clock=clock, rng=SeededRng(1)), clock=clock, progress=False, upkeep=None
    )

    inputs = {"s": [{"k": "only", "t": number * 2 * _MINUTE_US} for number in range(rows)]}
    summary = profile.runcall(runner.run, pipeline, inputs)
    assert summary.totals.productions >= rows
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    "window_fn",
    [
        FixedWindows("1m"),
        UnalignedFixedWindows("1m"),
        SlidingWindows("2m", "1m"),
        Sessions("1m"),
    ],
)
def test_twice_the_windows_cost_twice_as_much(window_fn: WindowFn) -> None:
    """A quadratic cost would make the ratio 4."""
    # The first run of a process also imports and fills caches.
    _, start, once, twice = (calls(window_fn, rows) for rows in (1, 1, _WINDOWS, 2 * _WINDOWS))

    assert (twice - start) / (once - start) < 2.2
