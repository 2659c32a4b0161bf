"""The coordinator of supersteps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.interval.bundle import BundleStatistics, DeadLetter, IntervalPlan, ProductionSummary
from millpond.executor.interval.row_update import BundleResult, Manifest, PendingWork
from millpond.executor.pipeline.nodes import DEAD_LETTERS, control_interval
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.options import PipelineOptions
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.superstep.report import Totals
from millpond.executor.time.observations import InputObservation, TimesSeen
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import FencedError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, TableVersion, WallTimeMicros
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.row_updates import row_updates
from tests.fixtures.supersteps import commit

KEYS = pa.array(["a", "b", "c", "d"])
LEFT, RIGHT = Interval("first", "", "c"), Interval("first", "c")
SECOND = Interval("second")
NOTHING = BundleResult(updates=None, statistics=BundleStatistics())
Update = dict[str, Any]


def pipeline(*, letters: bool = False) -> EnginePipeline:
    """Chain ``in`` (ten microseconds of disorder) → ``first`` → ``mid`` → ``second``, with an optional reader
    of letters.
    """
    made = EnginePipeline("p")
    made.inject("in", key="k", at="t", watermark=BoundedDisorder("10us"))
    made.add(Computation(), name="first", subscribes={"in": None}, produces=("mid",), intervals=2)
    made.add(Computation(), name="second", subscribes={"mid": None}, produces=(), intervals=1)
    if letters:
        made.add(Computation(), name="reader", subscribes={DEAD_LETTERS: None}, produces=(), intervals=1)
    return made


class Pond:
    """A store in memory and its coordinators in turn."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.disk = FaultyObjects(MemoryObjects())
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def open(self, made: EnginePipeline | None = None) -> Coordinator:
        topology = (made or pipeline()).check()
        coordinator = Coordinator(
            self.store(), topology, PipelineOptions(clock=self.clock, rng=self.rng, dead_letter_limit=None)
        )
        coordinator.open()
        return coordinator

    def manifest(self, plan: SuperstepPlan, part: IntervalPlan, *updates: Update, **result: Any) -> Manifest:
        """Write ``updates`` as a task would, and return its manifest."""
        order = {"sequencer": part.fence.sequencer, "commit_number": part.fence.commit_number}
        rows = row_updates([{**order, "superstep": plan.superstep, **update} for update in updates])
        file = write_row_file(
            self.disk, part.interval, rows, superstep=plan.superstep, fence=part.fence, token=self.rng.token()
        )
        statistics = BundleStatistics(records=len(updates))
        owed = [one.name for one in fields(PendingWork) if one.name in result]
        pending = PendingWork(**{name: result.pop(name) for name in owed})
        outcome = BundleResult(updates=None, statistics=statistics, pending=pending, **result)
        return Manifest(interval=part.interval, fence=part.fence, file=file, result=outcome)

    def info(self, version: int) -> dict[str, Any]:
        actions = decode(self.store().log.require(TableVersion(version)), str(version))
        return next(dict(one.millpond or {}) for one in actions if isinstance(one, CommitInfo))


@pytest.fixture
def pond() -> Pond:
    return Pond()


def seen(records: int, newest_at: int | None) -> InputObservation:
    if newest_at is None:
        return InputObservation(stream="in", records=records)
    at = EventTimeMicros(newest_at)
    return InputObservation(stream="in", records=records, times=TimesSeen(newest_at=at, oldest_at=at))


def intervals(plan: SuperstepPlan) -> list[Interval]:
    return [part.interval for part in plan.intervals]


def part_of(plan: SuperstepPlan, interval: Interval) -> IntervalPlan:
    return next(part for part in plan.intervals if part.interval == interval)


def produced(*values: int) -> tuple[Update, ProductionSummary]:
    """Make a row update of key ``a`` that produces to ``mid``, and its summary."""
    made = [
        {"stream": "mid", "key": "x", "value": str(value), "value_bytes": None, "at": value}
        for value in values
    ]
    oldest = EventTimeMicros(min(values))
    return {"key": "a", "productions": made}, ProductionSummary(
        stream="mid", count=len(made), oldest_at=oldest
    )


