"""The hand-over of slots between the worker processes of an executor, here between threads and real processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pyarrow as pa
import pytest

from millpond.executor.spark.hand_over import HandedOver, SlotHomes, hand_over
from millpond.executor.spark.task_plan import SlotReport

RECORDS = pa.record_batch({"n": pa.array(range(1_000), pa.int64())})
_secrets = itertools.count()


def report_of(handed: HandedOver) -> None:
    """Answer with the number of records, and with the plan as the process's name."""
    read = sum(batch.num_rows for batch in handed.batches)
    handed.give(SlotReport(slot=0, process=handed.plan.decode(), read_bytes=read))


@pytest.fixture
def homes() -> Iterator[Callable[..., SlotHomes]]:
    """Makes what a process keeps of its slots; all of one test belong to one run."""
    secret = f"{os.getpid()}-{next(_secrets)}"
    made: list[SlotHomes] = []

    def make(serve: Callable[[HandedOver], None] = report_of, secret: str = secret) -> SlotHomes:
        made.append(SlotHomes(secret, serve, executor=1))
        return made[-1]

    yield make
    for one in made:
        one.close()


def neighbour_of(homes: SlotHomes, slot: int = 0) -> Connection:
    neighbour = homes.neighbour(slot, 1)
    assert neighbour is not None
    return neighbour


def test_the_first_to_run_a_slot_is_its_home(homes: Callable[..., SlotHomes]) -> None:
    """Others hand plan and records over and get its report, as often as they like; empty slots too."""
    home, other = homes(), homes()

    assert home.neighbour(0, 1) is None
    assert home.neighbour(0, 1) is None
    for batches, rows in ([RECORDS, RECORDS.slice(1)], 1_999), ([], 0):
        report = hand_over(neighbour_of(other), b"the plan", batches)
        assert report is not None
        assert (report.process, report.read_bytes) == ("the plan", rows)


def test_a_process_is_home_to_so_many_slots_only(homes: Callable[..., SlotHomes]) -> None:
    """A slot beyond that is run where it is, until a process that has room for it becomes its home."""
    full, free = homes(), homes()

    assert [full.neighbour(slot, 1) for slot in (0, 1)] == [None, None]
    assert free.neighbour(1, 1) is None
    neighbour_of(full, 1).close()
    assert full.neighbour(2, 2) is None
    neighbour_of(free, 2).close()


def test_a_home_that_is_given_up_can_be_taken(homes: Callable[..., SlotHomes]) -> None:
    """The next process to run the slot becomes its home."""
    first, second, third = homes(), homes(), homes()
    assert first.neighbour(0, 1) is None
    assert hand_over(neighbour_of(second), b"", []) is not None
    first.close()

    assert second.neighbour(0, 1) is None
    neighbour_of(third).close()


def test_a_stranger_is_not_served(homes: Callable[..., SlotHomes]) -> None:
    """A process that does not know the run's secret gets no slot run, whatever it sends."""
    handed: list[bytes] = []
    home = homes(lambda slot: handed.append(slot.plan))
    stranger = homes(secret="another run")
    assert home.neighbour(0, 1) is None
    stranger._address = home._address  # type: ignore[method-assign]

    assert stranger.neighbour(0, 0) is None
    assert handed == []


def test_a_home_that_fails_has_no_report(
    homes: Callable[..., SlotHomes], caplog: pytest.LogCaptureFixture
) -> None:
    """The process that waits is told, so that it runs the slot itself and finds the error; the home logs it."""

    def fail(_: HandedOver) -> None:
        raise ArithmeticError

    home, other = homes(fail), homes()
    assert home.neighbour(0, 1) is None

    assert hand_over(neighbour_of(other), b"", [RECORDS]) is None
    assert hand_over(neighbour_of(other), b"", [RECORDS]) is None
    assert "that was handed over has failed" in caplog.text


def test_a_report_is_given_once(homes: Callable[..., SlotHomes]) -> None:
    """What code does that was reported as stuck does not reach the process that waited."""

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
    """A process that takes a slot and ends without a word when it is handed over."""
    homes = SlotHomes(secret, lambda _: os._exit(3), executor=1)
    pipe.send(homes.neighbour(0, 1) is None)
    pipe.recv()


def test_a_home_that_is_killed_frees_its_slot(homes: Callable[..., SlotHomes]) -> None:
    """The process that handed the slot over hears of it at once, and the next one becomes the home."""
    mine = homes()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_be_home, args=(mine.secret, theirs))
    process.start()
    assert ours.recv()

    assert hand_over(neighbour_of(mine), b"", [RECORDS]) is None
    process.join()
    assert process.exitcode == 3
    assert mine.neighbour(0, 1) is None
