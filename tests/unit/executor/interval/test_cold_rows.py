"""Rows that stay in Arrow until they are needed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.timers import Timer
from millpond.executor.interval.row_reader import ColdRows
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.row import TimeDomain
from tests.fixtures.row_updates import row_updates


def cold(count: int) -> ColdRows:
    """Make rows of which every third has a timer and each weighs its number."""
    updates = row_updates(
        [
            {
                "key": f"k{n:03}",
                "state": f"{n}",
                "timers": [{"tag": "t", "domain": "event", "at": n, "output_at": n}] if n % 3 == 0 else None,
            }
            for n in range(count)
        ]
    )
    return ColdRows(merge_updates(updates), np.arange(count, dtype=np.int64))


def test_row_is_taken_once_with_its_timers_and_weight() -> None:
    rows = cold(10)
    taken, weight = rows.take(["k003", "k008"])

    assert (taken.keys, taken.states, weight) == (["k003", "k008"], ["3", "8"], 11)
    assert taken.timers == {"k003": (Timer("t", TimeDomain.EVENT, 3, 3),)}
    assert rows.among(["k003", "k004", "zzz"]) == ["k004"]
    with pytest.raises(KeyError):
        rows.take(["k003"])


def test_table_is_compacted_once_half_of_the_rows_are_gone() -> None:
    """The remaining rows must survive the compaction."""
    rows = cold(100)
    assert rows.drop([f"k{n:03}" for n in range(50)]) == sum(range(50))

    assert len(rows) == len(rows.keys) == 50
    assert rows.weights.tolist() == list(range(50, 100))
    assert rows._table.num_rows == 50
    assert rows.take(["k099", "k050"])[0].states == ["99", "50"]


def test_binary_states_are_returned_as_bytes() -> None:
    updates = row_updates([{"key": "a", "state_bytes": b"\x00"}, {"key": "b", "state_bytes": b"\x01"}])
    rows = ColdRows(merge_updates(updates), np.ones(2, np.int64))

    assert rows.take(["b"])[0].states == [b"\x01"]
    assert isinstance(rows._table, pa.Table)
