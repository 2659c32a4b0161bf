"""The rows that a query's state becomes: for each key the text of its state, and its timers.

Spark makes them: keys in the JVM, values in its Python workers by the codecs with which the state is read afterwards.

The stateful operators of a query, by its checkpoint, and what kind of state each has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import orjson
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from millpond.executor.spark.key_sql import check_key_type, key_sql
from millpond.executor.spark.session import worker_calls
from millpond.executor.spark_compat.drop_duplicates import EXPIRES_AT
from millpond.executor.spark_compat.group_state import TIMEOUT_TAG, TIMEOUTS, timeout_micros
from millpond.executor.spark_compat.transform_with_state import TIME_MODES
from millpond.executor.spark_compat.typed_values import StructCodec
from millpond.executor.spark_compat.variables import EXPIRY_TAG
from millpond.executor.time.instants import datetime_us
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.view_columns import EXPIRES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


OperatorKind: TypeAlias = Literal["variables", "group_state", "duplicates", "aggregation"]
"""
What the state is: a processor's variables, the state of ``applyInPandasWithState``, keys that were seen, or the buffers
of aggregate functions.
"""

_OPERATOR_KINDS: Final[dict[str, OperatorKind]] = {
    "transformWithStateExec": "variables",
    "transformWithStateInPandasExec": "variables",
    "transformWithStateInPySparkExec": "variables",
    "applyInPandasWithState": "group_state",
    "flatMapGroupsWithState": "group_state",
    "dedupe": "duplicates",
    "dedupeWithinWatermark": "duplicates",
    "stateStoreSave": "aggregation",
}
_VARIABLES: Final = ("ValueState", "ListState", "MapState")
"""Spark lists its timers among the variables, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVariable:
    """A variable of a ``StatefulProcessor``.

    Attributes:
        name: its name.
        kind: ``"ValueState"``, ``"ListState"`` or ``"MapState"``.
    """

    name: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulOperator:
    """A stateful operator of a query.

    Attributes:
        number: Spark's number for it within the query.
        name: Spark's name for it.
        kind: what its state is.
        time_mode: of a processor: ``"none"``, ``"processingtime"`` or ``"eventtime"``.
        variables: of a processor.
    """

    number: int
    name: str
    kind: OperatorKind
    time_mode: str = "none"
    variables: tuple[StateVariable, ...] = ()


def find_operator(spark: SparkSession, path: str, number: int | None) -> StatefulOperator:
    """A stateful operator of a query.

    Args:
        spark: reads the checkpoint.
        path: the checkpoint.
        number: which; ``None`` if the query has one only.

    Raises:
        InvalidError: there is none of that number, or its state cannot be moved.
    """
    # Spark's reader of states asks a service that the session starts with the first look at its streams.
    _ = spark.streams.active
    rows = {
        row.operatorId: row for row in spark.read.format("state-metadata").load(path).distinct().collect()
    }
    names = {number: row.operatorName for number, row in sorted(rows.items())}
    if not rows:
        raise InvalidError(
            "the checkpoint does not say which operators its query has: let the query run a batch with Spark 4",
            path=path,
        )
    if number is None:
        if len(rows) > 1:
            raise InvalidError("the query has several operators: say which", path=path, operators=names)
        (number,) = rows
    row = rows.get(number)
    if row is None:
        raise InvalidError("the query has no such operator", path=path, operator=number, operators=names)
    kind = _OPERATOR_KINDS.get(row.operatorName)
    if kind is None:
        raise InvalidError(
            "the state of this operator cannot be moved: that of transformWithState, applyInPandasWithState,"
            " dropDuplicates and aggregations can",
            path=path,
            operator=row.operatorName,
        )
    return _operator(row, kind)


