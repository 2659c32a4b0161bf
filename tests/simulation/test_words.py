"""The word count under every fault, with canaries that lose, repeat or invent words."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.simulation import simulate
from millpond.testing.simulation.words import Words

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


class Stutterer(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        state = context.state.get({"sent": 0, "lines": []})
        for index, word in enumerate(record.value["words"] * 2):
            context.produce("words", {"word": word, "origin": [record.value["number"], index]})
        lines = [*state["lines"], record.value["number"]]
        context.state.set({"sent": state["sent"] + 2 * len(record.value["words"]), "lines": lines})


class Mumbler(Stutterer):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        state = context.state.get({"sent": 0, "lines": []})
        lines = [*state["lines"], record.value["number"]]
        context.state.set({"sent": state["sent"] + 1, "lines": lines})


class Forgetful(Stutterer):
    """Forgets all lines but the newest."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"sent": 0, "lines": [record.value["number"]]})


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_promise_holds(seed: int) -> None:
    """A seed with its own faults must also have committed supersteps."""
    outcome = simulate(seed, Words)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize(("splitter", "promise"), [(Stutterer, "I2"), (Mumbler, "I9"), (Forgetful, "I3")])
def test_repeated_missing_or_forgotten_words_are_found(
    splitter: type[mp.Computation], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.testing.simulation.words._Splitter", splitter)

    assert simulate(1, Words, steps=30, kinds=[]).promise == promise
