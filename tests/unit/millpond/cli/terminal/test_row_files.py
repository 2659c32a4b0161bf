"""Rows of files: order, types, positions and refusals."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from millpond.cli.terminal.row_files import RowFiles, TextForm
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.inputs.extraction import Rows, row_count
from millpond.executor.inputs.payload import UndecodedRow
from millpond.executor.local.bounded import InputRest
from millpond.executor.local.runner import LocalRunner
from millpond.executor.time.watermark_policies import IngressTime
from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


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
    return [row for _, rows in source.read_pieces(start, records_max) for row in plain(rows)]


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


def test_digits_of_whole_numbers_are_kept(tmp_path: Path) -> None:
    """Of more than 64 bits a CSV column is text, and a JSON number is of any size."""
    numbers = [2**63 - 1 - 10**18, -(2**62), 12345678901234567890, 10**40]
    for name, count in (("narrow", 2), ("wide", 4)):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["n", *map(str, numbers[:count])]), encoding="utf-8")
        assert [row["n"] for row in read(RowFiles(path))] == [
            *map(int if count == 2 else str, numbers[:count])
        ]
    path = tmp_path / "wide.json"
    path.write_text("\n".join(f'{{"n": {number}, "x": 1.5}}' for number in numbers), encoding="utf-8")

    assert [row["n"] for row in read(RowFiles(path))] == numbers


@pytest.mark.parametrize(
    "line",
    [
        '{"n": 12345678901234567890, "x": NaN}',
        '{"n": 12345678901234567890, "x": 1e400}',
        '{"n": 1, "x": 1e400}',
        '{"n": 1234567890123456789' + "[" * 99_999,
    ],
)
def test_line_with_long_number_must_be_json_too(tmp_path: Path, line: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(line, encoding="utf-8")

    assert read(RowFiles(path)) == [line]


@pytest.mark.parametrize(
    ("encoding", "mark"), [("utf-8", b"\xef\xbb\xbf"), ("latin-1", b""), ("utf-16", b""), ("cp1252", b"")]
)
@pytest.mark.parametrize("suffix", ["csv", "json", "json.gz"])
def test_encoding_of_text_files_can_be_said(tmp_path: Path, encoding: str, mark: bytes, suffix: str) -> None:
    """A byte order mark is no part of the first row; the other line ends of Unicode are none of JSON."""
    word = "Ærø\u0085" if encoding in ("utf-8", "utf-16", "latin-1") else "Ærø €"
    rows = [{"word": word}, {"word": "ö"}]
    text = (
        f"word\n{word}\nö\n"
        if suffix == "csv"
        else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    )
    content = mark + text.encode(encoding)
    path = tmp_path / f"words.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)

    assert read(RowFiles(path, form=TextForm(encoding=encoding))) == rows


@pytest.mark.parametrize(("delimiter", "sign"), [(";", ";"), ("tab", "\t"), ("\\t", "\t"), ("|", "|")])
def test_delimiter_of_csv_can_be_said(tmp_path: Path, delimiter: str, sign: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"a{sign}b\n1{sign}x,y\n", encoding="utf-8")

    assert read(RowFiles(path, form=TextForm(delimiter))) == [{"a": 1, "b": "x,y"}]


@pytest.mark.parametrize(
    "form", [{"delimiter": ""}, {"delimiter": "ab"}, {"delimiter": '"'}, {"encoding": "latin-99"}]
)
def test_impossible_form_is_refused(form: dict[str, str]) -> None:
    with pytest.raises(InvalidError, match=r"one character of ASCII|no such encoding"):
        TextForm(**form)


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


def test_truth_values_are_read_as_pandas_writes_them_but_keys_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("k,a,b,c\nTrue,True,TRUE,True\nFalse,False,false,yes\n", encoding="utf-8")

    assert read(RowFiles(path, text_columns={"k"})) == [
        {"k": "True", "a": True, "b": True, "c": "True"},
        {"k": "False", "a": False, "b": False, "c": "yes"},
    ]


def column_of(cells: list[str]) -> str:
    return "\n".join(["k,v", *(f"k,{cell}" for cell in cells), ""])


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["9", "1.5", "n/a"], "is text, although most cells are numbers: line 4 of {} has `n/a`"),
        (["9", "10", "n/a"], "is text, although most cells are whole numbers: line 4 of {} has `n/a`"),
        (["9", '"1,5"', "10"], "is text, although most cells are whole numbers: line 3 of {} has `1,5`"),
        (
            ["9", '"x\ny"', "", "10", "8"],
            "is text, although most cells are whole numbers: line 4 of {} has `x\\ny`",
        ),
        (["1", '""', "2"], "is text, although most cells are whole numbers: line 3 of {} has ``"),
        (["True", "False", "?"], "is text, although most cells are truth values: line 4 of {} has `?`"),
        (["12345678901234567890", "5", "7"], "is text, although most cells are whole numbers: line 2 of {}"),
        (["0.5", "2", "12345678901234567.25"], "is text, although most cells are numbers: line 4 of {}"),
        (["0.5", "9007199254740993"], "loses digits, because it has fractions too: line 3 of {}"),
        (["-9007199254740993", "0.5"], "loses digits, because it has fractions too: line 2 of {}"),
    ],
)
def test_cell_that_decides_about_a_csv_column_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: list[str], told: str
) -> None:
    """Otherwise Max, Min and TopN went by letters without a word."""
    path = tmp_path / "rows.csv"
    path.write_text(column_of(cells), encoding="utf-8")
    source = RowFiles(path, text_columns={"k"})

    assert source.count == len(cells)
    assert len(read(source)) == len(cells)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"column v {told.format(path)}")
    assert "function for --inputs" in line


@pytest.mark.parametrize(
    "cells",
    [
        ["1", "2.5", "3"],
        ["1067", "01099", "1097"],
        ["2026-01-01T00:00:00Z", "7"],
        ["A1", "7"],
        ["", ""],
        ["9007199254740993", "5"],
        ["9007199254740992", "0.5"],
        ["0.12345678901234567890", "1"],
        ["1234567890123456.0", "1.2345678901234568e+16"],
    ],
)
def test_csv_column_without_surprise_is_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: list[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(column_of(cells), encoding="utf-8")

    assert len(read(RowFiles(path))) == len(cells)
    assert capsys.readouterr().err == ""


def test_odd_cell_behind_many_numbers_is_told_with_its_line_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is read in several batches; a key's column may have anything."""
    (tmp_path / "1.csv").write_text(column_of(["1"]), encoding="utf-8")
    with gzip.open(tmp_path / "2.csv.gz", "wt", encoding="utf-8") as file:
        file.write("v,k\n" + "123456789,9\n" * 200_000 + "n/a,x\n")

    assert RowFiles(tmp_path, text_columns={"k"}).count == 200_002
    [line] = capsys.readouterr().err.splitlines()
    place = f"line 200,002 of {tmp_path / '2.csv.gz'} has `n/a`"
    assert line.startswith(f"column v was whole numbers so far, and is text because of one cell: {place}")


