"""``millpond rewind``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

import millpond as mp
from millpond.cli.main import main
from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.history.verification import verify_store
from millpond.statestore.objects.obstore import open_objects

BATCHES = 4


class Count(mp.Computation):
    """Counts a key's records and emits each count."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.produce("counts", {"key": record.key, "count": context.state.get()})


class Pond:
    def __init__(self, folder: Path, hosts: str) -> None:
        self.path, self.sink, self.hosts = folder / "pond", folder / "counts", hosts
        self.checkpoint = self.path / "checkpoints" / "in"

    def consume(self, *batches: int) -> None:
        pipeline = mp.Pipeline("p")
        counts = pipeline.inject("in", key="k", at="at").apply(Count(), name="count", produces="counts")
        counts.sink("out", mp.DeltaSink(str(self.sink)))
        runner = mp.LocalRunner(self.path, zookeeper=self.hosts, progress=False, upkeep=None)
        with runner.start(pipeline, stepping=True) as run:
            for part in ("commits", "offsets"):
                (self.checkpoint / part).mkdir(parents=True, exist_ok=True)
            (self.checkpoint / "metadata").write_text('{"id":"q"}')
            for batch in batches:
                for _, piece in pieces(rows_from([{"k": "a", "at": batch}]), 1):
                    position = InputPosition(stream="in", source="q", batch=batch, offsets=f"v1 of {batch}")
                    run.consume("in", piece, position)
                for part in ("commits", "offsets"):
                    (self.checkpoint / part / str(batch)).write_text(f"v1 of {batch}")
            run.run_until_quiet()

    def count(self) -> int:
        with mp.Store.open(self.path, read_only=True) as store:
            return int(store.rows_view("count").to_arrow().column("state")[0].as_py())

    def delivered(self) -> list[int]:
        values = DeltaTable(str(self.sink)).to_pyarrow_table().column("value").to_pylist()
        return sorted(json.loads(value)["count"] for value in values)

    def batches(self, part: str) -> list[int]:
        return sorted(int(entry.name) for entry in (self.checkpoint / part).iterdir())

    def version_after(self, batch: int) -> int:
        with mp.Store.open(self.path, read_only=True) as store:
            newest = store.snapshot().version
            return min(
                version
                for version in range(newest + 1)
                if f"v1 of {batch}" in store.snapshot(version).source_offsets.values()
            )

    def rewind(self, *arguments: str | int) -> Result:
        given = ["rewind", str(self.path), "--zookeeper", self.hosts, *map(str, arguments)]
        return CliRunner().invoke(main, given)


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str) -> Pond:
    made = Pond(tmp_path, zookeeper_hosts)
    made.consume(*range(BATCHES))
    return made


def test_rewind_reverts_sink_and_checkpoint(pond: Pond) -> None:
    assert (pond.count(), pond.delivered()) == (4, [1, 2, 3, 4])
    result = pond.rewind("--version", pond.version_after(1), "--take-back", pond.sink, "--yes")

    assert result.exit_code == 0, result.output
    assert "input in of p: read again from position 2 (it was at 3)" in result.output
    assert "sink out of p: back from superstep" in result.output
    assert (pond.count(), pond.batches("commits"), pond.batches("offsets")) == (2, [0, 1], [0, 1])
    assert set(pond.delivered()) <= {1, 2}
    pond.consume(2, 3, 4)
    assert (pond.count(), pond.delivered()) == (5, [1, 2, 3, 4, 5])
    assert not verify_store(open_objects(str(pond.path / "rows"))).findings


def test_redelivered_rows_leave_sink_where_no_superstep_is_undone(pond: Pond) -> None:
    """Only owners and savepoints follow the last superstep; redelivery uses a new number."""
    with mp.Store.open(pond.path, pond.hosts) as store:
        version = store.snapshot().version
        store.savepoint("later")
    result = pond.rewind("--version", version, "--take-back", pond.sink, "--yes")

    assert result.exit_code == 0, result.output
    pond.consume(4)
    assert (pond.count(), pond.delivered()) == (5, [1, 2, 3, 4, 5])


def test_undone_version_is_refused_unless_its_lost_output_is_accepted(pond: Pond) -> None:
    """A table that went back does not receive the output of undone supersteps again."""
    later, earlier = pond.version_after(3), pond.version_after(1)
    assert pond.rewind("--version", earlier, "--take-back", pond.sink, "--yes").exit_code == 0
    result = pond.rewind("--version", later, "--yes")

    assert result.exit_code == 1
    assert "does not receive the version's output again" in result.output
    assert f"version=`{later}`" in result.output
    assert pond.count() == 2
    assert pond.rewind("--version", later, "--dry-run").exit_code == 0
    # The version that was restored is not undone by that.
    assert pond.rewind("--version", earlier, "--yes").exit_code == 0
    assert pond.rewind("--version", later, "--yes", "--accept-loss").exit_code == 0
    assert pond.count() == 4


def test_rewind_accepts_savepoint(pond: Pond) -> None:
    """Without --take-back the sink keeps its rows."""
    with mp.Store.open(pond.path, pond.hosts) as store:
        store.savepoint("mine", pond.version_after(2))
    result = pond.rewind("--version", "mine", "--yes")

    assert pond.count() == 3
    assert "sinks of p keep the output of the undone supersteps" in result.stderr
    assert pond.delivered() == [1, 2, 3, 4]


def test_dry_run_and_refusal_change_nothing(pond: Pond) -> None:
    version = pond.version_after(1)
    result = pond.rewind("--version", version, "--dry-run")

    assert (result.exit_code, pond.count()) == (0, 4)
    assert "pipeline p: supersteps" in result.output
    assert (
        CliRunner()
        .invoke(
            main,
            ["rewind", str(pond.path), "--zookeeper", pond.hosts, "--version", str(version)],
            input="n\n",
        )
        .exit_code
    )
    assert pond.count() == 4


@pytest.mark.parametrize(
    ("version", "message"), [("99", "no such table version"), ("yours", "the name of a savepoint")]
)
def test_future_version_and_missing_savepoint_are_named(pond: Pond, version: str, message: str) -> None:
    result = pond.rewind("--version", version, "--yes")

    assert result.exit_code != 0
    assert message in result.stderr


def test_running_pipeline_is_refused(pond: Pond) -> None:
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Count(), name="count", produces="counts")
    runner = mp.LocalRunner(pond.path, zookeeper=pond.hosts, progress=False)
    with runner.start(pipeline, stepping=True):
        result = pond.rewind("--version", pond.version_after(1), "--yes")

    assert result.exit_code != 0
    assert pond.count() == 4
