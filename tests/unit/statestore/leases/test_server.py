"""The embedded ZooKeeper: one server for a folder, however many use it and however they end."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases import zookeeper_process as process
from millpond.statestore.leases.zookeeper_process import (
    ServerProcess,
    answer,
    find_java,
    free_ports,
    is_free,
    recorded_server,
)
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.servers.zookeeper import wait_until

pytestmark = pytest.mark.zookeeper

CLOCK = SystemClock()
Use = Callable[[], EmbeddedZooKeeper]

USER_PROGRAM = """
import sys
from pathlib import Path
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.testing.servers.zookeeper import wait_until

server = EmbeddedZooKeeper(Path(sys.argv[1]), SystemClock(), SystemRng())
print(server.start_or_join(), flush=True)
sys.stdin.read()
"""

# The kernel shows no command line while a process executes a new program. A test cannot stop a process at that
# moment, so this program runs without Java's arguments for a second.
NAMELESS_FOR_A_WHILE = """
printf '%s\\n' "$@" >"$0.words"
exec env JAVA="$JAVA" /bin/sh -c '
    sleep 1
    while IFS= read -r word; do set -- "$@" "$word"; done <"$0.words"
    exec "$JAVA" "$@"
' "$0"
"""

# Its first server is told another port than ours: as if that had been taken meanwhile.
TAKEN_AT_FIRST = """
for configuration in "$@"; do :; done
if [ ! -e "$0.tried" ]; then
    touch "$0.tried"
    echo "clientPort=$(cat "$0.port")" >>"$configuration"
fi
exec "$JAVA" "$@"
"""


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Use]:
    """Makes users of one folder's server, and leaves no server behind."""
    users: list[EmbeddedZooKeeper] = []

    def make() -> EmbeddedZooKeeper:
        users.append(EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng()))
        return users[-1]

    yield make
    for user in users:
        user.close()
    server = recorded_server(tmp_path)
    if server is not None:
        server.kill(CLOCK)


def running(folder: Path) -> ServerProcess:
    server = recorded_server(folder)
    assert server is not None
    assert server.is_running()
    return server


def are_stopped(server: ServerProcess) -> bool:
    """Whether all threads of the server stand still."""
    states = set()
    for task in Path(f"/proc/{server.process_id}/task").iterdir():
        # A thread may end while the others are looked at.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(task.joinpath("stat").read_text(encoding="utf-8").rpartition(") ")[2][0])
    return states == {"T"}


