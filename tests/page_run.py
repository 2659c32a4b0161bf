"""Runs the code blocks of a page like its reader, from top to bottom in one empty folder.

- Blocks of Python run in one interpreter, one after the other; a following ``text`` block is the output.
- A ``console`` block is typed into a shell: lines after ``$`` are commands, the others their output.
- A block after the comment ``file: NAME`` is saved under that name.
- A block after ``not run: REASON`` is left out. Any other block is an error.

In output, ``…`` stands for anything within a line, and a line of nothing else for any lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from click.testing import CliRunner

import millpond as mp
from millpond.cli.main import main
from millpond.statestore.leases.zookeeper_process import recorded_server
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.system import SystemClock
from tests.documents import Block, Document
from tests.short_lived import SHORT_LIVED_JAVA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ASK: Final = "echo $?"
_QUOTED: Final = re.compile(r"\"[^\"$`]*\"|'[^']*'")
_SHELL: Final = re.compile(r"[|<>&;$`*~\"'\\]")
"""Characters that a shell does not take literally outside quotes."""


class PageError(AssertionError):
    """A difference between a page's text and its run."""


class PageRun:
    """One reader of one page.

    Args:
        document: the page.
        folder: an empty folder that the reader works in.
        spark: the session of the page's programs, which then run in this process; without it each program is a
            separate process.
        zookeeper: ``host:port`` of a server for all stores of the page, in place of one for each.
    """

    def __init__(
        self,
        document: Document,
        folder: Path,
        spark: SparkSession | None = None,
        zookeeper: str | None = None,
    ) -> None:
        self._spark = spark
        self._zookeeper = zookeeper
        self._name = document.path.name
        self._blocks = document.all_blocks()
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed: str | None = None

    def run(self) -> int:
        """Run all blocks of the page.

        Returns:
            The number of blocks run.

        Raises:
            PageError: a block is not to be run, fails, or prints something else.
        """
        try:
            with contextlib.chdir(self._folder), _imports_from(self._folder), _served_by(self._zookeeper):
                return sum(self._do(block) for block in self._blocks)
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        """End the leftovers of a failed page: pipelines, and the ZooKeeper servers of its stores."""
        for run in [value for value in self._names.values() if isinstance(value, mp.LocalRun)]:
            run.abandon()
        for folder in self._folder.glob("*/zookeeper"):
            server = recorded_server(folder)
            if server is not None:
                server.kill(SystemClock())

    def _do(self, block: Block) -> int:
        kind, _, argument = block.note.partition(": ")
        if kind == "not run" and argument:
            return 0
        if kind == "file":
            path = self._folder / argument
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._printed = self._python(block)
        elif block.language == "console":
            self._console(block)
        elif block.language == "text" and self._printed is not None:
            self._compare(block, "the block above", block.text, self._printed)
            self._printed = None
        else:
            raise self._error(block, f"nothing runs a block of {block.language}")
        return 1

    def _python(self, block: Block) -> str:
        printed = io.StringIO()
        code = compile("\n" * block.line + block.text, self._name, "exec")
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self._names)
        except Exception as error:
            raise self._error(block, f"it raises {error!r}") from error
        return printed.getvalue()

    def _console(self, block: Block) -> None:
        commands = list(_commands(block.text))
        status = 0
        for number, (command, shown) in enumerate(commands):
            if command == _ASK:
                printed, said, status = f"{status}\n", "", 0
            elif self._spark is not None and command.startswith("python "):
                printed, said, status = _run_here(command, self._folder, self._spark), "", 0
            else:
                printed, said, status = _run(command, self._folder)
            is_asked = number + 1 < len(commands) and commands[number + 1][0] == _ASK
            if status != 0 and not is_asked:
                raise self._error(block, f"`{command}` ends with {status}:\n{printed}{said}")
            self._compare(block, command, shown, printed)

    def _compare(self, block: Block, what: str, shown: str, printed: str) -> None:
        expected, actual = _lines(shown), _lines(printed)
        pattern = "\n".join(".*" if line == "…" else _pattern(line) for line in expected)
        if not re.fullmatch(pattern.replace("\n.*", "(?:\n.*)?"), "\n".join(actual), re.DOTALL):
            raise self._error(
                block, f"`{what}` prints\n" + "\n".join(actual) + "\n\nand not\n" + "\n".join(expected)
            )

    def _error(self, block: Block, what: str) -> PageError:
        return PageError(f"{self._name}:{block.line}: {what}")


@contextlib.contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported, and forget them afterwards."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{folder}{os.sep}"):
                del sys.modules[name]


def _served_by(hosts: str | None) -> contextlib.AbstractContextManager[object]:
    """Let stores without a ZooKeeper use this one."""
    if hosts is None:
        return contextlib.nullcontext()
    return patch.object(EmbeddedZooKeeper, "start_or_join", lambda _: hosts)


def _run(command: str, folder: Path) -> tuple[str, str, int]:
    """Return a command's output, standard error and exit code.

    Plain calls of ``millpond`` run in this process: starting another for each costs more than all the rest.
    """
    if command.startswith("millpond ") and not _SHELL.search(_QUOTED.sub("", command)):
        result = CliRunner().invoke(main, shlex.split(command)[1:], prog_name="millpond")
        return result.stdout, f"{result.stderr}{result.exception or ''}", result.exit_code
    ran = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=_environment(),
        cwd=folder,
        check=False,
    )
    # A shell reports death by a signal as 128 and the signal's number.
    return ran.stdout, ran.stderr, ran.returncode if ran.returncode >= 0 else 128 - ran.returncode


def _run_here(command: str, folder: Path, spark: SparkSession) -> str:
    """Return the output of a program run in this process: its `spark_session` is the session given here."""
    printed = io.StringIO()
    arguments = shlex.split(command)[1:]
    with (
        _working_folder(spark, folder),
        patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def _working_folder(spark: SparkSession, folder: Path) -> Iterator[None]:
    """Let Spark read paths relative to this folder, like a JVM started in it."""
    jvm: Any = spark._jvm
    local = jvm.org.apache.hadoop.fs.FileSystem.get(spark._jsc.hadoopConfiguration())  # type: ignore[attr-defined]
    before = local.getWorkingDirectory()
    local.setWorkingDirectory(jvm.org.apache.hadoop.fs.Path(str(folder)))
    context = spark.sparkContext
    add = context.addPyFile
    try:
        # Java's view of the folder, which this call requests, cannot change later.
        with patch.object(context, "addPyFile", lambda path: add(str(folder / path))):
            yield
    finally:
        local.setWorkingDirectory(before)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with its output; a final backslash continues a line."""
    command, shown = "", ""
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line.removeprefix("$ "), ""
        elif command.endswith("\\") and not shown:
            command += f"\n{line}"
        else:
            shown += f"{line}\n"
    if command:
        yield command, shown


def _pattern(line: str) -> str:
    return "[^\n]*".join(re.escape(part) for part in line.split("…"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _environment() -> dict[str, str]:
    """Return a reader's environment: this Python, and output that does not depend on the terminal."""
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_TOOL_OPTIONS": SHORT_LIVED_JAVA,
        "TZ": "UTC",
    }
