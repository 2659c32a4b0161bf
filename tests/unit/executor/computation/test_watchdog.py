"""User code that hangs: it is interrupted in any thread, told of where it cannot be, and never mistaken."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.watchdog import CodeTimeoutError, UserCodeWatchdog
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import SeededRng
from tests.short_lived import SHORT_LIVED

LIMIT_MS = 100.0
NEVER = threading.Event()
RELEASE = threading.Event()


def spin() -> None:
    """Hang in Python code that catches what it can."""
    turns = 0
    while True:
        try:
            turns += 1
        except Exception as error:
            raise AssertionError("it could be caught") from error


def in_thread(code: Callable[[], Any]) -> Any:
    """What the code returns or raises in a thread that is not the main one."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(code())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return outcomes[0]


def limited(code: Callable[[], Any], limit: UserCodeWatchdog | None = None) -> Any:
    """Run code as a key's turn."""
    limit = limit or UserCodeWatchdog("c", LIMIT_MS)
    with limit.watching():
        try:
            limit.begin("k")
            return code()
        finally:
            limit.end()


def test_code_that_spins_is_interrupted():
    """In the main thread by a signal, elsewhere by an exception; code that catches exceptions does not go on."""
    with pytest.raises(CodeTimeoutError):
        limited(spin)
    assert isinstance(in_thread(lambda: limited(spin)), CodeTimeoutError)


@pytest.mark.timeout(60, method="thread")
def test_code_that_sleeps_is_interrupted_in_the_main_thread():
    """A signal ends a call that blocks."""
    with pytest.raises(CodeTimeoutError):
        limited(lambda: NEVER.wait(600))


TRACED = """
import sys, threading
from millpond.executor.computation.watchdog import UserCodeWatchdog, CodeTimeoutError

def trace(*_event):
    return trace

def spin():
    while True:
        pass

def turn():
    limit = UserCodeWatchdog("c", 20)
    with limit.watching():
        try:
            limit.begin("k")
            spin()
        finally:
            limit.end()

def turns():
    sys.settrace(trace)
    for _ in range(10):
        try:
            turn()
        except CodeTimeoutError:
            print("interrupted", flush=True)

thread = threading.Thread(target=turns, daemon=True)
thread.start()
thread.join(60)
"""


def test_a_debugger_does_not_see_code_hang_after_an_interruption():
    """Nothing of an interruption is left in its thread, where CPython 3.11 would look for it for ever while code is traced."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED], env={**os.environ, **SHORT_LIVED}, capture_output=True, check=True
    )

    assert done.stdout.split() == [b"interrupted"] * 10


def test_code_that_takes_turns_is_left_alone():
    """Many short turns take longer than the limit together, in either thread, and none is interrupted."""
    clock = SystemClock()

    def turns() -> int:
        limit = UserCodeWatchdog("c", LIMIT_MS)
        count = 0
        until_us = clock.monotonic_us() + 5 * LIMIT_MS * 1_000
        with limit.watching():
            while clock.monotonic_us() < until_us:
                limit.begin("k")
                count += 1
                limit.end()
        return count

    assert turns() > 10
    assert in_thread(turns) > 10


def test_time_between_turns_does_not_count():
    """Nothing is raised into the engine's own code, however long it takes."""

    def idle() -> str:
        limit = UserCodeWatchdog("c", 20)
        with limit.watching():
            limit.begin("k")
            limit.end()
            SystemClock().sleep_ms(200)
        return "done"

    assert (idle(), in_thread(idle)) == ("done", "done")


def test_a_turn_whose_end_was_cut_short_is_over_with_its_bundle():
    """An exception may arrive at the very moment at which a turn ends; the next bundle's reading is not its code."""

    def two_bundles() -> str:
        limit = UserCodeWatchdog("c", 20)
        with limit.watching():
            limit.begin("k")
        with limit.watching():
            SystemClock().sleep_ms(200)
        return "done"

    assert (two_bundles(), in_thread(two_bundles)) == ("done", "done")


class Slow(Computation):
    """Hangs on the number thirteen, in the way that is asked for."""

    def __init__(self, way: str) -> None:
        self.way = way

    def process_record(self, context, record):
        if record.value["n"] == 13:
            context.state.set("half done")
            context.produce("out", {"n": -1})
            if self.way == "blocks":
                assert RELEASE.wait(600)
            spin()
        context.state.set(record.value["n"])


def start(way: str, **options: Any) -> tuple[Store, Any]:
    """A run of its own thread."""
    RELEASE.clear()
    store = Store.in_memory(
        objects=MemoryObjects(), registry=MemoryRegistry(), clock=SystemClock(), rng=SeededRng(1)
    )
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(
        Slow(way), name="c", produces="out", user_code_timeout=f"{LIMIT_MS}ms", **options
    )
    return store, LocalRunner(store, progress=False, upkeep=None).start(pipeline)


def rows(*numbers: int) -> list[dict[str, Any]]:
    """A row for each number, under a key of its own."""
    return [{"k": f"k{n}", "t": n, "n": n} for n in numbers]


def test_a_record_that_hangs_becomes_a_dead_letter():
    """Its effects are rolled back, the letter names it and shows where it hung, the others count once."""
    store, run = start("spins")
    run.inject("in", rows(1, 13, 2)).wait("60s")
    run.stop()

    states = {row["key"]: row["state"] for row in store.rows_view("c").to_arrow().to_pylist()}
    (letter,) = store.rows_view("dead_letters").to_arrow().column("state").to_pylist()
    assert states == {"k1": "1", "k2": "2"}
    assert "user code exceeds its time limit" in letter
    assert all(text in letter for text in ("`c`", "`k13`", "in spin"))
    assert run.summary().totals.productions == 0


def test_a_record_that_hangs_may_stop_the_pipeline():
    """With ``stop`` the run ends with an error that names computation and key, and nothing is committed."""
    store, run = start("spins", on_error="stop")
    receipt = run.inject("in", rows(1, 13))
    with pytest.raises(InvalidError, match=r"user code failed.*`c`.*`k13`.*exceeds its time limit"):
        receipt.wait("60s")
    run.abandon()

    assert store.rows_view("c").to_arrow().num_rows == 0


@pytest.mark.untraced
def test_code_that_cannot_be_interrupted_ends_the_run():
    """The error names computation and key; stopping does not wait for the code, and it commits nothing."""
    store, run = start("blocks")
    receipt = run.inject("in", rows(1, 13))
    with pytest.raises(InvalidError, match=r"exceeds its time limit.*`c`.*`k13`"):
        receipt.wait("60s")
    with pytest.raises(InvalidError, match="exceeds its"):
        run.inject("in", rows(2))
    run.abandon()
    version = store.snapshot().version
    RELEASE.set()
    for thread in threading.enumerate():
        if thread.name == "millpond-local":
            thread.join(60)

    assert store.snapshot().version == version
    assert store.rows_view("c").to_arrow().num_rows == 0


def test_no_limit_of_nothing():
    """The limit is longer than nothing."""
    pipeline = EnginePipeline("p")
    with pytest.raises(InvalidError, match="user_code_timeout"):
        pipeline.inject("in", key="k", at="t").apply(Computation(), name="c", user_code_timeout="0s")
