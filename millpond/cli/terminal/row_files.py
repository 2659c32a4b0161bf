"""Rows out of Parquet, JSON and CSV files, of which only a piece is in memory, and the same files as streams of Spark.

The files of a folder are read in the order of their names, with numbers as numbers, so rows keep their positions
while files are added behind. Each commit records by file and row where the consumed rows end, with a digest of them and
of the files' names, sizes and times. Files that fit are not opened again; else their rows tell whether they are others.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import math
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from io import TextIOWrapper
from itertools import islice, takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, AnyStr, Final, TypeAlias, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from millpond.cli.terminal.output import note
from millpond.executor.inputs.extraction import Rows, refuse_lost_types, row_count, rows_between
from millpond.executor.inputs.payload import UndecodedRow
from millpond.executor.inputs.record_size import RECORD_BYTES_MAX, error_of_size
from millpond.executor.local.rows import RowSource
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.loading.parquet_files import PIECE_BYTES_MAX, read_parquet
from millpond.statestore.log.action import JsonValue
from millpond.statestore.objects.hadoop import literal_pattern
from millpond.statestore.objects.obstore import file_here
from millpond.statestore.rows.key_text import name_of_kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_Part: TypeAlias = tuple[Rows, int]
"""Rows, and their size in memory in bytes."""

_SUFFIXES: Final = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
}
_COMPRESSED: Final = ".gz"
# Python's objects take several times the memory of their JSON text.
_OBJECTS_PER_TEXT: Final = 4
_LINE_SHOWN: Final = 1_000
_NUMBER: Final = re.compile(r"(\d+)")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CHUNK: Final = 1 << 20
_BLANK_LINES: Final = re.compile(rb"\n\s*\n")
# The first type whose pattern matches a whole column of text. With leading zeros it is no number, but a code; whole
# numbers of more than 64 bits stay text, because a float would lose their digits, as it would those of more than 16
# digits before a point.
_WHOLE: Final = "0|[1-9][0-9]{0,17}|[1-8][0-9]{18}"
_PATTERNS: Final = {
    pa.int64(): rf"^-?(?:{_WHOLE})$",
    pa.float64(): rf"^-?(?:{_WHOLE}|(?:0|[1-9][0-9]{{0,15}})(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+))$",
    pa.bool_(): r"^(?:true|True|TRUE|false|False|FALSE)$",
}
_KIND_NAMES: Final = {"int64": "whole numbers", "double": "numbers", "bool": "truth values"}
_CODE: Final = "^-?0[0-9]+$"
_TO_CLOSING_QUOTE: Final = re.compile(r'(?:[^"]|"")*+"')
_EXACT_DIGITS: Final = 15
"""The digits of the longest whole numbers of which a float keeps all."""

_LOSES_DIGITS: Final = "loses digits, because it has fractions too"
_CELL_SHOWN: Final = 100
_CELLS_OF_A_FILE: Final = 1_000
_WIDENED: Final = (str(pa.int64()), str(pa.float64()))
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")


@dataclass(frozen=True, slots=True)
class TextForm:
    """How text files are written.

    Args:
        delimiter: separates the fields of CSV.
        encoding: a codec of Python, of CSV and JSON.

    Raises:
        InvalidError: the delimiter is not one character, or there is no such encoding.
    """

    delimiter: str = ","
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        object.__setattr__(self, "delimiter", {"tab": "\t", "\\t": "\t"}.get(self.delimiter, self.delimiter))
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise InvalidError(
                "a delimiter is one character of ASCII, and neither a quote nor a line's end",
                given=self.delimiter,
            )
        try:
            object.__setattr__(self, "encoding", codecs.lookup(self.encoding).name)
        except LookupError as cause:
            raise InvalidError("there is no such encoding", encoding=self.encoding) from cause

    @property
    def is_utf8(self) -> bool:
        return self.encoding in ("utf-8", "utf-8-sig", "ascii")

    def spark_options(self, name: str) -> dict[str, str]:
        """Return the options of Spark's reader of a format."""
        given = {} if self.is_utf8 else {"encoding": self.encoding}
        if name != "csv":
            return given if name == "json" else {}
        return given | {
            "header": "true",
            "multiLine": "true",
            # Otherwise Spark takes columns by their place, and a later file with another order has other values.
            "enforceSchema": "false",
            "sep": self.delimiter,
            # Otherwise a backslash escapes a quote, and a doubled quote stays doubled.
            "escape": '"',
            # Otherwise a quoted empty cell is null, too; no text has this character.
            "nullValue": "\uffff",
        }


