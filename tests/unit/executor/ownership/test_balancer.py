"""The balancer in a running pipeline."""

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
    """A count whose records take a millisecond each on the test's clock."""

    def process_record(self, context, record):
        CLOCK.advance_ms(1)
        context.state.set(context.state.get(0) + 1)


class Pond:
    """A store in memory, and a stepped run on it."""

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


def test_hot_range_is_split_after_some_supersteps(pond: Pond) -> None:
    before = pond.intervals

    for _ in range(8):
        pond.feed(HOT)

    hot = [interval for interval in pond.intervals if any(interval.contains(key) for key in HOT)]
    assert len([interval for interval in before if any(interval.contains(key) for key in HOT)]) == 1
    assert len(hot) > 1
    assert pond.states()["b0"] == 1 + 8 * 4


def test_even_load_is_not_cut(pond: Pond) -> None:
    before = pond.intervals

    for _ in range(8):
        pond.feed([f"{letter}{number}" for letter in "abcd" for number in range(4)])

    assert pond.intervals == before


def test_loads_are_written_to_commits(pond: Pond) -> None:
    """Tools read the loads from the log."""
    for _ in range(4):
        pond.feed(HOT)

    store = pond.store()
    told = [
        facts.metadata["loads"]
        for facts in newest_commits(store.log, store.snapshot().version, 20)
        if "loads" in facts.metadata
    ]
    assert told
    # An even load would take four milliseconds for each interval.
    assert any(load["work_ms"] > 4 for loads in told for load in loads.values())


def test_single_hot_key_is_warned_of_once(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    """No cut helps against one hot key."""
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(30):
            pond.feed(["b1"] * 16)

    assert [
        record.getMessage().split(" takes")[0]
        for record in caplog.records
        if "one key" in record.getMessage()
    ] == ["key 'b1' of costly"]


class TestRequests:
    @pytest.fixture
    def pond(self) -> Iterator[Pond]:
        """Run a pipeline without balancing."""
        made = Pond(None)
        made.feed([f"{letter}{number}" for letter in "abcd" for number in range(4)])
        yield made
        made.run.stop()

    def test_requested_cut_is_made_after_a_superstep(self, pond: Pond) -> None:
        """The same commit answers the request, so a later merge does not revive it."""
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

    def test_request_to_a_stopped_pipeline_is_honoured_by_the_next_run(self, pond: Pond) -> None:
        pond.run.stop()
        pond.ask("split", "b2")
        pond.run = pond.start()
        pond.feed(["a0"])

        assert "b2" in [interval.low for interval in pond.intervals]

    def test_request_that_is_already_fulfilled_is_answered_without_a_cut(self, pond: Pond) -> None:
        """The balancer may have made the same cut in the meantime."""
        low = pond.intervals[1].low
        request = pond.ask("split", low)
        before = pond.intervals
        CLOCK.advance_ms(2_000)
        pond.feed(["a0"])

        assert pond.intervals == before
        assert pond.store().snapshot().txns[request.app_id] == request.number + 1
