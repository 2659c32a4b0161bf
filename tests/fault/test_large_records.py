"""Records above ``max_record_bytes``, which become dead letters with the beginning of their value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest

from millpond.cli.terminal.row_files import RowFiles
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.payload import JsonPayload
from millpond.executor.interval.letters import letter_value
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.loading.parquet_files import row_bytes
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.fault

LIMIT = 2_000
LARGE = "é" * LIMIT
ROWS: list[dict[str, Any]] = [
    {"k": "a", "t": 0, "text": "small"},
    {"k": "a", "t": 1, "text": LARGE},
    {"k": "b", "t": 2, "text": "small"},
]


class Lengths(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + len(record.value["text"]))


def pipeline(**options: Any) -> EnginePipeline:
    graph = EnginePipeline("p")
    given: dict[str, Any] = {"key": "k", "at": "t", "max_record_bytes": LIMIT, **options}
    graph.inject("s", **given).apply(Lengths(), name="c")
    return graph


def store(folder: Path) -> Store:
    registry = MemoryRegistry()
    return Store.open(
        folder / "pond",
        leases=lambda _, writer_id: MemoryLeases(registry, SystemClock(), writer_id=writer_id),
    )


def states(opened: Store) -> dict[str, Any]:
    rows = opened.rows_view("c").to_arrow()
    return dict(
        zip(rows.column("key").to_pylist(), map(orjson.loads, rows.column("state").to_pylist()), strict=True)
    )


def check_letter(opened: Store) -> None:
    assert states(opened) == {"a": 5, "b": 5}
    (state,) = opened.rows_view("dead_letters").to_arrow().column("state").to_pylist()
    letter = orjson.loads(state)
    assert "larger than the 2,000 bytes that max_record_bytes of its stream allows" in letter["error"]
    assert (letter["key"], letter["stream"]) == ("a", "s")
    assert "é" * 100 in letter["value"]
    assert len(state) < LIMIT
    with pytest.raises(InvalidError, match="the whole value"):
        letter_value(letter)


@pytest.mark.parametrize("how", ["table", "mappings", "encoded", "function"])
def test_large_record_becomes_a_letter_in_one_process(tmp_path: Path, how: str) -> None:
    rows: Any = ROWS if how == "mappings" else pa.Table.from_pylist(ROWS)
    options: dict[str, Any] = {"key": lambda row: row["k"]} if how == "function" else {}
    if how == "encoded":
        rows = pa.table({"value": [orjson.dumps(row) for row in ROWS]})
        options = {"payload": JsonPayload({}), "key": lambda row: row["k"]}
    with store(tmp_path) as opened:
        LocalRunner(opened, dead_letter_limit=None).run(pipeline(**options), {"s": rows})
        if how == "encoded":
            assert states(opened) == {"a": 5, "b": 5}
            assert opened.rows_view("dead_letters").to_arrow().num_rows == 1
        else:
            check_letter(opened)


@pytest.mark.parametrize("options", [{}, {"key": lambda row: row["k"]}, {"at": lambda row: row["t"]}])
def test_large_line_of_a_file_becomes_a_letter(tmp_path: Path, options: dict[str, Any]) -> None:
    """It is not parsed, because its objects could take twenty times the memory."""
    lines = [b'{"k":"b","t":2,"text":"small"}', b'{"k":"a","t":1,"text":"' + b"x" * (17 << 20) + b'"}']
    (tmp_path / "1.json").write_bytes(b"\n".join(lines))
    with store(tmp_path) as opened:
        source = RowFiles(tmp_path / "1.json", record_bytes_max=LIMIT)
        LocalRunner(opened, dead_letter_limit=None).run(pipeline(**options), {"s": source})
        assert states(opened) == {"b": 5}
        (state,) = opened.rows_view("dead_letters").to_arrow().column("state").to_pylist()
        assert "larger than the 2,000 bytes" in orjson.loads(state)["error"]
        assert "xxx" in orjson.loads(state)["value"]
        assert len(state) < LIMIT


@pytest.mark.parametrize("key", ["k", ["k"], lambda row: row["k"]], ids=["column", "typed", "function"])
def test_large_record_becomes_a_letter_on_spark(spark: SparkSession, tmp_path: Path, key: Any) -> None:
    frame = spark.createDataFrame(ROWS, "k string, t long, text string")
    with store(tmp_path) as opened:
        SparkRunner(opened, spark=spark, dead_letter_limit=None).run(pipeline(key=key), {"s": frame})
        if key != ["k"]:
            check_letter(opened)
        assert opened.rows_view("dead_letters").to_arrow().num_rows == 1


def test_without_limit_any_size_is_accepted(tmp_path: Path) -> None:
    with store(tmp_path) as opened:
        LocalRunner(opened).run(pipeline(max_record_bytes=None), {"s": ROWS})
        assert states(opened) == {"a": 5 + LIMIT, "b": 5}


@pytest.mark.parametrize("limit", [0, -1, 1.5, "16 MiB", True])
def test_limit_that_is_no_number_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidError, match="max_record_bytes must be a positive whole number or None"):
        pipeline(max_record_bytes=limit)


def test_bytes_of_rows_are_those_of_all_columns() -> None:
    nested = pa.array([[{"a": "x" * 10}], None, [{"a": "y"}, {"a": "zz"}]])
    maps = pa.array([[("k", "v" * 30)], None, []], pa.map_(pa.string(), pa.string()))
    words = pa.array(["long" * 10, "long" * 10, None]).dictionary_encode()
    table = pa.table(
        {"nested": nested, "maps": maps, "words": words, "views": pa.array(["x"] * 3, pa.string_view())}
    )

    assert row_bytes(table).tolist() == [10 + 31 + 40 + 1, 40 + 1, 3 + 1]
    assert row_bytes(table.slice(1)).tolist() == [40 + 1, 3 + 1]
