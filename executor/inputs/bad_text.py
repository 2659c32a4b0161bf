"""Text that is no UTF-8, which Parquet files and Spark pass on unread: it makes its own record unreadable."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def mended_texts(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """Return a table in which every text can be read, and by row the reason why it could not be.

    In a column of text the bytes that are no UTF-8 are replaced; another value that has some becomes null.
    """
    errors: dict[int, str] = {}
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if not _is_readable(column):
            cells, bad = _cells(column)
            errors |= dict.fromkeys(bad, f"the text of column {name} is no UTF-8")
            table = table.set_column(place, table.schema.field(place), pa.array(cells, column.type))
    return table, errors


def _is_readable(column: pa.ChunkedArray) -> bool:
    if pa.types.is_primitive(column.type):
        return True
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _cells(column: pa.ChunkedArray) -> tuple[list[Any], list[int]]:
    cells, bad = list[Any](), list[int]()
    for row, cell in enumerate(column):
        try:
            cells.append(cell.as_py())
        except UnicodeDecodeError as error:
            bad.append(row)
            is_text = cell.type in (pa.string(), pa.large_string(), pa.string_view())
            cells.append(error.object.decode(errors="replace") if is_text else None)
    return cells, bad
