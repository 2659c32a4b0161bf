from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.executor.inputs.payload import (
    DecodedRow,
    UndecodedRow,
    check_payload_column,
    decoded_rows,
    decoded_values,
    original_row,
    value_of_row,
)

_PAYLOAD = mp.JsonPayload({"type": "object"})


class Failing(mp.types.Payload):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def decoder(self) -> Any:
        def decode(payload: bytes) -> Any:
            raise self.error

        return decode


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view()]
)
def test_tables_and_mappings_decode_alike(kind: pa.DataType) -> None:
    """The row's other columns get a prefix, because a field may have the same name."""
    cells = [b'{"a":1,"offset":2}', b"{"]
    table = pa.table({"value": pa.array(cells).cast(pa.string()).cast(kind), "offset": [7, 8]})

    decoded, undecoded = decoded_rows(_PAYLOAD, table, stream="s")
    again = decoded_rows(_PAYLOAD, table.to_pylist(), stream="s")

    assert decoded == {"a": 1, "offset": 2, "__row_offset": 7}
    assert value_of_row(decoded) == {"a": 1, "offset": 2}
    assert original_row(decoded) == table.to_pylist()[0]
    assert isinstance(undecoded, UndecodedRow)
    assert (undecoded.row, value_of_row(undecoded)) == (table.to_pylist()[1], None)
    assert undecoded.reason.startswith(
        "the payload does not fit its schema schema=`JSON Schema` reason=`it is not JSON"
    )
    assert [decoded, undecoded] == again


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"value": None}, "the payload is null"),
        ({"value": 3}, "the payload is neither bytes nor text type=`int`"),
        ({"other": b"{}"}, "the row has no such field field=`value`"),
        (5, "the row has no fields type=`int`"),
    ],
)
def test_row_without_a_payload_gets_a_reason(row: Any, reason: str) -> None:
    """The other rows are still decoded."""
    first, second = decoded_rows(_PAYLOAD, [row, {"value": b"{}"}], stream="s")

    assert first == UndecodedRow(row, reason)
    assert isinstance(second, DecodedRow)
    assert original_row(first) == row


@pytest.mark.parametrize("cell", [bytearray(b"{}"), memoryview(b"{}"), "{}"])
def test_text_and_every_bytes_type_are_payloads(cell: Any) -> None:
    assert decoded_rows(_PAYLOAD, [{"value": cell}], stream="s") == [{}]


def test_missing_or_mistyped_column_is_refused() -> None:
    """Rows that all lack the field are a mistake of the call, not bad data."""
    with pytest.raises(mp.InvalidError, match="no such payload column stream=`s` column=`value` columns="):
        decoded_rows(_PAYLOAD, pa.table({"other": [1]}), stream="s")
    with pytest.raises(
        mp.InvalidError, match="neither binary nor text stream=`s` column=`value` type=`int64`"
    ):
        decoded_rows(_PAYLOAD, pa.table({"value": [1]}), stream="s")
    with pytest.raises(mp.InvalidError, match="no such payload column"):
        decoded_rows(_PAYLOAD, [{"other": 1}, {"another": 1}], stream="s")
    check_payload_column(_PAYLOAD, ["value"], stream="s")
    assert decoded_rows(_PAYLOAD, [], stream="s") == []


def test_decoder_error_is_the_reason_unless_a_service_is_unavailable() -> None:
    """An unavailable service may answer on a retry, so its error is raised."""
    rows = [{"value": b""}]

    (undecoded,) = decoded_rows(Failing(ZeroDivisionError("no")), rows, stream="s")

    assert undecoded.reason == "the payload cannot be decoded: ZeroDivisionError: no"
    with pytest.raises(mp.UnavailableError):
        decoded_rows(Failing(mp.UnavailableError("away")), rows, stream="s")


def test_decoding_again_must_succeed_again() -> None:
    """On Spark, routing and the task both decode the bytes."""
    rows = [{"value": b'{"a":1}'}, {"value": b'{"a":2}'}]

    assert decoded_values(_PAYLOAD, rows, stream="s") == [{"a": 1}, {"a": 2}]
    with pytest.raises(
        mp.InvalidError,
        match="a decoder must give the same fields for the same bytes stream=`s` reason=`the payload is null`",
    ):
        decoded_values(_PAYLOAD, [*rows, {"value": None}], stream="s")
