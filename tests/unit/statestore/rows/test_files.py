from __future__ import annotations

import datetime as dt
import io
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.statestore.errors import (
    DataError,
    InternalError,
    InvalidError,
    ObjectExistsError,
    ObjectMissingError,
)
from millpond.statestore.interval import Interval
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import (
    PARQUET,
    RowFile,
    encode_row_file,
    read_row_files,
    row_file_path,
    write_row_file,
)
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, Fence
from millpond.statestore.rows.row_format import ROWS_PER_GROUP, IpcRowFormat, RowFormat
from millpond.statestore.types import CommitNumber, Objects, Sequencer, Superstep
from tests.fixtures.row_updates import row_updates

FENCE = Fence(Sequencer(3), CommitNumber(7))
PATH = row_file_path("c", Superstep(12), "0" * 32)
FORMATS: list[RowFormat] = [PARQUET, IpcRowFormat()]
AT = 1_360_281_600_000_000

EXAMPLE: Sequence[dict[str, Any]] = [
    {
        "key": f"k{number:03d}",
        "sequencer": 3,
        "commit_number": 7,
        "superstep": 12,
        "state": f'{{"count":{number}}}',
        "timers": [{"tag": "t", "domain": "event", "at": AT + number, "output_at": AT}],
        "record_ids": [{"id": bytes([number, copy]), "at": AT + copy} for copy in range(3)],
        "productions": [{"stream": "out", "key": "k", "value": "1", "value_bytes": None, "at": AT}]
        * (number % 3),
        "hold": AT,
    }
    for number in range(40)
]


def write(
    objects: Objects,
    table: pa.Table | None = None,
    interval: Interval | None = None,
    token: str = "0" * 32,
    row_format: RowFormat = PARQUET,
) -> RowFile:
    return write_row_file(
        objects,
        interval or Interval("c"),
        row_updates(EXAMPLE) if table is None else table,
        superstep=Superstep(12),
        fence=FENCE,
        token=token,
        row_format=row_format,
    )


def many(count: int) -> pa.Table:
    return row_updates({"key": f"k{number:06d}", "state": str(number)} for number in range(count))


class TestWrite:
    def test_manifest_has_facts_for_commit(self) -> None:
        objects = MemoryObjects()
        file = write(objects)

        assert file == RowFile(
            path=f"computation=c/0000000012-{'0' * 32}.parquet",
            size_bytes=len(objects.get(file.path)),
            rows=40,
            min_key="k000",
            max_key="k039",
            superstep=Superstep(12),
            sequencer=Sequencer(3),
            commit_number=CommitNumber(7),
            productions=39,
        )

    def test_path_is_quoted(self, tmp_path: Path) -> None:
        """A computation's name becomes one folder."""
        name = "a/b c%ä=.."
        objects = open_objects(str(tmp_path))
        file = write(objects, interval=Interval(name))

        assert file.path.startswith("computation=a%2Fb%20c%25%C3%A4%3D../")
        assert read_row_files(objects, [file.path]).num_rows == 40
        assert [path.parent for path in tmp_path.rglob("*.parquet")] == [tmp_path / Path(file.path).parent]

    def test_token_is_used_once(self) -> None:
        objects = MemoryObjects()
        first = write(objects)
        with pytest.raises(ObjectExistsError):
            write(objects, many(3))

        assert read_row_files(objects, [first.path]).num_rows == 40

    @pytest.mark.parametrize(
        "updates",
        [
            [{"key": "b"}, {"key": "a"}],
            [{"key": "a"}, {"key": "a"}],
            [{"key": "a"}, {"key": None}],
            [{"key": "z"}],
            [{"key": "a", "sequencer": 4}],
            [{"key": "a", "sequencer": 3, "commit_number": 8}],
            [],
        ],
        ids=["falling", "twice", "null", "outside", "newer owner", "newer commit", "empty"],
    )
    def test_invalid_updates_are_refused(self, updates: list[dict[str, Any]]) -> None:
        objects = MemoryObjects()
        with pytest.raises(InternalError):
            write(objects, row_updates(updates), interval=Interval("c", "", "m"))

        assert objects.list("") == []

    def test_wrong_schema_is_internal_error(self) -> None:
        with pytest.raises(InternalError):
            encode_row_file(pa.table({"key": ["a"]}), PATH)

    def test_older_lease_may_have_higher_commit_numbers(self) -> None:
        """A compaction carries rows of earlier leases."""
        table = row_updates([{"key": "a", "sequencer": 2, "commit_number": 99}, {"key": "b", "sequencer": 3}])

        assert write(MemoryObjects(), table).rows == 2


