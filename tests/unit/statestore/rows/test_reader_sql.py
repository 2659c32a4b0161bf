from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
from hypothesis import given

from millpond.statestore.rows.merge import ROWS_VIEW_COLUMNS, SqlDialect, merge_updates, rows_query
from tests.fixtures.row_updates import row_histories, row_updates


@given(row_histories())
def test_sql_matches_merge_updates(updates: list[dict[str, Any]]) -> None:
    table = row_updates(updates)
    expected = merge_updates(table).select(ROWS_VIEW_COLUMNS)
    with duckdb.connect() as connection:
        connection.execute("set TimeZone = 'UTC'")
        connection.register("history", table)
        rows = connection.sql(rows_query("history", SqlDialect.DUCKDB) + " order by key").to_arrow_table()

    assert expected.equals(pa.table(rows.columns, rows.column_names).cast(expected.schema))
