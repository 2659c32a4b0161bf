"""Stores that today's version and former ones continue in turns.

Former versions are real: their code comes from this repository's history. A clone without it skips these tests, and says
so; ``git fetch --unshallow`` completes it, as `.ci/run` does.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from millpond.statestore.history.verification import verify_store
from millpond.statestore.objects.obstore import open_objects
from tests.format.old_store import HERE, RELEASED, Old, flat, rows_of
from tests.processes import version_leg

pytestmark = [pytest.mark.slow, pytest.mark.zookeeper]

WRITERS: Final = {
    "v0.1": "e8e774f0642083a7f329e730a882b47cb506cd4d",
    "v0.1-f74ef24": "f74ef241c0f464225206381c2e41c9b3d48c000b",
}
"""The commits that wrote the checked-in stores."""

_OWN_SERVER: Final = ""
NEWEST: Final = WRITERS["v0.1-f74ef24"]
ROOT: Final = HERE.parent.parent
ROOMS: Final = ("millpond", "dataflow", "executor", "gc", "migrations", "statestore", "testing", "tools")


@dataclass(frozen=True)
class Version:
    """The code of a version, which runs in processes of its own."""

    code: Path

    def start(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, version_leg.__file__, *map(str, command)],
            cwd=self.code,
            env=os.environ | {"PYTHONPATH": str(self.code)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: object, ends: int = 0) -> str:
        with self.start(*command) as process:
            output, errors = process.communicate(timeout=120)
        assert process.returncode == ends, errors[-4_000:]
        return output

    def read(self, store: Path) -> dict[str, Any]:
        answer = orjson.loads(self.run("read", store))
        assert answer["from"].startswith(str(self.code)), "another version's code answered"
        return dict(answer["found"])


TODAY: Final = Version(ROOT)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Version]:
    """Former versions by commit, each whole in a folder of its own."""

    @cache
    def unpacked(commit: str) -> Version:
        known = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True, check=False)
        if known.returncode:
            pytest.skip(f"no history, git fetch --unshallow: {known.stderr.decode().strip()}")
        command = ["git", "archive", commit, *ROOMS, "tests/format"]
        packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        folder = tmp_path_factory.mktemp("former")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return Version(folder)

    return unpacked


def test_writer_of_each_kept_store_is_known() -> None:
    assert sorted(WRITERS) == RELEASED


@pytest.mark.parametrize(
    ("name", "former", "begins"),
    [
        ("v0.1", "v0.1", "former"),
        ("v0.1", "v0.1", "today"),
        ("v0.1", "v0.1-f74ef24", "former"),
        ("v0.1-f74ef24", "v0.1-f74ef24", "former"),
        ("v0.1-f74ef24", "v0.1-f74ef24", "today"),
    ],
)
def test_kept_store_is_continued_in_turns(
    name: str, former: str, begins: str, code: Callable[[str], Version], tmp_path: Path
) -> None:
    """Its contents are those of one version alone, and both versions read the same."""
    old, before = Old.copied(HERE / name, tmp_path / "old"), code(WRITERS[former])
    turns = [before, TODAY, before] if begins == "former" else [TODAY, before, TODAY]
    for version, step in zip(turns, ("known", "new", "end"), strict=True):
        version.run("harbour", old.harbour.folder, old.contents["now_us"], step)

    expected, found = old.contents["continued"], old.sinks()
    assert before.read(old.path) == TODAY.read(old.path)
    assert old.states() == expected["newest"]
    assert {sink: found[sink] for sink in expected["sinks"]} == flat(expected["sinks"])


def test_version_that_cannot_read_a_store_refuses_it(code: Callable[[str], Version], tmp_path: Path) -> None:
    """Record ids of stores made after the first version have the time of arrival; nothing is harmed."""
    old = Old.copied(HERE / "v0.1-f74ef24", tmp_path / "old")
    given = "harbour", old.harbour.folder, old.contents["now_us"]
    with code(WRITERS["v0.1"]).start(*given, "known") as process:
        assert "DataError: the file has nested fields that rows do not have" in process.communicate()[1]
    for step in ("known", "new", "end"):
        TODAY.run(*given, step)

    assert old.states() == old.contents["continued"]["newest"]


@pytest.mark.parametrize("begins", ["former", "today"])
def test_running_pipeline_is_taken_over_by_the_other_version(
    begins: str, code: Callable[[str], Version], tmp_path: Path
) -> None:
    """Both use the store's own server. The former owner is fenced, and nothing is lost or counted twice."""
    before = code(NEWEST)
    running, other = (before, TODAY) if begins == "former" else (TODAY, before)
    TODAY.run("shop", tmp_path / "alone", _OWN_SERVER, 0, 8, "stop")
    with running.start("shop", tmp_path / "turns", _OWN_SERVER, 0, 4, "fenced") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        other.run("shop", tmp_path / "turns", _OWN_SERVER, 4, 8, "stop")
        output, errors = process.communicate("\n", timeout=60)

    assert output == "fenced\n", errors[-4_000:]
    assert TODAY.read(tmp_path / "turns" / "pond")[""] == TODAY.read(tmp_path / "alone" / "pond")[""]
    assert sinks(tmp_path / "turns") == sinks(tmp_path / "alone")


def test_killed_versions_continue_one_another(
    code: Callable[[str], Version], tmp_path: Path, zookeeper_hosts: str
) -> None:
    """States, timers, windows, dead letters, savepoints and sinks are those of a run of today's version alone."""
    before = code(NEWEST)
    alone, turns = tmp_path / "alone", tmp_path / "turns"
    for number, version in enumerate([before, TODAY, before, TODAY, before]):
        first, last = max(6 * number - 1, 0), 6 * number + 6  # a leg begins with the last one's last batch
        TODAY.run("shop", alone, zookeeper_hosts, first, last, "stop")
        if last < 30:
            version.run("shop", turns, zookeeper_hosts, first, last, "kill", ends=-signal.SIGKILL)
        else:
            version.run("shop", turns, zookeeper_hosts, first, last, "stop")

    found = TODAY.read(turns / "pond")
    assert found == TODAY.read(alone / "pond") == before.read(turns / "pond")
    assert len(found) == 6  # five savepoints and the newest version
    assert len(rows_of(turns / "counts")) == 300 - len(found[""]["dead_letters"]) == 300 - 12
    assert sinks(turns) == sinks(alone)
    assert verify_store(open_objects(f"{turns}/pond/rows")).findings == ()


def sinks(folder: Path) -> dict[str, list[str]]:
    return {name: sorted(map(str, rows_of(folder / name))) for name in ("counts", "windows")}
