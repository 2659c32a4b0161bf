"""The changes of a superstep in a table that keeps one row per key.

Productions are panes and retractions, in each key's order of production. Pairs that cancel each other within
the superstep are left out, even across keys of the pipeline: a value that moves from one key to another keeps
its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.errors import InvalidError

RowKey: TypeAlias = tuple[tuple[bool, Any], ...]
"""The key columns of one row, comparable: nulls come first."""

_NOT_CONTENT: Final = ("at", "pane", "is_retraction")
"""Columns in which a retraction may differ from the retracted row."""


@dataclass(slots=True)
class RowChange:
    """The change of one row.

    Attributes:
        put: the index of its new content among the superstep's rows; ``None`` without one.
        taken_back: retracted contents: the row is deleted if it has one of them.
    """

    put: int | None = None
    taken_back: list[str] = field(default_factory=list)


def key_columns(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the key columns as plain numbers and text."""
    return pa.table({f"k{index}": _plain(table.column(name), name) for index, name in enumerate(keys)})


def _plain(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.int64())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.string())
    raise InvalidError("a row's keys are text, whole numbers or times", column=name, type=kind)


def row_keys(columns: pa.Table) -> list[RowKey]:
    """Return the key of each row, from `key_columns`."""
    lists = [column.to_pylist() for column in columns.columns]
    return [
        tuple((value is not None, 0 if value is None else value) for value in row)
        for row in zip(*lists, strict=True)
    ]


def key_texts(columns: pa.Table) -> pa.Array:
    """Return one text for the key of each row, different for different keys."""
    parts = []
    for column in columns.combine_chunks().columns:
        text = column.cast(pa.string())
        length = pc.utf8_length(text).cast(pa.string())
        parts.append(pc.fill_null(pc.binary_join_element_wise(length, text, ":"), "-"))
    joined = pc.binary_join_element_wise(*parts, "|") if len(parts) > 1 else parts[0]
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def contents(table: pa.Table, keys: Sequence[str]) -> list[str]:
    """Return the columns of each row outside its key, as comparable text."""
    names = [name for name in table.column_names if name not in (*keys, *_NOT_CONTENT)]
    if not names:
        return [""] * table.num_rows
    return [repr(tuple(row.values())) for row in table.select(names).to_pylist()]


def net_changes(table: pa.Table, keys: Sequence[str], retracts: Sequence[bool]) -> dict[RowKey, RowChange]:
    """Return the net changes of a superstep's rows in order of production, by key."""
    changes: dict[RowKey, RowChange] = {}
    texts = contents(table, keys)
    pending: dict[RowKey, list[int]] = {}
    for index, (key, is_retraction) in enumerate(
        zip(row_keys(key_columns(table, keys)), retracts, strict=True)
    ):
        change, puts = changes.setdefault(key, RowChange()), pending.setdefault(key, [])
        if not is_retraction:
            puts.append(index)
            continue
        cancelled = next((put for put in reversed(puts) if texts[put] == texts[index]), None)
        if cancelled is None:
            change.taken_back.append(texts[index])
        else:
            puts.remove(cancelled)
    for key, change in changes.items():
        change.put = pending[key][-1] if pending[key] else None
    return {key: change for key, change in changes.items() if change.put is not None or change.taken_back}
