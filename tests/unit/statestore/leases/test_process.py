"""The process of a server, its record and its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases import zookeeper_process as process
from millpond.statestore.leases.zookeeper_process import (
    OPTIONS_VARIABLE,
    ServerProcess,
    find_jars,
    free_ports,
    is_free,
    launch,
    recorded_server,
)
from millpond.statestore.system import SystemClock
from millpond.testing.servers.zookeeper import wait_until

CLOCK = SystemClock()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nexec sleep 600\n")
    java.chmod(0o755)
    launched = launch(tmp_path / "server", 20_000, java=str(java), jars=find_jars())
    yield launched
    launched.kill(CLOCK)


def test_process_is_server_before_it_becomes_java(server: ServerProcess) -> None:
    """The process is not our child."""
    stat = Path(f"/proc/{server.process_id}/stat").read_text().rpartition(")")[2].split()

    assert recorded_server(server.folder) == server
    assert server.is_running()
    assert int(stat[1]) != os.getpid()
    assert server.kill(CLOCK)
    assert not server.is_running()


def test_recycled_process_id_is_not_server(server: ServerProcess) -> None:
    """The start times differ."""
    file = server.folder / "server.json"
    # The kernel counts start times in hundredths of a second.
    SystemClock().sleep_ms(20)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"process_id": stranger.pid}))
        other = recorded_server(server.folder)
        assert other is not None

        assert not other.is_running()
        assert other.kill(CLOCK)
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_zombie_is_not_running(tmp_path: Path) -> None:
    """In some containers no parent ever waits for it."""
    with subprocess.Popen(["sleep", "600"]) as child:
        started = process._started(child.pid)
        assert started is not None
        zombie = ServerProcess(process_id=child.pid, port=20_000, started=started, folder=tmp_path)
        assert zombie.is_running()
        child.kill()

        assert wait_until(lambda: not zombie.is_running(), CLOCK)
        assert Path(f"/proc/{child.pid}").exists()


def test_ps_gives_start_time_without_proc() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        started = process._started_after_ps(child.pid)
        assert started is not None
        assert len(started.split()) == 5
        child.kill()
        assert wait_until(lambda: process._started_after_ps(child.pid) is None, CLOCK)
    assert process._started_after_ps(child.pid) is None


def test_server_without_room_for_record_is_not_started(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    java.chmod(0o755)
    (tmp_path / "server" / "server.json.new").mkdir(parents=True)

    with pytest.raises(UnavailableError, match="cannot be started") as caught:
        launch(tmp_path / "server", 20_000, java=str(java), jars=find_jars())
    assert "server.json.new" in caught.value.__notes__[0]
    assert not (tmp_path / "ran").exists()


def test_java_options_of_environment_come_last(tmp_path: Path) -> None:
    """Java takes the last of two contradicting options."""
    java = tmp_path / "java"
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$0.new" && mv "$0.new" "$0.words"\n')
    java.chmod(0o755)
    options = {OPTIONS_VARIABLE: "-Xmx512m '-Dname=two words'"}

    launch(tmp_path / "server", 20_000, java=str(java), jars=find_jars(), environment=options)

    assert wait_until((tmp_path / "java.words").exists, CLOCK)
    words = (tmp_path / "java.words").read_text().splitlines()
    assert words.index("-Xmx512m") > words.index("-Xmx128m")
    assert "-Dname=two words" in words


def test_unclosed_quote_in_options_is_refused(tmp_path: Path) -> None:
    options = {OPTIONS_VARIABLE: "'-Xmx512m"}

    with pytest.raises(InvalidError, match="MILLPOND_ZOOKEEPER_JAVA_OPTIONS"):
        launch(tmp_path / "server", 20_000, java="/bin/true", jars=find_jars(), environment=options)
    assert not (tmp_path / "server").exists()


def test_last_output_is_of_last_start(server: ServerProcess) -> None:
    """Long output begins with a whole line."""
    log = server.folder / "server.log"
    with log.open("a") as lines:
        lines.write("old\n" + process._START_LINE + "new\n")
    assert server.last_words() == "new\n"
    (server.folder / "server.out").write_text("".join(f"line {number}\n" for number in range(1_000)))

    said = server.last_words().splitlines()
    assert said[0].startswith("line ")
    assert said[-3:] == ["line 999", "", "new"]


def test_free_ports_are_different() -> None:
    ports = free_ports(9)

    assert len(set(ports)) == 9
    assert all(map(is_free, ports))
    with pytest.raises(UnavailableError, match="no ports are free"):
        free_ports(100_000)
