"""Spark's state variables, stored in a key's state as one object with a member for each variable that is set.

A value is the object of its fields, a list is a list of such objects, a map is a list of ``{"key": …, "value": …}``.
With a time to live, each value, element and entry has the form ``{"value": …, "expires_at_ms": …}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import orjson
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState
from pyspark.sql.types import NullType, Row, StructType

from millpond.executor.computation.context import Context
from millpond.executor.spark_compat.schema import StructCodec
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import kind_of_name, name_of_kind
from millpond.statestore.view_columns import EXPIRES, StateColumn, StateForm

EXPIRY_TAG: Final = "expiry"
"""The timer that deletes a key's expired values."""


class KeyVariables:
    """The variables of a key while its hooks run: changed in place, and stored at the turn's end.

    Attributes:
        stored: JSON by variable name. A map that a hook has used is in ``maps`` instead.
        maps: by name of the map, its entries by the JSON text of their keys.
    """

    __slots__ = ("maps", "stored")

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.stored: dict[str, Any] = {} if stored is None else stored
        self.maps: dict[str, dict[bytes, dict[str, Any]]] = {}

    def to_json(self) -> dict[str, Any] | None:
        for name, entries in self.maps.items():
            if entries:
                self.stored[name] = list(entries.values())
            else:
                self.stored.pop(name, None)
        return self.stored or None

    def entries(self, name: str) -> dict[bytes, dict[str, Any]]:
        entries = self.maps.get(name)
        if entries is None:
            stored = self.stored.get(name, ())
            entries = self.maps[name] = {orjson.dumps(entry["key"]): entry for entry in stored}
        return entries

    def delete(self, name: str) -> None:
        self.stored.pop(name, None)
        self.maps.pop(name, None)

    def expire(self, now_ms: int) -> int | None:
        """Delete expired values, and return the next expiry in milliseconds, if any."""
        stored = self.to_json() or {}
        self.maps = {}
        nearest: list[int] = []
        for name, value in list(stored.items()):
            if isinstance(value, list):
                kept = [one for one in value if not is_expired(one, now_ms)]
                nearest += [one[EXPIRES] for one in kept if EXPIRES in one]
                stored[name] = kept
            elif not is_expired(value, now_ms):
                nearest += [value[EXPIRES]] if EXPIRES in value else []
                continue
            else:
                kept = []
            if not kept:
                del stored[name]
        return min(nearest, default=None)


def is_expired(stored: dict[str, Any], now_ms: int) -> bool:
    return bool(stored.get(EXPIRES, now_ms + 1) <= now_ms)


class KeyTurn:
    """The key whose hook runs. One object serves all keys of a bundle.

    Attributes:
        now_ms: the wall time of the superstep.
        deleted: variables of earlier code, which `bind` deletes from each key.
    """

    def __init__(self) -> None:
        self.deleted: set[str] = set()
        self._context: Context | None = None
        self._variables: KeyVariables | None = None
        self.now_ms: int = 0

    def bind(self, context: Context) -> None:
        self._context = context
        self._variables = variables = context.state.open(KeyVariables)
        self.now_ms = context.wall_time // 1_000
        for name in self.deleted:
            variables.delete(name)

    def release(self) -> None:
        # State and timers used outside of a hook now fail instead of changing the last key.
        self._context = self._variables = None

    @property
    def context(self) -> Context:
        if self._context is None:
            raise InvalidError(
                "state and timers belong to a key: use them in handleInputRows, handleExpiredTimer and "
                "handleInitialState, and not in init or close"
            )
        return self._context

    @property
    def variables(self) -> KeyVariables:
        if self._variables is None:
            _ = self.context
        return self._variables  # type: ignore[return-value]  # bound together with the context

    def expires(self, at_ms: int) -> None:
        # Without a timer, a value of a key that gets no more records would stay in the store indefinitely.
        if self.context.timer_at(EXPIRY_TAG, "wall") is None:
            self.context.set_timer(at_ms * 1_000, EXPIRY_TAG, "wall")


class DeletedTurn(KeyTurn):
    """Stands for the key of a variable that ``init`` has deleted."""

    def __init__(self, name: str, form: StateForm) -> None:
        super().__init__()
        self._name = name
        self._form = form

    @property
    def context(self) -> Context:
        # Spark's error, because code may catch it.
        raise PySparkRuntimeError(
            f"Error checking {self._form} state exists: init has deleted {self._name!r}, so it must not be used"
        )


class Variable:
    """The common part of values, lists and maps. With ``ttl_ms``, a value expires that long after its last change."""

    form: StateForm
    key_codec: StructCodec | None = None

    def __init__(self, name: str, turn: KeyTurn, codec: StructCodec, ttl_ms: int | None) -> None:
        self.name: str = name
        self.codec: StructCodec = codec
        self.ttl_ms: int | None = ttl_ms
        self._turn = turn

    def delete(self) -> None:
        """Let each use fail from now on, because its values would be gone with the next turn."""
        self._turn = DeletedTurn(self.name, self.form)

    def clear(self) -> None:
        self._turn.variables.delete(self.name)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        encoded = self.codec.encode(value)
        if self.ttl_ms is None:
            return encoded
        expires_at_ms = self._turn.now_ms + self.ttl_ms
        self._turn.expires(expires_at_ms)
        return {"value": encoded, EXPIRES: expires_at_ms}

    def _read(self, stored: dict[str, Any]) -> tuple[Any, ...]:
        # Values from before a change of code that added a time to live have no wrapper.
        return self.codec.from_json(stored["value"] if EXPIRES in stored else stored)

    def _is_alive(self, stored: dict[str, Any]) -> bool:
        return EXPIRES not in stored or not is_expired(stored, self._turn.now_ms)


