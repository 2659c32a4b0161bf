"""A directory of files: the oldest unfinished one holds the watermark, and no row counts twice."""

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
    """Counts."""

    def process_record(self, context: Any, record: Any) -> None:
        """One more."""
        context.state.set(context.state.get(0) + 1)


class Disk:
    """A store in memory that runs may share, one after the other."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock = ManualClock(0)
        self.stores: list[Store] = []

    def run(self, row_id: str | None = FILE_ROW) -> LocalRun:
        """A run of a pipeline that counts the rows of each key."""
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
        """The count of each key."""
        rows = self.stores[-1].rows_view("count").to_arrow().to_pylist()
        return {row["key"]: row["state"] for row in rows}


def write(folder: Path, created: int, *keys: str, mode: str = "w") -> Path:
    """A file whose name says when it was created, with a row for each key."""
    path = folder / f"{created}.log"
    with path.open(mode) as file:
        file.writelines(json.dumps({"k": key, "t": created + 1}) + "\n" for key in keys)
    return path


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file."""
    for line in path.read_text().splitlines():
        yield json.loads(line)


def injector(run: LocalRun, folder: Path, **options: Any) -> DirectoryInjector:
    """The directory's injector."""
    return DirectoryInjector(
        run, "rows", folder, read=read, created=lambda path: int(path.stem), pattern="*.log", **options
    )


def test_the_watermark_is_that_of_the_oldest_unfinished_file(tmp_path):
    """Finished files count no more, whatever order they were found in; the last mark stays."""
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


def test_an_empty_directory_says_nothing(tmp_path):
    """Without files there is no watermark."""
    run = Disk().run()

    assert injector(run, tmp_path).poll() == 0
    assert run.watermark("count") == TIME_MIN_US


def test_a_file_may_grow_until_it_is_closed(tmp_path):
    """Only its new rows are injected."""
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


def test_nothing_counts_twice_after_a_restart(tmp_path):
    """The directory is read again, and rows that are durable already are duplicates."""
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


def test_finished_files_may_leave(tmp_path):
    """Who is told of a finished file may delete it, for all its rows are durable."""
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


def test_only_files_that_appear_too_late_are_late(tmp_path):
    """The mark passes no row of a file that was there before a younger one was finished."""
    run = Disk().run()
    files = injector(run, tmp_path)
    for created in (10, 30, 20):
        write(tmp_path, created, "a", "b")
        files.poll()
    for created in (40, 50):
        write(tmp_path, created, "a")

    files.poll()

    assert run.summary().totals.late == 2  # those of 20.log, which appeared after 30.log was finished


def test_a_stream_without_ids_is_refused(tmp_path):
    """Its rows would count twice after a crash."""
    with pytest.raises(InvalidError, match="need ids"):
        injector(Disk().run(row_id=None), tmp_path)


def test_a_file_that_cannot_be_read_is_unavailable(tmp_path):
    """The error can be retried; nothing of the file counts as finished."""

    def fail(path: Path) -> Any:
        raise PermissionError(path)

    write(tmp_path, 100, "a")
    files = DirectoryInjector(Disk().run(), "rows", tmp_path, read=fail, created=lambda path: int(path.stem))

    with pytest.raises(UnavailableError):
        files.poll()
    assert files.mark == 100
