"""The time of a commit, by the size of the table and its number of live files.

A commit is the end of a superstep: write a file of 100 row updates, check the fence on the newest
snapshot, put one log entry. Tables of all sizes take turns, one commit each, so that other load on
the machine affects all of them alike. Each commit removes the previous commit's file, which keeps
the number of live files constant, and makes the commit slightly more expensive than a superstep's.

    python -m benchmarks.commit_time --commits 200
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import pyarrow as pa

from benchmarks.engine_result import percentile
from millpond.statestore.interval import Interval
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import CommitNumber, Sequencer, Superstep

SHAPES: Final = tuple((keys, files) for keys in (10_000, 1_000_000) for files in (10, 1_000))
"""Numbers of keys and live files of the tables."""

_UPDATES: Final = 100
_WARM_UP: Final = 20
_INTERVAL: Final = Interval("count", "", None)
_MS: Final = 1_000


@dataclass(slots=True)
class Table:
    """A table of a given size, with one writer."""

    store: Store
    keys: int
    live_files: int
    fence: Fence = field(init=False)
    superstep: int = 0
    last: RowFile | None = None
    file_ms: list[float] = field(default_factory=list)
    commit_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the lease, and fill the table in one commit."""
        lease = self.store.leases.take(_INTERVAL, above=Sequencer(0))
        self.fence = Fence(lease.sequencer, CommitNumber(0))
        self._commit("fence", ())
        per_file = self.keys // self.live_files
        step = self._next()
        files = [
            self._write(self._updates(range(first, first + per_file), step), step)
            for first in range(0, self.keys, per_file)
        ]
        self._commit("superstep", tuple(files))

    def measure(self) -> None:
        """Commit 100 updates spread over all keys, and record the times of the file and of the log entry."""
        clock = SystemClock()
        step = self._next()
        updates = self._updates(range(self.superstep % 7, self.keys, self.keys // _UPDATES), step)
        started_us = clock.monotonic_us()
        file = self._write(updates, step)
        written_us = clock.monotonic_us()
        self._commit("superstep", (file,), () if self.last is None else (self.last.path,))
        self.file_ms.append((written_us - started_us) / _MS)
        self.commit_ms.append((clock.monotonic_us() - written_us) / _MS)
        self.last = file

    def to_json(self) -> dict[str, Any]:
        """Percentiles, and every raw time."""
        file_ms, commit_ms = self.file_ms[_WARM_UP:], self.commit_ms[_WARM_UP:]
        total_ms = [sum(pair) for pair in zip(file_ms, commit_ms, strict=True)]
        return {
            "keys": self.keys,
            "live_files": self.live_files,
            "p50_ms": round(percentile(total_ms, 0.5), 3),
            "p99_ms": round(percentile(total_ms, 0.99), 3),
            "file_p50_ms": round(percentile(file_ms, 0.5), 3),
            "log_entry_p50_ms": round(percentile(commit_ms, 0.5), 3),
            "updates": _UPDATES,
            "commits": len(total_ms),
            "commit_ms": [round(total, 3) for total in total_ms],
        }

    def _next(self) -> Superstep:
        self.superstep += 1
        self.fence = Fence(self.fence.sequencer, CommitNumber(self.fence.commit_number + 1))
        return Superstep(self.superstep)

    def _updates(self, keys: range, superstep: Superstep) -> pa.Table:
        rows = len(keys)
        columns: dict[str, Any] = {
            "key": [f"key-{key:09d}" for key in keys],
            "sequencer": [self.fence.sequencer] * rows,
            "commit_number": [self.fence.commit_number] * rows,
            "superstep": [superstep] * rows,
            "state": [f'{{"count":{key}}}' for key in keys],
            "deleted": [False] * rows,
        }
        arrays = [
            pa.array(columns[column.name], column.type)
            if column.name in columns
            else pa.nulls(rows, column.type)
            for column in ROW_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=ROW_SCHEMA)

    def _write(self, updates: pa.Table, superstep: Superstep) -> RowFile:
        return write_row_file(
            self.store.objects,
            _INTERVAL,
            updates,
            superstep=superstep,
            fence=self.fence,
            token=SystemRng().token(),
        )

    def _commit(self, kind: str, added: tuple[RowFile, ...], removed: tuple[str, ...] = ()) -> None:
        write = IntervalWrite(interval=_INTERVAL, fence=self.fence, added=added, removed=removed)
        positions = {"millpond/superstep/benchmark": self.superstep} if added else {}
        self.store.committer.commit(CommitRequest(kind=kind, writes=(write,), positions=positions))


def measure(commits: int = 200, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[dict[str, Any]]:
    """Measure commits on tables of all shapes, in turns.

    Args:
        commits: number of commits on each table, without the warm-up.
        shapes: keys and live files of each table.
    """
    with _tables(shapes) as tables:
        for turn in range(commits + _WARM_UP):
            first = turn % len(tables)
            for table in tables[first:] + tables[:first]:
                table.measure()
        return [table.to_json() for table in tables]


@contextmanager
def _tables(shapes: tuple[tuple[int, int], ...]) -> Iterator[list[Table]]:
    """The tables, on disk as in production, with one ZooKeeper for all."""
    with ExitStack() as resources:
        work = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="millpond-commits-")))
        server = EmbeddedZooKeeper(work / "zookeeper", SystemClock(), SystemRng(), is_open=True)
        hosts = server.start_or_join()
        resources.callback(server.close)
        yield [
            Table(resources.enter_context(Store.open(work / f"{keys}-{files}", zookeeper=hosts)), keys, files)
            for keys, files in shapes
        ]


@click.command(help=__doc__)
@click.option("--commits", type=click.IntRange(1), default=200, show_default=True)
def main(commits: int) -> None:
    """Measure and print a line of JSON for each table."""
    for result in measure(commits):
        result.pop("commit_ms")
        print(json.dumps(result))


if __name__ == "__main__":
    main()
