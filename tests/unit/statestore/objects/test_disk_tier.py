"""The disk tier: the store's bytes, read once, on any disk."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
import shutil
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.statestore.objects import disk_folder as disk_copy
from millpond.statestore.objects.disk_folder import CHUNK_BYTES, DiskCopy, DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier, forget_copy
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import ByteRange, MeteredObjects, Tail
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

PATH = f"computation=c/0000000001-{'0a' * 16}.parquet"
OTHER = f"computation=c/0000000002-{'0b' * 16}.parquet"
BUDGET_BYTES = 1 << 30
PROCESSES = 4


def data_of(size_bytes: int, seed: int = 1) -> bytes:
    rng = SeededRng(seed)
    return b"".join(bytes.fromhex(rng.token()) for _ in range(-(-size_bytes // 16)))[:size_bytes]


DATA = data_of(5 * CHUNK_BYTES + 1_234)
PARTS = st.lists(
    st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(
        lambda pair: ByteRange(min(pair), max(pair))
    ),
    max_size=5,
)


class WatchedObjects(MeteredObjects):
    """A store in memory that records its calls."""

    def __init__(self, objects: MemoryObjects) -> None:
        super().__init__(objects)
        self.below = objects
        self.calls: list[str] = []
        self.asked: list[ByteRange] = []

    def get(self, path: str) -> bytes:
        self.calls.append("get")
        return super().get(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        self.calls.append("ranges")
        self.asked = [*ranges]
        return super().read_ranges(path, ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        self.calls.append("tail")
        return super().read_tail(path, size_bytes)


@pytest.fixture
def store() -> WatchedObjects:
    objects = MemoryObjects()
    objects.put(PATH, DATA)
    return WatchedObjects(objects)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def tier_of(
    store: WatchedObjects | MemoryObjects, folder: Path, budget_bytes: int = BUDGET_BYTES
) -> DiskTier:
    clock = ManualClock()
    return DiskTier(store, DiskFolder(folder, budget_bytes, clock), clock)


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestReading:
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(calls=st.lists(st.tuples(st.sampled_from(["ranges", "tail", "get"]), PARTS), max_size=6))
    def test_tier_returns_bytes_of_store(
        self, store: WatchedObjects, folder: Path, calls: list[tuple[str, list[ByteRange]]]
    ) -> None:
        tier = tier_of(store, folder)
        for kind, parts in calls:
            if kind == "get":
                assert tier.get(PATH) == DATA
            elif kind == "ranges":
                assert tier.read_ranges(PATH, parts) == [DATA[part.start : part.end] for part in parts]
            else:
                for part in parts:
                    assert tier.read_tail(PATH, part.end + 1) == Tail(DATA[-part.end - 1 :], len(DATA))
        shutil.rmtree(folder, ignore_errors=True)

    def test_repeated_read_asks_store_for_nothing(self, store: WatchedObjects, folder: Path) -> None:
        parts = [ByteRange(10, 20), ByteRange(3 * CHUNK_BYTES - 1, 3 * CHUNK_BYTES + 1)]
        first = (tier_of(store, folder).read_ranges(PATH, parts), tier_of(store, folder).read_tail(PATH, 9))
        store.calls.clear()

        assert (
            tier_of(store, folder).read_ranges(PATH, parts),
            tier_of(store, folder).read_tail(PATH, 9),
        ) == first
        assert store.calls == []

    def test_missing_chunks_are_one_request(self, store: WatchedObjects, folder: Path) -> None:
        """Neighbours are one range."""
        tier = tier_of(store, folder)
        tier.read_ranges(PATH, [ByteRange(2 * CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 6)])
        store.calls.clear()

        tier.read_ranges(PATH, [ByteRange(len(DATA) - 1, len(DATA)), ByteRange(5, 4 * CHUNK_BYTES)])

        assert store.calls == ["ranges"]
        assert store.asked == [
            ByteRange(0, 2 * CHUNK_BYTES),
            ByteRange(3 * CHUNK_BYTES, 4 * CHUNK_BYTES),
            ByteRange(5 * CHUNK_BYTES, len(DATA)),
        ]

    def test_tail_is_one_request_and_gives_length(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)

        assert tier.read_tail(PATH, CHUNK_BYTES) == Tail(DATA[-CHUNK_BYTES:], len(DATA))
        assert tier.read_tail(PATH, CHUNK_BYTES) == Tail(DATA[-CHUNK_BYTES:], len(DATA))
        tier.read_ranges(PATH, [ByteRange(0, 1)])

        assert store.calls == ["tail", "ranges"]

    def test_whole_object_is_kept(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)

        assert tier.read_ranges(PATH, [ByteRange(7, len(DATA) + 9)]) == [DATA[7:]]
        assert tier.get(PATH) == DATA
        assert store.calls == ["get"]

    @pytest.mark.parametrize(
        "size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]
    )
    def test_object_of_any_length_is_kept(self, store: WatchedObjects, folder: Path, size_bytes: int) -> None:
        tier, data = tier_of(store, folder), data_of(size_bytes)
        tier.put_if_absent(OTHER, data)

        assert tier.get(OTHER) == data
        assert tier.read_tail(OTHER, 10) == Tail(data[-10:], size_bytes)
        assert tier.read_ranges(OTHER, [ByteRange(0, size_bytes), ByteRange(size_bytes, size_bytes + 5)]) == [
            data,
            b"",
        ]
        assert store.calls == []

    def test_missing_object_raises_and_keeps_nothing(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        for read in (
            lambda: tier.get(OTHER),
            lambda: tier.read_tail(OTHER, 1),
            lambda: tier.read_ranges(OTHER, [ByteRange(0, 1)]),
        ):
            with pytest.raises(ObjectMissingError):
                read()
        assert copies(folder) == []

    def test_error_of_store_is_raised(self, folder: Path) -> None:
        class Away(MemoryObjects):
            def get(self, path: str) -> bytes:
                raise UnavailableError("away", path=path)

        store = Away()
        store.put(PATH, DATA)
        tier = tier_of(store, folder)
        with pytest.raises(UnavailableError):
            tier.get(PATH)
        store.put_if_absent(OTHER, b"1")
        with pytest.raises(UnavailableError):
            tier.read_ranges(OTHER, [ByteRange(0, 1)])
        assert copies(folder) == []

    def test_tier_without_keeping_reads_copies_and_makes_none(self, tmp_path: Path, folder: Path) -> None:
        """Another process that gets the tier has such a one."""
        store = LocalObjects(tmp_path / "store")
        store.put_if_absent(PATH, DATA)
        tier = DiskTier(store, DiskFolder(folder, BUDGET_BYTES, SystemClock()), SystemClock())
        tier.get(PATH)
        kept = copies(folder)
        store.delete([PATH])

        for reader in (tier.without_keeping(), pickle.loads(pickle.dumps(tier))):
            assert reader.get(PATH) == DATA
            reader.put_if_absent(OTHER, DATA)
            assert reader.get(OTHER) == DATA
            assert reader.read_tail(OTHER, 9) == Tail(DATA[-9:], len(DATA))
            assert reader.read_ranges(OTHER, [ByteRange(1, 3)]) == [DATA[1:3]]
            reader.delete([OTHER])
            assert copies(folder) == kept


class TestWriting:
    @pytest.mark.parametrize("put", [DiskTier.put_if_absent, DiskTier.put_unsynced])
    def test_written_row_file_is_kept(self, store: WatchedObjects, folder: Path, put: object) -> None:
        tier = tier_of(store, folder)
        assert callable(put)
        put(tier, OTHER, DATA)

        assert tier.get(OTHER) == DATA
        assert store.calls == []
        assert store.below.get(OTHER) == DATA

    def test_refused_object_is_not_kept(self, store: WatchedObjects, folder: Path) -> None:
        """The existing object has other bytes."""
        tier = tier_of(store, folder)
        with pytest.raises(ObjectExistsError):
            tier.put_if_absent(PATH, b"others")

        assert tier.get(PATH) == DATA

    def test_deleted_object_has_no_copy(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)
        tier.delete(path for path in (PATH, "a", OTHER))

        assert copies(folder) == []
        with pytest.raises(ObjectMissingError):
            tier.get(PATH)

    def test_replaced_object_has_no_copy(self, store: WatchedObjects, folder: Path) -> None:
        """A repair replaces row files."""
        tier = tier_of(store, folder)
        tier.get(PATH)
        tier.put(PATH, b"repaired")

        assert tier.get(PATH) == b"repaired"

    @pytest.mark.parametrize(
        "path", ["_delta_log/00000000000000000001.json", "a", f"{PATH}.crc", "c/part-0.parquet"]
    )
    def test_only_row_files_are_kept(self, store: WatchedObjects, folder: Path, path: str) -> None:
        """Other files may change."""
        tier = tier_of(store, folder)
        for data in (b"first", b"second"):
            store.put(path, data)
            assert (tier.get(path), tier.read_tail(path, 2)) == (data, Tail(data[-2:], len(data)))
            assert tier.read_ranges(path, [ByteRange(0, 3)]) == [data[:3]]
        assert not folder.exists()

    def test_stores_with_same_path_do_not_mix(self, folder: Path) -> None:
        stores = [MemoryObjects(), MemoryObjects()]
        tiers = [tier_of(store, folder) for store in stores]
        for number, tier in enumerate(tiers):
            tier.put_if_absent(PATH, bytes([number]))

        assert [tier.get(PATH) for tier in tiers] == [b"\0", b"\1"]
        assert len(copies(folder)) == 2

    def test_copies_are_private(self, store: WatchedObjects, folder: Path) -> None:
        tier_of(store, folder).get(PATH)

        for path in (folder, *folder.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


class TestDamage:
    def test_flipped_bit_of_copy_is_never_read(self, store: WatchedObjects, folder: Path) -> None:
        tier, data = tier_of(store, folder), DATA[: 2 * CHUNK_BYTES + 77]
        tier.put_if_absent(OTHER, data)
        (copy,) = copies(folder)
        whole = copy.read_bytes()
        places = [*range(48), *range(48, len(whole), 1_009), len(whole) - 1]
        for place in places:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            copy.write_bytes(flipped)
            assert tier.read_ranges(OTHER, [ByteRange(5, len(data) - 5)]) == [data[5:-5]], place
            assert tier.read_tail(OTHER, len(data)) == Tail(data, len(data)), place
            store.calls.clear()
            assert tier.get(OTHER) == data
            assert store.calls == []
        assert tier.damaged > len(places) // 2

    def test_truncated_copy_is_completed_from_store(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)
        (copy,) = copies(folder)
        whole = copy.read_bytes()
        for size_bytes in (0, 1, 19, 20, 33, 50, 4_095, 4_096, 5_000, 4_096 + CHUNK_BYTES, len(whole) - 1):
            copy.write_bytes(whole[:size_bytes])
            assert tier.get(PATH) == DATA, size_bytes
            assert copy.read_bytes() == whole

    def test_misplaced_copy_is_not_read(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.put_if_absent(OTHER, DATA[::-1])
        tier.get(PATH)
        first, second = copies(folder)
        shutil.copy(first, second)
        assert (tier.get(PATH), tier.get(OTHER)) == (DATA, DATA[::-1])
        content = bytearray(first.read_bytes())
        begin = 4_096
        content[begin : begin + CHUNK_BYTES] = content[begin + CHUNK_BYTES : begin + 2 * CHUNK_BYTES]
        content[32:36] = content[36:40]
        first.write_bytes(content)
        assert (tier.get(PATH), tier.get(OTHER)) == (DATA, DATA[::-1])

    def test_object_truncated_in_store_is_read_unchanged(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.read_tail(PATH, 10)
        store.below.put(PATH, DATA[:1_000])

        assert tier.read_ranges(PATH, [ByteRange(900, 1_100)]) == [DATA[900:1_000]]
        assert tier.get(PATH) == DATA[:1_000]

    def test_forgotten_object_is_read_from_store(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)
        store.below.put(PATH, b"repaired")

        assert tier.get(PATH) == DATA
        assert forget_copy(tier, PATH)
        assert not forget_copy(tier, PATH)
        assert not forget_copy(store, PATH)
        assert tier.get(PATH) == b"repaired"


class TestDiskFailures:
    @pytest.mark.parametrize("make", ["file", "others_may_write", "link"])
    def test_unusable_folder_warns_once(
        self, store: WatchedObjects, folder: Path, make: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = folder.with_name("target")
        target.mkdir(mode=0o700)
        if make == "file":
            folder.write_bytes(b"")
        elif make == "link":
            folder.symlink_to(target)
        else:
            folder.mkdir()
            folder.chmod(0o777)
        clock = ManualClock()
        tier = DiskTier(store, DiskFolder(folder, BUDGET_BYTES, clock), clock)
        for _ in range(3):
            assert tier.get(PATH) == DATA
            assert tier.read_ranges(PATH, [ByteRange(3, 9)]) == [DATA[3:9]]
            assert tier.read_tail(PATH, 3) == Tail(DATA[-3:], len(DATA))
            clock.advance_ms(61_000)

        (warning,) = warnings(caplog)
        assert str(folder) in warning
        assert [*target.iterdir()] == []

    def test_full_disk_only_loses_copy(
        self,
        store: WatchedObjects,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The disk is used again later."""
        clock, pwrite, takes = ManualClock(), os.pwrite, [40, 7]

        def full(file: int, data: memoryview, at: int) -> int:
            if not takes:
                raise OSError(errno.ENOSPC, "no space")
            return pwrite(file, data[: takes.pop()], at)

        monkeypatch.setattr(disk_copy.os, "pwrite", full)
        tier = DiskTier(store, DiskFolder(folder, BUDGET_BYTES, clock), clock)
        for _ in range(2):
            assert tier.get(PATH) == DATA
        monkeypatch.undo()
        clock.advance_ms(61_000)
        assert tier.get(PATH) == DATA
        store.calls.clear()
        assert tier.get(PATH) == DATA

        assert store.calls == []
        assert len(warnings(caplog)) == 1

    def test_unreadable_disk_falls_back_to_store(
        self, store: WatchedObjects, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)
        pread, passes = os.pread, 0

        def broken(file: int, size: int, at: int) -> bytes:
            nonlocal passes
            if passes:
                passes -= 1
                return pread(file, size, at)
            raise OSError(errno.EIO, "broken")

        for passed in range(3):
            with monkeypatch.context() as patch:
                passes = passed
                patch.setattr(disk_copy.os, "pread", broken)
                assert tier_of(store, folder).get(PATH) == DATA

    def test_deleted_folder_is_created_again(self, store: WatchedObjects, folder: Path) -> None:
        tier = tier_of(store, folder)
        tier.get(PATH)
        shutil.rmtree(folder)

        assert tier.get(PATH) == DATA
        assert len(copies(folder)) == 1

    def test_failed_header_leaves_no_open_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[int] = []
        close = os.close

        def fail(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no space")

        def noted(file: int) -> None:
            closed.append(file)
            close(file)

        folder.mkdir()
        monkeypatch.setattr(disk_copy.os, "pwrite", fail)
        monkeypatch.setattr(disk_copy.os, "close", noted)
        with pytest.raises(OSError, match="no space"):
            DiskCopy.create(str(folder / "a"), b"name", 10)
        assert len(closed) == 1


def read_all(root: str, folder: str, seed: int) -> None:
    rng, clock = SeededRng(seed), SystemClock()
    tier = DiskTier(LocalObjects(root), DiskFolder(folder, BUDGET_BYTES, clock), clock)
    for _ in range(60):
        start = int(rng.random() * len(DATA))
        part = ByteRange(start, start + int(rng.random() * 2 * CHUNK_BYTES))
        if tier.read_ranges(PATH, [part]) != [DATA[part.start : part.end]]:
            raise SystemExit(1)
        if rng.random() < 0.1:
            tier.forget(PATH)
    if tier.damaged:
        raise SystemExit(2)


class TestSharing:
    def test_processes_share_folder(self, tmp_path: Path, folder: Path) -> None:
        root = tmp_path / "store"
        LocalObjects(root).put(PATH, DATA)
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=read_all, args=(str(root), str(folder), seed)) for seed in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

        assert [process.exitcode for process in processes] == [0] * PROCESSES

    def test_threads_share_tier(self, store: WatchedObjects, folder: Path) -> None:
        tier, wrong = tier_of(store, folder), []

        def read(seed: int) -> None:
            rng = SeededRng(seed)
            for _ in range(100):
                start = int(rng.random() * len(DATA))
                if tier.read_ranges(PATH, [ByteRange(start, start + 70_000)]) != [
                    DATA[start : start + 70_000]
                ]:
                    wrong.append(start)
                if rng.random() < 0.1:
                    tier.forget(PATH)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []
        assert tier.damaged == 0
