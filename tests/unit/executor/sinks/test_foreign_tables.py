"""Sinks into tables that another program made: each is written rightly, or refused before the first row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.table import TableFeatures

from millpond.executor.sinks.sink import DeltaSink, SinkWriter
from millpond.statestore.errors import InvalidError
from tests.unit.executor.sinks.test_sink import productions

COLUMNS = pa.schema([("key", pa.string()), ("n", pa.int64())])
UPSERT = {"mode": "upsert", "keys": ["key"]}


def made(path: Path, columns: Any = COLUMNS, **properties: str) -> DeltaTable:
    return DeltaTable.create(str(path), columns, configuration=properties)


def opened(path: Path, schema: pa.Schema = COLUMNS, **options: Any) -> SinkWriter:
    return DeltaSink(str(path), schema, **options).open("store", "p", "spikes")


def rows(path: Path) -> list[dict[str, Any]]:
    return DeltaTable(str(path)).to_pyarrow_table().to_pylist()


def with_feature(table: DeltaTable, *names: str) -> None:
    features = [getattr(TableFeatures, name) for name in names]
    table.alter.add_feature(features, allow_protocol_versions_increase=True)


def changed(
    table: DeltaTable,
    *features: str,
    reader: bool = False,
    rules: dict[str, Any] | None = None,
    protocol: dict[str, Any] | None = None,
) -> None:
    """Commit what only Spark can make: features, and rules of the column ``n``."""
    log = Path(table.table_uri.removeprefix("file://")) / "_delta_log"
    lines = [
        orjson.loads(line) for file in sorted(log.glob("*.json")) for line in file.read_bytes().splitlines()
    ]
    metadata = [line["metaData"] for line in lines if "metaData" in line][-1]
    schema = orjson.loads(metadata["schemaString"])
    schema["fields"][1]["metadata"] |= rules or {}
    metadata["schemaString"] = orjson.dumps(schema).decode()
    listed: dict[str, Any] = {"minReaderVersion": 3 if reader else 1, "minWriterVersion": 7}
    listed |= {"writerFeatures": features, **({"readerFeatures": features} if reader else {})}
    commit = [
        {"commitInfo": {"timestamp": 0, "operation": "UPGRADE PROTOCOL", "engineInfo": "Apache-Spark"}},
        {"protocol": protocol or listed},
        {"metaData": metadata},
    ]
    (log / f"{table.version() + 1:020d}.json").write_bytes(b"\n".join(map(orjson.dumps, commit)))


def constrained(table: DeltaTable) -> None:
    table.alter.add_constraint({"positive": "n > 0"})


class TestWritten:
    def test_append_only_table_takes_appends_and_compactions(self, tmp_path: Path) -> None:
        made(tmp_path, **{"delta.appendOnly": "true"})
        writer = opened(tmp_path)
        for superstep in range(1, 40):
            writer.write(superstep, productions(("a", 5, f'{{"n":{superstep}}}')))
            if work := writer.upkeep.due():  # type: ignore[attr-defined]
                work()

        table = DeltaTable(str(tmp_path))
        assert sorted(row["n"] for row in rows(tmp_path)) == list(range(1, 40))
        assert "OPTIMIZE" in {entry["operation"] for entry in table.history()}

    def test_required_column_takes_values_and_no_nulls(self, tmp_path: Path) -> None:
        required = pa.schema(
            [pa.field("key", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)]
        )
        for options in ({}, UPSERT):
            path = tmp_path / options.get("mode", "append")
            made(path, required)
            writer = opened(path, **options)
            writer.write(1, productions(("a", 5, '{"n":1}')))

            with pytest.raises(InvalidError, match=r"takes no nulls.*sink=`spikes` column=`n` key=`b`"):
                writer.write(2, productions(("a", 6, '{"n":2}'), ("b", 6, "{}")))
            with pytest.raises(InvalidError, match=r"takes no nulls.*column=`key`"):
                writer.write(2, productions((None, 6, '{"n":2}')))
            assert rows(path) == [{"key": "a", "n": 1}]

    def test_changes_of_appends_are_in_the_feed(self, tmp_path: Path) -> None:
        made(tmp_path, **{"delta.enableChangeDataFeed": "true"})
        opened(tmp_path).write(1, productions(("a", 5, '{"n":1}')))

        (change,) = pa.table(DeltaTable(str(tmp_path)).load_cdf().read_all()).to_pylist()
        assert (change["key"], change["n"], change["_change_type"]) == ("a", 1, "insert")

    def test_checkpoint_keeps_listed_features_without_duties(self, tmp_path: Path) -> None:
        with_feature(made(tmp_path), "AppendOnly", "ChangeDataFeed", "CheckConstraints", "GeneratedColumns")
        before = DeltaTable(str(tmp_path)).protocol()
        writer = opened(tmp_path)
        for superstep in range(1, 40):
            writer.write(superstep, productions(("a", 5, f'{{"n":{superstep}}}')))
            if work := writer.upkeep.due():  # type: ignore[attr-defined]
                work()
        newest = max((tmp_path / "_delta_log").glob("*.checkpoint.parquet"))
        for commit in (tmp_path / "_delta_log").glob("*.json"):
            if commit.name[:20] <= newest.name[:20]:
                commit.unlink()

        assert DeltaTable(str(tmp_path)).protocol() == before
        assert len(rows(tmp_path)) == 39
        opened(tmp_path).write(40, productions(("a", 5, '{"n":40}')))
        assert len(rows(tmp_path)) == 40

    def test_table_whose_constraint_was_dropped_is_written(self, tmp_path: Path) -> None:
        table = made(tmp_path)
        constrained(table)
        table.alter.drop_constraint("positive")
        opened(tmp_path).write(1, productions(("a", 5, '{"n":-1}')))

        assert rows(tmp_path) == [{"key": "a", "n": -1}]

    def test_column_with_a_default_is_written_where_the_sink_fills_it(self, tmp_path: Path) -> None:
        changed(made(tmp_path), "allowColumnDefaults", rules={"CURRENT_DEFAULT": "7"})
        opened(tmp_path).write(1, productions(("a", 5, '{"n":1}')))

        with pytest.raises(InvalidError, match="feature=`allowColumnDefaults` by=`n`"):
            opened(tmp_path, pa.schema([("key", pa.string())]))


REFUSED: dict[str, tuple[Any, str, str]] = {
    "check": (constrained, "checkConstraints` by=`delta.constraints.positive", "DROP CONSTRAINT positive"),
    "vectors": (lambda table: with_feature(table, "DeletionVectors"), "deletionVectors", "DROP FEATURE"),
    "mapping": (lambda table: with_feature(table, "ColumnMapping"), "columnMapping", "DROP FEATURE"),
    "ntz": (lambda table: with_feature(table, "TimestampWithoutTimezone"), "timestampNtz", "DROP FEATURE"),
    "checkpoints": (lambda table: with_feature(table, "V2Checkpoint"), "v2Checkpoint", "DROP FEATURE"),
    "tracking": (lambda table: with_feature(table, "RowTracking"), "rowTracking", "DROP FEATURE"),
    "domains": (lambda table: with_feature(table, "DomainMetadata"), "domainMetadata", "DROP FEATURE"),
    "iceberg": (lambda table: with_feature(table, "IcebergCompatV1"), "icebergCompatV1", "DROP FEATURE"),
    "clustering": (
        lambda table: changed(table, "clustering", "domainMetadata"),
        "clustering",
        "DROP FEATURE",
    ),
    "unknown": (lambda table: changed(table, "brandNew"), "brandNew", "DROP FEATURE brandNew"),
    "unknown_to_readers": (lambda table: changed(table, "brandNew", reader=True), "brandNew", "DROP FEATURE"),
    "times": (lambda table: changed(table, "inCommitTimestamp"), "inCommitTimestamp", "DROP FEATURE"),
    "generated": (
        lambda table: changed(table, "generatedColumns", rules={"delta.generationExpression": "1"}),
        "generatedColumns` by=`n`",
        "another path",
    ),
    "identity": (
        lambda table: changed(table, "identityColumns", rules={"delta.identity.start": 1}),
        "identityColumns` by=`n`",
        "another path",
    ),
    "invariant": (
        lambda table: changed(
            table,
            rules={"delta.invariants": '{"expression":{"expression":"n > 0"}}'},
            protocol={"minReaderVersion": 1, "minWriterVersion": 2},
        ),
        "invariants` by=`n`",
        "another path",
    ),
    "length": (
        lambda table: changed(table, rules={"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}),
        r"varchar\(3\)` by=`n`",
        "another path",
    ),
    "old_mapping": (
        lambda table: changed(table, protocol={"minReaderVersion": 2, "minWriterVersion": 5}),
        "columnMapping",
        "another path",
    ),
    "newer_reader": (
        lambda table: changed(table, protocol={"minReaderVersion": 4, "minWriterVersion": 7}),
        "newer Delta reader than Millpond, version 4",
        "another path",
    ),
    "newer_writer": (
        lambda table: changed(table, protocol={"minReaderVersion": 1, "minWriterVersion": 8}),
        "newer Delta writer than Millpond, version 8",
        "another path",
    ),
}


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    @pytest.mark.parametrize("options", [{}, UPSERT], ids=["append", "upsert"])
    def test_feature_is_refused_when_opened(self, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
        make, feature, mend = REFUSED[name]
        table = made(tmp_path)
        make(table)
        before = sorted(tmp_path.rglob("*"))

        with pytest.raises(InvalidError, match=rf"{mend}.*sink=`spikes`? ?.*feature=`{feature}") as caught:
            opened(tmp_path, **options)
        assert f"path=`{tmp_path}`" in str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("name", REFUSED)
    def test_feature_that_comes_later_is_refused_by_the_next_commit(self, tmp_path: Path, name: str) -> None:
        make, feature, _ = REFUSED[name]
        made(tmp_path)
        writer = opened(tmp_path)
        writer.write(1, productions(("a", 5, '{"n":1}')))
        make(DeltaTable(str(tmp_path)))
        version = len(list((tmp_path / "_delta_log").glob("*.json")))

        with pytest.raises(InvalidError, match=f"feature=`{feature}"):
            writer.write(2, productions(("a", 6, '{"n":-2}')))
        assert len(list((tmp_path / "_delta_log").glob("*.json"))) == version

    @pytest.mark.parametrize("name", ["delta.appendOnly", "delta.enableChangeDataFeed"])
    def test_upsert_is_refused_where_rows_stay_or_changes_are_fed(self, tmp_path: Path, name: str) -> None:
        made(tmp_path / "made", **{name: "true"})
        with pytest.raises(
            InvalidError, match=f"cannot rewrite rows.*unset {name}, or give the sink another path"
        ):
            opened(tmp_path / "made", **UPSERT)

        writer = opened(tmp_path / "own", **UPSERT)
        writer.write(1, productions(("a", 5, '{"n":1}')))
        DeltaTable(str(tmp_path / "own")).alter.set_table_properties({name: "true"})
        with pytest.raises(InvalidError, match=f"by=`{name}`"):
            writer.write(2, productions(("a", 6, '{"n":2}')))
        assert rows(tmp_path / "own") == [{"key": "a", "n": 1}]

    def test_columns_that_differ_only_by_case_are_refused(self, tmp_path: Path) -> None:
        both = [("n", pa.int64()), ("N", pa.int64())]
        for schema in (pa.schema(both), pa.schema([("s", pa.struct(both))])):
            with pytest.raises(InvalidError, match=r"more than case column=`N` other=`n`"):
                DeltaSink(str(tmp_path), schema)
        opened(tmp_path).write(1, productions(("a", 5, '{"n":1}')))

        with pytest.raises(InvalidError, match=r"other columns.*column=`N` wanted=`long` found=`n`"):
            opened(tmp_path, pa.schema([("key", pa.string()), ("N", pa.int64())]))

    def test_required_column_that_the_sink_lacks_is_refused(self, tmp_path: Path) -> None:
        made(tmp_path, pa.schema([("key", pa.string()), pa.field("m", pa.int64(), nullable=False)]))

        with pytest.raises(InvalidError, match=r"take no nulls.*columns=`\['m'\]`"):
            opened(tmp_path, pa.schema([("key", pa.string())]))

    def test_column_that_becomes_required_is_told(self, tmp_path: Path) -> None:
        writer = opened(tmp_path)
        required = pa.schema([("key", pa.string()), pa.field("n", pa.int64(), nullable=False)])
        DeltaTable.create(str(tmp_path), required, mode="overwrite")

        with pytest.raises(InvalidError, match="take nulls: start again"):
            writer.write(1, productions(("a", 5, "{}")))
        assert rows(tmp_path) == []
