"""
One ZooKeeper server as a Java process, out of the jars that PySpark brings along.

A server has a folder: its configuration, its data, and its log (rolled over at
1 MiB). It runs in a session of its own, so that an interrupt at the terminal does
not reach it, and it is known by its process id and, lest another process has
got the same id, by the configuration file named in its command line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import Clock

__all__ = [
    "HOST",
    "ServerProcess",
    "answer",
    "find_jars",
    "find_java",
    "forget",
    "free_port",
    "is_free",
    "launch",
    "noted",
]

_PORT_FIRST: Final = 20_000
_PORTS: Final = 12_000

HOST: Final = "127.0.0.1"
"""Servers listen on the loopback interface only."""

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
    "4lw.commands.whitelist": "*",
    "autopurge.snapRetainCount": "3",
    "autopurge.purgeInterval": "1",
    "preAllocSize": "1024",
}
_LOG_CONFIGURATION: Final = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c{{1}}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 1MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""
_START_AND_NOTE: Final = """\
cd "$0" && port="$1" && shift || exit 1
"$@" </dev/null >server.out 2>&1 &
echo "{\\"process_id\\": $!, \\"port\\": $port}" >server.json.new && mv server.json.new server.json
"""
_POLL_MS: Final = 20
_END_MS: Final = 5_000
_ANSWER_CHARACTERS_MAX: Final = 64 * 1024


def find_java(environment: Mapping[str, str] = os.environ) -> str:
    """
    The ``java`` program: of ``JAVA_HOME``, or on the path.

    Raises:
        UnavailableError: there is none.
    """
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else None
    java = java or shutil.which("java", path=environment.get("PATH", ""))
    if java is None:
        raise UnavailableError("no java found: install java 17 or newer, or name a running zookeeper")
    return java


def find_jars() -> Path:
    """
    The folder of PySpark's jars.

    Raises:
        UnavailableError: PySpark is not installed or has no ZooKeeper.
    """
    spec = find_spec("pyspark")
    folders = (
        [] if spec is None else [Path(place) / "jars" for place in spec.submodule_search_locations or ()]
    )
    for folder in folders:
        if any(folder.glob("zookeeper-*.jar")):
            return folder
    raise UnavailableError("no zookeeper found: install pyspark from pypi, or name a running zookeeper")


def free_port() -> int:
    """
    A loopback port that nobody listens on just now, below those that systems give to outgoing connections.

    A server that died must get its port back, so it may not lie where any client's connection can take it.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        drawn: int = probe.getsockname()[1]
    for step in range(_PORTS):
        port = _PORT_FIRST + (drawn + step) % _PORTS
        if is_free(port):
            return port
    return drawn