class ValueVariable(Variable, ValueState):
    form: StateForm = "value"

    def exists(self) -> bool:
        stored = self._turn.variables.stored.get(self.name)
        return stored is not None and self._is_alive(stored)

    def get(self) -> tuple[Any, ...] | None:
        stored = self._turn.variables.stored.get(self.name)
        return None if stored is None or not self._is_alive(stored) else self._read(stored)

    def update(self, newValue: Any) -> None:
        self._turn.variables.stored[self.name] = self._wrapped(newValue)


class ListVariable(Variable, ListState):
    form: StateForm = "list"

    def exists(self) -> bool:
        return any(map(self._is_alive, self._turn.variables.stored.get(self.name, ())))

    def get(self) -> Iterator[tuple[Any, ...]]:
        stored = list(self._turn.variables.stored.get(self.name, ()))
        return map(self._read, filter(self._is_alive, stored))

    def put(self, newState: Iterable[Any]) -> None:
        self._turn.variables.stored[self.name] = self._all(newState)

    def appendValue(self, newState: Any) -> None:
        self._turn.variables.stored.setdefault(self.name, []).append(self._wrapped(newState))

    def appendList(self, newState: Iterable[Any]) -> None:
        self._turn.variables.stored.setdefault(self.name, []).extend(self._all(newState))

    def _all(self, values: Iterable[Any]) -> list[dict[str, Any]]:
        encoded = list(map(self._wrapped, values))
        if not encoded:
            raise InvalidError(
                f"the state {self.name!r} takes a list with at least one value; clear() empties it"
            )
        return encoded


class MapVariable(Variable, MapState):
    """Values by keys, in the order of the keys' first insertion."""

    form: StateForm = "map"
    key_codec: StructCodec

    def __init__(
        self, name: str, turn: KeyTurn, key_codec: StructCodec, codec: StructCodec, ttl_ms: int | None
    ) -> None:
        super().__init__(name, turn, codec, ttl_ms)
        self.key_codec = key_codec
        self._row = Row(*codec.names)

    def exists(self) -> bool:
        return any(map(self._is_alive, self._entries().values()))

    def getValue(self, key: Any) -> tuple[Any, ...] | None:
        entry = self._entries().get(self._text(key))
        if entry is None or not self._is_alive(entry):
            return None
        # Spark returns a Row here, and plain tuples everywhere else.
        value: tuple[Any, ...] = self._row(*self.codec.from_json(entry["value"]))
        return value

    def containsKey(self, key: Any) -> bool:
        entry = self._entries().get(self._text(key))
        return entry is not None and self._is_alive(entry)

    def updateValue(self, key: Any, value: Any) -> None:
        encoded = self.key_codec.encode(key)
        wrapped = self._wrapped(value)
        entry = wrapped if self.ttl_ms is not None else {"value": wrapped}
        self._entries()[orjson.dumps(encoded)] = {"key": encoded, **entry}

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return zip(self.keys(), self.values(), strict=True)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return iter([self.key_codec.from_json(entry["key"]) for entry in self._alive()])

    def values(self) -> Iterator[tuple[Any, ...]]:
        return iter([self.codec.from_json(entry["value"]) for entry in self._alive()])

    def removeKey(self, key: Any) -> None:
        self._entries().pop(self._text(key), None)

    def clear(self) -> None:
        variables = self._turn.variables
        variables.delete(self.name)
        variables.maps[self.name] = {}

    def _entries(self) -> dict[bytes, dict[str, Any]]:
        return self._turn.variables.entries(self.name)

    def _alive(self) -> list[dict[str, Any]]:
        return list(filter(self._is_alive, self._entries().values()))

    def _text(self, key: Any) -> bytes:
        return orjson.dumps(self.key_codec.encode(key))


def columns_of_variables(variables: Iterable[Variable]) -> tuple[StateColumn, ...]:
    """Return a view column for each variable whose type SQL can show. The others appear in ``state`` alone."""
    columns = []
    for variable in variables:
        kind, key_codec = _kind(variable.codec.schema), variable.key_codec
        key_kind = None if key_codec is None else _kind(key_codec.schema)
        if kind is not None and (key_kind is None) == (key_codec is None):
            expires = variable.ttl_ms is not None
            columns.append(StateColumn(variable.name, variable.form, kind, key_kind, expires))
    return tuple(columns)


def columns_of_fields(schema: StructType) -> tuple[StateColumn, ...]:
    kind = _kind(schema)
    return () if kind is None else tuple(StateColumn(field.name, "field", field.type) for field in kind)


def _kind(schema: StructType) -> pa.StructType | None:
    """Return a schema's type as the store records it, ``None`` if some SQL engine cannot show it."""
    if not _is_shown(schema):
        return None
    return kind_of_name(name_of_kind(pa.struct(list(to_arrow_schema(schema, timezone="UTC")))))


def _is_shown(kind: object) -> bool:
    if isinstance(kind, StructType):
        # SQL ignores the case of column names.
        names = {name.lower() for name in kind.names}
        return len(names) == len(kind.names) and all(_is_shown(field.dataType) for field in kind)
    parts = (getattr(kind, name, None) for name in ("elementType", "keyType", "valueType"))
    return not isinstance(kind, NullType) and all(part is None or _is_shown(part) for part in parts)
