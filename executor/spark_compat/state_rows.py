"""A stateful operator of a stopped Spark query, and its state as rows: for each key the text of the state, and timers.

Spark makes the rows: keys in the JVM, values in its Python workers by the codecs that read the state afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from functools import reduce
from typing import Any, Final, Literal, TypeAlias

import orjson
import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that every Spark user knows
from pyspark.sql.conversion import ArrowTableToRowsConversion
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from millpond.executor.spark.key_sql import check_key_type, key_sql, quoted
from millpond.executor.spark.session import spark_calls, worker_calls
from millpond.executor.spark_compat.group_state import EXPIRES_AT, TIMEOUT_TAG, TIMEOUTS, timeout_micros
from millpond.executor.spark_compat.schema import StructCodec
from millpond.executor.spark_compat.transform_with_state import TIME_MODES
from millpond.executor.spark_compat.variables import EXPIRY_TAG
from millpond.executor.time.instants import datetime_us
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.view_columns import EXPIRES

OperatorKind: TypeAlias = Literal["variables", "group_state", "duplicates", "aggregation"]
"""
The kind of state: a processor's variables, the state of ``applyInPandasWithState``, keys of ``dropDuplicates``, or the
buffers of aggregate functions.
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
_CAUSES_MAX: Final = 20
_VARIABLES: Final = ("ValueState", "ListState", "MapState")
"""The other entries in Spark's list of variables are its timers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulOperator:
    """A stateful operator of a query, with Spark's number and name. A processor has a time mode and variables."""

    number: int
    name: str
    kind: OperatorKind
    time_mode: str = "none"
    variables: tuple[str, ...] = ()


@contextmanager
def reading_checkpoint(path: str | None = None) -> Iterator[None]:
    """Turn an error of Spark, for which a damaged checkpoint is the reason, into a `DataError`."""
    try:
        with spark_calls(), worker_calls():
            yield
    except (PySparkException, Py4JError) as error:
        place = {} if path is None else {"path": path}
        raise DataError("spark cannot read the checkpoint", **place, reason=_root_cause(error)) from error


def _root_cause(error: Exception) -> str:
    cause: Any = getattr(error, "java_exception", None)
    for _ in range(_CAUSES_MAX):
        if cause is not None and (inner := cause.getCause()) is not None:
            cause = inner
    return str(cause or error).partition("\n")[0]


def find_operator(spark: SparkSession, path: str, number: int | None) -> StatefulOperator:
    """Return the operator with a number, or the query's only one if ``number`` is ``None``."""
    # Spark's state reader needs a service that the session starts only on access to its streams.
    _ = spark.streams.active
    with reading_checkpoint(path):
        found = spark.read.format("state-metadata").load(path).distinct().collect()
    rows = {row.operatorId: row for row in found}
    names = {number: row.operatorName for number, row in sorted(rows.items())}
    if not rows:
        raise InvalidError(
            "the checkpoint does not name the operators of its query: run a batch of the query with Spark 4",
            path=path,
        )
    if number is None:
        if len(rows) > 1:
            raise InvalidError(
                "the query has several operators: name one by its number", path=path, operators=names
            )
        (number,) = rows
    row = rows.get(number)
    if row is None:
        raise InvalidError("the query has no such operator", path=path, operator=number, operators=names)
    kind = _OPERATOR_KINDS.get(row.operatorName)
    if kind is None:
        raise InvalidError(
            "cannot move the state of this operator: it must be transformWithState, applyInPandasWithState,"
            " dropDuplicates or an aggregation",
            path=path,
            operator=row.operatorName,
        )
    properties = orjson.loads(row.operatorProperties or "{}")
    return StatefulOperator(
        number=row.operatorId,
        name=row.operatorName,
        kind=kind,
        time_mode=str(properties.get("timeMode", "none")).lower(),
        variables=tuple(
            one["stateName"]
            for one in properties.get("stateVariables", ())
            if one["stateVariableType"] in _VARIABLES
        ),
    )


Convert: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Makes a key's state from the operator's key and value, both by Spark's names of their fields."""

_TIMER: Final = "struct<tag: string, domain: string, at: bigint>"
_PARTS: Final = f"key string, member string, timers array<{_TIMER}>"
_ROWS: Final = f"key string, state string, timers array<{_TIMER}>"
_ARROW: Final = pa.schema(
    {
        "key": pa.string(),
        "state": pa.string(),
        "timers": pa.list_(pa.struct({"tag": pa.string(), "domain": pa.string(), "at": pa.int64()})),
    }
)
_MILLIS: Final = 1_000
_TTL_FIELDS: Final = ["value", "ttlExpirationMs"]
_GROUP_STATE: Final = "groupState"
_TIMEOUT: Final = "timeoutTimestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The rows of an operator.

    Attributes:
        frame: a row for each key, with ``key``, ``state`` (JSON) and ``timers``.
        key: the columns of the operator's key.
        columns: the type in Spark, by variable name or ``state``.
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
    """Return the rows of an operator at the end of a batch.

    With ``plain_key``, the key is the text of its only column. ``timeout`` is the query's ``GroupStateTimeout``,
    ``event_time`` the key column of ``dropDuplicates`` with the end of a key's life. ``convert`` makes a key's state
    from an aggregation. ``None`` keeps Spark's buffers.
    """
    if convert is not None and operator.kind != "aggregation":
        raise InvalidError("convert is of aggregations only", operator=operator.name)
    if timeout is not None and operator.kind != "group_state":
        raise InvalidError("timeout is of applyInPandasWithState only", operator=operator.name)
    if event_time is not None and operator.kind != "duplicates":
        raise InvalidError("event_time is of dropDuplicates only", operator=operator.name)
    reading = _Reading(spark, path, operator, batch, plain_key=plain_key)
    with reading_checkpoint(path):
        if operator.kind == "variables":
            return _of_variables(reading)
        return _of_values(reading, timeout, event_time, convert)


