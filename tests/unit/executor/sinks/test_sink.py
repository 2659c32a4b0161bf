"""Sinks that append to a Delta table."""

from __future__ import annotations

import logging
import pickle
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.sinks.columns import SinkRecord, sink_table
from millpond.executor.sinks.delta_table import DeltaSinkWriter
from millpond.executor.sinks.sink import DeltaSink, Sink, read_table
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.window import Window
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import TIMESTAMP
from millpond.statestore.rows.value_text import encode_value
from millpond.statestore.system import SystemClock, SystemRng

INSTANT = datetime(1970, 1, 1, tzinfo=UTC)
PANE = Pane(index=0, nonspeculative_index=0, timing=Timing.ON_TIME, is_last=True)


def productions(*records: tuple, blob=None) -> pa.Table:
    """Make productions of (key, at, JSON text)."""
    rows = [
        {"stream": "s", "key": key, "value": value, "value_bytes": blob, "at": at}
        for key, at, value in records
    ]
    return pa.Table.from_pylist(rows, schema=PRODUCTION_SCHEMA).drop_columns(["stream"])


def a_writer(objects, schema=None, store_id="store") -> DeltaSinkWriter:
    return DeltaSinkWriter(
        objects,
        SystemClock(),
        SystemRng(),
        name="spikes",
        record=SinkRecord.of_store(store_id, "p", "spikes"),
        schema=schema,
    )


class TestExactlyOnce:
    def test_repeated_superstep_is_written_once(self, tmp_path):
        sink = DeltaSink(str(tmp_path / "out"))
        writer = sink.open("store", "p", "spikes")
        writer.write(1, productions(("a", 5, "1")))
        writer.write(1, productions(("a", 5, "1")))

        again = sink.open("store", "p", "spikes")
        assert again.delivered == 1
        again.write(1, productions(("a", 5, "1")))
        again.write(2, productions(("b", 6, "2")))

        table = DeltaTable(str(tmp_path / "out"))
        assert sorted(table.to_pyarrow_table().column("key").to_pylist()) == ["a", "b"]
        assert table.version() == 2

    def test_concurrent_writers_write_a_superstep_once(self):
        """The writer with the old view finds out at its commit."""
        objects = MemoryObjects()
        first, second = a_writer(objects), a_writer(objects)

        first.write(1, productions(("a", 5, "1")))
        second.write(1, productions(("a", 5, "1")))

        assert second.delivered == 1
        assert len(a_writer(objects)._writer.snapshot.files) == 1

    def test_stores_that_share_a_table_count_their_own_supersteps(self):
        objects = MemoryObjects()
        a_writer(objects, store_id="one").write(7, productions(("a", 5, "1")))

        other = a_writer(objects, store_id="two")

        assert other.delivered == 0
        other.write(3, productions(("b", 6, "2")))
        assert other.delivered == 3

    def test_empty_superstep_writes_nothing(self):
        objects = MemoryObjects()
        writer = a_writer(objects)

        writer.write(4, productions())

        assert writer.delivered == 0
        assert len(objects.list("")) == 1