class TestRead:
    @pytest.mark.parametrize("row_format", FORMATS)
    def test_requested_columns_come_in_order(self, row_format: RowFormat) -> None:
        objects = MemoryObjects()
        file = write(objects, row_format=row_format)
        table = read_row_files(objects, [file.path], ["state", "superstep"])

        assert table.schema.names == ["state", "superstep"]
        assert table.column("state")[39].as_py() == '{"count":39}'

    def test_empty_result_has_schema(self) -> None:
        objects = MemoryObjects()
        file = write(objects)

        assert read_row_files(objects, []) == ROW_SCHEMA.empty_table()
        assert read_row_files(objects, [file.path], keys=[]) == ROW_SCHEMA.empty_table()
        assert merge_updates(read_row_files(objects, [])).num_rows == 0

    @pytest.mark.parametrize("row_format", FORMATS)
    def test_point_read_follows_order_of_files(self, row_format: RowFormat) -> None:
        objects = MemoryObjects()
        paths = [write(objects, token=f"{n:032x}", row_format=row_format).path for n in range(2)]
        table = read_row_files(objects, paths, ["key"], keys=["k007", "missing", "k031", "k007"])

        assert table.column("key").to_pylist() == ["k007", "k031"] * 2

    def test_point_read_skips_other_row_groups(self) -> None:
        """A damaged group that is skipped must not matter."""
        objects = MemoryObjects()
        table = many(3 * ROWS_PER_GROUP)
        file = write(objects, table)
        data = bytearray(objects.get(file.path))
        offset = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(4).data_page_offset
        data[offset + 100] ^= 0xFF
        # Under a foreign name there is no seal, so only the pages can show the damage.
        objects.put("foreign.parquet", bytes(data))
        last = table.column("key")[-1].as_py()

        assert read_row_files(objects, ["foreign.parquet"], ["state"], keys=[last]).num_rows == 1
        with pytest.raises(DataError):
            read_row_files(objects, ["foreign.parquet"], ["state"])

    def test_interval_reads_only_its_keys(self) -> None:
        objects = MemoryObjects()
        file = write(objects, many(100))
        parts = [
            read_row_files(objects, [file.path], ["key"], interval=interval).num_rows
            for interval in (
                Interval("c", "", "k000010"),
                Interval("c", "k000010", "k000090"),
                Interval("c", "z"),
            )
        ]

        assert parts == [10, 80, 0]

    def test_missing_file_is_named(self) -> None:
        with pytest.raises(ObjectMissingError, match=r"gone\.parquet"):
            read_row_files(MemoryObjects(), ["gone.parquet"])


