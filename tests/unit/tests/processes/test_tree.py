"""Descendants of a process, read from the system."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.processes.tree import command_of, descendants_of

CHILD = """
import subprocess, sys
code = "print(flush=True); input()"
grandchild = subprocess.Popen(
    [sys.executable, "-c", code, "grandchild"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
# Until it runs, the system may know no command of it.
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
input()
"""


def test_descendants_include_grandchildren() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        descendants = descendants_of(os.getpid())

        assert (descendants[child.pid], descendants[grandchild]) == (os.getpid(), child.pid)
        assert "grandchild" in command_of(grandchild)
        child.communicate("\n")


def test_ended_process_has_no_command() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()

    assert (command_of(process.pid), descendants_of(process.pid)) == ("", {})