def _of_values(
    reading: _Reading, timeout: str | None, event_time: str | None, convert: Convert | None
) -> StateRows:
    operator, frame = reading.operator, reading.frame()
    key, value = _key_of(frame), _distinct(_struct(frame.schema["value"].dataType))
    if event_time is not None and event_time not in key.names:
        raise InvalidError(
            "event_time must be a column of the key", event_time=event_time, key=key.simpleString()
        )
    timeouts = _timeout_domain(operator, frame, timeout)
    writer = _ValueWriter(operator.kind, key, value, timeouts, event_time, convert)
    given = frame.select(
        F.expr(reading.key_text(key)).alias("text"), "key", F.col("value").cast(value).alias("value")
    )
    columns = {"state": writer.schema.simpleString()}
    return StateRows(frame=given.mapInArrow(writer.rows, _ROWS), key=key, columns=columns)


def batches_of(rows: StateRows) -> pa.RecordBatchReader:
    # One partition after the other, so that memory does not grow with the number of rows.
    packed = rows.frame.mapInArrow(_packed, "batch binary")

    def batches() -> Iterator[pa.RecordBatch]:
        rows = packed.toLocalIterator(prefetchPartitions=True)
        while True:
            with reading_checkpoint():
                row = next(rows, None)
            if row is None:
                return
            reader: pa.RecordBatchReader = pa.ipc.open_stream(bytes(row[0]))
            yield from reader

    return pa.RecordBatchReader.from_batches(_ARROW, batches())


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sink = pa.BufferOutputStream()
        whole = pa.Table.from_batches([batch]).cast(_ARROW)
        with pa.ipc.new_stream(sink, _ARROW) as writer:
            writer.write_table(whole)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()])], names=["batch"])


class _Reading:
    def __init__(
        self, spark: SparkSession, path: str, operator: StatefulOperator, batch: int, *, plain_key: bool
    ) -> None:
        self.operator = operator
        self._spark = spark
        self._batch = batch
        self._plain_key = plain_key
        self._path = path

    def frame(self, **options: str) -> DataFrame:
        reader = self._spark.read.format("statestore").option("operatorId", str(self.operator.number))
        return reader.option("batchId", str(self._batch)).options(**options).load(self._path)

    def key_text(self, kind: StructType) -> str:
        for field in kind:
            check_key_type(field.dataType, field.name)
        columns = [(f"key.{quoted(field.name)}", field.dataType) for field in kind]
        if not self._plain_key:
            return key_sql(columns)
        if len(columns) != 1 or kind[0].dataType.simpleString() != "string":
            raise InvalidError(
                "a plain key must be one column of text", path=self._path, key=kind.simpleString()
            )
        return columns[0][0]


def _key_of(frame: DataFrame) -> StructType:
    return _struct(frame.schema["key"].dataType)


def _of_variables(reading: _Reading) -> StateRows:
    operator = reading.operator
    frames, columns, key = [], {}, None
    for variable in operator.variables:
        frame = reading.frame(stateVarName=variable, flattenCollectionTypes="false")
        key = _key_of(frame)
        column = next(name for name in frame.columns if name not in {"key", "partition_id"})
        columns[variable] = frame.schema[column].dataType.simpleString()
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
    """Return one row for each key, from the members of its state and its timers."""
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
            # A key has one expiry timer, so keep the earliest of its variables.
            f"""concat(
                filter(t, one -> one.tag <> '{EXPIRY_TAG}'),
                slice(array_sort(filter(t, one -> one.tag = '{EXPIRY_TAG}')), 1, 1)
            ) AS timers""",
        )
    )


