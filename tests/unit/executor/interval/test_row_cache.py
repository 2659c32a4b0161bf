"""The row cache and its filter of keys."""

from __future__ import annotations

import pyarrow as pa

from millpond.executor.interval.row_cache import RowCache


def test_reverted_deletion_leaves_a_key_that_may_exist() -> None:
    """Eviction begins between the deletion and its reversal, so the key is not provably new."""
    cache = RowCache(lambda: 100)
    cache.put(["gone", "kept"], ["state" * 20, "state" * 20], {})
    undo = cache.put(["gone"], [None], {})
    cache.evict({})
    assert not cache.is_complete

    cache.undo(undo)

    assert cache.absent(["gone"]) == ["gone"]


def test_filter_of_keys_stays_within_a_third_of_the_limit() -> None:
    """Beyond that it becomes approximate, but never forgets a key."""
    cache = RowCache(lambda: 600_000)
    keys = pa.chunked_array([[f"key{number}" for number in range(300_000)]])

    cache.start_without_rows(len(keys))
    cache.remember(keys)

    assert cache.filter_bytes <= 200_000
    some = keys.slice(0, 1_000).to_pylist()
    assert cache.absent(some) == some
