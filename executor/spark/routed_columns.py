"""
The columns of a routed row: what routing adds to an input's own columns, and where to find the rest.

A row travels through a shuffle and into Arrow, so nothing travels twice: where one of the
input's own columns already is the key, the time or the id, the task reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AT", "ERROR", "ID", "KEY", "TARGET", "RoutedColumns"]

TARGET = "__millpond_target"
"""Position *i* of the interval in the plan; ``-1 - i`` of the consumer's first for an unreadable record."""

KEY = "__millpond_key"
AT = "__millpond_at"
ID = "__millpond_id"
ERROR = "__millpond_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedColumns:
    """
    Where a task finds what it needs of a routed row.

    Attributes:
        key: column of the key, text.
        at: column of the event time: a timestamp, or a number of microseconds.
        id: column of the record id, text or binary; ``None`` when records have none.
        error: column that says why a record is unreadable; ``None`` when a null key or time says it.
        own: the input's own columns, which make up a record's value.
    """

    key: str
    at: str
    id: str | None
    error: str | None
    own: tuple[str, ...]
