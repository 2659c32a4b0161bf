"""A place where commands run on damaged stores and hostile inputs, and the actions forbidden to them.

Commands run in this process. An audit hook sees every file that Python opens, every process that it starts
and every signal that it sends. The canary folder is compared after each command. A command ends with a
result or with an error of the tree, within its time and memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from unittest.mock import patch

import numpy as np
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.statestore.errors import InternalError, MillpondError, UnavailableError
from millpond.statestore.leases import zookeeper_server, zookeeper_service
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.system import SystemClock
from tests.hostile.damage import Vandal
from tests.hostile.inputs import AGAIN, APP_MODULE, APPS, Forger, replay_on
from tests.prepared_pond import write_pond

PROCESSOR_S_MAX: Final = 60.0
# A hook may run for each row of an input, and a page of a few kilobytes has a million rows.
_PROCESSOR_S_A_ROW: Final = 100e-6
# On a busy machine a minute of processor time takes several.
WAIT_S_MAX: Final = 600.0
MEMORY_MIB_MAX: Final = 1_500
# Much of it is never touched: what a command uses is measured.
_ADDRESS_SPACE: Final = 16 << 30

_READS: Final[tuple[tuple[str, ...], ...]] = (
    ("status", "pond"),
    ("status", "pond", "--check"),
    ("status", "pond", "--json"),
    ("rows", "pond", "alarm"),
    ("rows", "pond", "window_counter", "--key", "EWR"),
    ("rows", "pond", "dead_letters", "--json"),
    ("rows", "pond", "alarm", "--version", "6"),
    ("sql", "pond", "from alarm"),
    ("sql", "pond", "select * from window_counter join alarm using (key)", "--json"),
    ("sql", "pond", "from record_ids.window_counter", "--format", "csv"),
    ("history", "pond"),
    ("history", "pond", "--json"),
    ("verify", "pond"),
    ("verify", "pond", "--json"),
    ("dead-letters", "list", "pond"),
    ("dead-letters", "show", "pond", "window_counter/0000000001/000000"),
    ("intervals", "pond"),
    ("savepoint", "pond"),
    ("fork", "pond", "out/fork"),
    ("fork", "pond", "out/fork", "--version", "before the sale"),
    ("export", "pond", "out/tables"),
    ("export", "pond", "out/tables", "--format", "csv"),
    ("diff", "pond_of_today", "pond"),
    ("gc", "pond", "--dry-run"),
    ("repair", "pond", "--dry-run"),
    ("rewind", "pond", "--version", "6", "--dry-run"),
    ("complete", "rows", "pond"),
    ("complete", "rewind", "pond", "--version"),
)
_WRITES: Final[tuple[tuple[str, ...], ...]] = (
    ("gc", "pond", "--keep", "0s"),
    ("gc", "pond"),
    ("repair", "pond", "--yes"),
    ("rewind", "pond", "--version", "6", "--yes"),
    ("rewind", "pond", "--version", "before the sale", "--yes"),
    ("savepoint", "pond", "another"),
    ("savepoint", "pond", "before the sale", "--drop"),
    ("dead-letters", "retry", "pond", "--all"),
    ("dead-letters", "drop", "pond", "--all"),
    ("dead-letters", "withdraw", "pond"),
    ("intervals", "pond", "--split", "alarm", "EWR"),
    ("intervals", "pond", "--merge", "window_counter", "JFK"),
    ("load", "pond", "counts", "counts.parquet"),
    ("upgrade", "pond", "--app", "flights:pipeline"),
    ("adopt", "pond", "--as", "copy"),
    replay_on("flights"),
    ("run", "flights:pipeline", "--store", "pond", "--input", "flights=flights", "--more-to-come", "--quiet"),
)


Kind: TypeAlias = Literal["stores", "inputs"]
"""What is hostile in a case."""

# Of so many seeds one is an input, unless all cases are of one kind.
_INPUT_EVERY: Final = 3


@dataclass(slots=True)
class Case:
    """One damaged store or hostile input: its damage, its commands, and their forbidden actions."""

    seed: int
    deeds: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    outcomes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    memory_mib: int = 0
    input_rows: int = 0


class Watch:
    """An audit hook, which stays for the life of the process, and the problems that it has seen."""

    def __init__(self) -> None:
        self.canary: str | None = None
        self.problems: list[str] = []
        self._is_inside = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.canary is None or self._is_inside:
            return
        handle = _EVENTS.get(event)
        if handle is None:
            return
        self._is_inside = True
        try:
            problem = handle(self, event, arguments)
            if problem is not None and problem not in self.problems:
                where = [
                    f"{Path(frame.filename).name}:{frame.lineno}"
                    for frame in traceback.extract_stack()[-9:-2]
                ]
                self.problems.append(f"{problem} at {' '.join(where)}")
        finally:
            self._is_inside = False

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        path, mode, flags = arguments
        if isinstance(flags, int) and flags & os.O_NOFOLLOW and self._is_canary(path, follow=False) is False:
            return None
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return self._outside(f"{'writes' if writes else 'reads'} ({event} {mode})", path)

    def _touched(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        for path in arguments[:2]:
            # These act on a link itself, unlike opening it.
            if isinstance(path, str | bytes | os.PathLike) and self._is_canary(path, follow=False):
                return f"{event} outside: {path!r}"
        return None

    def _connected(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        (database, *_) = arguments
        text = os.fsdecode(database).removeprefix("file:").partition("?")[0]
        return self._outside(event, text)

    def _started(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        words = str(arguments[:2])
        return None if sys.executable in words else f"starts a process ({event}): {words[:200]}"

    def _signalled(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        return f"{event} {arguments}" if arguments[1] else None

    def _outside(self, what: str, path: object) -> str | None:
        if isinstance(path, str | bytes | os.PathLike) and self._is_canary(path, follow=True):
            return f"{what} outside: {path!r}"
        return None

    def _is_canary(self, path: str | bytes | os.PathLike[Any], *, follow: bool) -> bool:
        text = os.fsdecode(path)
        try:
            real = os.path.realpath(text) if follow else os.path.realpath(os.path.dirname(text) or ".")  # noqa: PTH120
        except (OSError, ValueError):
            return False
        return self.canary is not None and f"{real}/".startswith(f"{self.canary}/")


_TOUCHES: Final = (
    "remove",
    "rename",
    "mkdir",
    "rmdir",
    "link",
    "symlink",
    "truncate",
    "chmod",
    "utime",
    "chown",
)
_EVENTS: Final[Mapping[str, Any]] = {
    "open": Watch._opened,
    "sqlite3.connect": Watch._connected,
    "os.kill": Watch._signalled,
    **dict.fromkeys((f"os.{name}" for name in _TOUCHES), Watch._touched),
    **dict.fromkeys(
        ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn"), Watch._started
    ),
}  # fmt: skip


class Arena:
    """A folder with an honest store, a copy of which each case damages, and a canary folder next to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._template = folder / "template"
        self._pond = folder / "pond"
        self._canary = folder / "canary"
        self._watch = Watch()
        self._kept: set[str] = set()

    def prepare(self) -> None:
        """Make the honest store in the place of its copies, because a store knows its place."""
        if not self._template.exists():
            write_pond(self._folder)
            (self._folder / f"{APP_MODULE}.py").write_text(APPS, encoding="utf-8")
            _make_canary(self._canary)
            self._pond.rename(self._template)
            # A later process finds the leftovers of this one too.
            (self._folder / "kept").write_text("\n".join(path.name for path in self._folder.iterdir()))
        self._kept = {"kept", *(self._folder / "kept").read_text().splitlines()}

    def run(self, seed: int, only: Kind | None = None) -> Case:
        """Damage a copy of the store, or make an input next to it, and run some commands."""
        self._reset()
        # What earlier cases have left, mostly stacks of threads and pools of memory, is not this one's.
        so_far = _status_mib("VmData") << 20
        resource.setrlimit(resource.RLIMIT_DATA, (so_far + _ADDRESS_SPACE, resource.RLIM_INFINITY))
        case = Case(seed)
        rng = np.random.default_rng(seed)
        _end_later()
        kind = only or ("stores" if seed % _INPUT_EVERY else "inputs")
        commands = self._with_store(case, rng) if kind == "stores" else self._with_inputs(case, rng)
        registry = MemoryRegistry()
        before: dict[str, Any] | None = None
        for words in commands:
            # Only now, because the damage is done with the first command.
            before = _contents(self._canary) if before is None else before
            with_server = kind == "stores" and bool(rng.random() < 0.3)
            case.commands.append(" ".join(words))
            self._run(case, words, None if with_server else registry)
            after = _contents(self._canary)
            if after != before:
                case.problems.append(
                    f"{words}: changed outside: {sorted(set(after.items()) ^ set(before.items()))[:4]}"
                )
                before = after
        return case

    def _with_store(self, case: Case, rng: np.random.Generator) -> Iterator[tuple[str, ...]]:
        case.deeds = Vandal(rng, self._pond, self._canary).damage()
        for _ in range(int(rng.integers(1, 4))):
            table = _READS if rng.random() < 0.6 else _WRITES
            yield table[int(rng.integers(len(table)))]

    def _with_inputs(self, case: Case, rng: np.random.Generator) -> Iterator[tuple[str, ...]]:
        forger = Forger(rng, self._folder / "in", self._canary)
        case.deeds = forger.deeds
        commands = forger.forge()
        case.input_rows = forger.table_rows
        for words in commands:
            if words == AGAIN:
                forger.again()
            else:
                yield words

    def _run(self, case: Case, words: Sequence[str], registry: MemoryRegistry | None) -> None:
        self._watch.problems = []
        rss_mib = _begin_memory()
        _end_later(case.input_rows)
        with _leases(registry), _internal_errors() as bugs, contextlib.chdir(self._folder):
            self._watch.canary = str(self._canary)
            path = [*sys.path]
            try:
                problem, code = _complete(words[1:]) if words[0] == "complete" else _invoke(words)
            finally:
                self._watch.canary = None
                sys.path[:] = path
                for name in ("flights", APP_MODULE):
                    sys.modules.pop(name, None)
        faulthandler.cancel_dump_traceback_later()
        case.outcomes.append(code)
        used_mib = _peak_mib() - rss_mib
        case.memory_mib = max(case.memory_mib, used_mib)
        found = [problem] if problem else []
        found += [f"InternalError: {bug}" for bug in bugs]
        found += self._watch.problems
        found += [f"used {used_mib} MiB"] if used_mib > MEMORY_MIB_MAX else []
        case.problems += [f"{' '.join(words)}: {each}" for each in found]

    def _reset(self) -> None:
        for path in self._folder.iterdir():
            if path.name not in self._kept:
                _remove(path)
        if _contents(self._canary) != _CANARY_CONTENTS.get(str(self._canary)):
            shutil.rmtree(self._canary)
            _make_canary(self._canary)
        shutil.rmtree(self._folder / "out", ignore_errors=True)
        shutil.copytree(self._template, self._pond)