def other_process(folder: Path) -> subprocess.Popen[str]:
    """A process that uses the folder's server until its input ends, and has just got it."""
    user = subprocess.Popen(
        [sys.executable, "-c", USER_PROGRAM, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    assert user.stdout.readline().startswith("127.0.0.1:")
    return user


def finish(user: subprocess.Popen[str]) -> None:
    user.communicate()


def stand_in(folder: Path, script: str) -> str:
    """A ``java`` that is a shell script; it finds the real one as ``$JAVA``."""
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\nJAVA={shlex.quote(find_java())}\n{script}")
    java.chmod(0o755)
    return str(java)


def test_server_lives_from_first_use_to_last_close(use: Use, tmp_path: Path) -> None:
    """The first user starts a server on the loopback interface, others join it, and the last stops it."""
    first, second = use(), use()
    hosts = first.start_or_join()
    server = running(tmp_path)

    assert hosts == f"127.0.0.1:{server.port}"
    assert (first.start_or_join(), second.start_or_join()) == (hosts, hosts)
    assert answer(server.port, "ruok") == "imok"
    first.close()
    assert server.is_running()
    second.close()
    second.close()
    assert not server.is_running()
    assert recorded_server(tmp_path) is None


def test_users_that_come_at_once_share_one_server(use: Use) -> None:
    """Users that start at the same time agree on one server."""
    users = [use() for _ in range(3)]
    hosts: list[str] = []
    threads = [
        threading.Thread(target=lambda user=user: hosts.append(user.start_or_join())) for user in users
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(hosts) == 3
    assert len(set(hosts)) == 1


def test_other_process_inherits_the_server(use: Use, tmp_path: Path) -> None:
    """A process that has joined keeps the server when its starter closes, and stops it at its own end."""
    starter = use()
    starter.start_or_join()
    server = running(tmp_path)
    joined = other_process(tmp_path)
    starter.close()

    assert server.is_running()
    finish(joined)
    assert not server.is_running()


def test_server_of_a_killed_starter_is_found(use: Use, tmp_path: Path) -> None:
    """A server whose starter was killed goes on, and the next user joins it and stops it."""
    starter = other_process(tmp_path)
    server = running(tmp_path)
    starter.kill()
    finish(starter)
    user = use()

    assert server.is_running()
    assert user.start_or_join() == f"127.0.0.1:{server.port}"
    assert running(tmp_path) == server
    user.close()
    assert not server.is_running()


def test_dead_server_comes_back_on_its_port(use: Use, tmp_path: Path) -> None:
    """After the server was killed, a user that asks again gets one on the port that clients know."""
    user = use()
    hosts = user.start_or_join()
    old = running(tmp_path)
    old.kill(CLOCK)

    assert user.start_or_join() == hosts
    assert running(tmp_path).process_id != old.process_id


def test_user_remembers_the_port_of_a_lost_note(use: Use, tmp_path: Path) -> None:
    """Clients wait on the old port, so it is taken again also after a start that failed and left no note."""
    user = use()
    hosts = user.start_or_join()
    running(tmp_path).kill(CLOCK)
    (tmp_path / "server.json").unlink()

    assert user.start_or_join() == hosts


def test_server_of_a_removed_folder_ends_with_its_last_user(use: Use, tmp_path: Path) -> None:
    """Users whose store was deleted under them still count, and the last one that closes leaves no server."""
    users = [use(), use()]
    for user in users:
        user.start_or_join()
    server = running(tmp_path)
    shutil.rmtree(tmp_path)

    users[0].close()
    assert server.is_running()
    users[1].close()
    assert not server.is_running()


def test_note_of_a_foreign_process_is_not_believed(use: Use, tmp_path: Path) -> None:
    """A dead server's note whose process id and port now belong to others starts a new server, and kills no process."""
    first = use()
    first.start_or_join()
    note = json.loads((tmp_path / "server.json").read_bytes())
    first.close()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (tmp_path / "server.json").write_text(json.dumps(note | {"process_id": stranger.pid, "port": port}))
        hosts = use().start_or_join()

    assert hosts != f"127.0.0.1:{port}"
    assert stranger.poll() is None
    stranger.communicate("\n")


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "[]",
        '{"process_id": 1}',
        '{"process_id": 1, "port": 1}',
        '{"process_id": 1, "port": 1, "started": 1}',
        '{"process_id": "x", "port": 1, "started": "x"}',
    ],
)
def test_damaged_note_counts_as_none(tmp_path: Path, note: str) -> None:
    """A note that cannot be read names no server."""
    (tmp_path / "server.json").write_text(note)

    assert recorded_server(tmp_path) is None


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    """A port that was asked for and is taken is an error that names it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        user = EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), port=port)

        assert not is_free(port)
        with pytest.raises(InvalidError, match=f"port=`{port}`"):
            user.start_or_join()


def test_missing_java_is_said_in_one_line(tmp_path: Path) -> None:
    """Without Java the error says what to install, or which program is not there."""
    with pytest.raises(UnavailableError, match="no java found: install java 17"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(UnavailableError, match="nowhere/java"):
        EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), java="/nowhere/java").start_or_join()


def test_java_home_comes_first(tmp_path: Path) -> None:
    """The Java of ``JAVA_HOME`` is preferred to the one on the path."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch(mode=0o755)

    assert find_java({"JAVA_HOME": str(tmp_path), "PATH": os.defpath}) == str(java)


def failed_start(folder: Path, script: str, **options: int) -> UnavailableError:
    """What a start with a stand-in for Java raises; it leaves no note, and no process that would have one."""
    java = stand_in(folder / "bin", script)
    user = EmbeddedZooKeeper(folder / "server", CLOCK, SystemRng(), java=java, **options)
    with pytest.raises(UnavailableError, match="zookeeper's server does not start") as caught:
        user.start_or_join()
    assert recorded_server(folder / "server") is None
    # As pytest would print it.
    said = "\n".join(caught.value.__notes__)
    assert all(line in str(caught.getrepr(style="short")) for line in said.splitlines())
    return caught.value


def test_server_that_ends_at_once_tells_its_last_words(tmp_path: Path) -> None:
    """A Java that fails gives an error that says so, with its output as a note."""
    failure = failed_start(tmp_path, "echo too old >&2; exit 1")

    assert failure.details["cause"] == "it has ended"
    assert failure.__notes__ == ["It said last:\ntoo old\n"]


def test_option_that_java_does_not_know_is_named(tmp_path: Path) -> None:
    """What the real Java says before there is a log is in the error."""
    failure = failed_start(tmp_path, 'exec "$JAVA" -XX:+NoSuchOption "$@"')

    assert "NoSuchOption" in failure.__notes__[0]


def test_java_that_says_nothing_is_told(tmp_path: Path) -> None:
    """The error also says that there were no last words, and does not show those of an earlier server."""
    failed_start(tmp_path, 'exec "$JAVA" -XX:+NoSuchOption "$@"')

    assert failed_start(tmp_path, "exit 1").__notes__ == ["It said last:\n(nothing)"]


def test_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """One that lives and does not serve in time is an error that says how long, and does not go on."""
    failure = failed_start(tmp_path, 'echo $$ >"$0.id"; exec sleep 600', ready_timeout_ms=300)

    assert failure.details["cause"] == "it does not serve after 0.3 s"
    assert process._started(int((tmp_path / "bin" / "java.id").read_text())) is None


def test_interrupted_start_leaves_no_server(tmp_path: Path) -> None:
    """An interrupt while a server is waited for ends the server as well."""

    class Interrupting(SystemClock):
        def sleep_ms(self, duration_ms: float) -> None:
            if not started:
                started.append(running(tmp_path / "server"))
                raise KeyboardInterrupt
            super().sleep_ms(duration_ms)

    started: list[ServerProcess] = []
    java = stand_in(tmp_path / "bin", "exec sleep 600")
    user = EmbeddedZooKeeper(tmp_path / "server", Interrupting(), SystemRng(), java=java)
    with pytest.raises(KeyboardInterrupt):
        user.start_or_join()

    assert not started[0].is_running()
    assert recorded_server(tmp_path / "server") is None


def test_port_that_is_taken_at_the_last_moment_is_no_obstacle(tmp_path: Path) -> None:
    """When another program gets the port between choice and start, the server starts on another one."""
    java = stand_in(tmp_path / "bin", TAKEN_AT_FIRST)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (tmp_path / "bin" / "java.port").write_text(str(port))
        user = EmbeddedZooKeeper(tmp_path / "server", CLOCK, SystemRng(), java=java)
        user.start_or_join()

        assert (tmp_path / "bin" / "java.tried").exists()
        assert "BindException" in (tmp_path / "server" / "server.log").read_text()
        assert running(tmp_path / "server").is_serving()
        user.close()


def test_port_of_ones_own_that_is_taken_at_the_last_moment_is_said(tmp_path: Path) -> None:
    """Where there is no other port to try, the error shows that the port was taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java.port").write_text(str(listener.getsockname()[1]))
        failure = failed_start(tmp_path, TAKEN_AT_FIRST, port=free_ports(1)[0])

    assert "java.net.BindException: Address already in use" in failure.__notes__[0]


def test_server_is_waited_for_while_its_command_line_is_empty(tmp_path: Path) -> None:
    """A process that is executing Java, and for a moment has no command line, counts as the server that it becomes."""
    java = stand_in(tmp_path / "bin", NAMELESS_FOR_A_WHILE)
    user = EmbeddedZooKeeper(tmp_path / "folder", CLOCK, SystemRng(), java=java)
    hosts = user.start_or_join()
    server = running(tmp_path / "folder")

    assert hosts == f"127.0.0.1:{server.port}"
    user.close()
    assert not server.is_running()


def test_interrupt_at_the_terminal_does_not_reach_the_server(use: Use, tmp_path: Path) -> None:
    """The server is in a process group of its own, to which no interrupt of ours is sent."""
    use().start_or_join()

    assert os.getpgid(running(tmp_path).process_id) != os.getpgid(0)


def test_hanging_server_is_replaced(tmp_path: Path) -> None:
    """A server of ours that does not answer in time is ended and started again."""
    user = EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), answer_timeout_ms=500)
    user.start_or_join()
    hanging = running(tmp_path)
    hanging.signal(signal.SIGSTOP)
    # The thread that takes the signal must have its turn before the others stop.
    assert wait_until(lambda: are_stopped(hanging), CLOCK)
    user.start_or_join()

    assert not hanging.is_running()
    assert running(tmp_path).is_serving()
    user.close()


def test_free_port_is_free() -> None:
    """A free port can be listened on."""
    assert is_free(free_ports(1)[0])
