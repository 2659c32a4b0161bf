"""Sketches of delays and their percentiles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from millpond.executor.time.observations import DelaySketch, RecentDelays, check_percentile
from millpond.statestore.errors import InvalidError


def sketch(*delays: int) -> DelaySketch:
    made = DelaySketch()
    made.add(np.array(delays, np.int64))
    return made


def test_empty_sketch_has_no_delay():
    assert DelaySketch().at(99) == 0
    assert RecentDelays().at(100) == 0


def test_hundredth_percentile_is_the_longest_delay():
    assert sketch(3, 500, 20).at(100) == 500


@pytest.mark.parametrize("percentile", [50, 90, 99, 99.9])
def test_share_above_a_percentile_is_accurate(percentile):
    """Even for a heavily skewed distribution the share is within a tenth."""
    delays = np.random.default_rng(4).lognormal(10, 2.5, 100_000).astype(np.int64)
    parts = [sketch(*part.tolist()) for part in np.array_split(delays, 7)]
    whole = DelaySketch()
    for part in parts:
        whole.merge(part)

    share = 100 * float(np.mean(delays > whole.at(percentile)))

    assert share == pytest.approx(100 - percentile, rel=0.1)


def test_sketch_survives_pickling():
    there = pickle.loads(pickle.dumps(sketch(1, 2, 3)))
    there.merge(sketch(10))

    assert (len(there), there.at(100)) == (4, 10)


def test_equal_delays_give_equal_bytes():
    """The simulator needs sketches without randomness."""
    delays = np.random.default_rng(5).integers(0, 10**9, 50_000).tolist()

    assert pickle.dumps(sketch(*delays)) == pickle.dumps(sketch(*delays))


def test_delays_are_forgotten_after_100000_newer_ones():
    recent = RecentDelays()
    recent.merge(sketch(*[1_000] * 100_000))
    recent.merge(sketch(*[10] * 50_000))
    assert recent.at(100) == 1_000

    recent.merge(sketch(*[10] * 50_000))

    assert recent.at(100) == 10


@pytest.mark.parametrize("percentile", [0, -1, 100.1, True, "99"])
def test_invalid_percentile_is_refused(percentile):
    with pytest.raises(InvalidError):
        check_percentile(percentile)
