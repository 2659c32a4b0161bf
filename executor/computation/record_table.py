"""The values of many records as one Arrow table, for code that takes a bundle at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import ArrowValues, ConcatenatedValues, Values
from millpond.statestore.errors import InvalidError

VALUE: Final = "value"
"""The column of values that are no rows of fields."""


def table_of(values: Values, sources: npt.NDArray[np.int64]) -> pa.Table:
    """Return the values at ``sources``, in that order, as a table with a column for each of their fields.

    Fields that some of the values lack are null there. Values that are not all dicts are the one column `VALUE`.
    """
    if isinstance(values, ConcatenatedValues):
        return _table_of_parts(values, sources)
    if isinstance(values, ArrowValues):
        return _table(values.columns.take(pa.array(sources)))
    return _table_of_objects([values.value(source) for source in sources.tolist()])


def _table(rows: pa.StructArray) -> pa.Table:
    # Flattened, because a null row has nulls, whatever lies below it.
    return _named(rows.flatten(), [field.name for field in rows.type], len(rows))


def _named(columns: Sequence[pa.Array], names: Sequence[str], count: int) -> pa.Table:
    # A table without a column would have no rows either.
    return pa.Table.from_arrays(columns, names=names) if names else pa.table({VALUE: pa.nulls(count)})


def _table_of_parts(values: ConcatenatedValues, sources: npt.NDArray[np.int64]) -> pa.Table:
    ends = np.cumsum([len(part) for part in values.parts])
    # A part without any of the records must not change the types of the others.
    used = np.unique(np.searchsorted(ends, sources, side="right")).tolist()
    parts = [values.parts[number] for number in used]
    of_arrow = [part for part in parts if isinstance(part, ArrowValues)]
    if len(of_arrow) < len(parts):
        return _table_of_objects([values.value(source) for source in sources.tolist()])
    lengths = np.array([len(part) for part in parts], np.int64)
    shifts = np.zeros(len(ends), np.int64)
    shifts[used] = np.cumsum(lengths) - lengths - (ends[used] - lengths)
    places = sources + shifts[np.searchsorted(ends, sources, side="right")]
    return _joined(of_arrow).take(pa.array(places)).combine_chunks()


def _joined(parts: Sequence[ArrowValues]) -> pa.Table:
    try:
        return pa.concat_tables([_table(part.columns) for part in parts], promote_options="permissive")
    except pa.ArrowException as error:
        raise InvalidError(
            "records of one bundle have a field in types that make no column: give the streams one schema",
            reason=error,
        ) from error


def _table_of_objects(values: Sequence[Any]) -> pa.Table:
    if not all(isinstance(value, Mapping) and all(type(name) is str for name in value) for value in values):
        return pa.table({VALUE: _column(values, VALUE)})
    names = {name: None for value in values for name in value}
    columns = [_column([value.get(name) for value in values], name) for name in names]
    return _named(columns, list(names), len(values))


def _column(cells: Sequence[Any], name: str) -> pa.Array:
    try:
        return pa.array(cells)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidError("the values of the field make no column", field=name, reason=error) from error
