"""The input of the windowed sums: Parquet files of one batch each, and the panes that every engine must find.

The last file has a single record a day later. Its time ends all windows before it, so that every engine can emit every
pane without being told that the input has ended.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.peers.contract import END_KEY, WINDOW_US
from benchmarks.windowed_sum import records_of

_DAY_US: Final = 86_400_000_000
_FIRST_MODIFIED_S: Final = 1_700_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A number of records, and how many come at once."""

    records: int
    batch: int


def write_load(folder: Path, load: Load) -> pa.Table:
    """Write the files of a load, with rising modification times, and return the expected panes."""
    folder.mkdir(parents=True)
    records = _records(load.records)
    last_at = pc.max(records["at"].cast(pa.int64())).as_py()
    closing = pa.table(
        {
            "key": [END_KEY],
            "at": pa.array([last_at + _DAY_US]).cast(pa.timestamp("us", tz="UTC")),
            "value": [0],
            "id": [END_KEY],
        }
    )
    batches = [records.slice(start, load.batch) for start in range(0, load.records, load.batch)]
    for number, batch in enumerate([*batches, closing]):
        path = folder / f"batch-{number:04d}.parquet"
        pq.write_table(batch, path, compression="zstd")
        # Spark reads files in the order of their times.
        os.utime(path, (_FIRST_MODIFIED_S + number,) * 2)
    return _panes(records)


def _records(count: int) -> pa.Table:
    records = records_of(count, with_ids=True)
    at = records["at"].cast(pa.timestamp("us", tz="UTC"))
    return pa.table({"key": records["key"], "at": at, "value": records["value"], "id": records["id"]})


def _panes(records: pa.Table) -> pa.Table:
    start = pc.multiply(pc.divide(records["at"].cast(pa.int64()), WINDOW_US), WINDOW_US)
    sums = records.append_column("start", start).group_by(["key", "start"]).aggregate([("value", "sum")])
    return in_order(sums.rename_columns({"value_sum": "total"}))


def in_order(panes: pa.Table) -> pa.Table:
    """Return the panes sorted by key and start, without that of the closing record, in one form for all engines."""
    panes = panes.select(["key", "start", "total"]).cast(
        pa.schema([("key", pa.string()), ("start", pa.int64()), ("total", pa.int64())])
    )
    panes = panes.filter(pc.not_equal(panes["key"], END_KEY))
    return panes.sort_by([("key", "ascending"), ("start", "ascending")])


def difference(panes: pa.Table, expected: pa.Table) -> str | None:
    """Return how an engine's panes differ from the expected ones, or None if they are the same.

    Args:
        panes: the engine's panes, with the columns ``key``, ``start`` and ``total``.
        expected: the result of `write_load`.
    """
    found = in_order(panes)
    if found.equals(expected):
        return None
    totals = [pc.sum(table["total"]).as_py() for table in (found, expected)]
    return (
        f"expected {expected.num_rows:,} panes with a total of {totals[1]:,}, "
        f"got {found.num_rows:,} with {totals[0] or 0:,}"
    )
