"""The word count: it holds under every fault, and detects loss, repetition and invention between its stages."""

from __future__ import annotations

import os

import pytest

import millpond as mp
from millpond.testing.simulation.simulation import simulate
from millpond.testing.simulation.words import Words

_SEED_COUNT = max(int(os.environ.get("SIMULATED_SEEDS", "8")) // 2, 1)


class Stutterer(mp.Computation):
    """Sends every word twice."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Send each word twice, and record it once."""
        state = context.state.get({"sent": 0, "lines": []})
        for index, word in enumerate(record.value["words"] * 2):
            context.produce("words", {"word": word, "origin": [record.value["number"], index]})
        lines = [*state["lines"], record.value["number"]]
        context.state.set({"sent": state["sent"] + 2 * len(record.value["words"]), "lines": lines})


class Mumbler(Stutterer):
    """Sends fewer words than it records."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Leave out one word."""
        state = context.state.get({"sent": 0, "lines": []})
        lines = [*state["lines"], record.value["number"]]
        context.state.set({"sent": state["sent"] + 1, "lines": lines})


class Forgetful(Stutterer):
    """Forgets all lines but the newest."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Record only the newest line."""
        context.state.set({"sent": 0, "lines": [record.value["number"]]})


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_promise_holds(seed: int) -> None:
    """A seed with its own faults ends without a violation, and has committed supersteps."""
    outcome = simulate(seed, Words)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize(("splitter", "promise"), [(Stutterer, "I2"), (Mumbler, "I9"), (Forgetful, "I3")])
def test_a_mistake_is_found(
    splitter: type[mp.Computation], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that are sent twice, not at all or forgotten break a promise."""
    monkeypatch.setattr("millpond.testing.simulation.words._Splitter", splitter)

    assert simulate(1, Words, steps=30, kinds=[]).promise == promise
