"""Routing: moves every record of an outside DataFrame to the interval that owns its key.

If key, event time and id are columns, routing happens in the JVM and Python sees a record for the
first time in the task that processes it; functions as extractors cost a Python stage of their own.
The selection is computed once per input and kept: a streaming query has the same columns in every
batch, and each call into the JVM costs a millisecond.

Which way the productions of a superstep take: each slot reads them all, or a shuffle brings each slot its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.functions import expr

from millpond.executor.inputs.changes import CHANGE_ERROR, CHANGE_SIGN, image_names
from millpond.executor.inputs.extraction import Rows, read_injected
from millpond.executor.inputs.injector import InjectorNode
from millpond.executor.inputs.keys import KeyExtractor, KeyField, key_names
from millpond.executor.inputs.payload import Payload, check_payload_column, rows_to_extract
from millpond.executor.pipeline.checks import told_of_stream
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.key_sql import check_key_type, key_sql, position_sql
from millpond.executor.spark.routed_productions import (
    ROUTED_SCHEMA,
    ConsumerRoute,
    ProductionRoutes,
    make_routing_task,
)
from millpond.executor.spark.task_plan import (
    AT,
    ERROR,
    ID,
    KEY,
    POSITION_SQL,
    READABLE_SQL,
    TARGET,
    RoutedColumns,
    SlotParts,
    WorkerSetting,
    readable_target,
    unreadable_target,
)
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.time.instants import (
    INSTANT_MAX_US,
    INSTANT_MIN_US,
    INSTANT_TEXT,
    MILLISECONDS_MAX,
    MILLISECONDS_MIN,
    NO_ZONE,
    TimeReading,
)
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.interval import locate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


_ADDED_FIELDS = (
    T.StructField(TARGET, T.IntegerType()),
    T.StructField(KEY, T.StringType()),
    T.StructField(AT, T.LongType()),
    T.StructField(ID, T.BinaryType()),
    T.StructField(ERROR, T.StringType()),
)
_CHOICE = "__millpond_choice"
_UNSTAMPED = "CAST(0 AS BIGINT)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One consumer of the input: its intervals' positions in the plan and its key extractor.

    Attributes:
        positions: positions of its intervals in key order.
        lows: low bounds of its intervals in key order; the first is ``""``.
        key: its extractor; ``None`` keeps the injector's key.
    """

    positions: tuple[int, ...]
    lows: tuple[str, ...]
    key: KeyExtractor

    @property
    def first(self) -> int:
        """The position of the interval whose task reports what is unreadable."""
        return self.positions[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Routed rows, and the columns that have their parts."""

    frame: DataFrame
    columns: RoutedColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """What to select, in Spark SQL, pass by pass: typed keys, which each are used several times; rows with their
    targets, for all consumers; and these apart, if there are several.
    """

    columns: RoutedColumns
    passes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoutedKey:
    """A consumer's key: an expression for it, what it is made of, and the input's own column if that is the key."""

    sql: str
    parts: str | tuple[str, ...]
    column: str | None = None
    made_by: str | None = None


def routes_of(
    topology: Topology, stream: str, parts: SlotParts, only: str | None = None
) -> tuple[Route, ...]:
    """The consumers of ``stream`` in this superstep, with the positions of their intervals.

    Args:
        topology: the checked pipeline.
        stream: the injected stream.
        parts: what runs.
        only: the only consumer that gets the records; ``None`` for all.
    """
    by_computation: dict[str, list[tuple[str, int]]] = {}
    for position, part in parts.items():
        by_computation.setdefault(part.interval.computation, []).append((part.interval.low, position))
    routes = []
    for consumer in topology.consumers_of(stream):
        # There are none for a signal to a step that has had no input: it has no windows.
        mine = sorted(by_computation.get(consumer.computation.name, ()))
        if mine and only in (None, consumer.computation.name):
            lows, positions = zip(*mine, strict=True)
            routes.append(Route(positions=positions, lows=lows, key=consumer.subscription.key))
    return tuple(routes)


def slot_of_row(slots: int) -> Column:
    """The slot of a routed row, as an integer: that of its interval's position."""
    return expr(f"CAST(pmod({POSITION_SQL}, {slots}) AS INT)")


def check_frame(topology: Topology, stream: str, schema: T.StructType) -> None:
    """Refuse an input whose columns do not fit its injector and consumers, before anything runs.

    Args:
        topology: the checked pipeline.
        stream: the injected stream.
        schema: the columns of its frame.

    Raises:
        InvalidError: a column is missing or of a type that cannot be a key, a time or an id.
    """
    node = topology.injectors[stream]
    with told_of_stream(stream):
        _carried(schema.names)
        if node.payload is not None:
            # What else there is to extract is within the payload.
            _payload(schema, node.payload, stream)
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
    """Routes the batches of one input.

    Args:
        node: the injector, which says how to get key, time and id.
    """

    def __init__(self, node: InjectorNode) -> None:
        self._node = node
        self._kept: tuple[tuple[Route, ...], _Selection] | None = None

    def route(self, frame: DataFrame, routes: tuple[Route, ...]) -> Routed:
        """The records, one row per consumer, with the interval that each belongs to; not yet moved.

        Args:
            frame: a batch.
            routes: the consumers.

        Raises:
            InvalidError: a column is missing or of a type that cannot be a key, a time or an id.
        """
        return _spread(frame, self._node, routes, self._selection(frame, routes))

    def keys(self, frame: DataFrame, key: KeyExtractor, rows_max: int) -> DataFrame:
        """The readable keys that a consumer gets of ``frame``, as a single column, to be sampled.

        Args:
            frame: a batch.
            key: the consumer's key extractor.
            rows_max: how many there are at most.

        Raises:
            InvalidError: a column is missing or of a type that cannot be a key, a time or an id.
        """
        routes = (Route(positions=(0,), lows=("",), key=key),)
        named = _is_named(self._node, routes)
        # A Python stage that is cut off complains of a broken pipe, so it gets no more than is wanted.
        given = frame if named else frame.limit(rows_max)
        probe = _spread(
            given, self._node, routes, _select(frame.schema, self._node, routes) if named else None
        )
        keys = probe.frame.where(READABLE_SQL).select(probe.columns.key)
        return keys.limit(rows_max) if named else keys

    def _selection(self, frame: DataFrame, routes: tuple[Route, ...]) -> _Selection | None:
        if not _is_named(self._node, routes):
            return None
        if self._kept is None or self._kept[0] != routes:
            self._kept = routes, _select(frame.schema, self._node, routes)
        return self._kept[1]


def _is_named(node: InjectorNode, routes: Iterable[Route]) -> bool:
    if node.payload is not None:
        return False
    parts = [
        node.key,
        None if isinstance(node.at, IngressTime) else node.at,
        node.id,
        *(route.key for route in routes),
    ]
    return not any(map(callable, parts))


def _spread(
    frame: DataFrame, node: InjectorNode, routes: tuple[Route, ...], selection: _Selection | None
) -> Routed:
    """One row per consumer, not yet moved; computed in Python if there is no selection for the JVM."""
    if selection is None:
        return _spread_in_python(frame, node, routes)
    for expressions in selection.passes:
        frame = frame.selectExpr(*expressions)
    return Routed(frame=frame, columns=selection.columns)


def _carried(names: Sequence[str]) -> tuple[str, ...]:
    """The input's columns, all of which Spark can bring to Python."""
    for name in names:
        if "." in name or "`" in name:
            raise InvalidError(
                "Spark brings no column to Python whose name has a dot or a backtick in it: rename it",
                column=name,
            )
    return tuple(names)


# -- in the JVM ----------------------------------------------------------------------------


def _select(schema: T.StructType, node: InjectorNode, routes: Sequence[Route]) -> _Selection:
    carried = _carried(schema.names)
    own, sign, error = _parts_of_change(node, carried)
    # What gets its time on arrival is stamped in the task.
    is_stamped = isinstance(node.at, IngressTime)
    at, at_column = (_UNSTAMPED, None) if is_stamped else _time(schema, str(node.at), node.times)
    raw_at = None if is_stamped else str(node.at)
    record_id = None if node.id is None else _id(schema, str(node.id))
    keys = [_key(schema, node.key if route.key is None else route.key) for route in routes]
    quoted = tuple(map(_quoted, carried))
    # A typed key has a column of its own, since Spark would make it again wherever it is named.
    made = [
        replace(key, sql=f"{KEY}_{place}", made_by=key.sql) if key.column is None else key
        for place, key in enumerate(keys)
    ]
    typed = tuple(f"{key.made_by} AS {key.sql}" for key in made if key.made_by is not None)
    passes = ((*typed, *quoted),) if typed else ()
    targets = [_target(key.sql, at, error, route) for key, route in zip(made, routes, strict=True)]
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
        first = (f"{targets[0]} AS {TARGET}", *added_key, *added_at, *quoted)
        return _Selection(columns=replace(columns, key=key.column or KEY), passes=(*passes, first))
    choices = ", ".join(
        f"named_struct('t', {target}, 'k', {key.sql})" for target, key in zip(targets, made, strict=True)
    )
    spread = f"explode(array({choices})) AS {_CHOICE}"
    kept_at = () if at_column is not None else (AT,)
    second = (f"{_CHOICE}.t AS {TARGET}", f"{_CHOICE}.k AS {KEY}", *kept_at, *quoted)
    return _Selection(columns=columns, passes=(*passes, (spread, *added_at, *quoted), second))


def _parts_of_change(
    node: InjectorNode, names: tuple[str, ...]
) -> tuple[tuple[str, ...], str | None, str | None]:
    """The columns that make up a value; of a change stream's flat rows, those of sign and error too."""
    return (names, None, None) if node.change is None else (image_names(names), CHANGE_SIGN, CHANGE_ERROR)


def _target(key: str, at: str, error: str | None, route: Route) -> str:
    # A null key or time makes the condition null, which is not true.
    taken = "" if error is None else f" AND {error} IS NULL"
    readable = f"{key} IS NOT NULL AND {at} BETWEEN {INSTANT_MIN_US} AND {INSTANT_MAX_US}{taken}"
    unreadable = unreadable_target(route.first)
    return f"CAST(CASE WHEN {readable} THEN {position_sql(key, route.lows, route.positions)} ELSE {unreadable} END AS INT)"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


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
    columns = [(_quoted(name), kind) for name, kind in zip(parts, kinds, strict=True)]
    if not isinstance(key, str):
        return _RoutedKey(sql=key_sql(columns), parts=tuple(key_names(key)))
    ((column, kind),) = columns
    if isinstance(kind, T.StringType):
        return _RoutedKey(sql=column, parts=key, column=key)
    # Outside of a list a null is no key.
    return _RoutedKey(sql=f"if({column} IS NULL, NULL, {key_sql(columns)})", parts=key)


def _time(schema: T.StructType, name: str, reading: TimeReading) -> tuple[str, str | None]:
    """The time in SQL as microseconds, and the input's own column if that is one a task can read.

    What cannot be read is null; the task finds out why (`routed_records`).
    """
    kind = _type_of(schema, name, "time")
    column = _quoted(name)
    if isinstance(kind, T.TimestampType):
        return f"unix_micros({column})", name
    if isinstance(kind, T.LongType | T.IntegerType):
        is_plain = isinstance(kind, T.LongType) and reading.unit == "us"
        return _micros_of_number(f"CAST({column} AS BIGINT)", reading), name if is_plain else None
    if isinstance(kind, T.StringType):
        return f"unix_micros(try_cast({_whole_instant(column, reading)} AS TIMESTAMP))", None
    if isinstance(kind, T.TimestampNTZType):
        if reading.offset_us is None:
            raise InvalidError(NO_ZONE, column=name, type=kind.simpleString())
        since_1970 = f"timestampdiff(MICROSECOND, TIMESTAMP_NTZ'1970-01-01 00:00:00', {column})"
        return f"{since_1970} - {reading.offset_us}L", None
    raise InvalidError(
        "the time column is no time: cast it to a timestamp, to whole microseconds or to ISO 8601 text",
        column=name,
        type=kind.simpleString(),
    )


def _micros_of_number(number: str, reading: TimeReading) -> str:
    factor, divisor = reading.factors
    if divisor > 1:
        return f"({number} - pmod({number}, {divisor}L)) div {divisor}L"
    if factor > 1:
        return f"try_multiply({number}, {factor}L)"
    if reading.is_unit_given:
        return number
    in_milliseconds = f"{number} BETWEEN {MILLISECONDS_MIN}L AND {MILLISECONDS_MAX}L"
    return f"CASE WHEN {in_milliseconds} THEN NULL ELSE {number} END"


def _whole_instant(column: str, reading: TimeReading) -> str:
    """SQL that completes a time in text; null for text that is not a time, even if Spark accepts it.

    Text without a zone gets that of the injector, whatever the session's: the same in both runners.
    """
    text = f"trim({column})"
    date, zone = INSTANT_TEXT.date, INSTANT_TEXT.zone
    minute = f"{date}[T ]{INSTANT_TEXT.minute}"
    second = f"{minute}{INSTANT_TEXT.second}"
    cases = {
        f"{second}{zone}": text,
        f"{minute}{zone}": f"concat(left({text}, 16), ':00', substring({text}, 17))",
    }
    if reading.zone is not None:
        cases |= {
            second: f"concat({text}, '{reading.zone}')",
            date: f"concat({text}, 'T00:00:00{reading.zone}')",
            minute: f"concat({text}, ':00{reading.zone}')",
        }
    # A dollar would let a newline at the end pass.
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


def _payload(schema: T.StructType, payload: Payload, stream: str) -> None:
    check_payload_column(payload, schema.names, stream=stream)
    kind = schema[payload.column].dataType
    if not isinstance(kind, T.BinaryType | T.StringType):
        raise InvalidError(
            "the payload column is neither binary nor text",
            stream=stream,
            column=payload.column,
            type=kind.simpleString(),
        )


# -- in Python -----------------------------------------------------------------------------


def _spread_in_python(frame: DataFrame, node: InjectorNode, routes: tuple[Route, ...]) -> Routed:
    schema = T.StructType([*_ADDED_FIELDS, *frame.schema.fields])
    own, sign, _ = _parts_of_change(node, _carried(frame.columns))
    record_id = None if node.id is None else ID
    columns = RoutedColumns(key=KEY, at=AT, id=record_id, error=ERROR, own=own, sign=sign)
    return Routed(frame=frame.mapInArrow(_python_router(node, routes), schema), columns=columns)


def _python_router(
    node: InjectorNode, routes: tuple[Route, ...]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def router(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = rows_to_extract(node, pa.Table.from_batches([batch]))
            for route in routes:
                yield _routed_batch(batch, rows, node, route)

    return router


def _routed_batch(batch: pa.RecordBatch, rows: Rows, node: InjectorNode, route: Route) -> pa.RecordBatch:
    injected = read_injected(node, route.key, rows)
    keys = injected.keys.to_pylist()
    errors = [injected.errors.get(row) for row in range(batch.num_rows)]
    targets = [
        unreadable_target(route.first)
        if error is not None or key is None
        else readable_target(route.positions[locate(route.lows, key)])
        for key, error in zip(keys, errors, strict=True)
    ]
    ids = pa.nulls(batch.num_rows, pa.binary()) if injected.ids is None else injected.ids
    untimed = np.isin(np.arange(batch.num_rows), list(injected.untimed))
    added = [
        pa.array(targets, pa.int32()),
        injected.keys,
        pa.array(injected.at, pa.int64(), mask=untimed),
        ids,
        pa.array(errors, pa.string()),
    ]
    names = [TARGET, KEY, AT, ID, ERROR, *batch.schema.names]
    return pa.RecordBatch.from_arrays([*added, *batch.columns], names=names)


_READ_MAX: Final = 200_000
"""How many productions all slots together may read: beyond it a stage that shuffles them costs less."""


def are_shuffled(productions: int, slots: int) -> bool:
    """Whether a shuffle costs less than to read all productions in each slot that runs.

    Example:
        >>> [are_shuffled(1_000, 16), are_shuffled(100_000, 16), are_shuffled(10_000_000, 1)]
        [False, True, False]
    """
    return slots > 1 and productions * slots > _READ_MAX


def production_routes(
    setting: WorkerSetting,
    topology: Topology,
    parts: SlotParts,
    slots: int,
    sources: Sequence[ProductionSource],
    writers: Mapping[str, int],
) -> ProductionRoutes:
    """Where the productions of committed files go, and which task reads which file.

    Args:
        setting: the store and the code.
        topology: the checked pipeline.
        parts: what runs, by position.
        slots: number of slots.
        sources: the files.
        writers: the slots that have written them, as far as it is known: a task there has them at hand.
    """
    intervals: dict[str, list[tuple[str, int]]] = {}
    for position, part in parts.items():
        intervals.setdefault(part.interval.computation, []).append((part.interval.low, position))
    consumers = []
    for name, mine in intervals.items():
        inbox = topology.computations[name].inbox
        if any(source.concerns(inbox) for source in sources):
            lows, positions = zip(*sorted(mine), strict=True)
            consumers.append(ConsumerRoute(computation=name, lows=lows, positions=positions))
    by_task: dict[int, list[tuple[int, ProductionSource]]] = {}
    for number, source in enumerate(sources):
        by_task.setdefault(writers.get(source.path, number) % slots, []).append((number, source))
    return ProductionRoutes(setting=setting, slots=slots, consumers=tuple(consumers), sources=by_task)


def routed_productions(frame: DataFrame, routes: ProductionRoutes) -> DataFrame:
    """The productions, in a row for each slot and file; not yet moved.

    Args:
        frame: a partition for each slot, whose rows mean nothing.
        routes: what to read, and where it goes.
    """
    return frame.mapInArrow(make_routing_task(routes), ROUTED_SCHEMA)