def _end_later(rows: int = 0) -> None:
    """End this process, with its stack, after a time on the processor or of waiting from now on."""
    faulthandler.register(signal.SIGPROF, chain=True)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S_MAX + rows * _PROCESSOR_S_A_ROW)
    faulthandler.dump_traceback_later(WAIT_S_MAX, exit=True)


_CANARY_CONTENTS: Final[dict[str, dict[str, Any]]] = {}


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    # Only root may empty a folder without permissions.
    path.chmod(0o700)
    for each in path.iterdir():
        _remove(each)
    path.rmdir()


def _make_canary(folder: Path) -> None:
    (folder / "folder").mkdir(parents=True)
    (folder / "precious.txt").write_text("do not delete")
    for name in ("2026", "5", "0000000001-x.parquet"):
        (folder / "folder" / name).write_text("a file of the user")
    with contextlib.closing(sqlite3.connect(folder / "places.sqlite")) as database:
        database.execute("create table bookmarks (url text)")
    _CANARY_CONTENTS[str(folder)] = _contents(folder)


def _contents(folder: Path) -> dict[str, Any]:
    # The vandal's own links may have led its other deeds here: a link is its text.
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


def _invoke(words: Sequence[str]) -> tuple[str | None, int]:
    result = CliRunner().invoke(main, words, prog_name="millpond")
    problem = None
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        frames = traceback.extract_tb(result.exception.__traceback__)[-7:]
        short = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1])
        problem = f"traceback: {type(result.exception).__name__}: {str(result.exception)[:200]!r} at {short}"
    elif "csv" not in words and any(sign in result.output for sign in ("\x1b", "\x07", "\x9b", "\u202e")):
        problem = "escape sequence in the output"
    return problem, result.exit_code


