"""The input of the engines under measurement: the same Parquet files, one a micro-batch.

The files are written before anything is measured, and both engines read them through Spark's own file
source, so the input costs both the same. Every batch touches every key, in an order that is mixed but
the same in each run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS: Final = "key STRING, id STRING, at TIMESTAMP"
"""The columns for Spark: a key, a record id that never comes twice, and the event time."""

_FIRST_AT_US: Final = 1_700_000_000_000_000
_FIRST_MODIFIED_S: Final = 1_700_000_000
_STRIDE: Final = 7_919
"""A prime, so that it mixes the keys without missing one, unless their number is a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of a load.

    Attributes:
        rows_per_batch: records in each micro-batch.
        keys_per_batch: distinct keys in each micro-batch; the same keys in every batch.
        batches: measured micro-batches.
        warm_up: micro-batches before these, reported but not measured.
    """

    rows_per_batch: int
    keys_per_batch: int
    batches: int
    warm_up: int = 2

    @property
    def files(self) -> int:
        """Number of micro-batches, warm-up included."""
        return self.batches + self.warm_up


def write_batches(folder: Path, load: Load) -> Path:
    """Write the files of a load, with rising modification times, the order in which Spark reads them."""
    folder.mkdir(parents=True)
    for number in range(load.files):
        path = folder / f"batch-{number:04d}.parquet"
        pq.write_table(_batch(number, load), path, compression="zstd")
        modified_s = _FIRST_MODIFIED_S + number
        os.utime(path, (modified_s, modified_s))
    return folder


def _batch(number: int, load: Load) -> pa.Table:
    rows = np.arange(load.rows_per_batch, dtype=np.int64)
    keys = rows * _STRIDE % load.keys_per_batch
    sequence = number * load.rows_per_batch + rows
    at = _FIRST_AT_US + sequence
    return pa.table(
        {
            "key": pa.array([f"key-{key:07d}" for key in keys.tolist()]),
            "id": pa.array([f"{number:04d}-{row:08d}" for row in rows.tolist()]),
            "at": pa.array(at).cast(pa.timestamp("us", tz="UTC")),
        }
    )
