"""Rows out of Parquet, JSON and CSV files, of which only a piece is in memory.

The files of a folder are read in the order of their names, with numbers as numbers, so rows keep their positions
while files are added behind. Where the consumed rows end is noted with each commit, by file and row; a folder in which
something has come or gone before that place is refused.

The same files as streaming DataFrames of Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa

from millpond.cli.terminal.file_formats import Csv, FileFormat, format_of
from millpond.executor.inputs.extraction import Rows, row_count
from millpond.executor.local.rows import RowSource
from millpond.statestore.errors import DataError, InvalidError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_Read = TypeVar("_Read")

_NUMBER: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _File:
    """A file, and which rows of all it has."""

    name: str
    path: Path
    start: int
    stop: int


class RowFiles(RowSource):
    """The rows of a file, or of the files of a folder.

    Args:
        path: a file or a folder; in folders below it, too. Names that begin with a dot or an underscore are left out.
        text_columns: the columns of CSV files that are text, whatever is in them: keys and ids.

    Raises:
        InvalidError: there is nothing at the path, or files of no known format or of several.
    """

    def __init__(self, path: Path, text_columns: Collection[str] = ()) -> None:
        self.path = path
        self._format, self._paths = files_in(path, text_columns)
        self._root = path if path.is_dir() else path.parent

    @property
    def count(self) -> int:
        """How many rows there were when they were counted; what is appended meanwhile is left for the next run."""
        return self._files[-1].stop if self._files else 0

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows after the first ``start``; a piece ends where a file's columns are others than those of the one before.

        Raises:
            DataError: a file has fewer rows than when they were counted.
            InvalidError: a file is not of its format.
            UnavailableError: a file cannot be read.
        """
        return _gathered(self._parts(start, records_max), records_max)

    def offsets(self, count: int) -> str | None:
        """The file that the row before lies in, its number in that file, and how many files come before."""
        for number, file in enumerate(self._files):
            if file.start < count <= file.stop:
                return json.dumps(
                    {"rows": count, "file": file.name, "row": count - file.start, "files_before": number}
                )
        return None

    def check_offsets(self, count: int, stored: str) -> None:
        """Refuse a folder in which a file has come, grown or gone before the rows to come.

        Raises:
            InvalidError: the row up to which the store has consumed is another one.
        """
        known = _place(stored)
        # Of another count it says nothing: a repair takes positions back without it.
        if known is None or known[0] != count or known == _place(self.offsets(count) or ""):
            return
        raise InvalidError(
            "files have come, changed or gone among those that were consumed, so there is no telling which rows are"
            " new: name new files so that they come last, or start with a new store",
            path=self.path,
            consumed_to=f"row {known[2]} of {known[1]}, after {known[3]} files",
            now=self.offsets(count),
        )

    @cached_property
    def _files(self) -> list[_File]:
        found, start = list[_File](), 0
        for path, count in zip(
            self._paths, _readable(self._paths, self._format.counts(self._paths)), strict=True
        ):
            if count:
                name = path.relative_to(self._root).as_posix()
                found.append(_File(name, path, start, start + count))
                start += count
        return found

    def _parts(self, start: int, records_max: int) -> Iterator[Rows]:
        for file in self._files:
            if file.stop > start:
                skipped = max(start - file.start, 0)
                yield from self._read(file, skipped, records_max)

    def _read(self, file: _File, skipped: int, records_max: int) -> Iterator[Rows]:
        left = file.stop - file.start - skipped
        for rows in _readable([file.path], self._format.read(file.path, skipped, records_max)):
            if left:
                yield _slice(rows, 0, left)
                left -= min(left, row_count(rows))
        if left:
            raise DataError("a file has lost rows since it was counted", file=file.path, missing=left)


def files_in(path: Path, text_columns: Collection[str] = ()) -> tuple[FileFormat, list[Path]]:
    """The files at a path in their order, and the format that they have.

    Raises:
        InvalidError: there is nothing at the path, or files of no known format or of several.
    """
    if path.is_file():
        return format_of(path, text_columns), [path]
    if not path.is_dir():
        raise InvalidError("there is no file and no folder of that name", path=path)
    if (path / "_delta_log").is_dir():
        raise InvalidError(
            "that is a Delta table, whose files are not its rows: read it in a function, and name that with --inputs",
            path=path,
        )
    paths = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part[0] in "._" for part in file.relative_to(path).parts)
    ]
    if not paths:
        raise InvalidError("the folder has no files", path=path)
    formats = {(known := format_of(file, text_columns)).name: known for file in paths}
    if len(formats) > 1:
        raise InvalidError(
            "the folder has files of several formats", path=path, formats=", ".join(sorted(formats))
        )
    return next(iter(formats.values())), sorted(
        paths, key=lambda file: _order(file.relative_to(path).as_posix())
    )


