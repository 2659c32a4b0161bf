"""Two processes on one store: after a takeover, no later commit of the first lands.

Both are real processes, with a real ZooKeeper and short sessions. The former owner is alive, stopped for
longer than its session, or stopped in the middle of its commit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import ConflictError, FencedError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TableVersion
from millpond.testing.processes.ledger import ROWS, ledger_of, ledger_pipeline, numbered
from millpond.testing.servers.zookeeper import wait_until
from tests.processes.owner import Owner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper]

CLOCK = SystemClock()
SESSION_MS = 3_000


StartOwner = Callable[..., Owner]
Takeover = Callable[..., Store]


@pytest.fixture
def first(tmp_path: Path, zookeeper_hosts: str) -> Iterator[StartOwner]:
    Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts).close()
    started: list[Owner] = []

    def start(engine: str = "local") -> Owner:
        owner = Owner(tmp_path / "pond", zookeeper_hosts, SESSION_MS, engine)
        started.append(owner)
        assert owner.hear() == "open"
        return owner

    yield start
    for owner in started:
        owner.end()


@pytest.fixture
def second(tmp_path: Path, zookeeper_hosts: str) -> Iterator[Store]:
    """The store as opened by this process."""
    with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        yield store


def take_over(store: Store, on_held: OnHeld, *numbers: int) -> None:
    """Take over the ledger's intervals, write, and keep holding them."""
    run = LocalRunner(store, on_held=on_held, progress=False).start(ledger_pipeline(), stepping=True)
    run.inject(ROWS, numbered(numbers))
    run.run_until_quiet()


def writers_after(store: Store, version: int) -> set[object]:
    """Return the writers of the commits after a version."""
    writers = set()
    for number in range(version + 1, store.snapshot().version + 1):
        actions = decode(store.log.require(TableVersion(number)), str(number))
        writers |= {
            action.millpond["writer"]
            for action in actions
            if isinstance(action, CommitInfo) and action.millpond
        }
    return writers


def assert_only_the_second_wrote(store: Store, since: int, ledger: dict[str, list[int]]) -> None:
    assert writers_after(store, since) == {store.committer.writer_id}
    assert ledger_of(store) == ledger


@pytest.mark.parametrize("engine", ["local", "threaded", "coordinator"])
@pytest.mark.parametrize("reads_again", [False, True], ids=["blindly", "after a refresh"])
def test_next_commit_of_a_former_owner_is_refused(
    first: StartOwner, second: Store, engine: str, reads_again: bool
) -> None:
    """Refreshing first does not help."""
    former = first(engine)
    assert former.ask("write 0").startswith("version ")
    since = second.snapshot().version
    take_over(second, "take", 5)
    expected, version = ledger_of(second), second.snapshot().version

    if reads_again:
        assert former.ask("refresh") == f"version {version}"
    assert former.ask("write 10").startswith("FencedError ")
    assert former.ask("write 15").startswith("FencedError ")
    assert second.snapshot().version == version
    assert_only_the_second_wrote(second, since, expected)
    assert expected == {"k0": [5] if engine == "coordinator" else [0, 5]}


@pytest.mark.parametrize("reads_again", [False, True], ids=["blindly", "after a refresh"])
def test_owner_stopped_for_longer_than_its_session_is_refused(
    first: StartOwner, second: Store, reads_again: bool
) -> None:
    former = first()
    former.ask("write 0")
    since = second.snapshot().version
    former.signal(signal.SIGSTOP)
    take_over(second, "wait", 5)
    version = second.snapshot().version
    # The commands wait in the pipe, and run the moment the process resumes.
    for command in ["refresh", "write 10"] if reads_again else ["write 10"]:
        former.tell(command)
    former.signal(signal.SIGCONT)

    if reads_again:
        assert former.hear() == f"version {version}"
    assert former.hear().startswith("FencedError ")
    assert_only_the_second_wrote(second, since, {"k0": [0, 5]})


def test_owner_stopped_within_its_commit_is_refused(first: StartOwner, second: Store) -> None:
    """It was stopped right before its put, loses it, and is refused when it builds the commit again."""
    former = first()
    former.ask("write 0")
    since = second.snapshot().version
    former.ask("stop_at_put")
    former.tell("write 10")
    assert wait_until(former.is_stopped, CLOCK)
    take_over(second, "wait", 5)
    former.signal(signal.SIGCONT)

    assert former.hear().startswith("FencedError another owner has taken the interval")
    assert_only_the_second_wrote(second, since, {"k0": [0, 5]})


def test_owner_stopped_within_its_commit_may_finish_it(first: StartOwner, second: Store) -> None:
    """Nobody took over, so the commit lands once."""
    former = first()
    former.ask("stop_at_put")
    former.tell("write 10")
    assert wait_until(former.is_stopped, CLOCK)
    former.signal(signal.SIGCONT)

    assert former.hear().startswith("version ")
    assert ledger_of(second) == {"k0": [10]}


def test_standby_waits_for_a_live_owner_and_follows_a_dead_one(first: StartOwner, second: Store) -> None:
    former = first()
    former.ask("write 0")
    version = second.snapshot().version

    with pytest.raises(ConflictError, match=r"another writer holds the lease.*process \d+"):
        take_over(second, "refuse")
    assert second.snapshot().version == version
    assert former.ask("write 5").startswith("version ")
    former.signal(signal.SIGKILL)
    take_over(second, "wait", 10)
    assert ledger_of(second) == {"k0": [0, 5, 10]}


def test_owners_take_turns(tmp_path: Path, zookeeper_hosts: str) -> None:
    path = tmp_path / "pond"
    with (
        Store.open(path, zookeeper=zookeeper_hosts) as first,
        Store.open(path, zookeeper=zookeeper_hosts) as other,
    ):
        numbers = list(range(8))
        for number in numbers:
            take_over((first, other)[number % 2], "take", number * 5)
        assert ledger_of(first) == {"k0": [number * 5 for number in numbers]}
        assert first.leases is not other.leases


def test_pipeline_on_spark_is_fenced(tmp_path: Path, zookeeper_hosts: str, spark: SparkSession) -> None:
    """The next batch after a takeover raises FencedError."""
    path = tmp_path / "pond"

    def batch(number: int) -> tuple[object, InputPosition]:
        rows = [tuple(row.values()) for row in numbered([number * 10])]
        frame = spark.createDataFrame(rows, "k string, t long, id string, n long").coalesce(1)
        return frame, InputPosition(stream=ROWS, source="test", batch=number)

    with (
        Store.open(path, zookeeper=zookeeper_hosts) as first,
        Store.open(path, zookeeper=zookeeper_hosts) as other,
    ):
        run = SparkRunner(first, spark=spark, progress=False).open(ledger_pipeline())
        run.consume(*batch(0))
        since = other.snapshot().version
        take_over(other, "take", 5)

        with pytest.raises(FencedError):
            run.consume(*batch(1))
        with pytest.raises(FencedError):
            run.advance()
        assert_only_the_second_wrote(other, since, {"k0": [0, 5]})
        run.abandon()
