"""Spark's state variables of one key, kept in the key's state: an object with a member for each variable that is set.

A value is the object of its fields; a list, a list of such objects; a map, a list of ``{"key": …, "value": …}``. With a
time to live each value, element and entry is ``{"value": …, "expires_at_ms": …}``, and an entry has its key as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import orjson
from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState
from pyspark.sql.types import Row

from millpond.executor.computation.context import Context
from millpond.executor.spark_compat.typed_values import StructCodec
from millpond.statestore.errors import InvalidError
from millpond.statestore.view_columns import EXPIRES, StateForm

EXPIRY_TAG: Final = "expiry"
"""The wall timer that deletes what has expired of a key."""


class KeyVariables:
    """The variables of a key, while its hooks run: changed in place, and stored at the turn's end.

    Args:
        stored: what is stored; ``None`` for a key without state.

    Attributes:
        stored: by name of the variable, its JSON; maps that were used are in ``maps`` instead.
        maps: by name of the map, its entries by the JSON text of their keys.
    """

    __slots__ = ("maps", "stored")

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.stored: dict[str, Any] = {} if stored is None else stored
        self.maps: dict[str, dict[bytes, dict[str, Any]]] = {}

    def to_json(self) -> dict[str, Any] | None:
        """What is to be stored; ``None`` if no variable is set."""
        for name, entries in self.maps.items():
            if entries:
                self.stored[name] = list(entries.values())
            else:
                self.stored.pop(name, None)
        return self.stored or None

    def entries(self, name: str) -> dict[bytes, dict[str, Any]]:
        """The entries of a map."""
        entries = self.maps.get(name)
        if entries is None:
            stored = self.stored.get(name, ())
            entries = self.maps[name] = {orjson.dumps(entry["key"]): entry for entry in stored}
        return entries

    def delete(self, name: str) -> None:
        """Delete a variable."""
        self.stored.pop(name, None)
        self.maps.pop(name, None)

    def expire(self, now_ms: int) -> int | None:
        """Delete what has expired, and return when the next expires; ``None`` if nothing will.

        Args:
            now_ms: the time of the superstep.
        """
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
    """Whether a value, element or entry has outlived its time."""
    return bool(stored.get(EXPIRES, now_ms + 1) <= now_ms)


class KeyTurn:
    """The key whose hook runs; one object serves all keys of a bundle.

    Attributes:
        context: of the hook.
        variables: of the key.
        now_ms: the wall time of the superstep.
        deleted: names of variables of earlier code, which the code deletes wherever they are left.
    """

    __slots__ = ("_context", "_variables", "deleted", "now_ms")

    def __init__(self) -> None:
        self.deleted: set[str] = set()
        self._context: Context | None = None
        self._variables: KeyVariables | None = None
        self.now_ms: int = 0

    def bind(self, context: Context) -> None:
        """Switch to the key of a hook."""
        self._context = context
        self._variables = variables = context.state.open(KeyVariables)
        self.now_ms = context.wall_time // 1_000
        for name in self.deleted:
            variables.delete(name)

    def release(self) -> None:
        """End the hook: there is no key until the next `bind`."""
        self._context = self._variables = None

    @property
    def context(self) -> Context:
        """The context of the hook.

        Raises:
            InvalidError: no hook runs.
        """
        if self._context is None:
            raise InvalidError(
                "state and timers belong to a key: use them in handleInputRows, handleExpiredTimer and "
                "handleInitialState, and not in init or close"
            )
        return self._context

    @property
    def variables(self) -> KeyVariables:
        """The variables of the key.

        Raises:
            InvalidError: no hook runs.
        """
        if self._variables is None:
            _ = self.context
        return self._variables  # type: ignore[return-value]  # bound together with the context

    def expires(self, at_ms: int) -> None:
        """See to it that what expires then is deleted, even if the key gets no more records."""
        if self.context.timer_at(EXPIRY_TAG, "wall") is None:
            self.context.set_timer(at_ms * 1_000, EXPIRY_TAG, "wall")


class Variable:
    """What the three kinds have in common.

    Args:
        name: the variable's name.
        turn: the key whose hook runs.
        codec: converts the values.
        ttl_ms: how long a value lives after its last change; ``None`` for ever.

    Attributes:
        form: how the kind is stored.
        key_codec: converts the keys of a map.
    """

    form: StateForm
    key_codec: StructCodec | None = None

    def __init__(self, name: str, turn: KeyTurn, codec: StructCodec, ttl_ms: int | None) -> None:
        self.name: str = name
        self.codec: StructCodec = codec
        self.ttl_ms: int | None = ttl_ms
        self._turn = turn

    def exists(self) -> bool:
        """Whether the key has a value of it."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete the key's value."""
        self._turn.variables.delete(self.name)

    def _wrapped(self, value: Any) -> dict[str, Any]:
        encoded = self.codec.to_json(value)
        if self.ttl_ms is None:
            return encoded
        expires_at_ms = self._turn.now_ms + self.ttl_ms
        self._turn.expires(expires_at_ms)
        return {"value": encoded, EXPIRES: expires_at_ms}

    def _read(self, stored: dict[str, Any]) -> tuple[Any, ...]:
        # A variable that has got its time to live by a change of code keeps the values from before.
        return self.codec.from_json(stored["value"] if EXPIRES in stored else stored)

    def _is_alive(self, stored: dict[str, Any]) -> bool:
        return EXPIRES not in stored or not is_expired(stored, self._turn.now_ms)


