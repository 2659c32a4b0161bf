from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.cli.terminal.row_files import RowFiles, TextForm
from millpond.executor.inputs.extraction import row_count, rows_from
from millpond.statestore.errors import InvalidError

_MIB = 1 << 20
_ROWS = 20_000


def test_parquet_file_is_read_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    """A value in a dictionary takes its size once in the file and once a row in memory."""
    text = "x" * 150_000
    table = pa.table({"k": range(_ROWS), "text": pa.DictionaryArray.from_arrays([0] * _ROWS, [text])})
    pq.write_table(table, tmp_path / "1.parquet", compression="zstd")
    assert (tmp_path / "1.parquet").stat().st_size < _MIB

    source = RowFiles(tmp_path)
    seen = 0
    for count, rows in source.pieces(7, _ROWS):
        assert isinstance(rows, pa.Table)
        assert rows.nbytes < 256 * _MIB
        assert rows.column("k").to_pylist() == list(range(7 + seen, 7 + seen + count))
        assert rows.schema.field("text").type == pa.string()
        seen += count
        if seen > 2_000:
            break
    assert seen > 2_000


def test_small_parquet_files_come_in_pieces_of_requested_rows(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table({"k": range(5_000)}), tmp_path / f"{number}.parquet")

    assert [row_count(rows) for _, rows in RowFiles(tmp_path).pieces(0, 4_000)] == [
        4_000,
        4_000,
        4_000,
        3_000,
    ]


def test_views_of_text_are_read_as_text(tmp_path: Path) -> None:
    """Arrow cannot take rows of views."""
    table = pa.table(
        {"t": pa.array(["a", None], pa.string_view()), "b": pa.array([b"a", None], pa.binary_view())}
    )
    pq.write_table(table, tmp_path / "1.parquet")

    ((_, rows),) = RowFiles(tmp_path).pieces(0, 10)

    assert (
        rows
        == rows_from(table)
        == pa.table({"t": pa.array(["a", None]), "b": pa.array([b"a", None])}).cast(
            pa.schema({"t": pa.large_string(), "b": pa.large_binary()})
        )
    )


def test_endless_line_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "1.json.gz", "wb") as file:
        file.write(b'{"k": 1}\n')
        for _ in range(70):
            file.write(b" " * _MIB + b"x")

    with pytest.raises(InvalidError, match="longer than 64 MiB"):
        list(RowFiles(tmp_path).pieces(0, 10))


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b" " * 1_000 + b"\n"])
def test_blank_lines_between_rows_are_no_rows_however_many(tmp_path: Path, blank: bytes) -> None:
    with gzip.open(tmp_path / "1.json.gz", "wb") as file:
        for number in range(3):
            file.write(blank * (3 * _MIB // len(blank)) + b'  {"k": %d}' % number + b"\r\n")

    assert RowFiles(tmp_path).count == 3
    assert [list(rows) for _, rows in RowFiles(tmp_path).pieces(1, 10)] == [[{"k": 1}, {"k": 2}]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_longer_than_a_read_stay_whole(tmp_path: Path, encoding: str) -> None:
    rows = [{"k": 1}, {"k": "ø" * (2 * _MIB)}, {"k": "\u2028" * _MIB}, {"k": 2}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "1.json").write_bytes(text.encode(encoding))

    source = RowFiles(tmp_path, form=TextForm(encoding=encoding))
    assert [row for _, found in source.pieces(0, 10) for row in found] == rows
