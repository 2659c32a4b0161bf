"""One ZooKeeper server as a Java process, from PySpark's jars; and the ``java`` program that servers and Spark run on.

A server runs in its own session, so an interrupt at the terminal does not reach it. It is identified by its process id and
start time, because another process may get the same id. Whoever made the folder may have written its record, so the server
also keeps a lock in the folder, and a process that does not is never signalled.

The server runs in its folder and names its files relative to it: a folder's name, whatever letters it has, is in no
configuration.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Final

import orjson

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.objects.obstore import local_path
from millpond.statestore.objects.system_files import ForeignFileError, SystemFiles, way_out
from millpond.statestore.types import Clock

_PORT_FIRST: Final = 20_000
_PORTS: Final = 12_000

HOST: Final = "127.0.0.1"
"""Servers listen on the loopback interface only."""

OPTIONS_VARIABLE: Final = "MILLPOND_ZOOKEEPER_JAVA_OPTIONS"
"""The environment variable with further options of servers' ``java``, quoted as in a shell."""

_MAIN_CLASS: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
# Of some 300 jars these are needed; a short class path halves the start-up time.
_JARS: Final = ("zookeeper", "slf4j-api", "log4j-", "netty-", "snappy-java", "metrics-core", "commons-")
_JAVA_OPTIONS: Final = (
    "-Xms16m",
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Xshare:auto",
    "-Djava.awt.headless=true",
)
_SETTINGS: Final = {
    "tickTime": "500",
    "maxSessionTimeout": "120000",
    "initLimit": "20",
    "syncLimit": "10",
    "clientPortAddress": HOST,
    # Every client is a process of this machine, which is one address.
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
    # Everybody on the machine may ask these, so they are as few as `ServerProcess` needs.
    "4lw.commands.whitelist": "srvr,conf,ruok",
    "autopurge.snapRetainCount": "3",
    "autopurge.purgeInterval": "1",
    "preAllocSize": "1024",
}
_LOG_CONFIGURATION: Final = b"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = server.log
appender.file.filePattern = server.log.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 1MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""
# The process records itself before it becomes the server, so that no server can run unrecorded. Its earlier
# output goes to the process that starts it, whose wait ends with the last `exec`.
_RECORD_AND_BECOME: Final = """\
umask 077
cd "$1" && port="$2" && shift 2 && : >server.out || exit 1
boot="" ticks=""
if [ -e /proc/self/stat ]; then
    { read -r boot </proc/sys/kernel/random/boot_id; } 2>/dev/null
    read -r stat <"/proc/$$/stat" && ticks="$(set -- ${stat##*) } && echo "${20}")"
else
    ticks="$(LC_ALL=C /bin/ps -o lstart= -p $$)"
fi
[ -n "$ticks" ] || { echo "the system does not say when process $$ was started"; exit 1; }
started="$boot $ticks"
echo "{\\"process_id\\": $$, \\"port\\": $port, \\"started\\": \\"$started\\"}" >server.json.new || exit 1
mv server.json.new server.json || exit 1
exec "$@" </dev/null >server.out 2>&1
"""
DATA: Final = "data"
_CONFIGURATION: Final = "zoo.cfg"
_RUNNING: Final = "running"
PLACE_OPTION: Final = "-Dmillpond.zookeeper="
JAAS_OPTION: Final = "-Djava.security.auth.login.config="
_LOG: Final = "server.log"
_START_LINE: Final = "--- a server starts ---\n"
_POLL_MS: Final = 20
_END_MS: Final = 5_000
_ANSWER_CHARACTERS_MAX: Final = 64 * 1024
_WORDS_CHARACTERS_MAX: Final = 2_000
_HAS_PROC: Final = Path("/proc/self/stat").exists()
# Of a server's files: only this user may read its secret.
_MODE: Final = 0o600
_OTHER_LETTERS: Final = re.compile(r"[^ ->@-~\n]+")
_ENDED: Final = ("Z", "X", "x")
"""States of a process that has ended but has not been reaped."""


def find_jars() -> Path:
    """Return the folder of PySpark's jars, or raise `UnavailableError` if PySpark is missing or has no ZooKeeper."""
    spec = find_spec("pyspark")
    folders = (
        [] if spec is None else [Path(place) / "jars" for place in spec.submodule_search_locations or ()]
    )
    for folder in folders:
        if any(folder.glob("zookeeper-*.jar")):
            return folder
    raise UnavailableError("no zookeeper found: install pyspark from pypi, or name a running zookeeper")


