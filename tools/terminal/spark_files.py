"""The same files as streaming DataFrames of Spark."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millpond.statestore.errors import InvalidError
from millpond.tools.terminal.file_formats import Csv, FileFormat, format_of
from millpond.tools.terminal.row_files import files_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

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
