"""
Row updates by hand and at random, and the reader's rule in plain Python.

`merged_rows` is the model that `millpond.statestore.merge` and the SQL of
`millpond.statestore.view` are held to: a loop over dicts, slow and obvious.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa
from hypothesis import strategies as st

from millpond.statestore.row import ROW_SCHEMA

__all__ = ["Update", "merged_rows", "row_histories", "row_updates"]

Update: TypeAlias = Mapping[str, Any]
"""One row update as a dict; columns that it lacks are null, times are microseconds."""

_DEFAULTS: Final = {"sequencer": 1, "commit_number": 1, "superstep": 1, "deleted": False}


def row_updates(updates: Iterable[Update]) -> pa.Table:
    """
    A table of row updates; order numbers default to 1 and ``deleted`` to false.

    Example:
        >>> row_updates([{"key": "a", "state": "1"}]).num_rows
        1
    """
    rows = [{**_DEFAULTS, **update} for update in updates]
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


def merged_rows(updates: Sequence[Update]) -> list[dict[str, Any]]:
    """
    One row per key, sorted by key, by the rule that `millpond.statestore.row` states.
    """
    rows: dict[str, dict[str, Any]] = {}
    in_order = sorted(updates, key=lambda update: (update["sequencer"], update["commit_number"]))
    for update in in_order:
        row = rows.setdefault(update["key"], {"state": None, "state_bytes": None, "timers": []})
        _apply(row, update)
    return [rows[key] for key in sorted(rows) if _is_there(rows[key])]


def _apply(row: dict[str, Any], update: Update) -> None:
    if update["deleted"]:
        row.update(state=None, state_bytes=None, timers=update["timers"] or [])
    else:
        if update["state"] is not None or update["state_bytes"] is not None:
            row.update(state=update["state"], state_bytes=update["state_bytes"])
        if update["timers"] is not None:
            row.update(timers=update["timers"])
    row.update({name: update[name] for name in ("key", "hold", "superstep", "sequencer", "commit_number")})


def _is_there(row: Mapping[str, Any]) -> bool:
    return row["state"] is not None or row["state_bytes"] is not None or bool(row["timers"])


_TIMES = st.integers(0, 10**15)
_TIMERS = st.lists(
    st.fixed_dictionaries(
        {"tag": st.sampled_from(["", "x"]), "domain": st.just("event"), "at": _TIMES, "output_at": _TIMES}
    ),
    max_size=2,
)
_CHANGES = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["", "a", "b", "ä", "\U0001f600"]),
        "state": st.none() | st.sampled_from(["1", '{"count":2}', ""]),
        "state_bytes": st.none() | st.binary(max_size=2),
        "timers": st.none() | _TIMERS,
        "hold": st.none() | _TIMES,
        "deleted": st.booleans(),
    }
)


@st.composite
def row_histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """
    Updates of a few keys under rising order numbers, shuffled; a key never has two of one number.
    """
    orders = draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=12, unique=True).map(sorted)
    )
    updates = [
        {**change, "sequencer": order[0], "commit_number": order[1], "superstep": superstep}
        for superstep, order in enumerate(orders, start=1)
        for change in draw(
            st.lists(_CHANGES, min_size=1, max_size=4, unique_by=lambda change: str(change["key"]))
        )
    ]
    return list(draw(st.permutations(updates)))
