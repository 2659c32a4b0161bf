"""Garbage: the cost of a long-running store in bytes, files and time.

The pipeline counts the records of each key in windows of a minute and keeps a running sum of the counts of closed
windows; records have ids, of which the last minute is kept. Each superstep is a second of event time and of
the clock that retention uses, so 2,000 supersteps are half an hour of a Spark pipeline. Retention is zero:
files that no reader needs should be deleted. The figures:

- bytes on disk (data, log and checkpoints) against the bytes of live files, at the worst moment and at the end;
- the files of an interval at most;
- point reads of the final store and of a copy made at its start, in turns, so that other load on the machine
  affects both;
- commits of a store at version 10,000 and of one at version 100, in turns.

    python -m benchmarks.garbage --supersteps 2000 --keys 10000 --json build/bench/garbage.json
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.engine_result import percentile
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock
from millpond.statestore.view import RowsView
from millpond.testing.fixtures.determinism import ManualClock

POLICY: Final = UpkeepPolicy(compaction=CompactionPolicy(), retention="0s", collect_every=512)
"""Compactions as by default; nothing is kept for readers of older versions."""

_PROFILE_BYTES: Final = 100
_SECOND_US: Final = 1_000_000
_RECORDS: Final = 250
_READS: Final = 400
_TURNS: Final = 200
_START: Final = 0.1
_LOOK_EVERY: Final = 10


class Total(Computation):
    """Sums the window counts of a key, and keeps a profile that changes each time."""

    def process_record(self, context: Context, record: Record) -> None:
        total = (context.state.get() or {"total": 0})["total"] + record.value["value"]["count"]
        profile = hashlib.shake_128(f"{record.key}/{total}".encode()).hexdigest(_PROFILE_BYTES)
        context.state.set({"total": total, "profile": profile})


def build() -> Pipeline:
    """A windowed count with ids, followed by a total per key."""
    pipeline = Pipeline("garbage")
    records = pipeline.inject(
        "records", key="key", at="at", id="id", watermark=BoundedDisorder("1s"), id_slack="1m"
    )
    counts = records.window(FixedWindows("1m")).combine(
        Count(), name="counts", result=lambda key, count, _: {"key": key, "count": count}
    )
    counts.apply(Total(), name="totals", key=lambda envelope: envelope["value"]["key"])
    return pipeline


@dataclass(slots=True)
class Pond:
    """A store on disk, and the pipeline that is stepped over it."""

    store: Store
    run: LocalRun
    clock: Clock
    keys: int
    records: int
    second: int = 0
    injected: int = 0

    def step(self) -> float:
        """Run a superstep with a second of records; returns the duration of its commit in milliseconds."""
        rows = []
        for number in range(self.injected, self.injected + self.records):
            key = number * 7_919 % self.keys
            rows.append({"key": f"key-{key:06d}", "at": self.second * _SECOND_US, "id": number})
        self.injected += self.records
        self.second += 1
        if isinstance(self.clock, ManualClock):
            self.clock.advance_ms(1_000)
        self.run.inject("records", rows)
        report = self.run.step()
        return 0.0 if report is None else report.commit_ms

    def files_per_interval(self) -> int:
        """The greatest number of live files of an interval."""
        counts = Counter(file.interval_id for file in self.store.committer.snapshot.files)
        return max(counts.values(), default=0)


def measure_garbage(supersteps: int, keys: int, folder: Path, reads: int = _READS) -> dict[str, Any]:
    """Run the pipeline; measure the store's size and point reads.

    Returns:
        ``disk_bytes``, ``live_bytes`` and ``ratio`` at the end, ``ratio_max`` over the second half of the run,
        ``log_bytes``, ``files_per_interval_max``, ``read_files_start`` and ``read_files_end`` (files that a point
        read looks at), and ``read_start_p99_ms``, ``read_end_p99_ms`` and ``read_ratio``.
    """
    pond_folder, copy = folder / "pond", folder / "start"
    ratios, most = [], 0
    with _open(pond_folder, ManualClock(), keys, _RECORDS) as pond:
        for number in range(supersteps):
            if number == int(supersteps * _START):
                shutil.copytree(pond_folder / "rows", copy / "rows")
            pond.step()
            if number % _LOOK_EVERY == 0:
                most = max(most, pond.files_per_interval())
                if number >= supersteps // 2:
                    ratios.append(_disk_bytes(pond_folder) / pond.store.committer.snapshot.size_bytes)
        disk, live = _disk_bytes(pond_folder), pond.store.committer.snapshot.size_bytes
        figures = {
            "supersteps": supersteps,
            "keys": keys,
            "versions": int(pond.store.committer.snapshot.version),
            "records": pond.injected,
            "disk_bytes": disk,
            "log_bytes": _disk_bytes(pond_folder, "rows/_delta_log"),
            "live_bytes": live,
            "live_rows": sum(pond.store.rows_view(name).to_arrow().num_rows for name in ("counts", "totals")),
            "ratio": round(disk / live, 2),
            "ratio_max": round(max([*ratios, disk / live]), 2),
            "files_per_interval_max": most,
        }
        return figures | _read(pond, copy, reads)


def measure_commits(versions: int, folder: Path, turns: int = _TURNS) -> dict[str, Any]:
    """Compare commits of an old store, at ``versions``, and a young one, in turns.

    Returns:
        ``commit_young_p50_ms`` around version 100, ``commit_old_p50_ms`` from ``versions`` on, ``commit_ratio``.
    """
    clock = SystemClock()
    with (
        _open(folder / "old", clock, 1_000, 10) as old,
        _open(folder / "young", clock, 1_000, 10) as young,
    ):
        while old.store.committer.snapshot.version < versions:
            old.step()
        while young.store.committer.snapshot.version < 100:
            young.step()
        both = [(young.step(), old.step()) for _ in range(turns)]
        young_ms = percentile([first for first, _ in both], 0.5)
        old_ms = percentile([second for _, second in both], 0.5)
        return {
            "commit_version": int(old.store.committer.snapshot.version),
            "commit_young_p50_ms": round(young_ms, 3),
            "commit_old_p50_ms": round(old_ms, 3),
            "commit_ratio": round(old_ms / young_ms, 2),
        }


@contextmanager
def _open(folder: Path, clock: Clock, keys: int, records: int) -> Iterator[Pond]:
    registry = MemoryRegistry()
    with Store.open(
        folder, clock=clock, leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id)
    ) as store:
        runner = LocalRunner(store, clock=clock, progress=False, upkeep=POLICY)
        with runner.start(build(), stepping=True) as run:
            yield Pond(store, run, clock, keys, records)


def _read(pond: Pond, copy: Path, reads: int) -> dict[str, Any]:
    """Reads of random single keys, of the store at its start and now, in turns."""
    clock, rng = SystemClock(), SystemRng()
    with Store.open(copy, read_only=True) as early:
        views = [
            RowsView.of(early.snapshot(), early.objects, "totals"),
            RowsView.of(pond.store.snapshot(), pond.store.objects, "totals"),
        ]
        times: list[list[float]] = [[], []]
        for _ in range(reads):
            key = f"key-{int(rng.random() * pond.keys):06d}"
            for view, times_ms in zip(views, times, strict=True):
                started_us = clock.monotonic_us()
                view.to_arrow([key])
                times_ms.append((clock.monotonic_us() - started_us) / 1_000)
    start, end = (percentile(times_ms, 0.99) for times_ms in times)
    return {
        "read_files_start": len(views[0].files),
        "read_files_end": len(views[1].files),
        "read_start_p50_ms": round(percentile(times[0], 0.5), 3),
        "read_end_p50_ms": round(percentile(times[1], 0.5), 3),
        "read_start_p99_ms": round(start, 3),
        "read_end_p99_ms": round(end, 3),
        "read_ratio": round(end / start, 2),
    }


def _disk_bytes(folder: Path, part: str = "rows") -> int:
    return sum(path.stat().st_size for path in (folder / part).rglob("*") if path.is_file())


@click.command()
@click.option("--supersteps", default=2_000, show_default=True)
@click.option("--keys", default=10_000, show_default=True)
@click.option(
    "--versions", default=10_000, show_default=True, help="Age of the store whose commits are timed."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the figures go.")
def main(supersteps: int, keys: int, versions: int, json_path: Path | None) -> None:
    """Measure, print one figure a line, and hold them against their bounds."""
    with tempfile.TemporaryDirectory(prefix="millpond-garbage-") as folder:
        figures = measure_garbage(supersteps, keys, Path(folder)) | measure_commits(versions, Path(folder))
    for name, value in figures.items():
        click.echo(f"{name:24} {value}")
    limits = {"ratio": 3.0, "files_per_interval_max": POLICY.compaction.files_max + POLICY.compaction.fan_in}
    limits |= {"read_ratio": 1.5, "commit_ratio": 1.5}
    missed = [name for name, limit in limits.items() if figures[name] > limit]
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps(figures | {"limits": limits, "missed": missed}, indent=2), encoding="utf-8"
        )
    click.echo(f"missed: {', '.join(missed)}" if missed else "all within their bounds")


if __name__ == "__main__":
    main()
