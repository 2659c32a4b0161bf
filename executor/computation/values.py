"""Record values column by column: decoded one at a time, when user code asks.

Every call of ``value`` gives an object of its own, so that user code which changes a
value cannot change what a second attempt at the record, or another consumer, will see.

Text of users that may hold half a character: a lone surrogate has no UTF-8 form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import DataError
from millpond.statestore.rows.codec import PlainObject
from millpond.statestore.rows.row import change_envelope, decode_value, has_envelope_fields, has_marks

_ATOMS: Final = frozenset(
    {str, int, float, bool, type(None), bytes, datetime, date, time, timedelta, Decimal}
)

_Indices = npt.NDArray[np.int64]


class Values(Protocol):
    """Record values of a delivery, decoded only when user code asks for one."""

    def __len__(self) -> int:
        """Number of values."""
        ...

    def value(self, index: int) -> Any:
        """The decoded value at ``index``."""
        ...

    def take(self, indices: npt.NDArray[np.int64]) -> Values:
        """The values at ``indices``, in that order, still undecoded."""
        ...


class ArrowValues:
    """Values that are rows of a struct: each becomes a ``dict`` of its columns.

    Columns are turned into Python objects whole, at the first value that is asked for.

    Args:
        columns: a struct array, a record batch or a table.

    Example:
        >>> ArrowValues(pa.table({"city": ["Bergen"], "rain": [True]})).value(0)
        {'city': 'Bergen', 'rain': True}
    """

    __slots__ = ("_columns", "_kind", "_names", "_nested", "_rows")

    def __init__(self, columns: pa.StructArray | pa.RecordBatch | pa.Table) -> None:
        self._columns = columns if isinstance(columns, pa.StructArray) else _as_struct(columns)
        self._names: list[str] = [field.name for field in self._columns.type]
        self._nested: list[tuple[str, pa.Array]] = []
        self._rows: list[tuple[Any, ...] | None] | None = None
        self._kind: type[dict[str, Any]] = (
            PlainObject if has_envelope_fields(dict.fromkeys(self._names)) else dict
        )

    def __len__(self) -> int:
        return len(self._columns)

    def value(self, index: int) -> Any:
        """A dict of the row's columns; ``None`` where the struct itself is null."""
        rows = self._rows
        if rows is None:
            rows = self._decode()
        row = rows[index]
        if row is None:
            return None
        value = self._kind(zip(self._names, row))  # noqa: B905 - of one length, and strict costs a tenth
        for name, column in self._nested:
            value[name] = column[index].as_py()
        return value

    @property
    def columns(self) -> pa.StructArray:
        """The rows, as they are in Arrow."""
        return self._columns

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return self._names

    def row(self, index: int) -> tuple[Any, ...] | None:
        """The row's columns as a tuple, in the order of `names`; ``None`` where the struct itself is null."""
        rows = self._rows
        if rows is None:
            rows = self._decode()
        row = rows[index]
        if row is None or not self._nested:
            return row
        nested = {name: column[index].as_py() for name, column in self._nested}
        return tuple(nested.get(name, part) for name, part in zip(self._names, row, strict=True))

    def _decode(self) -> list[tuple[Any, ...] | None]:
        columns = dict(zip(self._names, self._columns.flatten(), strict=True))
        # Nested values can be changed by user code, so each reader gets a copy.
        self._nested = [(name, column) for name, column in columns.items() if pa.types.is_nested(column.type)]
        nested = dict(self._nested)
        plain = [
            [None] * len(column) if name in nested else column.to_pylist() for name, column in columns.items()
        ]
        rows: list[tuple[Any, ...] | None] = list(zip(*plain, strict=True)) or [()] * len(self)
        for index in np.flatnonzero(pc.is_null(self._columns).to_numpy(zero_copy_only=False)).tolist():
            rows[index] = None
        self._rows = rows
        return rows

    def take(self, indices: _Indices) -> ArrowValues:
        """The values at ``indices``, in that order."""
        return ArrowValues(self._columns.take(pa.array(indices)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as Arrow, without the Python objects."""
        return (ArrowValues, (self._columns,))


def _as_struct(columns: pa.RecordBatch | pa.Table) -> pa.StructArray:
    struct = columns.to_struct_array()
    return struct.combine_chunks() if isinstance(struct, pa.ChunkedArray) else struct


class JsonValues:
    """Values that are JSON texts, or plain bytes where there is no text.

    Args:
        texts: string array of JSON; null where the value is bytes.
        blobs: binary array as long, or ``None`` when every value is JSON.
    """

    __slots__ = ("_blobs", "_load", "_objects", "_texts")

    def __init__(self, texts: pa.StringArray, blobs: pa.BinaryArray | None = None) -> None:
        self._texts = texts
        self._blobs = blobs if blobs is not None and blobs.null_count < len(blobs) else None
        self._objects: list[str | None] | None = None
        self._load: Callable[[str], Any] = orjson.loads

    def __len__(self) -> int:
        return len(self._texts)

    def value(self, index: int) -> Any:
        """The decoded JSON, or the bytes.

        Raises:
            DataError: the text is not JSON.
        """
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
        """The values at ``indices``, in that order."""
        chosen = pa.array(indices)
        return JsonValues(self._texts.take(chosen), None if self._blobs is None else self._blobs.take(chosen))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as Arrow, without the Python objects."""
        return (JsonValues, (self._texts, self._blobs))


class PythonValues:
    """Values that are Python objects already; user code is given copies of mutable ones.

    Args:
        objects: the values, which are not modified afterwards.
    """

    __slots__ = ("_objects",)

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects

    def __len__(self) -> int:
        return len(self._objects)

    def value(self, index: int) -> Any:
        """The object, or a copy when it could be changed."""
        value = self._objects[index]
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is dict and (
            _ATOMS.issuperset(map(type, value.values())) or all(map(_is_atom, value.values()))
        ):
            return value.copy()
        return _copied(value)

    def take(self, indices: _Indices) -> PythonValues:
        """The values at ``indices``, in that order."""
        objects = self._objects
        return PythonValues([objects[index] for index in indices.tolist()])


def _copied(value: Any) -> Any:
    """A copy of a value: of plain parts in a third of the time that `deepcopy` takes, which copies all others."""
    kind = type(value)
    if kind is dict:
        return {name: part if type(part) in _ATOMS else _copied(part) for name, part in value.items()}
    if kind is list:
        return [part if type(part) in _ATOMS else _copied(part) for part in value]
    return value if _is_atom(value) else deepcopy(value)


def _is_atom(value: object) -> bool:
    """Whether code cannot change a value; Pandas' times, without attributes of their own, are such datetimes too."""
    return type(value) in _ATOMS or (isinstance(value, datetime) and not getattr(value, "__dict__", None))


class ChangedValues:
    """Rows of a change stream, each in the envelope of an element or of a retraction.

    Args:
        rows: the rows.
        signs: 1 for a row that is new, -1 for one that is taken back.
        at: their event times.
    """

    __slots__ = ("_at", "_rows", "_signs")

    def __init__(self, rows: Values, signs: npt.NDArray[np.int8], at: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self._signs = signs
        self._at = at

    def __len__(self) -> int:
        return len(self._rows)

    def value(self, index: int) -> Any:
        """The row at ``index`` in its envelope."""
        is_retraction = bool(self._signs[index] < 0)
        return change_envelope(self._rows.value(index), int(self._at[index]), is_retraction=is_retraction)

    def take(self, indices: _Indices) -> ChangedValues:
        """The values at ``indices``, in that order."""
        return ChangedValues(self._rows.take(indices), self._signs[indices], self._at[indices])


class ConcatenatedValues:
    """Several columns of values, one after the other.

    Args:
        parts: the columns, at least one.
    """

    __slots__ = ("_parts", "_starts", "_stop")

    def __init__(self, parts: Sequence[Values]) -> None:
        ends = list(accumulate(map(len, parts)))
        self._parts = tuple(parts)
        self._starts = [0, *ends[:-1]]
        self._stop = ends[-1]

    def __len__(self) -> int:
        return self._stop

    def value(self, index: int) -> Any:
        """The decoded value at ``index`` of the whole."""
        part = bisect_right(self._starts, index) - 1
        return self._parts[part].value(index - self._starts[part])

    def take(self, indices: _Indices) -> PythonValues:
        """The values at ``indices``, in that order, decoded."""
        return PythonValues([self.value(index) for index in indices.tolist()])


def has_utf8(text: str) -> bool:
    """Whether a text has a UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """A text that every output can carry: a lone surrogate is shown as its number."""
    return text.encode(errors="backslashreplace").decode()
