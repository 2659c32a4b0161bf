"""Rows as callers hand them to the local runner: tables of any kind, or mappings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from millpond.executor.pipeline.extract_rows import Rows, row_count
from millpond.statestore.errors import InvalidError

RowsLike: TypeAlias = Any
"""An Arrow or pandas table, anything with Arrow's C stream interface, a mapping, or an iterable of mappings."""


def rows_from(given: RowsLike) -> Rows:
    """The rows as an Arrow table, or as a list of mappings.

    Mappings are copied, so the caller may reuse them.

    Example:
        >>> rows_from({"city": "Bergen"})
        [{'city': 'Bergen'}]

    Raises:
        InvalidError: the argument has no rows, or a column of a table has no Arrow type.
    """
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, Mapping):
        return [dict(given)]
    if getattr(given, "isStreaming", False):
        raise InvalidError(
            "a streaming frame has no end that could be read here: run it with SparkRunner, or read it with spark.read",
            type=f"{type(given).__module__}.{type(given).__name__}",
        )
    if hasattr(given, "__arrow_c_stream__") or isinstance(given, pa.RecordBatch):
        return _table(given)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidError(
            "rows are a table or an iterable of mappings: give dicts, an Arrow table or a data frame",
            type=type(given).__name__,
        )
    return [dict(row) if isinstance(row, Mapping) else row for row in given]


def _table(given: RowsLike) -> pa.Table:
    try:
        if isinstance(given, pa.RecordBatch):
            return pa.Table.from_batches([given])
        # pandas: its index is no column of the data
        is_pandas = type(given).__module__.split(".")[0] == "pandas"
        return pa.Table.from_pandas(given, preserve_index=False) if is_pandas else pa.table(given)
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "the table cannot be read as Arrow: give a column one type, or pass a list of dicts",
            type=type(given).__name__,
            reason=str(cause).partition("\n")[0],
        ) from cause


def pieces(rows: Rows, records_max: int) -> Iterator[tuple[int, Rows]]:
    """The rows in pieces of at most ``records_max``; yields the count and the rows of each piece."""
    for start in range(0, row_count(rows), records_max):
        piece = (
            rows.slice(start, records_max)
            if isinstance(rows, pa.Table)
            else rows[start : start + records_max]
        )
        yield row_count(piece), piece
