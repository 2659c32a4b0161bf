"""Retention: the disk space that readable old versions cost.

A pipeline keeps a row per key, and each superstep updates a random part of the keys; compaction is as by default.
For days of a simulated clock nothing is collected, and the log shows the lifetime and size of each file. From these
follow the bytes on disk at any moment for each retention: live files, and files and commits that went less than the
retention ago. Garbage between two rounds of collection comes on top, so one retention is run as well, to compare its
real disk with the calculation.

    python -m benchmarks.retention --json build/bench/retention.json
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import orjson

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

_RETENTIONS_S: Final = {"0s": 0, "10m": 600, "1h": 3_600, "6h": 21_600, "12h": 43_200, "1d": 86_400}
_STEADY: Final = 0.5
_LOOKS: Final = 200


class Profile(Computation):
    """Keeps a profile of a key, 100 bytes that change each time."""

    def process_record(self, context: Context, record: Record) -> None:
        number = record.value["number"]
        context.state.set({"seen": number, "text": hashlib.shake_128(str(number).encode()).hexdigest(50)})


@dataclass(frozen=True, slots=True)
class Life:
    """A file: when it came, when it went, and how long it is."""

    came_s: float
    went_s: float
    size_bytes: int


def disk_ratio(files: Sequence[Life], log: Sequence[Life], kept_s: float, end_s: float) -> float:
    """Return the greatest ratio of the bytes on disk to the live bytes, once it is steady, for a retention of ``kept_s``.

    Example:
        >>> files = [Life(n, n + 1, 100) for n in range(100)]
        >>> disk_ratio(files, [], kept_s=10, end_s=100)
        11.0
    """
    greatest = 0.0
    for look in range(_LOOKS):
        now_s = end_s * (_STEADY + (1 - _STEADY) * look / _LOOKS)
        live = sum(file.size_bytes for file in files if file.came_s <= now_s < file.went_s)
        disk = sum(
            file.size_bytes
            for file in (*files, *log)
            if file.came_s <= now_s and file.went_s > now_s - kept_s
        )
        greatest = max(greatest, disk / live)
    return round(greatest, 2)


def measure_retention(
    folder: Path,
    *,
    hours: float,
    superstep_s: float,
    keys: int,
    records: int,
    intervals: int = 1,
    check: str = "1h",
) -> dict[str, Any]:
    """Run the pipeline without collection for ``hours`` of its clock, and calculate the cost of each retention.

    The retention ``check`` is run as well; "" for none.

    Returns:
        ``ratio_R`` for each retention R of at most half the run, ``ratio_R_run`` of ``check``, ``live_bytes``, and
        ``updates_per_key_per_day``.
    """
    supersteps = int(hours * 3_600 / superstep_s)
    open_pond = partial(_open, keys=keys, records=records, superstep_s=superstep_s, intervals=intervals)
    with open_pond(folder / "kept", "3650d") as pond:
        pond.play(supersteps)
        files, log = _lives(folder / "kept" / "rows", superstep_s)
        live_bytes = pond.store.committer.snapshot.size_bytes
    figures: dict[str, Any] = {
        "hours": hours,
        "superstep_s": superstep_s,
        "keys": keys,
        "intervals": intervals,
        "updates_per_key_per_day": round(records / superstep_s * 86_400 / keys, 2),
        "live_bytes": live_bytes,
    }
    for name, kept_s in _RETENTIONS_S.items():
        if kept_s <= hours * 3_600 * _STEADY:
            figures[f"ratio_{name}"] = disk_ratio(files, log, kept_s, hours * 3_600)
    if not check:
        return figures
    greatest = 0.0
    with open_pond(folder / "run", check) as pond:
        for number in range(supersteps):
            pond.play(1)
            if number >= supersteps * _STEADY and number % 20 == 0:
                disk = sum(
                    path.stat().st_size for path in (folder / "run" / "rows").rglob("*") if path.is_file()
                )
                greatest = max(greatest, disk / pond.store.committer.snapshot.size_bytes)
    return figures | {f"ratio_{check}_run": round(greatest, 2)}


@dataclass(slots=True)
class _Pond:
    store: Store
    run: LocalRun
    clock: ManualClock
    rng: SeededRng
    keys: int
    records: int
    superstep_s: float
    number: int = 0

    def play(self, supersteps: int) -> None:
        for _ in range(supersteps):
            rows = [
                {
                    "key": f"key-{int(self.rng.random() * self.keys):07d}",
                    "number": self.number + n,
                    "at": self.clock.now_us(),
                }
                for n in range(self.records)
            ]
            self.number += self.records
            self.clock.advance_ms(self.superstep_s * 1_000)
            self.run.inject("records", rows)
            self.run.step()


@contextmanager
def _open(
    folder: Path, retention: str, *, keys: int, records: int, superstep_s: float, intervals: int
) -> Iterator[_Pond]:
    clock, registry = ManualClock(), MemoryRegistry()
    pipeline = Pipeline("retention")
    records_in = pipeline.inject("records", key="key", at="at", watermark=BoundedDisorder("1s"))
    records_in.apply(Profile(), name="profiles")
    with Store.open(
        folder, clock=clock, leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer)
    ) as store:
        upkeep = UpkeepPolicy(retention=retention)
        runner = LocalRunner(store, clock=clock, intervals=intervals, progress=False, upkeep=upkeep)
        with runner.start(pipeline, stepping=True) as run:
            run.inject(
                "records", [{"key": f"key-{n:07d}", "number": n, "at": clock.now_us()} for n in range(keys)]
            )
            while run.step() is not None:
                pass
            yield _Pond(store, run, clock, SeededRng(1), keys, records, superstep_s)


def _lives(rows: Path, superstep_s: float) -> tuple[list[Life], list[Life]]:
    """Row files and commits, timed by the commits."""
    came: dict[str, tuple[float, int]] = {}
    files, commits = [], []
    for path in sorted((rows / "_delta_log").glob("*.json")):
        actions = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        at_s = next(action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action) / 1_000
        commits.append((at_s, path.stat().st_size))
        for action in actions:
            if "add" in action:
                came[action["add"]["path"]] = (at_s, action["add"]["size"])
            if "remove" in action:
                since_s, size = came.pop(action["remove"]["path"])
                files.append(Life(since_s, at_s, size))
    files += [Life(since_s, float("inf"), size) for since_s, size in came.values()]
    start_s = commits[0][0] - superstep_s
    ends = [*(at_s for at_s, _ in commits[1:]), float("inf")]
    log = [
        Life(at_s - start_s, end_s - start_s, size) for (at_s, size), end_s in zip(commits, ends, strict=True)
    ]
    return [Life(one.came_s - start_s, one.went_s - start_s, one.size_bytes) for one in files], log


@click.command()
@click.option("--hours", default=48.0, show_default=True)
@click.option(
    "--superstep", "superstep_s", default=60.0, show_default=True, help="Seconds between supersteps."
)
@click.option("--keys", default=20_000, show_default=True)
@click.option("--records", default=250, show_default=True, help="Records of a superstep.")
@click.option("--intervals", default=1, show_default=True, help="Into how many the keys are divided.")
@click.option(
    "--check", default="1h", show_default=True, help="The retention that is run as well; '' for none."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Where the figures go.")
def main(
    hours: float,
    superstep_s: float,
    keys: int,
    records: int,
    intervals: int,
    check: str,
    json_path: Path | None,
) -> None:
    """Measure, and print one figure a line."""
    with tempfile.TemporaryDirectory(prefix="millpond-retention-") as folder:
        figures = measure_retention(
            Path(folder),
            hours=hours,
            superstep_s=superstep_s,
            keys=keys,
            records=records,
            intervals=intervals,
            check=check,
        )
    for name, value in figures.items():
        click.echo(f"{name:28} {value}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
