"""Rows of files: order, types, positions and refusals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from millpond.cli.terminal.row_files import RowFiles
from millpond.executor.inputs.extraction import Rows
from millpond.statestore.errors import DataError, InvalidError, UnavailableError


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffixes:
        case [*_, ".parquet"]:
            parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        case [*_, ".csv"]:
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        case [*_, ".gz"]:
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
        case _:
            path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def numbered(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"n": number, "word": f"w{number}"} for number in range(start, stop)]


def plain(rows: Rows) -> list[Any]:
    return rows.to_pylist() if isinstance(rows, pa.Table) else list(rows)


def read(source: RowFiles, start: int = 0, records_max: int = 10) -> list[Any]:
    return [row for _, rows in source.pieces(start, records_max) for row in plain(rows)]


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl", "json.gz", "csv"])
@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 24, 25])
def test_every_format_has_same_rows_in_full_pieces(tmp_path: Path, suffix: str, start: int) -> None:
    for name, (first, last) in {"a": (0, 10), "b": (10, 11), "c": (11, 25)}.items():
        write(tmp_path / f"{name}.{suffix}", numbered(first, last))
    source = RowFiles(tmp_path)

    assert source.count == 25
    assert read(source, start, 4) == numbered(start, 25)
    sizes = [count for count, _ in source.pieces(start, 4)]
    assert all(size == 4 for size in sizes[:-1])
    assert sum(sizes) == 25 - start
    assert [count for count, _ in source.pieces(start, 4)] == sizes


def test_files_are_in_natural_order_of_names(tmp_path: Path) -> None:
    """Names that begin with a dot or an underscore are skipped."""
    for name in ("10.json", "9.json", "2/5.json", "_SUCCESS", ".hidden.json", "_temporary/0.json"):
        write(tmp_path / name, [{"file": name}])

    assert read(RowFiles(tmp_path)) == [{"file": "2/5.json"}, {"file": "9.json"}, {"file": "10.json"}]


def test_malformed_json_line_is_passed_on_as_text(tmp_path: Path) -> None:
    """The engine makes it a dead letter; blank lines are skipped."""
    path = tmp_path / "rows.json"
    path.write_text('{"n": 1}\n\nno json\n  \n{"n": 2}\n', encoding="utf-8")
    source = RowFiles(path)

    assert (source.count, read(source)) == (3, [{"n": 1}, "no json", {"n": 2}])


def test_csv_column_has_narrowest_common_type(tmp_path: Path) -> None:
    """Codes with leading zeros, times and mixed kinds are text."""
    columns = ("key", "whole", "number", "truth", "code", "at", "mixed", "late_text")
    first = ("1", "1", "1", "true", "007", "2024-01-01T00:00:00Z", "1", "1")
    second = ("2", "-20", "2.5e3", "false", "12", "2024-01-02T00:00:00Z", "true", "x")
    write(tmp_path / "1.csv", [dict(zip(columns, first, strict=True))])
    write(tmp_path / "2.csv", [dict(zip(columns, second, strict=True))])
    one, two = read(RowFiles(tmp_path, text_columns={"key"}))

    assert one == {**dict(zip(columns, first, strict=True)), "whole": 1, "number": 1.0, "truth": True}
    assert two == {**dict(zip(columns, second, strict=True)), "whole": -20, "number": 2500.0, "truth": False}


def test_empty_csv_cell_is_null(tmp_path: Path) -> None:
    """A quoted empty cell is empty text."""
    path = tmp_path / "rows.csv"
    path.write_text('a,b,c\n,"",1\n"x\ny",z,\n', encoding="utf-8")

    assert read(RowFiles(path)) == [{"a": None, "b": "", "c": 1}, {"a": "x\ny", "b": "z", "c": None}]


def test_files_with_different_columns_stay_in_separate_pieces(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [{"n": 1}])
    write(tmp_path / "2.parquet", [{"n": 2, "new": "x"}])

    assert [(count, plain(rows)) for count, rows in RowFiles(tmp_path).pieces(0, 10)] == [
        (1, [{"n": 1}]),
        (1, [{"n": 2, "new": "x"}]),
    ]


def test_position_names_last_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "1.json", numbered(0, 3))
    write(tmp_path / "2.json", numbered(3, 5))
    source = RowFiles(tmp_path)

    assert source.offsets(0) is None
    told = [json.loads(source.offsets(count) or "") for count in (3, 4)]
    assert told == [
        {"rows": 3, "file": "1.json", "row": 3, "files_before": 0},
        {"rows": 4, "file": "2.json", "row": 1, "files_before": 1},
    ]


@pytest.mark.parametrize(
    ("name", "rows", "is_refused"),
    [
        ("3.json", 2, False),
        ("2.json", 9, False),
        ("0.json", 1, True),
        ("1.json", 9, True),
        ("1b.json", 3, True),
    ],
)
def test_folder_may_grow_only_at_its_end(tmp_path: Path, name: str, rows: int, is_refused: bool) -> None:
    write(tmp_path / "1.json", numbered(0, 3))
    write(tmp_path / "2.json", numbered(3, 5))
    before = RowFiles(tmp_path)
    stored = before.offsets(before.count)
    assert stored is not None
    write(tmp_path / name, numbered(0, rows))
    after = RowFiles(tmp_path)

    if is_refused:
        with pytest.raises(InvalidError, match="have come, changed or gone"):
            after.check_offsets(before.count, stored)
    else:
        after.check_offsets(before.count, stored)
        assert after.count > before.count


def test_positions_of_other_sources_and_counts_are_ignored(tmp_path: Path) -> None:
    """A repair may have moved the position back."""
    source = RowFiles(write(tmp_path / "1.json", numbered(0, 3)))
    elsewhere = json.dumps({"rows": 2, "file": "other.json", "row": 2, "files_before": 0})
    source.check_offsets(2, "v1\n{}\n")
    source.check_offsets(2, "[]")
    source.check_offsets(1, elsewhere)

    with pytest.raises(InvalidError):
        source.check_offsets(2, elsewhere)


def test_rows_appended_during_run_are_left_for_next_run(tmp_path: Path) -> None:
    """Fewer rows than were counted are an error."""
    path = write(tmp_path / "1.json", numbered(0, 3))
    source = RowFiles(path)
    assert source.count == 3
    write(path, numbered(0, 5))
    assert read(source) == numbered(0, 3)

    write(path, numbered(0, 2))
    with pytest.raises(DataError, match="lost rows"):
        read(source)


def test_files_without_rows_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "0.csv").touch()
    (tmp_path / "1.csv").write_text("n\n", encoding="utf-8")
    write(tmp_path / "2.csv", [{"n": 1}])

    assert read(RowFiles(tmp_path)) == [{"n": 1}]
    assert RowFiles(tmp_path / "0.csv").count == 0
    assert RowFiles(tmp_path / "0.csv").offsets(0) is None


def test_unreadable_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "table" / "_delta_log").mkdir(parents=True)
    write(tmp_path / "mixed" / "1.json", [{}])
    write(tmp_path / "mixed" / "2.csv", [{"n": 1}])
    (tmp_path / "rows.txt").touch()
    (tmp_path / "array.json").write_text('[{"n": 1}]', encoding="utf-8")
    (tmp_path / "text.parquet").write_text("no parquet", encoding="utf-8")
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n3\n", encoding="utf-8")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n", encoding="utf-8")
    reasons = {
        "none.json": "no file and no folder",
        "empty": "no files",
        "table": "a Delta table",
        "mixed": "several formats",
        "rows.txt": "told by its name",
        "array.json": "an object on each line",
        "text.parquet": "not of its format",
        "ragged.csv": "not of its format",
        "twice.csv": "two columns of one name",
    }
    for name, reason in reasons.items():
        with pytest.raises(InvalidError, match=reason):
            RowFiles(tmp_path / name).count  # noqa: B018 - it is read for its error
    gone = RowFiles(write(tmp_path / "gone.json", numbered(0, 1)))
    assert gone.count == 1
    (tmp_path / "gone.json").unlink()
    with pytest.raises(UnavailableError, match="cannot be read"):
        read(gone)
