"""Objects in a local folder: what survives a power cut, in which order it is synced, and how many threads that takes."""

from __future__ import annotations

import errno
import os
import pickle
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


class PowerCutError(BaseException):
    """The power failed within a call."""


def cut_before(call_number: int, files: PowerCutFiles) -> list[str]:
    """Let the power fail at that call to the file system; returns the calls made, as they are made."""
    calls: list[str] = []

    def before(call: str, path: str) -> None:
        if len(calls) == call_number:
            raise PowerCutError
        calls.append(f"{call} {path}")

    files.before = before
    return calls


def superstep(files: PowerCutFiles) -> bool:
    """Row files, and the commit that names them; returns whether the commit was acknowledged."""
    try:
        objects = LocalObjects("/pond/rows", files=files)
        for path, data in ROW_FILES.items():
            objects.put_unsynced(path, data)
        objects.put_if_absent(COMMIT, b"names the row files")
    except PowerCutError:
        return False
    return True


def choosers() -> list[Callable[[int], int]]:
    """What the operating system had written of its own accord: nothing, the newest of all, and random parts."""
    rng = SeededRng("power cuts")
    return [lambda _: 0, lambda outcomes: outcomes - 1] + [
        lambda outcomes: int(rng.random() * outcomes) for _ in range(DRAWS)
    ]


def surviving(files: PowerCutFiles) -> dict[str, bytes]:
    """The objects after a power cut."""
    files.before = lambda _call, _path: None
    objects = LocalObjects("/pond/rows", files=files)
    return {path: objects.get(path) for path in objects.list("")}


class TestPowerCuts:
    def test_a_commit_is_there_whole_with_its_row_files_or_not_at_all(self) -> None:
        """Wherever the power fails in a superstep, and whatever was written by then: a commit that has a name on the
        disk is whole, and so are the row files that it names; one that was acknowledged is there.
        """
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

    def test_without_syncs_an_acknowledged_commit_is_lost(self) -> None:
        """With os_cache nothing is promised: the same power cut takes back what was acknowledged."""
        files = PowerCutFiles()
        objects = LocalObjects("/pond/rows", "os_cache", files=files)
        objects.put_if_absent(COMMIT, b"1")
        files.cut_power(lambda _: 0)

        assert surviving(files) == {}

    def test_row_files_are_synced_together(self) -> None:
        """Row files, their folders and the commit's contents are synced in one go, before the commit has its name."""
        syncs: list[set[str]] = []

        class Counting(PowerCutFiles):
            def sync(self, paths: Collection[str]) -> None:
                syncs.append({path.rpartition("rows/")[2] for path in paths})
                super().sync(paths)

        superstep(Counting())

        assert len(syncs) == 2
        assert {*ROW_FILES, "computation=a", "computation=b", f"{COMMIT}#1"} <= syncs[0]
        assert syncs[1] == {"_delta_log"}

    def test_a_commit_that_exists_is_safe_before_it_is_said_to_exist(self) -> None:
        """A writer that died between a name and its sync has left a commit that a power cut may take back; the next one
        that finds it there, its own second attempt say, syncs it.
        """
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

    def test_the_name_of_a_folder_is_safe_even_if_another_made_it(self) -> None:
        """A process that finds a folder syncs its name as well: the one that made it may not have come to that."""
        files = PowerCutFiles()
        for folder in ("/pond", "/pond/rows", "/pond/rows/_delta_log"):
            files.make_folder(folder)
        LocalObjects("/pond/rows", files=files).put_if_absent(COMMIT, b"1")
        files.cut_power(lambda _: 0)

        assert surviving(files) == {COMMIT: b"1"}

    def test_a_replaced_object_is_the_old_one_or_the_new_one(self) -> None:
        """Wherever the power fails while an object is replaced, it has its old bytes or the new ones, whole."""
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

    def test_a_synced_deletion_is_final(self) -> None:
        """A deleted object may come back until the next sync, and not after it."""
        files = PowerCutFiles()
        objects = LocalObjects("/pond/rows", files=files)
        objects.put("a", b"1")
        objects.delete(["a", "gone"])
        objects.sync()
        files.cut_power(lambda _: 0)

        assert surviving(files) == {}

    def test_what_another_process_put_is_synced_by_name(self) -> None:
        """A reader that is to rely on an object syncs it, its contents and its name; one that is missing is skipped."""
        files = PowerCutFiles()
        LocalObjects("/pond/rows", files=files).put_unsynced("log/1", b"1")
        LocalObjects("/pond/rows", files=files).sync(["log/1", "log/2", "nowhere/3"])
        files.cut_power(lambda _: 0)

        assert surviving(files) == {"log/1": b"1"}


