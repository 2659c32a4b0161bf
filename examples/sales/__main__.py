"""``python -m examples.sales``: sales with decimals, dates and times, and DuckDB's opinion of what comes out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
import pyarrow as pa
from rich.console import Console
from rich.table import Table

import millpond as mp
from examples.quiet_spark import quiet_spark
from examples.sales.check import EXPECTED, differences
from examples.sales.job import run_local, run_spark
from examples.sales.sales import made_tables

_HELP = """
Sell to a thousand customers, and ask three questions of the sales.

\b
  months     what each customer bought in each month          calendar windows, five combiners
  regions    the credit of all customers of each region       changes of a table, taken back and added
  orders     each sale with its customer at that time         a join in the order of time

\b
  python -m examples.sales                    on the local runner
  python -m examples.sales --runner spark
  python -m examples.sales --customers 20000

The answers are Delta tables in OUTPUT, one row for each key. DuckDB answers the same questions from the rows that went
in, and once more from the state in OUTPUT/pond; exit code 1 if a row differs.
"""


@click.command(help=_HELP)
@click.option("--runner", type=click.Choice(["local", "spark"]), default="local", show_default=True)
@click.option("--customers", type=click.IntRange(1), default=1_000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Which made-up sales.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/sales"), show_default=True)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
def main(runner: str, customers: int, seed: int, output: Path, master: str) -> None:
    """Run the job, show the beginning of its tables, and compare them with DuckDB's."""
    console, store = Console(), output / "pond"
    for name in ("pond", *EXPECTED):
        shutil.rmtree(output / name, ignore_errors=True)
    tables = made_tables(customers, seed)
    if runner == "local":
        run_local(tables, store, output)
    else:
        spark = quiet_spark("sales", master=master, log=output / "spark.log")
        try:
            run_spark(tables, store, output, spark)
        finally:
            spark.stop()
    for name in EXPECTED:
        _print_table(console, name, mp.read_table(output / name))
    found = differences(tables, store, output)
    for name, rows in found.items():
        console.print(f"  {name}: " + (f"{rows} rows differ from DuckDB's" if rows else "as DuckDB has it"))
    sys.exit(1 if any(found.values()) else 0)


def _print_table(console: Console, name: str, rows: pa.Table) -> None:
    shown = Table(title=f"{name}, {len(rows)} rows", title_justify="left")
    for column in rows.column_names:
        shown.add_column(column)
    order = [(column, "ascending") for column in rows.column_names[:2]]
    for row in rows.sort_by(order).slice(0, 4).to_pylist():
        shown.add_row(*map(str, row.values()))
    console.print(shown)


if __name__ == "__main__":
    main()
