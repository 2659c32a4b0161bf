"""Schemas in Spark's syntax."""

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
def test_schema_text_is_parsed_as_in_spark(text: str, read: str) -> None:
    """A text may be columns, a struct or a single type."""
    assert parse_schema(text).simpleString() == read


def test_not_null_is_kept_and_comments_are_dropped() -> None:
    assert parse_schema("a int NOT NULL COMMENT 'of all', b int") == StructType(
        [StructField("a", IntegerType(), nullable=False), StructField("b", IntegerType())]
    )


def test_struct_type_is_returned_unchanged() -> None:
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
def test_invalid_schema_text_is_refused(text: str) -> None:
    """An unknown type must not be silently omitted."""
    with pytest.raises(InvalidError, match="cannot parse the schema"):
        parse_schema(text)