def is_free(port: int) -> bool:
    """
    Whether a server could listen on the port just now.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def answer(port: int, command: str, timeout_s: float = 1.0) -> str:
    """
    The server's answer to a four-letter command; empty if there is none.
    """
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
    """
    A running server, whoever has started it.
    """

    process_id: int
    port: int
    folder: Path

    def is_running(self) -> bool:
        """
        Whether the process is alive and is this server and not another with its id.
        """
        return str(_configuration(self.folder)) in _command_line(self.process_id)

    def is_serving(self) -> bool:
        """
        Whether a server with this folder's data answers on the port and takes part in its ensemble.
        """
        # A member that has no quorum, or is still starting, says so instead of its mode.
        place = f"dataDir={_data(self.folder)}"
        return "Mode: " in answer(self.port, "srvr") and place in answer(self.port, "conf")

    def wait_serving(self, clock: Clock, timeout_ms: float) -> bool:
        """
        Wait until it serves; false if the process ends or the time runs out.
        """
        deadline_us = clock.monotonic_us() + int(timeout_ms * 1_000)
        while not self.is_serving():
            if not self.is_running() or clock.monotonic_us() >= deadline_us:
                return False
            clock.sleep_ms(_POLL_MS)
        return True

    def signal(self, number: int) -> None:
        """
        Send a signal, if the process is this server.
        """
        if self.is_running():
            try:
                os.kill(self.process_id, number)
            except ProcessLookupError:
                return

    def stop(self, clock: Clock) -> bool:
        """
        Ask it to end, then kill it; whether it is gone.
        """
        return self._end(signal.SIGTERM, clock) or self.kill(clock)

    def kill(self, clock: Clock) -> bool:
        """
        End it without its consent; whether it is gone.
        """
        return self._end(signal.SIGKILL, clock)

    def _end(self, number: int, clock: Clock) -> bool:
        self.signal(number)
        deadline_us = clock.monotonic_us() + _END_MS * 1_000
        while self.is_running() and clock.monotonic_us() < deadline_us:
            clock.sleep_ms(_POLL_MS)
        return not self.is_running()

    def last_words(self) -> str:
        """
        The end of its output and log, for errors.
        """
        files = (self.folder / "server.out", self.folder / "server.log")
        texts = [file.read_text(errors="replace")[-2_000:] for file in files if file.exists()]
        return "\n".join(text for text in texts if text)


def launch(
    folder: Path, port: int, *, java: str, jars: Path, settings: Mapping[str, str] | None = None
) -> ServerProcess:
    """
    Start a server and return at once; `ServerProcess.wait_serving` waits for it.

    Args:
        folder: its place; existing data is served again.
        port: where clients connect.
        java: the program.
        jars: the folder of the jars.
        settings: lines of ``zoo.cfg`` that differ from ours.
    """
    folder = folder.resolve()
    forget(folder)
    _data(folder).mkdir(parents=True, exist_ok=True)
    lines = {**_SETTINGS, "dataDir": str(_data(folder)), "clientPort": str(port), **(settings or {})}
    _configuration(folder).write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    log_configuration = folder / "log4j2.properties"
    log_configuration.write_text(_LOG_CONFIGURATION.format(log=folder / "server.log"))
    names = sorted(jar.name for jar in jars.glob("*.jar") if jar.name.startswith(_JARS))
    command = [
        java,
        *_JAVA_OPTIONS,
        f"-Dlog4j2.configurationFile={log_configuration}",
        "-cp",
        os.pathsep.join(str(jars / name) for name in names),
        _MAIN_CLASS,
        str(_configuration(folder)),
    ]
    # Through a shell that ends at once: the server is nobody's child, whoever started it may
    # go first, and every user of it, starter or not, deals with it in the same way. The shell
    # writes the note, so that killing the starter cannot leave a server that nobody knows of.
    shell = ["/bin/sh", "-c", _START_AND_NOTE, str(folder), str(port), *command]
    subprocess.run(shell, check=True, start_new_session=True)  # noqa: S603 - our own command
    server = noted(folder)
    if server is None:
        raise UnavailableError("zookeeper's server cannot be started", folder=folder)
    return server


def noted(folder: Path) -> ServerProcess | None:
    """
    The server that was started last in ``folder``; ask it whether it is running.
    """
    try:
        pairs = json.loads((folder / "server.json").read_bytes())
        return ServerProcess(
            process_id=int(pairs["process_id"]), port=int(pairs["port"]), folder=folder.resolve()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(folder: Path) -> None:
    """
    Remove the note of a server that has ended.
    """
    (folder / "server.json").unlink(missing_ok=True)


def _configuration(folder: Path) -> Path:
    return folder / "zoo.cfg"


def _data(folder: Path) -> Path:
    return folder / "data"


def _command_line(process_id: int) -> str:
    """
    The command line of a process; empty if it has ended.
    """
    process = Path("/proc") / str(process_id)
    try:
        if Path("/proc/self").exists():
            return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        shown = subprocess.run(  # noqa: S603 - our own command
            ["/bin/ps", "-ww", "-o", "command=", "-p", str(process_id)],
            check=False,
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""
    return shown.stdout