def _complete(words: Sequence[str]) -> tuple[str | None, int]:
    command, store, *more = words
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = ShellComplete(main, {}, "millpond", "_X").get_completions([command, store, *more], "")
        except MillpondError:
            return None, 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            return f"traceback: {type(error).__name__}: {error}", 2
    odd = [item.value for item in found if any(sign in item.value for sign in ("$(", "`", "\x1b", "\n"))]
    return (f"completion offers {odd[:3]!r}" if odd else None), 0


@contextlib.contextmanager
def _leases(registry: MemoryRegistry | None) -> Iterator[None]:
    """Give stores leases in memory, or, with ``None``, a server that does not start."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(zookeeper_server, "launch", _refuse))
        if registry is not None:
            patches.enter_context(patch.object(zookeeper_service, "EmbeddedZooKeeper", _NoServer))
            patches.enter_context(patch.object(zookeeper_service, "ZooKeeperLeases", _leases_in(registry)))
        yield


def _refuse(*_: object, **__: object) -> None:
    raise UnavailableError("no server is started here")


def _leases_in(registry: MemoryRegistry) -> Any:
    def connect(_hosts: str, _incarnation: str, writer_id: str, *_: object, **__: object) -> MemoryLeases:
        return MemoryLeases(registry, SystemClock(), writer_id=writer_id)

    return connect


class _NoServer:
    security = None
    damaged = Path("nowhere")

    def __init__(self, *_: object) -> None:
        pass

    def start_or_join(self) -> str:
        return "nowhere:0"

    def revive(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _internal_errors() -> Iterator[list[str]]:
    seen: list[str] = []
    former = InternalError.__init__

    def record(self: InternalError, message: str, **details: object) -> None:
        former(self, message, **details)
        seen.append(str(self)[:300])

    with patch.object(InternalError, "__init__", record):
        yield seen


def _begin_memory() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _peak_mib() -> int:
    return _status_mib("VmHWM")


def _status_mib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) // 1024
