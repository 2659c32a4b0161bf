"""What a user's function yields, as productions: Spark's rows, frames of pandas, or Arrow's batches, with the fields of a schema."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias

import pandas as pd
import pyarrow as pa
from pyspark.sql.types import Row, StructType, TimestampType

from millpond.executor.computation.context import Context
from millpond.executor.event_time.duration import datetime_us
from millpond.executor.spark_api.typed_values import StructCodec
from millpond.statestore.errors import InvalidError

RowsAs: TypeAlias = Literal["row", "pandas"]
"""What a function takes and yields: Spark's ``transformWithState`` has rows, ``transformWithStateInPandas`` frames."""


YieldedAs: TypeAlias = Literal["row", "pandas", "arrow"]
"""What a function yields: Spark's rows, frames of pandas, or Arrow's record batches and tables."""


class YieldedRows:
    """Produces what a function yields, to the first stream of its computation.

    Args:
        schema: the fields; one that a row has not is null, and one that the schema has not is left out.
        yielded_as: whether the function yields rows, frames or tables.
        event_time: the field that is a row's event time; that of what it was made of, if ``None`` or null.

    Raises:
        InvalidError: the schema has no such field, or one of another type than ``timestamp``.
    """

    __slots__ = ("_codec", "_event_time", "_yielded_as")

    def __init__(self, schema: StructType, yielded_as: YieldedAs, event_time: str | None = None) -> None:
        self._codec = StructCodec(schema, "the output")
        self._event_time = event_time
        if event_time is not None:
            _check_event_time(schema, event_time)
        self._yielded_as = yielded_as

    def produce(self, context: Context, yielded: Iterable[Any]) -> None:
        """Produce each row as it is yielded.

        Raises:
            InvalidError: something else was yielded, a value does not have its field's type, or a row's event time
                is behind the watermark, as Spark's operator refuses it.
        """
        stream, produce, event_time = context.streams[0], context.produce, self._event_time
        if event_time is not None:
            for value in map(self._codec.row_to_json, self._fields(yielded)):
                produce(stream, value, at=_time_of(value[event_time], event_time, context))
            return
        for value in map(self._codec.row_to_json, self._fields(yielded)):
            produce(stream, value)

    def _fields(self, yielded: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        yielded_as = self._yielded_as
        for one in yielded:
            if yielded_as == "pandas" and isinstance(one, pd.DataFrame):
                names = list(map(str, one.columns.tolist()))
                for values in one.to_numpy(dtype=object).tolist():
                    yield dict(zip(names, map(_or_none, values), strict=True))
            elif yielded_as == "row" and isinstance(one, Row):
                yield dict(zip(one.__fields__, one, strict=True))
            elif yielded_as == "arrow" and isinstance(one, pa.RecordBatch | pa.Table):
                yield from one.to_pylist(maps_as_pydicts="strict")
            else:
                raise InvalidError(
                    "the function yields something else than it is given: rows for rows, frames for frames, and "
                    "record batches or tables for record batches",
                    type=type(one).__name__,
                    rows_as=yielded_as,
                )


def _check_event_time(schema: StructType, name: str) -> None:
    if name not in schema.names:
        raise InvalidError(
            "event_time_column_name names a column that the output has not", name=name, columns=schema.names
        )
    kind = schema[name].dataType
    if not isinstance(kind, TimestampType):
        raise InvalidError("an event time is a timestamp", name=name, type=kind.simpleString())


def _time_of(text: str | None, name: str, context: Context) -> int | None:
    """The event time of a row that is yielded, which must not be late for those that get it."""
    if text is None:
        return None
    at = datetime_us(datetime.fromisoformat(text))
    # Spark's first watermark is 1970.
    if at < max(context.late_before, 1):
        raise InvalidError(
            "the processor yields a row whose event time is at or before the watermark, so it would be late where it "
            "is used next: yield it earlier, with a later time, or have a longer delay in withWatermark",
            column=name,
            event_time=text,
            watermark_ms=max(context.late_before, 1) // 1_000,
        )
    return at


def _or_none(value: Any) -> Any:
    """A value of a frame, with ``None`` for what pandas takes for missing."""
    is_missing = value is pd.NaT or value is pd.NA or (type(value) is float and math.isnan(value))
    return None if is_missing else value
