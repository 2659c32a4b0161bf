"""Retries while a service is unavailable."""

from __future__ import annotations

import logging
import threading
from itertools import pairwise

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.ownership import ServiceRetry
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import OutcomeUnknownError, UnavailableError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Service:
    """A service that is unavailable for a number of calls."""

    def __init__(self, away: int, error: type[Exception] = UnavailableError) -> None:
        self.away = away
        self.error = error
        self.revivals = 0

    def call(self) -> str:
        self.away -= 1
        if self.away >= 0:
            raise self.error("away")
        return "here"

    def revive(self) -> None:
        self.revivals += 1


@pytest.mark.parametrize("error", [UnavailableError, OutcomeUnknownError])
def test_retry_calls_until_the_service_is_back(error):
    """It sleeps between calls and runs the given action."""
    clock, service = ManualClock(), Service(3, error)

    assert ServiceRetry(clock, 1_000).run(service.call, service.revive) == "here"
    assert service.revivals == len(clock.slept_ms) == 3


def test_retry_fails_after_its_timeout():
    clock = ManualClock()
    with pytest.raises(UnavailableError):
        ServiceRetry(clock, 1_000).run(Service(10_000).call)

    assert 1_000 <= sum(clock.slept_ms) <= 1_100


def test_ended_retry_fails_at_the_next_failure():
    clock = ManualClock()
    patience = ServiceRetry(clock, 1_000_000)
    patience.end()

    assert patience.run(Service(0).call) == "here"
    with pytest.raises(UnavailableError):
        patience.run(Service(1).call)
    assert clock.slept_ms == []


class TellingClock(SystemClock):
    """A clock that signals when a thread sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = threading.Event()

    def sleep_ms(self, duration_ms: float) -> None:
        self.slept.set()
        super().sleep_ms(duration_ms)


def test_paused_run_can_be_stopped():
    """Rows injected during the pause are not acknowledged."""
    clock = TellingClock()
    store = Store.in_memory(objects=MemoryObjects(), registry=MemoryRegistry(), clock=clock, rng=SeededRng(1))
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Computation(), name="c")
    run = LocalRunner(store, clock=clock, progress=False, pause_timeout="60m").start(pipeline)
    store.leases.suspend()
    receipt = run.inject("in", {"k": "a", "t": 1})
    assert clock.slept.wait(60)
    run.stop()

    with pytest.raises((UnavailableError, OutcomeUnknownError)):
        receipt.wait("60s")
    store.close()


def outage_of(seconds: float, seed: int = 1) -> tuple[ManualClock, list[int]]:
    """Retry until a service is back that is away for so long; return the clock and the times of the tries."""
    clock, tries = ManualClock(), []

    def ask() -> None:
        tries.append(clock.monotonic_us())
        if clock.monotonic_us() - tries[0] < seconds * 1_000_000:
            raise UnavailableError("the object store failed", store="s3://bucket")

    ServiceRetry(clock, 300_000, SeededRng(seed), "pipeline p").run(ask)
    return clock, tries


def test_waits_grow_with_the_outage_up_to_a_bound():
    _, tries = outage_of(57)
    waits = [(later - former) / 1_000 for former, later in pairwise(tries)]
    assert waits[:4] == [50, 50, 50, 50]
    assert len(tries) <= 45
    assert max(waits) <= 10_000
    # The work goes on soon after the service is back.
    assert (tries[-1] - tries[0]) / 1e6 <= 57 * 1.25
    assert max(outage_of(200)[1][n + 1] - at for n, at in enumerate(outage_of(200)[1][:-1])) <= 10_000_000


def test_waits_of_two_processes_differ():
    assert outage_of(57, seed=1)[1] != outage_of(57, seed=2)[1]


@pytest.mark.parametrize(("seconds", "lines"), [(0.3, 2), (57, 2), (130, 4)])
def test_outage_is_told_at_once_each_minute_and_at_its_end(caplog, seconds, lines):
    with caplog.at_level(logging.WARNING, "millpond"):
        outage_of(seconds)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == lines
    assert all("pipeline p waits since " in line and "store=`s3://bucket`" in line for line in told[:-1])
    assert "pipeline p continues: the service is back after" in told[-1]


def test_service_that_answers_is_not_told_of(caplog):
    with caplog.at_level(logging.WARNING, "millpond"):
        outage_of(0)
    assert caplog.records == []


def test_wait_for_a_lease_is_polled_and_told_by_its_session(caplog):
    clock, service = ManualClock(), Service(40)
    with caplog.at_level(logging.WARNING, "millpond"):
        ServiceRetry(clock, 300_000, SeededRng(1)).run(service.call, service.revive)
    assert clock.slept_ms == [50] * 40
    assert caplog.records == []
