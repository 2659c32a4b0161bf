"""Objects in a local folder: durability, the order of syncs, and threads."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import (
    DataError,
    InvalidError,
    ObjectExistsError,
    ObjectMissingError,
    UnavailableError,
)
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.objects.system_files import LostWriteError, SystemFiles
from millpond.testing.faults.power_cut import PowerCutFiles
from millpond.testing.fixtures.determinism import SeededRng

CALLERS = 48
SYNC_THREADS = 4
DRAWS = 12

ROW_FILES = {"computation=a/1": b"rows of a", "computation=b/1": b"rows of b"}
COMMIT = "_delta_log/1.json"

FORKS = """
import os, sys
from millpond.statestore.objects.local import LocalObjects
objects = LocalObjects(sys.argv[1])
objects.put_unsynced("a", b"1")
objects.put("b", b"1")
child = os.fork()
if not child:
    objects.put_unsynced("c", b"2")
    objects.put("d", b"2")
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


class PowerCutError(BaseException):
    """The power failed within a call."""


def cut_before(call_number: int, files: PowerCutFiles) -> list[str]:
    """Cut the power at the given call to the file system and return the recorded calls."""
    calls: list[str] = []

    def before(call: str, path: str) -> None:
        if len(calls) == call_number:
            raise PowerCutError
        calls.append(f"{call} {path}")

    files.before = before
    return calls


def superstep(files: PowerCutFiles) -> bool:
    try:
        objects = LocalObjects("/pond/rows", files=files)
        for path, data in ROW_FILES.items():
            objects.put_unsynced(path, data)
        objects.put_if_absent(COMMIT, b"names the row files")
    except PowerCutError:
        return False
    return True


def choosers() -> list[Callable[[int], int]]:
    rng = SeededRng("power cuts")
    return [lambda _: 0, lambda outcomes: outcomes - 1] + [
        lambda outcomes: int(rng.random() * outcomes) for _ in range(DRAWS)
    ]


def surviving(files: PowerCutFiles) -> dict[str, bytes]:
    files.before = lambda _call, _path: None
    objects = LocalObjects("/pond/rows", files=files)
    return {path: objects.get(path) for path in objects.list("")}


class TestPowerCuts:
    def test_commit_survives_power_cut_with_its_row_files_or_not_at_all(self) -> None:
        """An acknowledged commit must survive."""
        whole = PowerCutFiles()
        calls = cut_before(-1, whole)
        assert superstep(whole)
        for number in range(len(calls) + 1):
            for choose in choosers():
                files = PowerCutFiles()
                cut_before(number, files)
                acknowledged = superstep(files)
                files.cut_power(choose)
                survivors = surviving(files)
                assert acknowledged == (number == len(calls))
                assert COMMIT in survivors or not acknowledged
                if COMMIT in survivors:
                    assert survivors == {**ROW_FILES, COMMIT: b"names the row files"}

    def test_os_cache_may_lose_acknowledged_commit(self) -> None:
        files = PowerCutFiles()
        objects = LocalObjects("/pond/rows", "os_cache", files=files)
        objects.put_if_absent(COMMIT, b"1")
        files.cut_power(lambda _: 0)

        assert surviving(files) == {}

    def test_row_files_are_synced_together(self) -> None:
        """The sync precedes the name of the commit."""
        syncs: list[set[str]] = []

        class Counting(PowerCutFiles):
            def sync(self, paths: Collection[str]) -> None:
                syncs.append({path.rpartition("rows/")[2] for path in paths})
                super().sync(paths)

        superstep(Counting())

        assert len(syncs) == 2
        assert {*ROW_FILES, "computation=a", "computation=b", f"{COMMIT}#1"} <= syncs[0]
        assert syncs[1] == {"_delta_log"}

    def test_existing_commit_is_synced_before_it_is_reported(self) -> None:
        """Its writer may have died between the name and the sync."""
        files = PowerCutFiles()
        calls = cut_before(-1, files)
        superstep(files)
        last = len(calls) - 1
        files = PowerCutFiles()
        cut_before(last, files)
        assert not superstep(files)
        files.before = lambda _call, _path: None

        with pytest.raises(ObjectExistsError):
            LocalObjects("/pond/rows", files=files).put_if_absent(COMMIT, b"names the row files")
        files.cut_power(lambda _: 0)

        assert COMMIT in surviving(files)

    def test_existing_folder_is_synced(self) -> None:
        """Its creator may have died before the sync."""
        files = PowerCutFiles()
        for folder in ("/pond", "/pond/rows", "/pond/rows/_delta_log"):
            files.make_folder(folder)
        LocalObjects("/pond/rows", files=files).put_if_absent(COMMIT, b"1")
        files.cut_power(lambda _: 0)

        assert surviving(files) == {COMMIT: b"1"}

    def test_replaced_object_is_old_or_new_after_power_cut(self) -> None:
        for number in range(8):
            for choose in choosers():
                files = PowerCutFiles()
                objects = LocalObjects("/pond/rows", files=files)
                objects.put("pointer", b"old pointer")
                cut_before(number, files)
                acknowledged = True
                try:
                    objects.put("pointer", b"new pointer")
                except PowerCutError:
                    acknowledged = False
                files.cut_power(choose)
                pointer = surviving(files)["pointer"]
                assert pointer == b"new pointer" or (pointer == b"old pointer" and not acknowledged)

    def test_synced_deletion_is_final(self) -> None:
        files = PowerCutFiles()
        objects = LocalObjects("/pond/rows", files=files)
        objects.put("a", b"1")
        objects.delete(["a", "gone"])
        objects.sync()
        files.cut_power(lambda _: 0)

        assert surviving(files) == {}

    def test_sync_covers_objects_of_other_processes(self) -> None:
        """A missing object is skipped."""
        files = PowerCutFiles()
        LocalObjects("/pond/rows", files=files).put_unsynced("log/1", b"1")
        LocalObjects("/pond/rows", files=files).sync(["log/1", "log/2", "nowhere/3"])
        files.cut_power(lambda _: 0)

        assert surviving(files) == {"log/1": b"1"}


