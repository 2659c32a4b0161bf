"""Sales with decimals, dates and times on both runners, held against DuckDB."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from click.testing import CliRunner

import millpond as mp
from examples.sales.__main__ import main
from examples.sales.check import differences
from examples.sales.job import MONTHS, ORDERS, REGIONS, run_local, run_spark
from examples.sales.sales import made_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AGREED = {"months": 0, "regions": 0, "orders": 0, "states": 0}


@pytest.fixture(scope="module")
def tables() -> Mapping[str, pa.Table]:
    return made_tables(100)


@pytest.mark.parametrize("pieces", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_local_runner_agrees_with_duckdb(tables: Mapping[str, pa.Table], tmp_path: Path, pieces: int) -> None:
    """Columns of the tables have the types that went in."""
    summary = run_local(tables, tmp_path / "pond", tmp_path, pieces)

    assert differences(tables, tmp_path / "pond", tmp_path) == AGREED
    assert (summary.totals.late, summary.totals.dead_letters) == (0, 0)
    for name, schema in (("months", MONTHS), ("regions", REGIONS), ("orders", ORDERS)):
        shown = mp.read_table(tmp_path / name).schema
        assert shown.types == schema.types, name


@pytest.mark.slow
def test_spark_agrees_with_duckdb(
    tables: Mapping[str, pa.Table], tmp_path: Path, spark: SparkSession
) -> None:
    run_spark(tables, tmp_path / "pond", tmp_path, spark)

    assert differences(tables, tmp_path / "pond", tmp_path) == AGREED


def test_check_finds_a_cent(tables: Mapping[str, pa.Table], tmp_path: Path) -> None:
    run_local(tables, tmp_path / "pond", tmp_path)
    sales = tables["sales"].to_pylist()
    sales[0]["amount"] += Decimal("0.01")
    changed = {**tables, "sales": pa.Table.from_pylist(sales, tables["sales"].schema)}

    found = differences(changed, tmp_path / "pond", tmp_path)
    assert (found["months"], found["orders"], found["regions"]) == (2, 2, 0)


def test_sales_are_the_same_every_time() -> None:
    assert made_tables(50, seed=7) == made_tables(50, seed=7)
    assert made_tables(50, seed=7) != made_tables(50, seed=8)


def test_command_line_shows_the_tables_and_the_verdict(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--customers", "30", "--output", str(tmp_path / "out")])

    assert result.exit_code == 0, result.output
    assert result.output.count("as DuckDB has it") == len(AGREED)
