"""The typed columns of a view: their names and their order."""

from __future__ import annotations

import pyarrow as pa

from millpond.statestore.view_columns import StateColumn, shown_columns


def test_names_that_are_taken_say_where_they_are_from() -> None:
    """No two columns of a view have one name, in any case: parts of keys come first, then those of states."""
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