class TestFailures:
    def test_failed_sync_stops_commits(self) -> None:
        """The kernel forgets pages that it could not write, and the next sync succeeds."""

        class Failing(PowerCutFiles):
            failures = 1

            def sync(self, paths: Collection[str]) -> None:
                if self.failures:
                    self.failures -= 1
                    raise LostWriteError(errno.EIO, "Input/output error")
                super().sync(paths)

        files = Failing()
        objects = LocalObjects("/pond/rows", files=files)
        objects.put_unsynced("a/1", b"1")

        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"Input/output error|an earlier sync failed"):
                objects.put_if_absent(COMMIT, b"1")
        assert list(objects.list("_delta_log")) == []
        LocalObjects("/pond/rows", files=files).put_if_absent(COMMIT, b"1")

    def test_sync_that_did_not_begin_is_repeated(self) -> None:
        """A lack of descriptors loses nothing."""

        class Busy(PowerCutFiles):
            failures = 1

            def sync(self, paths: Collection[str]) -> None:
                if self.failures:
                    self.failures -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                super().sync(paths)

        files = Busy()
        objects = LocalObjects("/pond/rows", files=files)
        objects.put_unsynced("a/1", b"1")
        with pytest.raises(UnavailableError, match="Too many"):
            objects.put_if_absent(COMMIT, b"1")
        objects.put_if_absent(COMMIT, b"1")
        files.cut_power(lambda _: 0)

        assert surviving(files) == {"a/1": b"1", COMMIT: b"1"}

    def test_unknown_durability_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidError, match="tape"):
            open_objects(str(tmp_path), durability="tape")  # type: ignore[arg-type]

    def test_object_store_refuses_weaker_durability(self) -> None:
        with pytest.raises(InvalidError, match="local folders"):
            open_objects("s3://bucket/pond", {"aws_region": "x"}, durability="os_cache")
        open_objects("s3://bucket/pond", {"aws_region": "x"}, durability="disk")

    @pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/passwd", "", "a//b", "./a"])
    def test_path_must_stay_in_folder(self, tmp_path: Path, path: str) -> None:
        objects = LocalObjects(tmp_path / "pond")

        with pytest.raises(DataError, match="can have this path"):
            objects.get(path)
        with pytest.raises(DataError, match="can have this path"):
            objects.put(path, b"")
        assert [path.name for path in tmp_path.iterdir()] == ["pond"]

    def test_folder_and_missing_file_are_no_objects(self, tmp_path: Path) -> None:
        objects = LocalObjects(tmp_path)
        objects.put("a/b", b"")

        for path in ("a", "a/b/c", "nowhere"):
            with pytest.raises(ObjectMissingError, match=path):
                objects.get(path)
            with pytest.raises(ObjectMissingError, match=path):
                objects.download(path, tmp_path / "copy")

    def test_temporary_file_of_dead_writer_is_ignored(self, tmp_path: Path) -> None:
        objects = LocalObjects(tmp_path)
        (tmp_path / "a#1").write_bytes(b"hal")
        objects.put_if_absent("a", b"whole")

        assert list(objects.list("")) == ["a"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a#1"]

    def test_deleted_folder_is_created_again(self, tmp_path: Path) -> None:
        objects = LocalObjects(tmp_path)
        objects.put("a/b/c", b"1")
        objects.delete(["a/b/c"])
        (tmp_path / "a" / "b").rmdir()
        objects.put("a/b/c", b"2")

        assert objects.get("a/b/c") == b"2"

    def test_upload_and_download_keep_every_byte(self, tmp_path: Path) -> None:
        """An upload does not replace."""
        objects, data = LocalObjects(tmp_path / "pond"), SeededRng("bytes").token().encode() * 300_000
        (tmp_path / "in").write_bytes(data)
        objects.upload("a/b", tmp_path / "in")
        objects.download("a/b", tmp_path / "out")

        assert (tmp_path / "out").read_bytes() == data
        with pytest.raises(ObjectExistsError):
            objects.upload("a/b", tmp_path / "in")


class TestProcesses:
    def test_pickled_store_keeps_durability(self, tmp_path: Path) -> None:
        objects = pickle.loads(pickle.dumps(LocalObjects(tmp_path, "os_cache")))

        assert (objects.url, objects.durability) == (str(tmp_path), "os_cache")
        assert repr(objects) == f"LocalObjects({str(tmp_path)!r}, 'os_cache')"

    def test_forked_process_syncs_with_own_threads(self, tmp_path: Path) -> None:
        """Its parent has synced before."""
        # Fork a process of one thread: a lock that another test's thread holds would stay held in the child.
        subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], check=True, timeout=60)

        assert list(LocalObjects(tmp_path).list("")) == ["a", "b", "c", "d"]


