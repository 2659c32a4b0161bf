"""The hand-over of slots between an executor's worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.executor.spark.hand_over import ONE_MACHINE, HandedOver, SlotHomes, hand_over, reach_homes
from millpond.executor.spark.task_plan import SlotReport, TaskPlan, WorkerSetting
from millpond.statestore.types import Superstep, WallTimeMicros

RECORDS = pa.record_batch({"n": pa.array(range(1_000), pa.int64())})
_secrets = itertools.count()


def report_of(handed: HandedOver) -> None:
    """Answer with the number of records, and with the plan as the process's name."""
    read = sum(batch.num_rows for batch in handed.batches)
    handed.give(SlotReport(slot=0, process=handed.plan.decode(), read_bytes=read))


@pytest.fixture
def homes() -> Iterator[Callable[..., SlotHomes]]:
    """Make homes of slots that belong to one run."""
    secret = f"{os.getpid()}-{next(_secrets)}"
    made: list[SlotHomes] = []

    def make(serve: Callable[[HandedOver], None] = report_of, secret: str = secret) -> SlotHomes:
        made.append(SlotHomes(secret, serve, ONE_MACHINE))
        return made[-1]

    yield make
    for one in made:
        one.close()


def neighbour_of(homes: SlotHomes, slot: int = 0) -> Connection:
    neighbour = homes.neighbour(slot, 1)
    assert neighbour is not None
    return neighbour


def test_first_process_to_run_a_slot_is_its_home(homes: Callable[..., SlotHomes]) -> None:
    """Others hand over plan and records, and get its report."""
    home, other = homes(), homes()

    assert home.neighbour(0, 1) is None
    assert home.neighbour(0, 1) is None
    for batches, rows in ([RECORDS, RECORDS.slice(1)], 1_999), ([], 0):
        report = hand_over(neighbour_of(other), b"the plan", batches)
        assert report is not None
        assert (report.process, report.read_bytes) == ("the plan", rows)


def test_full_process_is_no_home_for_further_slots(homes: Callable[..., SlotHomes]) -> None:
    """The slot runs where it is until a process with room becomes its home."""
    full, free = homes(), homes()

    assert [full.neighbour(slot, 1) for slot in (0, 1)] == [None, None]
    assert free.neighbour(1, 1) is None
    neighbour_of(full, 1).close()
    assert full.neighbour(2, 2) is None
    neighbour_of(free, 2).close()


def test_closed_home_is_replaced_by_the_next_process(homes: Callable[..., SlotHomes]) -> None:
    first, second, third = homes(), homes(), homes()
    assert first.neighbour(0, 1) is None
    assert hand_over(neighbour_of(second), b"", []) is not None
    first.close()

    assert second.neighbour(0, 1) is None
    neighbour_of(third).close()


def test_process_without_the_secret_is_not_served(homes: Callable[..., SlotHomes]) -> None:
    handed: list[bytes] = []
    home = homes(lambda slot: handed.append(slot.plan))
    stranger = homes(secret="another run")
    assert home.neighbour(0, 1) is None
    stranger._address = home._address  # type: ignore[method-assign]

    assert stranger.neighbour(0, 0) is None
    assert handed == []


def test_failing_home_gives_no_report(
    homes: Callable[..., SlotHomes], caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting process then runs the slot itself and finds the error."""

    def fail(_: HandedOver) -> None:
        raise ArithmeticError

    home, other = homes(fail), homes()
    assert home.neighbour(0, 1) is None

    assert hand_over(neighbour_of(other), b"", [RECORDS]) is None
    assert hand_over(neighbour_of(other), b"", [RECORDS]) is None
    assert "that was handed over has failed" in caplog.text


def test_report_is_given_once(homes: Callable[..., SlotHomes]) -> None:
    """Later reports of code that was reported as stuck are dropped."""

    def give_twice(handed: HandedOver) -> None:
        handed.give(SlotReport(slot=0, process="first"))
        handed.give(SlotReport(slot=0, process="second"))

    home, other = homes(give_twice), homes()
    assert home.neighbour(0, 1) is None
    neighbour = neighbour_of(other)
    neighbour.send_bytes(b"")
    neighbour.send_bytes(b"")

    assert pickle.loads(neighbour.recv_bytes()).process == "first"
    with pytest.raises(EOFError):
        neighbour.recv_bytes()


def _be_home(secret: str, pipe: Connection) -> None:
    """Take a slot, and end the process at its hand-over."""
    homes = SlotHomes(secret, lambda _: os._exit(3), ONE_MACHINE)
    pipe.send(homes.neighbour(0, 1) is None)
    pipe.recv()


def test_killed_home_frees_its_slot(homes: Callable[..., SlotHomes]) -> None:
    """The process that handed the slot over learns of it at once."""
    mine = homes()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_be_home, args=(mine.secret, theirs))
    process.start()
    assert ours.recv()

    assert hand_over(neighbour_of(mine), b"", [RECORDS]) is None
    process.join()
    assert process.exitcode == 3
    assert mine.neighbour(0, 1) is None


def plan_of(tmp_path: Path) -> TaskPlan:
    setting = WorkerSetting(
        url=str(tmp_path), storage_options={}, durability="os_cache", code=b"", code_digest="", cache_bytes=0
    )
    return TaskPlan(
        setting=setting,
        superstep=Superstep(1),
        wall_time=WallTimeMicros(0),
        slots=2,
        parts={},
        sources=(),
        input=None,
    )


def report_of_slot(handed: HandedOver) -> None:
    slot, _ = pickle.loads(handed.plan)
    handed.give(SlotReport(slot=slot, read_bytes=sum(batch.num_rows for batch in handed.batches)))


def test_driver_hands_each_home_its_slot(homes: Callable[..., SlotHomes], tmp_path: Path) -> None:
    first, second = homes(report_of_slot), homes(report_of_slot)
    first.take(0, 1)
    assert reach_homes(first.secret, [0, 1]) is None
    second.take(1, 1)

    reached = reach_homes(first.secret, [0, 1])
    assert reached is not None
    reports = reached.run(plan_of(tmp_path), {1: [RECORDS]}, lambda: None)
    reached.close()
    assert reports is not None
    assert {report.slot: report.read_bytes for report in reports} == {0: 0, 1: 1_000}


def test_driver_gets_no_report_if_one_home_fails(homes: Callable[..., SlotHomes], tmp_path: Path) -> None:
    def fail(_: HandedOver) -> None:
        raise ArithmeticError

    homes(report_of_slot).take(0, 1)
    other = homes(fail)
    other.take(1, 1)

    reached = reach_homes(other.secret, [0, 1])
    assert reached is not None
    assert reached.run(plan_of(tmp_path), {}, lambda: None) is None
    reached.close()


def test_driver_that_gives_up_waits_for_no_home(homes: Callable[..., SlotHomes], tmp_path: Path) -> None:
    go_on = threading.Event()
    home = homes(lambda handed: [go_on.wait(), report_of_slot(handed)])
    home.take(0, 1)

    def stop() -> None:
        raise KeyboardInterrupt

    reached = reach_homes(home.secret, [0])
    assert reached is not None
    with pytest.raises(KeyboardInterrupt):
        reached.run(plan_of(tmp_path), {}, stop)
    reached.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("millpond-home-call")]
    go_on.set()
