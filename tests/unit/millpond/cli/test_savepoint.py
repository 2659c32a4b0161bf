"""``millpond savepoint``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main

pytestmark = pytest.mark.zookeeper


class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "pond"
    pipeline = mp.Pipeline("p")
    pipeline.inject("in", key="k", at="at").apply(Count(), name="count")
    with mp.LocalRunner(folder, progress=False).start(pipeline, stepping=True) as run:
        for at in range(2):
            run.inject("in", [{"k": "a", "at": at}])
            run.run_until_quiet()
    return folder


def invoke(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [command, *map(str, arguments)])


def test_savepoint_is_created_read_listed_and_deleted(pond: Path) -> None:
    first = min(
        entry["version"]
        for entry in map(json.loads, invoke("history", pond, "--json").stdout.splitlines())
        if entry["what"] == "superstep"
    )
    made = invoke("savepoint", pond, "after one", "--version", str(first))
    assert made.stdout == f"version {first} is kept as after one\n"

    read = invoke("rows", pond, "count", "--version", "after one", "--json")
    assert [json.loads(line)["state"] for line in read.stdout.splitlines()] == [1]
    assert json.loads(invoke("savepoint", pond, "--json").stdout) == {"name": "after one", "version": first}
    assert "after one" in invoke("savepoint", pond).stdout
    assert invoke("savepoint", pond, "after one", "--drop").stdout == "dropped: after one\n"
    assert invoke("savepoint", pond, "--json").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("savepoint", "--drop"), "which savepoint"),
        (("savepoint", "mine", "--drop"), "no savepoint of that name"),
        (("savepoint", "mine", "--drop", "--version", "1"), "by its name alone"),
        (("rows", "count", "--version", "mine"), "number .* or the name of a savepoint"),
    ],
)
def test_impossible_request_is_refused(pond: Path, arguments: tuple[str, ...], message: str) -> None:
    command, *rest = arguments
    result = invoke(command, pond, *rest)

    assert result.exit_code != 0
    assert re.search(message, result.stderr)