def test_empty_csv_cell_is_null(tmp_path: Path) -> None:
    """A quoted empty cell is empty text."""
    path = tmp_path / "rows.csv"
    path.write_text('a,b,c\n,"",1\n"x\ny",z,\n', encoding="utf-8")

    assert read(RowFiles(path)) == [{"a": None, "b": "", "c": 1}, {"a": "x\ny", "b": "z", "c": None}]


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_quote_that_is_not_closed_is_refused_with_its_line(tmp_path: Path, suffix: str, end: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    opened = gzip.open if suffix.endswith("gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write('k,n,note\na,1,"x\ny"\nb,2,5" pipe\nc,3,"big\nd,4,plain\ne,5,""' + end)

    with pytest.raises(InvalidError, match="a quote is not closed") as refused:
        _ = RowFiles(path).count
    assert refused.value.details["line"] == 5


@pytest.mark.parametrize(
    "last", ['"x"', '"x\ny"', '"x""', '"\n"', '""', '""""', '5" pipe', '"a""\n"', '"a,b"', "x"]
)
@pytest.mark.parametrize("end", ["\n", ""])
def test_closed_quotes_are_read(tmp_path: Path, last: str, end: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"k,note\na,{last}{end}", encoding="utf-8")

    if last == '"x""':
        with pytest.raises(InvalidError, match="a quote is not closed"):
            _ = RowFiles(path).count
    else:
        assert RowFiles(path).count == 1


def test_files_with_different_columns_stay_in_separate_pieces(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", [{"n": 1}])
    write(tmp_path / "2.parquet", [{"n": 2, "new": "x"}])

    assert [(count, plain(rows)) for count, rows in RowFiles(tmp_path).read_pieces(0, 10)] == [
        (1, [{"n": 1}]),
        (1, [{"n": 2, "new": "x"}]),
    ]


def test_position_names_last_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "1.json", numbered(0, 3))
    write(tmp_path / "2.json", numbered(3, 5))
    source = RowFiles(tmp_path)

    assert source.place(0) == {}
    named = [
        {name: source.place(count)[name] for name in ("file", "row", "files_before")} for count in (3, 4)
    ]
    assert named == [
        {"file": "1.json", "row": 3, "files_before": 0},
        {"file": "2.json", "row": 1, "files_before": 1},
    ]


class Nights:
    """A store in memory whose pipeline is run on a folder, night after night."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.read = list[str]()

    def run(self) -> int:
        """Return the number of new records."""
        store = Store.in_memory(
            objects=self.objects, registry=self.registry, clock=ManualClock(), rng=SeededRng(1)
        )
        pipeline = Pipeline("nights")
        pipeline.inject("rows", key="word", at=IngressTime()).apply(Quiet(), name="quiet")
        source = RowFiles(self.folder)
        reading = source._format.read

        def noted(path: Path, start: int, records_max: int) -> Any:
            self.read.append(path.name)
            return reading(path, start, records_max)

        counting = source._format.counts

        def counted(paths: Any) -> Any:
            self.read += [path.name for path in paths]
            return counting(paths)

        self.read.clear()
        with patch.object(source._format, "read", noted), patch.object(source._format, "counts", counted):
            runner = LocalRunner(store, clock=ManualClock(), rng=SeededRng(1), progress=False)
            return runner.run(pipeline, {"rows": source}, finish=False).run.injected


class Quiet(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        pass


@pytest.mark.parametrize("suffix", ["parquet", "json", "json.gz", "csv"])
@pytest.mark.parametrize(
    ("name", "start", "stop", "new"),
    [
        ("3", 5, 9, 4),
        ("2", 13, 19, 4),
        ("0", 0, 1, None),
        ("1", 0, 9, None),
        ("1", 7, 10, None),
        ("1b", 0, 3, None),
        ("2", 18, 20, None),
        ("2", 10, 19, None),
        ("2", 13, 14, None),
    ],
)
def test_folder_may_grow_only_at_its_end(
    tmp_path: Path, suffix: str, name: str, start: int, stop: int, new: int | None
) -> None:
    """Also a file of the same name, number of rows or size is another one, if its rows are others."""
    write(tmp_path / f"1.{suffix}", numbered(0, 3))
    write(tmp_path / f"2.{suffix}", numbered(13, 15))
    nights = Nights(tmp_path)
    assert nights.run() == 5
    write(tmp_path / f"{name}.{suffix}", numbered(start, stop))

    if new is None:
        with pytest.raises(InvalidError, match="new ones behind them"):
            nights.run()
    else:
        assert nights.run() == new
        assert nights.run() == 0


@pytest.mark.parametrize("suffix", ["parquet", "json", "csv"])
def test_finished_files_are_not_read_again(tmp_path: Path, suffix: str) -> None:
    nights = Nights(tmp_path)
    for night in range(4):
        write(tmp_path / f"{night}.{suffix}", numbered(night * 5, night * 5 + 5))
        assert nights.run() == 5
        assert {*nights.read} <= {f"{night - 1}.{suffix}", f"{night}.{suffix}"}
    assert nights.run() == 0


def test_copied_folder_is_known_by_its_rows(tmp_path: Path) -> None:
    """Other times of change are no other rows, so all of them are read once more."""
    nights = Nights(tmp_path / "there")
    for name in ("1", "2"):
        write(nights.folder / f"{name}.json", numbered(0, 3))
    assert nights.run() == 6
    shutil.copytree(nights.folder, tmp_path / "here", copy_function=shutil.copyfile)
    nights.folder = tmp_path / "here"
    for path in nights.folder.iterdir():
        os.utime(path, (1, 1))
    write(nights.folder / "3.json", numbered(0, 2))

    assert nights.run() == 2


def test_position_of_earlier_version_is_known_by_its_files(tmp_path: Path) -> None:
    write(tmp_path / "1.json", numbered(0, 3))
    nights = Nights(tmp_path)
    earlier = {"file": "1.json", "row": 3, "files_before": 0}
    with patch.object(InputRest, "_place", lambda rest: json.dumps({"rows": rest.consumed} | earlier)):
        assert nights.run() == 3
    write(tmp_path / "0.json", numbered(0, 9))
    with pytest.raises(InvalidError, match=r"consumed_to=`row 3 of 1.json, after 0 files`"):
        nights.run()
    (tmp_path / "0.json").unlink()
    write(tmp_path / "2.json", numbered(0, 9))

    assert nights.run() == 9


@pytest.mark.parametrize(
    ("first", "second", "values", "told"),
    [
        (
            ["1", "2"],
            ["3", "3.5"],
            [3.0, 3.5],
            "was whole numbers in earlier files, and has fractions from now on: line 3",
        ),
        (
            ["1", "2"],
            ["x"],
            ["x"],
            "was whole numbers in earlier files, and is text because of one cell: line 2",
        ),
        (["1.5"], ["3"], [3.0], ""),
        (["1.5"], ["9007199254740993"], [2.0**53], "loses digits, because it has fractions too: line 2"),
        (["1", "x"], ["3"], ["3"], "is text, because earlier files have text in it: line 2"),
        (["x"], ["", "True"], [None, "True"], "is text, because earlier files have text in it: line 3"),
        (["x"], ["01", "3"], ["01", "3"], ""),
        (
            ["true"],
            ["false", "1"],
            ["false", "1"],
            "was truth values in earlier files, and is text because of",
        ),
        (["", ""], ["true"], [True], ""),
    ],
)
def test_csv_column_keeps_type_of_files_that_are_left_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: list[str],
    second: list[str],
    values: list[Any],
    told: str,
) -> None:
    """Where it cannot, the cell that changes it is told."""
    for name, cells in (("1.csv", first), ("2.csv", second)):
        (tmp_path / name).write_text(column_of(cells), encoding="utf-8")
    before = RowFiles(tmp_path)
    before._paths.pop()
    assert before.count == len(first)
    source = RowFiles(tmp_path)
    capsys.readouterr()

    assert source.resume(len(first), {"rows": len(first), **before.place(len(first))}) == len(first)
    found = [row["v"] for row in read(source, len(first))]
    assert found == values
    assert [*map(type, found)] == [*map(type, values)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"column v {told}") for line in lines] == ([True] if told else [])


def test_csv_column_that_some_files_lack_keeps_its_type(tmp_path: Path) -> None:
    for name, text in {"1.csv": "v\n1.5\n", "2.csv": "w\n1\n", "3.csv": "v\n3\n"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    place: dict[str, Any] = {}
    for night in (1, 2):
        source = RowFiles(tmp_path)
        del source._paths[night:]
        source.resume(night - 1, {"rows": night - 1, **place})
        assert source.count == night
        place = dict(source.place(night))
    last = RowFiles(tmp_path)
    last.resume(2, {"rows": 2, **place})

    assert repr(read(last, 2)) == "[{'v': 3.0}]"


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"file": "x"},
        {"listed_before": -1, "row": 9, "stamp_before": ""},
        {"listed_before": 99},
        {"row": "3"},
    ],
)
def test_strange_position_knows_nothing(tmp_path: Path, place: dict[str, Any]) -> None:
    source = RowFiles(write(tmp_path / "1.json", numbered(0, 3)))

    assert source.resume(2, place) == 0
    assert read(source, 2) == numbered(2, 3)


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
    assert RowFiles(tmp_path / "0.csv").place(0) == {}


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


@pytest.mark.parametrize(
    "target", ["../outside", "../outside/1.json", "..", "/etc/hostname", "../input.json"]
)
def test_link_out_of_a_folder_is_refused(tmp_path: Path, target: str) -> None:
    """Whoever filled the folder may not be allowed to read what the link leads to."""
    write(tmp_path / "outside" / "1.json", numbered(0, 1))
    write(tmp_path / "input.json", numbered(0, 1))
    write(tmp_path / "input" / "0.json", numbered(0, 1))
    (tmp_path / "input" / "1.json").symlink_to(target)

    with pytest.raises(InvalidError, match="leads out of it"):
        RowFiles(tmp_path / "input")


def test_named_link_and_links_within_a_folder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "input" / ".now" / "1.json", numbered(0, 2))
    (tmp_path / "input" / "1.json").symlink_to(".now/1.json")
    (tmp_path / "input" / "2.json").symlink_to("2.json")
    (tmp_path / "named").symlink_to("input")
    (tmp_path / "named.json").symlink_to("input/.now/1.json")

    assert read(RowFiles(tmp_path / "named")) == numbered(0, 2)
    assert read(RowFiles(tmp_path / "named.json")) == numbered(0, 2)


def test_parquet_with_periods_is_refused(tmp_path: Path) -> None:
    """Code would get their numbers."""
    path = tmp_path / "months.parquet"
    pd.DataFrame({"month": pd.period_range("2026-01", periods=2, freq="M")}).to_parquet(path)

    with pytest.raises(InvalidError, match="periods or intervals"):
        _ = RowFiles(path).count


def test_parquet_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    column = pa.array(["x"])
    parquet.write_table(pa.Table.from_arrays([column, column], ["a", "a"]), tmp_path / "1.parquet")

    with pytest.raises(InvalidError, match="two columns of one name"):
        read(RowFiles(tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("2.csv", b"n,s\n1\n"),
        ("2.csv", "n,s\n1,ä\n".encode("latin-1")),
        ("2.parquet", b"no parquet"),
        ("2.json.gz", b"no gzip"),
    ],
)
def test_damaged_file_of_a_folder_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    for good in ("1", "3"):
        write(tmp_path / name.replace("2", good), [{"n": 1, "s": "x"}])
    (tmp_path / name).write_bytes(content)

    with pytest.raises(InvalidError, match="not of its format") as refused:
        RowFiles(tmp_path).count  # noqa: B018 - it is read for its error
    assert f"file=`{tmp_path / name}`" in str(refused.value)
    assert ("--encoding" in str(refused.value)) == (name != "2.parquet")


def test_damaged_compression_is_no_file_of_its_format(tmp_path: Path) -> None:
    path = write(tmp_path / "1.json.gz", numbered(0, 1_000))
    data = bytearray(path.read_bytes())
    data[200:210] = b"\xff" * 10
    path.write_bytes(data)

    with pytest.raises(InvalidError, match="not of its format"):
        read(RowFiles(tmp_path))


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


@pytest.mark.parametrize("size", [2**31 - 1, 2**40, -20])
def test_page_of_impossible_size_is_refused(tmp_path: Path, size: int) -> None:
    """Arrow would make room for it before it finds that the file is shorter."""
    path = write(tmp_path / "1.parquet", numbered(0, 5))
    data = path.read_bytes()
    # The header of the first page: its type, its size in memory, its size in the file.
    start = 4 + len(b"\x15\x00")
    assert data[start] == 0x15
    first = next(at for at in range(start + 1, start + 6) if data[at] < 0x80) + 1
    last = next(at for at in range(first + 1, first + 6) if data[at] < 0x80) + 1
    for begin, end in ((start + 1, first), (first + 1, last)):
        path.write_bytes(data[:begin] + _varint(2 * abs(size) - (size < 0)) + data[end:])
        with pytest.raises(InvalidError, match="larger than 256 MiB, or than its column"):
            read(RowFiles(tmp_path))


def test_json_comes_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    """Empty lists take twenty times the memory of their text."""
    row = {"n": [[]] * 1_000_000}
    write(tmp_path / "1.jsonl", [row] * 20)

    assert max(row_count(rows) for _, rows in RowFiles(tmp_path).pieces(0, 10_000)) < 10


@pytest.mark.parametrize("limit", [1_000, 16 << 20])
def test_line_above_every_limit_is_not_parsed(tmp_path: Path, limit: int) -> None:
    (tmp_path / "1.json").write_text('{"n": "' + "x" * (17 << 20) + '"}\n{"n": 1}\n')

    large, small = read(RowFiles(tmp_path, record_bytes_max=limit))

    assert isinstance(large, UndecodedRow)
    assert f"larger than the {limit:,} bytes" in large.reason
    assert len(large.row) == 1_000
    assert small == {"n": 1}
    assert [len(str(row)) for row in read(RowFiles(tmp_path, record_bytes_max=None))] == [
        (17 << 20) + 9,
        len("{'n': 1}"),
    ]
