"""A digest of consumed rows, by which a later run knows its input again.

The digest of rows is the sum of a number for each row and its place, so those of consecutive parts add up, however
the rows are cut. Equal values have equal digests in mappings and in tables: whole numbers of any width and in floats,
times of any unit to the microsecond. A null counts like a missing field, so a column may be added later.

It finds mistakes, not forgeries: whoever may write the input may write the rows that are to come.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.inputs.extraction import Rows
from millpond.executor.time.instants import UNIT_FACTORS

_Numbers: TypeAlias = npt.NDArray[np.uint64]

_MODULUS: Final = 1 << 64
_LONG_BYTES: Final = 512
"""From here on a hash of C for each value is faster than eight bytes of all values at a time."""
_FEW_ROWS: Final = 64
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")
_TEXT, _LIST, _TIME = (np.uint64(2) ** np.uint64(60 + kind) for kind in range(3))
"""Added before mixing, because an empty text, an empty list and the number 1 differ."""

_LOW_BYTES: Final = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)


def rows_digest(rows: Rows, start: int) -> int:
    """Return the digest of rows of which the first has the number ``start``.

    Example:
        >>> rows = [{"n": 1}, {"n": 2}, {"n": 3}]
        >>> rows_digest(rows, 0) == added(rows_digest(rows[:1], 0), rows_digest(rows[1:], 1))
        True
    """
    found = _of_rows(rows)
    places = np.arange(start, start + len(found), dtype=np.uint64)
    return int(_mixed(found ^ _mixed(places)).sum(dtype=np.uint64))


def unordered_digest(rows: Rows) -> int:
    """Return the digest of rows without an order, as a frame of Spark has them; those of parts add up too."""
    return int(_mixed(_of_rows(rows)).sum(dtype=np.uint64))


def added(*digests: int) -> int:
    return sum(digests) % _MODULUS


def _of_rows(rows: Rows) -> _Numbers:
    return _of_table(rows) if isinstance(rows, pa.Table) else _of_mappings(rows)


def _of_mappings(rows: Sequence[Any]) -> _Numbers:
    found = _together(rows)
    if found is not None:
        return found
    if len(rows) > _FEW_ROWS:
        # A row without a type in Arrow must not change the digests of the rows around it.
        middle = len(rows) // 2
        return np.concatenate([_of_mappings(rows[:middle]), _of_mappings(rows[middle:])])
    if len(rows) > 1:
        return np.concatenate([_of_mappings([row]) for row in rows])
    return np.array([_of_shown(row) for row in rows], np.uint64)


def _together(rows: Sequence[Any]) -> _Numbers | None:
    try:
        if columns := _columns(rows):
            return _sum_of_fields(len(rows), {name: pa.array(cells) for name, cells in columns.items()})
        array = pa.array(rows)
        return _of_array(array) if pa.types.is_struct(array.type) else None
    except Exception:  # noqa: BLE001 - Arrow asks objects for attributes, which may raise anything
        return None


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the cells of each field if all rows have the same fields: faster than a struct of them."""
    names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    if not names or {*map(len, rows)} != {len(names)} or not all(isinstance(name, str) for name in names):
        return {}
    try:
        return {name: [row[name] for row in rows] for name in names}
    except (KeyError, TypeError, IndexError):
        return {}


def _sum_of_fields(count: int, columns: Mapping[str, Any]) -> _Numbers:
    found = np.zeros(count, np.uint64)
    for name, values in columns.items():
        found += _named(name, _of_array(values))
    return found


def _of_table(table: pa.Table) -> _Numbers:
    found = np.zeros(table.num_rows, np.uint64)
    for name, column in zip(table.column_names, table.columns, strict=True):
        parts = [_named(name, _of_column(chunk)) for chunk in column.chunks]
        if parts:
            found += np.concatenate(parts)
    return found


def _of_column(array: Any) -> _Numbers:
    try:
        return _of_array(array)
    except (pa.ArrowException, RecursionError):
        # A type that Arrow does not compute with, or one of hundreds of levels.
        return np.array([_of_shown(array[row]) for row in range(len(array))], np.uint64)


def _of_shown(value: Any) -> int:
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - a repr may raise anything; then the type alone counts
        shown = type(value).__name__
    # An address is another one in each process.
    return _of_bytes(_ADDRESS.sub("", shown).encode(errors="surrogatepass"))


