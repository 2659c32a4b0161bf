"""Delay sketches: percentiles of what was seen, on the way and over time."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from millpond.executor.time.observations import DelaySketch, RecentDelays, check_percentile
from millpond.statestore.errors import InvalidError


def sketch(*delays: int) -> DelaySketch:
    """A sketch of these delays."""
    made = DelaySketch()
    made.add(np.array(delays, np.int64))
    return made


def test_nothing_seen_is_no_delay():
    """An empty sketch answers 0 at every percentile."""
    assert DelaySketch().at(99) == 0
    assert RecentDelays().at(100) == 0


def test_the_hundredth_percentile_is_the_longest_delay():
    """Nothing that was seen exceeds it."""
    assert sketch(3, 500, 20).at(100) == 500


@pytest.mark.parametrize("percentile", [50, 90, 99, 99.9])
def test_the_share_above_is_what_was_asked_for(percentile):
    """On a heavily skewed distribution the rank is within a tenth of the tail."""
    delays = np.random.default_rng(4).lognormal(10, 2.5, 100_000).astype(np.int64)
    parts = [sketch(*part.tolist()) for part in np.array_split(delays, 7)]
    whole = DelaySketch()
    for part in parts:
        whole.merge(part)

    share = 100 * float(np.mean(delays > whole.at(percentile)))

    assert share == pytest.approx(100 - percentile, rel=0.1)


def test_it_travels():
    """Pickled and back, a sketch answers as before and can be merged."""
    there = pickle.loads(pickle.dumps(sketch(1, 2, 3)))
    there.merge(sketch(10))

    assert (len(there), there.at(100)) == (4, 10)


def test_the_same_delays_give_the_same_bytes():
    """There is no randomness in a sketch: a simulation repeats itself."""
    delays = np.random.default_rng(5).integers(0, 10**9, 50_000).tolist()

    assert pickle.dumps(sketch(*delays)) == pickle.dumps(sketch(*delays))


def test_what_is_long_past_is_forgotten():
    """Once 100,000 newer delays are known, the older ones no longer count."""
    recent = RecentDelays()
    recent.merge(sketch(*[1_000] * 100_000))
    recent.merge(sketch(*[10] * 50_000))
    assert recent.at(100) == 1_000

    recent.merge(sketch(*[10] * 50_000))

    assert recent.at(100) == 10


@pytest.mark.parametrize("percentile", [0, -1, 100.1, True, "99"])
def test_what_is_no_percentile_is_refused(percentile):
    """It lies above 0 and not above 100."""
    with pytest.raises(InvalidError):
        check_percentile(percentile)
