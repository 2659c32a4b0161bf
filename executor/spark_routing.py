"""
Routing: every record of an outside DataFrame on its way to the interval that owns its key.

Key, event time and record id are got in the JVM as long as columns name them, and the
interval is found there too, so that Python sees a record for the first time in the task that
processes it. Functions as extractors cost a Python stage of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - the name that every Spark user knows
from pyspark.sql import types as T  # noqa: N812

from millpond.executor.injection import read_injected
from millpond.executor.key_extractor import KeyExtractor
from millpond.executor.routed_columns import AT, COLUMNS, ERROR, ID, KEY, TARGET
from millpond.executor.topology import InjectorNode, Topology
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import locate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from millpond.executor.superstep_plan import SuperstepPlan

__all__ = ["Route", "key_columns", "route", "routes_of"]

_ROUTED_FIELDS = (
    T.StructField(TARGET, T.IntegerType()),
    T.StructField(KEY, T.StringType()),
    T.StructField(AT, T.LongType()),
    T.StructField(ID, T.BinaryType()),
    T.StructField(ERROR, T.StringType()),
)
_WIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """
    One consumer of the input: its intervals' positions in the plan and how it gets its keys.

    Attributes:
        first: position of its first interval; the others follow in key order.
        lows: low bounds of its intervals, the first ``""``.
        key: its extractor; ``None`` keeps the injector's key.
    """

    first: int
    lows: tuple[str, ...]
    key: KeyExtractor


def routes_of(topology: Topology, stream: str, plan: SuperstepPlan) -> tuple[Route, ...]:
    """
    Where the records of ``stream`` go in this superstep.
    """
    found = []
    for consumer in topology.consumers_of(stream):
        name = consumer.computation.name
        mine = [i for i, part in enumerate(plan.intervals) if part.interval.computation == name]
        lows = tuple(plan.intervals[i].interval.low for i in mine)
        found.append(Route(first=mine[0], lows=lows, key=consumer.subscription.key))
    return tuple(found)


def route(
    frame: DataFrame, node: InjectorNode, routes: Sequence[Route], *, slots: int, shuffle: bool = True
) -> DataFrame:
    """
    The records with `COLUMNS` added, one row per consumer, in the partition of their slot.

    Args:
        frame: the outside records.
        node: how key, time and id are got.
        routes: the consumers.
        slots: number of tasks; an interval at position *i* belongs to slot ``i % slots``.
        shuffle: whether to move the rows at all.

    Raises:
        InvalidError: a column is missing or of a type that cannot be a key, a time or an id.
    """
    named = all(isinstance(part, str) or part is None for part in (node.key, node.at, node.id))
    named = named and all(isinstance(r.key, str) or r.key is None for r in routes)
    routed = _route_by_columns(frame, node, routes) if named else _route_in_python(frame, node, routes)
    if not shuffle:
        return routed
    position = F.when(F.col(TARGET) < 0, -1 - F.col(TARGET)).otherwise(F.col(TARGET))
    return routed.repartitionById(slots, F.pmod(position, F.lit(slots)).cast("int"))


def key_columns(frame: DataFrame, node: InjectorNode, key: KeyExtractor) -> DataFrame:
    """
    The keys, as a column `KEY`, that a consumer gets of ``frame``: for sampling.
    """
    probe = Route(first=0, lows=("",), key=key)
    return route(frame, node, [probe], slots=1, shuffle=False).select(KEY)


# -- in the JVM ----------------------------------------------------------------------------


def _route_by_columns(frame: DataFrame, node: InjectorNode, routes: Sequence[Route]) -> DataFrame:
    at = _time_column(frame, str(node.at))
    record_id = F.lit(None).cast("binary") if node.id is None else _id_column(frame, str(node.id))
    own = frame.columns
    timed = frame.select("*", at.alias(AT), record_id.alias(ID))
    targets = [_target(timed, node, one) for one in routes]
    if len(targets) == 1:
        target, key, error = targets[0]
        return timed.select(
            target.alias(TARGET), key.alias(KEY), AT, ID, error.alias(ERROR), *map(_named, own)
        )
    choices = F.array(*(F.struct(t.alias("t"), k.alias("k"), e.alias("e")) for t, k, e in targets))
    exploded = timed.select("*", F.explode(choices).alias("__millpond_route"))
    chosen = F.col("__millpond_route")
    return exploded.select(
        chosen["t"].alias(TARGET), chosen["k"].alias(KEY), AT, ID, chosen["e"].alias(ERROR), *map(_named, own)
    )


def _target(timed: DataFrame, node: InjectorNode, one: Route) -> tuple[Column, Column, Column]:
    name = str(node.key) if one.key is None else str(one.key)
    key = _key_column(timed, name)
    error = F.when(key.isNull(), F.lit("the key is null")).when(
        F.col(AT).isNull(), F.lit("the event time is null or unreadable")
    )
    position = _position(key, one)
    return F.when(error.isNotNull(), F.lit(-1 - one.first)).otherwise(position).cast("int"), key, error


def _position(key: Column, one: Route) -> Column:
    cuts = one.lows[1:]
    if len(cuts) <= _WIDE:
        position = F.lit(one.first)
        for cut in cuts:
            position = position + (key >= F.lit(cut)).cast("int")
        return position
    bounds = F.array(*(F.lit(cut) for cut in cuts))
    return F.lit(one.first) + F.size(F.filter(bounds, lambda cut: cut <= key))


def _named(name: str) -> Column:
    return F.col(_quoted(name))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _type_of(frame: DataFrame, name: str, use: str) -> T.DataType:
    if name not in frame.columns:
        raise InvalidError(f"the input has no such {use} column", column=name, columns=frame.columns)
    return frame.schema[name].dataType


def _key_column(frame: DataFrame, name: str) -> Column:
    kind = _type_of(frame, name, "key")
    if not isinstance(kind, T.StringType | T.NullType):
        raise InvalidError("the key column is not text", column=name, type=kind.simpleString())
    return _named(name).cast("string")


def _time_column(frame: DataFrame, name: str) -> Column:
    kind = _type_of(frame, name, "time")
    column = _named(name)
    if isinstance(kind, T.TimestampType):
        return F.unix_micros(column)
    if isinstance(kind, T.LongType | T.IntegerType):
        return column.cast("long")
    if isinstance(kind, T.StringType):
        # text without a zone is UTC, whatever the session's zone: the same in both runners
        zoned = F.when(column.rlike(r"(?i)(z|utc|[+-]\d\d:?(\d\d)?)$"), column)
        return F.unix_micros(F.coalesce(zoned, F.concat(column, F.lit("Z"))).try_cast("timestamp"))
    if isinstance(kind, T.TimestampNTZType):
        raise InvalidError(
            "the time column has no zone; say which one it means, for example with to_utc_timestamp",
            column=name,
        )
    raise InvalidError("the time column is no time", column=name, type=kind.simpleString())


def _id_column(frame: DataFrame, name: str) -> Column:
    kind = _type_of(frame, name, "id")
    if isinstance(kind, T.BinaryType):
        return _named(name)
    if isinstance(kind, T.StringType | T.LongType | T.IntegerType):
        return _named(name).cast("string").cast("binary")
    raise InvalidError(
        "the id column is neither text nor binary nor a number", column=name, type=kind.simpleString()
    )


# -- in Python -----------------------------------------------------------------------------


def _route_in_python(frame: DataFrame, node: InjectorNode, routes: Sequence[Route]) -> DataFrame:
    schema = T.StructType([*_ROUTED_FIELDS, *frame.schema.fields])
    return frame.mapInArrow(_python_router(node, tuple(routes)), schema)


def _python_router(
    node: InjectorNode, routes: tuple[Route, ...]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def router(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for one in routes:
                yield _routed_batch(batch, node, one)

    return router


def _routed_batch(batch: pa.RecordBatch, node: InjectorNode, one: Route) -> pa.RecordBatch:
    injected = read_injected(node, one.key, pa.Table.from_batches([batch]))
    keys = injected.keys.to_pylist()
    errors = [injected.errors.get(row) for row in range(batch.num_rows)]
    targets = [
        -1 - one.first if error is not None or key is None else one.first + locate(one.lows, key)
        for key, error in zip(keys, errors, strict=True)
    ]
    unreadable = np.fromiter(injected.errors, dtype=np.int64, count=len(injected.errors))
    at_null = np.zeros(batch.num_rows, dtype=bool)
    at_null[unreadable] = True
    ids = pa.nulls(batch.num_rows, pa.binary()) if injected.ids is None else injected.ids
    added = [
        pa.array(targets, pa.int32()),
        injected.keys,
        pa.array(injected.at, mask=at_null),
        ids,
        pa.array(errors, pa.string()),
    ]
    return pa.RecordBatch.from_arrays([*added, *batch.columns], names=[*COLUMNS, *batch.schema.names])