class _VariableWriter:
    """Writes a variable as a member of the state of `TransformWithState`."""

    def __init__(self, variable: str, kind: DataType) -> None:
        what = f"the state {variable!r}"
        self._name = orjson.dumps(variable).decode()
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
        self._expires = fields.names == _TTL_FIELDS
        self._codec = StructCodec(_struct(fields[0].dataType) if self._expires else fields, what)

    def members(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _converted(batches, self._schema, "member", self._member)

    def _member(self, key: str, value: Any) -> _Row | None:
        written = self._written(value)
        if written is None:
            return None
        parts = written if isinstance(written, list) else [written]
        first = min((part[EXPIRES] for part in parts if EXPIRES in part), default=None)
        timer = None if first is None else {"tag": EXPIRY_TAG, "domain": "wall", "at": first * _MILLIS}
        return key, f"{self._name}:{orjson.dumps(written).decode()}", timer

    def _written(self, value: Any) -> Any:
        if value is None:
            return None
        if self._is_map:
            entry = self._value if self._expires else lambda part: {"value": self._value(part)}
            return [{"key": self._key_codec.encode(key), **entry(part)} for key, part in value.items()]
        if self._is_list:
            return list(map(self._value, value))
        return self._value(value)

    def _value(self, value: Any) -> dict[str, Any]:
        if not self._expires:
            return self._codec.encode(value)
        return {"value": self._codec.encode(value[0]), EXPIRES: value[1]}


@dataclass(eq=False)
class _ValueWriter:
    """Writes the only value of an operator's key, and its timer."""

    kind: OperatorKind
    key: StructType
    value: StructType
    timeouts: str
    event_time: str | None
    convert: Convert | None

    def __post_init__(self) -> None:
        is_group_state = self.kind == "group_state"
        self.schema = _struct(self.value[_GROUP_STATE].dataType) if is_group_state else self.value
        self._codec = StructCodec(self.schema, "the state")
        self._time = None if self.event_time is None else self.key.names.index(self.event_time)

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fields = {"text": StringType(), "key": self.key, "value": self.value}
        schema = StructType([StructField(name, kind) for name, kind in fields.items()])
        return _converted(batches, schema, "state", self._row)

    def _row(self, text: str, key: Any, value: Any) -> _Row | None:
        state, timer = self._state(key, value)
        if state is None and timer is None:
            return None
        return text, None if state is None else orjson.dumps(state).decode(), timer

    def _state(self, key: Any, value: Any) -> tuple[Any, dict[str, Any] | None]:
        timer = None
        if self.kind == "group_state":
            timeout_ms = value[_TIMEOUT]
            if timeout_ms is not None and timeout_ms != GroupState.NO_TIMESTAMP:
                timer = {"tag": TIMEOUT_TAG, "domain": self.timeouts, "at": timeout_micros(timeout_ms)}
            value = value[_GROUP_STATE]
        elif self.kind == "duplicates":
            expires_at = value[EXPIRES_AT] if EXPIRES_AT in self.schema.names else None
            if expires_at is None and self._time is not None and key[self._time] is not None:
                expires_at = datetime_us(key[self._time].astimezone(UTC))
            if expires_at is None:
                return {}, None
            return {EXPIRES_AT: expires_at}, {"tag": EXPIRY_TAG, "domain": "event", "at": expires_at}
        if value is None:
            return None, timer
        if self.convert is None:
            return self._codec.encode(value), timer
        named = dict(zip(self.key.names, key, strict=True)), dict(zip(self.schema.names, value, strict=True))
        try:
            return self.convert(*named), timer
        except Exception as cause:
            raise InvalidError(
                f"convert failed for a key: {type(cause).__name__}: {cause}", key=named[0], buffers=named[1]
            ) from cause


def _timeout_domain(operator: StatefulOperator, frame: DataFrame, timeout: str | None) -> str:
    """Return the time domain of the timeouts of ``applyInPandasWithState``, "" where there are no timeouts."""
    domain = None if timeout is None else TIMEOUTS.get(timeout)
    if domain is not None:
        return domain
    has_timeouts = f"value.{_TIMEOUT} <> {GroupState.NO_TIMESTAMP}"
    if operator.kind == "group_state" and not frame.where(has_timeouts).isEmpty():
        raise InvalidError(
            "keys have timeouts, and the checkpoint does not record their kind: pass timeout, the query's"
            " GroupStateTimeout",
            timeout=timeout,
            known=sorted(name for name, known in TIMEOUTS.items() if known is not None),
        )
    return ""


_Row: TypeAlias = tuple[str, str | None, dict[str, Any] | None]
"""A key with its text and its timer."""


def _converted(
    batches: Iterable[pa.RecordBatch], schema: StructType, name: str, convert: Callable[..., _Row | None]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that ``convert`` makes of Spark's rows; ``name`` is the column of their texts."""
    for batch in batches:
        found = ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), schema)
        rows = [row for row in (convert(*values) for values in found) if row is not None]
        columns = [
            [row[0] for row in rows],
            [row[1] for row in rows],
            [[row[2]] if row[2] else None for row in rows],
        ]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, _ARROW.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=["key", name, "timers"])


def _struct(kind: DataType) -> StructType:
    if not isinstance(kind, StructType):
        raise DataError("cannot read this form of Spark's state", type=kind.simpleString())
    return kind


def _distinct(kind: StructType) -> StructType:
    """Return the fields under distinct names, because buffers of two aggregate functions may share a name."""
    fields, seen = [], Counter[str]()
    for field in kind:
        seen[field.name] += 1
        name = field.name if seen[field.name] == 1 else f"{field.name}_{seen[field.name]}"
        fields.append(StructField(name, field.dataType))
    return StructType(fields)
