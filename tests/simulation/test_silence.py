"""Records that wait for their turn in time: every promise holds under every fault, and mistakes are found."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.silence import Silence
from millpond.testing.simulation.simulation import simulate

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_promise_holds(seed: int) -> None:
    """A seed with its own faults ends without a violation, and has committed supersteps."""
    outcome = simulate(seed, Silence)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize("seed", range(3))
def test_records_as_they_come_are_a_mistake(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code without ``time_sorted`` breaks a promise."""
    monkeypatch.setattr("millpond.testing.simulation.silence._Alarm.time_sorted", False)

    assert simulate(seed, Silence, steps=100, kinds=[]).promise in {"I6", "I8"}


class Deaf(mp.Computation):
    """Takes a sign and forgets it."""

    time_sorted = True

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Do nothing."""


def test_a_sign_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign that is neither in the journal nor waits breaks a promise."""
    monkeypatch.setattr("millpond.testing.simulation.silence._Alarm", Deaf)

    assert simulate(1, Silence, steps=100, kinds=[]).promise == "I3"