def _of_array(array: Any) -> _Numbers:
    """Return a number for each value, 0 for a null."""
    if isinstance(array, pa.ExtensionArray):
        return _of_array(array.storage)
    found = _of_values(array)
    if array.null_count:
        found[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return found


def _of_values(array: Any) -> _Numbers:
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return _of_array(array.dictionary_decode())
    if types.is_null(kind):
        return np.zeros(len(array), np.uint64)
    if types.is_struct(kind):
        return _of_struct(array)
    if (
        types.is_map(kind)
        or types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        return _of_lists(array)
    if types.is_floating(kind) or types.is_decimal(kind):
        return _of_floats(_plain(array, pa.float64()))
    if types.is_integer(kind) or types.is_boolean(kind):
        is_wide = types.is_uint64(kind)
        return _mixed(_plain(array, pa.uint64() if is_wide else pa.int64()).view(np.uint64))
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time(kind):
        return _of_times(_plain(array, pa.int32() if types.is_time32(kind) else pa.int64()), kind.unit)
    if types.is_date(kind):
        days = _plain(array.cast(pa.date32()), pa.int32())
        return _of_times(days * 86_400, "s")
    try:
        return _of_binary(array.cast(pa.large_binary()))
    except pa.ArrowException:
        return np.array([_of_shown(value) for value in array.to_pylist()], np.uint64)


def _plain(array: Any, kind: pa.DataType) -> npt.NDArray[Any]:
    values = array.cast(kind, safe=False)
    if not values.null_count:
        return np.asarray(values.to_numpy(zero_copy_only=False))
    return np.array(values.fill_null(0).to_numpy(zero_copy_only=False))


def _of_floats(values: npt.NDArray[np.float64]) -> _Numbers:
    # A frame turns whole numbers into floats as soon as one is missing: they are the same numbers.
    is_whole = (np.abs(values) < 2.0**63) & (np.trunc(values) == values)
    whole = np.where(is_whole, values, 0).astype(np.int64).view(np.uint64)
    return _mixed(np.where(is_whole, whole, values.view(np.uint64)))


def _of_times(values: npt.NDArray[Any], unit: str) -> _Numbers:
    factor, divisor = UNIT_FACTORS[unit]
    return _mixed((values.astype(np.int64) * factor // divisor).view(np.uint64) + _TIME)


def _of_struct(array: Any) -> _Numbers:
    return _sum_of_fields(
        len(array), {field.name: values for field, values in zip(array.type, array.flatten(), strict=True)}
    )


def _of_lists(array: Any) -> _Numbers:
    if pa.types.is_map(array.type):
        # A map is a list of pairs; a slice of one has all pairs, and its own offsets.
        pairs = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
        array = pa.ListArray.from_arrays(pa.array(array.offsets.to_numpy(), pa.int32()), pairs)
    elements, lengths = array.flatten(), array.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    ends = np.cumsum(lengths)
    # An element counts by its place in its own list.
    places = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    numbers = _mixed(_of_array(elements) ^ _mixed(places.astype(np.uint64)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers, dtype=np.uint64)])
    return _mixed(sums[ends] - sums[ends - lengths] + lengths.astype(np.uint64) + _LIST)


def _of_binary(array: Any) -> _Numbers:
    count = len(array)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int64, count + 1, array.offset * 8)
    first, last = (int(ends[0]), int(ends[-1])) if count else (0, 0)
    starts, lengths = ends[:-1] - first, np.diff(ends)
    # Eight more bytes, so that the last value can be read as whole words, too.
    text = np.zeros(last - first + 8, np.uint8)
    if last > first:
        text[:-8] = np.frombuffer(data, np.uint8, last - first, first)
    words = np.ndarray((len(text) - 7,), "<u8", text.data, strides=(1,))
    found = _mixed(lengths.astype(np.uint64) + _TEXT)
    is_long = lengths > _LONG_BYTES
    for at in range(0, int(lengths[~is_long].max(initial=0)), 8):
        alive = np.flatnonzero((lengths > at) & ~is_long)
        word = words[starts[alive] + at] & _LOW_BYTES[np.minimum(lengths[alive] - at, 8)]
        found[alive] = _mixed(found[alive] ^ word)
    for row in np.flatnonzero(is_long):
        found[row] = _of_bytes(text[starts[row] : starts[row] + lengths[row]].data)
    return found


def _of_bytes(value: bytes | memoryview) -> int:
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "little")


def _named(name: str, numbers: _Numbers) -> _Numbers:
    # A null stays 0: a field that is null and one that is missing are the same.
    salted = _mixed(numbers ^ np.uint64(_of_bytes(name.encode(errors="surrogatepass"))))
    salted[numbers == 0] = 0
    return salted


def _mixed(numbers: _Numbers) -> _Numbers:
    """Scatter the bits of each number, as the finalizer of SplitMix64 does."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
