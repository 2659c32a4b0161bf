"""The typed columns of a view: declared parts of states and keys, shown by Arrow, DuckDB and Spark.

A computation whose states have known parts declares a `StateColumn` for each. The table records the columns with the
computation's first commit and whenever they change, so that a view needs no code to show them. Reading is lenient: a
missing part, or a part of another type, is null. DuckDB and Spark get functions, so that only the columns that a query
names are computed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import orjson
import pyarrow as pa

from millpond.statestore.app_ids import AppId, recorded_word
from millpond.statestore.errors import DataError
from millpond.statestore.rows.key_columns import fitting_cells, typed_column
from millpond.statestore.rows.key_text import kind_of_name, name_of_kind
from millpond.statestore.rows.merge import ROWS_VIEW_COLUMNS
from millpond.statestore.rows.row import as_written
from millpond.statestore.rows.state_schema import texts_of
from millpond.statestore.rows.value_text import TYPED_MARK, untyped_object

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import Column


StateForm: TypeAlias = Literal["field", "value", "list", "map"]
"""How a part is stored: as itself, as the object of its fields, as a list of such objects, or as a list of objects with
``key`` and ``value``.
"""

EXPIRES: Final = "expires_at_ms"
"""Field with the millisecond at which a value, element or entry expires; the value itself is then in ``value``."""

_Read: TypeAlias = Callable[[Any], Any]
_TIME: Final = pa.timestamp("us", "UTC")
_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError)
_FORMS: Final[tuple[StateForm, ...]] = ("field", "value", "list", "map")


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A declared part of a computation's states."""

    name: str
    form: StateForm
    kind: pa.DataType  # of a value; a struct, unless the form is ``"field"``
    key_kind: pa.DataType | None = None  # of a map's keys, a struct
    has_expiry: bool = False  # values, elements or entries may expire

    @property
    def shown(self) -> pa.DataType:
        """The type of the column; a struct of one field is shown as that field."""
        return self._within(self.kind if self.form == "field" else _alone(self.kind))

    @property
    def shown_expiry(self) -> pa.DataType:
        return self._within(_TIME)

    def cells(self, states: Sequence[Any]) -> pa.Array:
        return fitting_cells(self.shown, self._read_all(states, self._value_reader()))

    def expiries(self, states: Sequence[Any]) -> pa.Array:
        return fitting_cells(self.shown_expiry, self._read_all(states, _expiry))

    def _within(self, kind: pa.DataType) -> pa.DataType:
        if self.form == "list":
            return pa.list_(kind)
        return kind if self.key_kind is None else pa.map_(_alone(self.key_kind), kind)

    def _value_reader(self) -> _Read:
        if self.form == "field":
            return _reader(self.kind)
        read = _alone_reader(self.kind)
        if self.form == "map":
            return lambda entry: read(entry["value"])
        return lambda one: read(one["value"] if EXPIRES in one else one)

    def _read_all(self, states: Sequence[Any], read: _Read) -> list[Any]:
        name, read_cell = self.name, self._cell_reader(read)
        cells: list[Any] = []
        for state in states:
            part = state.get(name) if isinstance(state, dict) else None
            try:
                cells.append(None if part is None else read_cell(part))
            except _UNREADABLE:
                cells.append(None)
        return cells

    def _cell_reader(self, read: _Read) -> _Read:
        if self.form == "list":
            return lambda parts: list(map(read, parts))
        if self.key_kind is None:
            return read
        read_key = _alone_reader(self.key_kind)
        return lambda entries: [(read_key(entry["key"]), read(entry)) for entry in entries]


def _alone(kind: pa.StructType) -> pa.DataType:
    return kind.field(0).type if kind.num_fields == 1 else kind


def _alone_reader(kind: pa.StructType) -> _Read:
    if kind.num_fields != 1:
        return _reader(kind)
    field = kind.field(0)
    name, read = field.name, _nullable(_reader(field.type))
    return lambda stored: read(stored.get(name))


def _expiry(stored: Any) -> datetime | None:
    at_ms = stored.get(EXPIRES) if isinstance(stored, dict) else None
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1_000, UTC)


