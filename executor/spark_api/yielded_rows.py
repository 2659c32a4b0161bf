"""
What a user's function yields, as productions: Spark's rows, or frames of pandas, with the fields of a schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import pandas as pd
from pyspark.sql.types import Row, StructType

from millpond.executor.computation.context import Context
from millpond.executor.spark_api.typed_values import StructCodec
from millpond.statestore.errors import InvalidError

__all__ = ["RowsAs", "YieldedRows"]

RowsAs: TypeAlias = Literal["row", "pandas"]
"""What a function takes and yields: Spark's ``transformWithState`` has rows, ``transformWithStateInPandas`` frames."""


class YieldedRows:
    """
    Produces what a function yields, to the first stream of its computation.

    Args:
        schema: the fields; one that a row has not is null, and one that the schema has not is left out.
        rows_as: whether the function yields rows or frames.
    """

    __slots__ = ("_codec", "_rows_as")

    def __init__(self, schema: StructType, rows_as: RowsAs) -> None:
        self._codec = StructCodec(schema, "the output")
        self._rows_as = rows_as

    def produce(self, context: Context, yielded: Iterable[Any]) -> None:
        """
        Produce each row as it is yielded.

        Raises:
            InvalidError: something else was yielded, or a value does not have its field's type.
        """
        stream, produce = context.streams[0], context.produce
        for value in map(self._codec.row_to_json, self._fields(yielded)):
            produce(stream, value)

    def _fields(self, yielded: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        is_frame = self._rows_as == "pandas"
        for one in yielded:
            if is_frame and isinstance(one, pd.DataFrame):
                names = list(map(str, one.columns))
                for values in one.to_numpy(dtype=object).tolist():
                    yield dict(zip(names, map(_or_none, values), strict=True))
            elif not is_frame and isinstance(one, Row):
                yield dict(zip(one.__fields__, one, strict=True))
            else:
                raise InvalidError(
                    "the function yields rows of Spark, or frames if it is given frames",
                    type=type(one).__name__,
                    rows_as=self._rows_as,
                )


def _or_none(value: Any) -> Any:
    """
    A value of a frame, with ``None`` for what pandas takes for missing.
    """
    is_missing = value is pd.NaT or value is pd.NA or (type(value) is float and math.isnan(value))
    return None if is_missing else value
