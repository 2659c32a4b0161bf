"""Retries while a service is unavailable."""

from __future__ import annotations

import threading

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
