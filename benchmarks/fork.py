"""Forks: the seconds and bytes that a fork of a store with many rows costs.

A store on disk gets a row per key, and is forked several times. New bytes are those that the file system keeps for the
fork alone: files that have a second name in the original are not counted, and small ones are counted by whole blocks.

    python -m benchmarks.fork --rows 1000000 --json build/bench/fork.json
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.engine_result import percentile
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.replay.fork import fork_store
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

_PIECE: Final = 100_000
_BLOCK_BYTES: Final = 512
_LIMITS: Final = {"fork_s": 1.0, "new_bytes": 1 << 20}


class Keep(Computation):
    """Keeps what came last."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set({"at": record.value["at"], "text": f"the {record.value['at']}th of them"})


def measure_forks(rows: int, folder: Path, *, times: int = 5) -> dict[str, Any]:
    """Fill a store, and fork it several times.

    Returns:
        ``files`` and ``file_bytes`` of the forked version, ``fork_s`` and ``new_bytes`` of the median fork, and
        ``copy_s`` and ``copy_bytes`` of a copy of the store's folder.
    """
    clock, registry = SystemClock(), MemoryRegistry()
    pipeline = Pipeline("forked")
    records_in = pipeline.inject("records", key="key", at="at", watermark=BoundedDisorder("1s"))
    records_in.apply(Keep(), name="kept")
    pond = folder / "pond"
    with Store.open(pond, leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer)) as store:
        with LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
            for first in range(0, rows, _PIECE):
                run.inject(
                    "records",
                    [
                        {"key": f"key-{n:09d}", "at": n * 1_000}
                        for n in range(first, min(first + _PIECE, rows))
                    ],
                )
                while run.step() is not None:
                    pass
        seconds, sizes = [], []
        with store.reading() as snapshot:
            files = [file.size_bytes for file in snapshot.files]
        for number in range(times):
            target = folder / f"fork-{number}"
            started_us = clock.monotonic_us()
            fork_store(store, target)
            seconds.append((clock.monotonic_us() - started_us) / 1e6)
            sizes.append(float(new_bytes(target)))
        started_us = clock.monotonic_us()
        shutil.copytree(pond / "rows", folder / "copy")
        copy_s = (clock.monotonic_us() - started_us) / 1e6
        return {
            "rows": store.rows_view("kept").to_arrow().num_rows,
            "files": len(files),
            "file_bytes": sum(files),
            "fork_s": round(percentile(seconds, 0.5), 3),
            "fork_max_s": round(max(seconds), 3),
            "new_bytes": int(percentile(sizes, 0.5)),
            "copy_s": round(copy_s, 3),
            "copy_bytes": new_bytes(folder / "copy"),
        }


def new_bytes(folder: Path) -> int:
    """Return the bytes that a folder adds to its disk: files with a single name, and folders."""
    stats = [path.lstat() for path in (folder, *folder.rglob("*"))]
    alone = [
        stat
        for path, stat in zip((folder, *folder.rglob("*")), stats, strict=True)
        if path.is_dir() or stat.st_nlink == 1
    ]
    return sum(stat.st_blocks * _BLOCK_BYTES for stat in alone)


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the figures go.")
def main(rows: int, json_path: Path | None) -> None:
    """Measure, print one figure a line, and hold them against their bounds."""
    with tempfile.TemporaryDirectory(prefix="millpond-fork-") as folder:
        figures = measure_forks(rows, Path(folder))
    for name, value in figures.items():
        click.echo(f"{name:24} {value}")
    missed = [name for name, limit in _LIMITS.items() if figures[name] > limit]
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps(figures | {"limits": _LIMITS, "missed": missed}, indent=2), encoding="utf-8"
        )
    click.echo(f"missed: {', '.join(missed)}" if missed else "all within their bounds")


if __name__ == "__main__":
    main()
