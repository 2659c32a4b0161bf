"""Splits and merges: one commit, after which only the new intervals can be written."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.cuts import Cut
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.errors import ConflictError, FencedError
from millpond.statestore.failpoint import listening
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import CommitNumber, Sequencer
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

WHOLE = Interval("alarm")
LOW, HIGH = Cut.split(WHOLE, ["m"]).by


class Alarm(Computation):
    """Counts a key's records, and sets a timer for each."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.set_timer(record.at + 10)

    def process_timer(self, context, timer):
        context.produce("rung", {"at": timer.at})


class Rung(Computation):
    """Counts the timers that fired."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


def alarms() -> EnginePipeline:
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="at", id="id")
    pipeline.add(Alarm(), name="alarm", subscribes={"in": None}, produces=("rung",))
    pipeline.stream("rung").apply(Rung(), name="rings")
    return pipeline


class Pond:
    """A store in memory for several owners, whose runs advance only when stepped."""

    def __init__(self) -> None:
        self.clock, self.rng = ManualClock(), SeededRng(1)
        self.disk, self.registry = MemoryObjects(), MemoryRegistry()

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self, *, deaf: bool = False) -> LocalRun:
        """Start a run; a deaf one is never notified of lost leases."""
        store = self.store()
        run = LocalRunner(store, clock=self.clock, rng=self.rng, progress=False, intervals=1).start(
            alarms(), stepping=True
        )
        if deaf:
            assert isinstance(store.leases, MemoryLeases)
            store.leases.hold_notices()
        return run

    def live(self) -> dict[Interval, Fence]:
        return self.store().snapshot().live_intervals("alarm")

    def states(self, computation: str) -> dict[str, int]:
        rows = self.store().rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: orjson.loads(row["state"]) for row in rows if row["state"]}


def coordinator_of(run: LocalRun) -> Coordinator:
    return run._worker.coordinator


def feed(run: LocalRun, keys: str, batch: int = 0) -> LocalRun:
    run.inject("in", [{"k": key, "at": 5, "id": f"{batch}/{key}"} for key in keys])
    run.run_until_quiet()
    return run


def ended(run: LocalRun) -> LocalRun:
    run.finish("in")
    run.run_until_quiet()
    return run


@pytest.fixture
def pond() -> Pond:
    return Pond()


def test_what_was_replaced_cannot_be_written_any_more(pond: Pond) -> None:
    """The next commit number of the interval that was split is refused, and so is a lease on it with a new sequencer."""
    run = feed(pond.start(), "axz")
    held = coordinator_of(run).ownership.owned[WHOLE].fence

    coordinator_of(run).recut(Cut.split(WHOLE, ["m"]))

    committer = pond.store().committer
    late = Fence(held.sequencer, CommitNumber(held.commit_number + 1))
    with pytest.raises(FencedError):
        committer.commit(CommitRequest(kind="superstep", writes=(IntervalWrite(interval=WHOLE, fence=late),)))
    fresh = Fence(Sequencer(1_000), CommitNumber(0))
    with pytest.raises(ConflictError, match="cut into other intervals"):
        committer.commit(CommitRequest(kind="fence", writes=(IntervalWrite(interval=WHOLE, fence=fresh),)))


def test_successors_have_higher_sequencers(pond: Pond) -> None:
    """Also where an interval comes back that was there before: a merge undoes a split, and the next split the merge."""
    run = feed(pond.start(), "axz")
    seen = [max(fence.sequencer for fence in pond.live().values())]

    for cut in (Cut.split(WHOLE, ["m"]), Cut.merge((LOW, HIGH)), Cut.split(WHOLE, ["m"])):
        coordinator_of(run).recut(cut)
        assert [*pond.live()] == [*cut.by]
        assert min(fence.sequencer for fence in pond.live().values()) > seen[-1]
        seen.append(max(fence.sequencer for fence in pond.live().values()))
        feed(run, "axz", len(seen))

    assert pond.states("alarm") == dict.fromkeys("axz", 4)


def test_timers_and_ids_are_those_of_before(pond: Pond) -> None:
    """Each timer fires once, in whichever interval its key is by then, and a repeated record is a duplicate there."""
    run = feed(pond.start(), "abxyz")

    coordinator_of(run).recut(Cut.split(WHOLE, ["b", "y"]))
    feed(run, "abxyz")
    coordinator_of(run).recut(Cut.merge(coordinator_of(run).intervals_of("alarm")[1:]))
    feed(run, "abxyz")
    totals = ended(run).summary().totals

    assert totals.duplicates == 10
    assert pond.states("alarm") == dict.fromkeys("abxyz", 1)
    assert pond.states("rings") == dict.fromkeys("abxyz", 1)


def test_a_former_owner_cuts_nothing(pond: Pond) -> None:
    """It is told before it takes a lease, and the intervals stay what they were."""
    former = feed(pond.start(deaf=True), "axz")
    owner = pond.start()

    with pytest.raises(FencedError):
        coordinator_of(former).recut(Cut.split(WHOLE, ["m"]))

    assert [*pond.live()] == [WHOLE]
    assert feed(owner, "axz", 1).summary().totals.records == 6


def test_a_former_owner_writes_nothing_after_the_cut_of_the_new_one(pond: Pond) -> None:
    """A process that still believes in the interval that was split is fenced."""
    former = feed(pond.start(deaf=True), "axz")
    owner = pond.start()
    coordinator_of(owner).recut(Cut.split(WHOLE, ["m"]))

    with pytest.raises(FencedError):
        feed(former, "axz", 1)

    feed(owner, "axz", 2)
    assert pond.states("alarm") == dict.fromkeys("axz", 2)


def test_a_new_owner_takes_what_is_live(pond: Pond) -> None:
    """It takes neither the interval that was split nor its timers a second time."""
    run = feed(pond.start(), "axz")
    coordinator_of(run).recut(Cut.split(WHOLE, ["m"]))
    run.stop()

    owner = pond.start()

    assert coordinator_of(owner).intervals_of("alarm") == (LOW, HIGH)
    ended(owner)
    assert pond.states("rings") == dict.fromkeys("axz", 1)


@pytest.mark.parametrize("cuts", [1, 3])
def test_keys_may_be_cut_while_a_new_owner_takes_them(pond: Pond, cuts: int) -> None:
    """Between its leases and its fence the former owner may still cut: it then takes what came of that."""
    former = feed(pond.start(deaf=True), "axz")
    undo = [Cut.split(WHOLE, ["m"]), Cut.merge((LOW, HIGH)), Cut.split(WHOLE, ["m"])][:cuts]

    def cut(failpoint: str) -> None:
        if failpoint == "lease.taken" and undo:
            made = undo.pop(0)
            _without_listener(lambda: coordinator_of(former).recut(made))

    with listening(cut):
        owner = pond.start()

    assert not undo
    assert coordinator_of(owner).intervals_of("alarm") == (LOW, HIGH)
    ended(feed(owner, "axz", 1))
    assert pond.states("rings") == dict.fromkeys("axz", 1)
    assert pond.states("alarm") == dict.fromkeys("axz", 2)


def test_an_owner_that_keeps_cutting_is_not_waited_for_in_vain(pond: Pond) -> None:
    """After some rounds the new owner gives up with an error that says why, and leaves no lease behind."""
    former = feed(pond.start(deaf=True), "axz")
    turns = [Cut.split(WHOLE, ["m"]), Cut.merge((LOW, HIGH))]

    def cut(failpoint: str) -> None:
        if failpoint == "lease.taken":
            made = turns.pop(0)
            turns.append(made)
            _without_listener(lambda: coordinator_of(former).recut(made))

    with listening(cut), pytest.raises(ConflictError, match="keeps cutting"):
        pond.start()

    assert pond.start().summary().totals.records == 3


def _without_listener(action: Callable[[], None]) -> None:
    with listening(lambda _: None):
        action()
