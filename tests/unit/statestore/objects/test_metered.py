"""Metered objects, which count the bytes read by each thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import MeteredObjects


def test_bytes_are_counted_per_thread() -> None:
    objects = MeteredObjects(MemoryObjects())
    objects.put_if_absent("a/b", b"12345")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (objects.get("a/b"), objects.read_bytes)).result() == (b"12345", 5)

    assert objects.read_bytes == 0
    objects.get("a/b")
    objects.get("a/b")
    assert objects.read_bytes == 10


def test_other_calls_reach_store() -> None:
    below = MemoryObjects()
    objects = MeteredObjects(below)
    objects.put_unsynced("a/b", b"1")
    objects.put("a/c", b"2")
    objects.sync()

    assert (list(objects.list("a")), objects.url) == (["a/b", "a/c"], below.url)
    objects.delete(["a/b"])
    assert list(below.list("a")) == ["a/c"]
