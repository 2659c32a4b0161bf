"""The benchmark of eviction policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cache import COLUMNS, POLICIES, Future, draw, measure
from benchmarks.cache_loads import LOADS
from millpond.executor.interval.eviction import Candidates, Waits


def test_each_policy_is_measured_and_drawn(tmp_path: Path) -> None:
    """With everything in memory nothing is missed, and no policy beats the optimum."""
    runs = measure(["sessions"], [0.3, 1.0], steps_max=12)
    misses = {(run["policy"], run["memory_share"]): run["misses"] for run in runs}

    assert list(misses) == [
        ("none", 0.0),
        *((policy, share) for policy in POLICIES[1:] for share in (0.3, 1.0)),
    ]
    assert all(misses[policy, 1.0] == 0 for policy in POLICIES[1:])
    assert 0 < misses["optimal", 0.3] <= min(misses["lru", 0.3], misses["window_aware", 0.3])
    assert misses["none", 0.0] > misses["lru", 0.3]
    assert next(run["hit_rate"] for run in runs if run["policy"] == "none") < 0.01
    assert all(run["mib_read"] > 0 for run in runs if run["misses"])
    draw(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_windows_in_columns_fit_into_a_fifth_of_the_memory_of_rows() -> None:
    """The other policies, of the same windows as rows, read some again."""
    runs = measure(["session_counts"], [0.2], steps_max=30)
    misses = {run["policy"]: run["misses"] for run in runs}

    assert list(misses) == [*POLICIES, COLUMNS]
    assert misses[COLUMNS] == 0
    assert min(misses[policy] for policy in POLICIES) > 0


@pytest.mark.parametrize("name", LOADS)
def test_loads_are_reproducible_and_watermarks_do_not_fall(name: str) -> None:
    first, again = ([next(steps) for _ in range(3)] for steps in (LOADS[name].steps(), LOADS[name].steps()))
    assert [list(step.keys) for step in first] == [list(step.keys) for step in again]
    assert all(len(step.keys) == len(step.at) > 0 for step in first)
    assert first[0].watermark <= first[1].watermark <= first[2].watermark


def test_optimum_evicts_rows_by_their_next_use() -> None:
    """Rows that are never used again go first."""
    future = Future()
    for future.now, keys in enumerate(["abc", "a", "b", "a"]):
        future.record(keys)
    future.now = 0
    never: Waits = np.zeros(3)

    assert future.policy(Candidates(keys="abc", waits=never, ages=never)).tolist() == [2, 1, 0]
    future.now = 2
    assert future.policy(Candidates(keys="abc", waits=never, ages=never)).tolist() == [1, 2, 0]
