"""Injection of a directory's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.directory_injector import FILE_ROW, DirectoryInjector
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MIN_US
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Count(Computation):
    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + 1)


class Disk:
    """A store in memory that runs share in turn."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock = ManualClock(0)
        self.stores: list[Store] = []

    def run(self, row_id: str | None = FILE_ROW) -> LocalRun:
        """Start a pipeline that counts the rows of each key."""
        pipeline = EnginePipeline("files")
        stream = pipeline.inject("rows", key="k", at="t", id=row_id, watermark=ManualWatermark())
        stream.apply(Count(), name="count")
        store = Store.in_memory(
            objects=self.objects, registry=self.registry, clock=self.clock, rng=SeededRng(1)
        )
        self.stores.append(store)
        runner = LocalRunner(store, clock=self.clock, rng=SeededRng(2), progress=False)
        return runner.start(pipeline, stepping=True)

    def counts(self) -> dict[str, str]:
        rows = self.stores[-1].rows_view("count").to_arrow().to_pylist()
        return {row["key"]: row["state"] for row in rows}


def write(folder: Path, created: int, *keys: str, mode: str = "w") -> Path:
    """Write a file named by its time of creation, with a row for each key."""
    path = folder / f"{created}.log"
    with path.open(mode) as file:
        file.writelines(json.dumps({"k": key, "t": created + 1}) + "\n" for key in keys)
    return path


def read(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def injector(run: LocalRun, folder: Path, **options: Any) -> DirectoryInjector:
    return DirectoryInjector(
        run, "rows", folder, read=read, created=lambda path: int(path.stem), pattern="*.log", **options
    )


def test_oldest_unfinished_file_holds_the_watermark(tmp_path):
    """The order in which files are found does not matter; the last watermark stays."""
    run = Disk().run()
    still_open = {tmp_path / "200.log"}
    files = injector(run, tmp_path, is_closed=lambda path: path not in still_open)
    for created in (300, 100, 200):
        write(tmp_path, created, "a")

    assert files.poll() == 2
    run.run_until_quiet()
    assert run.watermark("count") == files.mark == 200
    still_open.clear()
    write(tmp_path, 400, "a")

    assert files.poll() == 2
    run.run_until_quiet()
    assert (run.watermark("count"), files.mark) == (400, None)


def test_empty_directory_has_no_watermark(tmp_path):
    run = Disk().run()

    assert injector(run, tmp_path).poll() == 0
    assert run.watermark("count") == TIME_MIN_US


def test_new_rows_of_a_growing_file_are_injected_once(tmp_path):
    disk = Disk()
    run, closed = disk.run(), set()
    files = injector(run, tmp_path, is_closed=closed.__contains__)
    path = write(tmp_path, 100, "a", "b")
    files.poll()
    write(tmp_path, 100, "b", mode="a")
    closed.add(path)

    assert files.poll() == 1
    assert disk.counts() == {"a": "1", "b": "2"}
    assert run.summary().totals.duplicates == 0


def test_rows_count_once_after_a_restart(tmp_path):
    """The directory is read again, and durable rows are duplicates."""
    disk = Disk()
    write(tmp_path, 100, "a", "b")
    with disk.run() as run:
        injector(run, tmp_path).poll()
    write(tmp_path, 50, "c")

    with disk.run() as run:
        injector(run, tmp_path).poll()
        totals = run.summary().totals

    assert disk.counts() == {"a": "1", "b": "1", "c": "1"}
    assert (totals.duplicates, totals.late) == (2, 1)


def test_finished_file_can_be_deleted(tmp_path):
    """All its rows are durable by then."""
    disk = Disk()
    run = disk.run()
    write(tmp_path, 100, "a")
    seen: list[dict[str, str]] = []

    def finished(path: Path) -> None:
        seen.append(disk.counts())
        path.unlink()

    files = injector(run, tmp_path, finished=finished)

    assert files.poll() == 1
    assert (seen, files.poll()) == ([{"a": "1"}], 0)


def test_rows_are_late_only_in_files_older_than_a_finished_one(tmp_path):
    run = Disk().run()
    files = injector(run, tmp_path)
    for created in (10, 30, 20):
        write(tmp_path, created, "a", "b")
        files.poll()
    for created in (40, 50):
        write(tmp_path, created, "a")

    files.poll()

    assert run.summary().totals.late == 2  # from 20.log, which appeared after 30.log was finished


def test_stream_without_ids_is_refused(tmp_path):
    """Its rows would count twice after a crash."""
    with pytest.raises(InvalidError, match="need ids"):
        injector(Disk().run(row_id=None), tmp_path)


def test_unreadable_file_is_unavailable_and_unfinished(tmp_path):
    """The caller may retry."""

    def fail(path: Path) -> Any:
        raise PermissionError(path)

    write(tmp_path, 100, "a")
    files = DirectoryInjector(Disk().run(), "rows", tmp_path, read=fail, created=lambda path: int(path.stem))

    with pytest.raises(UnavailableError):
        files.poll()
    assert files.mark == 100