class TestPlans:
    def test_new_pipeline_plans_no_intervals(self, pond: Pond) -> None:
        coordinator = pond.open()
        plan = coordinator.begin()

        assert (coordinator.superstep, plan.superstep, plan.intervals) == (0, 1, ())
        assert not coordinator.has_work()
        assert coordinator.next_wall_timer() is None
        assert (
            coordinator.watermarks.input_watermark("second")
            == coordinator.watermarks.low_watermark()
            == TIME_MIN_US
        )
        assert [node.name for node in coordinator.computations_without_intervals(["in"])] == ["first"]

    def test_input_plans_all_intervals_of_its_consumers_only(self, pond: Pond) -> None:
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})

        assert intervals(plan) == [LEFT, RIGHT] == list(coordinator.intervals_of("first"))
        assert [(part.fence.commit_number, part.due, part.files) for part in plan.intervals] == [
            (1, False, ())
        ] * 2
        assert coordinator.begin().intervals == ()

    def test_productions_plan_their_consumers_for_the_next_superstep(self, pond: Pond) -> None:
        """The plan names the file with the productions."""
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        update, summary = produced(7, 5)
        written = pond.manifest(plan, part_of(plan, LEFT), update, productions=(summary,))
        assert written.file is not None
        commit(coordinator, plan, [written], inputs=[seen(1, 50)])

        assert (coordinator.has_work(), coordinator.pending.count) == (True, 2)
        following = coordinator.begin()
        assert [(source.path, source.superstep) for source in following.sources] == [(written.file.path, 1)]
        assert intervals(following) == [SECOND]
        commit(coordinator, following, [])
        assert (coordinator.has_work(), coordinator.pending.count) == (False, 0)

    def test_productions_for_a_sink_alone_wait_for_no_superstep(self, pond: Pond, tmp_path: Path) -> None:
        """The sink gets them while the next superstep runs, which neither reads nor counts them, nor after a restart."""
        made = EnginePipeline("p")
        made.inject("in", key="k", at="t")
        made.add(Computation(), name="first", subscribes={"in": None}, produces=("mid",), intervals=2)
        made.add_sink("rows", "mid", DeltaSink(str(tmp_path)))
        coordinator = pond.open(made)
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        update, summary = produced(7, 5)
        written = pond.manifest(plan, part_of(plan, LEFT), update, productions=(summary,))
        report = commit(coordinator, plan, [written], inputs=[seen(1, 50)])
        assert written.file is not None

        for owner in (coordinator, pond.open(made)):
            assert ([one.path for one in owner.pending.for_sinks], owner.pending.count) == (
                [written.file.path],
                0,
            )
            assert owner.begin(inputs={"in"}).sources == ()
        assert report.pending == 0

    @pytest.mark.parametrize("domain", ["event", "wall"])
    def test_due_timer_plans_its_interval_without_records(self, pond: Pond, domain: str) -> None:
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        at = WallTimeMicros(pond.clock.now_us() + 1_000) if domain == "wall" else EventTimeMicros(50)
        timers = {f"next_{domain}_timer": at}
        commit(
            coordinator,
            plan,
            [pond.manifest(plan, part_of(plan, RIGHT), {"key": "d", "state": "1"}, **timers)],
        )
        assert not coordinator.has_work()
        if domain == "wall":
            assert coordinator.next_wall_timer() == at
            pond.clock.advance_ms(1)
        else:
            coordinator.watermarks.advance("in", EventTimeMicros(50))

        assert coordinator.has_work()
        due = coordinator.begin()
        assert [(part.interval, part.due, len(part.files)) for part in due.intervals] == [(RIGHT, True, 1)]


