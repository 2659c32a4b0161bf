"""Progress bars of commands."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy import ROOT

_CODE = """
from millpond.cli.main import main
main()
"""


def in_terminal(folder: Path, *arguments: str) -> tuple[str, str]:
    """Return standard output, which is a pipe, and standard error, which is a terminal."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    shown = bytearray()
    try:
        while part := os.read(terminal, 4_096):
            shown += part
    except OSError:
        # Linux reports the closed other end like this.
        shown += b""
    finally:
        os.close(terminal)
    printed, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    return printed.decode(), shown.decode()


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.millpond.cli.test_command_line import fill

    folder = tmp_path_factory.mktemp("progress")
    fill(folder / "pond")
    return folder


def test_bar_needs_terminal(pond: Path) -> None:
    """It is on standard error, so that a pipe has the result alone."""
    printed, shown = in_terminal(pond, "verify", "pond")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run(
        [sys.executable, "-c", _CODE, "verify", "pond"],
        cwd=pond,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    assert "reading files" in shown
    assert printed == plain.stdout
    assert "\x1b" not in printed
    assert "reading files" not in plain.stderr


def test_bar_of_fork_counts_files(pond: Path) -> None:
    printed, shown = in_terminal(pond, "fork", "pond", "fork")

    assert "4 files" in printed
    assert "forking row files" in shown
    assert "4/4" in shown


def test_run_has_bar_for_each_input(pond: Path, zookeeper_hosts: str) -> None:
    """No log lines are printed."""
    (pond / "shown_of_test.py").write_text(
        "import millpond as mp\n\nmade = mp.Pipeline('p')\nrows = made.inject('rows', key='k', at='at')\n"
        "rows.window(mp.FixedWindows('1s')).combine(mp.Count(), name='count')\n",
        encoding="utf-8",
    )
    (pond / "rows.csv").write_text("k,at\n" + "\n".join(f"a,{at}" for at in range(30)), encoding="utf-8")
    given = ("--store", "new", "--input", "rows=rows.csv", "--zookeeper", zookeeper_hosts)
    printed, shown = in_terminal(pond, "run", "shown_of_test:made", *given)

    assert "p: superstep" in printed
    assert "rows: rows consumed" in shown
    assert "30/30" in shown
    assert '"event"' not in shown