def class_path(jars: Path) -> str:
    names = sorted(jar.name for jar in jars.glob("*.jar") if jar.name.startswith(_JARS))
    return os.pathsep.join(str(jars / name) for name in names)


def free_ports(count: int) -> list[int]:
    """Return loopback ports that no process listens on.

    They lie below the ports that systems give to outgoing connections, because a server that died must get its port back.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        drawn: int = probe.getsockname()[1]
    candidates = (_PORT_FIRST + (drawn + step) % _PORTS for step in range(_PORTS))
    ports = list(islice(filter(is_free, candidates), count))
    if len(ports) < count:
        raise UnavailableError(
            "no ports are free for zookeeper", first=_PORT_FIRST, last=_PORT_FIRST + _PORTS - 1
        )
    return ports


def is_free(port: int) -> bool:
    """Return True if a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def answer(port: int, command: str, timeout_s: float = 1.0) -> str:
    """Return the server's answer to a four-letter command, or "" without one."""
    parts: list[bytes] = []
    try:
        with socket.create_connection((HOST, port), timeout=timeout_s) as connection:
            connection.sendall(command.encode())
            while sum(map(len, parts)) < _ANSWER_CHARACTERS_MAX and (part := connection.recv(4096)):
                parts.append(part)
    except OSError:
        return ""
    return b"".join(parts).decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A running server, started by this process or another."""

    process_id: int
    port: int
    started: str
    folder: Path

    def is_running(self) -> bool:
        """Return True while the process is alive and is this server, or about to become it."""
        return _started(self.process_id) == self.started

    def is_serving(self) -> bool:
        """Return True if a server with this folder's data answers on the port and takes part in its ensemble."""
        # A member without a quorum, or still starting, reports that instead of its mode.
        place = _comparable(f"dataDir={self.folder / DATA}")
        return "Mode: " in answer(self.port, "srvr") and place in _comparable(answer(self.port, "conf"))

    def wait_serving(self, clock: Clock, timeout_ms: float) -> bool:
        """Wait until the server serves; return False if the process ends or the time runs out."""
        deadline_us = clock.monotonic_us() + int(timeout_ms * 1_000)
        # Another user's program may answer on the port of a server that has ended.
        while self.is_running():
            if self.is_serving():
                return True
            if clock.monotonic_us() >= deadline_us:
                return False
            clock.sleep_ms(_POLL_MS)
        return False

    def is_own(self) -> bool:
        """Return True while the recorded process runs and proves to be a server of this folder."""
        return self.is_running() and (
            _is_locked(self.folder / _RUNNING) or _names_folder(self.process_id, self.folder)
        )

    def is_secured(self) -> bool:
        """Return True if the server was started with users and passwords."""
        return any(word.startswith(JAAS_OPTION) for word in _command_of(self.process_id))

    def signal(self, number: int) -> None:
        """Send a signal, if the process is this server."""
        if self.is_own():
            try:
                os.kill(self.process_id, number)
            except ProcessLookupError:
                return

    def stop(self, clock: Clock) -> bool:
        """Ask the server to end, then kill it; return True once it is gone."""
        return self._end(signal.SIGTERM, clock) or self.kill(clock)

    def kill(self, clock: Clock) -> bool:
        return self._end(signal.SIGKILL, clock)

    def _end(self, number: int, clock: Clock) -> bool:
        self.signal(number)
        deadline_us = clock.monotonic_us() + _END_MS * 1_000
        while self.is_running() and clock.monotonic_us() < deadline_us:
            clock.sleep_ms(_POLL_MS)
        return not self.is_running()

    def last_words(self) -> str:
        """Return the end of the server's output and log, for errors."""
        read = (read_own(self.folder / name).decode(errors="replace") for name in ("server.out", _LOG))
        # The log also holds the lines of earlier servers of this folder.
        texts = [text.rpartition(_START_LINE)[2] for text in read]
        return "\n".join(_end_of(text) for text in texts if text)