def _order(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """What names are sorted by: numbers in them as numbers, so that 10 comes after 9."""
    parts = ((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _NUMBER.split(name) if part)
    return tuple(parts), name


def _place(text: str) -> tuple[int, str, int, int] | None:
    """Where a source stood, of what `RowFiles.offsets` said; ``None`` if another source said it."""
    try:
        told = json.loads(text)
        return int(told["rows"]), str(told["file"]), int(told["row"]), int(told["files_before"])
    except (ValueError, TypeError, KeyError):
        return None


def _slice(rows: Rows, start: int, count: int) -> Rows:
    return rows.slice(start, count) if isinstance(rows, pa.Table) else rows[start : start + count]


def _gathered(parts: Iterable[Rows], records_max: int) -> Iterator[tuple[int, Rows]]:
    """Parts put together or cut to pieces of ``records_max``; tables of other columns are not put together."""
    waiting, count = list[Rows](), 0
    for part in parts:
        rest = part
        if waiting and not _fit(waiting[0], rest):
            yield count, _joined(waiting)
            waiting, count = [], 0
        while (here := row_count(rest)) > 0:
            taken = min(here, records_max - count)
            waiting.append(_slice(rest, 0, taken))
            rest, count = _slice(rest, taken, here - taken), count + taken
            if count == records_max:
                yield count, _joined(waiting)
                waiting, count = [], 0
    if waiting:
        yield count, _joined(waiting)


def _fit(one: Rows, other: Rows) -> bool:
    if isinstance(one, pa.Table) and isinstance(other, pa.Table):
        return bool(one.schema.equals(other.schema))
    return not isinstance(one, pa.Table) and not isinstance(other, pa.Table)


def _joined(parts: list[Rows]) -> Rows:
    tables = [part for part in parts if isinstance(part, pa.Table)]
    if tables:
        return pa.concat_tables(tables).combine_chunks()
    return [row for part in parts for row in part]


def _readable(paths: list[Path], read: Iterator[_Read]) -> Iterator[_Read]:
    """The same, with what Arrow and the system say of a file that cannot be read as errors of ours."""
    named = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"
    try:
        yield from read
    except pa.ArrowInvalid as error:
        raise InvalidError(
            "a file is not of its format", file=named, reason=str(error).partition("\n")[0]
        ) from error
    except (OSError, EOFError) as error:
        raise UnavailableError("a file cannot be read", file=named, reason=error) from error


# By its place alone a column would be taken for another one where files have them in another order.
_OPTIONS: Final = {"csv": {"header": "true", "multiLine": "true", "enforceSchema": "false"}}
_TYPES: Final[Mapping[pa.DataType, str]] = {
    pa.int64(): "bigint",
    pa.float64(): "double",
    pa.bool_(): "boolean",
    pa.string(): "string",
}


def stream_of_files(spark: SparkSession, path: str, text_columns: Collection[str]) -> DataFrame:
    """A stream of the rows of a file, or of the files of a folder.

    Args:
        spark: the session.
        path: a file or a folder on this machine; or a URL that Spark can read, whose name says the format: without a
            suffix it is Parquet.
        text_columns: the columns of CSV files that are text, whatever is in them.

    Raises:
        InvalidError: there is nothing at the path, or files of no known format or of several.
    """
    schema: StructType | str
    if "://" in path:
        name = format_of(Path(path)).name if Path(path).suffix else "parquet"
        schema = _schema_by_spark(spark, name, path, text_columns)
    else:
        here = Path(path).expanduser().resolve()
        found, paths = files_in(here, text_columns)
        name, path = found.name, str(here)
        schema = _schema_of(found, paths) or _schema_by_spark(spark, name, path, text_columns)
    reader = spark.readStream.schema(schema).options(**_OPTIONS.get(name, {}))
    return reader.option("recursiveFileLookup", "true").format(name).load(path)


def _schema_of(found: FileFormat, paths: list[Path]) -> str | None:
    """The columns of CSV files with the types that the local runner gives them; of other formats Spark knows."""
    if not isinstance(found, Csv):
        return None
    columns = found.types(paths).items()
    return ", ".join(f"`{name.replace('`', '``')}` {_TYPES[kind]}" for name, kind in columns)


def _schema_by_spark(spark: SparkSession, name: str, path: str, text_columns: Collection[str]) -> StructType:
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import (
        BooleanType,
        DoubleType,
        IntegerType,
        LongType,
        StringType,
        StructField,
        StructType,
    )

    reader = spark.read.options(**_OPTIONS.get(name, {})).option("recursiveFileLookup", "true")
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
    # Times, and whatever else is no plain number, stay text.
    plain = (BooleanType, DoubleType, IntegerType, LongType)
    fields = [
        field
        if isinstance(field.dataType, plain) and field.name not in text_columns
        else StructField(field.name, StringType())
        for field in found
    ]
    return StructType(fields)
