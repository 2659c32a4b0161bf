"""Tables at version 0."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pytest

from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.log.action import delta_schema
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import check_format, create_rows_table, create_table, store_id_of
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from tests.fixtures.commit_requests import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench().create()


class TestTables:
    def test_table_is_created_once(self, bench: Bench) -> None:
        with pytest.raises(ConflictError, match="already"):
            create_rows_table(bench.log, bench.clock, bench.rng)

    def test_concurrent_creation_has_one_winner(self) -> None:
        bench = Bench()
        objects = FaultyObjects(bench.memory)

        def overtake(operation: str, _path: str) -> None:
            if operation == "put_if_absent":
                bench.create()

        objects.before = overtake

        with pytest.raises(ConflictError, match="first"):
            create_rows_table(Log(objects), bench.clock, bench.rng)
        assert load(bench.log).version == 0

    def test_lost_reply_to_creation_is_success(self) -> None:
        bench = Bench()
        objects = FaultyObjects(bench.memory)
        objects.plan(Fault.LOST, "put_if_absent")

        assert create_rows_table(Log(objects), bench.clock, bench.rng).snapshot.version == 0

    def test_configuration_has_format_and_store_id(self, bench: Bench) -> None:
        snapshot = load(bench.log)

        check_format(snapshot)
        assert len(store_id_of(snapshot)) == 32

    @pytest.mark.parametrize(
        ("configuration", "message"),
        [({}, "not a Millpond store"), ({"millpond.formatVersion": "2"}, "newer Millpond")],
    )
    def test_foreign_and_newer_tables_are_refused(self, configuration: dict[str, str], message: str) -> None:
        bench = Bench()
        schema = pa.schema([pa.field("key", pa.string())])
        writer = create_table(
            bench.log, bench.clock, bench.rng, schema=schema, name="x", configuration=configuration
        )

        with pytest.raises(InvalidError, match=message):
            check_format(writer.snapshot)
        with pytest.raises(InvalidError):
            store_id_of(writer.snapshot)

    def test_partition_column_must_exist(self, bench: Bench) -> None:
        with pytest.raises(InvalidError, match="nope"):
            create_table(
                bench.log,
                bench.clock,
                bench.rng,
                schema=pa.schema([]),
                name="x",
                partition_columns=("nope",),
            )


class TestSchema:
    def test_arrow_types_have_delta_names(self) -> None:
        schema = pa.schema(
            [
                pa.field("a", pa.int64(), nullable=False),
                pa.field("b", pa.list_(pa.struct([pa.field("c", pa.timestamp("us", tz="UTC"))]))),
                pa.field("d", pa.map_(pa.string(), pa.decimal128(10, 2))),
            ]
        )

        fields = {field["name"]: field for field in orjson.loads(delta_schema(schema))["fields"]}

        assert (fields["a"]["type"], fields["a"]["nullable"]) == ("long", False)
        assert fields["b"]["type"]["elementType"]["fields"][0]["type"] == "timestamp"
        assert (fields["d"]["type"]["keyType"], fields["d"]["type"]["valueType"]) == (
            "string",
            "decimal(10,2)",
        )

    @pytest.mark.parametrize(
        "kind",
        [
            pa.timestamp("us"),
            pa.duration("s"),
            pa.uint8(),
            pa.time64("us"),
            pa.decimal128(5, -2),
            pa.decimal128(2, 5),
        ],
    )
    def test_type_needing_table_feature_is_refused(self, kind: pa.DataType) -> None:
        with pytest.raises(InvalidError, match="odd"):
            delta_schema(pa.schema([pa.field("odd", kind)]))
