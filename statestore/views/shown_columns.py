"""The typed columns of a view: their names, and how Arrow, DuckDB and Spark get them.

DuckDB and Spark get functions, of the key or of the state, so that only the columns that a query names are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from millpond.statestore.keys.key_columns import typed_columns
from millpond.statestore.rows.reader_sql import ROWS_VIEW_COLUMNS
from millpond.statestore.views.state_columns import StateColumn, parsed_states

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import Column

_EXTRAS: Final = ("record_ids", "productions")
_EXPIRY: Final = "_expires_at"
_NUMBERS: Final = count()


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A typed column of a view.

    Attributes:
        field: its name and type.
        source: the stored column that it is made of.
        cells: makes it of that column's texts.
    """

    field: pa.Field
    source: Literal["key", "state"]
    cells: Callable[[pa.ChunkedArray], pa.Array]

    def in_duckdb(self, database: duckdb.DuckDBPyConnection) -> str:
        """The name of an SQL function, quoted, that makes the column of its source."""
        (kind,) = database.from_arrow(pa.schema([self.field]).empty_table()).types
        function = f"typed column {next(_NUMBERS)}"
        # The library's types want constants of a module that it does not have.
        database.create_function(  # type: ignore[call-overload]
            function, self.cells, ["VARCHAR"], kind, type="arrow", null_handling="special"
        )
        return f'"{function}"'

    def in_spark(self) -> Column:
        """The column of a DataFrame with the source, made by Spark's Python workers where a query asks for it."""
        from pyspark.sql.pandas.functions import arrow_udf
        from pyspark.sql.pandas.types import from_arrow_type

        cells = self.cells

        def make(texts: pa.Array) -> pa.Array:
            return cells(pa.chunked_array([texts]))

        make.__annotations__ = {"texts": pa.Array, "return": pa.Array}
        # The library's types know atoms and arrays as results, and no structs or maps.
        made: Column = arrow_udf(make, from_arrow_type(self.field.type))(self.source)  # type: ignore[call-overload]
        return made.alias(self.field.name)


def shown_columns(keys: Sequence[pa.Field], states: Sequence[StateColumn]) -> tuple[ShownColumn, ...]:
    """The typed columns of a view: first those of keys, then those of states.

    A name that another column has, in any case, gets ``key_`` or ``state_`` in front.

    Args:
        keys: what typed keys are made of.
        states: the parts of states.
    """
    taken = {*ROWS_VIEW_COLUMNS, *_EXTRAS}
    shown = []
    fields = [pa.field(key.name, pa.string() if pa.types.is_null(key.type) else key.type) for key in keys]
    for place, field in enumerate(fields):
        name = _free(field.name, "key_", taken)
        shown.append(ShownColumn(field.with_name(name), "key", partial(_part, fields, place)))
    for name, kind, cells in _of_states(states):
        shown.append(ShownColumn(pa.field(_free(name, "state_", taken), kind), "state", cells))
    return tuple(shown)


def _of_states(
    states: Sequence[StateColumn],
) -> Iterator[tuple[str, pa.DataType, Callable[[pa.ChunkedArray], pa.Array]]]:
    for column in states:
        yield column.name, column.shown, partial(_inside, column.cells)
        if column.has_expiry:
            yield f"{column.name}{_EXPIRY}", column.shown_expiry, partial(_inside, column.expiries)


def _free(name: str, prefix: str, taken: set[str]) -> str:
    while name.lower() in taken:
        name = f"{prefix}{name}"
    taken.add(name.lower())
    return name


def _part(fields: Sequence[pa.Field], place: int, keys: pa.ChunkedArray) -> pa.Array:
    (column,) = typed_columns(keys, fields, [place])
    return _whole(column)


def _inside(read: Callable[[Sequence[object]], pa.Array], states: pa.ChunkedArray) -> pa.Array:
    return read(parsed_states(states.to_pylist()))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()
