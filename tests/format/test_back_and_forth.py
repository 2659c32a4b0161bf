"""Stores that today's version and former ones continue in turns.

Former versions are real: their code comes from this repository's history. A shallow clone fails here;
``git fetch --unshallow`` completes it.
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

NEWEST: Final = WRITERS["v0.1-f74ef24"]
ROOT: Final = HERE.parent.parent
ROOMS: Final = ("millpond", "dataflow", "executor", "gc", "migrations", "statestore", "testing", "tools")


@dataclass(frozen=True)
class Version:
    """The code of a version, which runs in processes of its own."""

    code: Path

    def run(self, *command: object, ends: int = 0) -> str:
        program = [sys.executable, version_leg.__file__, *map(str, command)]
        environment = os.environ | {"PYTHONPATH": str(self.code)}
        done = subprocess.run(
            program, cwd=self.code, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == ends, done.stderr[-4_000:]
        return done.stdout

    def read(self, store: Path) -> dict[str, Any]:
        answer = orjson.loads(self.run("read", store))
        assert answer["from"].startswith(str(self.code)), "another version's code answered"
        return dict(answer["found"])


TODAY: Final = Version(ROOT)


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Version]:
    """Former versions by commit, each whole in a folder of its own."""

    @cache
    def unpacked(commit: str) -> Version:
        command = ["git", "archive", commit, *ROOMS, "tests/format"]
        packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        if packed.returncode:
            pytest.fail(f"this clone lacks {commit}: git fetch --unshallow\n{packed.stderr.decode()}")
        folder = tmp_path_factory.mktemp("former")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return Version(folder)

    return unpacked


def test_writer_of_each_kept_store_is_known() -> None:
    assert sorted(WRITERS) == RELEASED


@pytest.mark.parametrize("begins", ["writer", "today"])
@pytest.mark.parametrize("name", WRITERS)
def test_kept_store_is_continued_in_turns(
    name: str, begins: str, former: Callable[[str], Version], tmp_path: Path
) -> None:
    """Its contents are those of one version alone, and both versions read the same."""
    old, writer = Old.copied(HERE / name, tmp_path / "old"), former(WRITERS[name])
    turns = [writer, TODAY, writer] if begins == "writer" else [TODAY, writer, TODAY]
    for version, step in zip(turns, ("known", "new", "end"), strict=True):
        version.run("harbour", old.harbour.folder, old.contents["now_us"], step)

    expected, found = old.contents["continued"], old.sinks()
    assert writer.read(old.path) == TODAY.read(old.path)
    assert old.states() == expected["newest"]
    assert {sink: found[sink] for sink in expected["sinks"]} == flat(expected["sinks"])


def test_killed_versions_continue_one_another(
    former: Callable[[str], Version], tmp_path: Path, zookeeper_hosts: str
) -> None:
    """States, timers, windows, dead letters, savepoints and sinks are those of a run of today's version alone."""
    before = former(NEWEST)
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
    for sink in ("counts", "windows"):
        assert sorted(map(str, rows_of(turns / sink))) == sorted(map(str, rows_of(alone / sink)))
    assert verify_store(open_objects(f"{turns}/pond/rows")).findings == ()
