"""The embedded ZooKeeper: one server for each folder, shared by its users."""

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
from types import SimpleNamespace

import pytest

from millpond.statestore.errors import DataError, InvalidError, UnavailableError
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
from millpond.statestore.store import Store
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

# Start the first server on another port, as if ours had been taken meanwhile.
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
    states = set()
    for task in Path(f"/proc/{server.process_id}/task").iterdir():
        # A thread may end while the others are inspected.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(task.joinpath("stat").read_text(encoding="utf-8").rpartition(") ")[2][0])
    return states == {"T"}


def other_process(folder: Path) -> subprocess.Popen[str]:
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
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\nJAVA={shlex.quote(find_java())}\n{script}")
    java.chmod(0o755)
    return str(java)


def test_server_lives_from_first_use_to_last_close(use: Use, tmp_path: Path) -> None:
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


def test_concurrent_users_share_one_server(use: Use) -> None:
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


def test_other_process_inherits_server(use: Use, tmp_path: Path) -> None:
    starter = use()
    starter.start_or_join()
    server = running(tmp_path)
    joined = other_process(tmp_path)
    starter.close()

    assert server.is_running()
    finish(joined)
    assert not server.is_running()


def test_server_of_killed_starter_is_found(use: Use, tmp_path: Path) -> None:
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


def test_dead_server_restarts_on_same_port(use: Use, tmp_path: Path) -> None:
    """Clients keep the port."""
    user = use()
    hosts = user.start_or_join()
    old = running(tmp_path)
    old.kill(CLOCK)

    assert user.start_or_join() == hosts
    assert running(tmp_path).process_id != old.process_id


def test_port_survives_lost_record(use: Use, tmp_path: Path) -> None:
    """Clients keep waiting on the old port, even after a failed start."""
    user = use()
    hosts = user.start_or_join()
    running(tmp_path).kill(CLOCK)
    (tmp_path / "server.json").unlink()

    assert user.start_or_join() == hosts


def test_server_of_deleted_folder_ends_with_last_user(use: Use, tmp_path: Path) -> None:
    users = [use(), use()]
    for user in users:
        user.start_or_join()
    server = running(tmp_path)
    shutil.rmtree(tmp_path)

    users[0].close()
    assert server.is_running()
    users[1].close()
    assert not server.is_running()


def test_stale_record_with_recycled_ids_starts_new_server(use: Use, tmp_path: Path) -> None:
    """Process id and port now belong to others, which must not be killed."""
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
def test_damaged_record_counts_as_none(tmp_path: Path, note: str) -> None:
    (tmp_path / "server.json").write_text(note)

    assert recorded_server(tmp_path) is None


def test_requested_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        user = EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), port=port)

        assert not is_free(port)
        with pytest.raises(InvalidError, match=f"port=`{port}`"):
            user.start_or_join()


def test_missing_java_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no java found: install java 17"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(UnavailableError, match="nowhere/java"):
        EmbeddedZooKeeper(tmp_path, CLOCK, SystemRng(), java="/nowhere/java").start_or_join()