def _operator(row: Any, kind: OperatorKind) -> StatefulOperator:
    told = orjson.loads(row.operatorProperties or "{}")
    return StatefulOperator(
        number=row.operatorId,
        name=row.operatorName,
        kind=kind,
        time_mode=str(told.get("timeMode", "none")).lower(),
        variables=tuple(
            StateVariable(name=one["stateName"], kind=one["stateVariableType"])
            for one in told.get("stateVariables", ())
            if one["stateVariableType"] in _VARIABLES
        ),
    )


def state_frame(
    spark: SparkSession, path: str, operator: StatefulOperator, batch: int, **options: str
) -> DataFrame:
    """The state of an operator at the end of a batch, as Spark's state data source reads it.

    Args:
        spark: reads it.
        path: the checkpoint.
        operator: the operator.
        batch: the batch.
        options: of the data source.
    """
    reader = spark.read.format("statestore").option("operatorId", str(operator.number))
    return reader.option("batchId", str(batch)).options(**options).load(path)


Convert: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Makes the state of a key of the operator's key and value, both by Spark's names of their fields."""

_TIMER: Final = "struct<tag: string, domain: string, at: bigint>"
_PARTS: Final = f"key string, member string, timers array<{_TIMER}>"
_ROWS: Final = f"key string, state string, timers array<{_TIMER}>"
_ARROW: Final = pa.schema(
    [
        pa.field("key", pa.string()),
        pa.field("state", pa.string()),
        pa.field(
            "timers",
            pa.list_(pa.struct([("tag", pa.string()), ("domain", pa.string()), ("at", pa.int64())])),
        ),
    ]
)
_KINDS: Final = [field.type for field in _ARROW]
_MILLIS: Final = 1_000
_TTL_VALUE: Final = "value"
_TTL_EXPIRY: Final = "ttlExpirationMs"
_GROUP_STATE: Final = "groupState"
_TIMEOUT: Final = "timeoutTimestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The rows of an operator.

    Attributes:
        frame: a row for each key, with ``key``, ``state`` (JSON) and ``timers``.
        key: the columns of the operator's key.
        columns: by name of a variable, or ``state``, the type that it has in Spark.
    """

    frame: DataFrame
    key: StructType
    columns: Mapping[str, str]


def state_rows(
    spark: SparkSession,
    path: str,
    operator: StatefulOperator,
    batch: int,
    *,
    plain_key: bool,
    timeout: str | None,
    event_time: str | None,
    convert: Convert | None,
) -> StateRows:
    """The rows of an operator at the end of a batch.

    Args:
        spark: reads them.
        path: the checkpoint.
        operator: the operator.
        batch: the batch.
        plain_key: whether the key is the text of its only column, as that of a pipeline with ``key="column"``.
        timeout: of ``applyInPandasWithState``, one of Spark's ``GroupStateTimeout``.
        event_time: of duplicates, the key's column until which a key is kept.
        convert: of an aggregation, makes the state of a key; ``None`` leaves it as Spark has it.

    Raises:
        InvalidError: no key can be made of the operator's, or an option is of another kind of operator.
    """
    if convert is not None and operator.kind != "aggregation":
        raise InvalidError(
            "convert is of aggregations: other states go on as they are", operator=operator.name
        )
    if timeout is not None and operator.kind != "group_state":
        raise InvalidError("timeout is of applyInPandasWithState", operator=operator.name)
    if event_time is not None and operator.kind != "duplicates":
        raise InvalidError("event_time is of dropDuplicates", operator=operator.name)
    reading = _Reading(spark, path, operator, batch, plain_key=plain_key)
    if operator.kind == "variables":
        return _of_variables(reading)
    return _of_values(reading, timeout, event_time, convert)


def batches_of(rows: StateRows) -> pa.RecordBatchReader:
    """The rows as record batches, one partition after the other, so that memory does not grow with their number."""
    packed = rows.frame.mapInArrow(_packed, "batch binary")

    def batches() -> Iterator[pa.RecordBatch]:
        for (buffer,) in _told_by_workers(packed.toLocalIterator(prefetchPartitions=True)):
            reader: pa.RecordBatchReader = pa.ipc.open_stream(bytes(buffer))
            yield from reader

    return pa.RecordBatchReader.from_batches(_ARROW, batches())


