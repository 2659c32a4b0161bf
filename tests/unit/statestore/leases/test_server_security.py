"""The embedded ZooKeeper among other users, hostile folders and unusual names."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.retry import KazooRetry

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases import zookeeper_process as process
from millpond.statestore.leases.zookeeper_client import OPEN_ENSEMBLE
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.leases.zookeeper_process import (
    ServerProcess,
    find_jars,
    find_java,
    free_ports,
    launch,
    recorded_server,
)
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper, local_security
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng

pytestmark = pytest.mark.zookeeper

CLOCK = SystemClock()
Use = Callable[[], EmbeddedZooKeeper]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pond" / "zookeeper"


@pytest.fixture
def use(folder: Path) -> Iterator[Use]:
    users: list[EmbeddedZooKeeper] = []

    def make() -> EmbeddedZooKeeper:
        users.append(EmbeddedZooKeeper(folder, CLOCK, SystemRng()))
        return users[-1]

    yield make
    for user in users:
        user.close()
    with suppress(InvalidError):
        server = recorded_server(folder)
        if server is not None:
            server.kill(CLOCK)


def running(folder: Path) -> ServerProcess:
    server = recorded_server(folder)
    assert server is not None
    assert server.is_own()
    return server


def names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


def is_admitted(hosts: str) -> bool:
    stranger = KazooClient(hosts, timeout=2, command_retry=KazooRetry(max_tries=0))
    stranger.start(10)
    try:
        stranger.create("/planted")
        stranger.get_children("/")
    except KazooException:
        return False
    finally:
        stranger.stop()
        stranger.close()
    return True


def test_only_users_of_store_are_admitted(use: Use, folder: Path) -> None:
    first, second = use(), use()
    hosts = first.start_or_join()
    second.start_or_join()

    assert not is_admitted(hosts)
    assert first.security == second.security
    assert first.security.password is not None
    assert ask_for_mark(hosts, "store", CLOCK, local_security(str(folder.parent))) is None
    assert first.security.password not in "".join(process._command_of(running(folder).process_id))


def test_reader_checks_mark_of_running_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO"),
        Store.open(tmp_path / "pond"),
        Store.open(tmp_path / "pond", read_only=True),
    ):
        assert local_server(str(tmp_path / "pond")) is not None
        assert "is not checked" not in caplog.text


def test_only_first_user_creates_new_secret(use: Use) -> None:
    first, second = use(), use()
    first.start_or_join()
    secret = first.security.password
    second.start_or_join()
    first.close()

    assert second.security.password == secret
    second.close()
    first.start_or_join()
    assert first.security.password != secret


def test_restarted_server_keeps_secret_of_its_users(use: Use, folder: Path) -> None:
    user = use()
    hosts = user.start_or_join()
    secret = user.security
    running(folder).kill(CLOCK)

    assert user.start_or_join() == hosts
    assert user.security == secret


def test_files_are_private(folder: Path) -> None:
    Store.open(folder.parent).close()
    folder.chmod(0o755)
    with Store.open(folder.parent):
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}

    assert (folder / "data" / "version-2") in modes
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_folder_of_new_store_is_private(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    for name, mode in (("new", 0o700), ("shared", 0o755)):
        Store.open(tmp_path / name).close()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def launched_open(folder: Path) -> ServerProcess:
    server = launch(folder, free_ports(1)[0], java=find_java(), jars=find_jars())
    assert server.wait_serving(CLOCK, 60_000)
    return server


def test_unused_open_server_is_replaced_and_keeps_data(use: Use, folder: Path) -> None:
    old = launched_open(folder)
    client = KazooClient(f"127.0.0.1:{old.port}")
    client.start()
    mark = json.dumps({"version": 7, "digest": "seven"}).encode()
    client.create("/millpond/store/high_water", mark, makepath=True)
    client.stop()
    client.close()
    hosts = use().start_or_join()

    assert not old.is_running()
    assert not is_admitted(hosts)
    found = ask_for_mark(hosts, "store", CLOCK, local_security(str(folder.parent)))
    assert found is not None
    assert (found.version, found.digest) == (7, "seven")


def test_used_open_server_is_joined(use: Use, folder: Path) -> None:
    earlier = EmbeddedZooKeeper(folder, CLOCK, SystemRng(), is_open=True)
    hosts = earlier.start_or_join()
    user = use()

    assert user.start_or_join() == hosts
    assert user.security == OPEN_ENSEMBLE
    earlier.close()


@pytest.mark.parametrize("name", ["Müller", "日本", "a\\b", "a b", "#!=:", "${sys:user.home}", "%d"])
def test_server_starts_in_folder_of_any_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    user = EmbeddedZooKeeper(tmp_path / name / "zookeeper", CLOCK, SystemRng(), ready_timeout_ms=20_000)
    user.start_or_join()
    user.close()

    assert names_in(tmp_path) == [name]
    assert (tmp_path / name / "zookeeper" / "data" / "version-2").is_dir()
    assert (tmp_path / name / "zookeeper" / "server.log").stat().st_size > 1_000


@pytest.mark.parametrize("name", ["x\ntickTime=1", "x\r", "x\x1b[2J", "x\x9b", "x\u2028"])
def test_folder_with_control_characters_is_refused_before_creation(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidError, match="no control characters") as caught:
        Store.open(tmp_path / name)

    assert str(caught.value).isprintable()
    assert names_in(tmp_path) == []


LINKED = (
    "zoo.cfg", "zoo.cfg.new", "log4j2.properties", "server.log", "server.out", "server.json", "server.json.new",
    "users", "lock", "running", "secret", "jaas.conf", "data", "data/version-2", "data/version-2/log.1",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_link_in_folder_is_refused(use: Use, folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(InvalidError, match="no link, pipe or device"):
        use().start_or_join()
    assert not outside.exists()

    outside.write_text("mine")
    with pytest.raises(InvalidError, match="no link, pipe or device"):
        use().start_or_join()
    assert outside.read_text() == "mine"


def test_folder_must_not_be_link(use: Use, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidError, match="no link, pipe or device"):
        use().start_or_join()

    assert names_in(tmp_path / "outside") == []


def test_store_behind_link_opens(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "pond").symlink_to(tmp_path / "real")
    with Store.open(tmp_path / "pond"):
        assert (tmp_path / "real" / "zookeeper" / "secret").exists()


@pytest.mark.parametrize("name", ["server.json", "secret", "users", "lock", "server.log"])
def test_pipe_in_folder_blocks_nobody(use: Use, folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / name)
    with pytest.raises(InvalidError, match="no link, pipe or device"):
        use().start_or_join()


@pytest.mark.parametrize(
    "name", ["zoo.cfg", "secret.new", "server.log", "server.json", "users", "lock", "running", "secret"]
)
def test_folder_in_place_of_file_is_refused(use: Use, folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    with pytest.raises(InvalidError, match=f"in their places.*{name}"):
        use().start_or_join()


@pytest.mark.parametrize("name", ["zookeeper", "zookeeper/data"])
def test_file_in_place_of_folder_is_refused(use: Use, folder: Path, name: str) -> None:
    (folder.parent / name).parent.mkdir(parents=True)
    (folder.parent / name).touch()
    with pytest.raises(InvalidError, match=f"in their places.*{name}"):
        use().start_or_join()


def test_unusable_folder_is_named(use: Use, folder: Path) -> None:
    folder.parent.touch()
    with pytest.raises(UnavailableError, match=r"cannot be used.*File exists"):
        use().start_or_join()


@pytest.mark.parametrize("record", [{"port": 70_000}, {"port": 0}, {"process_id": "9" * 4_000}])
def test_record_that_no_server_writes_is_ignored(folder: Path, record: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    honest = {"process_id": 1, "port": 2181, "started": "now"}
    (folder / "server.json").write_text(json.dumps(honest))
    assert recorded_server(folder) is not None
    (folder / "server.json").write_text(json.dumps(honest | record))

    assert recorded_server(folder) is None


def test_recorded_process_must_be_server(use: Use, folder: Path) -> None:
    """Whoever creates the folder can record the id and start time of any process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        folder.mkdir(parents=True)
        record = {"process_id": victim.pid, "port": 1, "started": process._started(victim.pid)}
        (folder / "server.json").write_text(json.dumps(record))
        server = recorded_server(folder)
        assert server is not None
        assert server.is_running()

        assert not server.is_own()
        assert local_server(str(folder.parent)) is None
        use().start_or_join()
        assert running(folder).process_id != victim.pid
        assert victim.poll() is None
        victim.communicate(b"\n")


@pytest.mark.parametrize("has_proc", [True, False])
def test_server_without_locks_is_known_by_command_line(
    use: Use, folder: Path, monkeypatch: pytest.MonkeyPatch, has_proc: bool
) -> None:
    use().start_or_join()
    server = running(folder)
    (folder / "running").unlink()
    monkeypatch.setattr(process, "_HAS_PROC", has_proc)

    assert process._names_folder(server.process_id, folder)
    assert not process._names_folder(server.process_id, folder.parent)
    assert not process._names_folder(os.getpid(), folder)
    assert server.is_secured()


def test_record_behind_linked_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    record = {"process_id": os.getpid(), "port": 2181, "started": "now"}
    (elsewhere / "server.json").write_text(json.dumps(record))
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)

    assert recorded_server(folder) is None


def test_deeply_nested_record_is_no_server(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "server.json").write_text("[" * 100_000)

    assert recorded_server(folder) is None
