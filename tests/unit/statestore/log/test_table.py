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
    def test_a_table_is_made_once(self, bench: Bench) -> None:
        """A second table in the same place is refused."""
        with pytest.raises(ConflictError, match="already"):
            create_rows_table(bench.log, bench.clock, bench.rng)

    def test_of_two_makers_one_wins(self) -> None:
        """A table that another process makes first is not made again."""
        bench = Bench()
        objects = FaultyObjects(bench.memory)

        def overtake(operation: str, _path: str) -> None:
            if operation == "put_if_absent":
                bench.create()

        objects.before = overtake

        with pytest.raises(ConflictError, match="first"):
            create_rows_table(Log(objects), bench.clock, bench.rng)
        assert load(bench.log).version == 0

    def test_a_lost_reply_while_making_a_table(self) -> None:
        """A table whose making lost its reply is made."""
        bench = Bench()
        objects = FaultyObjects(bench.memory)
        objects.plan(Fault.LOST, "put_if_absent")

        assert create_rows_table(Log(objects), bench.clock, bench.rng).snapshot.version == 0

    def test_a_store_knows_itself(self, bench: Bench) -> None:
        """The table's configuration has the format and the store's id."""
        snapshot = load(bench.log)

        check_format(snapshot)
        assert len(store_id_of(snapshot)) == 32

    @pytest.mark.parametrize(
        ("configuration", "message"),
        [({}, "not a Millpond store"), ({"millpond.formatVersion": "2"}, "newer Millpond")],
    )
    def test_other_tables_are_refused(self, configuration: dict[str, str], message: str) -> None:
        """A plain Delta table and a newer store are told apart from ours."""
        bench = Bench()
        schema = pa.schema([pa.field("key", pa.string())])
        writer = create_table(
            bench.log, bench.clock, bench.rng, schema=schema, name="x", configuration=configuration
        )

        with pytest.raises(InvalidError, match=message):
            check_format(writer.snapshot)
        with pytest.raises(InvalidError):
            store_id_of(writer.snapshot)

    def test_a_partition_column_must_exist(self, bench: Bench) -> None:
        """A partition column that the schema lacks is refused."""
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
    def test_every_plain_type_has_a_name(self) -> None:
        """Arrow types become the types of Delta's schema, nested ones included."""
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

    @pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.duration("s"), pa.uint8(), pa.time64("us")])
    def test_what_plain_delta_lacks_is_refused(self, kind: pa.DataType) -> None:
        """A type that would need a table feature is refused with the column's name."""
        with pytest.raises(InvalidError, match="odd"):
            delta_schema(pa.schema([pa.field("odd", kind)]))
