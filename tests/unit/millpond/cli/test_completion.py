"""``millpond completion``."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import millpond as mp
from millpond.cli.main import main
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.obstore import open_objects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory, zookeeper_hosts: str) -> Path:
    path = tmp_path_factory.mktemp("completion") / "pond"
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("rows", key="k", at="at")
    rows.apply(Count(), name="count")
    rows.apply(Count(), name="alarm")
    mp.LocalRunner(path, zookeeper=zookeeper_hosts, progress=False).run(
        pipeline, {"rows": [{"k": "a", "at": 1}]}
    )
    with mp.Store.open(path, zookeeper=zookeeper_hosts) as store:
        store.savepoint("before the sale")
        store.savepoint("spring")
    return path


def offered(*words: str, incomplete: str = "") -> list[tuple[str, str]]:
    shell = ShellComplete(main, {}, "millpond", "_MILLPOND_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions([*words], incomplete)]


def names(*words: str, incomplete: str = "") -> list[str]:
    return [value for _, value in offered(*words, incomplete=incomplete)]


def test_commands_options_and_choices_are_completed() -> None:
    assert names(incomplete="ro") == ["rows"]
    assert "--dry-run" in names("gc", "pond", incomplete="--d")
    assert names("adopt", "pond", "--as") == ["moved", "copy", "restored"]
    assert names("completion") == ["bash", "zsh", "fish"]


def test_store_is_completed_as_folder() -> None:
    """The shell lists folders itself."""
    assert offered("status", incomplete="po") == [("dir", "po")]
    assert offered("run", "daily:pipeline", "--store", incomplete="po") == [("dir", "po")]


def test_names_come_from_store(pond: Path) -> None:
    assert names("rows", str(pond)) == ["alarm", "count"]
    assert names("rows", str(pond), incomplete="c") == ["count"]
    assert names("rows", str(pond), "count", "--version") == ["before the sale", "spring"]
    for command in (("savepoint", str(pond)), ("rewind", str(pond), "--version")):
        assert names(*command, incomplete="s") == ["spring"]


@pytest.mark.parametrize(
    "name", ["$(touch x)", "`touch x`", "a;b", "a\nb", "-x", "a>b", "~", "a\x1bb", "a'b"]
)
def test_names_that_shell_would_run_are_not_offered(tmp_path: Path, zookeeper_hosts: str, name: str) -> None:
    """The log may be anybody's, and the shell inserts the name unquoted."""
    with mp.Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        store.savepoint("harmless")
        store.savepoint(name)

    assert names("rewind", str(tmp_path / "pond"), "--version") == ["harmless"]


def test_missing_or_damaged_store_offers_nothing(tmp_path: Path, pond: Path) -> None:
    """No message may disturb the command line."""
    damaged = tmp_path / "damaged"
    shutil.copytree(pond, damaged)
    for commit in (damaged / "rows" / "_delta_log").iterdir():
        commit.write_bytes(b"{")
    create_rows_table(Log(open_objects(f"{tmp_path}/empty/rows")), ManualClock(), SeededRng())

    for store in (str(tmp_path), "s3://bucket/pond", str(damaged), str(tmp_path / "empty")):
        assert names("rows", store) == []


def test_rows_behind_a_link_are_not_read(tmp_path: Path, pond: Path) -> None:
    (tmp_path / "linked").symlink_to(pond)
    (tmp_path / "pond").mkdir()
    (tmp_path / "pond" / "rows").symlink_to(pond / "rows")

    assert names("rows", str(tmp_path / "linked")) == ["alarm", "count"]
    assert names("rows", str(tmp_path / "pond")) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_exists_for_each_shell(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    told = json.loads(CliRunner().invoke(main, ["completion", shell, "--json"]).stdout)

    assert "_MILLPOND_COMPLETE" in script
    assert told["script"].strip() == script.strip()
    assert shell in told["file"] or shell in told["shell"]


def test_bash_loads_script(tmp_path: Path) -> None:
    path = tmp_path / "completion.sh"
    path.write_text(CliRunner().invoke(main, ["completion", "bash"]).stdout, encoding="utf-8")
    asked = ["bash", "--norc", "-c", f"source {path} && complete -p millpond"]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True).stdout

    assert shown.strip().endswith("millpond")
    assert "-F" in shown