class TestSystemFiles:
    def test_store_adds_at_most_four_threads(self, tmp_path: Path) -> None:
        objects = LocalObjects(tmp_path)
        objects.put("a/0", b"0")
        before = _threads()
        started, counted = threading.Barrier(CALLERS + 1), threading.Event()
        most: list[int] = []

        def call(number: int) -> None:
            started.wait()
            while not counted.is_set():
                objects.put_unsynced(f"a/{number}-{SeededRng(f'{number}{len(most)}').token()}", bytes(10_000))
                objects.sync()
                objects.get("a/0")
                objects.list("a", start_after="a/z")
                most.append(_threads())
                if len(most) > CALLERS * 4:
                    counted.set()

        callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        started.wait()
        for caller in callers:
            caller.join()

        assert max(most) <= before + CALLERS + SYNC_THREADS
        assert _threads() <= before + SYNC_THREADS

    def test_failed_sync_among_several_raises(self, tmp_path: Path) -> None:
        """A missing path does not."""
        (tmp_path / "loop").symlink_to("loop")
        files = SystemFiles(str(tmp_path))

        files.sync([str(tmp_path), str(tmp_path / "missing")])
        with pytest.raises(OSError, match="loop"):
            files.sync([str(tmp_path), str(tmp_path / "loop")])

    def test_file_system_without_folder_syncs_is_accepted(self) -> None:
        """A file that cannot be synced may be lost."""
        SystemFiles("/pond").sync(["/proc"])

        with pytest.raises(LostWriteError, match="/dev/null"):
            SystemFiles("/pond").sync(["/dev/null"])

    def test_failed_write_leaves_no_file(self, tmp_path: Path) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"first"
            raise OSError(errno.ENOSPC, "no room")

        with pytest.raises(OSError, match="no room"):
            SystemFiles(str(tmp_path)).create(str(tmp_path / "a"), pieces())
        assert list(tmp_path.iterdir()) == []


def _threads() -> int:
    # Count threads of native libraries too, which Python does not list.
    return len(list(Path("/proc/self/task").iterdir()))
