"""The typed columns of a view."""

from __future__ import annotations

import pyarrow as pa

from millpond.statestore.view_columns import StateColumn, shown_columns


def test_taken_column_names_get_prefix_of_source() -> None:
    """Names must differ regardless of case."""
    keys = [pa.field("State", pa.string()), pa.field("card", pa.int64()), pa.field("none", pa.null())]
    states = [
        StateColumn("Card", "field", pa.int64()),
        StateColumn("timers", "field", pa.int64()),
        StateColumn("total", "value", pa.struct([("n", pa.int64())]), has_expiry=True),
    ]

    shown = [(column.field.name, column.source) for column in shown_columns(keys, states)]

    assert shown == [
        ("key_State", "key"),
        ("card", "key"),
        ("none", "key"),
        ("state_Card", "state"),
        ("state_timers", "state"),
        ("total", "state"),
        ("total_expires_at", "state"),
    ]
