"""Time-sorted records under every fault, with canaries."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.silence import Silence
from millpond.testing.simulation.simulation import simulate

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_promise_holds(seed: int) -> None:
    """A seed with its own faults must also have committed supersteps."""
    outcome = simulate(seed, Silence)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize("seed", range(3))
def test_unsorted_records_break_a_promise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.testing.simulation.silence._Alarm.time_sorted", False)

    assert simulate(seed, Silence, steps=100, kinds=[]).promise in {"I6", "I8"}


class Deaf(mp.Computation):
    time_sorted = True

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        pass


def test_lost_sign_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign is neither in the journal nor waiting."""
    monkeypatch.setattr("millpond.testing.simulation.silence._Alarm", Deaf)

    assert simulate(1, Silence, steps=100, kinds=[]).promise == "I3"
