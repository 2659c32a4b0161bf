"""The formats of files that rows are read from: how many rows a file has, and its rows in bounded batches."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from millpond.executor.inputs.extraction import Rows
from millpond.statestore.errors import InvalidError

_SUFFIXES: Final = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
}
_COMPRESSED: Final = ".gz"
_BUFFER_BYTES: Final = 1 << 20


class FileFormat(ABC):
    """How rows are read from files of one format.

    Attributes:
        name: what Spark calls the format, too.
    """

    name: str

    @abstractmethod
    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        """How many rows each file has."""

    @abstractmethod
    def read(self, path: Path, start: int, records_max: int) -> Iterator[Rows]:
        """The rows of a file after the first ``start``, in batches of about so many."""


def format_of(path: Path, text_columns: Collection[str] = ()) -> FileFormat:
    """The format of a file, by its suffix.

    Args:
        path: the file.
        text_columns: the columns of CSV files that are text, whatever is in them.

    Raises:
        InvalidError: the suffix is not known.
    """
    suffixes = path.suffixes[:-1] if path.suffix == _COMPRESSED else path.suffixes
    match _SUFFIXES.get(suffixes[-1] if suffixes else ""):
        case "parquet":
            return Parquet()
        case "json":
            return JsonLines()
        case "csv":
            return Csv(text_columns)
    raise InvalidError(
        "the format of a file is told by its name",
        file=path,
        known=f"{', '.join(_SUFFIXES)}, also with {_COMPRESSED}",
    )


class Parquet(FileFormat):
    """Parquet: pages of one row group at a time."""

    name = "parquet"

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        """How many rows each file has, by its footer."""
        from pyarrow import parquet

        for path in paths:
            yield int(parquet.read_metadata(path).num_rows)

    def read(self, path: Path, start: int, records_max: int) -> Iterator[Rows]:
        """The rows after the first ``start``; row groups before them are not read."""
        from pyarrow import parquet

        # Buffered, or each column of a row group would be in memory as a whole.
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            first, skipped = 0, start
            while first < file.num_row_groups and skipped >= file.metadata.row_group(first).num_rows:
                skipped -= file.metadata.row_group(first).num_rows
                first += 1
            groups = list(range(first, file.num_row_groups))
            for batch in file.iter_batches(records_max, row_groups=groups) if groups else ():
                passed = min(skipped, batch.num_rows)
                skipped -= passed
                if passed < batch.num_rows:
                    yield pa.Table.from_batches([batch.slice(passed)])


class JsonLines(FileFormat):
    """JSON, an object per line. A line that is none is passed on as text, and becomes a dead letter."""

    name = "json"

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        """How many lines each file has that are not blank."""
        for path in paths:
            with _opened(path) as lines:
                first = next((line for line in lines if not line.isspace()), None)
                if first is not None and first.lstrip().startswith(b"["):
                    raise InvalidError(
                        "JSON files have an object on each line, and no array around them", file=path
                    )
                yield (first is not None) + sum(1 for line in lines if not line.isspace())

    def read(self, path: Path, start: int, records_max: int) -> Iterator[Rows]:
        """The rows after the first ``start``."""
        with _opened(path) as lines:
            rest = islice((line for line in lines if not line.isspace()), start, None)
            while batch := list(islice(rest, records_max)):
                yield [_object(line) for line in batch]


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == _COMPRESSED else path.open("rb")


def _object(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return line.decode(errors="replace").rstrip("\r\n")


class Csv(FileFormat):
    """CSV with a header. A column is of numbers or truth values if that is so in all files; times stay text, as in JSON.

    Args:
        text_columns: the columns that are text, whatever is in them.
    """

    name = "csv"

    def __init__(self, text_columns: Collection[str]) -> None:
        self._text_columns = frozenset(text_columns)
        self._types: dict[str, pa.DataType] = {}

    def types(self, paths: Sequence[Path]) -> dict[str, pa.DataType]:
        """The columns of all files, in their order, with their types."""
        names = [name for path in paths for name in self._names(path)]
        # Read to their end: then the types are known.
        sum(self.counts(paths))
        return {name: self._types.get(name, pa.string()) for name in names}

    def counts(self, paths: Sequence[Path]) -> Iterator[int]:
        """How many rows each file has. On the way columns are found that are of numbers."""
        kinds: dict[str, list[_Kind]] = {}
        found = list[int]()
        for path in paths:
            count = 0
            for batch in self._batches(path):
                count += batch.num_rows
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    fitting = [] if name in self._text_columns else kinds.get(name, _KINDS)
                    kinds[name] = [kind for kind in fitting if _fits(column, kind)]
            found.append(count)
        self._types = {name: fitting[0][0] for name, fitting in kinds.items() if fitting}
        yield from found

    def read(self, path: Path, start: int, records_max: int) -> Iterator[Rows]:
        """The rows after the first ``start``; counted before, so that the columns' types are known."""
        skipped = start
        for batch in self._batches(path):
            passed = min(skipped, batch.num_rows)
            skipped -= passed
            rest = batch.slice(passed)
            for at in range(0, rest.num_rows, records_max):
                yield self._typed(rest.slice(at, records_max))

    def _typed(self, batch: pa.RecordBatch) -> pa.Table:
        names = batch.schema.names
        columns = [
            column.cast(self._types[name]) if name in self._types else column
            for name, column in zip(names, batch.columns, strict=True)
        ]
        return pa.Table.from_arrays(columns, names=names)

    def _names(self, path: Path) -> list[str]:
        if path.stat().st_size == 0:
            return []
        with arrow_csv.open_csv(path, parse_options=_PARSE) as header:
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
        with arrow_csv.open_csv(path, parse_options=_PARSE, convert_options=convert) as batches:
            yield from batches


_PARSE: Final = arrow_csv.ParseOptions(newlines_in_values=True)

_Kind: TypeAlias = "tuple[pa.DataType, str]"

_KINDS: Final[list[_Kind]] = [
    (pa.int64(), r"^-?(?:0|[1-9][0-9]{0,17})$"),
    (pa.float64(), r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"),
    (pa.bool_(), r"^(?:true|false)$"),
]
"""What text may be read as, the first that fits; with zeros in front it is no number, but a code."""


def _fits(column: pa.Array, kind: _Kind) -> bool:
    # Without any text `all` is null: then each kind fits.
    return pc.all(pc.match_substring_regex(column, kind[1])).as_py() is not False
