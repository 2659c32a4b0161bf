"""Updates of a local run while its thread works: nothing is lost or counted twice, and each caller gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.nodes import ProductionMode
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.run.run import PipelineUpdate
from millpond.statestore.errors import FencedError, InvalidError, UnavailableError
from millpond.statestore.failpoint import FAILPOINTS, listening
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

RECORDS = 400
UPDATES = 12


class Sum(Computation):
    """Adds up the numbers of a key, and forwards each.

    Args:
        generation: tells its code from that of another pipeline.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation

    def process_record(self, context: Any, record: Any) -> None:
        """Add and forward."""
        context.state.set(context.state.get(0) + record.value["n"])
        context.produce("added", record.value)


class Last(Computation):
    """Counts what comes."""

    def process_record(self, context: Any, record: Any) -> None:
        """Count."""
        context.state.set(context.state.get(0) + 1)


def pipeline(
    generation: int = 0,
    *,
    with_last: bool = True,
    streams: tuple[str, ...] = ("s",),
    productions: ProductionMode = "strong",
) -> EnginePipeline:
    """A sum, whose forwarded numbers are counted, and further streams that are counted."""
    made = EnginePipeline("p", retire=() if with_last else ("last",))
    for stream in streams:
        made.inject(stream, key="k", at="n", id="n" if stream == "s" else None)
        if stream != "s":
            made.stream(stream).apply(Last(), name=f"of_{stream}")
    made.add(Sum(generation), name="sum", subscribes={"s": None}, produces=["added"], productions=productions)
    if with_last:
        made.stream("added").apply(Last(), name="last")
    return made


@pytest.fixture
def store() -> Iterator[Store]:
    """A store in memory."""
    with Store.in_memory(clock=ManualClock(), rng=SeededRng(1)) as opened:
        yield opened


def states(store: Store, computation: str) -> dict[str, str]:
    """The stored states of a computation, by key."""
    store.committer.refresh()
    return {row["key"]: row["state"] for row in store.rows_view(computation).to_arrow().to_pylist()}


def started(store: Store, made: EnginePipeline, *, stepping: bool = False) -> LocalRun:
    """A run of a pipeline, with a thread of its own unless it steps."""
    return LocalRunner(store, progress=False, upkeep=None).start(made, stepping=stepping)


@pytest.mark.parametrize("productions", ["strong", "weak"])
def test_nothing_is_lost_or_counted_twice_under_a_steady_inject(
    store: Store, productions: ProductionMode
) -> None:
    """Each record that another thread injects during many updates is in the sum once, and its receipt is durable."""
    receipts: list[Receipt] = []
    with started(store, pipeline(productions=productions)) as run:

        def feed() -> None:
            receipts.extend(run.inject("s", {"k": "k", "n": number}) for number in range(RECORDS))

        feeder = threading.Thread(target=feed)
        feeder.start()
        updates = [
            run.update(pipeline(generation, productions=productions)) for generation in range(1, UPDATES + 1)
        ]
        feeder.join()
        assert all(receipt.wait("60s") for receipt in receipts)
        assert run.run_until_quiet(timeout="1m")

    assert states(store, "sum") == {"k": str(sum(range(RECORDS)))}
    assert states(store, "last") == {"k": str(RECORDS)}
    assert [update.change.changed for update in updates] == [("sum",)] * UPDATES
    assert sorted({update.version for update in updates}) == [update.version for update in updates]


def test_records_that_wait_for_a_stream_that_goes_are_refused_and_others_are_not(store: Store) -> None:
    """The receipt of such records says why, the run goes on, and what waits for other streams is processed."""
    run = started(store, pipeline(streams=("s", "more")), stepping=True)
    gone = run.inject("more", {"k": "k", "n": 1})
    promised = run.advance_watermark("more", 5)
    kept = run.inject("s", {"k": "k", "n": 7})

    run.update(pipeline())
    run.run_until_quiet()

    assert kept.is_durable
    for receipt in (gone, promised):
        with pytest.raises(InvalidError, match=r"no longer has their stream|no injector feeds"):
            receipt.wait()
    with pytest.raises(InvalidError, match="no injector feeds this stream"):
        run.inject("more", {"k": "k", "n": 1})
    run.stop()
    assert states(store, "sum") == {"k": "7"}


