"""The README's example, run as written."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import millpond as mp
from tests.documents import readme

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNTS = [("cat", 1), ("cat", 2), ("dog", 1)]


def _run(code: str, names: dict[str, Any]) -> str:
    """Run code as a user's script; its classes live in ``__main__``, so workers get them by value."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue().strip()


def _produced(folder: Path) -> list[tuple[str, int]]:
    values = [
        json.loads(row["value"])
        for file in folder.glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    return sorted((value["query"], value["count"]) for value in values)


@pytest.mark.zookeeper
def test_example_prints_the_readmes_output(tmp_path: Path) -> None:
    local, _spark = readme().blocks("python")
    (shown,) = readme().blocks("text")

    with contextlib.chdir(tmp_path):
        assert _run(local, {"__name__": "__main__"}) == shown.strip()
    assert _produced(tmp_path / "counts") == COUNTS


def test_example_has_about_ten_statements() -> None:
    """The README calls it ten lines."""
    local, _spark = readme().blocks("python")

    assert len([line for line in local.splitlines() if line.strip()]) <= 16


def test_spark_gives_the_counts_of_the_same_pipeline(tmp_path: Path, spark: SparkSession) -> None:
    """Its input is a stream of files."""
    local, on_spark = readme().blocks("python")
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark}
    (tmp_path / "queries").mkdir()
    lines = [
        json.dumps({"query": query, "time": f"2013-02-09T08:00:0{second}Z"})
        for second, query in enumerate(["cat", "dog", "cat"])
    ]
    (tmp_path / "queries" / "1.json").write_text("\n".join(lines))

    declared = local.partition("rows = ")[0]
    with contextlib.chdir(tmp_path):
        _run(declared, names)
        # Spark's JVM has another working directory.
        absolute = on_spark.replace('("queries")', f'("{tmp_path}/queries")').replace(
            '"big_pond"', f'"{tmp_path}/big_pond"'
        )
        _run(absolute, names)
        with mp.Store.open("big_pond", read_only=True) as store:
            rows = store.rows_view("counter").to_arrow().to_pylist()

    assert [(row["key"], json.loads(row["state"])) for row in rows] == [
        ("cat", {"count": 2}),
        ("dog", {"count": 1}),
    ]
    assert _produced(tmp_path / "counts") == COUNTS
