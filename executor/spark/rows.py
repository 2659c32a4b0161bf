"""Rows of the driver as a table, which Spark makes a frame of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from millpond.statestore.errors import InvalidError


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with every field that any of them has.

    Raises:
        InvalidError: a field has several types.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, TypeError, ValueError) as cause:
        raise InvalidError(
            "the rows cannot become a DataFrame: give each field one type",
            reason=str(cause).partition("\n")[0],
        ) from cause