class TestColumns:
    def test_value_without_a_schema_is_json_text(self, tmp_path):
        writer = DeltaSink(str(tmp_path)).open("store", "p", "spikes")

        writer.write(1, productions(("a", 5, '{"n":1}')))

        [row] = DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist()
        assert row == {"key": "a", "at": datetime(1970, 1, 1, 0, 0, 0, 5, tzinfo=UTC), "value": '{"n":1}'}

    def test_fields_become_the_columns_of_a_schema(self, tmp_path):
        schema = pa.schema(
            [
                ("key", pa.string()),
                ("n", pa.int64()),
                ("share", pa.float64()),
                ("day", pa.timestamp("us", tz="UTC")),
                ("tags", pa.list_(pa.string())),
                ("where", pa.struct([("city", pa.string())])),
                ("absent", pa.string()),
            ]
        )
        value = (
            '{"n":1,"share":2,"day":"2013-02-08T00:00:00Z","tags":["x"],"where":{"city":"Bergen"},"extra":1}'
        )
        writer = DeltaSink(str(tmp_path), schema).open("store", "p", "spikes")

        writer.write(1, productions(("a", 5, value)))

        [row] = DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist()
        assert row == {
            "key": "a",
            "n": 1,
            "share": 2.0,
            "day": datetime(2013, 2, 8, tzinfo=UTC),
            "tags": ["x"],
            "where": {"city": "Bergen"},
            "absent": None,
        }

    def test_column_without_values_is_warned_of_once(self, caplog):
        """The warning shows the misspelt column and the fields that exist."""
        caplog.set_level(logging.WARNING, "millpond")
        writer = a_writer(MemoryObjects(), pa.schema([("key", pa.string()), ("volme", pa.int64())]))
        for superstep in (1, 2):
            writer.write(superstep, productions(("a", superstep, '{"volume":1}')))

        (warning,) = [record.getMessage() for record in caplog.records]
        assert "sink=`spikes` columns=`['volme']` fields=`['volume']`" in warning

    def test_value_without_fields_or_a_value_column_is_refused(self):
        """The number would be lost."""
        schema = pa.schema([("key", pa.string()), ("count", pa.int64())])
        with pytest.raises(InvalidError, match=r"no fields.*sink=`s`.*key=`a` value=`7`"):
            sink_table(productions(("a", 1, "7")), schema, "s")

    def test_key_and_at_come_from_the_record(self):
        """Fields of the value do not shadow them; a plain value fills the column ``value``."""
        schema = pa.schema(
            [("key", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("value", pa.int64())]
        )

        table = sink_table(productions(("a", 5, '{"key":"x","at":9,"value":3}'), ("b", 6, "4")), schema, "s")

        assert table.column("key").to_pylist() == ["a", "b"]
        assert table.column("at").cast(pa.int64()).to_pylist() == [5, 6]
        assert table.column("value").to_pylist() == [3, 4]

    @pytest.mark.parametrize(
        ("kind", "good", "bad"),
        [
            (pa.int64(), "1", '"x"'),
            (pa.int8(), "1", "1000"),
            (pa.timestamp("us", tz="UTC"), '"1970-01-01T00:00:00Z"', '"soon"'),
            (pa.struct([("n", pa.int64())]), '{"n":1}', "5"),
            (pa.int64(), "2.0", "2.75"),
            (pa.float32(), "1.5", "1e40"),
            (pa.float32(), "0.0", "1e-50"),
            (pa.list_(pa.int64()), "[1,2.0]", "[2.75]"),
            (pa.struct([("n", pa.int64())]), '{"n":1}', '{"n":1.5}'),
            (pa.map_(pa.string(), pa.float32()), '{"a":1}', '{"a":1e39}'),
            (pa.decimal128(5, 2), "1.25", "1.255"),
            (pa.list_(pa.date32()), '["2026-01-01"]', '["soon"]'),
            (pa.struct([pa.field("n", pa.int64(), nullable=False)]), '{"n":1}', '{"n":null}'),
            (pa.list_(pa.field("n", pa.int64(), nullable=False)), "[1]", "[1,null]"),
            (pa.map_(pa.string(), pa.field("n", pa.int64(), nullable=False)), '{"a":1}', '{"a":null}'),
        ],
    )
    def test_value_of_the_wrong_type_names_sink_column_and_key(self, kind, good, bad):
        records = productions(("fine", 1, f'{{"n":{good}}}'), ("broken", 2, f'{{"n":{bad}}}'))

        with pytest.raises(InvalidError, match=r"sink=`s` column=`n` .* key=`broken`"):
            sink_table(records, pa.schema([("n", kind)]), "s")
        assert sink_table(records.slice(0, 1), pa.schema([("n", kind)]), "s").column("n").null_count == 0

    def test_typed_cells_keep_their_value_or_are_refused(self):
        schema = pa.schema([("n", pa.int64()), ("day", pa.date32())])
        fine = {"n": Decimal("2.00"), "day": date(2026, 1, 31)}
        assert sink_table(productions(("a", 1, encode_value(fine))), schema, "s").to_pylist() == [
            {"n": 2, "day": date(2026, 1, 31)}
        ]
        noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
        for name, cell in (("n", Decimal("1.99")), ("day", noon)):
            with pytest.raises(InvalidError, match=f"column=`{name}`"):
                sink_table(productions(("a", 1, encode_value({**fine, name: cell}))), schema, "s")

    @pytest.mark.parametrize(
        ("kind", "good", "bad"),
        [
            (pa.timestamp("us", "UTC"), 5.0, 5.5),
            (pa.timestamp("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1)),  # noqa: DTZ001
            (pa.timestamp("us", "UTC"), None, date(2026, 1, 1)),
            (pa.timestamp("us", "UTC"), None, "2026-01-01T00:00:00.000000001Z"),
            (pa.float64(), 1.5, True),
            (pa.list_(pa.float64()), [1.5, 1], [1.5, True]),
            (pa.struct([("n", pa.float32())]), {"n": 1.5}, {"n": False}),
            (pa.int64(), 1, True),
            (pa.bool_(), True, 1),
            (pa.string(), "abc", b"abc"),
            (pa.list_(pa.string()), ["abc"], [b"abc"]),
            (pa.binary(), b"abc", "abc"),
            (pa.map_(pa.string(), pa.binary()), {"a": b"b"}, {"a": "b"}),
            (pa.struct([("city", pa.string())]), {"city": "Bergen"}, {"city": "Bergen", "zip": 5003}),
            (pa.list_(pa.struct([("city", pa.string())])), [{"city": "Oslo"}, None], [{"town": "Oslo"}]),
            (pa.struct([("n", pa.int64())]), {"n": 1}, [1]),
            (pa.list_(pa.string()), ["abc"], "abc"),
            (pa.list_(pa.int64()), [97], b"a"),
            (pa.list_(pa.string()), [], {"a": 1}),
            (pa.map_(pa.string(), pa.string()), {"a": "b"}, ["ab", "cd"]),
            (pa.string(), "1.10", Decimal("1.10")),
            (pa.float64(), 1.5, Decimal("1.5")),
            (pa.float64(), 2**53, 2**53 + 1),
            (pa.float64(), float("nan"), 2**70 + 1),
            (pa.decimal128(5, 2), Decimal("1.10"), float("nan")),
        ],
    )
    def test_cell_that_would_change_is_refused(self, kind, good, bad):
        """Arrow would take text for a list of letters, bytes for text, and True for 1.0."""
        schema, value = pa.schema([("n", kind)]), {"n": good}
        [row] = sink_table(productions(("a", 1, encode_value(value))), schema, "s").to_pylist(
            maps_as_pydicts="strict"
        )
        assert repr(row["n"]) == repr(good) or row["n"] == good or good == 5.0

        records = productions(("fine", 1, encode_value(value)), ("broken", 2, encode_value({"n": bad})))
        with pytest.raises(InvalidError, match=r"sink=`s` column=`n` .* key=`broken`"):
            sink_table(records, schema, "s")

    def test_unknown_field_of_a_struct_is_told_by_name(self):
        schema = pa.schema([("where", pa.struct([("city", pa.string())]))])

        with pytest.raises(InvalidError, match=r"no such field; did you mean .*city.* unknown=`\['ctiy'\]`"):
            sink_table(productions(("a", 1, '{"where":{"ctiy":"Bergen"}}')), schema, "s")

    def test_fields_of_a_pane_stand_before_those_of_its_envelope(self):
        """Only key and time are always the record's."""
        names = ("key", "at", "value", "window", "window_start", "window_end", "is_retraction")
        inner = {"value": 1, "window": 2, "window_start": 3, "is_retraction": 4, "at": 5, "key": 6}
        schema = pa.schema(
            [
                (name, {"key": pa.string(), "at": TIMESTAMP, "window_end": TIMESTAMP}.get(name, pa.int64()))
                for name in names
            ]
        )
        pane = WindowedValue(value=inner, window=Window(7, 8), at=9, pane=PANE)

        [row] = sink_table(productions(("a", 5, encode_value(pane.to_json()))), schema, "s").to_pylist()

        moments = {
            "at": INSTANT + timedelta(microseconds=5),
            "window_end": INSTANT + timedelta(microseconds=8),
        }
        assert row == {"key": "a", **moments, "value": 1, "window": 2, "window_start": 3, "is_retraction": 4}

    def test_columns_of_a_pane_without_such_fields_are_of_its_envelope(self):
        schema = pa.schema(
            [("window_start", TIMESTAMP), ("is_retraction", pa.bool_()), ("value", pa.float64())]
        )
        pane = WindowedValue(value=float("inf"), window=Window(0, 8), at=9, pane=PANE)

        [row] = sink_table(productions(("a", 5, encode_value(pane.to_json()))), schema, "s").to_pylist()

        assert row == {"window_start": INSTANT, "is_retraction": False, "value": float("inf")}

    @pytest.mark.parametrize(
        ("name", "kind", "keys"),
        [
            ("key", pa.int64(), ["7", "007"]),
            ("key", pa.int64(), ["7", "seven"]),
            ("key", pa.bool_(), ["true", "1"]),
            ("at", pa.date32(), ["a", "b"]),
        ],
    )
    def test_own_column_never_makes_two_records_alike(self, name, kind, keys):
        records = productions(*((key, 86_400_000_000 + row, "1") for row, key in enumerate(keys)))
        schema = pa.schema([(name, kind)])

        assert sink_table(records.slice(0, 1), schema, "s").num_rows == 1
        with pytest.raises(InvalidError, match=f"key or time does not fit.*sink=`s` column=`{name}`"):
            sink_table(records, schema, "s")

    def test_null_in_a_required_column_is_refused(self):
        schema = pa.schema([pa.field("n", pa.int64(), nullable=False)])

        with pytest.raises(InvalidError, match="key=`a`"):
            sink_table(productions(("a", 1, "{}")), schema, "s")

    def test_bytes_and_damaged_values_are_refused(self):
        with pytest.raises(InvalidError, match="sink=`s`"):
            sink_table(productions(("a", 1, None), blob=b"x"), None, "s")
        with pytest.raises(DataError, match="sink=`s`"):
            sink_table(productions(("a", 1, "{")), pa.schema([("n", pa.int64())]), "s")


class TestPlace:
    def test_table_with_other_columns_is_refused(self):
        objects = MemoryObjects()
        a_writer(objects, pa.schema([("n", pa.int64())])).write(1, productions(("a", 1, '{"n":1}')))

        with pytest.raises(InvalidError, match=r"another path.*column=`n` wanted=`string` found=`long`"):
            a_writer(objects, pa.schema([("n", pa.string())]))
        with pytest.raises(InvalidError, match=r"column=`m`"):
            a_writer(objects, pa.schema([("n", pa.int64()), pa.field("m", pa.int64(), nullable=False)]))

    def test_empty_table_takes_the_columns_of_the_corrected_schema(self, tmp_path):
        """A wrong schema fails at its first value, after the table was created."""
        wrong, right = (pa.schema([("key", pa.string()), ("n", kind)]) for kind in (pa.bool_(), pa.float64()))
        with pytest.raises(InvalidError, match="does not fit its column"):
            DeltaSink(str(tmp_path), wrong).open("store", "p", "spikes").write(
                1, productions(("a", 5, '{"n":1}'))
            )

        DeltaSink(str(tmp_path), right).open("store", "p", "spikes").write(
            1, productions(("a", 5, '{"n":1}'))
        )

        assert DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist() == [{"key": "a", "n": 1.0}]

    def test_table_with_rows_takes_additional_columns(self, tmp_path):
        before = pa.schema([("key", pa.string())])
        DeltaSink(str(tmp_path), before).open("store", "p", "spikes").write(
            1, productions(("a", 5, '{"n":1}'))
        )
        after = pa.schema([("key", pa.string()), ("n", pa.int64())])
        DeltaSink(str(tmp_path), after).open("store", "p", "spikes").write(
            2, productions(("b", 5, '{"n":2}'))
        )

        rows = DeltaTable(str(tmp_path)).to_pyarrow_table().sort_by("key").to_pylist()
        assert rows == [{"key": "a", "n": None}, {"key": "b", "n": 2}]

    def test_empty_table_of_another_program_is_refused(self, tmp_path):
        """Only a sink of the same name may change its columns."""
        DeltaTable.create(str(tmp_path), pa.schema([("n", pa.int64())]), name="other")

        with pytest.raises(InvalidError, match="other columns"):
            DeltaSink(str(tmp_path), pa.schema([("n", pa.string())])).open("store", "p", "spikes")
        assert DeltaTable(str(tmp_path)).version() == 0

    def test_path_of_a_file_is_refused_when_opened(self, tmp_path):
        """A later error would come after records were processed."""
        (tmp_path / "file").write_text("x")

        with pytest.raises(UnavailableError):
            DeltaSink(str(tmp_path / "file")).open("store", "p", "spikes")

    def test_spellings_of_a_path_have_one_identity(self, tmp_path):
        sink = DeltaSink(str(tmp_path), pa.schema([("n", pa.int64())]))

        assert isinstance(sink, Sink)
        assert sink.identity == DeltaSink(f"{tmp_path}/").identity == DeltaSink(f"file://{tmp_path}").identity
        assert DeltaSink("s3://b/x/").identity == "s3://b/x"

    def test_path_object_is_the_same_table_as_its_text(self, tmp_path):
        sink = DeltaSink(tmp_path / "out").following("os_cache")
        sink.open("store", "p", "spikes").write(1, productions(("a", 5, "1")))

        assert sink.identity == DeltaSink(str(tmp_path / "out")).identity
        assert sink.read().num_rows == 1
        assert pickle.loads(pickle.dumps(sink)) == sink

    def test_durability_follows_the_store_by_default(self, tmp_path):
        """For a bucket there is no choice."""
        path = str(tmp_path)

        assert DeltaSink(path).following("disk").durability == "disk"
        assert DeltaSink(path, durability="os_cache").following("disk").durability == "os_cache"
        assert DeltaSink("s3://bucket/table").following("os_cache").durability is None
        with pytest.raises(InvalidError, match="tape"):
            DeltaSink(path, durability="tape")

    def test_empty_path_and_unsupported_type_are_refused_when_declared(self):
        with pytest.raises(InvalidError, match="path"):
            DeltaSink("")
        with pytest.raises(InvalidError, match="column=`t`"):
            DeltaSink("x", pa.schema([("t", pa.duration("us"))]))
        with pytest.raises(InvalidError, match="produce times with a zone column=`t`"):
            DeltaSink("x", pa.schema([("t", pa.timestamp("us"))]))

    def test_dates_and_decimals_are_parsed_from_text(self):
        """JSON has no such types."""
        schema = pa.schema([("d", pa.date32()), ("m", pa.decimal128(9, 2))])

        table = sink_table(productions(("a", 1, '{"d":"2013-02-08","m":"1.10"}')), schema, "s")

        assert table.to_pylist() == [{"d": date(2013, 2, 8), "m": Decimal("1.10")}]


class TestRead:
    def test_read_returns_all_appended_rows(self, tmp_path):
        schema = pa.schema(
            [("key", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("count", pa.int64())]
        )
        sink = DeltaSink(str(tmp_path / "out"), schema)
        writer = sink.open("store", "p", "spikes")
        writer.write(1, productions(("a", 5, '{"count":1}')))
        writer.write(2, productions(("a", 6, '{"count":2}'), ("b", 7, '{"count":1}')))

        rows = sink.read().sort_by("at")

        assert rows.schema == schema
        assert rows.column("key").to_pylist() == ["a", "a", "b"]
        assert rows.column("count").to_pylist() == [1, 2, 1]
        assert rows.column("at").to_pylist()[0] == datetime(1970, 1, 1, 0, 0, 0, 5, tzinfo=UTC)
        assert read_table(tmp_path / "out").sort_by("at") == rows

    def test_read_returns_current_rows_of_an_upsert(self, tmp_path):
        """The folder still contains the file of the replaced row."""
        schema = pa.schema([("key", pa.string()), ("count", pa.int64())])
        sink = DeltaSink(str(tmp_path / "out"), schema, mode="upsert")
        writer = sink.open("store", "p", "spikes")
        writer.write(1, productions(("a", 5, '{"count":1}'), ("b", 5, '{"count":1}')))
        writer.write(2, productions(("a", 6, '{"count":2}')))

        expected = [{"key": "a", "count": 2}, {"key": "b", "count": 1}]
        assert sink.read().sort_by("key").to_pylist() == expected
        assert read_table(str(tmp_path / "out")).sort_by("key").to_pylist() == expected

    def test_table_without_rows_has_its_columns(self, tmp_path):
        sink = DeltaSink(str(tmp_path / "out"))
        sink.open("store", "p", "spikes")

        assert sink.read().num_rows == 0
        assert sink.read().column_names == ["key", "at", "value"]

    def test_missing_table_is_named(self, tmp_path):
        with pytest.raises(InvalidError, match=r"there is no Delta table at this path path=`.*nothing`"):
            read_table(tmp_path / "nothing")

    @pytest.mark.parametrize("is_link", [True, False])
    def test_table_that_names_a_file_outside_is_damage(self, tmp_path, is_link):
        root, outside = tmp_path / "out", tmp_path / "outside.parquet"
        sink = DeltaSink(str(root))
        sink.open("store", "p", "spikes").write(1, productions(("a", 5, "1")))
        (own,) = root.glob("*.parquet")
        own.rename(outside)
        if is_link:
            own.symlink_to(outside)
        else:
            newest = max((root / "_delta_log").glob("*.json"))
            lines = [orjson.loads(line) for line in newest.read_bytes().splitlines()]
            for line in lines:
                line.get("add", {})["path"] = outside.as_uri()
                line.get("commitInfo", {}).pop("millpond", None)
            newest.write_bytes(b"\n".join(map(orjson.dumps, lines)))

        with pytest.raises(DataError, match="must not be links" if is_link else "outside of the table"):
            read_table(root)

    def test_table_with_a_missing_file_is_unavailable(self, tmp_path):
        sink = DeltaSink(str(tmp_path / "out"))
        sink.open("store", "p", "spikes").write(1, productions(("a", 5, "1")))
        for file in (tmp_path / "out").glob("*.parquet"):
            file.unlink()

        with pytest.raises(UnavailableError, match="the Delta table cannot be read"):
            sink.read()