def _told_by_workers(rows: Iterator[Any]) -> Iterator[Any]:
    while True:
        with worker_calls():
            row = next(rows, None)
        if row is None:
            return
        yield row


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sink = pa.BufferOutputStream()
        whole = pa.Table.from_batches([batch]).cast(_ARROW)
        with pa.ipc.new_stream(sink, _ARROW) as writer:
            writer.write_table(whole)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()])], names=["batch"])


class _Reading:
    """Reads the state of one operator."""

    def __init__(
        self, spark: SparkSession, path: str, operator: StatefulOperator, batch: int, *, plain_key: bool
    ) -> None:
        self.operator = operator
        self._spark = spark
        self._batch = batch
        self._plain_key = plain_key
        self._path = path

    def frame(self, **options: str) -> DataFrame:
        """A part of the state, as the data source has it."""
        return state_frame(self._spark, self._path, self.operator, self._batch, **options)

    def key_text(self, kind: StructType) -> str:
        """The text of a key, in SQL."""
        for field in kind:
            check_key_type(field.dataType, field.name)
        columns = [(f"key.`{field.name.replace('`', '``')}`", field.dataType) for field in kind]
        if not self._plain_key:
            return key_sql(columns)
        if len(columns) != 1 or kind[0].dataType.simpleString() != "string":
            raise InvalidError("a plain key is one column of text", path=self._path, key=kind.simpleString())
        return columns[0][0]


def _key_of(frame: DataFrame) -> StructType:
    """The columns of the key in a frame of the data source."""
    return _struct(frame.schema["key"].dataType)


# -- transformWithState --------------------------------------------------------------------


def _of_variables(reading: _Reading) -> StateRows:
    operator = reading.operator
    frames, columns, key = [], {}, None
    for variable in operator.variables:
        frame = reading.frame(stateVarName=variable.name, flattenCollectionTypes="false")
        key = _key_of(frame)
        column = next(name for name in frame.columns if name not in {"key", "partition_id"})
        columns[variable.name] = frame.schema[column].dataType.simpleString()
        writer = _VariableWriter(variable, frame.schema[column].dataType)
        given = frame.selectExpr(f"{reading.key_text(key)} AS key", f"`{column}` AS value")
        frames.append(given.mapInArrow(writer.members, _PARTS))
    domain = TIME_MODES.get(operator.time_mode)
    if domain is not None:
        timers = reading.frame(readRegisteredTimers="true")
        key = _key_of(timers)
        at = "expiration_timestamp_ms"
        frames.append(
            timers.selectExpr(
                f"{reading.key_text(key)} AS key",
                "CAST(NULL AS STRING) AS member",
                f"array(named_struct('tag', CAST({at} AS STRING), 'domain', '{domain}', 'at', {at} * {_MILLIS})) "
                "AS timers",
            )
        )
    if key is None:
        raise InvalidError("the processor has neither variables nor timers", operator=operator.name)
    return StateRows(frame=_grouped(frames), key=key, columns=columns)


def _grouped(parts: Sequence[DataFrame]) -> DataFrame:
    """One row for each key, of the members of its state and of its timers."""
    together: DataFrame = reduce(lambda one, other: one.unionAll(other), parts)
    return (
        together.groupBy("key")
        .agg(
            F.array_sort(F.collect_list("member")).alias("members"),
            F.flatten(F.collect_list("timers")).alias("t"),
        )
        .selectExpr(
            "key",
            "CASE WHEN size(members) > 0 THEN concat('{', concat_ws(',', members), '}') END AS state",
            # Of the variables with times to live, the first that expires wakes the key.
            f"""concat(
                filter(t, one -> one.tag <> '{EXPIRY_TAG}'),
                slice(array_sort(filter(t, one -> one.tag = '{EXPIRY_TAG}')), 1, 1)
            ) AS timers""",
        )
    )