class TestCommits:
    def test_superstep_is_one_commit(self, pond: Pond) -> None:
        """Rows, input position, superstep, watermarks and counts are in one version."""
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        version = pond.store().snapshot().version
        manifests = [
            pond.manifest(plan, part_of(plan, RIGHT), {"key": "c", "state": "2"}),
            pond.manifest(plan, part_of(plan, LEFT), {"key": "a", "state": "1"}, {"key": "b", "state": "1"}),
        ]
        report = commit(
            coordinator,
            plan,
            manifests,
            position=InputPosition(stream="in", source="q", batch=0),
            inputs=[seen(3, 100)],
        )
        snapshot = pond.store().snapshot()

        assert report.version == snapshot.version == version + 1
        assert (report.superstep, report.records, report.pending) == (1, 3, 0)
        assert snapshot.txns[AppId.SUPERSTEP.of("p")] == 1
        assert pond.store().rows_view("first").to_arrow().column("key").to_pylist() == ["a", "b", "c"]
        info = pond.info(report.version)
        assert (info["pipeline"], info["input"], info["batch"], info["superstep"]) == ("p", "in", 0, 1)
        assert info["counts"]["records"] == info["counts"]["injected"] == 3
        for interval in (LEFT, RIGHT, control_interval("p")):
            fence = snapshot.fence_of(interval)
            assert fence is not None
            assert fence.commit_number >= 1

    def test_commit_fences_only_intervals_with_work(self, pond: Pond) -> None:
        """The pipeline's control interval is always fenced."""
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        before = pond.store().snapshot()
        plan = coordinator.begin(inputs={"in"})
        left, right = (part_of(plan, interval) for interval in (LEFT, RIGHT))
        idle = Manifest(interval=RIGHT, fence=right.fence, file=None, result=NOTHING)
        commit(coordinator, plan, [pond.manifest(plan, left, {"key": "a", "state": "1"}), idle])
        after = pond.store().snapshot()

        assert after.fence_of(RIGHT) == before.fence_of(RIGHT)
        assert after.fence_of(LEFT) == left.fence
        assert part_of(coordinator.begin(inputs={"in"}), RIGHT).fence == right.fence

    def test_watermark_follows_committed_records_less_the_disorder(self, pond: Pond) -> None:
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        assert plan.intervals[0].watermark == TIME_MIN_US
        commit(coordinator, plan, [], inputs=[seen(1, 100)])

        assert (
            coordinator.watermarks.injector_watermark("in")
            == coordinator.watermarks.input_watermark("first")
            == 90
        )
        assert (
            coordinator.watermarks.input_watermark("second") == coordinator.watermarks.low_watermark() == 90
        )
        assert coordinator.begin(inputs={"in"}).intervals[0].watermark == 90

    def test_undelivered_productions_and_holds_bind_the_watermark_downstream(self, pond: Pond) -> None:
        coordinator = pond.open()
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        update, summary = produced(40)
        manifest = pond.manifest(
            plan, part_of(plan, LEFT), update, productions=(summary,), hold=EventTimeMicros(60)
        )
        commit(coordinator, plan, [manifest], inputs=[seen(1, 100)])

        assert (
            coordinator.watermarks.input_watermark("first"),
            coordinator.watermarks.input_watermark("second"),
        ) == (90, 40)
        commit(coordinator, coordinator.begin(), [])
        assert (coordinator.watermarks.input_watermark("second"), coordinator.watermarks.low_watermark()) == (
            60,
            60,
        )
        coordinator.watermarks.finish("in")
        assert (
            coordinator.watermarks.input_watermark("first"),
            coordinator.watermarks.input_watermark("second"),
        ) == (TIME_MAX_US, 60)

    def test_dead_letter_is_a_row_and_a_production_to_subscribers(self, pond: Pond) -> None:
        coordinator = pond.open(pipeline(letters=True))
        letter = DeadLetter(computation="first", stream="in", key=None, value="1", at=None, error="no key")
        report = commit(coordinator, coordinator.begin(), [], dead_letters=[letter, letter])
        rows = pond.store().rows_view(DEAD_LETTERS).to_arrow().to_pylist()

        assert [row["key"] for row in rows] == ["p/0000000001/000000", "p/0000000001/000001"]
        assert orjson.loads(rows[0]["state"])["error"] == "no key"
        assert (report.dead_letters, report.pending) == (2, 2)
        plan = coordinator.begin()
        assert intervals(plan) == [Interval("reader")]
        assert len(plan.sources) == 1

    def test_fenced_superstep_changes_neither_coordinator_nor_table(self, pond: Pond) -> None:
        former = pond.open()
        former.create_intervals("first", KEYS)
        plan = former.begin(inputs={"in"})
        manifest = pond.manifest(plan, part_of(plan, LEFT), {"key": "a", "state": "1"})
        owner = pond.open()
        version = pond.store().snapshot().version

        with pytest.raises(FencedError):
            commit(former, plan, [manifest], inputs=[seen(1, 100)])
        assert (former.superstep, former.totals, former.watermarks.input_watermark("first")) == (
            0,
            Totals(),
            TIME_MIN_US,
        )
        assert pond.store().snapshot().version == version
        assert pond.store().rows_view("first").to_arrow().num_rows == 0
        commit(owner, owner.begin(), [])


