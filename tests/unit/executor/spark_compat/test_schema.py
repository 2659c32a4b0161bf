"""Schemas: those of Spark's syntax are read as Spark reads them, and nothing is passed over."""

from __future__ import annotations

import pytest
from pyspark.sql.types import IntegerType, StructField, StructType

from millpond.executor.spark_compat.schema import parse_schema
from millpond.statestore.errors import InvalidError


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("count int", "struct<count:int>"),
        ("count int, seen array<string>", "struct<count:int,seen:array<string>>"),
        ("a: int, b: string", "struct<a:int,b:string>"),
        ("struct<a:int,b:struct<c:tinyint>>", "struct<a:int,b:struct<c:tinyint>>"),
        ("value struct<b:int>", "struct<value:struct<b:int>>"),
        ("decimal(10, 2)", "struct<value:decimal(10,2)>"),
        ("string string, date date", "struct<string:string,date:date>"),
        (
            "a long, b short, c byte, d real, e double",
            "struct<a:bigint,b:smallint,c:tinyint,d:float,e:double>",
        ),
        (
            "a timestamp, b timestamp_ntz, c binary, d boolean",
            "struct<a:timestamp,b:timestamp_ntz,c:binary,d:boolean>",
        ),
        ("`b c` map<string,decimal(3)>", "struct<b c:map<string,decimal(3,0)>>"),
    ],
)
def test_a_text_is_read_as_spark_reads_it(text: str, read: str) -> None:
    """Columns, a struct or one type, nested as deep as one likes."""
    assert parse_schema(text).simpleString() == read


def test_a_column_says_whether_it_may_be_null() -> None:
    """NOT NULL is kept, and a comment is no part of the type."""
    assert parse_schema("a int NOT NULL COMMENT 'of all', b int") == StructType(
        [StructField("a", IntegerType(), nullable=False), StructField("b", IntegerType())]
    )


def test_a_struct_type_is_taken_as_it_is() -> None:
    """It needs no reading."""
    schema = StructType([StructField("a", IntegerType())])

    assert parse_schema(schema) is schema


@pytest.mark.parametrize(
    "text",
    [
        "",
        "i intt",
        "a int, b",
        "struct<a>",
        "struct<a int, b>",
        "x array<struct<a int, b>>",
        "i interval day to second",
    ],
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    """A type that is unknown, or a column without one, is not left out in silence."""
    with pytest.raises(InvalidError, match="cannot parse the schema"):
        parse_schema(text)
