"""Options of the disk tier."""

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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def large_bytes(objects: Objects) -> int:
    assert isinstance(objects, DiskTier)
    return objects._folder.large_bytes


def test_only_object_stores_have_tier_by_default(tmp_path: Path) -> None:
    for objects in (LocalObjects(tmp_path / "pond"), MemoryObjects()):
        assert DiskOptions().tier_of(objects, CLOCK) is objects
    assert isinstance(DiskOptions().tier_of(CLOUD, CLOCK), DiskTier)


def test_budget_or_folder_switches_tier_on(tmp_path: Path) -> None:
    """A budget of 0 switches it off."""
    memory = MemoryObjects()
    assert DiskOptions(budget_bytes=0, folder=str(tmp_path)).tier_of(CLOUD, CLOCK) is CLOUD
    assert isinstance(DiskOptions(budget_bytes=1 << 20).tier_of(memory, CLOCK), DiskTier)
    assert isinstance(DiskOptions(folder=str(tmp_path)).tier_of(memory, CLOCK), DiskTier)


def test_tier_reads_wrapped_store(tmp_path: Path) -> None:
    memory = MemoryObjects()
    memory.put(PATH, DATA)
    metered = MeteredObjects(memory)
    tier = DiskOptions(folder=str(tmp_path / "disk")).tier_of(memory, CLOCK, below=metered)
    for _ in range(3):
        assert tier.get(PATH) == DATA

    assert metered.read_bytes == len(DATA)
    assert DiskOptions().tier_of(memory, CLOCK, below=metered) is metered


def test_default_folder_belongs_to_user(temporary: Path) -> None:
    tier = DiskOptions(budget_bytes=1 << 30).tier_of(MemoryObjects(), CLOCK)
    tier.put_if_absent(PATH, DATA)

    assert [path.name for path in temporary.iterdir()] == [f"millpond-{os.getuid()}"]


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, DEFAULT_DISK_BYTES), (10 << 20, 1 << 20)])
def test_default_budget_is_8_gib_or_tenth_of_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * path.exists()))
    tier = DiskOptions(folder=str(tmp_path / "not" / "there")).tier_of(CLOUD, CLOCK)

    assert large_bytes(tier) == expected // 8


def test_missing_temporary_folder_disables_tier_with_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", fail)

    assert DiskOptions().tier_of(CLOUD, CLOCK) is CLOUD
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
