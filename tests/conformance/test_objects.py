"""The promises of every object store: one suite for memory, disk, S3, and the disk tier before a store.

S3 is moto on the loopback interface, accessed through the production client.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError
from millpond.statestore.objects.disk_folder import DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail
from millpond.statestore.system import SystemClock, SystemRng

if TYPE_CHECKING:
    from pathlib import Path

    from millpond.statestore.types import Objects

WRITERS = 8
ROW_FILE = f"0000000001-{'0a' * 16}.parquet"

PATHS = st.sampled_from(["a", "a/b", "log/1", "log/10", "log/2", "logs/1", "é ü/f", "c=a%20b/f"])
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["create", "unsynced", "put", "get", "list", "delete", "sync"]),
        PATHS,
        st.sampled_from(["object", ROW_FILE]),
        st.binary(max_size=4),
    ),
    max_size=12,
)


@pytest.fixture(params=["memory", "local", "unsynced", "s3", "disk tier", "disk tier of s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "memory":
        return MemoryObjects()
    if request.param == "local":
        return open_objects(str(tmp_path / "pond"))
    if request.param == "unsynced":
        return open_objects(str(tmp_path / "pond"), durability="os_cache")
    folder, clock = DiskFolder(tmp_path / "disk", 1 << 30, SystemClock()), SystemClock()
    if request.param == "disk tier":
        return DiskTier(MemoryObjects(), folder, clock)
    bucket: str = request.getfixturevalue("s3_bucket")
    options: dict[str, str] = request.getfixturevalue("s3_server").options
    s3 = open_objects(f"{bucket}/pond/rows", options)
    return s3 if request.param == "s3" else DiskTier(s3, folder, clock)


class TestRules:
    @pytest.mark.parametrize("path", ["a/b", f"a/{ROW_FILE}"])
    def test_range_reads_return_parts_of_the_object(self, objects: Objects, path: str) -> None:
        """A range beyond the end is empty."""
        data = bytes(range(200))
        objects.put_if_absent(path, data)

        parts = read_ranges(objects, path, [ByteRange(150, 160), ByteRange(0, 3), ByteRange(190, 200)])
        assert parts == [data[150:160], data[:3], data[190:]]
        assert read_tail(objects, path, 20) == Tail(data[180:], 200)
        assert read_tail(objects, path, 500) == Tail(data, 200)
        with pytest.raises(ObjectMissingError):
            read_ranges(objects, f"b/{path}", [ByteRange(0, 1)])
        with pytest.raises(ObjectMissingError):
            read_tail(objects, f"b/{path}", 1)

    def test_created_object_is_read_back(self, objects: Objects) -> None:
        objects.put_if_absent("a/b", b"bytes")

        assert objects.get("a/b") == b"bytes"

    def test_put_if_absent_succeeds_once(self, objects: Objects) -> None:
        objects.put_if_absent("a", b"first")

        with pytest.raises(ObjectExistsError):
            objects.put_if_absent("a", b"second")
        assert objects.get("a") == b"first"

    def test_unsynced_object_is_visible(self, objects: Objects) -> None:
        """Syncing it, or nothing, changes nothing."""
        objects.put_unsynced("a/b", b"first")

        with pytest.raises(ObjectExistsError):
            objects.put_unsynced("a/b", b"second")
        objects.sync()
        objects.sync(["a/b", "nowhere/c"])
        assert list(objects.list("")) == ["a/b"]
        assert objects.get("a/b") == b"first"

    def test_put_replaces(self, objects: Objects) -> None:
        objects.put("a", b"first")
        objects.put("a", b"second")

        assert objects.get("a") == b"second"

    def test_missing_object_is_named(self, objects: Objects) -> None:
        with pytest.raises(ObjectMissingError, match="nowhere"):
            objects.get("nowhere")

    def test_listing_is_sorted_and_matches_whole_path_parts(self, objects: Objects) -> None:
        for path in ("log/2", "log/10", "log/1", "logs/1", "log/sub/3"):
            objects.put_if_absent(path, b"")

        assert list(objects.list("log")) == ["log/1", "log/10", "log/2", "log/sub/3"]
        assert list(objects.list("log", start_after="log/10")) == ["log/2", "log/sub/3"]
        assert list(objects.list("nowhere")) == []

    def test_deleting_twice_succeeds(self, objects: Objects) -> None:
        objects.put("a", b"")
        objects.put("b", b"")

        objects.delete(["gone", "a", "gone too", "b"])

        assert list(objects.list("")) == []

    @pytest.mark.parametrize("path", ["computation=a%20b/f", "é ü/f", "a#b?c", "%25/x%2F", "a+b&c=d"])
    def test_path_is_not_encoded(self, objects: Objects, path: str) -> None:
        objects.put_if_absent(path, b"1")

        assert objects.get(path) == b"1"
        assert list(objects.list("")) == [path]

    def test_one_of_many_concurrent_creators_succeeds(self, objects: Objects) -> None:
        for number in range(20):
            winners = _create_at_once(objects, f"log/{number}")

            assert len(winners) == 1
            assert objects.get(f"log/{number}") == winners[0]

    @settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(calls=CALLS)
    def test_store_behaves_like_a_dictionary(
        self, objects: Objects, calls: list[tuple[str, str, str, bytes]]
    ) -> None:
        root = SystemRng().token()
        model: dict[str, bytes] = {}
        for operation, name, file, data in calls:
            # On a disk a name is a file or a folder, not both.
            path = f"{root}/{name}/{file}"
            assert _call(objects, operation, path, data, root) == _expected(model, operation, path, data)


def _create_at_once(objects: Objects, path: str) -> Sequence[bytes]:
    barrier = threading.Barrier(WRITERS)
    winners: list[bytes] = []

    def create(data: bytes) -> None:
        barrier.wait()
        try:
            objects.put_if_absent(path, data)
        except ObjectExistsError:
            return
        winners.append(data)

    # Large enough that a server takes some time to read them.
    threads = [threading.Thread(target=create, args=(bytes([number]) * 50_000,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners


def _call(objects: Objects, operation: str, path: str, data: bytes, root: str) -> object:
    try:
        match operation:
            case "create":
                objects.put_if_absent(path, data)
            case "unsynced":
                objects.put_unsynced(path, data)
            case "sync":
                objects.sync([path])
            case "put":
                objects.put(path, data)
            case "get":
                return objects.get(path)
            case "list":
                return list(objects.list(root))
            case _:
                objects.delete([path])
    except (ObjectExistsError, ObjectMissingError) as error:
        return type(error)
    return None


def _expected(model: dict[str, bytes], operation: str, path: str, data: bytes) -> object:
    match operation:
        case "create" | "unsynced" if path in model:
            return ObjectExistsError
        case "sync":
            return None
        case "create" | "unsynced" | "put":
            model[path] = data
        case "get":
            return model.get(path, ObjectMissingError)
        case "list":
            return sorted(model)
        case _:
            model.pop(path, None)
    return None
