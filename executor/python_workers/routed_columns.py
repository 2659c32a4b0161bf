"""The columns of a routed row: those that routing adds, and the input's own.

Rows are shuffled and converted to Arrow, so no value is copied: if the key, the time or the id is
a column of the input, the task reads that column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow.compute as pc

TARGET: Final = "__millpond_target"
"""
Where a row goes, as an integer: `readable_target` of the interval that owns its key, or
`unreadable_target` of its consumer's first interval if it has no readable key or time.
"""

KEY: Final = "__millpond_key"
AT: Final = "__millpond_at"
ID: Final = "__millpond_id"
ERROR: Final = "__millpond_error"

PRODUCTIONS: Final = "__millpond_productions"
"""Productions for a slot, as one Arrow stream; null in a row from outside. Its target is any position of the slot."""

POSITION_SQL: Final = f"CASE WHEN {TARGET} < 0 THEN -1 - {TARGET} ELSE {TARGET} END"
"""`position_of` of the column `TARGET`, in Spark SQL."""

READABLE_SQL: Final = f"{TARGET} >= 0"
"""`is_readable` of the column `TARGET`, in Spark SQL."""


def readable_target(position: int) -> int:
    """The target of a record for the interval at a position of the plan."""
    return position


def unreadable_target(position: int) -> int:
    """The target of an unreadable record that the interval's task at this position reports.

    Example:
        >>> [position_of(unreadable_target(position)) for position in (0, 7)]
        [0, 7]
    """
    return -1 - position


def is_readable(target: int) -> bool:
    """Whether a target is that of a record with a key and a time."""
    return target >= 0


def position_of(target: int) -> int:
    """The position in the plan of the interval that a target names, readable or not."""
    return target if is_readable(target) else -1 - target


def readable_rows(targets: Any) -> Any:
    """`is_readable` of each element of an Arrow array, as an Arrow array."""
    return pc.greater_equal(targets, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedColumns:
    """Which column of a routed row has which part of the record.

    Attributes:
        key: column of the key, text.
        at: column of the event time: a timestamp, or a number of microseconds.
        id: column of the record id, text, binary or a number; ``None`` if records have none.
        error: column with the reason why a record is unreadable; ``None`` if a null key or time says so.
        own: the input's own columns, which make up a record's value.
        sign: column that says whether a row is new or taken back; ``None`` if the rows are no changes.
        raw_at: the column that the event time was made of, to say why it is unreadable; ``None`` if ``error``
            says so, or if records are stamped on arrival.
        key_parts: what typed keys were made of, by the position of their consumer's first interval, to say why one is
            null.
    """

    key: str
    at: str
    id: str | None
    error: str | None
    own: tuple[str, ...]
    raw_at: str | None = None
    sign: str | None = None
    key_parts: Mapping[int, str | tuple[str, ...]] = field(default_factory=dict)
