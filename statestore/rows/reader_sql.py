"""
The reader's rule as SQL, for engines that read the row files themselves.

One text for Spark and DuckDB; they differ in how they write an empty list. Tests
hold it to `millpond.statestore.rows.merge.merge_updates`. One shuffle by key: the
window functions and the grouping partition alike.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["ROWS_VIEW_COLUMNS", "SqlDialect", "rows_query"]

ROWS_VIEW_COLUMNS: Final = (
    "key",
    "state",
    "state_bytes",
    "timers",
    "hold",
    "superstep",
    "sequencer",
    "commit_number",
)
"""What a reader sees of a row."""


class SqlDialect(StrEnum):
    """
    An SQL dialect, by its word for the empty list.
    """

    SPARK = "array()"
    DUCKDB = "[]"


_QUERY: Final = """
with updates as (
    -- numbered as Delta's txn versions are: the lease in the high bits
    select *, sequencer * 4294967296 + commit_number as place, coalesce(deleted, false) as gone
    from {source}
),
placed as (
    select *,
        max(place) over (partition by key) as last_place,
        max(case when state is not null or state_bytes is not null or gone then place end)
            over (partition by key) as state_place,
        max(case when timers is not null or gone then place end)
            over (partition by key) as timers_place
    from updates
),
-- at most one update of a key has a given place, so max() picks that one
merged as (
    select
        key,
        max(case when place = state_place and not gone then state end) as state,
        max(case when place = state_place and not gone then state_bytes end) as state_bytes,
        coalesce(max(case when place = timers_place then timers end), {empty_list}) as timers,
        max(case when place = last_place then hold end) as hold,
        max(case when place = last_place then superstep end) as superstep,
        max(case when place = last_place then sequencer end) as sequencer,
        max(case when place = last_place then commit_number end) as commit_number
    from placed
    group by key
)
select {columns}
from merged
where state is not null or state_bytes is not null or timers <> {empty_list}
"""


def rows_query(source: str, dialect: SqlDialect) -> str:
    """
    A query for one row per key over a relation of row updates of one computation.

    Args:
        source: the relation's name, quoted as the dialect asks, with the row's columns.
        dialect: the engine's.
    """
    columns = ", ".join(ROWS_VIEW_COLUMNS)
    return _QUERY.format(source=source, empty_list=dialect.value, columns=columns)