class ValueVariable(Variable, ValueState):
    """A ``ValueState``: one value."""

    form: StateForm = "value"

    def exists(self) -> bool:
        """Whether the key has a value."""
        stored = self._turn.variables.stored.get(self.name)
        return stored is not None and self._is_alive(stored)

    def get(self) -> tuple[Any, ...] | None:
        """The value; ``None`` if there is none."""
        stored = self._turn.variables.stored.get(self.name)
        return None if stored is None or not self._is_alive(stored) else self._read(stored)

    def update(self, newValue: Any) -> None:
        """Replace the value."""
        self._turn.variables.stored[self.name] = self._wrapped(newValue)


class ListVariable(Variable, ListState):
    """A ``ListState``: values in the order in which they were appended."""

    form: StateForm = "list"

    def exists(self) -> bool:
        """Whether the list has a value."""
        return any(map(self._is_alive, self._turn.variables.stored.get(self.name, ())))

    def get(self) -> Iterator[tuple[Any, ...]]:
        """The values."""
        stored = list(self._turn.variables.stored.get(self.name, ()))
        return map(self._read, filter(self._is_alive, stored))

    def put(self, newState: Iterable[Any]) -> None:
        """Replace all values."""
        self._turn.variables.stored[self.name] = self._all(newState)

    def appendValue(self, newState: Any) -> None:
        """Append a value."""
        self._turn.variables.stored.setdefault(self.name, []).append(self._wrapped(newState))

    def appendList(self, newState: Iterable[Any]) -> None:
        """Append values."""
        self._turn.variables.stored.setdefault(self.name, []).extend(self._all(newState))

    def _all(self, values: Iterable[Any]) -> list[dict[str, Any]]:
        encoded = list(map(self._wrapped, values))
        if not encoded:
            raise InvalidError(
                f"the state {self.name!r} takes a list with at least one value; clear() empties it"
            )
        return encoded


class MapVariable(Variable, MapState):
    """A ``MapState``: values by keys, in the order in which the keys were added first.

    Args:
        name: the variable's name.
        turn: the key whose hook runs.
        key_codec: converts the map's keys.
        codec: converts its values.
        ttl_ms: how long a value lives after its last change; ``None`` for ever.
    """

    form: StateForm = "map"
    key_codec: StructCodec

    def __init__(
        self, name: str, turn: KeyTurn, key_codec: StructCodec, codec: StructCodec, ttl_ms: int | None
    ) -> None:
        super().__init__(name, turn, codec, ttl_ms)
        self.key_codec = key_codec
        self._row = Row(*codec.names)

    def exists(self) -> bool:
        """Whether the map has an entry."""
        return any(map(self._is_alive, self._entries().values()))

    def getValue(self, key: Any) -> tuple[Any, ...] | None:
        """The value of a map key, as a Row; ``None`` if there is none."""
        entry = self._entries().get(self._text(key))
        if entry is None or not self._is_alive(entry):
            return None
        # Spark gives a Row here, and plain tuples everywhere else.
        value: tuple[Any, ...] = self._row(*self.codec.from_json(entry["value"]))
        return value

    def containsKey(self, key: Any) -> bool:
        """Whether there is a value of a map key."""
        entry = self._entries().get(self._text(key))
        return entry is not None and self._is_alive(entry)

    def updateValue(self, key: Any, value: Any) -> None:
        """Set the value of a map key."""
        encoded = self.key_codec.to_json(key)
        wrapped = self._wrapped(value)
        entry = wrapped if self.ttl_ms is not None else {"value": wrapped}
        self._entries()[orjson.dumps(encoded)] = {"key": encoded, **entry}

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """All map keys with their values."""
        return zip(self.keys(), self.values(), strict=True)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """All map keys."""
        return iter([self.key_codec.from_json(entry["key"]) for entry in self._alive()])

    def values(self) -> Iterator[tuple[Any, ...]]:
        """All values."""
        return iter([self.codec.from_json(entry["value"]) for entry in self._alive()])

    def removeKey(self, key: Any) -> None:
        """Delete a map key with its value."""
        self._entries().pop(self._text(key), None)

    def clear(self) -> None:
        """Delete all entries."""
        variables = self._turn.variables
        variables.delete(self.name)
        variables.maps[self.name] = {}

    def _entries(self) -> dict[bytes, dict[str, Any]]:
        return self._turn.variables.entries(self.name)

    def _alive(self) -> list[dict[str, Any]]:
        return list(filter(self._is_alive, self._entries().values()))

    def _text(self, key: Any) -> bytes:
        return orjson.dumps(self.key_codec.to_json(key))
