"""``millpond export``."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

from millpond.cli.main import main
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.rows.codec import JsonCodec, MsgpackCodec
from millpond.statestore.store import Store
from tests.fixtures.computations import Count

pytestmark = pytest.mark.zookeeper

_NOON = 43_200_000_000


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "pond"
    with Store.open(path) as store:
        rows = [
            {"key": f"k{n:03d}", "state": {"n": n}, "timers": [{"at": _NOON + n, "tag": "t"}]}
            for n in range(200)
        ]
        store.load("counts", rows, intervals=4)
        store.load("others", [{"key": "it's", "state": "x\ny"}])
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows_of(path: Path, computation: str, version: int | None = None) -> list[dict[str, Any]]:
    with Store.open(path, read_only=True) as store:
        table = store.rows_view(computation, version).to_arrow()
        return table.drop_columns(["superstep", "sequencer", "commit_number"]).to_pylist()


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_exported_rows_can_be_loaded(pond: Path, tmp_path: Path, form: str) -> None:
    said = invoke("export", pond, tmp_path / "tables", "--format", form, "--for-load")

    assert said.exit_code == 0, said.output
    assert "200 rows of counts" in said.stdout
    for name in ("counts", "others"):
        file = tmp_path / "tables" / f"{name}.{form}"
        assert invoke("load", tmp_path / "again", name, file, "--create").exit_code == 0
        assert rows_of(tmp_path / "again", name) == rows_of(pond, name)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_exported_states_keep_types_and_bytes(tmp_path: Path, form: str) -> None:
    states = [{"n": Decimal("1.10")}, [2**70], None, {"$types": {"/n": "decimal"}, "n": "1"}, " x", {"n": 5}]
    with Store.open(tmp_path / "pond") as store:
        texts = [JsonCodec().encode(state) for state in states]
        store.load("json", pa.table({"key": ["", *"12345"], "state": texts}))
        store.load(
            "msgpack", [{"key": "a", "state": b"\xff"}, {"key": "b", "state": 40}], codec=MsgpackCodec()
        )
    assert invoke("export", tmp_path / "pond", tmp_path / "t", "--format", form, "--for-load").exit_code == 0

    for name in ("json", "msgpack"):
        said = invoke(
            "load", tmp_path / "again", name, tmp_path / "t" / f"{name}.{form}", "--create", "--codec", name
        )
        assert said.exit_code == 0, said.output
    found = rows_of(tmp_path / "again", "json")
    assert [JsonCodec().decode(row["state"]) for row in found] == states
    assert rows_of(tmp_path / "again", "msgpack") == rows_of(tmp_path / "pond", "msgpack")


def test_delta_reader_reads_export(pond: Path, tmp_path: Path) -> None:
    said = invoke(
        "export", pond, tmp_path / "tables", "counts", "--format", "delta", "--version", "2", "--json"
    )

    table = DeltaTable(str(tmp_path / "tables" / "counts"))
    assert json.loads(said.stdout) == {
        "computation": "counts", "path": str(tmp_path / "tables" / "counts"), "rows": 200, "version": 2,
    }  # fmt: skip
    found = table.to_pyarrow_table()
    assert found.num_rows == 200
    assert {"key", "state", "timers", "hold", "superstep"} <= set(found.column_names)
    assert not (tmp_path / "tables" / "others").exists()


def test_delta_export_of_name_like_a_file_is_delta_table(tmp_path: Path) -> None:
    with Store.open(tmp_path / "pond") as store:
        store.load("day.csv", [{"key": "a", "state": 1}])

    assert invoke("export", tmp_path / "pond", tmp_path / "tables", "--format", "delta").exit_code == 0

    assert DeltaTable(str(tmp_path / "tables" / "day.csv")).to_pyarrow_table().num_rows == 1


def test_typed_keys_have_columns(tmp_path: Path) -> None:
    pipeline = EnginePipeline("p")
    pipeline.inject("sales", key=["country", "card"], at="at")
    pipeline.add(Count(), name="counts", subscribes={"sales": None})
    sales = [{"country": "no", "card": 7, "at": 5, "n": 1}, {"country": "se", "card": 8, "at": 6, "n": 2}]
    LocalRunner(tmp_path / "pond", progress=False).run(pipeline, {"sales": sales})

    assert invoke("export", tmp_path / "pond", tmp_path / "tables").exit_code == 0
    found = duckdb.sql(f"select country, card, state from '{tmp_path}/tables/counts.parquet' order by card")
    assert [row[:2] for row in found.fetchall()] == [("no", 7), ("se", 8)]


def test_existing_table_is_not_overwritten(pond: Path, tmp_path: Path) -> None:
    """No other table of the same call is written."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "others.csv").write_text("mine")

    refused = invoke("export", pond, tmp_path / "tables", "--format", "csv")
    unknown = invoke("export", pond, tmp_path / "tables", "count")

    assert (refused.exit_code, unknown.exit_code) == (1, 1)
    assert "there is a table already" in refused.stderr
    assert "counts" in unknown.stderr
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["others.csv"]
