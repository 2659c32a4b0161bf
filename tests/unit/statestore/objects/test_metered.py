"""Metered objects count what each thread reads, and nothing else differs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import MeteredObjects


def test_each_thread_is_told_what_it_has_read() -> None:
    """Two threads that read at once do not see each other's bytes."""
    objects = MeteredObjects(MemoryObjects())
    objects.put_if_absent("a/b", b"12345")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (objects.get("a/b"), objects.read_bytes)).result() == (b"12345", 5)

    assert objects.read_bytes == 0
    objects.get("a/b")
    objects.get("a/b")
    assert objects.read_bytes == 10


def test_all_else_is_the_store_s() -> None:
    """What is put, listed and deleted is put, listed and deleted in the store below."""
    below = MemoryObjects()
    objects = MeteredObjects(below)
    objects.put_unsynced("a/b", b"1")
    objects.put("a/c", b"2")
    objects.sync()

    assert (list(objects.list("a")), objects.url) == (["a/b", "a/c"], below.url)
    objects.delete(["a/b"])
    assert list(below.list("a")) == ["a/c"]
