"""Some of the stores and inputs of ``python -m tests.hostile``, and canaries of its watch."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.hostile.arena import Watch

pytestmark = pytest.mark.fault

_SEEDS = 40
_S_MAX = 300


def test_commands_on_damaged_stores_and_inputs_end_and_stay_inside() -> None:
    """In a separate process, because an audit hook stays for the life of the process."""
    words = [sys.executable, "-m", "tests.hostile", "--seeds", str(_SEEDS), "--workers", "1"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=_S_MAX, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr[-2_000:]
    assert f"{_SEEDS} cases" in ran.stdout


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture
def pond(watch: Watch, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "pond").mkdir()
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "precious.txt").write_text("do not delete")
    (tmp_path / "pond" / "linked").symlink_to(tmp_path / "canary")
    (tmp_path / "pond" / "file").symlink_to(tmp_path / "canary" / "precious.txt")
    watch.problems = []
    watch.canary = str(tmp_path / "canary")
    yield tmp_path / "pond"
    watch.canary = None


def _open_no_link(path: Path) -> None:
    with suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))


_FORBIDDEN: dict[str, Callable[[Path], object]] = {
    "read through a link": lambda pond: (pond / "file").read_text(),
    "read below a linked folder": lambda pond: (pond / "linked" / "precious.txt").read_bytes(),
    "write through a dangling link": lambda pond: (pond / "linked" / "new").write_text(""),
    "remove below a linked folder": lambda pond: (pond / "linked" / "precious.txt").unlink(),
    "rename into a linked folder": lambda pond: (pond / "file").rename(pond / "linked" / "moved"),
    "make a folder": lambda pond: (pond / "linked" / "made").mkdir(),
    "open a database": lambda pond: (
        closing(sqlite3.connect(pond / "linked" / "x.sqlite")).__enter__().close()
    ),
    "start a process": lambda _: subprocess.run(["/bin/true"], check=False),
    "signal a process": lambda _: os.kill(os.getppid(), 28),
}
_ALLOWED: dict[str, Callable[[Path], object]] = {
    "read a file of the store": lambda pond: (pond / "own").write_text("") or (pond / "own").read_text(),
    "refuse a link": lambda pond: _open_no_link(pond / "file"),
    "remove a link": lambda pond: (pond / "file").unlink(),
    "start Python": lambda _: subprocess.run([sys.executable, "-c", ""], check=False),
    "ask if a process lives": lambda _: os.kill(os.getpid(), 0),
}


@pytest.mark.parametrize("name", _FORBIDDEN)
def test_watch_sees_what_is_forbidden(watch: Watch, pond: Path, name: str) -> None:
    _FORBIDDEN[name](pond)
    assert watch.problems


@pytest.mark.parametrize("name", _ALLOWED)
def test_watch_allows_the_rest(watch: Watch, pond: Path, name: str) -> None:
    _ALLOWED[name](pond)
    assert watch.problems == []
