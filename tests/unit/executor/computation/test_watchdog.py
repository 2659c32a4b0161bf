"""The time limit of user code."""

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
    """Spin in Python code that catches every Exception."""
    turns = 0
    while True:
        try:
            turns += 1
        except Exception as error:
            raise AssertionError("it could be caught") from error


def in_thread(code: Callable[[], Any]) -> Any:
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
    limit = limit or UserCodeWatchdog("c", LIMIT_MS)
    with limit.watching():
        try:
            limit.begin("k")
            return code()
        finally:
            limit.end()


def test_spinning_code_is_interrupted_in_any_thread():
    """The main thread gets a signal, others an asynchronous exception; neither is an Exception that code
    would catch.
    """
    with pytest.raises(CodeTimeoutError):
        limited(spin)
    assert isinstance(in_thread(lambda: limited(spin)), CodeTimeoutError)


@pytest.mark.timeout(60, method="thread")
def test_sleeping_code_is_interrupted_in_the_main_thread():
    """Only a signal ends a blocking call."""
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


def test_traced_code_does_not_hang_after_an_interruption():
    """CPython 3.11 loops indefinitely under a tracer if an asynchronous exception remains in the thread."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED], env={**os.environ, **SHORT_LIVED}, capture_output=True, check=True
    )

    assert done.stdout.split() == [b"interrupted"] * 10


def test_short_turns_are_not_interrupted():
    """Together they take longer than the limit, in either thread."""
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
    """An exception must never reach the engine's own code."""

    def idle() -> str:
        limit = UserCodeWatchdog("c", 20)
        with limit.watching():
            limit.begin("k")
            limit.end()
            SystemClock().sleep_ms(200)
        return "done"

    assert (idle(), in_thread(idle)) == ("done", "done")


def test_turn_without_an_end_is_over_with_its_bundle():
    """An exception may arrive just as a turn ends; the limit must not apply to reading the next bundle."""

    def two_bundles() -> str:
        limit = UserCodeWatchdog("c", 20)
        with limit.watching():
            limit.begin("k")
        with limit.watching():
            SystemClock().sleep_ms(200)
        return "done"

    assert (two_bundles(), in_thread(two_bundles)) == ("done", "done")


class Slow(Computation):
    """Code that hangs at the number thirteen, spinning or blocking."""

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
    return [{"k": f"k{n}", "t": n, "n": n} for n in numbers]


def test_hanging_record_becomes_a_dead_letter():
    """The letter shows where the code hung; the other records count once."""
    store, run = start("spins")
    run.inject("in", rows(1, 13, 2)).wait("60s")
    run.stop()

    states = {row["key"]: row["state"] for row in store.rows_view("c").to_arrow().to_pylist()}
    (letter,) = store.rows_view("dead_letters").to_arrow().column("state").to_pylist()
    assert states == {"k1": "1", "k2": "2"}
    assert "user code exceeds its time limit" in letter
    assert all(text in letter for text in ("`c`", "`k13`", "in spin"))
    assert run.summary().totals.productions == 0


def test_hanging_record_with_on_error_stop_ends_the_run():
    store, run = start("spins", on_error="stop")
    receipt = run.inject("in", rows(1, 13))
    with pytest.raises(InvalidError, match=r"user code failed.*`c`.*`k13`.*exceeds its time limit"):
        receipt.wait("60s")
    run.abandon()

    assert store.rows_view("c").to_arrow().num_rows == 0


@pytest.mark.untraced
def test_uninterruptible_code_ends_the_run():
    """Stopping does not wait for the code, which commits nothing when it returns."""
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


def test_limit_of_zero_is_refused():
    pipeline = EnginePipeline("p")
    with pytest.raises(InvalidError, match="user_code_timeout"):
        pipeline.inject("in", key="k", at="t").apply(Computation(), name="c", user_code_timeout="0s")