class TestRestarts:
    def run(self, pond: Pond) -> Coordinator:
        """Commit a superstep that leaves every kind of pending work."""
        coordinator = pond.open(pipeline(letters=True))
        coordinator.create_intervals("first", KEYS)
        plan = coordinator.begin(inputs={"in"})
        update, summary = produced(40, 45)
        hold = EventTimeMicros(60)
        timers = [
            {"tag": "", "domain": "event", "at": 95, "output_at": 60},
            {"tag": "", "domain": "wall", "at": pond.clock.now_us() + 5_000, "output_at": 70},
        ]
        update |= {"timers": timers, "hold": hold}
        manifest = pond.manifest(
            plan,
            part_of(plan, LEFT),
            update,
            productions=(summary,),
            hold=hold,
            next_event_timer=EventTimeMicros(95),
            next_wall_timer=WallTimeMicros(pond.clock.now_us() + 5_000),
        )
        letter = DeadLetter(computation="first", stream="in", key=None, value="1", at=30, error="no key")
        position = InputPosition(stream="in", source="q", batch=0)
        commit(coordinator, plan, [manifest], position=position, inputs=[seen(2, 100)], dead_letters=[letter])
        return coordinator

    def facts(self, coordinator: Coordinator) -> Sequence[object]:
        plan = coordinator.begin()
        names = ("first", "second", "reader")
        return (
            coordinator.superstep,
            coordinator.totals,
            [coordinator.watermarks.input_watermark(name) for name in names],
            [coordinator.intervals_of(name) for name in names],
            coordinator.watermarks.low_watermark(),
            coordinator.watermarks.injector_watermark("in"),
            coordinator.pending.count,
            coordinator.next_wall_timer(),
            coordinator.has_work(),
            [(part.interval, part.watermark, part.files) for part in plan.intervals],
            [(source.path, source.superstep, source.streams) for source in plan.sources],
        )

    def test_new_owner_recovers_all_facts_of_the_former_one(self, pond: Pond) -> None:
        former = self.run(pond)
        known = self.facts(former)

        assert self.facts(pond.open(pipeline(letters=True))) == known
        assert known[6] == 3

    def test_committed_batch_is_not_admitted_again_after_a_restart(self, pond: Pond) -> None:
        self.run(pond)
        owner = pond.open(pipeline(letters=True))
        positions = [InputPosition(stream="in", source="q", batch=batch) for batch in (0, 1)]

        assert [owner.inputs.admit(position) for position in positions] == [False, True]
        with pytest.raises(InvalidError, match="another checkpoint"):
            owner.inputs.admit(InputPosition(stream="in", source="other", batch=0))

    def test_journaled_watermark_is_kept_after_a_restart(self, pond: Pond) -> None:
        """The restarted injector first sees older records."""
        self.run(pond)
        owner = pond.open(pipeline(letters=True))
        commit(owner, owner.begin(inputs={"in"}), [], inputs=[seen(1, 20)])

        assert owner.watermarks.injector_watermark("in") == owner.watermarks.input_watermark("first") == 90
