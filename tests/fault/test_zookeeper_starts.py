"""Repeated starts of the embedded ZooKeeper on busy processors.

``MILLPOND_ZOOKEEPER_STARTS=300 pytest tests/fault/test_zookeeper_starts.py`` sets their number; the figures
are in ``build/fault/zookeeper_starts.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import orjson
import pytest

from millpond.statestore.leases.zookeeper_process import OPTIONS_VARIABLE, PLACE_OPTION
from millpond.statestore.system import SystemClock
from tests.tidy import ROOT

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper, pytest.mark.slow]

STARTS: Final = int(os.environ.get("MILLPOND_ZOOKEEPER_STARTS", "5"))
REPORT: Final = ROOT / "build/fault/zookeeper_starts.json"
CLOCK: Final = SystemClock()
USERS: Final = 2
# The program ends with its input, so it cannot outlive this process.
BURNER: Final = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


class User:
    """Another process that uses servers of folders."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.processes.server_user"]
        # Use the users' server, which is slower than the tests'.
        environment = {name: value for name, value in os.environ.items() if name != OPTIONS_VARIABLE}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)

    def tell(self, command: str) -> None:
        """Send a command without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Close its input, and wait for its end."""
        self._process.communicate()


@dataclass(slots=True)
class Figures:
    """The figures of all starts."""

    starts: int = 0
    failures: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0


@contextmanager
def busy_processors() -> Iterator[None]:
    """Run as many endless loops as there are processors."""
    burners = [
        subprocess.Popen([sys.executable, "-c", BURNER], stdin=subprocess.PIPE)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()


def servers_below(folder: Path) -> list[str]:
    """Return the folders of servers with data below a folder, with their process ids."""
    entries = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            entries += [
                f"{process.name} {word}"
                for word in words
                if f"{word}/".startswith(f"{PLACE_OPTION}{folder}/")
            ]
    return entries


def use_at_once(users: list[User], folder: Path, figures: Figures) -> None:
    """Let all users open a folder's server at once, count the servers, and close it."""
    began_us = CLOCK.monotonic_us()
    for user in users:
        user.tell(f"open {folder}")
    answers = [user.hear() for user in users]
    figures.slowest_s = max(figures.slowest_s, round((CLOCK.monotonic_us() - began_us) / 1e6, 2))
    running = servers_below(folder)
    figures.starts += 1
    if len(running) != 1 or len(set(answers)) != 1 or not answers[0].startswith("open 127.0.0.1:"):
        figures.failures.append(f"{folder.name}: servers {running}, users {answers}")
    for user in users:
        user.tell("close")
    closed = {user.hear() for user in users}
    if closed != {"closed"}:
        figures.failures.append(f"{folder.name}: {closed}")
    figures.orphans += servers_below(folder)


@pytest.mark.timeout(120 + 20 * STARTS)
def test_server_starts_once_for_two_users_on_busy_processors(tmp_path: Path) -> None:
    """The folder is new, used, or has the note of a dead server; no server is left at the end."""
    figures, began_us = Figures(), CLOCK.monotonic_us()
    with ExitStack() as ending, busy_processors():
        users = [User() for _ in range(USERS)]
        for user in users:
            ending.callback(user.end)
        for number in range(STARTS):
            folder = tmp_path / str(number // 3)
            if number % 3 == 2:
                # The process id belongs to an unrelated process.
                (folder / "server.json").write_bytes(
                    orjson.dumps({"process_id": os.getpid(), "port": 20_000 + number, "started": "before"})
                )
            use_at_once(users, folder, figures)
    figures.orphans += servers_below(tmp_path)
    figures.seconds = round((CLOCK.monotonic_us() - began_us) / 1e6, 1)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_bytes(orjson.dumps(asdict(figures), option=orjson.OPT_INDENT_2))
    print(figures)

    assert figures.failures == []
    assert figures.orphans == []
    assert figures.starts == STARTS