def test_java_home_precedes_path(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch(mode=0o755)

    assert find_java({"JAVA_HOME": str(tmp_path), "PATH": os.defpath}) == str(java)


def failed_start(folder: Path, script: str, **options: int) -> UnavailableError:
    java = stand_in(folder / "bin", script)
    user = EmbeddedZooKeeper(folder / "server", CLOCK, SystemRng(), java=java, **options)
    with pytest.raises(UnavailableError, match="zookeeper's server does not start") as caught:
        user.start_or_join()
    assert recorded_server(folder / "server") is None
    # As pytest would print it.
    said = "\n".join(caught.value.__notes__)
    assert all(line in str(caught.getrepr(style="short")) for line in said.splitlines())
    return caught.value


def test_failed_start_has_output_as_note(tmp_path: Path) -> None:
    failure = failed_start(tmp_path, "echo too old >&2; exit 1")

    assert failure.details["cause"] == "it has ended"
    assert failure.__notes__ == ["It said last:\ntoo old\n"]


def test_unknown_java_option_is_named(tmp_path: Path) -> None:
    """Java prints it before there is a log."""
    failure = failed_start(tmp_path, 'exec "$JAVA" -XX:+NoSuchOption "$@"')

    assert "NoSuchOption" in failure.__notes__[0]


def test_silent_java_is_reported(tmp_path: Path) -> None:
    """The output of an earlier server must not appear."""
    failed_start(tmp_path, 'exec "$JAVA" -XX:+NoSuchOption "$@"')

    assert failed_start(tmp_path, "exit 1").__notes__ == ["It said last:\n(nothing)"]


def test_data_stays_where_the_server_does_not_start_without_it(tmp_path: Path) -> None:
    data = tmp_path / "server" / "data" / "version-2"
    data.mkdir(parents=True)
    (data / "log.1").write_bytes(b"whole")
    failure = failed_start(tmp_path, 'ls data >>"$0.seen"; echo no memory; exit 1')

    assert failure.__notes__ == ["It said last:\nno memory\n"]
    assert (data / "log.1").read_bytes() == b"whole"
    assert [path.name for path in data.parent.parent.glob("data*")] == ["data"]
    assert (tmp_path / "bin" / "java.seen").read_text() == "version-2\n"


def test_full_disk_is_the_cause_of_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    data = tmp_path / "server" / "data" / "version-2"
    data.mkdir(parents=True)

    assert failed_start(tmp_path, "exit 1").details["cause"] == "the disk is full: make room, and start again"
    assert data.exists()


@pytest.fixture
def pond(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "pond") as store:
        store.load("counts", [{"key": "a", "state": 1}])
    return tmp_path / "pond"


def test_server_starts_anew_on_data_that_it_cannot_read(pond: Path, caplog: pytest.LogCaptureFixture) -> None:
    for files, size in (("log.*", 5), ("snapshot.*", 0), ("snapshot.*", 20)):
        cut(pond, files, size)
        caplog.clear()
        with Store.open(pond) as store:
            store.load(f"{files} {size}", [{"key": "b", "state": 2}])

        assert "the data of the store's zookeeper cannot be read, and it starts anew" in caplog.text
        assert not (pond / "zookeeper" / "data.damaged").exists()
    shutil.rmtree(pond / "zookeeper")
    with Store.open(pond) as store:
        assert store.rows_view("counts").to_arrow().num_rows == 1


def test_mark_is_carried_over_from_damaged_data(pond: Path) -> None:
    """Otherwise the store would open without its last commit, as if it had never been there."""
    cut(pond, "snapshot.*", 0)
    shutil.rmtree(pond / "high_water")
    max((pond / "rows" / "_delta_log").glob("*.json")).unlink()

    for _ in range(2):
        with pytest.raises(DataError, match="the table ends before a version that was committed"):
            Store.open(pond)


def cut(pond: Path, files: str, size: int) -> None:
    for file in (pond / "zookeeper" / "data" / "version-2").glob(files):
        os.truncate(file, size)


def test_slow_start_times_out(tmp_path: Path) -> None:
    failure = failed_start(tmp_path, 'echo $$ >"$0.id"; exec sleep 600', ready_timeout_ms=300)

    assert failure.details["cause"] == "it does not serve after 0.3 s"
    assert process._started(int((tmp_path / "bin" / "java.id").read_text())) is None


def test_interrupted_start_leaves_no_server(tmp_path: Path) -> None:
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


def test_port_taken_during_start_is_replaced(tmp_path: Path) -> None:
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


def test_fixed_port_taken_during_start_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java.port").write_text(str(listener.getsockname()[1]))
        failure = failed_start(tmp_path, TAKEN_AT_FIRST, port=free_ports(1)[0])

    assert "java.net.BindException: Address already in use" in failure.__notes__[0]


def test_process_without_command_line_counts_as_server(tmp_path: Path) -> None:
    """A process that is executing Java has none for a moment."""
    java = stand_in(tmp_path / "bin", NAMELESS_FOR_A_WHILE)
    user = EmbeddedZooKeeper(tmp_path / "folder", CLOCK, SystemRng(), java=java)
    hosts = user.start_or_join()
    server = running(tmp_path / "folder")

    assert hosts == f"127.0.0.1:{server.port}"
    user.close()
    assert not server.is_running()


def test_terminal_interrupt_does_not_reach_server(use: Use, tmp_path: Path) -> None:
    """The server has its own process group."""
    use().start_or_join()

    assert os.getpgid(running(tmp_path).process_id) != os.getpgid(0)


def test_hanging_server_is_replaced(tmp_path: Path) -> None:
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


def test_free_port_can_be_bound() -> None:
    assert is_free(free_ports(1)[0])
