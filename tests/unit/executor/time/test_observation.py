"""Observations of the times of outside records."""

from __future__ import annotations

import numpy as np

import millpond as mp
from millpond.executor.inputs.extraction import observe_times
from millpond.executor.time.observations import DEFAULT_MEMBER, TimesSeen, Watch
from tests.fixtures.computations import Count


def test_observation_without_records_has_no_times():
    seen = observe_times(Watch(stream="s"), np.array([], np.int64))

    assert (seen.records, seen.times, seen.members) == (0, None, {})


def test_observation_keeps_newest_and_oldest_times():
    seen = observe_times(Watch(stream="s"), np.array([5, 9, 2]))

    assert (seen.records, seen.times) == (3, TimesSeen(newest_at=9, oldest_at=2))


def test_delays_are_measured_against_the_newest_committed_time():
    """A newer record has no delay."""
    watch = Watch(stream="s", newest={DEFAULT_MEMBER: 10}, with_delays=True)

    delays = observe_times(watch, np.array([4, 12])).times.delays

    assert (len(delays), delays.at(1), delays.at(100)) == (2, 0, 6)


def test_delays_are_not_measured_before_the_first_commit():
    assert observe_times(Watch(stream="s", with_delays=True), np.array([4])).times.delays is None


def test_delay_of_a_repeated_record_is_measured_once():
    watch = Watch(stream="s", newest={DEFAULT_MEMBER: 10, "a": 10, "b": 10}, with_delays=True)
    counted = np.array([True, False, True, False])

    seen = observe_times(watch, np.array([4, 4, 9, 12]), ["a", "a", "b", "a"], records=2, counted=counted)

    delays = [one.delays for one in (seen.times, seen.members["a"], seen.members["b"])]
    assert [(len(each), each.at(100)) for each in delays] == [(2, 6), (1, 6), (1, 1)]
    assert (seen.records, seen.in_1970, seen.times.newest_at) == (2, 2, 12)


def test_members_have_their_own_times_and_delays():
    """Records of unknown members are not observed."""
    watch = Watch(stream="s", newest={"a": 10, "b": 100}, with_delays=True)

    seen = observe_times(watch, np.array([8, 90, 95, 1]), ["a", "b", "b", None])

    assert {name: (one.oldest_at, one.newest_at) for name, one in seen.members.items()} == {
        "a": (8, 8),
        "b": (90, 95),
    }
    assert seen.members["a"].delays.at(100) == 2
    assert seen.members["b"].delays.at(100) == 10


def test_row_readable_by_any_consumer_moves_the_watermark() -> None:
    """This is promise I8; here only the second consumer finds a key."""
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
