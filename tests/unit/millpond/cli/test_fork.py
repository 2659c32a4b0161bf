"""``millpond fork``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

import millpond as mp
from millpond.cli.main import main
from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.history.verification import verify_store
from millpond.statestore.objects.obstore import open_objects


class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.produce("counts", {"key": record.key, "count": context.state.get()})


def consume(pond: Path, hosts: str, *batches: int, sink: Path | None = None) -> None:
    pipeline = mp.Pipeline("p")
    counts = pipeline.inject("in", key="k", at="at").apply(Count(), name="count", produces="counts")
    if sink is not None:
        counts.sink("out", mp.DeltaSink(str(sink)))
    with mp.LocalRunner(pond, zookeeper=hosts, progress=False).start(pipeline, stepping=True) as run:
        for batch in batches:
            for _, piece in pieces(rows_from([{"k": "a", "at": batch}]), 1):
                position = InputPosition(stream="in", source="q", batch=batch, offsets=f"v1 of {batch}")
                run.consume("in", piece, position)
        run.run_until_quiet()


def count(pond: Path, version: int | None = None) -> Any:
    with mp.Store.open(pond, read_only=True) as store:
        return store.rows_view("count", version).to_arrow().column("state")[0].as_py()


def version_after(pond: Path, batch: int) -> int:
    with mp.Store.open(pond, read_only=True) as store:
        told = range(store.snapshot().version + 1)
        return min(at for at in told if f"v1 of {batch}" in store.snapshot(at).source_offsets.values())


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str) -> Path:
    path = tmp_path / "pond"
    consume(path, zookeeper_hosts, 0, 1, 2, 3, sink=tmp_path / "counts")
    for part in ("commits", "offsets"):
        (path / "checkpoints" / "in" / part).mkdir(parents=True)
        for batch in range(4):
            (path / "checkpoints" / "in" / part / str(batch)).write_text(f"v1 of {batch}")
    (path / "checkpoints" / "in" / "metadata").write_text('{"id":"q"}')
    return path


def invoke(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(main, ["fork", *map(str, arguments)])


def test_fork_and_parent_continue_separately(pond: Path, zookeeper_hosts: str) -> None:
    new = pond.with_name("what if")
    version = version_after(pond, 1)
    result = invoke(pond, new, "--version", version)

    assert result.exit_code == 0, result.output
    assert f"begins with version {version} of" in result.stdout
    assert (count(new), count(pond)) == ("2", "4")
    consume(new, zookeeper_hosts, 2)
    consume(pond, zookeeper_hosts, 4, sink=pond.with_name("counts"))
    assert (count(new), count(pond)) == ("3", "5")
    checkpoint = new / "checkpoints" / "in" / "offsets"
    assert sorted(int(entry.name) for entry in checkpoint.iterdir()) == [0, 1]
    for store in (new, pond):
        assert verify_store(open_objects(f"{store}/rows")).findings == ()


def test_fork_survives_deletion_of_parent(pond: Path, zookeeper_hosts: str) -> None:
    new = pond.with_name("fork")
    shared = {file.stat().st_ino for file in pond.rglob("computation=count/*.parquet")}
    invoke(pond, new)
    linked = {file.stat().st_ino for file in new.rglob("computation=count/*.parquet")}
    shutil.rmtree(pond / "rows")

    assert linked <= shared
    assert count(new) == "4"
    consume(new, zookeeper_hosts, 4)
    assert count(new) == "5"


def test_delta_reader_reads_fork(pond: Path) -> None:
    """Its log begins with a checkpoint."""
    new = pond.with_name("fork")
    invoke(pond, new)
    table, parent = DeltaTable(str(new / "rows")), DeltaTable(str(pond / "rows"))

    assert table.version() == parent.version() + 1
    assert table.metadata().id != parent.metadata().id
    assert table.to_pyarrow_table().num_rows == parent.to_pyarrow_table().num_rows


def counts_in(table: Path) -> list[int]:
    rows = DeltaTable(str(table)).to_pyarrow_table().column("value").to_pylist()
    return sorted(json.loads(row)["count"] for row in rows)


def test_fork_has_own_sinks(pond: Path, zookeeper_hosts: str) -> None:
    """They begin with the files that the parent had delivered by then."""
    new, theirs = pond.with_name("fork"), pond.with_name("counts")
    before = {file.stat().st_ino for file in theirs.glob("*.parquet")}
    invoke(pond, new, "--version", version_after(pond, 1))
    consume(new, zookeeper_hosts, 2, sink=theirs)

    assert counts_in(theirs) == [1, 2, 3, 4]
    assert counts_in(new / "sinks" / "out") == [1, 2, 3]
    shared = before & {file.stat().st_ino for file in (new / "sinks" / "out").glob("*.parquet")}
    assert len(shared) in (1, 2)
    consume(new, zookeeper_hosts, 3, sink=theirs)
    assert counts_in(new / "sinks" / "out") == [1, 2, 3, 4]
    consume(pond, zookeeper_hosts, 4, sink=theirs)
    assert counts_in(theirs) == [1, 2, 3, 4, 5]


def test_fork_takes_a_sink_over_and_the_original_takes_it_back(pond: Path, zookeeper_hosts: str) -> None:
    new, theirs = pond.with_name("fork"), pond.with_name("counts")
    invoke(pond, new)

    def take_over(store: Path, *more: str) -> dict[str, Any]:
        command = ["take-over", store, theirs, "--zookeeper", zookeeper_hosts, "--json", *more]
        result = CliRunner().invoke(main, [*map(str, command)])
        assert result.exit_code == 0, result.output
        assert ("the fork has run before" in result.stderr) == has_run
        return json.loads(result.stdout)

    has_run = False
    assert take_over(new)["sinks"][0]["files"] == 0
    consume(new, zookeeper_hosts, 4, sink=theirs)
    assert (counts_in(theirs), (new / "sinks").exists()) == ([1, 2, 3, 4, 5], False)
    with pytest.raises(mp.InvalidError, match=r"`millpond take-over STORE TABLE`"):
        consume(pond, zookeeper_hosts, 4, sink=theirs)
    assert take_over(pond)["sinks"][0]["files"] == 1
    consume(pond, zookeeper_hosts, 5, sink=theirs)
    assert counts_in(theirs) == [1, 2, 3, 4, 5]
    has_run = True
    take_over(new)


def test_fork_of_fork_begins_with_sinks_of_first(pond: Path, zookeeper_hosts: str) -> None:
    """Its code names other sinks."""
    first, second, theirs = pond.with_name("first"), pond.with_name("second"), pond.with_name("counts")
    invoke(pond, first, "--version", version_after(pond, 0))
    consume(first, zookeeper_hosts, 1, 2, sink=theirs)
    invoke(first, second)
    invoke(first, pond.with_name("third"))
    consume(second, zookeeper_hosts, 3, sink=theirs)

    assert counts_in(second / "sinks" / "out") == [1, 2, 3, 4]
    shutil.rmtree(first)
    with pytest.raises(mp.DataError, match="a separate sink"):
        consume(pond.with_name("third"), zookeeper_hosts, 3, sink=theirs)


def test_occupied_place_is_refused(pond: Path) -> None:
    """An empty folder is accepted."""
    full, empty = pond.with_name("full"), pond.with_name("empty")
    full.mkdir()
    (full / "file").touch()
    empty.mkdir()

    assert "not empty" in invoke(pond, full).stderr
    assert "a store at this path already" in invoke(pond, pond).stderr
    assert invoke(pond, empty).exit_code == 0
    assert count(empty) == "4"


def test_killed_fork_is_made_by_next_call(pond: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = pond.with_name("fork")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert invoke(pond, new).exit_code != 0
    assert not new.exists()

    assert invoke(pond, new).exit_code == 0
    assert count(new) == "4"
