"""Small files that expand to gigabytes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.log import checkpoint
from millpond.statestore.rows import row_format
from millpond.statestore.rows.row_format import ParquetRowFormat, decode_rows, seal_parquet

ROWS = 20_000
NAME = "0000000001-" + "ab" * 16 + ".parquet"


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=1 << 30)
    return sink.getvalue().to_pybytes()


# Built by the test: at import, each test process would allocate and keep 200 MB.
BOMBS = {
    "dictionary": lambda: pa.table({"key": pa.array(["k"] * ROWS), "state": pa.array(["x" * 10_000] * ROWS)}),
    "nulls": lambda: pa.table(
        {"key": pa.array(["k"] * ROWS * 30), "state": pa.nulls(ROWS * 30, pa.string())}
    ),
    "list": lambda: pa.table({"key": ["k"], "timers": pa.array([[None] * ROWS * 30], pa.list_(pa.int64()))}),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("name", [NAME, None])
def test_file_that_expands_too_far_is_damage(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str | None
) -> None:
    monkeypatch.setattr(row_format, "DECODED_BYTES_MAX", 1 << 22)
    table = BOMBS[kind]()
    data = parquet(table)
    sealed = data if name is None else seal_parquet(memoryview(data), name)

    with pytest.raises(DataError, match="more than its size"):
        decode_rows(sealed, table.column_names, None, name=name)


def test_file_below_bound_is_read_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expanded size is an estimate; only the real size may refuse a file."""
    table = pa.table(
        {"key": [f"{number:05}" for number in range(ROWS)], "state": ["a", "b" * 100] * (ROWS // 2)}
    )
    expected = ParquetRowFormat().decode(parquet(table), table.column_names, None, name=None)
    monkeypatch.setattr(row_format, "DECODED_BYTES_MAX", 1 << 23)

    assert decode_rows(parquet(table), table.column_names, None, name=None).equals(expected)
    assert expected.equals(table)


def test_checkpoint_that_expands_too_far_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_format, "DECODED_BYTES_MAX", 1 << 22)
    with pytest.raises(DataError, match="more than its size"):
        list(checkpoint.read_part(parquet(BOMBS["dictionary"]()), "_delta_log/1.checkpoint.parquet"))
