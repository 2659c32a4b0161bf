"""
The same files as streaming DataFrames of Spark.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.statestore.errors import InvalidError
from millpond.tools.terminal.file_formats import format_of
from millpond.tools.terminal.row_files import files_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["stream_of_files"]

_OPTIONS = {"csv": {"header": "true", "multiLine": "true"}}


def stream_of_files(spark: SparkSession, path: str, text_columns: Collection[str]) -> DataFrame:
    """
    A stream of the rows of a file, or of the files of a folder.

    Args:
        spark: the session.
        path: a file or a folder, on this machine or wherever Spark can read; of a URL the name says the format, or else
            its files are Parquet.
        text_columns: the columns of CSV files that are text, whatever is in them.

    Raises:
        InvalidError: there is nothing at the path, or files of no known format or of several.
    """
    if "://" in path:
        name = format_of(Path(path)).name if Path(path).suffix else "parquet"
    else:
        name = files_in(Path(path))[0].name
        path = str(Path(path).resolve())
    options = _OPTIONS.get(name, {})
    schema = _schema(spark, name, path, text_columns)
    reader = spark.readStream.schema(schema).options(**options).option("recursiveFileLookup", "true")
    return reader.format(name).load(path)


def _schema(spark: SparkSession, name: str, path: str, text_columns: Collection[str]) -> StructType:
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
    # As the local runner reads them: times, and whatever else is no plain number, stay text.
    plain = (BooleanType, DoubleType, IntegerType, LongType)
    fields = [
        field
        if isinstance(field.dataType, plain) and field.name not in text_columns
        else StructField(field.name, StringType())
        for field in found
    ]
    return StructType(fields)
