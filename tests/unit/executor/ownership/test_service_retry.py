"""Waiting for services that are away: until they are back, until the time is over, or until it is ended."""

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
    """A service that is away for so many calls."""

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
def test_it_asks_again_until_the_service_is_back(error):
    """Between two tries it sleeps, and does what was asked for meanwhile."""
    clock, service = ManualClock(), Service(3, error)

    assert ServiceRetry(clock, 1_000).run(service.call, service.revive) == "here"
    assert service.revivals == len(clock.slept_ms) == 3


def test_its_time_is_bounded():
    """A service that stays away fails after the time."""
    clock = ManualClock()
    with pytest.raises(UnavailableError):
        ServiceRetry(clock, 1_000).run(Service(10_000).call)

    assert 1_000 <= sum(clock.slept_ms) <= 1_100


def test_it_can_be_ended():
    """Once it is ended the next failure is the last, and what works still works."""
    clock = ManualClock()
    patience = ServiceRetry(clock, 1_000_000)
    patience.end()

    assert patience.run(Service(0).call) == "here"
    with pytest.raises(UnavailableError):
        patience.run(Service(1).call)
    assert clock.slept_ms == []


class TellingClock(SystemClock):
    """Tells when a thread sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = threading.Event()

    def sleep_ms(self, duration_ms: float) -> None:
        self.slept.set()
        super().sleep_ms(duration_ms)


def test_a_run_that_waits_can_be_stopped():
    """Stopping ends a pause of an hour; what was injected in it is not acknowledged."""
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
