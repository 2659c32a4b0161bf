"""Routing: the target of every outside record, the interval that owns its key, and the ways of productions.

If key, event time and id are columns, the JVM routes, and Python sees a record first in the task that processes it.
Functions as extractors cost an extra Python stage. `Router` computes the SQL of an input once, because a streaming query
has the same columns in every batch, and each call into the JVM costs a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.functions import expr

from millpond.executor.inputs.changes import CHANGE_ERROR, CHANGE_SIGN, image_names
from millpond.executor.inputs.extraction import InjectorNode, mended_texts, read_injected, rows_to_extract
from millpond.executor.inputs.keys import KeyExtractor, KeyField, key_names
from millpond.executor.inputs.payload import check_payload_column
from millpond.executor.inputs.reserved import refuse_repeated, refuse_reserved
from millpond.executor.pipeline.checks import told_of_stream
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.key_sql import check_key_type, key_sql, plain_key_sql, position_sql, quoted
from millpond.executor.spark.task_plan import (
    AT,
    ERROR,
    ID,
    KEY,
    POSITION_SQL,
    READABLE_SQL,
    TARGET,
    Route,
    RoutedColumns,
    SlotParts,
    targets_of,
    unreadable_target,
)
from millpond.executor.time.instants import (
    DATES_IN,
    FLOAT_US_MAX,
    INSTANT_MAX_US,
    INSTANT_MIN_US,
    INSTANT_TEXT,
    NO_ZONE,
    TimeReading,
)
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError, did_you_mean

_ADDED = {
    TARGET: T.IntegerType(),
    KEY: T.StringType(),
    AT: T.LongType(),
    ID: T.BinaryType(),
    ERROR: T.StringType(),
}
_CHOICE = "__millpond_choice"
_UNSTAMPED = "CAST(0 AS BIGINT)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A frame and the columns of its rows, once ``finish`` has been called with each of its batches."""

    frame: DataFrame
    columns: RoutedColumns
    finish: Callable[[pa.RecordBatch], Iterable[pa.RecordBatch]] = lambda batch: [batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Expressions in Spark SQL, pass by pass.

    The first pass makes typed keys, each of which is used several times. The next adds the targets, for all consumers
    at once. With several consumers, a last pass gives each its own row.
    """

    columns: RoutedColumns
    passes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoutedKey:
    """A consumer's key as SQL, its source columns, and the input's own column if that is the key."""

    sql: str
    parts: str | tuple[str, ...]
    column: str | None = None
    made_by: str | None = None


def routes_of(
    topology: Topology, stream: str, parts: SlotParts, only: str | None = None
) -> tuple[Route, ...]:
    """Return the consumers of ``stream`` in this superstep, or only the one with the name ``only``."""
    by_computation = routes_by_computation(parts)
    routes = []
    for consumer in topology.consumers_of(stream):
        # A signal's step without other input has no intervals, because it has no windows yet.
        route = by_computation.get(consumer.computation.name)
        if route is not None and only in (None, consumer.computation.name):
            routes.append(replace(route, key=consumer.subscription.key))
    return tuple(routes)


def routes_by_computation(parts: SlotParts) -> dict[str, Route]:
    """Return the route to each computation, without its key."""
    intervals: dict[str, list[tuple[str, int]]] = {}
    for position, part in parts.items():
        intervals.setdefault(part.interval.computation, []).append((part.interval.low, position))
    ordered = {name: zip(*sorted(mine), strict=True) for name, mine in intervals.items()}
    return {name: Route(lows=lows, positions=positions) for name, (lows, positions) in ordered.items()}


def slot_of_row(slots: int) -> Column:
    return expr(f"CAST(pmod({POSITION_SQL}, {slots}) AS INT)")


def check_frame(topology: Topology, stream: str, schema: T.StructType) -> None:
    node = topology.injectors[stream]
    with told_of_stream(stream):
        _carried(schema.names)
        if node.payload is not None:
            # Key, time and id are inside the payload.
            check_payload_column(node.payload, schema.names, stream=stream)
            kind = schema[node.payload.column].dataType
            if not isinstance(kind, T.BinaryType | T.StringType):
                raise InvalidError(
                    "the payload column is neither binary nor text",
                    stream=stream,
                    column=node.payload.column,
                    type=kind.simpleString(),
                )
            return
        for consumer in topology.consumers_of(stream):
            key = node.key if consumer.subscription.key is None else consumer.subscription.key
            if not callable(key):
                _key(schema, key)
        if isinstance(node.at, str):
            _time(schema, node.at, node.times)
        if isinstance(node.id, str):
            _id(schema, node.id)


class Router:
    def __init__(self, node: InjectorNode) -> None:
        self._node = node
        self._kept: tuple[tuple[Route, ...], _Selection | None] | None = None

    def route(self, frame: DataFrame, routes: tuple[Route, ...], *, is_collected: bool = False) -> Routed:
        """Return one row per record and consumer, with its target; not yet moved.

        With ``is_collected`` the driver has the rows in Arrow before they are moved, and routes them itself, unless
        extractors need a call for each row, which the tasks share.
        """
        if self._kept is None or self._kept[0] != routes:
            self._kept = routes, _select(frame.schema, self._node, routes)
        if is_collected and self._kept[1] is not None:
            return Routed(
                frame=frame,
                columns=_columns_in_python(self._node, frame.columns),
                finish=lambda batch: _routed_batches(batch, self._node, routes),
            )
        return _spread(frame, self._node, routes, self._kept[1])

    def keys(self, frame: DataFrame, key: KeyExtractor, rows_max: int) -> DataFrame:
        """Return the readable keys of a consumer as a single column, at most ``rows_max`` of them."""
        routes = (Route(positions=(0,), lows=("",), key=key),)
        selection = _select(frame.schema, self._node, routes)
        is_named = selection is not None
        # A limit after a Python stage would end its worker with a broken pipe, so limit its input instead.
        probe = _spread(frame if is_named else frame.limit(rows_max), self._node, routes, selection)
        keys = probe.frame.where(READABLE_SQL).select(probe.columns.key)
        return keys.limit(rows_max) if is_named else keys


def _spread(
    frame: DataFrame, node: InjectorNode, routes: tuple[Route, ...], selection: _Selection | None
) -> Routed:
    if selection is not None:
        for expressions in selection.passes:
            frame = frame.selectExpr(*expressions)
        return Routed(frame=frame, columns=selection.columns)
    columns = _columns_in_python(node, _carried(frame.columns))
    schema = T.StructType([*(T.StructField(*added) for added in _ADDED.items()), *frame.schema.fields])

    def router(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _routed_batches(batch, node, routes)

    return Routed(frame=frame.mapInArrow(router, schema), columns=columns)


def _columns_in_python(node: InjectorNode, names: Sequence[str]) -> RoutedColumns:
    own, sign, _ = _parts_of_change(node, tuple(names))
    return RoutedColumns(key=KEY, at=AT, id=None if node.id is None else ID, error=ERROR, own=own, sign=sign)


def _carried(names: Sequence[str]) -> tuple[str, ...]:
    # Otherwise a task would believe that the input's bytes came from another task.
    refuse_reserved(names)
    refuse_repeated(names)
    for name in names:
        if "." in name or "`" in name:
            raise InvalidError(
                "Spark brings no column to Python whose name has a dot or a backtick in it: rename it",
                column=name,
            )
    return tuple(names)


def _select(schema: T.StructType, node: InjectorNode, routes: Sequence[Route]) -> _Selection | None:
    """Return the expressions with which the JVM routes, ``None`` unless key, time and id are columns."""
    at_field = None if isinstance(node.at, IngressTime) else node.at
    fields = (node.key, at_field, node.id, *(route.key for route in routes))
    if node.payload is not None or any(map(callable, fields)):
        return None
    carried = _carried(schema.names)
    own, sign, error = _parts_of_change(node, carried)
    # A task stamps records that have their time of arrival.
    raw_at = None if at_field is None else str(at_field)
    at, at_column = (_UNSTAMPED, None) if raw_at is None else _time(schema, raw_at, node.times)
    record_id = None if node.id is None else _id(schema, str(node.id))
    keys = [_key(schema, node.key if route.key is None else route.key) for route in routes]
    names = tuple(map(quoted, carried))
    # A typed key gets its own column, because Spark would compute it again at each mention.
    made = [
        replace(key, sql=f"{KEY}_{place}", made_by=key.sql) if key.column is None else key
        for place, key in enumerate(keys)
    ]
    typed = tuple(f"{key.made_by} AS {key.sql}" for key in made if key.made_by is not None)
    passes = ((*typed, *names),) if typed else ()
    nullable_at = quoted(raw_at) if raw_at is not None and node.keeps_null_times else None
    targets = [
        _target(key.sql, at, error, route, nullable_at) for key, route in zip(made, routes, strict=True)
    ]
    added_at = () if at_column is not None else (f"{at} AS {AT}",)
    columns = RoutedColumns(
        key=KEY,
        at=at_column or AT,
        id=record_id,
        error=error,
        own=own,
        raw_at=raw_at,
        sign=sign,
        key_parts={
            route.first: key.parts for key, route in zip(keys, routes, strict=True) if key.column is None
        },
    )
    if len(routes) == 1:
        (key,) = made
        added_key = () if key.column is not None else (f"{key.sql} AS {KEY}",)
        first = (f"{targets[0]} AS {TARGET}", *added_key, *added_at, *names)
        return _Selection(columns=replace(columns, key=key.column or KEY), passes=(*passes, first))
    choices = ", ".join(
        f"named_struct('t', {target}, 'k', {key.sql})" for target, key in zip(targets, made, strict=True)
    )
    spread = f"explode(array({choices})) AS {_CHOICE}"
    kept_at = () if at_column is not None else (AT,)
    second = (f"{_CHOICE}.t AS {TARGET}", f"{_CHOICE}.k AS {KEY}", *kept_at, *names)
    return _Selection(columns=columns, passes=(*passes, (spread, *added_at, *names), second))


def _parts_of_change(
    node: InjectorNode, names: tuple[str, ...]
) -> tuple[tuple[str, ...], str | None, str | None]:
    """Return the columns that make up a value, and the sign and error columns of a change stream."""
    return (names, None, None) if node.change is None else (image_names(names), CHANGE_SIGN, CHANGE_ERROR)


def _target(key: str, at: str, error: str | None, route: Route, nullable_at: str | None) -> str:
    # A null key or time makes the condition null, which counts as false.
    taken = "" if error is None else f" AND {error} IS NULL"
    timed = f"{at} BETWEEN {INSTANT_MIN_US} AND {INSTANT_MAX_US}"
    if nullable_at is not None:
        timed = f"({nullable_at} IS NULL OR {timed})"
    readable = f"{key} IS NOT NULL AND {timed}{taken}"
    unreadable = unreadable_target(route.first)
    return f"CAST(CASE WHEN {readable} THEN {position_sql(key, route.lows, route.positions)} ELSE {unreadable} END AS INT)"


def _type_of(schema: T.StructType, name: str, use: str) -> T.DataType:
    if name not in schema.names:
        hint = did_you_mean(name, schema.names)
        raise InvalidError(f"the input has no such {use} column{hint}", column=name, columns=schema.names)
    return schema[name].dataType


def _key(schema: T.StructType, key: KeyField) -> _RoutedKey:
    parts = key_names(key)
    kinds = [_type_of(schema, name, "key") for name in parts]
    for name, kind in zip(parts, kinds, strict=True):
        check_key_type(kind, name)
    columns = [(quoted(name), kind) for name, kind in zip(parts, kinds, strict=True)]
    if not isinstance(key, str):
        return _RoutedKey(sql=key_sql(columns), parts=tuple(key_names(key)))
    ((column, kind),) = columns
    if isinstance(kind, T.StringType):
        # A task reads the column itself: see `RoutedRecords.deliveries`.
        return _RoutedKey(sql=plain_key_sql(column), parts=key, column=key)
    # Only in a list can a null be a key.
    return _RoutedKey(sql=f"if({column} IS NULL, NULL, {key_sql(columns)})", parts=key)


def _time(schema: T.StructType, name: str, reading: TimeReading) -> tuple[str, str | None]:
    """Return the time in SQL as microseconds, and the input's own column if a task can read it.

    An unreadable time is null. The task finds the reason (`RoutedRecords`).
    """
    kind = _type_of(schema, name, "time")
    column = quoted(name)
    if isinstance(kind, T.TimestampType):
        return f"unix_micros({column})", name
    if isinstance(kind, T.LongType | T.IntegerType):
        is_plain = isinstance(kind, T.LongType) and reading.unit == "us"
        return _micros_of_number(f"CAST({column} AS BIGINT)", reading), name if is_plain else None
    if isinstance(kind, T.StringType):
        return f"unix_micros(try_cast({_whole_instant(column, reading)} AS TIMESTAMP))", None
    if isinstance(kind, T.DoubleType | T.FloatType) and reading.is_unit_given:
        factor, divisor = reading.factors
        # A number that is not finite becomes null.
        scaled = f"rint(CAST({column} AS DOUBLE) * {factor}D / {divisor}D)"
        return f"CASE WHEN abs({scaled}) < {int(FLOAT_US_MAX)}D THEN CAST({scaled} AS BIGINT) END", None
    if isinstance(kind, T.TimestampNTZType):
        if reading.zone is None:
            raise InvalidError(NO_ZONE, column=name, type=kind.simpleString())
        if reading.is_region:
            local = f"concat(CAST({column} AS STRING), ' {reading.zone}')"
            return f"unix_micros(try_cast({local} AS TIMESTAMP))", None
        since_1970 = f"timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01 00:00:00', {column})"
        return f"{since_1970} - {reading.offset_us}L", None
    raise InvalidError(
        "the time column is no time: cast it to a timestamp, to whole microseconds or to ISO 8601 text, or say the unit of "
        "its numbers with at_unit",
        column=name,
        type=kind.simpleString(),
    )


def time_sql(node: InjectorNode, schema: T.StructType) -> str | None:
    """Return a row's event time in SQL, null where it is unreadable; ``None`` if no column of the rows is the time."""
    if node.payload is not None or node.change is not None or not isinstance(node.at, str):
        return None
    at = _time(schema, node.at, node.times)[0]
    return f"(CASE WHEN {at} BETWEEN {INSTANT_MIN_US} AND {INSTANT_MAX_US} THEN {at} END)"


def before_sql(time: str, until: int) -> str:
    return f"({time} IS NULL OR {time} < {until})"


def _micros_of_number(number: str, reading: TimeReading) -> str:
    factor, divisor = reading.factors
    if divisor > 1:
        return f"({number} - pmod({number}, {divisor}L)) div {divisor}L"
    if factor > 1:
        return f"try_multiply({number}, {factor}L)"
    if reading.is_unit_given:
        return number
    mistaken = " OR ".join(f"{number} BETWEEN {first}L AND {last}L" for first, last in DATES_IN.values())
    return f"CASE WHEN {mistaken} THEN NULL ELSE {number} END"


def _whole_instant(column: str, reading: TimeReading) -> str:
    """Return SQL that completes a time in text. Text that only Spark reads as a time becomes null.

    Text without a zone gets the injector's zone and not the session's, so that both runners agree.
    """
    text = f"trim({column})"
    date, zone = INSTANT_TEXT.date, INSTANT_TEXT.zone
    minute = f"{date}{INSTANT_TEXT.separator}{INSTANT_TEXT.minute}"
    second = f"{minute}{INSTANT_TEXT.second}"
    cases = {
        # Spark reads no small letters.
        f"{second}{zone}": f"upper({text})",
        f"{minute}{zone}": f"upper(concat(left({text}, 16), ':00', substring({text}, 17)))",
    }
    if reading.zone is not None:
        ours = f" {reading.zone}" if reading.is_region else reading.zone
        cases |= {
            second: f"concat(upper({text}), '{ours}')",
            date: f"concat({text}, 'T00:00:00{ours}')",
            minute: f"concat(upper({text}), ':00{ours}')",
        }
    # Not "$", which also matches before a final newline.
    whens = (f"WHEN {text} RLIKE r'^{pattern}\\z' THEN {whole}" for pattern, whole in cases.items())
    return f"CASE {' '.join(whens)} END"


def _id(schema: T.StructType, name: str) -> str:
    kind = _type_of(schema, name, "id")
    if isinstance(kind, T.BinaryType | T.StringType | T.LongType | T.IntegerType):
        return name
    raise InvalidError(
        "the id column is neither text nor binary nor a whole number: cast it to text",
        column=name,
        type=kind.simpleString(),
    )


def _routed_batches(
    batch: pa.RecordBatch, node: InjectorNode, routes: Sequence[Route]
) -> Iterator[pa.RecordBatch]:
    # The rows stay as they came, because the task that gets them takes their digest and tells what is garbled.
    table, garbled = mended_texts(pa.Table.from_batches([batch]))
    rows, count = rows_to_extract(node, table), batch.num_rows
    for route in routes:
        injected = read_injected(node, route.key, rows, garbled=garbled)
        targets = targets_of(injected.keys, route)
        errors = pa.nulls(count, pa.string())
        if injected.errors:
            targets[list(injected.errors)] = unreadable_target(route.first)
            errors = pa.array([injected.errors.get(row) for row in range(count)], pa.string())
        untimed = np.zeros(count, bool)
        untimed[list(injected.untimed)] = True
        added = [
            pa.array(targets, pa.int32()),
            injected.keys,
            pa.array(injected.at, pa.int64(), mask=untimed),
            pa.nulls(count, pa.binary()) if injected.ids is None else injected.ids,
            errors,
        ]
        yield pa.RecordBatch.from_arrays([*added, *batch.columns], names=[*_ADDED, *batch.schema.names])


_READ_MAX: Final = 200_000
"""Productions that all slots together read at most. A shuffle of more costs less."""


def are_shuffled(productions: int, slots: int) -> bool:
    """Return True if a shuffle costs less than reading all productions in each slot.

    Example:
        >>> [are_shuffled(1_000, 16), are_shuffled(100_000, 16), are_shuffled(10_000_000, 1)]
        [False, True, False]
    """
    return slots > 1 and productions * slots > _READ_MAX
