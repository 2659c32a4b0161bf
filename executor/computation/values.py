"""Record values column by column, decoded one at a time when user code asks.

Every call of ``value`` returns a separate object, so that user code which changes a value cannot change it
for a retry of the record or for another consumer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US
from millpond.statestore.errors import DataError, InvalidError, did_you_mean
from millpond.statestore.rows.row import change_envelope, has_envelope_fields, one_array
from millpond.statestore.rows.state_schema import UTC_TIMESTAMP, dict_maker, plain_cells
from millpond.statestore.rows.value_text import PlainObject, decode_value, has_marks, has_utf8

_ATOMS: Final = frozenset(
    {str, int, float, bool, type(None), bytes, datetime, date, time, timedelta, Decimal}
)

_SIZED: Final = frozenset({str, bytes})

_Indices = npt.NDArray[np.int64]


def no_such_field(name: str, value: object) -> InvalidError:
    """Return the error about a value without a field of this name, which names the nearest one."""
    if isinstance(value, Mapping):
        hint = did_you_mean(name, value)
        return InvalidError(f"the value has no such field{hint}", field=name, fields=sorted(map(str, value)))
    return InvalidError("the value has no such field", field=name, type=type(value).__name__)


class Values(Protocol):
    """Record values of a delivery, decoded only when user code asks for one."""

    def __len__(self) -> int: ...

    def value(self, index: int) -> Any: ...

    def take(self, indices: npt.NDArray[np.int64]) -> Values:
        """Return the values at ``indices``, in that order, still undecoded."""


def total_bytes(rows: pa.Table | Sequence[Any]) -> int:
    """Return the size of all rows: of all columns of a table, of text and bytes in mappings."""
    if isinstance(rows, pa.Table):
        return int(rows.nbytes)
    # One comprehension over all cells, because this runs for every batch.
    return sum(
        [
            len(cell)
            for row in rows
            if isinstance(row, Mapping)
            for cell in row.values()
            if type(cell) in _SIZED
        ]
    )


UNHELD: Final = (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors about values that Python cannot hold: dates of other years, text that is not UTF-8, a map's repeated keys."""

_INEXACT: Final = re.compile(r"\b(?:time32|time64|date64)\[")


def refuse_inexact(column: pa.Array | pa.ChunkedArray) -> None:
    """Raise one of `UNHELD` for a time of day or a date that Arrow would cut to fit Python's, without an error."""
    if _INEXACT.search(str(column.type)) is None:
        return
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for leaf in _leaves(chunk):
            leaf.validate(full=True)
            if leaf.type == pa.time64("ns"):
                leaf.cast(pa.time64("us"))


def _leaves(column: pa.Array) -> Iterator[pa.Array]:
    kind = column.type
    if pa.types.is_map(kind):
        parts = [column.keys, column.items]
    elif pa.types.is_dictionary(kind):
        parts = [column.dictionary_decode()]
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        flat = column.flatten()
        parts = flat if isinstance(flat, list) else [flat]
    else:
        yield column
        return
    for part in parts:
        yield from _leaves(part)


def unheld(error: Exception, **details: object) -> InvalidError:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return InvalidError("a value of the row cannot be read", **details, reason=reason)


