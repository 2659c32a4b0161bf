"""Sizes of records, column by column, and the beginning of a large record that its dead letter shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError
from millpond.statestore.loading.parquet_files import row_bytes

RECORD_BYTES_MAX: Final = 16 << 20
"""The default limit. Kafka's default is 1 MiB a message, and brokers rarely accept more than 10."""

_SHOWN_CHARACTERS: Final = 1_000


@dataclass(frozen=True, slots=True)
class CutValue:
    """The beginning of a record's value, for the letter of a record that is too large to be stored."""

    value: Any


def check_record_size(stream: str, limit: object) -> None:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidError(
            "max_record_bytes must be a positive whole number or None", stream=stream, max_record_bytes=limit
        )


def error_of_size(limit: int) -> str:
    return f"the record is larger than the {limit:,} bytes that max_record_bytes of its stream allows"


def cut_row(rows: pa.Table | Sequence[Any], place: int) -> CutValue:
    """Return the beginning of a row's value, without making Python objects of all of it."""
    if isinstance(rows, pa.Table):
        columns = rows.slice(place, 1)
        return CutValue({name: _cut_column(columns.column(name)) for name in columns.column_names})
    row = rows[place]
    if not isinstance(row, Mapping):
        return CutValue(_beginning(row))
    return CutValue({name: _beginning(cell) for name, cell in row.items()})


def _beginning(cell: Any) -> Any:
    return cell[:_SHOWN_CHARACTERS] if isinstance(cell, str | bytes) else cell


def _cut_column(cell: pa.ChunkedArray) -> Any:
    kind, size = cell.type, int(row_bytes(pa.table({"cell": cell}))[0])
    if size <= _SHOWN_CHARACTERS:
        return cell[0].as_py()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_slice_codeunits(cell, 0, _SHOWN_CHARACTERS)[0].as_py()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_slice(cell, 0, _SHOWN_CHARACTERS)[0].as_py()
    return f"<{kind}: {size:,} bytes>"
