"""Windows in a cycle hold under every fault, and a way back that loses or repeats waves is found."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.ripples import Ripples
from millpond.testing.simulation.simulation import simulate

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


class Echo(mp.Computation):
    """Shows each wave twice."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Keep the waves twice."""
        context.state.set([*context.state.get([]), *record.value["value"], *record.value["value"]])


class Deaf(mp.Computation):
    """Forgets the first wave of a window."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Keep all waves but the first."""
        context.state.set([*context.state.get([]), *record.value["value"][1:]])


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_wave_is_shown_once(seed: int) -> None:
    """Windows in a cycle with a feedback show all that falls, through deaths, faults and late records."""
    outcome = simulate(seed, Ripples)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize(("broken", "promise"), [(Echo, "I2"), (Deaf, "I12")])
def test_a_mistake_is_found(
    broken: type[mp.Computation], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waves that are shown twice or not at all break a promise."""
    monkeypatch.setattr("millpond.testing.simulation.ripples._Spread", broken)

    assert simulate(1, Ripples, steps=30, kinds=[]).promise == promise
