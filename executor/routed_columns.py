"""
Names of the columns that routing adds to the rows of an outside DataFrame.
"""

from __future__ import annotations

__all__ = ["AT", "COLUMNS", "ERROR", "ID", "KEY", "TARGET"]

TARGET = "__millpond_target"
"""Position *i* of the interval in the plan; ``-1 - i`` of the consumer's first for an unreadable record."""

KEY = "__millpond_key"
AT = "__millpond_at"
ID = "__millpond_id"
ERROR = "__millpond_error"
"""Why a record is unreadable; null otherwise."""

COLUMNS = (TARGET, KEY, AT, ID, ERROR)
"""What routing adds to the input's own columns."""