def test_rows_that_wait_and_lack_what_a_new_key_needs_are_refused(store: Store) -> None:
    """A consumer that is added with a key of another field refuses rows without it; the run does not end."""
    run = started(store, pipeline(), stepping=True)
    waiting = run.inject("s", {"k": "k", "n": 1})
    changed = pipeline()
    changed.add(Last(), name="by_city", subscribes={"s": "city"})

    run.update(changed)
    run.run_until_quiet()

    with pytest.raises(InvalidError, match="city"):
        waiting.wait()
    run.inject_durably("s", {"k": "k", "n": 2, "city": "Oslo"})
    run.stop()
    assert states(store, "by_city") == {"Oslo": "1"}


def test_an_update_that_is_refused_ends_nothing(store: Store) -> None:
    """The thread runs the old pipeline as before, and the caller gets the error."""
    with started(store, pipeline()) as run:
        run.inject("s", {"k": "k", "n": 1}).wait()
        with pytest.raises(InvalidError, match="no injector"):
            run.update(EnginePipeline("p"))
        other = EnginePipeline("q")
        other.inject("s", key="k", at="n").apply(Last(), name="last")
        with pytest.raises(InvalidError, match="keeps the pipeline's name"):
            run.update(other)
        run.inject("s", {"k": "k", "n": 2}).wait()
        assert run.is_active
    assert states(store, "sum") == {"k": "3"}


def test_a_sink_that_cannot_be_opened_leaves_the_run_as_it_was(store: Store) -> None:
    """Sinks are opened before anything changes."""

    class Broken:
        identity = "nowhere"

        def open(self, *_: object, **__: object) -> Any:
            raise UnavailableError("the destination is away")

    changed = pipeline(1)
    changed.add_sink("out", "added", Broken())
    with started(store, pipeline()) as run:
        with pytest.raises(UnavailableError, match="destination is away"):
            run.update(changed)
        run.inject("s", {"k": "k", "n": 2}).wait()
        assert not run.topology.sinks


def test_code_of_the_pipeline_cannot_update_it(store: Store) -> None:
    """It is told so, instead of waiting for itself for ever."""
    runs: list[LocalRun] = []
    answers: list[str] = []

    class Meddler(Computation):
        def process_record(self, context: Any, record: Any) -> None:
            try:
                runs[0].update(pipeline())
            except InvalidError as refusal:
                answers.append(str(refusal))

        def __reduce__(self) -> tuple[Any, ...]:
            return Last, ()

    made = EnginePipeline("p")
    made.inject("s", key="k", at="n").apply(Meddler(), name="meddler")
    with started(store, made) as run:
        runs.append(run)
        run.inject("s", {"k": "k", "n": 2}).wait()
    assert answers == ["a pipeline's own code cannot update it: the update would wait for itself"]


def test_an_update_of_a_run_that_has_ended_is_refused(store: Store) -> None:
    """After a stop no update can come."""
    run = started(store, pipeline())
    run.stop()
    with pytest.raises(InvalidError, match="stopped"):
        run.update(pipeline(1))


class _Died(BaseException):
    pass


_UPDATE_POINTS = [
    *(name for name in FAILPOINTS if name.startswith("update.")),
    "lease.taken",
    "lease.fenced",
    "recovery.scanned",
    "recovery.productions_found",
    "commit.before_put",
    "commit.after_put",
    "commit.before_apply",
    "commit.done",
]


