"""Thrift's compact protocol."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.rows.pages import Field, FieldType, read_list, read_struct, write_struct

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def structs(draw: st.DrawFn, depth: int = 2) -> tuple[list[Field], dict[int, object]]:
    fields: list[Field] = []
    expected: dict[int, object] = {}
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        number += draw(st.integers(1, 15))
        kind = draw(st.sampled_from([FieldType.I64, FieldType.BINARY, FieldType.LIST, FieldType.STRUCT]))
        if kind is FieldType.STRUCT and depth:
            inner, told = draw(structs(depth=depth - 1))
            fields.append((number, kind, inner))
            expected[number] = told
        elif kind is FieldType.LIST:
            elements = draw(st.lists(NUMBERS, max_size=20))
            fields.append((number, kind, (FieldType.I64, elements)))
            expected[number] = elements
        elif kind is FieldType.BINARY:
            expected[number] = draw(st.binary(max_size=200))
            fields.append((number, kind, expected[number]))
        else:
            expected[number] = draw(NUMBERS)
            fields.append((number, FieldType.I64, expected[number]))
    return fields, expected


@given(structs(), st.binary(max_size=3))
def test_struct_round_trips(both: tuple[list[Field], dict[int, object]], around: bytes) -> None:
    fields, expected = both
    written = write_struct(fields)

    assert read_struct(around + written + around, len(around)) == (expected, len(around) + len(written))


def test_parquet_footer_matches_arrow() -> None:
    table = pa.table({"a": pa.array(range(10)), "b": pa.array([[1.5], None] * 5)})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=4)
    data = sink.getvalue()
    metadata = pq.read_metadata(io.BytesIO(data))

    footer, end = read_struct(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))

    assert end == len(data) - 8
    assert (footer[3], len(footer[4]), footer[6].decode()) == (10, 3, metadata.created_by)
    assert [group[3] for group in footer[4]] == [4, 4, 2]
    chunk = footer[4][1][1][0][3]
    column = metadata.row_group(1).column(0)
    assert (chunk[3], chunk[5], chunk[7]) == ([b"a"], column.num_values, column.total_compressed_size)


@pytest.mark.parametrize(
    "damaged", [b"\x18", b"\x15\x80", b"\x19\xf5\xff\xff\xff\x0f", b"\x1b\x00", b"\x1d\x00"]
)
def test_malformed_struct_is_refused(damaged: bytes) -> None:
    with pytest.raises((IndexError, ValueError)):
        read_struct(damaged, 0)


def test_fields_must_be_written_in_order() -> None:
    for fields in ([(2, FieldType.I32, 1), (1, FieldType.I32, 1)], [(1, FieldType.DOUBLE, 1.0)]):
        with pytest.raises(ValueError, match="field"):
            write_struct(fields)


def test_other_types_are_skipped() -> None:
    numbers = b"\x00" * 8
    struct = b"\x11\x12\x13\x2a\x17" + numbers + b"\x19\x21\x01\x02\x06\x20\x02\x00"

    fields, end = read_struct(struct, 0)

    assert (fields, end) == ({1: True, 2: False, 3: 42, 4: numbers, 5: [True, False], 16: 1}, len(struct))
    assert read_list(b"\x25\x02\x04", 0) == ([1, 2], 3)
