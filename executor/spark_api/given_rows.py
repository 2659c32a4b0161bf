"""The rows of a bundle as a processor is given them: Spark's rows, frames of pandas, or Arrow's batches.

A bundle's columns are converted once, and each key is given its part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import Row

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.record import Records
from millpond.executor.computation.record_columns import RecordColumns
from millpond.executor.computation.values import ArrowValues

_ALONE: Final = "value"
"""The only column of values that are no rows."""


class GivenRows:
    """The rows of a bundle, by their places in its columns.

    Args:
        columns: the bundle's records.

    Attributes:
        columns: the same.
        streams: those that the records came on.
    """

    def __init__(self, columns: RecordColumns) -> None:
        self.columns: RecordColumns = columns
        self.streams: frozenset[str] = frozenset(columns.streams)
        values = columns.values  # noqa: PD011 - no frame's
        self._values = values if isinstance(values, ArrowValues) else None
        self._frame: pd.DataFrame | None = None
        self._batch: pa.RecordBatch | None = None
        self._given_until = 0

    @classmethod
    def of(cls, columns: RecordColumns, former: GivenRows | None) -> GivenRows:
        """Those of some columns; the former ones, if they are of these."""
        return former if former is not None and former.columns is columns else cls(columns)

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from ``start`` to ``stop``, each made when it is asked for."""
        sources, values = self.columns.sources, self._values
        if values is None:
            for index in range(start, stop):
                fields = _fields(self.columns.value(index))
                yield Row(*fields)(*fields.values())
            return
        names, row_at, new = values.names, values.row, tuple.__new__
        for index in range(start, stop):
            # What `Row(*names)(*values)` does, at a fifth of its cost.
            row = new(Row, row_at(sources[index]) or (None,) * len(names))
            row.__fields__ = names
            yield row

    def frames(self, start: int, stop: int) -> Iterator[pd.DataFrame]:
        """The rows from ``start`` to ``stop`` as one frame, if there are any."""
        if stop == start:
            return
        values = self._values
        if values is None:
            yield pd.DataFrame([_fields(self.columns.value(index)) for index in range(start, stop)])
            return
        if self._frame is None or start < self._given_until:
            # Keys come in order: this one comes again, after its code may have changed its part.
            self._frame = _frame_of(values.take(np.asarray(self.columns.sources, dtype=np.int64)))
        self._given_until = stop
        part = self._frame.iloc[start:stop]
        part.index = _index(stop - start)
        # It is a part of no one else's frame.
        part._is_copy = None  # noqa: SLF001
        yield part

    def batches(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows from ``start`` to ``stop`` as one record batch, if there are any."""
        if stop == start:
            return
        values = self._values
        if values is None:
            yield pa.RecordBatch.from_pylist(
                [_fields(self.columns.value(index)) for index in range(start, stop)]
            )
            return
        if self._batch is None:
            rows = values.take(np.asarray(self.columns.sources, dtype=np.int64))
            self._batch = pa.RecordBatch.from_arrays(rows.columns.flatten(), names=rows.names)
        yield self._batch.slice(start, stop - start)


class ComputationOfRows(Computation):
    """A computation in Spark's micro-batches, whose code is given rows or frames: those of a bundle are made once."""

    in_micro_batches = True
    in_order_of_arrival = True
    _given: GivenRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what belongs to a bundle."""
        return {**self.__dict__, "_given": None}

    def end_bundle(self) -> None:
        """Release the bundle's rows."""
        self._given = None

    def _given_of(self, records: Records) -> GivenRows:
        given = self._given = GivenRows.of(records.columns, self._given)
        return given


@lru_cache(maxsize=1_024)
def _index(rows: int) -> pd.RangeIndex:
    return pd.RangeIndex(rows)


def _frame_of(rows: ArrowValues) -> pd.DataFrame:
    table = pa.Table.from_arrays(rows.columns.flatten(), names=rows.names)
    frame: pd.DataFrame = table.to_pandas(date_as_object=True)
    for name in rows.names:
        if isinstance(frame[name].dtype, pd.DatetimeTZDtype):
            # Spark's frames have times of the session's zone, without the zone.
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {_ALONE: value}
