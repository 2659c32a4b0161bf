"""Commands that change a store, for programs: one JSON document on standard output, what is said meanwhile on the other."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main


class Count(mp.Computation):
    """Counts a key's records, and shows the counts."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.produce("counts", {"key": record.key, "count": context.state.get()})


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str) -> Path:
    """A store after two runs, with a sink next to it."""
    path = tmp_path / "pond"
    pipeline = mp.Pipeline("p")
    counts = pipeline.inject("rows", key="k", at="at").apply(Count(), name="count", produces="counts")
    counts.sink("out", mp.DeltaSink(str(tmp_path / "out")))
    rows = [{"k": key, "at": at} for at, key in enumerate("abcd")]
    for until in (2, 4):
        runner = mp.LocalRunner(path, zookeeper=zookeeper_hosts, progress=False, upkeep=None)
        runner.run(pipeline, {"rows": rows[:until]}, finish=False)
    return path


def invoke(command: str, pond: Path, hosts: str | None, *arguments: str) -> Result:
    given = [command, str(pond), *arguments, *(["--zookeeper", hosts] if hosts else []), "--json"]
    return CliRunner().invoke(main, given)


def document(result: Result, exit_code: int = 0) -> dict[str, Any]:
    assert result.exit_code == exit_code, result.output
    (line,) = result.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def version_of_first_run(pond: Path) -> int:
    with mp.Store.open(pond, read_only=True) as store:
        versions = range(store.snapshot().version + 1)
        app_id = "millpond/input/p/rows/local"
        return max(at for at in versions if store.snapshot(at).txns.get(app_id) == 2)


def test_fork(pond: Path) -> None:
    """The fields are those of `Forked`, with both places."""
    new = pond.with_name("new")
    found = document(invoke("fork", pond, None, str(new)))

    assert found.keys() == {"store", "path", *(field.name for field in fields(mp.types.Forked))}
    assert (found["store"], found["path"], found["copied"]) == (str(pond), str(new), 0)
    assert found["files"] > 0


def test_savepoint(pond: Path, zookeeper_hosts: str) -> None:
    """Made, listed and dropped: the fields are those of `Savepoint`."""
    made = document(invoke("savepoint", pond, zookeeper_hosts, "kept"))
    listed = document(invoke("savepoint", pond, zookeeper_hosts))
    dropped = document(invoke("savepoint", pond, zookeeper_hosts, "kept", "--drop"))

    assert made == listed
    assert made.keys() == {field.name for field in fields(mp.types.Savepoint)}
    assert dropped == {"name": "kept", "dropped": True}
    assert invoke("savepoint", pond, zookeeper_hosts).stdout == ""


def test_intervals(pond: Path, zookeeper_hosts: str) -> None:
    """A cut that is asked for is told as it is shown later."""
    asked = document(invoke("intervals", pond, zookeeper_hosts, "--split", "count", "c"))

    assert (asked["computation"], asked["kind"], asked["key"]) == ("count", "split", "c")


def test_rewind(pond: Path, zookeeper_hosts: str) -> None:
    """What would be undone, and what was: versions, supersteps, inputs, and sinks that were taken back."""
    version = version_of_first_run(pond)
    planned = document(invoke("rewind", pond, zookeeper_hosts, "--version", str(version), "--dry-run"))
    result = invoke(
        "rewind",
        pond,
        zookeeper_hosts,
        "--version",
        str(version),
        "--yes",
        "--take-back",
        str(pond.with_name("out")),
    )
    done = document(result)

    assert (planned["dry_run"], planned["committed"], planned["sinks"]) == (True, None, [])
    assert (done["dry_run"], done["committed"]) == (False, planned["newest"] + 1)
    assert done["version"] == version
    assert done["inputs"] == [{"pipeline": "p", "input": "rows", "source": "local", "batch": 2, "was": 4}]
    assert [(one["pipeline"], one["superstep"] < one["was"]) for one in done["supersteps"]] == [("p", True)]
    assert [(one["name"], one["files"] > 0) for one in done["sinks"]] == [("out", True)]
    assert "the store goes back" in result.stderr


def test_a_question_is_no_part_of_the_result(pond: Path, zookeeper_hosts: str) -> None:
    """What is asked before a change goes to standard error, with the plan."""
    version = str(version_of_first_run(pond))
    given = ["rewind", str(pond), "--version", version, "--zookeeper", zookeeper_hosts, "--json"]
    refused = CliRunner().invoke(main, given, input="n\n")
    assert (refused.exit_code, refused.stdout) == (1, "")
    done = CliRunner().invoke(main, given, input="y\n")

    assert document(done)["committed"] is not None
    assert "Rewind it?" in done.stderr


def test_repair(pond: Path, zookeeper_hosts: str) -> None:
    """A whole store needs nothing; of a damaged one what would be done, with exit code 1, and then what was done."""
    whole = document(invoke("repair", pond, zookeeper_hosts, "--dry-run"))
    assert (whole["is_needed"], whole["committed"], whole["lost"]) == (False, None, [])

    newest = max(
        (pond / "rows").glob("computation=count/*.parquet"), key=lambda path: path.stat().st_mtime_ns
    )
    newest.unlink()
    planned = document(invoke("repair", pond, zookeeper_hosts, "--dry-run"), exit_code=1)
    result = invoke("repair", pond, zookeeper_hosts, "--yes")
    done = document(result)

    assert planned["lost"] == [str(newest.relative_to(pond / "rows"))]
    assert (done["is_needed"], done["committed"]) == (True, planned["newest"] + 1)
    assert "what is lost" in result.stderr
    assert document(invoke("repair", pond, zookeeper_hosts, "--dry-run"))["is_needed"] is False


def test_adopt(pond: Path, zookeeper_hosts: str) -> None:
    """Which incarnation the store is now, and where it came from."""
    copy = pond.with_name("copy")
    shutil.copytree(pond, copy)
    found = document(invoke("adopt", copy, zookeeper_hosts, "--as", "copy"))

    with mp.Store.open(copy, read_only=True) as store:
        current = store.lineage.current
    assert (found["incarnation"], found["origin"], found["sinks"]) == (current.id, current.origin, [])
    assert found["store_id"] != found["incarnation"]


def test_gc(pond: Path, zookeeper_hosts: str) -> None:
    """A line for each kind of garbage, each with what holds the horizon."""
    result = invoke("gc", pond, zookeeper_hosts, "--dry-run")
    lines = [json.loads(line) for line in result.stdout.splitlines()]

    assert result.exit_code == 0
    assert {"compactions", "kind"} <= {lines[0]["kind"], *lines[0]}
    assert len({(line["horizon"], line["held_by"]) for line in lines}) == 1