_PLAIN_FORM: Final = TextForm()


class FileFormat(ABC):
    """One format of files; ``name`` is also Spark's name of the format."""

    name: str

    @abstractmethod
    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        """Count the rows of each file."""

    @abstractmethod
    def read(self, path: Path, start: int, records_max: int) -> Iterator[_Part]:
        """Read the rows of a file after the first ``start``, in batches of about ``records_max``."""

    def typed(self, rows: Rows) -> Rows:
        """Return rows with the types that all files agree on."""
        return rows

    def place(self) -> Mapping[str, JsonValue]:
        """Return facts for a later run about the files that it leaves out."""
        return {}

    def resume(self, place: Mapping[str, JsonValue]) -> None:
        """Take the facts of an earlier run, before anything is read."""
        del place


def format_of(
    path: Path,
    text_columns: Collection[str] = (),
    form: TextForm = _PLAIN_FORM,
    record_bytes_max: int | None = None,
) -> FileFormat:
    """Return the format of a file, by its suffix."""
    suffixes = path.suffixes[:-1] if path.suffix == _COMPRESSED else path.suffixes
    match _SUFFIXES.get(suffixes[-1] if suffixes else ""):
        case "parquet":
            return Parquet()
        case "json":
            return JsonLines(form, record_bytes_max)
        case "csv":
            return Csv(text_columns, form)
    raise InvalidError(
        "the format of a file is told by its name",
        file=path,
        known=f"{', '.join(_SUFFIXES)}, also with {_COMPRESSED}",
    )


class Parquet(FileFormat):
    name = "parquet"

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        from pyarrow import parquet

        for path in paths:
            with _reading(path):
                metadata = parquet.read_metadata(path)
            refuse_lost_types(metadata.schema.to_arrow_schema())
            yield int(metadata.num_rows)

    def read(self, path: Path, start: int, records_max: int) -> Iterator[_Part]:
        for rows in read_parquet(path, start, records_max):
            yield rows, rows.nbytes


