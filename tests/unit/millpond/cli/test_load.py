"""``millpond load``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millpond.cli.main import main
from millpond.statestore.store import Store

pytestmark = pytest.mark.zookeeper


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "pond"
    Store.open(path).close()
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["load", *map(str, arguments)])


def test_load_reports_version(pond: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.csv"
    file.write_text('key,state,timers\na,7,"[{""at"": 5, ""tag"": ""t""}]"\nb,8,\n')

    said = invoke(pond, "counts", file, "--intervals", "2")
    as_json = invoke(pond, "others", file, "--json")

    assert said.stdout.startswith("version 2 has 2 rows of counts: 2 intervals, 2 files, ")
    result = json.loads(as_json.stdout)
    assert {name: result[name] for name in ("version", "computation", "rows", "intervals", "files")} == {
        "version": 4, "computation": "others", "rows": 2, "intervals": 1, "files": 1,
    }  # fmt: skip
    with Store.open(pond, read_only=True) as store:
        rows = store.rows_view("counts").to_arrow().to_pylist()
    assert [(row["key"], row["state"], len(row["timers"])) for row in rows] == [("a", "7", 1), ("b", "8", 0)]


def test_malformed_file_is_refused_in_one_line(pond: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.csv"
    file.write_text("key,state\na,7\na,8\n")

    refused = invoke(pond, "twice", file)

    assert refused.exit_code == 1
    assert refused.stderr == "Error: a key is in the table more than once: each key is one row keys=`['a']`\n"


def test_missing_store_is_created_only_on_request(tmp_path: Path) -> None:
    """A mistyped path must not create a store."""
    file = tmp_path / "counts.jsonl"
    file.write_text('{"key": "a", "state": {"n": 1}}\n')

    assert invoke(tmp_path / "new", "counts", file).exit_code == 1
    assert not (tmp_path / "new").exists()
    assert invoke(tmp_path / "new", "counts", file, "--create").exit_code == 0


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "key,state\na,1\nkey,state,timers\nc,3,[]\n", "Line: 3"),
        ("a.csv", "key,state\na,1\nb\n", "Line: 3"),
        ("a.csv", 'key,state\na,1\nb,"x\n', "Line: 3"),
        ("a.csv", '"key,state\n' + "a,1\n" * 40_000, "cannot be read"),
        ("a.csv", "", "no column key"),
        ("a.csv", "key,state,timer\na,1,\n", "did you mean 'timers'"),
        ("a.jsonl", '{"key":"a","state":1}\n{"key":"b","state":1,"timer":[]}\n', "did you mean 'timers'"),
        ("a.json", '[{"key":"a","state":1,"state_verison":3}]', "did you mean 'state_version'"),
    ],
)
def test_table_of_other_rows_is_refused(
    pond: Path, tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)

    refused = invoke(pond, "refused", tmp_path / name)

    assert refused.exit_code == 1
    assert reason in refused.stderr


def test_csv_is_read_as_it_is(tmp_path: Path) -> None:
    """DuckDB would guess what quotes, from the first 20,480 rows."""
    file = tmp_path / "a.csv"
    rows = "".join(f"w{number},1\n" for number in range(21_000))
    file.write_text(f"key,state\n'a',1\n#b,1\n{rows}\"q,1\",1\n")

    assert invoke(tmp_path / "new", "counts", file, "--create").exit_code == 0
    with Store.open(tmp_path / "new", read_only=True) as store:
        keys = store.rows_view("counts").to_arrow().column("key").to_pylist()
    assert len(keys) == 21_003
    assert {"'a'", "#b", "q,1"} < set(keys)