def _reader(kind: pa.DataType) -> _Read:
    """Return a converter from JSON: text for times, decimals and bytes, objects for structs, pairs for maps."""
    if pa.types.is_struct(kind):
        parts = [(field.name, _nullable(_reader(field.type))) for field in kind]
        return lambda stored: {name: read(stored.get(name)) for name, read in parts}
    if pa.types.is_list(kind):
        read_one = _nullable(_reader(kind.value_type))
        return lambda stored: list(map(read_one, stored))
    if pa.types.is_map(kind):
        read_key, read = _reader(kind.key_type), _nullable(_reader(kind.item_type))
        # A map whose keys are text is an object.
        return lambda stored: [
            (read_key(key), read(value))
            for key, value in (stored.items() if isinstance(stored, dict) else stored)
        ]
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat
    if pa.types.is_date(kind):
        return date.fromisoformat
    if pa.types.is_decimal(kind):
        return Decimal
    if pa.types.is_binary(kind):
        return b64decode
    return float if pa.types.is_floating(kind) else _same


def _nullable(read: _Read) -> _Read:
    return read if read is _same else lambda value: None if value is None else read(value)


def _same(value: Any) -> Any:
    return value


def parsed_states(texts: Iterable[str | None]) -> list[Any]:
    return [None if text is None else _parsed(text) for text in texts]


def _parsed(text: str) -> Any:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return untyped_object(parsed) if text.startswith(TYPED_MARK) else parsed


def state_word(columns: Iterable[StateColumn]) -> str:
    """Return columns as a store records them: ``[["total","value",{"struct":[["cents","long"]]},null,false]]``."""
    return orjson.dumps([_entry(column) for column in columns]).decode()


def _entry(column: StateColumn) -> list[Any]:
    key_name = None if column.key_kind is None else name_of_kind(column.key_kind)
    return [column.name, column.form, name_of_kind(column.kind), key_name, column.has_expiry]


def parse_state_word(word: str) -> tuple[StateColumn, ...]:
    try:
        return tuple(_column(*entry) for entry in orjson.loads(word))
    except (KeyError, ValueError, TypeError) as cause:
        raise DataError(
            "the store has states with a part of a type that this version does not know", columns=word
        ) from cause


def _column(name: str, form: StateForm, kind: Any, key_kind: Any, has_expiry: Any) -> StateColumn:
    if form not in _FORMS:
        raise ValueError(form)
    of_keys = None if key_kind is None else kind_of_name(key_kind)
    return StateColumn(name, form, kind_of_name(kind), of_keys, bool(has_expiry))


def state_columns_in(positions: Mapping[str, int], computation: str) -> tuple[StateColumn, ...]:
    """Return the recorded parts of a computation's states; empty if its code declared none."""
    word = recorded_word(positions, AppId.STATE_COLUMNS, computation)
    return () if word is None else parse_state_word(word)


def fits(stored: StateColumn, declared: StateColumn) -> bool:
    """Return whether code with the part ``declared`` can read states stored with the part ``stored``.

    Fields may come and go, and numbers may become wider; everything else must stay.

    Example:
        >>> narrow = StateColumn("total", "value", pa.struct([("cents", pa.int32())]))
        >>> wide = StateColumn("total", "value", pa.struct([("cents", pa.int64()), ("payments", pa.int64())]))
        >>> fits(narrow, wide), fits(wide, narrow)
        (True, False)
    """
    if stored.form != declared.form or (stored.key_kind is None) != (declared.key_kind is None):
        return False
    keys_fit = stored.key_kind is None or _fits(stored.key_kind, declared.key_kind)
    return keys_fit and _fits(stored.kind, declared.kind)


