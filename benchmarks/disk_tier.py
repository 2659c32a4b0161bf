"""Rows that are read by key from a large row file: of a store, and through the disk tier, empty and filled.

The store is a local folder of which each call takes ``--latency-ms`` longer, as a request to an object store does: the
best case of one, where all parts that are asked for come at once. Then the folder: how long a sweep of many files takes.

    python -m benchmarks.disk_tier --keys 200000 --touched 1000 --latency-ms 20
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import pyarrow as pa

from benchmarks.json_result import tell_result
from millpond.statestore.interval import Interval
from millpond.statestore.objects.disk_folder import DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.ranges import ByteRange, MeteredObjects, Tail
from millpond.statestore.rows import files
from millpond.statestore.rows.files import read_row_files, write_row_file
from millpond.statestore.rows.pages import PageIndexes
from millpond.statestore.rows.row import ROW_SCHEMA, Fence
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import CommitNumber, Objects, Sequencer, Superstep

_STATE_BYTES: Final = 400
_TIMES: Final = 5
_BUDGET_BYTES: Final = 64 << 30
_COLUMNS: Final = ["key", "state_bytes", "timers", "deleted"]
_CLOCK: Final = SystemClock()


class _Far(MeteredObjects):
    """A store whose reads take a while."""

    def __init__(self, objects: Objects, latency_ms: float) -> None:
        super().__init__(objects)
        self._latency_ms = latency_ms

    def get(self, path: str) -> bytes:
        """The object's bytes."""
        _CLOCK.sleep_ms(self._latency_ms)
        return super().get(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of the object."""
        _CLOCK.sleep_ms(self._latency_ms)
        return super().read_ranges(path, ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The last bytes of the object."""
        _CLOCK.sleep_ms(self._latency_ms)
        return super().read_tail(path, size_bytes)


def measure(keys: int, touched: int, latency_ms: float, swept: int) -> dict[str, Any]:
    """What reads of some keys take, and a sweep."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="millpond-disk-")))
        store = LocalObjects(folder / "store", "os_cache")
        path, size_bytes = _write(store, keys)
        far = _Far(store, latency_ms)
        tier = lambda name: DiskTier(far, DiskFolder(folder / name, _BUDGET_BYTES, _CLOCK), _CLOCK)  # noqa: E731
        wanted = [f"{number * (keys // touched):012d}" for number in range(touched)]
        names = iter(range(_TIMES))
        result: dict[str, Any] = {
            "keys": keys,
            "touched": touched,
            "file_mib": round(size_bytes / 2**20, 1),
            "store": _timed(far, lambda: _read(far, path, wanted)),
            "empty_tier": _timed(far, lambda: _read(tier(str(next(names))), path, wanted)),
            "full_tier": _timed(far, lambda: _read(tier("0"), path, wanted)),
        }
        return result | {"sweep": _sweep(folder / "swept", swept)}


def _write(store: Objects, keys: int) -> tuple[str, int]:
    columns: dict[str, Any] = {name: pa.nulls(keys, ROW_SCHEMA.field(name).type) for name in ROW_SCHEMA.names}
    columns["key"] = pa.array([f"{number:012d}" for number in range(keys)])
    blobs = [hashlib.shake_128(str(number).encode()).digest(_STATE_BYTES) for number in range(keys)]
    columns["state_bytes"] = pa.array(blobs, pa.binary())
    columns["deleted"] = pa.array([False] * keys)
    for name in ("superstep", "sequencer", "commit_number"):
        columns[name] = pa.array([1] * keys, ROW_SCHEMA.field(name).type)
    file = write_row_file(
        store,
        Interval("c", "", None),
        pa.table([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA),
        superstep=Superstep(1),
        fence=Fence(Sequencer(1), CommitNumber(1)),
        token=SystemRng().token(),
    )
    return file.path, file.size_bytes


def _read(objects: Objects, path: str, keys: Sequence[str]) -> None:
    # As a process that has read nothing yet.
    files.PAGE_INDEXES = PageIndexes(1 << 26)  # type: ignore[misc]
    rows = read_row_files(objects, [path], _COLUMNS, keys=keys, large=[path])
    if rows.num_rows != len(keys):
        raise click.ClickException("rows are missing")


def _timed(store: MeteredObjects, read: Callable[[], None]) -> dict[str, float]:
    took_ms, before = [], store.read_bytes
    for _ in range(_TIMES):
        begun_us = _CLOCK.monotonic_us()
        read()
        took_ms.append((_CLOCK.monotonic_us() - begun_us) / 1_000)
    return {
        "ms": round(median(took_ms), 1),
        "store_mib": round((store.read_bytes - before) / _TIMES / 2**20, 2),
    }


def _sweep(folder: Path, count: int) -> dict[str, float]:
    """Write small objects, and sweep them as the next process does."""
    objects = MemoryObjects()
    tier = DiskTier(objects, DiskFolder(folder, _BUDGET_BYTES, _CLOCK), _CLOCK)
    begun_us = _CLOCK.monotonic_us()
    for number in range(count):
        tier.put_if_absent(f"c/0000000001-{number:032x}.parquet", bytes(20_000))
    written_us = _CLOCK.monotonic_us()
    DiskFolder(folder, _BUDGET_BYTES, _CLOCK).admits(1)
    swept_us = _CLOCK.monotonic_us()
    return {
        "files": count,
        "write_us_each": round((written_us - begun_us) / count, 1),
        "sweep_ms": round((swept_us - written_us) / 1_000, 1),
    }


@click.command()
@click.option("--keys", default=200_000, show_default=True)
@click.option("--touched", default=1_000, show_default=True)
@click.option("--latency-ms", default=0.0, show_default=True)
@click.option("--swept", default=20_000, show_default=True, help="How many small files are swept.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result to a file.")
def main(keys: int, touched: int, latency_ms: float, swept: int, json_path: Path | None) -> None:
    """Measure reads through the disk tier."""
    tell_result(measure(keys, touched, latency_ms, swept), json_path)


if __name__ == "__main__":
    main()
