"""Facts of the disk tier's options: which stores get one, where, and how large."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond.statestore.objects.disk_tier import DEFAULT_DISK_BYTES, DiskOptions, DiskTier
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.objects.ranges import MeteredObjects
from millpond.statestore.types import Objects
from millpond.testing.fixtures.determinism import ManualClock

CLOCK = ManualClock()
CLOUD = ObstoreObjects("s3://bucket/pond", {"aws_region": "eu-central-1"})
DATA = bytes(100_000)
PATH = f"computation=c/0000000001-{'0a' * 16}.parquet"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def large_bytes(objects: Objects) -> int:
    assert isinstance(objects, DiskTier)
    return objects._folder.large_bytes


def test_only_object_stores_get_a_tier_by_default(tmp_path: Path) -> None:
    """A store in a local folder or in memory is read as it is, one on an object store through a tier."""
    for objects in (LocalObjects(tmp_path / "pond"), MemoryObjects()):
        assert DiskOptions().tier_of(objects, CLOCK) is objects
    assert isinstance(DiskOptions().tier_of(CLOUD, CLOCK), DiskTier)


def test_none_switches_it_off_and_a_number_or_a_folder_on(tmp_path: Path) -> None:
    """With a budget of 0 no store has a tier; with a budget or a folder each has one."""
    memory = MemoryObjects()
    assert DiskOptions(budget_bytes=0, folder=str(tmp_path)).tier_of(CLOUD, CLOCK) is CLOUD
    assert isinstance(DiskOptions(budget_bytes=1 << 20).tier_of(memory, CLOCK), DiskTier)
    assert isinstance(DiskOptions(folder=str(tmp_path)).tier_of(memory, CLOCK), DiskTier)


def test_it_reads_the_wrapped_store(tmp_path: Path) -> None:
    """What the tier reads of the store is counted by the store's wrapper, and what the disk has is not."""
    memory = MemoryObjects()
    memory.put(PATH, DATA)
    metered = MeteredObjects(memory)
    tier = DiskOptions(folder=str(tmp_path / "disk")).tier_of(memory, CLOCK, below=metered)
    for _ in range(3):
        assert tier.get(PATH) == DATA

    assert metered.read_bytes == len(DATA)
    assert DiskOptions().tier_of(memory, CLOCK, below=metered) is metered


def test_it_lies_in_a_folder_of_the_user(temporary: Path) -> None:
    """By default copies are in a folder of this user in the temporary folder."""
    tier = DiskOptions(budget_bytes=1 << 30).tier_of(MemoryObjects(), CLOCK)
    tier.put_if_absent(PATH, DATA)

    assert [path.name for path in temporary.iterdir()] == [f"millpond-{os.getuid()}"]


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, DEFAULT_DISK_BYTES), (10 << 20, 1 << 20)])
def test_the_default_budget_leaves_the_disk_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    """The default is 8 GiB, or a tenth of what is free where the folder will be."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * path.exists()))
    tier = DiskOptions(folder=str(tmp_path / "not" / "there")).tier_of(CLOUD, CLOCK)

    assert large_bytes(tier) == expected // 8


def test_without_any_folder_there_is_no_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the machine has no temporary folder, the store is read as it is, and a warning says so."""

    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", fail)

    assert DiskOptions().tier_of(CLOUD, CLOCK) is CLOUD
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