def launch(
    folder: Path,
    port: int,
    *,
    java: str,
    jars: Path,
    settings: Mapping[str, str] | None = None,
    java_options: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> ServerProcess:
    """Start a server and return at once; `ServerProcess.wait_serving` waits for it.

    Existing data in ``folder`` is served again. ``settings`` replace lines of the default ``zoo.cfg``, and ``java_options``
    add to the program's options, as the environment's `OPTIONS_VARIABLE` does.
    """
    user_options = _user_options(environment)
    folder = place_of_server(folder)
    make_folder(folder)
    forget(folder)
    lines = {**_SETTINGS, "dataDir": f"./{DATA}", "clientPort": str(port), **(settings or {})}
    write_own(folder / _CONFIGURATION, "".join(f"{name}={value}\n" for name, value in lines.items()).encode())
    write_own(folder / "log4j2.properties", _LOG_CONFIGURATION)
    with os.fdopen(open_own(folder / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as lines_of_log:
        lines_of_log.write(_START_LINE)
    command = [
        java,
        *_JAVA_OPTIONS,
        *java_options,
        *user_options,
        "-Dlog4j2.configurationFile=log4j2.properties",
        f"{PLACE_OPTION}{folder}",
        "-cp",
        class_path(jars),
        _MAIN_CLASS,
        _CONFIGURATION,
    ]
    # Start it through a shell that ends at once. The server is then no child of this process, which may end first,
    # and every user treats the server in the same way.
    shell = ["/bin/sh", "-c", _RECORD_AND_BECOME, "sh", str(folder), str(port), *command]
    lock = open_own(folder / _RUNNING, os.O_RDWR | os.O_CREAT)
    try:
        # The server inherits the lock, and with it the proof that it was started here.
        fcntl.flock(lock, fcntl.LOCK_SH)
        output = _run_detached(shell, lock)
    finally:
        os.close(lock)
    server = recorded_server(folder)
    if server is None:
        failure = UnavailableError("zookeeper's server cannot be started", folder=folder)
        failure.add_note(output)
        raise failure
    return server


def _user_options(environment: Mapping[str, str]) -> list[str]:
    try:
        return shlex.split(environment.get(OPTIONS_VARIABLE, ""))
    except ValueError as error:
        raise InvalidError("java's options cannot be read", variable=OPTIONS_VARIABLE, cause=error) from error


def _run_detached(command: list[str], lock: int) -> str:
    """Run a command detached from this process, in its own session; return its output until it closes that."""
    shell = ["/bin/sh", "-c", '"$@" &', "sh", *command]
    try:
        return subprocess.run(  # noqa: S603 - our own command
            shell,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
            # In the locale C Java cannot open a folder whose name is not ASCII.
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            text=True,
            errors="replace",
        ).stdout
    except OSError as error:
        raise UnavailableError("zookeeper's server cannot be started", cause=error) from error


def recorded_server(folder: Path) -> ServerProcess | None:
    """Return the server that was started last in ``folder``, whether or not it still runs."""
    try:
        pairs = orjson.loads(read_own(folder / "server.json"))
        server = ServerProcess(
            process_id=int(pairs["process_id"]),
            port=int(pairs["port"]),
            started=" ".join(pairs["started"].split()),
            folder=place_of_server(folder),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return server if 0 < server.process_id < 2**31 and 0 < server.port < 2**16 else None


def forget(folder: Path) -> None:
    """Remove the record of a server that has ended."""
    with _own_files(folder), suppress(FileNotFoundError):
        _files_of(folder).remove(str(folder / "server.json"))


def place_of_server(folder: Path) -> Path:
    """Return the absolute path of a server's folder, which is itself no link."""
    return folder.parent.resolve() / folder.name


def make_folder(folder: Path) -> None:
    """Make a server's folder for this user alone, and refuse what a server would follow out of it.

    Raises:
        InvalidError: the folder's name has control characters, or a file in it is a link, a pipe or a device.
    """
    # They would break the lines of logs and of answers.
    local_path(folder)
    files = _files_of(folder.parent)
    with _own_files(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for made in (str(folder), str(folder / DATA)):
            with suppress(FileExistsError):
                files.make_folder(made)
            if not files.is_folder(made):
                raise ForeignFileError(made)
        if (status := folder.stat()).st_uid == os.geteuid() and status.st_mode & 0o077:
            folder.chmod(0o700)
        _files_of(folder).refuse_links()


def open_own(path: Path, flags: int) -> int:
    """Open a file of a server's folder, for this user alone."""
    with _own_files(path.parent):
        return _files_of(path.parent).open(str(path), flags)


def read_own(path: Path, size_bytes: int = 2**20) -> bytes:
    """Return the end of a file of a server's folder; nothing where there is no file."""
    with suppress(OSError):
        return _files_of(path.parent).read_tail(str(path), size_bytes).data
    return b""


def write_own(path: Path, data: bytes) -> None:
    """Replace a file of a server's folder by a new one."""
    with _own_files(path.parent):
        _files_of(path.parent).overwrite(str(path), data)


def _files_of(folder: Path) -> SystemFiles:
    return SystemFiles(str(folder), _MODE)


@contextmanager
def _own_files(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ForeignFileError, IsADirectoryError, NotADirectoryError) as error:
        raise InvalidError(
            "the store's zookeeper must have files and folders in their places, no link, pipe or device: remove it",
            path=folder / (error.filename2 or error.filename),
        ) from error
    except OSError as error:
        raise UnavailableError(
            f"the folder of the store's zookeeper cannot be used{way_out(error)}", folder=folder, cause=error
        ) from error


def _is_locked(path: Path) -> bool:
    """Return True while another process has a file's lock."""
    try:
        with os.fdopen(_files_of(path.parent).open(str(path), os.O_RDWR), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _names_folder(process_id: int, folder: Path) -> bool:
    """Return True if this user's process is a ZooKeeper whose command line names the folder.

    A file system may lose the lock, and servers of earlier versions have none.
    """
    if not _is_of_this_user(process_id):
        return False
    words = _command_of(process_id)
    places = {f"{PLACE_OPTION}{folder}", str(folder / _CONFIGURATION)}
    return _MAIN_CLASS in words and not places.isdisjoint(words)


def _is_of_this_user(process_id: int) -> bool:
    if not _HAS_PROC:
        return _asked_ps(process_id, "uid").strip() == str(os.geteuid())
    try:
        return Path(f"/proc/{process_id}").stat().st_uid == os.geteuid()
    except OSError:
        return False


def _command_of(process_id: int) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    if not _HAS_PROC:
        return _asked_ps(process_id, "command").split()
    try:
        return os.fsdecode(Path(f"/proc/{process_id}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def _comparable(text: str) -> str:
    """Return a text of Java's in which paths look as ours do: its locale may lack some of their letters."""
    return _OTHER_LETTERS.sub("?", text.replace("/./", "/"))


def _end_of(text: str) -> str:
    """Return the last complete lines of a text."""
    end = text[-_WORDS_CHARACTERS_MAX:]
    return end if len(end) == len(text) else end.partition("\n")[2] or end


def _started(process_id: int) -> str | None:
    """Return the start time of a process, or ``None`` if it has ended; no two processes of one id share a start time."""
    if not _HAS_PROC:
        return _started_after_ps(process_id)
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # After the name, which may hold anything: the state, and as the twentieth the ticks from the system's start.
    state, *others = stat.rpartition(")")[2].split()
    return None if state in _ENDED else " ".join([*_boot().split(), others[18]])


def _started_after_ps(process_id: int) -> str | None:
    """Return the start time where there is no ``/proc``, to the second."""
    state, *others = _asked_ps(process_id, "stat", "lstart").split() or ["Z"]
    return None if state[0] in _ENDED else " ".join(others)


def _asked_ps(process_id: int, *columns: str) -> str:
    names = [word for column in columns for word in ("-o", f"{column}=")]
    return subprocess.run(  # noqa: S603 - our own command
        ["/bin/ps", "-ww", *names, "-p", str(process_id)],
        check=False,
        stdout=subprocess.PIPE,
        env={"LC_ALL": "C"},
        text=True,
        errors="surrogateescape",
    ).stdout


@cache
def _boot() -> str:
    """Return an identifier of the system's current boot; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


JAVA_MIN: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
"""Java 8 calls itself 1.8."""

_ANSWER_S: Final = 20.0


def find_java(environment: Mapping[str, str] = os.environ) -> str:
    """Return the ``java`` program of ``JAVA_HOME``, else of the path; raise `UnavailableError` if there is none."""
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else None
    java = java or shutil.which("java", path=environment.get("PATH", ""))
    if java is None:
        raise UnavailableError(
            f"no java found: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder, or name a running zookeeper",
            JAVA_HOME=home,
        )
    return java


def java_of_spark(environment: Mapping[str, str] = os.environ) -> str:
    """Return the ``java`` program that Spark starts: Spark ignores the path if there is a ``JAVA_HOME``."""
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else environment.get("PATH", ""))
    if java is None:
        raise UnavailableError(
            f"spark needs java, and finds none: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder",
            JAVA_HOME=home,
        )
    return java


def refuse_old_java(java: str) -> None:
    """Raise `UnavailableError` if a program that did not start is too old; this costs one start of the program."""
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own program
            [java, "-version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    found = _VERSION.search(answer.stderr + answer.stdout)
    if found is not None and int(found[1]) < JAVA_MIN:
        raise UnavailableError(
            f"this java is too old: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder",
            java=java,
            version=found[1],
        )
