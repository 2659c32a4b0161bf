"""What a ``StatefulProcessor`` gets in ``init``: its state variables and timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, TypeVar

from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import StructType

from millpond.executor.computation.context import DomainName
from millpond.executor.spark_api.schema import parse_schema
from millpond.executor.spark_api.typed_values import StructCodec
from millpond.executor.spark_api.variables import (
    EXPIRY_TAG,
    KeyTurn,
    ListVariable,
    MapVariable,
    ValueVariable,
    Variable,
)
from millpond.statestore.errors import InvalidError

_VariableT = TypeVar("_VariableT", bound=Variable)

TimeMode: TypeAlias = Literal["none", "processingtime", "eventtime"]
"""Spark's time modes, in lower case: Spark takes them in any."""

TIME_MODES: Final[dict[str, DomainName | None]] = {
    "none": None,
    "processingtime": "wall",
    "eventtime": "event",
}
"""The time domain of the timers in each time mode."""


class ProcessorHandle(StatefulProcessorHandle):
    """The handle of one bundle; its variables and timers are those of the key whose hook runs.

    Args:
        time_mode: Spark's time mode, in lower case.

    Attributes:
        turn: the key whose hook runs.
        variables: the declared variables by name.
    """

    def __init__(self, time_mode: TimeMode) -> None:
        self.turn: KeyTurn = KeyTurn()
        self.variables: dict[str, Variable] = {}
        self._time_mode = time_mode
        self._is_open = True

    def initialized(self) -> None:
        """End ``init``: no variable may be declared any more."""
        self._is_open = False

    # -- variables ---------------------------------------------------------------------------

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ValueState:
        """Declare a variable of one value.

        Raises:
            InvalidError: it is too late for that, the name is taken, or the schema or the time to live is wrong.
        """
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ValueVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getListState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ListState:
        """Declare a variable of a list of values; see `getValueState`."""
        ttl_ms = self._checked(stateName, ttlDurationMs)
        return self._declared(ListVariable(stateName, self.turn, _codec(stateName, schema), ttl_ms))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Declare a variable of values by keys; see `getValueState`."""
        ttl_ms = self._checked(stateName, ttlDurationMs)
        key_codec = _codec(f"{stateName}' (keys of the map) '", userKeySchema)
        return self._declared(
            MapVariable(stateName, self.turn, key_codec, _codec(stateName, valueSchema), ttl_ms)
        )

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a variable of earlier code, key by key as keys have their turns."""
        if not self._is_open:
            raise InvalidError("deleteIfExists is called in init", state=stateName)
        self.variables.pop(stateName, None)
        self.turn.deleted.add(stateName)

    def _checked(self, name: str, ttl_ms: int | None) -> int | None:
        if not self._is_open:
            raise InvalidError("state variables are declared in init, before there is a key", state=name)
        if name in self.variables:
            raise InvalidError("two state variables have one name", state=name)
        if ttl_ms is None:
            return None
        if self._time_mode != "processingtime":
            raise InvalidError(
                "a time to live needs the time mode ProcessingTime", state=name, time_mode=self._time_mode
            )
        if ttl_ms <= 0:
            raise InvalidError("a time to live is more than no time", state=name, ttl_ms=ttl_ms)
        return ttl_ms

    def _declared(self, variable: _VariableT) -> _VariableT:
        self.variables[variable.name] = variable
        return variable

    # -- timers ------------------------------------------------------------------------------

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called once the watermark, or the wall time, has reached this millisecond.

        Raises:
            InvalidError: the time mode has no timers, or no key's hook runs.
        """
        self.turn.context.set_timer(expiryTimestampMs * 1_000, str(expiryTimestampMs), self._domain())

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the key, if it is pending."""
        self.turn.context.delete_timer(str(expiryTimestampMs), self._domain())

    def listTimers(self) -> Iterator[int]:
        """The pending timers of the key in milliseconds, in their order, with the one that is being handled."""
        timers = self.turn.context.timers(self._domain())
        return iter([timer.at // 1_000 for timer in timers if timer.tag != EXPIRY_TAG])

    def _domain(self) -> DomainName:
        domain = TIME_MODES[self._time_mode]
        if domain is None:
            raise InvalidError(
                "timers need the time mode ProcessingTime or EventTime", time_mode=self._time_mode
            )
        return domain


def _codec(name: str, schema: StructType | str) -> StructCodec:
    return StructCodec(parse_schema(schema), f"the state {name!r}")