def _fits(stored: pa.DataType, declared: pa.DataType) -> bool:
    if pa.types.is_struct(stored) and pa.types.is_struct(declared):
        before = {field.name: field.type for field in stored}
        return all(field.name not in before or _fits(before[field.name], field.type) for field in declared)
    if pa.types.is_list(stored) and pa.types.is_list(declared):
        return _fits(stored.value_type, declared.value_type)
    if pa.types.is_map(stored) and pa.types.is_map(declared):
        return _fits(stored.key_type, declared.key_type) and _fits(stored.item_type, declared.item_type)
    if pa.types.is_decimal(stored) and pa.types.is_decimal(declared):
        whole = declared.precision - declared.scale >= stored.precision - stored.scale
        return bool(whole and declared.scale >= stored.scale)
    if pa.types.is_floating(stored) and pa.types.is_floating(declared):
        return int(stored.bit_width) <= int(declared.bit_width)
    if pa.types.is_floating(declared):
        return bool(pa.types.is_integer(stored) or pa.types.is_null(stored))
    if pa.types.is_integer(stored) and pa.types.is_integer(declared):
        return int(stored.bit_width) <= int(declared.bit_width)
    return stored == declared or bool(pa.types.is_null(stored))


_EXTRAS: Final = ("record_ids", "productions")
_EXPIRY: Final = "_expires_at"
_NUMBERS: Final = count()


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A typed column of a view, computed from the texts of its source column."""

    field: pa.Field
    source: Literal["key", "state"]
    cells: Callable[[pa.ChunkedArray], pa.Array]

    def in_duckdb(self, database: duckdb.DuckDBPyConnection) -> str:
        (kind,) = database.from_arrow(pa.schema([self.field]).empty_table()).types
        function = f"typed column {next(_NUMBERS)}"
        # DuckDB's type hints want constants of a module that it does not have.
        database.create_function(  # type: ignore[call-overload]
            function, self.cells, ["VARCHAR"], kind, type="arrow", null_handling="special"
        )
        return f'"{function}"'

    def in_spark(self) -> Column:
        """Return a Spark column, computed by Python workers only where a query names it."""
        from pyspark.sql.pandas.functions import arrow_udf
        from pyspark.sql.pandas.types import from_arrow_type

        cells = self.cells

        def make(texts: pa.Array) -> pa.Array:
            return cells(pa.chunked_array([texts]))

        make.__annotations__ = {"texts": pa.Array, "return": pa.Array}
        # Spark's type hints know atoms and arrays as results, but no structs or maps.
        made: Column = arrow_udf(make, from_arrow_type(self.field.type))(self.source)  # type: ignore[call-overload]
        return made.alias(self.field.name)


def states_in_spark(typed: Sequence[str]) -> Column:
    """Return the column ``state`` as text, computed by Python workers, where a row has its state in a column ``typed``."""
    from pyspark.sql.functions import coalesce, col
    from pyspark.sql.pandas.functions import arrow_udf
    from pyspark.sql.types import StringType

    def make(states: pa.Array) -> pa.Array:
        return texts_of(as_written(states))

    make.__annotations__ = {"states": pa.Array, "return": pa.Array}
    text = arrow_udf(make, StringType())  # type: ignore[call-overload]
    return coalesce(col("state"), *(text(name) for name in typed))


def shown_columns(keys: Sequence[pa.Field], states: Sequence[StateColumn]) -> tuple[ShownColumn, ...]:
    """Return the typed columns of keys, then of states; a taken name gets ``key_`` or ``state_`` in front."""
    taken = {*ROWS_VIEW_COLUMNS, *_EXTRAS}
    shown = []
    fields = [pa.field(key.name, pa.string() if pa.types.is_null(key.type) else key.type) for key in keys]
    for place, field in enumerate(fields):
        name = _free(field.name, "key_", taken)
        shown.append(ShownColumn(field.with_name(name), "key", partial(typed_column, fields, place)))
    for state in states:
        parts = [(state.name, state.shown, state.cells)]
        if state.has_expiry:
            parts.append((f"{state.name}{_EXPIRY}", state.shown_expiry, state.expiries))
        for name, kind, read in parts:
            field = pa.field(_free(name, "state_", taken), kind)
            shown.append(ShownColumn(field, "state", partial(_inside, read)))
    return tuple(shown)


def _free(name: str, prefix: str, taken: set[str]) -> str:
    while name.lower() in taken:
        name = f"{prefix}{name}"
    taken.add(name.lower())
    return name


def _inside(read: Callable[[Sequence[object]], pa.Array], states: pa.ChunkedArray) -> pa.Array:
    return read(parsed_states(states.to_pylist()))