class JsonLines(FileFormat):
    """JSON, an object per line; a malformed line is passed on as text, and becomes a dead letter.

    So does a line that is longer than any record of the stream, without being parsed.
    """

    name = "json"

    def __init__(self, form: TextForm, record_bytes_max: int | None) -> None:
        self._form = form
        self._record_bytes_max = record_bytes_max
        # A record may be smaller than its line: JSON has escapes and blanks.
        self._line_bytes_max = max(record_bytes_max or PIECE_BYTES_MAX, RECORD_BYTES_MAX)

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        for path in paths:
            with _reading(path):
                lines = self._lines(path)
                first, others = next(lines, None), sum(1 for _ in lines)
            if first is not None and first.lstrip().startswith(b"["):
                raise InvalidError(
                    "JSON files have an object on each line, and no array around them", file=path
                )
            yield (first is not None) + others

    def read(self, path: Path, start: int, records_max: int) -> Iterator[_Part]:
        waiting, size_bytes = list[Any](), 0
        for line in islice(self._lines(path), start, None):
            waiting.append(self._parsed(line))
            size_bytes += _OBJECTS_PER_TEXT * len(line)
            if len(waiting) == records_max or size_bytes >= PIECE_BYTES_MAX:
                yield waiting, size_bytes
                waiting, size_bytes = [], 0
        if waiting:
            yield waiting, size_bytes

    def _parsed(self, line: bytes) -> Any:
        limit = self._record_bytes_max
        if limit is not None and len(line) > self._line_bytes_max:
            return UndecodedRow(line[:_LINE_SHOWN].decode(errors="replace"), error_of_size(limit))
        return _object(line)

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Yield the lines of a file that are not blank, in UTF-8; none may be larger than a piece of the input."""
        mark = _BYTE_ORDER_MARK
        with gzip.open(path) if path.suffix == _COMPRESSED else path.open("rb") as file:
            for chunk in _chunks(cast(IO[bytes], file), self._form):
                # At once, because a small compressed file may hold any number of blank lines.
                lines = _BLANK_LINES.sub(b"\n", chunk.removeprefix(mark)).split(b"\n")
                mark = b""
                if len(lines[-1]) > PIECE_BYTES_MAX:
                    raise InvalidError(
                        f"a line of the file is longer than {PIECE_BYTES_MAX >> 20} MiB", file=path
                    )
                yield from (line for line in lines if line and not line.isspace())


def _chunks(file: IO[bytes], form: TextForm) -> Iterator[bytes]:
    """Yield a file in UTF-8 by some whole lines at a time; the last line of a chunk may be cut where it is too long."""
    if form.is_utf8:
        yield from iter(partial(_chunk, file), b"")
        return
    # Only at line feeds, because JSON may have the other line ends of Unicode in its texts.
    with TextIOWrapper(file, form.encoding, "replace", newline="\n") as text:
        yield from (chunk.encode() for chunk in iter(partial(_chunk, text), ""))


def _chunk(file: IO[AnyStr]) -> AnyStr:
    begin = file.read(_CHUNK)
    return begin if begin[-1:] in ("\n", b"\n") else begin + file.readline(PIECE_BYTES_MAX + 1)


def _object(line: bytes) -> Any:
    try:
        # Beyond 64 bits orjson reads a whole number as a float, which loses digits.
        return (
            json.loads(line, parse_constant=int, parse_float=_finite)
            if _LONG_NUMBER.search(line)
            else orjson.loads(line)
        )
    except (ValueError, RecursionError):
        return line.decode(errors="replace").rstrip("\r\n")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


@dataclass(frozen=True, slots=True)
class _OddCell:
    """A cell with an effect on its whole column that nobody may expect; ``row`` counts in its file."""

    column: str
    effect: str
    path: Path
    row: int
    text: str


class _Column:
    """The types that a column of text may have, after the type in earlier files and the cells so far."""

    def __init__(self, known: str | None, *, is_text: bool) -> None:
        self.kinds: list[pa.DataType] = [
            kind
            for kind in _PATTERNS
            if not is_text and (known in (None, str(kind)) or (known, str(kind)) == _WIDENED)
        ]
        self._known = known
        self._was_text = not self.kinds and not is_text

    def narrow(self, cells: pa.StringArray, *, is_start: bool) -> tuple[str, int]:
        """Leave the types of these cells; return an effect on the whole column, and the place of its cell or -1."""
        if self._was_text and is_start:
            first = cells.slice(0, _CELLS_OF_A_FILE)
            return "is text, because earlier files have text in it", _first_unlike_text(first)
        before, misfits = self.kinds, dict[pa.DataType, pa.BooleanArray]()
        for kind in before:
            # Whole numbers are numbers, too.
            if kind != pa.float64() or pa.int64() in misfits or pa.int64() not in before:
                fits = pc.match_substring_regex(cells, _PATTERNS[kind])
                # Without any text `all` is null, and every type fits.
                if pc.all(fits).as_py() is False:
                    misfits[kind] = fits
        self.kinds = [kind for kind in before if kind not in misfits]
        return self._effect(cells, before, misfits) if misfits else ("", -1)

    def _effect(
        self,
        cells: pa.StringArray,
        before: Sequence[pa.DataType],
        misfits: Mapping[pa.DataType, pa.BooleanArray],
    ) -> tuple[str, int]:
        nearest = max(misfits, key=lambda kind: pc.sum(misfits[kind]).as_py())
        place: int = pc.index(misfits[nearest], False).as_py()
        if not self.kinds and len(before) < len(_PATTERNS):
            earlier = "in earlier files" if self._known else "so far"
            return f"was {_KIND_NAMES[str(before[0])]} {earlier}, and is text because of one cell", place
        if not self.kinds and _are_most(misfits[nearest]):
            is_code = pc.match_substring_regex(cells[place], _CODE).as_py()
            return f"is text, although most cells are {_KIND_NAMES[str(nearest)]}", -1 if is_code else place
        if self._known == str(pa.int64()) and pa.int64() in misfits:
            return "was whole numbers in earlier files, and has fractions from now on", place
        return "", -1


def _first_unlike_text(cells: pa.StringArray) -> int:
    """Return the place of a number or truth value if most cells are such and none is a code, else -1."""
    masks = [pc.match_substring_regex(cells, _PATTERNS[kind]) for kind in (pa.float64(), pa.bool_())]
    is_code = pc.match_substring_regex(cells, _CODE)
    found = (
        pc.index(fits, True).as_py() for fits in masks if _are_most(fits) and not pc.any(is_code).as_py()
    )
    return next(found, -1)


def _are_most(fits: pa.BooleanArray) -> bool:
    count: int = pc.sum(fits).as_py() or 0
    filled: int = len(fits) - fits.null_count
    return 2 * count > filled


def _first_inexact(cells: pa.StringArray, kinds: Collection[pa.DataType]) -> int:
    """Return the place of the first whole number of which a float would lose digits, or -1."""
    longest = pc.max(pc.binary_length(cells)).as_py() or 0
    if pa.float64() not in kinds or longest <= _EXACT_DIGITS:
        return -1
    if pa.int64() not in kinds:
        is_whole = pc.match_substring_regex(cells, _PATTERNS[pa.int64()])
        cells = pc.if_else(is_whole, cells, pa.scalar(None, pa.string()))
    numbers = cells.cast(pa.int64())
    back = numbers.cast(pa.float64(), safe=False).cast(pa.int64(), safe=False)
    place: int = pc.index(pc.equal(back, numbers), False).as_py()
    return place


class Csv(FileFormat):
    """CSV with a header; a column is of numbers or truth values if all files agree, and times stay text, as in JSON.

    A remark on standard error names the cell because of which a column of numbers is text, is of another type than in
    earlier files, or loses digits.
    """

    name = "csv"

    def __init__(self, text_columns: Collection[str], form: TextForm = _PLAIN_FORM) -> None:
        self._text_columns = frozenset(text_columns)
        self._types: dict[str, pa.DataType] = {}
        self._columns: dict[str, _Column] = {}
        self._inexact: dict[str, _OddCell] = {}
        self._known: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()
        self._form = form
        self._parse = arrow_csv.ParseOptions(newlines_in_values=True, delimiter=form.delimiter)
        self._reading = arrow_csv.ReadOptions(encoding="utf8" if form.is_utf8 else form.encoding)

    def types(self, paths: Sequence[Path]) -> dict[str, pa.DataType]:
        """Return the columns with their types, or refuse files that Spark would read with other columns."""
        headers = {path: names for path in paths if (names := self._names(path))}
        first: list[str] = next(iter(headers.values()), [])
        for path, names in headers.items():
            if names != first:
                raise InvalidError(
                    "on Spark all CSV files of an input must have the same columns in the same order",
                    file=path,
                    columns=names,
                    first=first,
                )
        # Counting reads the files to their end, which determines the types.
        sum(self.counts(paths))
        return {name: self._types.get(name, pa.string()) for name in first}

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        # Counting also determines the columns' types, which `read` needs.
        odd, found = list[_OddCell](), list[int]()
        for path in paths:
            count, last = 0, None
            with _reading(path):
                for batch in self._batches(path):
                    for name, cells in zip(batch.schema.names, batch.columns, strict=True):
                        odd += self._narrow(name, cells, path, count)
                    count += batch.num_rows
                    last = batch.column(batch.num_columns - 1)[-1].as_py() if batch.num_rows else None
            self._refuse_open_quote(path, last)
            found.append(count)
        self._types = {name: column.kinds[0] for name, column in self._columns.items() if column.kinds}
        odd += [cell for name, cell in self._inexact.items() if self._types.get(name) == pa.float64()]
        self._tell(odd)
        yield from found

    def _narrow(self, name: str, cells: pa.StringArray, path: Path, start: int) -> Iterator[_OddCell]:
        column = self._columns.get(name)
        if column is None:
            is_text = name in self._text_columns
            column = self._columns[name] = _Column(self._known.get(name), is_text=is_text)
        effect, place = column.narrow(cells, is_start=start == 0)
        if place >= 0:
            yield _OddCell(name, effect, path, start + place, cells[place].as_py())
        if name not in self._inexact and (place := _first_inexact(cells, column.kinds)) >= 0:
            cell = _OddCell(name, _LOSES_DIGITS, path, start + place, cells[place].as_py())
            self._inexact[name] = cell

    def _tell(self, odd: Iterable[_OddCell]) -> None:
        news = {
            (cell.column, cell.effect): cell for cell in odd if (cell.column, cell.effect) not in self._told
        }
        self._told |= news.keys()
        rows: dict[Path, set[int]] = {}
        for cell in news.values():
            rows.setdefault(cell.path, set()).add(cell.row)
        lines = {path: self._lines(path, wanted) for path, wanted in rows.items()}
        for cell in news.values():
            line = lines[cell.path].get(cell.row)
            where = f"row {cell.row + 1:,}" if line is None else f"line {line:,}"
            note(
                f"column {cell.column} {cell.effect}: {where} of {cell.path} has `{cell.text[:_CELL_SHOWN]}`. If that is "
                "wrong, rewind the store and mend the cell, or give rows with types by a function for --inputs"
            )

    def _lines(self, path: Path, rows: Collection[int]) -> dict[int, int]:
        """Return the lines on which rows of a file end."""
        with self._text(path) as text:
            reader = csv.reader(text, delimiter=self._form.delimiter)
            ends = (reader.line_num for record in reader if record)
            try:
                # The first is the header.
                return {row: line for row, line in enumerate(islice(ends, max(rows) + 2), -1) if row in rows}
            except csv.Error:
                # A cell is longer than this reader takes.
                return {}

    def _text(self, path: Path) -> IO[str]:
        opened: Any = gzip.open if path.suffix == _COMPRESSED else open
        encoding = "utf-8-sig" if self._form.is_utf8 else self._form.encoding
        return cast(IO[str], opened(path, "rt", encoding=encoding, errors="replace", newline=""))

    def _refuse_open_quote(self, path: Path, last: str | None) -> None:
        """Refuse a file that ends within quotes; ``last`` is its last cell.

        Arrow takes the rest of such a file for one cell.
        """
        if last is None or not self._may_be_open(path, last):
            return
        with self._text(path) as text:
            line = _open_quote(text, self._form.delimiter)
        if line is not None:
            raise InvalidError(
                "a quote is not closed: close it, or double it within a cell", file=path, line=line
            )

    def _may_be_open(self, path: Path, last: str) -> bool:
        if path.suffix == _COMPRESSED or not self._form.is_utf8:
            # Its end is costly to find; without either, the quote has taken nothing but its own cell.
            return any(sign in last for sign in ("\n", "\r", self._form.delimiter))
        end = b'"' + last.replace('"', '""').encode()
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - len(end), 0))
            return file.read() == end

    def read(self, path: Path, start: int, records_max: int) -> Iterator[_Part]:
        skipped = start
        for batch in self._batches(path):
            passed = min(skipped, batch.num_rows)
            skipped -= passed
            rest = batch.slice(passed)
            for at in range(0, rest.num_rows, records_max):
                rows = pa.Table.from_batches([rest.slice(at, records_max)])
                yield rows, rows.nbytes

    def typed(self, rows: Rows) -> Rows:
        table = cast(pa.Table, rows)
        columns = [
            column.cast(self._types.get(name, pa.string()))
            for name, column in zip(table.column_names, table.columns, strict=True)
        ]
        return pa.Table.from_arrays(columns, names=table.column_names)

    def place(self) -> Mapping[str, JsonValue]:
        # A column without any value so far may still become one of any type.
        types = {
            name: str(column.kinds[0] if column.kinds else pa.string())
            for name, column in self._columns.items()
            if len(column.kinds) < len(_PATTERNS) and name not in self._text_columns
        }
        # A column may be absent from some files, and have its type again in later ones.
        return {"types": dict(sorted((self._known | types).items()))}

    def resume(self, place: Mapping[str, JsonValue]) -> None:
        types = place.get("types")
        self._known = {name: str(kind) for name, kind in types.items()} if isinstance(types, dict) else {}

    def _names(self, path: Path) -> list[str]:
        if path.stat().st_size == 0:
            return []
        with arrow_csv.open_csv(path, self._reading, self._parse) as header:
            names: list[str] = header.schema.names
        if len(set(names)) < len(names):
            raise InvalidError("a CSV file has two columns of one name", file=path, columns=", ".join(names))
        return names

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        names = self._names(path)
        if not names:
            return
        convert = arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
        )
        with arrow_csv.open_csv(path, self._reading, self._parse, convert) as batches:
            yield from batches


def _open_quote(lines: Iterable[str], delimiter: str) -> int | None:
    """Return the line of the quote that is open at the end of a CSV file, if one is."""
    opened: int | None = None
    for number, line in enumerate(lines, 1):
        at = 0
        while at >= 0:
            if opened is None and line.startswith('"', at):
                opened, at = number, at + 1
            if opened is not None:
                closed = _TO_CLOSING_QUOTE.match(line, at)
                if closed is None:
                    break
                opened, at = None, closed.end()
            at = line.find(delimiter, at) + 1 or -1
    return opened


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: Path
    listed: int
    start: int
    stop: int


class RowFiles(RowSource):
    """The rows of a file, or of the files in a folder and in folders below it; see `files_in`.

    ``text_columns`` stay text in CSV files, such as keys and ids. ``record_bytes_max`` is the limit of the stream. Files
    that were consumed are left out if they have their names, sizes and times of change. The first file in order that has
    changed after ``settled_until_us`` waits for a later run, and so do all ``waiting`` files from there on.
    """

    def __init__(
        self,
        path: Path,
        text_columns: Collection[str] = (),
        form: TextForm = _PLAIN_FORM,
        record_bytes_max: int | None = RECORD_BYTES_MAX,
        settled_until_us: int | None = None,
    ) -> None:
        self.path = path
        self._format, paths = files_in(path, text_columns, form, record_bytes_max)
        self._paths = [*takewhile(partial(_has_settled, settled_until_us), paths)]
        self.waiting: int = len(paths) - len(self._paths)
        self._root = path if path.is_dir() else path.parent
        # Before anything is read: a file that changes later is another one in the next run.
        self._stamps = _stamps(self._root, self._paths)
        self._left_out, self._rows_before, self._files_before = 0, 0, 0

    @property
    def count(self) -> int:
        # Counted once: rows appended meanwhile are left for the next run.
        return self._files[-1].stop if self._files else self._rows_before

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """Read the rows after the first ``start``; a piece ends where the columns of the next file differ."""
        files = self._files
        if start < self._rows_before:
            files = [*self._counted(0, self._left_out, 0), *files]
        return _gathered(self._parts(files, start, records_max), records_max)

    def read(self, rows: Rows) -> Rows:
        return self._format.typed(rows)

    def place(self, count: int) -> Mapping[str, JsonValue]:
        """Return the file of the last of ``count`` rows, its number there, and facts about the files before."""
        for number, file in enumerate(self._files, self._files_before):
            if file.start < count <= file.stop:
                return {
                    "file": file.name, "row": count - file.start, "files_before": number,
                    "listed_before": file.listed, "stamp_before": self._stamps[file.listed],
                    "stamp": self._stamps[file.listed + 1], **self._format.place(),
                }  # fmt: skip
        return {}

    def part_ends(self, start: int, stop: int) -> Sequence[int]:
        return [file.stop for file in self._files if start <= file.stop < stop]

    def resume(self, count: int, place: Mapping[str, Any]) -> int:
        listed, row, files = (_number(place, name) for name in ("listed_before", "row", "files_before"))
        if self.waiting and listed >= len(self._paths):
            # A consumed file has not settled again, so this run has nothing to read.
            self._left_out, self._rows_before = len(self._paths), count
            return count
        if listed >= len(self._paths) or row > count or self._stamps[listed] != place.get("stamp_before"):
            return 0
        self._left_out, self._rows_before, self._files_before = listed, count - row, files
        self._format.resume(place)
        return count if self._stamps[listed + 1] == place.get("stamp") else count - row

    @cached_property
    def _files(self) -> list[_File]:
        return self._counted(self._left_out, len(self._paths), self._rows_before)

    def _counted(self, first: int, stop: int, start: int) -> list[_File]:
        paths, found = self._paths[first:stop], list[_File]()
        counts = self._format.counts(paths) if paths else ()
        for listed, (path, count) in enumerate(zip(paths, counts, strict=True), first):
            if count:
                name = path.relative_to(self._root).as_posix()
                found.append(_File(name, path, listed, start, start + count))
                start += count
        return found

    def _parts(self, files: Sequence[_File], start: int, records_max: int) -> Iterator[_Part]:
        for file in files:
            skipped = max(start - file.start, 0)
            left = file.stop - file.start - skipped
            if left <= 0:
                continue
            with _reading(file.path):
                for rows, size_bytes in self._format.read(file.path, skipped, records_max):
                    if left:
                        yield rows_between(rows, 0, left), size_bytes
                        left -= min(left, row_count(rows))
            if left:
                raise DataError("a file has lost rows since it was counted", file=file.path, missing=left)


def files_in(
    path: Path,
    text_columns: Collection[str] = (),
    form: TextForm = _PLAIN_FORM,
    record_bytes_max: int | None = None,
) -> tuple[FileFormat, list[Path]]:
    """Return the format of the files at a path, and the files in order, without hidden ones.

    Refuse a path without files, with files of several formats or an unknown one, or with a link out of it.
    """
    if path.is_file():
        return format_of(path, text_columns, form, record_bytes_max), [path]
    if not path.is_dir():
        raise InvalidError("there is no file and no folder of that name", path=path)
    if (path / "_delta_log").is_dir():
        raise InvalidError(
            "that is a Delta table, whose files are not its rows: read it in a function, and name that with --inputs",
            path=path,
        )
    found = [
        file for file in path.rglob("*") if not any(part[0] in "._" for part in file.relative_to(path).parts)
    ]
    _refuse_links_out(path, found)
    paths = [file for file in found if file.is_file()]
    if not paths:
        raise InvalidError("the folder has no files", path=path)
    formats = {(known := format_of(file, text_columns, form, record_bytes_max)).name: known for file in paths}
    if len(formats) > 1:
        raise InvalidError(
            "the folder has files of several formats", path=path, formats=", ".join(sorted(formats))
        )
    return next(iter(formats.values())), sorted(
        paths, key=lambda file: _order(file.relative_to(path).as_posix())
    )


def _refuse_links_out(folder: Path, found: Iterable[Path]) -> None:
    """Refuse links out of a folder: whoever filled it may not be allowed to read their targets."""
    root = os.path.realpath(folder)
    for file in found:
        if file.is_symlink() and os.path.commonpath((root, os.path.realpath(file))) != root:
            raise InvalidError(
                "a link in the folder leads out of it: copy the rows into the folder, or name their own place",
                path=folder,
                link=file.relative_to(folder),
            )


def _order(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key that takes numbers in names as numbers, so that 10 comes after 9."""
    parts = ((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _NUMBER.split(name) if part)
    return tuple(parts), name


def _number(place: Mapping[str, Any], name: str) -> int:
    number = place.get(name)
    return number if isinstance(number, int) and number >= 0 else 0


def _has_settled(until_us: int | None, path: Path) -> bool:
    return until_us is None or path.stat().st_mtime_ns <= until_us * 1_000


def _stamps(root: Path, paths: Sequence[Path]) -> list[str]:
    """Return, for each number of files, a digest of the names, sizes and times of change of the first so many."""
    digest = blake2b(digest_size=8)
    stamps = [digest.hexdigest()]
    for path in paths:
        status = path.stat()
        name = path.relative_to(root).as_posix()
        digest.update(orjson.dumps([os.fsencode(name).hex(), status.st_size, status.st_mtime_ns]))
        stamps.append(digest.hexdigest())
    return stamps


def _gathered(parts: Iterable[_Part], records_max: int) -> Iterator[tuple[int, Rows]]:
    """Join or cut parts to pieces of ``records_max``; tables of different columns are not joined."""
    waiting, count, size_bytes = list[Rows](), 0, 0
    for part, part_bytes in parts:
        rest, rest_bytes = part, part_bytes
        if waiting and getattr(waiting[0], "schema", None) != getattr(rest, "schema", None):
            yield count, _joined(waiting)
            waiting, count, size_bytes = [], 0, 0
        while (here := row_count(rest)) > 0:
            taken = min(here, records_max - count)
            taken_bytes = rest_bytes * taken // here
            waiting.append(rows_between(rest, 0, taken))
            rest, rest_bytes = rows_between(rest, taken, here), rest_bytes - taken_bytes
            count, size_bytes = count + taken, size_bytes + taken_bytes
            if count == records_max or size_bytes >= PIECE_BYTES_MAX:
                yield count, _joined(waiting)
                waiting, count, size_bytes = [], 0, 0
    if waiting:
        yield count, _joined(waiting)


def _joined(parts: list[Rows]) -> Rows:
    tables = [part for part in parts if isinstance(part, pa.Table)]
    if tables:
        return pa.concat_tables(tables).combine_chunks()
    return [row for part in parts for row in part]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of the formats and of the system into `InvalidError` and `UnavailableError` that name the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        # Arrow and gzip report damage as an `OSError` too, without a number of the system.
        if isinstance(error, EOFError) or getattr(error, "errno", None) is not None:
            raise UnavailableError("a file cannot be read", file=path, reason=error) from error
        ways = (
            "" if path.suffix == ".parquet" else "; --delimiter and --encoding say how text files are written"
        )
        raise InvalidError(
            f"a file is not of its format: mend it, or take it out of the input{ways}",
            file=path,
            reason=str(error).partition("\n")[0],
        ) from error


def stream_of_files(
    spark: SparkSession, path: str, text_columns: Collection[str], form: TextForm = _PLAIN_FORM
) -> DataFrame:
    """Return a stream of the rows of a file or folder on this machine, or at a URL that Spark can read.

    The suffix of a URL determines the format; without one it is Parquet.
    """
    schema: StructType | str = ""
    if "://" in path:
        name = format_of(Path(path)).name if Path(path).suffix else "parquet"
    else:
        here = file_here(path).resolve()
        found, paths = files_in(here, text_columns, form)
        if wrong := next((file for file in paths if ":" in file.name), None):
            raise InvalidError("Spark cannot read a file with a colon in its name: rename it", file=wrong)
        name, path = found.name, literal_pattern(str(here))
        if isinstance(found, Csv):
            # The types of the local runner, because Spark may infer others.
            columns = found.types(paths).items()
            schema = ", ".join(
                f"`{column.replace('`', '``')}` {name_of_kind(kind)}" for column, kind in columns
            )
    options = form.spark_options(name)
    schema = schema or _schema_by_spark(spark, name, path, text_columns, options)
    reader = spark.readStream.schema(schema).options(**options)
    return reader.option("recursiveFileLookup", "true").format(name).load(path)


def _schema_by_spark(
    spark: SparkSession, name: str, path: str, text_columns: Collection[str], options: Mapping[str, str]
) -> StructType:
    from pyspark.errors import AnalysisException
    from pyspark.sql import types

    reader = spark.read.options(**options).option("recursiveFileLookup", "true")
    if name == "csv":
        reader = reader.option("inferSchema", "true")
    try:
        found = reader.format(name).load(path).schema
    except AnalysisException as error:
        raise InvalidError(
            "spark cannot read the files", path=path, reason=str(error).partition("\n")[0]
        ) from error
    if name != "csv":
        return found
    # Times stay text, as on the local runner.
    plain = (types.BooleanType, types.DoubleType, types.IntegerType, types.LongType)
    fields = [
        field
        if isinstance(field.dataType, plain) and field.name not in text_columns
        else types.StructField(field.name, types.StringType())
        for field in found
    ]
    return types.StructType(fields)
