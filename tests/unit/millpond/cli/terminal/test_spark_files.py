"""Files as Spark streams, compared with the local runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from millpond.cli.terminal.row_files import RowFiles, stream_of_files
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = [
    {"key": "7", "n": 1, "x": 0.5, "yes": True, "code": "007", "at": "2024-01-01T00:00:00Z", "no": None},
    {"key": "8", "n": -2, "x": 20.0, "yes": False, "code": "12", "at": "2024-01-02T00:00:00Z", "no": "a,b"},
]
CSV = """key,n,x,yes,code,at,no
7,1,0.5,true,007,2024-01-01T00:00:00Z,
8,-2,2e1,false,12,2024-01-02T00:00:00Z,"a,b"
"""


def on_spark(spark: SparkSession, path: Path, tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    stream = stream_of_files(spark, str(path), {"key"})
    query = (
        stream.writeStream.foreachBatch(
            lambda batch, _: found.extend(row.asDict() for row in batch.collect())
        )
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(found, key=lambda row: str(row["key"]))


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.parquet", "folder"])
def test_spark_reads_same_rows(spark: SparkSession, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        (path / "below").mkdir(parents=True)
        for number, row in enumerate(ROWS):
            (path / ("below" if number else ".") / f"{number}.json").write_text(
                json.dumps(row), encoding="utf-8"
            )
        (path / "_SUCCESS").touch()
    elif name == "rows.csv":
        path.write_text(CSV, encoding="utf-8")
    elif name == "rows.json":
        path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    else:
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    source = RowFiles(path, {"key"})
    pieces = [rows for _, rows in source.read_pieces(0, 10)]
    here = [row for rows in pieces for row in (rows.to_pylist() if isinstance(rows, pa.Table) else rows)]

    assert on_spark(spark, path, tmp_path) == sorted(here, key=lambda row: str(row["key"])) == ROWS


@pytest.mark.parametrize("name", ["[a]", "a*", "a?", "{a,b}", "a\\b"])
def test_name_of_a_folder_is_no_pattern(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Spark would read the rows of other folders, or none."""
    for folder, row in ((name, ROWS[0]), ("a", ROWS[1]), ("ab", ROWS[1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.json").write_text(json.dumps(row), encoding="utf-8")

    assert on_spark(spark, tmp_path / name, tmp_path) == ROWS[:1]


def test_file_with_a_colon_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "12:00.json").write_text(json.dumps(ROWS[0]), encoding="utf-8")

    with pytest.raises(InvalidError, match="a colon in its name"):
        stream_of_files(spark, str(tmp_path), ())


def test_spark_reads_cells_with_quotes_and_backslashes_as_text(spark: SparkSession, tmp_path: Path) -> None:
    texts = ['cup ""big""', "C:\\dir\\", "", " lead", "a\nb", 'a\\""b,c', '""', "\\"]
    lines = [f'{number},"{text}",|' for number, text in enumerate(texts)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["key,a,b", *lines, "8,,  x ", "9,\\,\\", ""]), encoding="utf-8")

    found = on_spark(spark, path, tmp_path)

    assert [row["a"] for row in found] == [*(text.replace('""', '"') for text in texts), None, "\\"]
    assert [row["b"] for row in found] == ["|"] * len(texts) + ["  x ", "\\"]


def test_csv_files_with_another_order_of_columns_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("k,n\na,1\n", encoding="utf-8")
    (tmp_path / "2.csv").write_text("n,k\n1,a\n", encoding="utf-8")

    with pytest.raises(InvalidError, match="same columns in the same order"):
        stream_of_files(spark, str(tmp_path), {"k"})


def test_missing_input_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """The file must exist on this machine and where Spark looks for it."""
    with pytest.raises(InvalidError, match="no file and no folder"):
        stream_of_files(spark, str(tmp_path / "none.json"), ())
    with pytest.raises(InvalidError, match="spark cannot read"):
        stream_of_files(spark, f"file://{tmp_path}/none.json", ())
