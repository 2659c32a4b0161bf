"""``millpond upgrade``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main

APP = """
import millpond as mp

class Visits(mp.Computation):
    state_version = {version}

    def upgrade_state(self, state, version):
        if state == 3:
            raise ValueError("three")
        return {{"count": state}}

    def process_record(self, context, record):
        count = context.state.get({start})
        context.state.set({step})

def make():
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Visits(), name="visits")
    return pipeline

pipeline = make()
nothing = 3
"""
FIRST = {"version": 0, "start": "0", "step": "count + 1"}
SECOND = {"version": 1, "start": '{"count": 0}', "step": '{"count": count["count"] + 1}'}


class Pond:
    def __init__(self, folder: Path, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.hosts, self.module = folder / "pond", hosts, f"app_of_{folder.name}".replace("-", "_")
        self.source = folder / f"{self.module}.py"
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def deploy(self, code: dict[str, object]) -> None:
        self.source.write_text(APP.format(**code))
        importlib.invalidate_caches()
        sys.modules.pop(self.module, None)

    def run(self, *keys: str) -> None:
        sys.path.insert(0, str(self.source.parent))
        pipeline = importlib.import_module(self.module).make()
        runner = mp.LocalRunner(self.path, zookeeper=self.hosts, progress=False, upkeep=None)
        with runner.start(pipeline, stepping=True) as run:
            run.inject("in", [{"k": key, "t": 1} for key in keys])
            run.run_until_quiet()

    def upgrade(self, *arguments: str, app: str = "pipeline") -> Result:
        given = ["upgrade", str(self.path), "--zookeeper", self.hosts, "--app", f"{self.module}:{app}"]
        return CliRunner().invoke(main, [*given, *arguments])

    def states(self) -> dict[str, tuple[object, int]]:
        with mp.Store.open(self.path, read_only=True) as store:
            rows = store.rows_view("visits").to_arrow().to_pylist()
        return {row["key"]: (json.loads(row["state"]), row["state_version"]) for row in rows}


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch) -> Pond:
    """A store with two rows of the first code, and the second code in its place."""
    pond = Pond(tmp_path, zookeeper_hosts, monkeypatch)
    pond.deploy(FIRST)
    pond.run("a", "b", "b")
    pond.deploy(SECOND)
    return pond


def test_remaining_states_are_upgraded_once(pond: Pond) -> None:
    dry = pond.upgrade("--dry-run")
    assert dry.exit_code == 0
    assert "would be upgraded" in dry.output
    assert pond.states() == {"a": (1, 0), "b": (2, 0)}

    done = pond.upgrade("--json", app="make")
    assert json.loads(done.stdout) == {
        "computation": "visits",
        "state_version": 1,
        "rows": 2,
        "current": 0,
        "failed": 0,
        "failures": {},
    }
    assert pond.states() == {"a": ({"count": 1}, 1), "b": ({"count": 2}, 1)}
    assert json.loads(pond.upgrade("--json").stdout)["current"] == 2
    pond.run("a")
    assert pond.states()["a"] == ({"count": 2}, 1)


def test_failed_row_is_named(pond: Pond) -> None:
    """The other rows are upgraded."""
    pond.deploy(FIRST)
    pond.run("b")
    pond.deploy(SECOND)
    done = pond.upgrade("--computation", "visits")

    assert done.exit_code == 1
    assert "visits b: ValueError: three" in done.output
    assert pond.states() == {"a": ({"count": 1}, 1), "b": (3, 0)}


def test_rows_show_state_version(pond: Pond) -> None:
    before = CliRunner().invoke(main, ["rows", str(pond.path), "visits"])
    pond.run("a")
    after = CliRunner().invoke(main, ["rows", str(pond.path), "visits"])

    assert "state_version" not in before.output
    assert "state_version" in after.output


@pytest.mark.parametrize(
    ("app", "message"),
    [
        ("pipeline", ""),
        ("missing", "no such name"),
        ("nothing", "neither a pipeline"),
        ("", "module:name"),
    ],
)
def test_non_pipeline_is_refused(pond: Pond, app: str, message: str) -> None:
    result = pond.upgrade("--dry-run", app=app)

    assert (result.exit_code == 0) is (not message)
    assert message in result.output
