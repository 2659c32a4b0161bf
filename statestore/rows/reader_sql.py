"""The reader's rule as SQL, for engines that read the row files themselves.

Spark and DuckDB share one query, except for the literal of an empty list. Tests compare
it with `millpond.statestore.rows.merge.merge_updates`. It needs one shuffle by key: the
window functions and the grouping have the same partitioning. The rule is stated in
`millpond.statestore.rows.row` (MillWheel §7.1).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

ROWS_VIEW_COLUMNS: Final = (
    "key",
    "state",
    "state_bytes",
    "state_version",
    "timers",
    "hold",
    "superstep",
    "sequencer",
    "commit_number",
)
"""The columns of a row that readers see."""


class SqlDialect(StrEnum):
    """An SQL dialect; the value is its literal for the empty list."""

    SPARK = "array()"
    DUCKDB = "[]"


_QUERY: Final = """
with updates as (
    -- numbered as Delta's txn versions are: the lease in the high bits
    select *, sequencer * 4294967296 + commit_number as position, coalesce(deleted, false) as gone
    from {source}
),
positioned as (
    select *,
        max(position) over (partition by key) as last_position,
        max(case when state is not null or state_bytes is not null or gone then position end)
            over (partition by key) as state_position,
        max(case when timers is not null or gone then position end)
            over (partition by key) as timers_position
    from updates
),
-- at most one update of a key has a given position, so max() picks that update
merged as (
    select
        key,
        max(case when position = state_position and not gone then state end) as state,
        max(case when position = state_position and not gone then state_bytes end) as state_bytes,
        max(case when position = state_position and not gone then coalesce(state_version, 0) end)
            as state_version,
        coalesce(max(case when position = timers_position then timers end), {empty_list}) as timers,
        max(case when position = last_position then hold end) as hold,
        max(case when position = last_position then superstep end) as superstep,
        max(case when position = last_position then sequencer end) as sequencer,
        max(case when position = last_position then commit_number end) as commit_number
    from positioned
    group by key
)
select {columns}
from merged
where state is not null or state_bytes is not null or timers <> {empty_list}
"""


def rows_query(source: str, dialect: SqlDialect) -> str:
    """A query for one row per key over a relation of row updates of one computation.

    Args:
        source: name of a relation with the row's columns, quoted for the dialect.
        dialect: the dialect of the engine that runs the query.
    """
    columns = ", ".join(ROWS_VIEW_COLUMNS)
    return _QUERY.format(source=source, empty_list=dialect.value, columns=columns)
