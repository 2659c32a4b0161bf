"""
The row cache: what it may call provably new.
"""

from __future__ import annotations

from millpond.executor.soft_state.row_cache import RowCache


def test_a_deletion_that_is_taken_back_leaves_a_row_that_may_exist() -> None:
    """
    A bundle deletes a key's row, eviction begins, the bundle is taken back: the key is not provably new.
    """
    cache = RowCache(lambda: 100)
    cache.put(["gone", "kept"], ["state" * 20, "state" * 20], {})
    undo = cache.put(["gone"], [None], {})
    cache.evict({})
    assert not cache.is_complete

    cache.undo(undo)

    assert cache.absent(["gone"]) == ["gone"]