def _is_held(column: pa.Array) -> bool:
    """Return True if Python can hold each cell for sure."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return False
        return True
    if kind in (pa.timestamp("us"), UTC_TIMESTAMP):
        bounds = pc.min_max(column.cast(pa.int64())).as_py()
        return bounds["min"] is None or bool(
            bounds["min"] >= INSTANT_MIN_US and bounds["max"] <= INSTANT_MAX_US
        )
    if kind == pa.date32():
        bounds = pc.min_max(column.cast(pa.int32())).as_py()
        return bounds["min"] is None or (bounds["min"] >= _DAY_MIN and bounds["max"] <= _DAY_MAX)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_number or pa.types.is_boolean(kind) or pa.types.is_binary(kind))


_TAKEN: Final = object()
_DAY_MIN, _DAY_MAX = ((day - date(1970, 1, 1)).days for day in (date.min, date.max))


class ArrowValues:
    """Values that are rows of a struct, each a ``dict``; columns are decoded whole, at the first value.

    A row with a value that Python cannot hold raises an `InvalidError`, and does not disturb the others.
    """

    __slots__ = ("_errors", "_kind", "_make", "_nested", "_rows", "columns", "names")

    def __init__(self, columns: pa.StructArray | pa.RecordBatch | pa.Table) -> None:
        struct = columns if isinstance(columns, pa.StructArray) else columns.to_struct_array()
        self.columns: pa.StructArray = one_array(struct)
        self.names: list[str] = [field.name for field in self.columns.type]
        self._nested: list[_NestedColumn] = []
        self._rows: list[tuple[Any, ...] | None] | None = None
        self._errors: dict[int, InvalidError] = {}
        self._kind: type[dict[str, Any]] = (
            PlainObject if has_envelope_fields(dict.fromkeys(self.names)) else dict
        )
        self._make = dict_maker(self.names, self._kind)

    def __len__(self) -> int:
        return len(self.columns)

    def value(self, index: int) -> Any:
        """Return a dict of the row's columns; ``None`` where the struct itself is null."""
        rows = self._rows
        if rows is None:
            rows = self._decode()
        row = rows[index]
        if row is None:
            self._refuse_unheld(index)
            return None
        value = self._make(row)
        for column in self._nested:
            value[column.name] = column.value(index)
        return value

    def column(self, name: str) -> pa.Array:
        """Return a field of all rows as it is, null where the struct is; raise `InvalidError` if no field has the name."""
        if self.names.count(name) != 1:
            raise no_such_field(name, dict.fromkeys(self.names))
        return self.columns.flatten()[self.names.index(name)]

    def field(self, name: str | None) -> list[Any] | None:
        """Return a plain field of all rows, or ``None`` for each row without a name, if no row holds what Python cannot.

        Otherwise, and if there is no such field, return ``None``: `value` then tells which rows are not readable.
        """
        if name is None:
            return [None] * len(self) if self.is_held else None
        column = self.plain_column(name)
        return None if column is None else plain_cells(column)

    @property
    def is_held(self) -> bool:
        """True if Python can hold each row, none is null, and none looks like a pane."""
        rows = self.columns
        return not rows.null_count and self._kind is dict and all(map(_is_held, rows.flatten()))

    def plain_column(self, name: str) -> pa.Array | None:
        """Return a plain field of all rows as it is; ``None`` in the cases of `field`."""
        if not self.is_held or self.names.count(name) != 1:
            return None
        column = self.columns.field(name)
        return None if pa.types.is_nested(column.type) else column

    def row(self, index: int) -> tuple[Any, ...] | None:
        """Return the row as Spark's Python does: a tuple in the order of `names`, in which a map is a list of pairs.

        ``None`` where the struct itself is null.
        """
        rows = self._rows
        if rows is None:
            rows = self._decode()
        row = rows[index]
        if row is None:
            self._refuse_unheld(index)
            return None
        if not self._nested:
            return row
        nested = {column.name: column.with_pairs(index) for column in self._nested}
        return tuple(nested.get(name, part) for name, part in zip(self.names, row, strict=True))

    def _decode(self) -> list[tuple[Any, ...] | None]:
        columns = dict(zip(self.names, self.columns.flatten(), strict=True))
        self._nested = [
            _NestedColumn(name, column) for name, column in columns.items() if pa.types.is_nested(column.type)
        ]
        nested = {column.name for column in self._nested}
        plain = [self._cells(name, column, is_nested=name in nested) for name, column in columns.items()]
        rows: list[tuple[Any, ...] | None] = list(zip(*plain, strict=True)) or [()] * len(self)
        for index in np.flatnonzero(pc.is_null(self.columns).to_numpy(zero_copy_only=False)).tolist():
            rows[index] = None
        for index in self._errors:
            rows[index] = None
        self._rows = rows
        return rows

    def _cells(self, name: str, column: pa.Array, *, is_nested: bool) -> list[Any]:
        try:
            refuse_inexact(column)
            return [None] * len(column) if is_nested else plain_cells(column)
        except UNHELD:
            cells = list[Any]()
            for row in range(len(column)):
                try:
                    # A slice of a nested column would keep the values of the other rows; not all plain ones can be taken.
                    one = column.take(pa.array([row])) if is_nested else column.slice(row, 1)
                    refuse_inexact(one)
                    cells.append(None if is_nested else one[0].as_py())
                except UNHELD as error:
                    self._errors[row] = unheld(error, column=name)
                    cells.append(None)
            return cells

    def _refuse_unheld(self, index: int) -> None:
        if index in self._errors:
            raise self._errors[index]

    def take(self, indices: _Indices) -> ArrowValues:
        return ArrowValues(self.columns.take(pa.array(indices)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (ArrowValues, (self.columns,))


class _NestedColumn:
    """Lists, structs or maps; user code can change such values, so each reader gets a separate object."""

    __slots__ = ("_column", "_fresh", "name")

    def __init__(self, name: str, column: pa.Array) -> None:
        self.name = name
        self._column = column
        self._fresh: dict[int, Any] | None = None

    def value(self, index: int) -> Any:
        if self._fresh is None:
            # A whole column costs a tenth of its single values, and most are read once.
            self._fresh = self._decode()
        value = self._fresh.pop(index, _TAKEN)
        return self._one(index, "strict") if value is _TAKEN else value

    def with_pairs(self, index: int) -> Any:
        return self._one(index, None)

    def _decode(self) -> dict[int, Any]:
        try:
            return dict(enumerate(self._column.to_pylist(maps_as_pydicts="strict")))
        except UNHELD:
            # The reader of the row with such a value gets the error.
            return {}

    def _one(self, index: int, maps: str | None) -> Any:
        try:
            return self._column[index].as_py(maps_as_pydicts=maps)
        except UNHELD as error:
            raise unheld(error, column=self.name) from error


class JsonValues:
    """Values that are JSON texts, or plain bytes where the text is null; ``blobs`` is ``None`` if all are JSON."""

    __slots__ = ("_blobs", "_load", "_objects", "_texts")

    def __init__(self, texts: pa.StringArray, blobs: pa.BinaryArray | None = None) -> None:
        self._texts = texts
        self._blobs = blobs if blobs is not None and blobs.null_count < len(blobs) else None
        self._objects: list[str | None] | None = None
        self._load: Callable[[str], Any] = orjson.loads

    def __len__(self) -> int:
        return len(self._texts)

    def value(self, index: int) -> Any:
        objects = self._objects
        if objects is None:
            objects = self._objects = self._texts.to_pylist()
            # Marks are rare: without one no value pays for them.
            self._load = decode_value if has_marks(self._texts) else orjson.loads
        text = objects[index]
        if text is None:
            return None if self._blobs is None else self._blobs[index].as_py()
        try:
            return self._load(text)
        except orjson.JSONDecodeError as error:
            raise DataError("a record's value is not JSON", reason=error) from error

    def take(self, indices: _Indices) -> JsonValues:
        chosen = pa.array(indices)
        return JsonValues(self._texts.take(chosen), None if self._blobs is None else self._blobs.take(chosen))

    def __reduce__(self) -> tuple[Any, ...]:
        return (JsonValues, (self._texts, self._blobs))


@dataclass(slots=True, eq=False)
class PythonValues:
    """Values that are Python objects already; user code gets copies of mutable ones."""

    _objects: Sequence[Any]

    def __len__(self) -> int:
        return len(self._objects)

    def value(self, index: int) -> Any:
        value = self._objects[index]
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is dict and (
            _ATOMS.issuperset(map(type, value.values())) or all(map(_is_atom, value.values()))
        ):
            return value.copy()
        return copied(value)

    def take(self, indices: _Indices) -> PythonValues:
        objects = self._objects
        return PythonValues([objects[index] for index in indices.tolist()])


def copied(value: Any) -> Any:
    """Copy a value; plain parts take a third of the time of `deepcopy`."""
    kind = type(value)
    if kind is dict:
        return {name: part if type(part) in _ATOMS else copied(part) for name, part in value.items()}
    if kind is list:
        return [part if type(part) in _ATOMS else copied(part) for part in value]
    return value if _is_atom(value) else deepcopy(value)


def _is_atom(value: object) -> bool:
    """Return True if code cannot change the value; Pandas' times without attributes count as datetimes."""
    return type(value) in _ATOMS or (isinstance(value, datetime) and not getattr(value, "__dict__", None))


@dataclass(slots=True, eq=False)
class ChangedValues:
    """Rows of a change stream, each in the envelope of an element (sign 1) or of a retraction (sign -1)."""

    _rows: Values
    _signs: npt.NDArray[np.int8]
    _at: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self._rows)

    def value(self, index: int) -> Any:
        is_retraction = bool(self._signs[index] < 0)
        return change_envelope(self._rows.value(index), int(self._at[index]), is_retraction=is_retraction)

    def take(self, indices: _Indices) -> ChangedValues:
        return ChangedValues(self._rows.take(indices), self._signs[indices], self._at[indices])


class ConcatenatedValues:
    """Several columns of values, one after the other; at least one column."""

    __slots__ = ("_starts", "_stop", "parts")

    def __init__(self, parts: Sequence[Values]) -> None:
        ends = list(accumulate(map(len, parts)))
        self.parts: tuple[Values, ...] = tuple(parts)
        self._starts = [0, *ends[:-1]]
        self._stop = ends[-1]

    def __len__(self) -> int:
        return self._stop

    def value(self, index: int) -> Any:
        part = bisect_right(self._starts, index) - 1
        return self.parts[part].value(index - self._starts[part])

    def take(self, indices: _Indices) -> PythonValues:
        return PythonValues([self.value(index) for index in indices.tolist()])

    def plain_column(self, name: str) -> pa.Array | None:
        """Return a plain field of all parts, as `ArrowValues.plain_column`, if it has one type in all."""
        columns = [part.plain_column(name) for part in self.parts if isinstance(part, ArrowValues)]
        found = [column for column in columns if column is not None]
        is_whole = len(found) == len(self.parts) and all(column.type == found[0].type for column in found)
        return pa.concat_arrays(found) if is_whole else None

    @property
    def is_held(self) -> bool:
        return all(isinstance(part, ArrowValues) and part.is_held for part in self.parts)


def checked_text(text: str, role: str) -> str:
    if not isinstance(text, str):
        raise InvalidError(f"a {role} must be text", type=type(text).__name__)
    if not text.isascii() and not has_utf8(text):
        raise InvalidError(f"a {role} needs a UTF-8 form", text=ascii(text))
    return text


def printable(text: str) -> str:
    """Return the text with each lone surrogate as its number, so that every output can carry it."""
    return text.encode(errors="backslashreplace").decode()
