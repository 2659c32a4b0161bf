"""Power cuts after a writer's death within a commit: versions already read must survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import pytest

from millpond.gc.collectors import Retention, collect_garbage
from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.types import TableVersion
from millpond.testing.faults.power_cut import PowerCutFiles
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request, superstep_request

LOW = Interval("counter", "", "m")
CALLS_MAX = 64
DRAWS = 20


class DeathError(BaseException):
    """The process has died within a call."""


class Machine:
    def __init__(self) -> None:
        self.files = PowerCutFiles()
        self.mark = MemoryHighWater()
        create_rows_table(self.log(), ManualClock(), SeededRng("table"))

    def log(self) -> Log:
        return Log(LocalObjects("/pond/rows", files=self.files))

    def writer(self, name: str) -> Committer:
        return Committer(self.log(), ManualClock(), SeededRng(name), self.mark, writer_id=name)

    def die_within(self, calls: int, action: Callable[[], object]) -> bool:
        left = [calls]

        def before(_call: str, _path: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DeathError

        self.files.before = before
        try:
            action()
        except DeathError:
            return True
        finally:
            self.files.before = lambda _call, _path: None
        return False

    def cut_power(self) -> None:
        self.files.cut_power(lambda _: 0)


def deaths(action: Callable[[Machine], Callable[[], object]]) -> Iterator[Machine]:
    for calls in range(CALLS_MAX):
        machine = Machine()
        if not machine.die_within(calls, action(machine)):
            return
        yield machine
    pytest.fail("the action has too many calls")


def a_commit(machine: Machine) -> Callable[[], object]:
    writer = machine.writer("dies")
    return lambda: writer.commit(fence_request(1, LOW))


def test_mark_names_only_durable_commits() -> None:
    """Otherwise the store would be refused after a power cut."""
    seen = set()
    for machine in deaths(a_commit):
        seen.add(machine.writer("opens").snapshot.version)
        mark = machine.mark.read()
        machine.cut_power()
        assert mark is not None
        assert load(machine.log()).version >= mark.version
    assert seen == {0, 1}


def test_follower_syncs_commits_of_dead_writers() -> None:
    seen = set()
    for calls in range(CALLS_MAX):
        machine = Machine()
        follower = machine.writer("follows")
        if not machine.die_within(calls, a_commit(machine)):
            break
        version = follower.refresh().version
        machine.cut_power()
        assert load(machine.log()).version >= version
        seen.add(version)
    assert seen == {0, 1}


def test_retried_put_syncs_its_own_commit() -> None:
    """The reply to the first put was lost."""
    machine = Machine()
    writer = machine.writer("retries")
    failed = []

    def before(call: str, path: str) -> None:
        if call == "sync" and path.endswith("_delta_log") and not failed and _has_version(machine, 1):
            failed.append(path)
            raise OSError("too many open files")

    machine.files.before = before
    assert writer.commit(fence_request(1, LOW)).version == 1
    machine.cut_power()

    assert failed
    assert load(machine.log()).version == 1


def test_collection_syncs_checkpoint_before_deleting() -> None:
    rng, deleted = SeededRng("what was written"), 0
    for calls in range(CALLS_MAX):
        machine = Machine()
        writer = machine.writer("writes")
        writer.commit(fence_request(1, LOW))
        for number in range(1, 4):
            writer.commit(superstep_request(1, number, LOW))
        clock = ManualClock()
        clock.advance_ms(10 * 3_600_000)
        collect = partial(collection, machine, clock)
        died = machine.die_within(calls, collect)
        collect()
        deleted += machine.log().read(TableVersion(1)) is None
        for _ in range(DRAWS):
            files = deepcopy(machine.files)
            files.cut_power(lambda outcomes: int(rng.random() * outcomes))
            assert newest(files) == 4
        if not died:
            break
    assert deleted > calls // 2


def newest(files: PowerCutFiles) -> int | str:
    try:
        return load(Log(LocalObjects("/pond/rows", files=files))).version
    except DataError as error:
        return str(error)


def collection(machine: Machine, clock: ManualClock) -> None:
    retention = Retention(keep_ms=0, checkpoint_every=1)
    collect_garbage(machine.log().objects, None, clock, announce=None, retention=retention, owned={})


def _has_version(machine: Machine, version: int) -> bool:
    return machine.log().inventory().latest == version
