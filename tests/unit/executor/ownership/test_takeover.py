"""Takeovers of pipelines and their intervals."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.cuts import boundaries_of
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import FencedError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Alarm(Computation):
    def process_record(self, context, record):
        context.set_timer(record.at + 10)

    def process_timer(self, context, timer):
        context.state.set([*context.state.get([]), timer.at])


class Collect(Computation):
    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs

    def process_record(self, context, record):
        context.state.set([*context.state.get([]), record.value["n"]])
        for output in self.outputs:
            context.produce(output, record.value)


class Pond:
    """A store in memory for several owners, whose runs advance only when stepped."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = FaultyObjects(MemoryObjects())
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self, pipeline: EnginePipeline, store: Store | None = None) -> LocalRun:
        runner = LocalRunner(
            store or self.store(), clock=self.clock, rng=self.rng, progress=False, intervals=2
        )
        return runner.start(pipeline, stepping=True)

    def start_deaf(self, pipeline: EnginePipeline) -> LocalRun:
        """Start a run that is never notified of lost leases."""
        store = self.store()
        run = self.start(pipeline, store)
        store.leases.hold_notices()
        return run

    def intervals(self, computation: str) -> list[Interval]:
        intervals = map(Interval.from_app_id, self.store().snapshot().txns)
        return sorted(interval for interval in intervals if interval and interval.computation == computation)

    def states(self, computation: str) -> dict[str, object]:
        rows = self.store().rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: orjson.loads(row["state"]) for row in rows if row["state"]}


def rows(keys: str) -> list[dict[str, object]]:
    return [{"k": key, "at": 5, "n": number} for number, key in enumerate(keys)]


def alarms(name: str = "p") -> EnginePipeline:
    pipeline = EnginePipeline(name)
    pipeline.inject("in", key="k", at="at").apply(Alarm(), name="alarm")
    return pipeline


def a_chain(name: str, first: str = "first", *drop: str) -> EnginePipeline:
    pipeline = EnginePipeline(name, drop=drop)
    pipeline.inject("in", key="k", at="at")
    pipeline.add(Collect("mid"), name=first, subscribes={"in": None}, produces=("mid",))
    pipeline.stream("mid").apply(Collect(), name="second")
    return pipeline


def finished(run: LocalRun) -> LocalRun:
    run.finish("in")
    run.run_until_quiet()
    return run


class TestIntervals:
    def test_former_owner_creates_no_intervals(self):
        """Two overlapping sets of intervals would fire each timer twice."""
        pond = Pond()
        former, owner = pond.start_deaf(alarms()), pond.start(alarms())
        former.inject("in", rows("abcd"))
        with pytest.raises(FencedError):
            former.run_until_quiet()

        owner.inject("in", rows("wxyz"))
        owner.run_until_quiet()
        owner.stop()

        assert len(pond.intervals("alarm")) == 2
        assert finished(pond.start(alarms())).summary().totals.timers == 4

    def test_former_owner_takes_no_lease_of_its_successor(self):
        """The former owner was never notified of its loss."""
        pond = Pond()
        former, owner = pond.start_deaf(alarms()), pond.start(alarms())
        owner.inject("in", rows("a"))
        owner.run_until_quiet()

        former.inject("in", rows("a"))
        with pytest.raises(FencedError):
            former.run_until_quiet()

        assert finished(owner).summary().totals.timers == 1

    def test_intervals_created_during_a_takeover_are_taken_over(self):
        """A former owner can commit until it is fenced."""
        pond = Pond()
        former = pond.start_deaf(alarms())
        former.inject("in", rows("abcd"))
        pond.disk.interrupt("put_if_absent", former.run_until_quiet)

        owner = pond.start(alarms())
        owner.inject("in", rows("wxyz"))
        owner.run_until_quiet()
        owner.stop()

        assert len(pond.intervals("alarm")) == 2
        assert finished(pond.start(alarms())).summary().totals.timers == 8

    def test_boundaries_of_long_keys_are_truncated(self):
        """A boundary is part of names in ZooKeeper and in the log."""
        sample = pa.array([letter * 1_000_000 for letter in "abcd"])

        cuts = boundaries_of(sample, 4)

        assert cuts == tuple(letter * 256 for letter in "bcd")


class TestPipelines:
    def test_computation_of_another_pipeline_is_refused(self):
        """The two pipelines number their supersteps differently."""
        pond = Pond()
        run = pond.start(a_chain("x"))
        run.inject("in", rows("a"))
        run.run_until_quiet()

        with pytest.raises(InvalidError, match="another pipeline") as caught:
            pond.start(a_chain("y"))

        assert caught.value.details["belongs_to"] == "x"
        run.inject("in", rows("b"))
        run.run_until_quiet()
        assert pond.states("second") == {"a": [0], "b": [0]}

    def test_computation_belongs_to_the_first_pipeline_with_input(self):
        """Both pipelines start before there is any input."""
        pond = Pond()
        run, other = pond.start(a_chain("x")), pond.start(a_chain("y"))
        run.inject("in", rows("a"))
        run.run_until_quiet()
        other.inject("in", rows("b"))

        with pytest.raises(InvalidError, match="another pipeline"):
            other.run_until_quiet()

        assert pond.states("second") == {"a": [0]}


class TestChangedPipelines:
    def test_productions_of_a_removed_computation_are_delivered(self):
        pond = Pond()
        run = pond.start(a_chain("p", first="old"))
        run.inject("in", rows("a"))
        run.step()
        run.stop()

        pond.start(a_chain("p", "new", "old")).run_until_quiet()

        assert pond.states("second") == {"a": [0]}

    @pytest.mark.parametrize("seed", range(4))
    def test_restart_keeps_the_order_of_arrival(self, seed):
        """Records of equal time arrive in the order of their producers' keys."""
        pond = Pond()
        pond.rng = SeededRng(seed)
        pipeline = EnginePipeline("p")
        first = pipeline.inject("in", key="k", at="at").apply(Collect("mid"), name="first", produces="mid")
        first.apply(Collect(), name="second", key=lambda value: "all")
        run = pond.start(pipeline)
        run.inject("in", rows("abcdefgh"))
        run.step()
        run.stop()

        pond.start(pipeline).run_until_quiet()

        assert pond.states("second") == {"all": list(range(8))}
