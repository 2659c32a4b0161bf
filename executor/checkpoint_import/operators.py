"""The stateful operators of a query, by its checkpoint, and what kind of state each has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import orjson

from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OperatorKind: TypeAlias = Literal["variables", "group_state", "duplicates", "aggregation"]
"""
What the state is: a processor's variables, the state of ``applyInPandasWithState``, keys that were seen, or the buffers
of aggregate functions.
"""

_KINDS: Final[dict[str, OperatorKind]] = {
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
    kind = _KINDS.get(row.operatorName)
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