class TestFailures:
    def test_nothing_is_committed_after_a_failed_sync(self) -> None:
        """The kernel forgets pages that it could not write, and the next sync succeeds; so after a failed one this
        writer commits no more, and what it says names the reason.
        """

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

    def test_a_sync_that_was_not_begun_is_made_up_for(self) -> None:
        """A sync that fails before it has begun, for want of descriptors say, loses nothing: the next one has all of it."""

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

    def test_an_unknown_durability_is_refused(self, tmp_path: Path) -> None:
        """A misspelt durability is an error, and not the other one."""
        with pytest.raises(InvalidError, match="tape"):
            open_objects(str(tmp_path), durability="tape")  # type: ignore[arg-type]

    def test_an_object_store_has_no_choice(self) -> None:
        """An object store that is to keep less than it does is refused; to say what it does is allowed."""
        with pytest.raises(InvalidError, match="local folders"):
            open_objects("s3://bucket/pond", {"aws_region": "x"}, durability="os_cache")
        open_objects("s3://bucket/pond", {"aws_region": "x"}, durability="disk")

    @pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/passwd", "", "a//b", "./a"])
    def test_no_path_leads_out_of_the_folder(self, tmp_path: Path, path: str) -> None:
        """A path with a part that is no name reads and writes nothing."""
        objects = LocalObjects(tmp_path / "pond")

        with pytest.raises(DataError, match="can have this path"):
            objects.get(path)
        with pytest.raises(DataError, match="can have this path"):
            objects.put(path, b"")
        assert [path.name for path in tmp_path.iterdir()] == ["pond"]

    def test_a_missing_file_is_no_object(self, tmp_path: Path) -> None:
        """A folder, and a path below a file, are no objects; getting or downloading them names the path."""
        objects = LocalObjects(tmp_path)
        objects.put("a/b", b"")

        for path in ("a", "a/b/c", "nowhere"):
            with pytest.raises(ObjectMissingError, match=path):
                objects.get(path)
            with pytest.raises(ObjectMissingError, match=path):
                objects.download(path, tmp_path / "copy")

    def test_what_a_dead_writer_left_is_no_object_and_in_no_ones_way(self, tmp_path: Path) -> None:
        """The file of a writer that died halfway is not listed, and another writer of the object takes another name."""
        objects = LocalObjects(tmp_path)
        (tmp_path / "a#1").write_bytes(b"hal")
        objects.put_if_absent("a", b"whole")

        assert list(objects.list("")) == ["a"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a#1"]

    def test_a_folder_that_was_removed_is_made_again(self, tmp_path: Path) -> None:
        """A folder that is gone since it was used does not stop the next put."""
        objects = LocalObjects(tmp_path)
        objects.put("a/b/c", b"1")
        objects.delete(["a/b/c"])
        (tmp_path / "a" / "b").rmdir()
        objects.put("a/b/c", b"2")

        assert objects.get("a/b/c") == b"2"

    def test_a_file_is_copied_in_pieces(self, tmp_path: Path) -> None:
        """Uploads and downloads keep every byte, and an upload does not replace."""
        objects, data = LocalObjects(tmp_path / "pond"), SeededRng("bytes").token().encode() * 300_000
        (tmp_path / "in").write_bytes(data)
        objects.upload("a/b", tmp_path / "in")
        objects.download("a/b", tmp_path / "out")

        assert (tmp_path / "out").read_bytes() == data
        with pytest.raises(ObjectExistsError):
            objects.upload("a/b", tmp_path / "in")


class TestProcesses:
    def test_it_travels_with_its_durability(self, tmp_path: Path) -> None:
        """A pickled store opens the same folder, with the same durability."""
        objects = pickle.loads(pickle.dumps(LocalObjects(tmp_path, "os_cache")))

        assert (objects.url, objects.durability) == (str(tmp_path), "os_cache")
        assert repr(objects) == f"LocalObjects({str(tmp_path)!r}, 'os_cache')"

    def test_a_forked_process_syncs_with_threads_of_its_own(self, tmp_path: Path) -> None:
        """A process that was forked after its parent had synced can put as well."""
        objects = LocalObjects(tmp_path)
        objects.put_unsynced("a", b"1")
        objects.put("b", b"1")
        child = os.fork()
        if not child:
            objects.put_unsynced("c", b"2")
            objects.put("d", b"2")
            os._exit(0)

        assert os.waitpid(child, 0)[1] == 0
        assert list(objects.list("")) == ["a", "b", "c", "d"]


class TestSystemFiles:
    def test_load_adds_no_more_threads_than_the_syncs_have(self, tmp_path: Path) -> None:
        """However many callers read, list and write at once, the store adds four threads at most, during and after."""
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

    def test_a_failed_sync_among_several_is_an_error(self, tmp_path: Path) -> None:
        """Of paths that are synced together, one that cannot be opened fails the call, and one that is missing does not."""
        (tmp_path / "loop").symlink_to("loop")
        files = SystemFiles(str(tmp_path))

        files.sync([str(tmp_path), str(tmp_path / "missing")])
        with pytest.raises(OSError, match="loop"):
            files.sync([str(tmp_path), str(tmp_path / "loop")])

    def test_a_file_system_without_folder_syncs_is_taken_as_it_is(self) -> None:
        """A folder whose file system knows no sync needs none; a file that cannot be synced may be lost."""
        SystemFiles("/pond").sync(["/proc"])

        with pytest.raises(LostWriteError, match="/dev/null"):
            SystemFiles("/pond").sync(["/dev/null"])

    def test_a_file_that_cannot_be_written_is_not_left_behind(self, tmp_path: Path) -> None:
        """When the contents fail midway the error comes to the caller and the name is free again."""

        def pieces() -> Iterator[bytes]:
            yield b"first"
            raise OSError(errno.ENOSPC, "no room")

        with pytest.raises(OSError, match="no room"):
            SystemFiles(str(tmp_path)).create(str(tmp_path / "a"), pieces())
        assert list(tmp_path.iterdir()) == []


def _threads() -> int:
    # Those of native libraries too, which Python does not know.
    return len(list(Path("/proc/self/task").iterdir()))