class TestDamage:
    @pytest.mark.parametrize("row_format", FORMATS)
    def test_flipped_bit_is_named(self, row_format: RowFormat) -> None:
        objects = MemoryObjects()
        file = write(objects, row_format=row_format)
        whole = objects.get(file.path)
        for number in range(300):
            bit = number * 1_000_003 % (8 * len(whole))
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            objects.put(file.path, bytes(damaged))
            with pytest.raises(DataError, match=file.path):
                read_row_files(objects, [file.path])

    @pytest.mark.parametrize("row_format", FORMATS)
    def test_cut_or_extended_file_is_named(self, row_format: RowFormat) -> None:
        objects = MemoryObjects()
        file = write(objects, row_format=row_format)
        whole = objects.get(file.path)
        for length in [0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 8, len(whole) - 1]:
            objects.put(file.path, whole[:length])
            with pytest.raises(DataError):
                read_row_files(objects, [file.path])
        for other in (whole + b"x", b"PAR1" + b"\xff" * 4 + b"PAR1"):
            objects.put(file.path, other)
            with pytest.raises(DataError):
                read_row_files(objects, [file.path])

    def test_pages_have_parquet_checksums(self) -> None:
        """Other readers can verify them."""
        data = encode_row_file(row_updates(EXAMPLE), PATH)
        offset = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(0).data_page_offset
        damaged = bytearray(data)
        damaged[offset + 60] ^= 1

        with pytest.raises(OSError, match="CRC"):
            pq.ParquetFile(io.BytesIO(damaged), page_checksum_verification=True).read()

    def test_non_row_file_is_named(self) -> None:
        objects = MemoryObjects()
        objects.put("notes.parquet", b"hello, this is not Parquet at all")
        with pytest.raises(DataError, match=r"notes\.parquet"):
            read_row_files(objects, ["notes.parquet"])

    def test_foreign_file_without_key_or_order_is_named(self) -> None:
        objects = MemoryObjects()
        sink = io.BytesIO()
        pq.write_table(pa.table({"key": ["a"], "sequencer": [1]}), sink)
        objects.put("x.parquet", sink.getvalue())
        with pytest.raises(DataError, match=r"path=`x\.parquet` column=`commit_number`"):
            read_row_files(objects, ["x.parquet"])


