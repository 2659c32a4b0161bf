"""Observations of outside times: of a stream, of its members, of how late records come."""

from __future__ import annotations

import numpy as np

import millpond as mp
from millpond.executor.inputs.extraction import observe_times
from millpond.executor.time.observations import DEFAULT_MEMBER, Watch
from tests.fixtures.computations import Count


def test_no_records_say_nothing():
    """Without readable records there is no newest time."""
    seen = observe_times(Watch(stream="s"), np.array([], np.int64))

    assert (seen.records, seen.newest_at, seen.oldest_at, seen.members) == (0, None, None, {})


def test_the_ends_of_time_are_kept():
    """Newest and oldest are those of the records."""
    seen = observe_times(Watch(stream="s"), np.array([5, 9, 2]))

    assert (seen.records, seen.newest_at, seen.oldest_at, seen.delays) == (3, 9, 2, None)


def test_delays_are_measured_against_what_was_committed():
    """A record in front of everything committed has no delay."""
    watch = Watch(stream="s", newest={DEFAULT_MEMBER: 10}, with_delays=True)

    seen = observe_times(watch, np.array([4, 12]))

    assert (len(seen.delays), seen.delays.at(1), seen.delays.at(100)) == (2, 0, 6)


def test_nothing_is_measured_before_anything_was_committed():
    """The first records have nothing to be late for."""
    assert observe_times(Watch(stream="s", with_delays=True), np.array([4])).delays is None


def test_members_are_told_apart():
    """Each member has its own times, measured against its own; unknown senders have none."""
    watch = Watch(stream="s", newest={"a": 10, "b": 100}, with_delays=True)

    seen = observe_times(watch, np.array([8, 90, 95, 1]), ["a", "b", "b", None])

    assert {name: (one.oldest_at, one.newest_at) for name, one in seen.members.items()} == {
        "a": (8, 8),
        "b": (90, 95),
    }
    assert seen.members["a"].delays.at(100) == 2
    assert seen.members["b"].delays.at(100) == 10


def test_a_row_that_any_consumer_can_read_moves_the_watermark() -> None:
    """A row whose key only one of two consumers can read still counts for the watermark (I8)."""
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