class _VariableWriter:
    """Writes a variable as the state of `TransformWithState` has it."""

    def __init__(self, variable: StateVariable, kind: DataType) -> None:
        what = f"the state {variable.name!r}"
        self._name = orjson.dumps(variable.name).decode()
        self._schema = StructType([StructField("key", StringType()), StructField("value", kind)])
        self._is_map = isinstance(kind, MapType)
        self._is_list = isinstance(kind, ArrayType)
        value = kind
        if isinstance(kind, MapType):
            self._key_codec = StructCodec(_struct(kind.keyType), what)
            value = kind.valueType
        elif isinstance(kind, ArrayType):
            value = kind.elementType
        fields = _struct(value)
        self._expires = fields.names == [_TTL_VALUE, _TTL_EXPIRY]
        self._codec = StructCodec(_struct(fields[0].dataType) if self._expires else fields, what)

    def members(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of ``key`` and ``value`` to parts of rows."""
        for batch in batches:
            rows = ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), self._schema)
            keys, members, timers = [], [], []
            for key, value in rows:
                written = self._written(value)
                if written is None:
                    continue
                keys.append(key)
                members.append(f"{self._name}:{orjson.dumps(written).decode()}")
                timers.append(_expiry_of(written))
            yield _batch(keys, members, timers, "member")

    def _written(self, value: Any) -> Any:
        if value is None:
            return None
        if self._is_map:
            return [{"key": self._key_codec.to_json(key), **self._entry(part)} for key, part in value.items()]
        if self._is_list:
            return list(map(self._value, value))
        return self._value(value)

    def _value(self, value: Any) -> dict[str, Any]:
        if not self._expires:
            return self._codec.to_json(value)
        return {"value": self._codec.to_json(value[0]), EXPIRES: value[1]}

    def _entry(self, value: Any) -> dict[str, Any]:
        return self._value(value) if self._expires else {"value": self._codec.to_json(value)}


def _expiry_of(written: Any) -> list[dict[str, Any]] | None:
    """The timer that deletes what of a variable expires first."""
    parts = written if isinstance(written, list) else [written]
    first = min((part[EXPIRES] for part in parts if EXPIRES in part), default=None)
    return None if first is None else [{"tag": EXPIRY_TAG, "domain": "wall", "at": first * _MILLIS}]


# -- one value a key -----------------------------------------------------------------------


def _of_values(
    reading: _Reading, timeout: str | None, event_time: str | None, convert: Convert | None
) -> StateRows:
    frame = reading.frame()
    key, value = _key_of(frame), _distinct(_struct(frame.schema["value"].dataType))
    if event_time is not None and event_time not in key.names:
        raise InvalidError("the key has no such column", event_time=event_time, key=key.simpleString())
    timeouts = _timeout_domain(reading.operator, frame, timeout)
    writer = _ValueWriter(reading.operator, key, value, timeouts, event_time, convert)
    given = frame.select(
        F.expr(reading.key_text(key)).alias("text"), "key", F.col("value").cast(value).alias("value")
    )
    return StateRows(
        frame=given.mapInArrow(writer.rows, _ROWS), key=key, columns={"state": writer.schema.simpleString()}
    )


class _ValueWriter:
    """Writes the only value that an operator has for a key, and the timer that belongs to it.

    Attributes:
        schema: the fields of the state.
    """

    def __init__(
        self,
        operator: StatefulOperator,
        key: StructType,
        value: StructType,
        timeouts: str,
        event_time: str | None,
        convert: Convert | None,
    ) -> None:
        self._kind = operator.kind
        self._convert = convert
        self._key = key
        self._timeouts = timeouts
        self._event_time = None if event_time is None else key.names.index(event_time)
        self.schema: StructType = (
            _struct(value[_GROUP_STATE].dataType) if self._kind == "group_state" else value
        )
        self._value = value
        self._codec = StructCodec(self.schema, "the state")

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert batches of ``text``, ``key`` and ``value`` to rows."""
        schema = StructType(
            [
                StructField("text", StringType()),
                StructField("key", self._key),
                StructField("value", self._value),
            ]
        )
        for batch in batches:
            keys, states, timers = [], [], []
            for text, key, value in ArrowTableToRowsConversion.convert(
                pa.Table.from_batches([batch]), schema
            ):
                state, timer = self._row(key, value)
                if state is None and timer is None:
                    continue
                keys.append(text)
                states.append(None if state is None else orjson.dumps(state).decode())
                timers.append(None if timer is None else [timer])
            yield _batch(keys, states, timers, "state")

    def _row(self, key: Any, value: Any) -> tuple[Any, dict[str, Any] | None]:
        timer = None
        if self._kind == "group_state":
            timeout_ms = value[_TIMEOUT]
            if timeout_ms is not None and timeout_ms != GroupState.NO_TIMESTAMP:
                timer = {"tag": TIMEOUT_TAG, "domain": self._timeouts, "at": timeout_micros(timeout_ms)}
            value = value[_GROUP_STATE]
        elif self._kind == "duplicates":
            return self._seen(key, value)
        if value is None:
            return None, timer
        if self._convert is None:
            return self._codec.to_json(value), timer
        named = dict(zip(self._key.names, key, strict=True)), dict(zip(self.schema.names, value, strict=True))
        try:
            return self._convert(*named), timer
        except Exception as cause:
            raise InvalidError(
                f"convert failed for a key: {type(cause).__name__}: {cause}", key=named[0], buffers=named[1]
            ) from cause

    def _seen(self, key: Any, value: Any) -> tuple[Any, dict[str, Any] | None]:
        """A key as `DropDuplicates` keeps it."""
        expires_at = value[EXPIRES_AT] if EXPIRES_AT in self.schema.names else None
        if expires_at is None and self._event_time is not None and key[self._event_time] is not None:
            expires_at = datetime_us(key[self._event_time].astimezone(UTC))
        if expires_at is None:
            return {}, None
        return {EXPIRES_AT: expires_at}, {"tag": EXPIRY_TAG, "domain": "event", "at": expires_at}


def _timeout_domain(operator: StatefulOperator, frame: DataFrame, timeout: str | None) -> str:
    """The time domain of the timeouts of ``applyInPandasWithState``; of other operators, and without any, it is not used."""
    domain = None if timeout is None else TIMEOUTS.get(timeout)
    if domain is not None:
        return domain
    has_timeouts = f"value.{_TIMEOUT} <> {GroupState.NO_TIMESTAMP}"
    if operator.kind == "group_state" and not frame.where(has_timeouts).isEmpty():
        raise InvalidError(
            "keys have timeouts, and the checkpoint does not say of which time: pass timeout, the GroupStateTimeout"
            " that the query had",
            timeout=timeout,
            known=sorted(name for name, known in TIMEOUTS.items() if known is not None),
        )
    return ""


def _batch(
    keys: Sequence[str], texts: Sequence[str | None], timers: Sequence[Any], name: str
) -> pa.RecordBatch:
    arrays = [pa.array(part, kind) for part, kind in zip((keys, texts, timers), _KINDS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=["key", name, "timers"])


def _struct(kind: DataType) -> StructType:
    if not isinstance(kind, StructType):
        raise DataError("Spark's state has another form than this version knows", type=kind.simpleString())
    return kind


def _distinct(kind: StructType) -> StructType:
    """The same fields under names that differ: the buffers of two aggregate functions may have one name."""
    fields, seen = [], Counter[str]()
    for field in kind:
        seen[field.name] += 1
        name = field.name if seen[field.name] == 1 else f"{field.name}_{seen[field.name]}"
        fields.append(StructField(name, field.dataType))
    return StructType(fields)
