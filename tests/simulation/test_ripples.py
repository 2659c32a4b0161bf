"""Windows in a cycle under every fault, with canaries that lose or repeat waves."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.ripples import Ripples
from millpond.testing.simulation.simulation import simulate

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


class Echo(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), *record.value["value"], *record.value["value"]])


class Deaf(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), *record.value["value"][1:]])


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_wave_is_shown_once(seed: int) -> None:
    """Processes die, faults occur, and records are late."""
    outcome = simulate(seed, Ripples)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize(("broken", "promise"), [(Echo, "I2"), (Deaf, "I12")])
def test_repeated_or_missing_waves_are_found(
    broken: type[mp.Computation], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.testing.simulation.ripples._Spread", broken)

    assert simulate(1, Ripples, steps=30, kinds=[]).promise == promise