@pytest.mark.parametrize("point", _UPDATE_POINTS)
@pytest.mark.parametrize("goes_on", ["old", "new"])
def test_a_process_that_dies_within_an_update_leaves_a_store_for_either_pipeline(
    point: str, goes_on: str
) -> None:
    """Wherever it dies, a restart with the old or the new pipeline goes on from the last superstep: each record
    counts once, and what was retired is not lost.
    """
    disk, registry = MemoryObjects(), MemoryRegistry()

    def opened(number: int) -> Store:
        return Store.in_memory(objects=disk, registry=registry, clock=ManualClock(), rng=SeededRng(number))

    # The new pipeline retires one computation and brings another one back, which takes leases.
    before, after = pipeline(with_last=False), pipeline(1)
    first = opened(1)
    run = started(first, pipeline(), stepping=True)
    for number in (1, 2):
        run.inject_durably("s", {"k": "k", "n": number})
    run.run_until_quiet()
    run.update(before)
    run.inject_durably("s", {"k": "k", "n": 4})
    reached: list[str] = []

    def die(name: str) -> None:
        reached.append(name)
        if name == point:
            raise _Died

    with listening(die), pytest.raises(_Died):
        run.update(after)
    assert reached[-1] == point

    second = opened(2)
    again = started(second, {"old": pipeline(with_last=False), "new": pipeline(1)}[goes_on], stepping=True)
    again.inject_durably("s", {"k": "k", "n": 4})
    again.inject_durably("s", {"k": "k", "n": 8})
    again.run_until_quiet()
    again.update(pipeline(2))
    again.run_until_quiet()
    again.stop()
    assert states(second, "sum") == {"k": "15"}
    # The number that came while it was retired waits for it as long as no superstep follows.
    assert states(second, "last") == {"k": "4" if goes_on == "new" else "3"}


@pytest.mark.parametrize("point", [None, "update.checked", "update.leases_released"])
def test_an_owner_that_was_fenced_updates_nothing(point: str | None) -> None:
    """Another process that has taken the pipeline, or takes it within the update, goes on alone."""
    disk, registry = MemoryObjects(), MemoryRegistry()
    first, second = (
        Store.in_memory(objects=disk, registry=registry, clock=ManualClock(), rng=SeededRng(number))
        for number in (1, 2)
    )
    fenced = started(first, pipeline(), stepping=True)
    fenced.inject_durably("s", {"k": "k", "n": 1})
    fenced.run_until_quiet()
    owners: list[LocalRun] = []

    def take_over(name: str | None) -> None:
        if name == point and not owners:
            owners.append(started(second, pipeline(), stepping=True))

    if point is None:
        take_over(None)
    with listening(take_over), pytest.raises(FencedError):
        fenced.update(pipeline(1, with_last=False))

    (owner,) = owners
    owner.inject_durably("s", {"k": "k", "n": 2})
    owner.run_until_quiet()
    with pytest.raises(FencedError):
        fenced.inject_durably("s", {"k": "k", "n": 4})
    owner.stop()
    assert (states(second, "sum"), states(second, "last")) == ({"k": "3"}, {"k": "2"})


def test_an_update_does_not_wait_for_code_that_hangs(store: Store) -> None:
    """When code that cannot be interrupted has ended the run, the update says so."""
    release, began = threading.Event(), threading.Event()

    class Hangs(Computation):
        def process_record(self, context: Any, record: Any) -> None:
            began.set()
            # In one call of C, which no exception from outside can interrupt.
            release.wait()

        def __reduce__(self) -> tuple[Any, ...]:
            return Last, ()

    made = EnginePipeline("p")
    made.inject("s", key="k", at="n").apply(Hangs(), name="hangs", user_code_timeout="200ms")
    run = started(store, made)
    try:
        run.inject("s", {"k": "k", "n": 2})
        assert began.wait(60)
        with pytest.raises(InvalidError, match="hangs"):
            run.update(made)
    finally:
        release.set()
        run.abandon()


def test_a_service_that_goes_away_midway_ends_the_run_with_its_error(store: Store) -> None:
    """Once something has changed there is no way back: the run ends, and says why to everyone."""

    def away(name: str) -> None:
        if name == "update.leases_released":
            raise UnavailableError("the store is away")

    with started(store, pipeline()) as run:
        run.inject("s", {"k": "k", "n": 2}).wait()
        with listening(away), pytest.raises(UnavailableError, match="the store is away"):
            run.update(pipeline(1, with_last=False))
        assert not run.is_active
        with pytest.raises(UnavailableError, match="the store is away"):
            run.inject("s", {"k": "k", "n": 3})


def test_what_an_update_says_it_changed(store: Store) -> None:
    """Names of what is new, gone and different, the version of the commit, and how long supersteps paused."""
    run = started(store, pipeline(streams=("s", "more")), stepping=True)
    done = run.update(pipeline(1, streams=("s", "other")))
    run.stop()

    assert isinstance(done, PipelineUpdate)
    assert (done.change.added, done.change.removed, done.change.changed) == (
        ("of_other",),
        ("of_more",),
        ("sum",),
    )
    assert done.version == store.committer.refresh().version
    assert done.pause_ms >= 0
