"""The row cache: what it may call provably new."""

from __future__ import annotations

import pyarrow as pa

from millpond.executor.interval.row_cache import RowCache


def test_a_deletion_that_is_taken_back_leaves_a_row_that_may_exist() -> None:
    """A bundle deletes a key's row, eviction begins, the bundle is taken back: the key is not provably new."""
    cache = RowCache(lambda: 100)
    cache.put(["gone", "kept"], ["state" * 20, "state" * 20], {})
    undo = cache.put(["gone"], [None], {})
    cache.evict({})
    assert not cache.is_complete

    cache.undo(undo)

    assert cache.absent(["gone"]) == ["gone"]


def test_the_filter_of_all_keys_does_not_grow_with_the_state() -> None:
    """Of more keys than it can be exact about within a third of the limit the filter forgets none."""
    cache = RowCache(lambda: 600_000)
    keys = pa.chunked_array([[f"key{number}" for number in range(300_000)]])

    cache.start_without_rows(len(keys))
    cache.remember(keys)

    assert cache.filter_bytes <= 200_000
    some = keys.slice(0, 1_000).to_pylist()
    assert cache.absent(some) == some
