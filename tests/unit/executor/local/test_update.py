"""Updates of a local run."""

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
    """A sum that forwards its numbers; ``generation`` stands for a change of the code."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation

    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + record.value["n"])
        context.produce("added", record.value)


class Last(Computation):
    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + 1)


def pipeline(
    generation: int = 0,
    *,
    with_last: bool = True,
    streams: tuple[str, ...] = ("s",),
    productions: ProductionMode = "strong",
) -> EnginePipeline:
    """Count the numbers that a sum forwards, and the records of further streams."""
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
    with Store.in_memory(clock=ManualClock(), rng=SeededRng(1)) as opened:
        yield opened


def states(store: Store, computation: str) -> dict[str, str]:
    store.committer.refresh()
    return {row["key"]: row["state"] for row in store.rows_view(computation).to_arrow().to_pylist()}


def started(store: Store, made: EnginePipeline, *, stepping: bool = False) -> LocalRun:
    return LocalRunner(store, progress=False, upkeep=None).start(made, stepping=stepping)


@pytest.mark.parametrize("productions", ["strong", "weak"])
def test_records_injected_during_updates_count_once(store: Store, productions: ProductionMode) -> None:
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


def test_waiting_records_of_a_removed_stream_are_refused(store: Store) -> None:
    """The run continues with the records of other streams."""
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


def test_waiting_rows_without_a_new_key_field_are_refused(store: Store) -> None:
    """The run must not end."""
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


def test_refused_update_leaves_the_run_unchanged(store: Store) -> None:
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


def test_update_with_an_unavailable_sink_leaves_the_run_unchanged(store: Store) -> None:
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


def test_update_from_the_pipelines_own_code_is_refused(store: Store) -> None:
    """The update would wait for itself indefinitely."""
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


def test_update_of_a_stopped_run_is_refused(store: Store) -> None:
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
def test_death_during_an_update_leaves_a_store_for_either_pipeline(point: str, goes_on: str) -> None:
    """A restart with the old or the new pipeline continues from the last superstep and counts each record
    once.
    """
    disk, registry = MemoryObjects(), MemoryRegistry()

    def opened(number: int) -> Store:
        return Store.in_memory(objects=disk, registry=registry, clock=ManualClock(), rng=SeededRng(number))

    # The new pipeline restores a retired computation, which takes leases.
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
    # A number that arrived while the computation was retired waits until the next superstep.
    assert states(second, "last") == {"k": "4" if goes_on == "new" else "3"}


@pytest.mark.parametrize("point", [None, "update.checked", "update.leases_released"])
def test_update_by_a_fenced_owner_is_refused(point: str | None) -> None:
    """The other process takes over before the update or during it."""
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


def test_update_of_a_run_with_hanging_code_raises_its_error(store: Store) -> None:
    """The time limit has ended the run, but cannot interrupt the code."""
    release, began = threading.Event(), threading.Event()

    class Hangs(Computation):
        def process_record(self, context: Any, record: Any) -> None:
            began.set()
            # One call into C, which no exception from outside can interrupt.
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


def test_unavailable_store_midway_in_an_update_ends_the_run(store: Store) -> None:
    """The update has changed something and cannot be reverted, so every caller gets the error."""

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


def test_update_reports_changes_version_and_pause(store: Store) -> None:
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
