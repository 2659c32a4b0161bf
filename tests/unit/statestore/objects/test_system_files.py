"""Folders made by somebody else: links, FIFOs and sockets in place of files and folders."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.statestore.errors import DataError, ObjectExistsError
from millpond.statestore.objects.disk_tier import share_object
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.objects.ranges import ByteRange
from millpond.statestore.objects.system_files import SystemFiles, is_object_path

OPENED_MAX = 16
SECRET = b"a file of the user"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(SECRET)
    return folder


@pytest.fixture
def objects(tmp_path: Path, outside: Path) -> LocalObjects:
    objects = LocalObjects(tmp_path / "pond", "os_cache")
    objects.put("real/file", b"1")
    root = tmp_path / "pond"
    (root / "link").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "dangling").symlink_to(outside / "new")
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    return objects


def unchanged(outside: Path) -> bool:
    return {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": SECRET}


FOREIGN = ("link", "folder/secret", "dangling", "loop/real/file", "fifo", "socket")
READS: dict[str, Callable[[LocalObjects, str], object]] = {
    "get": LocalObjects.get,
    "ranges": lambda objects, path: objects.read_ranges(path, [ByteRange(0, 4)]),
    "tail": lambda objects, path: objects.read_tail(path, 4),
    "sync": lambda objects, path: LocalObjects(objects.url).sync([path]),
    "share": lambda objects, path: share_object(objects, LocalObjects(f"{objects.url}-copy"), path),
}


@pytest.mark.parametrize(
    ("read", "path"),
    # A FIFO has nothing to sync.
    [(read, path) for read in READS for path in FOREIGN if (read, path) != ("sync", "fifo")],
)
def test_foreign_file_is_damage(objects: LocalObjects, read: str, path: str) -> None:
    """No read may follow a link or wait for the writer of a FIFO."""
    with pytest.raises(DataError, match="must not be links"):
        READS[read](objects, path)


def test_download_of_link_is_damage(objects: LocalObjects, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must not be links"):
        objects.download("link", tmp_path / "copy")


@pytest.mark.parametrize("path", ["folder/new", "loop/new", "dangling/new"])
def test_write_below_linked_folder_is_refused(objects: LocalObjects, outside: Path, path: str) -> None:
    for write in (objects.put, objects.put_if_absent, objects.put_unsynced):
        with pytest.raises(DataError, match="must not be links"):
            write(path, b"2")

    assert unchanged(outside)


def test_put_replaces_link_itself(objects: LocalObjects, outside: Path) -> None:
    for path in ("link", "dangling", "fifo"):
        with pytest.raises(ObjectExistsError):
            objects.put_if_absent(path, b"2")
        objects.put(path, b"2")
        assert objects.get(path) == b"2"

    assert unchanged(outside)


def test_link_in_place_of_temporary_file_is_skipped(
    objects: LocalObjects, outside: Path, tmp_path: Path
) -> None:
    (tmp_path / "pond" / "new#1").symlink_to(outside / "new")
    objects.put("new", b"2")

    assert objects.get("new") == b"2"
    assert unchanged(outside)


def test_deletion_stays_in_folder(objects: LocalObjects, outside: Path) -> None:
    with pytest.raises(DataError, match="must not be links"):
        objects.delete(["folder/secret"])
    objects.delete(["link", "folder", "loop", "fifo"])

    assert unchanged(outside)
    assert list(objects.list("")) == ["dangling", "real/file", "socket"]


def test_listing_names_links_without_following(objects: LocalObjects) -> None:
    """A link in the log is read as damage."""
    assert list(objects.list("")) == ["dangling", "fifo", "folder", "link", "loop", "real/file", "socket"]
    with pytest.raises(DataError, match="must not be links"):
        objects.list("folder")


def test_listing_of_deep_folders_ends(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(200):
        folder /= "d"
        folder.mkdir()
    (folder / "file").touch()

    assert list(LocalObjects(tmp_path).list("")) == []


def test_folder_replaced_by_link_is_refused(objects: LocalObjects, outside: Path, tmp_path: Path) -> None:
    """An earlier use must not make it trusted."""
    assert objects.get("real/file") == b"1"
    (tmp_path / "pond" / "real").rename(tmp_path / "moved")
    (tmp_path / "pond" / "real").symlink_to(outside)

    with pytest.raises(DataError, match="must not be links"):
        objects.get("real/secret")
    with pytest.raises(DataError, match="must not be links"):
        objects.put("real/new", b"2")
    assert unchanged(outside)


def test_folder_replaced_by_copy_is_reopened(objects: LocalObjects, tmp_path: Path) -> None:
    objects.get("real/file")
    (tmp_path / "pond" / "real").rename(tmp_path / "moved")
    (tmp_path / "pond" / "real").mkdir()
    (tmp_path / "pond" / "real" / "file").write_bytes(b"of the copy")

    assert objects.get("real/file") == b"of the copy"


def test_only_root_may_be_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "pond").mkdir()
    (tmp_path / "link").symlink_to("pond")
    open_objects(str(tmp_path / "link")).put("a", b"1")
    assert (tmp_path / "pond" / "a").read_bytes() == b"1"

    (tmp_path / "pond" / "rows").symlink_to(outside)
    with pytest.raises(DataError, match="must not be links"):
        open_objects(str(tmp_path / "link"), folder="rows")


def test_links_are_found_before_other_programs_follow(objects: LocalObjects, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must not be links"):
        objects.refuse_links()
    clean = LocalObjects(tmp_path / "clean")
    clean.put("a/b", b"1")
    clean.refuse_links()


@pytest.mark.parametrize(
    "path",
    [
        "a\0b",
        "a\nb",
        "a\x1b]0;b",
        "a\x85b",
        "s3://bucket/a",
        "file:a",
        "C:a",
        "a/..",
        "a/./b",
        "a/",
        "/a",
        ".",
        "\udcff",
    ],
)
def test_impossible_path_is_damage(tmp_path: Path, path: str) -> None:
    assert not is_object_path(path)
    with pytest.raises(DataError, match="can have this path"):
        LocalObjects(tmp_path).get(path)


@pytest.mark.parametrize("path", ["computation=a%2Fb/1.parquet", "x=a:b/c", "..a/b..", ".hidden", "ä/ü#1"])
def test_unusual_path_is_possible(path: str) -> None:
    assert is_object_path(path)


def test_path_too_long_for_disk_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too long"):
        LocalObjects(tmp_path).get("a" * 300)


def test_open_folders_are_bounded_and_shared_by_threads(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path, "os_cache")
    for number in range(100):
        objects.put(f"{number}/file", b"%d" % number)
    wrong: list[object] = []

    def read() -> None:
        wrong.extend(number for number in range(100) if objects.get(f"{number}/file") != b"%d" % number)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert _opened_in(tmp_path) <= OPENED_MAX


def _opened_in(folder: str | Path) -> int:
    # Of the folder alone: descriptors that earlier tests left may be closed at any time.
    return sum(_leads_to(place, Path(folder)) for place in Path("/proc/self/fd").iterdir())


def _leads_to(place: Path, folder: Path) -> bool:
    try:
        return place.readlink().is_relative_to(folder)
    except FileNotFoundError:
        return False


def test_failed_link_leaves_no_descriptor(objects: LocalObjects) -> None:
    before = _opened_in(objects.url)
    files = SystemFiles(objects.url)
    for _ in range(20):
        for path in FOREIGN:
            with pytest.raises(OSError, match="link, FIFO"):
                files.read(f"{objects.url}/{path}")
    del files

    assert _opened_in(objects.url) == before
