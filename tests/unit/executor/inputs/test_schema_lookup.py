from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.executor.inputs.payload import SchemaLookup, schema_id


def _made(schema: Any, what: str) -> tuple[Any, str]:
    return schema, what


def test_known_schema_is_looked_up_once_and_an_unknown_one_again() -> None:
    asked: list[int] = []

    def known(number: int) -> str | None:
        asked.append(number)
        if number == 1:
            raise KeyError(number)
        return "text" if number == 2 or asked.count(3) > 1 else None

    lookup = SchemaLookup(known, ".avsc", _made)

    assert lookup.find(2) == lookup.find(2) == ("text", "schema 2")
    for number in (1, 1, 3):
        with pytest.raises(mp.InvalidError, match=f"an unknown schema schema_id=`{number}`"):
            lookup.find(number)
    assert lookup.find(3) == ("text", "schema 3")
    assert asked == [2, 1, 1, 3, 3]


def test_folder_lookup_finds_a_file_by_number(tmp_path: Path) -> None:
    """The file may appear after the first lookup."""
    lookup = SchemaLookup(tmp_path, ".avsc", _made)
    with pytest.raises(mp.InvalidError, match="unknown schema schema_id=`7` folder="):
        lookup.find(7)

    (tmp_path / "7.avsc").write_bytes(b"{}")

    assert lookup.find(7) == (b"{}", "schema 7")
    assert SchemaLookup(str(tmp_path), ".avsc", _made).find(7) == (b"{}", "schema 7")


def test_failing_lookup_is_unavailable_and_not_unknown() -> None:
    """A retry may succeed when the service is back."""

    def away(number: int) -> Any:
        raise ConnectionError("no route")

    with pytest.raises(
        mp.UnavailableError, match="looked up schema_id=`1` reason=`ConnectionError: no route`"
    ):
        SchemaLookup(away, "", _made).find(1)


@pytest.mark.parametrize("payload", [b"", b"\x00\x00\x00\x01", b"\x01\x00\x00\x00\x01"])
def test_payload_without_confluents_header_is_refused(payload: bytes) -> None:
    with pytest.raises(mp.InvalidError, match="not in Confluent's wire format"):
        schema_id(payload)
    assert schema_id(b"\x00\x00\x00\x01\x02rest") == 258
