"""Real ZooKeeper ensembles on the loopback interface, whose members can be killed, stopped and wiped.

`Ensemble` runs its members out of PySpark's jars. Where a Docker engine answers,
`container_hosts` gives a server of the official image instead, to show that nothing
rests on the version that PySpark happens to bring along.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases.zookeeper_process import (
    HOST,
    ServerProcess,
    answer,
    find_jars,
    find_java,
    free_ports,
    launch,
)
from millpond.statestore.types import Clock

_READY_MS: Final = 30_000
_POLL_MS: Final = 10
_IMAGE: Final = "zookeeper:3.9"
_CLIENT_PORT: Final = 2181


def wait_until(condition: Callable[[], bool], clock: Clock, timeout_ms: float = _READY_MS) -> bool:
    """Poll until ``condition`` holds; whether it did in time."""
    deadline_us = clock.monotonic_us() + int(timeout_ms * 1_000)
    while not condition():
        if clock.monotonic_us() >= deadline_us:
            return False
        clock.sleep_ms(_POLL_MS)
    return True


class Ensemble:
    """Several ZooKeeper servers that elect a leader, addressed by their index.

    Args:
        folder: where their data lies.
        clock: measures the bounds on waiting.
        size: how many.
        tick_time_ms: short, so that elections and sessions (at least two ticks) are short as well.
        ready_timeout_ms: how long `start` waits for a quorum.

    Example:
        >>> from millpond.statestore.system import SystemClock
        >>> with Ensemble(Path("ensemble"), SystemClock()) as ensemble:  # doctest: +SKIP
        ...     ensemble.kill(ensemble.leader())
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        size: int = 3,
        tick_time_ms: int = 200,
        ready_timeout_ms: int = _READY_MS,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._ready_timeout_ms = ready_timeout_ms
        self._tick_time_ms = tick_time_ms
        ports = free_ports(3 * size)
        self._ports = ports[:size]
        self._peers = [f"{HOST}:{ports[size + index]}:{ports[2 * size + index]}" for index in range(size)]
        self._members: list[ServerProcess | None] = [None] * size

    @property
    def hosts(self) -> str:
        """All members' ``host:port``, for clients."""
        return ",".join(f"{HOST}:{port}" for port in self._ports)

    def start(self) -> None:
        """Start the members that are not running, and wait until a quorum serves.

        Raises:
            UnavailableError: none does; its notes are the last output of the members, and none is left.
        """
        for index, member in enumerate(self._members):
            if member is None or not member.is_running():
                self._launch(index)
        serves = False

        def is_settled() -> bool:
            nonlocal serves
            serves = self.has_quorum()
            return serves or not self._is_running()

        wait_until(is_settled, self._clock, self._ready_timeout_ms)
        # Asked once more, a leader on a busy machine may not answer in time.
        if not serves:
            self.close()
            failure = UnavailableError("the ensemble does not start", folder=self._folder)
            for member in filter(None, self._members):
                failure.add_note(f"{member.folder.name} said last:\n{member.last_words() or '(nothing)'}")
            raise failure

    def has_quorum(self) -> bool:
        """Return True if the ensemble has a serving leader."""
        return self.leader() is not None

    def _is_running(self) -> bool:
        return any(member is not None and member.is_running() for member in self._members)

    def leader(self) -> int | None:
        """Index of the leader; `None` while there is none."""
        modes = ("Mode: leader" in answer(port, "srvr", timeout_s=0.5) for port in self._ports)
        return next((index for index, is_leader in enumerate(modes) if is_leader), None)

    def kill(self, index: int) -> None:
        """Kill a member."""
        member = self._members[index]
        if member is not None:
            member.kill(self._clock)

    def pause(self, index: int) -> None:
        """Stop a member in its tracks (SIGSTOP)."""
        self._signal(index, signal.SIGSTOP)

    def resume(self, index: int) -> None:
        """Resume a paused member."""
        self._signal(index, signal.SIGCONT)

    def restart(self, index: int) -> None:
        """Start a member again with the data that it has; it joins in its own time."""
        self.kill(index)
        self._launch(index)

    def wipe(self) -> None:
        """Lose everything: every member comes back empty."""
        self.close()
        shutil.rmtree(self._folder)
        self.start()

    def close(self) -> None:
        """Kill every member."""
        for index in range(len(self._members)):
            self.kill(index)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every member."""
        self.close()

    def _launch(self, index: int) -> None:
        folder = self._folder / str(index)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        (folder / "data" / "myid").write_text(str(index + 1))
        # No power fails here, and a busy disk must not make a session wait for longer than it lasts.
        settings = {"tickTime": str(self._tick_time_ms), "forceSync": "no"}
        settings |= {f"server.{number}": peer for number, peer in enumerate(self._peers, start=1)}
        self._members[index] = launch(
            folder, self._ports[index], java=find_java(), jars=find_jars(), settings=settings
        )

    def _signal(self, index: int, number: int) -> None:
        member = self._members[index]
        if member is not None:
            member.signal(number)


def docker_answers() -> bool:
    """Return True if containers can run here."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    # The version of the server, which only a running engine can tell.
    asked = subprocess.run([docker, "version"], check=False, capture_output=True)  # noqa: S603 - found above
    return asked.returncode == 0


@contextmanager
def container_hosts(image: str = _IMAGE) -> Iterator[str]:
    """``host:port`` of a ZooKeeper in a container, which ends with the context."""
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.waiting_utils import wait_for_logs

    with DockerContainer(image).with_exposed_ports(_CLIENT_PORT) as container:
        wait_for_logs(container, "binding to port|Started AdminServer")
        yield f"{container.get_container_host_ip()}:{container.get_exposed_port(_CLIENT_PORT)}"
