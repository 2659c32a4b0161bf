"""Small row files that were decoded recently."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.row_format import DecodedFiles, FileKey, ParquetRowFormat, decode_rows
from tests.fixtures.row_updates import row_updates

ROOM = 64 << 10
ROW = {"key": "a", "sequencer": 1, "commit_number": 1, "superstep": 1, "state": "1"}
TABLE = pa.table({"key": ["a", "b"]})


def _key(number: int, columns: tuple[str, ...] = ("key",)) -> FileKey:
    return number.to_bytes(1_000, "little"), "name", columns


class TestDecodedFiles:
    def test_table_is_cached_by_bytes_name_and_columns(self) -> None:
        decoded = DecodedFiles(ROOM)
        decoded.put(_key(1), TABLE)

        assert decoded.get(_key(1)) is TABLE
        assert decoded.get(_key(2)) is None
        assert decoded.get((_key(1)[0], "other", ("key",))) is None
        assert decoded.get(_key(1, ("key", "state"))) is None

    def test_cache_is_bounded(self) -> None:
        decoded = DecodedFiles(ROOM)
        for number in range(1_000):
            decoded.put(_key(number), TABLE)
            assert decoded.size_bytes <= ROOM
            assert decoded.get(_key(0)) is TABLE

        assert decoded.get(_key(999)) is TABLE
        assert decoded.get(_key(1)) is None

    def test_concurrently_decoded_file_counts_once(self) -> None:
        decoded = DecodedFiles(ROOM)
        decoded.put(_key(1), TABLE)
        size_bytes = decoded.size_bytes
        decoded.put(_key(1), TABLE)

        assert decoded.size_bytes == size_bytes

    def test_small_file_of_large_table_is_not_cached(self) -> None:
        decoded = DecodedFiles(ROOM)
        decoded.put(_key(1), pa.table({"key": ["a" * ROOM]}))

        assert decoded.get(_key(1)) is None
        assert decoded.size_bytes == 0


class TestReading:
    def test_changed_bytes_are_refused(self) -> None:
        """The cached table must not hide a flipped bit or a wrong name."""
        columns = list(ROW_SCHEMA.names)
        data = ParquetRowFormat().encode(row_updates([ROW]), "one")
        rows = decode_rows(data, columns, None, name="one")
        again = decode_rows(bytes(bytearray(data)), columns, None, name="one")

        assert again is rows
        for at in range(0, len(data), 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            with pytest.raises((DataError, pa.ArrowException, OSError)):
                decode_rows(bytes(flipped), columns, None, name="one")
        with pytest.raises(DataError, match="seal"):
            decode_rows(data, columns, None, name="two")
