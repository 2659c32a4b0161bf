"""Rows whose payload is decoded: each has the fields of its value, or the reason why there is none.

Where an injector says where key, time and id are, it sees the fields of the value, and next to them what else the row
has, as ``__row_offset``. The record's value has the fields alone. A letter of a record that never reached the code has
the row as it came, so that it can be decoded once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from millpond.executor.payloads.payload import Payload
from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError, did_you_mean

ROW_PREFIX: Final = "__row_"
"""What stands before the name of a column that is next to the payload."""

_FIRST_ROWS: Final = 1_000


class DecodedRow(dict[str, Any]):
    """What an injector sees of a row: the fields of its value, and the other columns with `ROW_PREFIX`.

    Attributes:
        row: the row as it came.
        value: the record's value.
    """

    __slots__ = ("row", "value")

    row: Mapping[str, Any]
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UndecodedRow:
    """A row whose payload cannot be decoded.

    Attributes:
        row: the row as it came.
        reason: why.
    """

    row: Any
    reason: str


ROW_DICTS: Final[frozenset[Any]] = frozenset((dict, DecodedRow))
"""The kinds of rows whose fields are found at once."""


def decoded_rows(payload: Payload, rows: Any, *, stream: str) -> list[Any]:
    """Decode the payload of each row.

    Args:
        payload: the declaration.
        rows: an Arrow table, or mappings of fields.
        stream: the stream that they are for.

    Returns:
        A `DecodedRow` or an `UndecodedRow` for each.

    Raises:
        InvalidError: there is no column of the payload, or it is neither binary nor text.
        UnavailableError: a schema could not be looked up.
    """
    if isinstance(rows, pa.Table):
        return list(_of_table(payload, rows, stream))
    _check_rows(payload, rows, stream)
    return [_of_mapping(payload, row) for row in rows]


def decoded_values(payload: Payload, rows: Any, *, stream: str) -> list[dict[str, Any]]:
    """The values of rows whose payload was decoded before, in another process.

    Raises:
        InvalidError: it cannot be decoded now.
        UnavailableError: a schema could not be looked up.
    """
    decoded = decoded_rows(payload, rows, stream=stream)
    for row in decoded:
        if isinstance(row, UndecodedRow):
            raise InvalidError(
                "a payload was decoded to find its key, and cannot be decoded to process it: a decoder gives the same "
                "for the same bytes",
                stream=stream,
                reason=row.reason,
            )
    return [row.value for row in decoded]


class _Injector(Protocol):
    """What an injector says of its rows."""

    @property
    def stream(self) -> str: ...
    @property
    def payload(self) -> Payload | None: ...


def rows_to_extract(node: _Injector, rows: Any) -> Any:
    """Rows as the injector's extractors see them: with their payload decoded, where the stream has one.

    Args:
        node: the injector.
        rows: the rows as they came.

    Raises:
        InvalidError: there is no column of the payload, or it holds no payloads.
        UnavailableError: a schema could not be looked up.
    """
    return rows if node.payload is None else decoded_rows(node.payload, rows, stream=node.stream)


def check_payload_column(payload: Payload, columns: Sequence[str], *, stream: str) -> None:
    """Refuse rows without the column of the payload.

    Raises:
        InvalidError: there is no such column.
    """
    if payload.column not in columns:
        raise InvalidError(
            f"the input has no such payload column{did_you_mean(payload.column, columns)}",
            stream=stream,
            column=payload.column,
            columns=list(columns),
        )


def original_row(row: Any) -> Any:
    """A row as it came, decoded or not."""
    return row.row if isinstance(row, DecodedRow | UndecodedRow) else row


def value_of_row(row: Any) -> Any:
    """The value of a row that is decoded; ``None`` for one that is not."""
    return row.value if isinstance(row, DecodedRow) else None


def _check_rows(payload: Payload, rows: Sequence[Any], stream: str) -> None:
    mappings = [row for row in rows[:_FIRST_ROWS] if isinstance(row, Mapping)]
    if mappings and not any(payload.column in row for row in mappings):
        check_payload_column(payload, [*mappings[0]], stream=stream)


def _of_table(payload: Payload, rows: pa.Table, stream: str) -> Iterator[DecodedRow | UndecodedRow]:
    check_payload_column(payload, rows.column_names, stream=stream)
    kind = rows.schema.field(payload.column).type
    if not _is_encoded(kind):
        raise InvalidError(
            "the payload column is neither binary nor text", stream=stream, column=payload.column, type=kind
        )
    names = rows.column_names
    others = [(name, ROW_PREFIX + name) for name in names if name != payload.column]
    for cells in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        row = dict(zip(names, cells, strict=True))
        yield _decoded(payload, row, row[payload.column], others)


def _is_encoded(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    tests = (
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_fixed_size_binary,
        types.is_null,
    )
    return any(test(kind) for test in tests)


def _of_mapping(payload: Payload, row: Any) -> DecodedRow | UndecodedRow:
    if not isinstance(row, Mapping):
        return UndecodedRow(row, str(InvalidError("the row has no fields", type=type(row).__name__)))
    if payload.column not in row:
        return UndecodedRow(row, str(InvalidError("the row has no such field", field=payload.column)))
    others = [(name, ROW_PREFIX + str(name)) for name in row if name != payload.column]
    return _decoded(payload, row, row[payload.column], others)


def _decoded(
    payload: Payload, row: Mapping[str, Any], cell: Any, others: Sequence[tuple[str, str]]
) -> DecodedRow | UndecodedRow:
    try:
        value = payload.decode(_bytes_of(cell))
    except UnavailableError:
        raise
    except MillpondError as error:
        return UndecodedRow(row, str(error))
    except Exception as error:  # noqa: BLE001 - what decodes may be the user's, and raise anything
        return UndecodedRow(row, f"the payload cannot be decoded: {type(error).__name__}: {error}")
    decoded = DecodedRow(value)
    decoded.row, decoded.value = row, value
    for name, known_as in others:
        decoded[known_as] = row[name]
    return decoded


def _bytes_of(cell: Any) -> bytes:
    if type(cell) is bytes:
        return cell
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes | bytearray | memoryview):
        return bytes(cell)
    if cell is None:
        raise InvalidError("the payload is null")
    raise InvalidError("the payload is neither bytes nor text", type=type(cell).__name__)