def rewritten(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def other_types(table: pa.Table) -> pa.Table:
    """The same rows as a careless writer may store them: narrow, large, in another order."""
    naive = pa.timestamp("us")
    timer = pa.struct(
        [("output_at", naive), ("at", naive), ("domain", pa.large_string()), ("tag", pa.string())]
    )
    record_id = pa.struct([("at", naive), ("id", pa.large_binary())])
    rows = table.drop_columns(["state_bytes"]).to_pylist()
    for row in rows:
        row["hold"] = row["hold"].replace(tzinfo=None)
        row["timers"] = [_naive(timer) for timer in row["timers"]]
        row["record_ids"] = [_naive(record_id) for record_id in row["record_ids"]]
    schema = pa.schema(
        [
            ("hold", naive),
            ("timers", pa.large_list(timer)),
            ("record_ids", pa.list_(pa.field("array", record_id))),
            ("superstep", pa.int32()),
            ("commit_number", pa.int16()),
            ("sequencer", pa.uint64()),
            ("state", pa.large_string()),
            ("key", pa.dictionary(pa.int32(), pa.string())),
            ("deleted", pa.bool_()),
            ("productions", table.schema.field("productions").type),
            ("computation", pa.string()),
        ]
    )
    return pa.Table.from_pylist(rows, schema=schema)


def _naive(item: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace(tzinfo=None) if isinstance(value, dt.datetime) else value
        for name, value in item.items()
    }


FOREIGN: dict[str, Callable[[pa.Table], bytes]] = {
    "plain": rewritten,
    "int96": lambda table: rewritten(table, use_deprecated_int96_timestamps=True),
    "no timestamps zone, narrow, large, reordered": lambda table: rewritten(other_types(table)),
    "nanoseconds": lambda table: rewritten(
        table.set_column(9, "hold", table["hold"].cast(pa.timestamp("ns", "UTC")))
    ),
    "old list names": lambda table: rewritten(table, use_compliant_nested_type=False),
    "no statistics": lambda table: rewritten(table, write_statistics=False),
    "second page version": lambda table: rewritten(table, data_page_version="2.0"),
}


class TestForeign:
    @pytest.mark.parametrize("writer", FOREIGN.values(), ids=FOREIGN.keys())
    def test_files_rewritten_by_others_read_same(self, writer: Callable[[pa.Table], bytes]) -> None:
        objects = MemoryObjects()
        table = row_updates(EXAMPLE)
        objects.put("computation=c/part-0.parquet", writer(table))

        read = read_row_files(objects, ["computation=c/part-0.parquet"])
        assert table.equals(read)

    @pytest.mark.parametrize("name", ["stbte", "nested"])
    def test_unknown_column_name_is_damage(self, name: str) -> None:
        """It may be a damaged name of ours."""
        objects = MemoryObjects()
        table = row_updates([{"key": "a", "state": "1", "record_ids": [{"id": b"1"}]}])
        if name == "nested":
            ids = pa.array([[{"id": b"1", "aT": 1}]])
            table = table.set_column(table.column_names.index("record_ids"), "record_ids", ids)
        else:
            table = table.rename_columns({"state": name})
        objects.put("x.parquet", rewritten(table))
        with pytest.raises(DataError, match=r"x\.parquet.*(stbte|aT)"):
            read_row_files(objects, ["x.parquet"])

    @pytest.mark.parametrize("writer", FOREIGN.values(), ids=FOREIGN.keys())
    def test_point_read_of_foreign_file_ignores_statistics(self, writer: Callable[[pa.Table], bytes]) -> None:
        objects = MemoryObjects()
        table = row_updates(EXAMPLE)
        objects.put("x.parquet", writer(table))

        assert table.slice(7, 1).equals(read_row_files(objects, ["x.parquet"], keys=["k007", "a"]))
        assert table.slice(7, 1).equals(
            read_row_files(objects, ["x.parquet"], interval=Interval("c", "k007", "k008"))
        )

    def test_missing_columns_are_null(self) -> None:
        """Nested columns too."""
        objects = MemoryObjects()
        objects.put("x.parquet", rewritten(pa.table({"key": ["a"], "sequencer": [1], "commit_number": [1]})))
        (row,) = read_row_files(objects, ["x.parquet"]).to_pylist()

        assert {name for name, value in row.items() if value is not None} == {
            "key",
            "sequencer",
            "commit_number",
        }

    def test_null_and_empty_lists_stay_distinct(self) -> None:
        objects = MemoryObjects()
        table = row_updates(
            [{"key": "a"}, {"key": "b", "timers": []}, {"key": "c"}, {"key": "d", "timers": [{}]}]
        )
        large = table.set_column(
            6, "timers", table["timers"].cast(pa.large_list(table.schema.field(6).type.value_type))
        )
        objects.put("x.parquet", rewritten(large))

        for keys in (None, ["b", "c", "d"]):
            read = read_row_files(objects, ["x.parquet"], ["key", "timers"], keys=keys)
            assert table.select(["key", "timers"]).slice(0 if keys is None else 1).equals(read)

    def test_file_of_delta_rs_is_read(self, tmp_path: Path) -> None:
        """Its statistics cut long keys."""
        table = row_updates(
            [{"key": "a"}, {"key": "é" * 200, "state": "1", "hold": AT}, {"key": "\U0010ffff" * 50}]
        )
        deltalake.write_deltalake(str(tmp_path), table)
        (path,) = [path.name for path in tmp_path.glob("*.parquet")]
        objects = open_objects(str(tmp_path))

        assert table.equals(read_row_files(objects, [path]))
        for key in table.column("key").to_pylist():
            assert read_row_files(objects, [path], keys=[key]).num_rows == 1


class TestOtherReaders:
    def test_duckdb_reads_sealed_file(self, tmp_path: Path) -> None:
        objects = open_objects(str(tmp_path))
        file = write(objects)
        query = f"""
            select count(*), sum((state ->> 'count')::int), epoch_us(max(record_ids[1].at))
            from '{tmp_path / file.path}'
        """
        with duckdb.connect() as connection:
            (found,) = connection.execute(query).fetchall()

        assert found == (40, sum(range(40)), AT)

    def test_stock_parquet_reader_sees_same_rows(self) -> None:
        """States of version 0 have no column for it."""
        table = row_updates(EXAMPLE)
        read = pq.read_table(io.BytesIO(encode_row_file(table, PATH)))

        assert read.column_names == [name for name in ROW_SCHEMA.names if name != STATE_VERSION]
        assert table.drop_columns([STATE_VERSION]).equals(
            read.cast(table.drop_columns([STATE_VERSION]).schema)
        )

    def test_stock_parquet_reader_sees_state_versions(self) -> None:
        table = row_updates([{"key": "a", "state": "1", "state_version": 3}, {"key": "b", "state": "2"}])
        read = pq.read_table(io.BytesIO(encode_row_file(table, PATH)))

        assert read.column(STATE_VERSION).to_pylist() == [3, None]


class TestSelection:
    def test_unknown_requested_column_is_internal_error(self) -> None:
        with pytest.raises(InternalError, match="nonsense"):
            read_row_files(MemoryObjects(), [], ["nonsense"])

    def test_keys_too_long_for_statistics_are_found(self) -> None:
        objects = MemoryObjects()
        keys = [letter * 10_000 for letter in "abc"]
        file = write(objects, row_updates({"key": key} for key in keys))

        assert (
            read_row_files(objects, [file.path], ["key"], keys=keys[1:2]).column("key").to_pylist()
            == keys[1:2]
        )


class TestMerge:
    def test_merge_without_rule_columns_is_refused(self) -> None:
        with pytest.raises(InvalidError, match="commit_number"):
            merge_updates(pa.table({"key": ["a"], "sequencer": [1]}))

    def test_null_state_and_timers_mean_unchanged(self) -> None:
        (row,) = merge_updates(
            row_updates(
                [
                    {"key": "a", "state": "1", "timers": [{"tag": "t"}], "hold": 5},
                    {"key": "a", "commit_number": 2, "superstep": 4},
                ]
            )
        ).to_pylist()

        assert (row["state"], row["timers"][0]["tag"], row["hold"]) == ("1", "t", None)
        assert (row["commit_number"], row["superstep"]) == (2, 4)

    def test_deleted_state_keeps_row_while_timer_exists(self) -> None:
        updates: list[dict[str, Any]] = [
            {"key": "a", "state": "1", "timers": [{"tag": "old"}]},
            {"key": "a", "commit_number": 2, "deleted": True, "timers": [{"tag": "new"}]},
            {"key": "b", "state": "1", "timers": [{"tag": "old"}]},
            {"key": "b", "commit_number": 2, "deleted": True},
        ]
        (row,) = merge_updates(row_updates(updates)).to_pylist()

        assert (row["key"], row["state"], row["timers"][0]["tag"]) == ("a", None, "new")

    def test_later_lease_is_newer(self) -> None:
        updates = [
            {"key": "a", "sequencer": 2, "commit_number": 1, "state": "new"},
            {"key": "a", "sequencer": 1, "commit_number": 900, "state": "old"},
        ]

        assert merge_updates(row_updates(updates)).column("state").to_pylist() == ["new"]


def test_seal_is_crc32_of_name_and_content() -> None:
    """It can be checked without Millpond."""
    data = encode_row_file(row_updates(EXAMPLE), PATH)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")

    assert data[footer - 12 : footer - 4] == b"MPSEAL02"
    assert int.from_bytes(data[footer - 4 : footer], "little") == zlib.crc32(
        PATH.rpartition("/")[2].encode() + data[: footer - 12] + data[footer:]
    )


@pytest.mark.parametrize("row_format", FORMATS)
def test_another_row_file_in_its_place_is_refused(row_format: RowFormat) -> None:
    """It may be an older file restored under the name."""
    objects = MemoryObjects()
    older, newer = (write(objects, many(3), token=digit * 32, row_format=row_format) for digit in "12")
    objects.put(newer.path, objects.get(older.path))

    with pytest.raises(DataError, match=newer.path):
        read_row_files(objects, [newer.path])


def test_seal_without_name_is_accepted() -> None:
    """Earlier versions wrote such seals."""
    data = bytearray(encode_row_file(row_updates(EXAMPLE), PATH))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    checksum = zlib.crc32(data[: footer - 12] + data[footer:])
    data[footer - 12 : footer] = b"MPSEAL01" + checksum.to_bytes(4, "little")
    objects = MemoryObjects()
    objects.put(PATH, bytes(data))
    data[100] ^= 1

    assert read_row_files(objects, [PATH]).equals(row_updates(EXAMPLE))
    objects.put(PATH, bytes(data))
    with pytest.raises(DataError, match="seal"):
        read_row_files(objects, [PATH])
