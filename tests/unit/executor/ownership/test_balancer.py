"""The balancer in a pipeline that runs: it cuts what is hot, after some supersteps, and what a tool asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.ownership.cuts import CutKind, CutRequest
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

POLICY = BalancePolicy(every=3, least_work="1ms")
CLOCK = ManualClock()


class Costly(Computation):
    """Counts a key's records, each of which takes a millisecond of the test's clock."""

    def process_record(self, context, record):
        CLOCK.advance_ms(1)
        context.state.set(context.state.get(0) + 1)


class Pond:
    """A store in memory, and a run over it that is stepped."""

    def __init__(self, policy: BalancePolicy | None) -> None:
        self.rng = SeededRng(1)
        self.disk, self.registry = MemoryObjects(), MemoryRegistry()
        self.policy = policy
        self.batch = 0
        self.run = self.start()

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=CLOCK, rng=self.rng)

    def start(self) -> LocalRun:
        pipeline = EnginePipeline("p")
        pipeline.inject("in", key="k", at="at").apply(Costly(), name="costly")
        runner = LocalRunner(
            self.store(), clock=CLOCK, rng=self.rng, progress=False, intervals=4, balance=self.policy
        )
        run = runner.start(pipeline, stepping=True)
        run._worker.coordinator.balancer.parallelism = 4
        return run

    def feed(self, keys: list[str]) -> None:
        self.run.inject("in", [{"k": key, "at": self.batch} for key in keys])
        self.run.run_until_quiet()
        self.batch += 1

    def ask(self, kind: CutKind, key: str) -> CutRequest:
        committer = self.store().committer
        request = CutRequest.next(committer.snapshot.txns, "costly", kind, key)
        committer.commit(CommitRequest(kind="request", positions={request.app_id: request.number}))
        return request

    @property
    def intervals(self) -> list[Interval]:
        return list(self.store().snapshot().live_intervals("costly"))

    def states(self) -> dict[str, int]:
        rows = self.store().rows_view("costly").to_arrow().to_pylist()
        return {row["key"]: orjson.loads(row["state"]) for row in rows}


@pytest.fixture
def pond() -> Iterator[Pond]:
    made = Pond(POLICY)
    made.feed([f"{letter}{number}" for letter in "abcd" for number in range(4)])
    yield made
    made.run.stop()


HOT = [f"b{number}" for number in range(4)] * 4


def test_a_range_that_gets_hot_is_split(pond: Pond) -> None:
    """Once that has been so for some supersteps; what it counts is right before and after."""
    before = pond.intervals

    for _ in range(8):
        pond.feed(HOT)

    hot = [interval for interval in pond.intervals if any(interval.contains(key) for key in HOT)]
    assert len([interval for interval in before if any(interval.contains(key) for key in HOT)]) == 1
    assert len(hot) > 1
    assert pond.states()["b0"] == 1 + 8 * 4


def test_an_even_load_stays_as_it_is(pond: Pond) -> None:
    """Nothing is cut."""
    before = pond.intervals

    for _ in range(8):
        pond.feed([f"{letter}{number}" for letter in "abcd" for number in range(4)])

    assert pond.intervals == before


def test_loads_are_told_with_the_commits(pond: Pond) -> None:
    """Every few supersteps, for tools that read the log."""
    for _ in range(4):
        pond.feed(HOT)

    store = pond.store()
    told = [
        facts.metadata["loads"]
        for facts in newest_commits(store.log, store.snapshot().version, 20)
        if "loads" in facts.metadata
    ]
    assert told
    # An even load would have been four milliseconds for each.
    assert any(load["work_ms"] > 4 for loads in told for load in loads.values())


def test_a_key_that_is_hot_alone_is_named_once(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    """No cut helps there."""
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(30):
            pond.feed(["b1"] * 16)

    assert [
        record.getMessage().split(" takes")[0]
        for record in caplog.records
        if "one key" in record.getMessage()
    ] == ["key 'b1' of costly"]


class TestByHand:
    @pytest.fixture
    def pond(self) -> Iterator[Pond]:
        """A pipeline that does not balance its load."""
        made = Pond(None)
        made.feed([f"{letter}{number}" for letter in "abcd" for number in range(4)])
        yield made
        made.run.stop()

    def test_a_request_is_honoured_after_a_superstep(self, pond: Pond) -> None:
        """And answered in the same commit, so that it is not made again after a merge."""
        request = pond.ask("split", "b2")
        CLOCK.advance_ms(2_000)
        pond.feed(["a0"])

        assert "b2" in [interval.low for interval in pond.intervals]
        assert pond.store().snapshot().txns[request.app_id] == request.number + 1
        pond.ask("merge", "b2")
        for _ in range(3):
            CLOCK.advance_ms(2_000)
            pond.feed(["a0"])
        assert "b2" not in [interval.low for interval in pond.intervals]

    def test_it_outlives_the_run(self, pond: Pond) -> None:
        """A pipeline that is stopped honours it when it runs again."""
        pond.run.stop()
        pond.ask("split", "b2")
        pond.run = pond.start()
        pond.feed(["a0"])

        assert "b2" in [interval.low for interval in pond.intervals]

    def test_what_is_done_already_is_answered_without_a_cut(self, pond: Pond) -> None:
        """The load may have called for it between the request and the superstep."""
        low = pond.intervals[1].low
        request = pond.ask("split", low)
        before = pond.intervals
        CLOCK.advance_ms(2_000)
        pond.feed(["a0"])

        assert pond.intervals == before
        assert pond.store().snapshot().txns[request.app_id] == request.number + 1
