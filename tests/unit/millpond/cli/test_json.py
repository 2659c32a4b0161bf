"""JSON output of commands that change a store."""

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
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.produce("counts", {"key": record.key, "count": context.state.get()})


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str) -> Path:
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


def test_fork_has_fields_of_forked(pond: Path) -> None:
    new = pond.with_name("new")
    found = document(invoke("fork", pond, None, str(new)))

    assert found.keys() == {"store", "path", *(field.name for field in fields(mp.types.Forked))}
    assert (found["store"], found["path"], found["copied"]) == (str(pond), str(new), 0)
    assert found["files"] > 0


def test_savepoint_has_fields_of_savepoint(pond: Path, zookeeper_hosts: str) -> None:
    made = document(invoke("savepoint", pond, zookeeper_hosts, "kept"))
    listed = document(invoke("savepoint", pond, zookeeper_hosts))
    dropped = document(invoke("savepoint", pond, zookeeper_hosts, "kept", "--drop"))

    assert made == listed
    assert made.keys() == {field.name for field in fields(mp.types.Savepoint)}
    assert dropped == {"name": "kept", "dropped": True}
    assert invoke("savepoint", pond, zookeeper_hosts).stdout == ""


def test_intervals_show_requested_cut(pond: Path, zookeeper_hosts: str) -> None:
    asked = document(invoke("intervals", pond, zookeeper_hosts, "--split", "count", "c"))

    assert (asked["computation"], asked["kind"], asked["key"]) == ("count", "split", "c")


def test_rewind_shows_plan_and_result(pond: Path, zookeeper_hosts: str) -> None:
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


def test_question_goes_to_stderr(pond: Path, zookeeper_hosts: str) -> None:
    version = str(version_of_first_run(pond))
    given = ["rewind", str(pond), "--version", version, "--zookeeper", zookeeper_hosts, "--json"]
    refused = CliRunner().invoke(main, given, input="n\n")
    assert (refused.exit_code, refused.stdout) == (1, "")
    done = CliRunner().invoke(main, given, input="y\n")

    assert document(done)["committed"] is not None
    assert "Rewind it?" in done.stderr


def test_repair_shows_plan_and_result(pond: Path, zookeeper_hosts: str) -> None:
    """Damage gives exit code 1 in a dry run."""
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


def test_adopt_shows_incarnation_and_origin(pond: Path, zookeeper_hosts: str) -> None:
    copy = pond.with_name("copy")
    shutil.copytree(pond, copy)
    found = document(invoke("adopt", copy, zookeeper_hosts, "--as", "copy"))

    with mp.Store.open(copy, read_only=True) as store:
        current = store.lineage.current
    assert (found["incarnation"], found["origin"], found["sinks"]) == (current.id, current.origin, [])
    assert found["store_id"] != found["incarnation"]


def test_gc_has_line_for_each_kind_of_garbage(pond: Path, zookeeper_hosts: str) -> None:
    result = invoke("gc", pond, zookeeper_hosts, "--dry-run")
    lines = [json.loads(line) for line in result.stdout.splitlines()]

    assert result.exit_code == 0
    assert {"compactions", "kind"} <= {lines[0]["kind"], *lines[0]}
    assert len({(line["horizon"], line["held_by"]) for line in lines}) == 1
