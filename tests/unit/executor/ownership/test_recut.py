"""Splits and merges while a pipeline runs."""

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
from millpond.gc.collectors import write_checkpoint
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
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.set_timer(record.at + 10)

    def process_timer(self, context, timer):
        context.produce("rung", {"at": timer.at})


class Rung(Computation):
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


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_replaced_interval_cannot_be_written_or_taken(pond: Pond, is_forgotten: bool) -> None:
    """Neither the next commit number nor a new sequencer is accepted, also where a checkpoint has forgotten the fence."""
    run = feed(pond.start(), "axz")
    held = coordinator_of(run).ownership.owned[WHOLE].fence

    coordinator_of(run).recut(Cut.split(WHOLE, ["m"]))
    if is_forgotten:
        write_checkpoint(pond.disk, every=1)
    assert (WHOLE.app_id in pond.store().snapshot().txns) is not is_forgotten

    committer = pond.store().committer
    late = Fence(held.sequencer, CommitNumber(held.commit_number + 1))
    with pytest.raises(FencedError):
        committer.commit(CommitRequest(kind="superstep", writes=(IntervalWrite(interval=WHOLE, fence=late),)))
    fresh = Fence(Sequencer(1_000), CommitNumber(0))
    with pytest.raises(ConflictError, match="cut into other intervals"):
        committer.commit(CommitRequest(kind="fence", writes=(IntervalWrite(interval=WHOLE, fence=fresh),)))


def test_successors_have_higher_sequencers(pond: Pond) -> None:
    """An interval that returns after a split and a merge must not reuse its sequencer."""
    run = feed(pond.start(), "axz")
    seen = [max(fence.sequencer for fence in pond.live().values())]

    for cut in (Cut.split(WHOLE, ["m"]), Cut.merge((LOW, HIGH)), Cut.split(WHOLE, ["m"])):
        coordinator_of(run).recut(cut)
        assert [*pond.live()] == [*cut.by]
        assert min(fence.sequencer for fence in pond.live().values()) > seen[-1]
        seen.append(max(fence.sequencer for fence in pond.live().values()))
        feed(run, "axz", len(seen))

    assert pond.states("alarm") == dict.fromkeys("axz", 4)


def test_checkpoint_forgets_replaced_intervals(pond: Pond) -> None:
    """Otherwise a store whose hot range wanders would open ever more slowly."""
    run, known = feed(pond.start(), "axz"), set[int]()
    for number, cut in enumerate("bcdefgh"):
        coordinator_of(run).recut(Cut.split(WHOLE, [cut]))
        coordinator_of(run).recut(Cut.merge(coordinator_of(run).intervals_of("alarm")))
        feed(run, "axz", 1 + number)
        live = pond.live()
        write_checkpoint(pond.disk, every=1)
        assert pond.live() == live
        known.add(len(pond.store().snapshot().txns))
    run.stop()

    assert len(known) == 1
    feed(pond.start(), "axz", 8)
    assert pond.states("alarm") == dict.fromkeys("axz", 9)


def test_timers_fire_once_and_ids_stay_known_across_cuts(pond: Pond) -> None:
    run = feed(pond.start(), "abxyz")

    coordinator_of(run).recut(Cut.split(WHOLE, ["b", "y"]))
    feed(run, "abxyz")
    coordinator_of(run).recut(Cut.merge(coordinator_of(run).intervals_of("alarm")[1:]))
    feed(run, "abxyz")
    totals = ended(run).summary().totals

    assert totals.duplicates == 10
    assert pond.states("alarm") == dict.fromkeys("abxyz", 1)
    assert pond.states("rings") == dict.fromkeys("abxyz", 1)


def test_cut_by_a_former_owner_is_fenced(pond: Pond) -> None:
    """It is refused before it takes a lease."""
    former = feed(pond.start(deaf=True), "axz")
    owner = pond.start()

    with pytest.raises(FencedError):
        coordinator_of(former).recut(Cut.split(WHOLE, ["m"]))

    assert [*pond.live()] == [WHOLE]
    assert feed(owner, "axz", 1).summary().totals.records == 6


def test_commit_by_a_former_owner_after_a_cut_is_fenced(pond: Pond) -> None:
    former = feed(pond.start(deaf=True), "axz")
    owner = pond.start()
    coordinator_of(owner).recut(Cut.split(WHOLE, ["m"]))

    with pytest.raises(FencedError):
        feed(former, "axz", 1)

    feed(owner, "axz", 2)
    assert pond.states("alarm") == dict.fromkeys("axz", 2)


def test_new_owner_takes_live_intervals_only(pond: Pond) -> None:
    """Otherwise timers of the split interval would fire twice."""
    run = feed(pond.start(), "axz")
    coordinator_of(run).recut(Cut.split(WHOLE, ["m"]))
    run.stop()

    owner = pond.start()

    assert coordinator_of(owner).intervals_of("alarm") == (LOW, HIGH)
    ended(owner)
    assert pond.states("rings") == dict.fromkeys("axz", 1)


@pytest.mark.parametrize("cuts", [1, 3])
def test_cuts_during_a_takeover_are_followed(pond: Pond, cuts: int) -> None:
    """The former owner may cut until the new one has fenced it."""
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


def test_takeover_gives_up_when_the_former_owner_keeps_cutting(pond: Pond) -> None:
    """The refused owner must release its leases."""
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
