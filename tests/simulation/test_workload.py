"""Users' workloads: a correct one passes, an incorrect one is detected."""

from __future__ import annotations

from typing import Any

import millpond as mp
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.simulation import simulate
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.workload import End, Workload


class CountClicks(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"count": context.state.get({"count": 0})["count"] + 1})


class CountInMemory(mp.Computation):
    """Counts in memory, which is lost with the process."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        self.counts[context.key] = self.counts.get(context.key, 0) + 1
        context.state.set({"count": self.counts[context.key]})


class Clicks(Workload):
    name = "clicks"
    records_max = 40
    computation: type[mp.Computation] = CountClicks

    def pipeline(self) -> mp.Pipeline:
        pipeline = mp.Pipeline("clicks")
        clicks = pipeline.inject("clicks", key="page", at="at", id="id", watermark=mp.ManualWatermark())
        clicks.apply(self.computation(), name="counter")
        return pipeline

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:
        return "clicks", {"page": draw.choice(["home", "shop"])}

    def check_end(self, end: End) -> None:
        counted = sum(state["count"] for state in end.states["counter"].values())
        must(counted == len(end.sent), "I1", "every click counts once", counted=counted, sent=len(end.sent))


class ForgetfulClicks(Clicks):
    """The same workload with the counter in memory."""

    computation = CountInMemory


def test_count_in_the_state_passes_under_every_fault() -> None:
    for seed in range(4):
        outcome = simulate(seed, Clicks, steps=100)

        assert outcome.violation == ""
        assert outcome.supersteps > 3


def test_count_in_memory_is_found() -> None:
    """The first crash reveals it."""
    violations = [
        simulate(seed, ForgetfulClicks, steps=100, kinds=["crash", "restart"]).violation for seed in range(4)
    ]

    assert any("I1: every click counts once" in violation for violation in violations)
