"""The same tables by DuckDB, from the rows that went in; and the rows in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

import millpond as mp

_CURRENT: Final = """
    select * from customers where op in ('+I', '+U')
    qualify row_number() over (partition by customer order by changed_at desc) = 1
"""

EXPECTED: Final[Mapping[str, str]] = {
    "months": """
        select date_trunc('month', sold_at) as window_start, customer as key, sum(amount) as spent,
            max(amount) as dearest, max(sold_at) as last_sale, sum(items) as items, count(*) as sales
        from sales group by all
    """,
    "regions": f"""
        select region as key, sum(credit) as credit, count(*) as customers, max(since) as newest
        from ({_CURRENT}) group by all
    """,
    "orders": """
        select sale, sales.customer, sold_at, amount, region, since, credit - amount as left
        from sales asof join (select * from customers where op in ('+I', '+U')) as customers
            on sales.customer = customers.customer and sales.sold_at >= customers.changed_at
    """,
}

STATES: Final = "select key as customer, state ->> 'region' as region, state ->> 'since' as since from orders"
"""A question to the store: the state of the join, in SQL."""

_STATES_EXPECTED: Final = f"select customer, region, since::varchar as since from ({_CURRENT})"


def differences(tables: Mapping[str, pa.Table], store: Path, output: Path) -> dict[str, int]:
    """Return by table the number of rows that only one of Millpond and DuckDB has."""
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        for name, table in tables.items():
            connection.register(name, table)
        found = {
            name: _differing(connection, mp.read_table(output / name), sql) for name, sql in EXPECTED.items()
        }
        with mp.Store.open(store, read_only=True) as opened:
            states = opened.sql().sql(STATES).to_arrow_table()
        return {**found, "states": _differing(connection, states, _STATES_EXPECTED)}


def _differing(connection: duckdb.DuckDBPyConnection, shown: pa.Table, expected: str) -> int:
    connection.register("shown", shown)
    names = ", ".join(f'"{name}"' for name in shown.column_names)
    one, other = f"(select {names} from shown)", f"(select {names} from ({expected}))"
    both = f"({one} except all {other}) union all ({other} except all {one})"
    ((count,),) = connection.sql(f"select count(*) from ({both})").fetchall()
    return int(count)
