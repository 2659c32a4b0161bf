"""
Watermarks follow what any consumer can read (I8).
"""

from __future__ import annotations

import millpond as mp
from millpond.testing.fixtures.computations import Count


def test_a_row_that_one_consumer_can_read_moves_the_watermark() -> None:
    """
    A key that is unreadable for the first consumer only does not take the row's time away.
    """
    pipeline = mp.Pipeline("observe")
    stream = pipeline.inject("in", key="k", at="at", watermark=mp.BoundedDisorder("0s"))
    stream.apply(Count(), name="first")
    stream.apply(Count(), name="second", key="other")
    run = mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True)

    run.inject("in", [{"k": "a", "other": "b", "at": 1, "n": 1}, {"k": None, "other": "b", "at": 9, "n": 2}])
    run.run_until_quiet()

    assert run.watermark("second") == 9
    assert run.summary().totals.injected == 1
    run.stop()
