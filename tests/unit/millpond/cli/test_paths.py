"""Folders and files with unusual names: they work everywhere, or are refused with one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyarrow import parquet

from millpond.cli.main import main
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink, read_table
from millpond.statestore.errors import InvalidError
from millpond.statestore.objects.obstore import local_path
from millpond.statestore.store import Store

ODD = "Mü ller#1?[a]*{b,c}~'\"@v1;&$(x):é"
# Delta's library in Python takes these for other characters.
MISREAD = "100%20\\x"
APP = """
import millpond as mp

class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)

pipeline = mp.Pipeline("p")
pipeline.inject("in", key="k", at="at", watermark=mp.BoundedDisorder("1s")).apply(Count(), name="counts")
"""
NOON = 1_704_110_400_000_000


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.zookeeper
def test_odd_names_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / (ODD + MISREAD)
    for folder in ("code", "inputs"):
        (base / folder).mkdir(parents=True)
    (base / "code" / "oddly_named_app.py").write_text(APP)
    parquet.write_table(pa.table({"k": ["a", "b"], "at": [NOON, NOON]}), base / "inputs" / f"{ODD}.parquet")
    monkeypatch.chdir(base / "code")
    pond = base / "pond"
    run = ("run", "oddly_named_app:pipeline", "--input", f"in={base / 'inputs'}", "--more-to-come", "--store")

    for arguments in (
        (*run, pond),
        ("export", pond, base / "tables", "--format", "csv", "--for-load"),
        ("load", base / "loaded", "counts", base / "tables" / "counts.csv", "--create"),
        ("fork", pond, base / "fork"),
        ("verify", pond),
        ("sql", pond, "select count(*) from counts"),
    ):
        said = invoke(*arguments)
        assert said.exit_code == 0, (arguments, said.output)
    for place in (pond, pond.as_uri(), base / "loaded"):
        with Store.open(place, read_only=True) as store:
            assert store.rows_view("counts").to_arrow().column("state").to_pylist() == ["1", "1"]
            assert store.sql().sql("select count(*) from counts").fetchall() == [(2,)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [base.name]
    assert sorted(path.name for path in base.iterdir()) == [
        "code",
        "fork",
        "inputs",
        "loaded",
        "pond",
        "tables",
    ]


def test_sink_in_odd_folder_is_read_or_refused(tmp_path: Path) -> None:
    for name in (ODD, MISREAD):
        sink = DeltaSink(str(tmp_path / name / "sink"))
        sink.open("store", "p", "out")
        assert Path(sink.identity).is_dir()
    assert DeltaSink(str(tmp_path / ODD / "sink")).read().num_rows == 0
    with pytest.raises(InvalidError, match="takes a table's path for another one"):
        read_table(tmp_path / MISREAD / "sink")


@pytest.mark.zookeeper
def test_export_as_delta_is_refused_where_the_library_would_write_elsewhere(tmp_path: Path) -> None:
    with Store.open(tmp_path / "pond") as store:
        store.load("counts", [{"key": "a", "state": 1}])
    for name in ("a%41", "a\\b", "[a]", "a^b", "a|b"):
        said = invoke("export", tmp_path / "pond", tmp_path / name, "--format", "delta")
        assert said.exit_code == 1
        assert "takes a table's path for another one" in said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pond"]


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\x00b", "a\x9bb", "a\u2028b", os.fsdecode(b"M\xfcller")])
def test_unprintable_name_is_refused(tmp_path: Path, name: str) -> None:
    for use in (
        lambda path: Store.open(path, read_only=True),
        Store.open,
        lambda path: DeltaSink(path).identity,
        read_table,
        lambda path: LocalRunner(path).start(EnginePipeline("p")),
    ):
        with pytest.raises(InvalidError, match="must be UTF-8 with no control characters") as caught:
            use(f"{tmp_path}/{name}")
        assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")

    assert local_path("~") == tmp_path
    assert local_path("~/pond") == local_path(Path("~/pond")) == tmp_path / "pond"
    assert local_path("~other/pond") == Path("/~other/pond")
    assert local_path("./~/pond") == Path("/~/pond")
    assert DeltaSink("~/out").identity == str(tmp_path / "out")


def test_url_of_a_file_is_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20#?"

    assert local_path(folder.as_uri()) == local_path(f"file://localhost{folder.as_uri()[7:]}") == folder
    assert DeltaSink(folder.as_uri()).identity == str(folder)
    assert local_path("s3://bucket/~/a b") is None
    with pytest.raises(InvalidError, match=re.escape("as in file:///data/pond")):
        local_path("file://host/pond")
