"""The interval processor against the model, for any bundles, failures and outcomes of a task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, Records
from millpond.executor.computation.timers import Timer, firing_order
from millpond.executor.computation.values import JsonValues
from millpond.executor.interval.bundle import BundleStatistics, Deliveries
from millpond.executor.interval.row_reader import load_rows
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.pipeline.nodes import ComputationNode, OnLate
from millpond.statestore.interval import Interval
from millpond.statestore.rows.codec import MsgpackCodec
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.row_format import IpcRowFormat
from tests.fixtures.interval_run import Attempt, IntervalRun
from tests.oracles.model import ModelBundle, ModelInterval, ModelRecord

pytestmark = pytest.mark.slow

KEYS = ["", "a", "b", "é", "\U0001f986"]
STREAMS = ["left", "right"]
TAGS = ["", "echo", "again", "fail"]


class Script(Computation):
    """Executes the operations in its records and timer tags, and logs them in its state."""

    percentiles = (50,)

    def process_record(self, context: Context, record: Record) -> None:
        self._log(context, ["record", record.stream, record.at, record.late, context.watermark_at(50)])
        for operation in record.value:
            self._carry_out(context, record.at, *operation)

    def process_timer(self, context: Context, timer: Timer) -> None:
        self._log(context, ["timer", timer.tag, timer.domain.value, timer.at, timer.output_at])
        if timer.tag == "echo":
            context.produce("out", context.state.get(), at=timer.output_at + 1)
        if timer.tag == "again" and timer.at < context.watermark + 3:
            context.set_timer(timer.at + 2, "again", timer.domain)
            context.delete_timer("echo")
        if timer.tag == "fail":
            context.produce("out", "never")
            raise ValueError(timer.tag)

    def _log(self, context: Context, entry: list[Any]) -> None:
        context.state.set([*context.state.get([]), entry])

    def _carry_out(  # noqa: C901, PLR0912 - a branch for each thing a hook may do
        self, context: Context, at: int, name: str, *arguments: Any
    ) -> None:
        if name == "timer":
            delay, tag, domain, output_delay, holds = arguments
            output_at = None if output_delay is None else at + output_delay
            context.set_timer(at + delay, tag, domain, output_at, holds=holds)
        elif name == "delete_timer":
            context.delete_timer(*arguments)
        elif name == "produce":
            delay, value = arguments
            context.produce("out", value, at=None if delay is None else at + delay)
        elif name == "percentile":
            delay, tag = arguments
            context.set_timer(at + delay, tag, percentile=50)
        elif name == "hold":
            delay, tag = arguments
            context.state.hold(at + delay, tag)
        elif name == "release":
            context.state.release(*arguments)
        elif name == "held":
            context.produce("out", context.state.held_at, at=context.state.held_at)
        elif name == "nested":
            # The codec turns tuples into lists, and changes after `set` are not part of the state.
            shared = {"pair": (at, at)}
            self._log(context, [shared])
            shared["pair"] = ()
        elif name == "unsaved":
            context.state.get([]).append("unsaved")
        elif name == "shown":
            context.produce("out", repr(context.state.get()))
        elif name == "delete":
            context.state.delete()
        elif name == "refused":
            context.state.set(object())
        elif name == "fail":
            raise KeyError(at)


class BatchScript(Script):
    codec = MsgpackCodec()
    late_data_horizon = "2us"

    def process_records(self, context: Context, records: Records) -> None:
        for record in records:
            self.process_record(context, record)
        context.produce("out", [len(records), records[-1].at, context.oldest_at], at=context.oldest_at)


times = st.integers(0, 12)
domains = st.sampled_from(["event", "wall"])
operations = st.one_of(
    st.tuples(
        st.just("timer"),
        st.integers(-3, 6),
        st.sampled_from(TAGS),
        domains,
        st.none() | st.integers(-1, 4),
        st.sampled_from([None, None, True, False]),
    ),
    st.tuples(st.just("delete_timer"), st.sampled_from(TAGS), domains),
    st.tuples(st.just("percentile"), st.integers(-3, 6), st.sampled_from(TAGS)),
    st.tuples(st.just("hold"), st.integers(-3, 6), st.sampled_from(["", "echo"])),
    st.tuples(st.just("release"), st.sampled_from(["", "echo"])),
    st.just(("held",)),
    st.tuples(st.just("produce"), st.none() | st.integers(-1, 3), st.sampled_from([1, "x", None])),
    st.just(("delete",)),
    st.just(("nested",)),
    st.just(("unsaved",)),
    st.just(("shown",)),
    st.just(("refused",)),
    st.just(("fail",)),
)
records = st.builds(
    lambda stream, key, value, at, id_: ModelRecord(stream=stream, key=key, value=value, at=at, id=id_),
    st.sampled_from(STREAMS),
    st.sampled_from(KEYS),
    st.lists(operations, max_size=3),
    times,
    st.none() | st.sampled_from([b"", b"1", b"2", b"3", b"4"]),
)
# The outcome of the bundle's task, and the worker of the next bundle.
fates = st.sampled_from(
    ["plain", "plain", "retried", "unadopted", "speculated", "moved", "optimised", "compacted"]
)
bundles = st.tuples(
    st.lists(records, max_size=8), st.integers(0, 4), st.integers(0, 4), fates, st.integers(0, 5)
)


def deliveries_of(arrived: Sequence[ModelRecord]) -> list[Deliveries]:
    """Return consecutive records of one stream as one delivery."""
    runs: list[list[ModelRecord]] = []
    for record in arrived:
        if not runs or runs[-1][0].stream != record.stream:
            runs.append([])
        runs[-1].append(record)
    return [
        Deliveries(
            stream=run[0].stream,
            keys=pa.array([record.key for record in run]),
            at=np.array([record.at for record in run], np.int64),
            values=JsonValues(pa.array([orjson.dumps(record.value).decode() for record in run])),
            ids=pa.array([record.id for record in run], pa.binary()),
        )
        for run in runs
    ]


def run_with_fate(run: IntervalRun, bundle: Any, worker: int, fate: str) -> tuple[Attempt, int]:
    """Process and commit a bundle; return the committed attempt and the worker of the next bundle."""
    other = 1 - worker
    if fate == "unadopted":
        run.soft_state(worker).synchronise(run.files)
        run.process_only(bundle, worker)
    if fate == "retried":
        run.attempt(bundle, worker)
    if fate == "speculated":
        run.attempt(bundle, other)
    attempt = run.attempt(bundle, worker)
    run.commit(attempt)
    if fate == "optimised":
        run.optimise()
    if fate == "compacted":
        run.optimise(0, len(run.files) // 2)
    return attempt, other if fate in ("moved", "speculated") else worker


def decoded(codec: Any, encoded: Any) -> Any:
    """Return a decoded state, or None."""
    return None if encoded is None else codec.decode(encoded)


def productions_of(result: BundleResult) -> list[tuple[Any, ...]]:
    """Return the productions of the updates, in the order of keys and of emission."""
    if result.updates is None:
        return []
    return [
        (
            production["stream"],
            production["key"],
            production["value_bytes"] if production["value"] is None else orjson.loads(production["value"]),
            production["at"].timestamp() * 1_000_000,
        )
        for row in result.updates.column("productions").to_pylist()
        for production in row or []
    ]


def assert_same_bundle(result: BundleResult, expected: ModelBundle, model: ModelInterval) -> None:
    """Assert that processor and model report the same bundle and the same pending work."""
    statistics = result.statistics
    assert [(p.stream, p.key, p.value, p.at) for p in expected.productions] == productions_of(result)
    assert [(d.stream, d.key, d.at) for d in expected.dead_letters] == [
        (d.stream, d.key, d.at) for d in result.dead_letters
    ]
    assert statistics == BundleStatistics(
        records=expected.records,
        late=expected.late,
        dropped=expected.dropped,
        duplicates=expected.duplicates,
        timers=expected.timers,
        keys=expected.keys,
    )
    assert (model.next_at(TimeDomain.EVENT), model.next_at(TimeDomain.WALL), model.hold()) == (
        result.pending.next_event_timer,
        result.pending.next_wall_timer,
        result.pending.hold,
    )
    assert model.next_mark(50) == result.pending.next_percentile_timers.get(50)
    assert model.hold_mark(50) == result.pending.percentile_holds.get(50)


def assert_same_rows(run: IntervalRun, model: ModelInterval) -> None:
    """Assert that the committed files contain the model's rows and ids."""
    merged = run.rows()
    loaded = load_rows(merged)
    expected = model.rows()
    assert sorted(expected) == loaded.keys
    assert [expected[key].state for key in loaded.keys] == loaded.states
    assert {k: firing_order(r.timers.values()) for k, r in expected.items() if r.timers} == loaded.timers
    held = [[t.output_at for t in expected[key].timers.values() if t.holds] for key in loaded.keys]
    assert [min(times, default=None) for times in held] == merged.column("hold").cast(pa.int64()).to_pylist()
    ids = {
        (row["key"], consumed["id"])
        for row in run.updates().select(["key", "record_ids"]).to_pylist()
        for consumed in row["record_ids"] or []
    }
    assert model.consumed_ids() == ids


def check_against_model(
    computation: Computation,
    script: Iterable[tuple[list[ModelRecord], int, int, str, int]],
    budget_bytes: int,
    on_late: OnLate = "process",
) -> None:
    """Run the bundles on two workers and on the model."""
    node = ComputationNode(
        name="script",
        computation=computation,
        subscriptions=(),
        produces=("out",),
        retries=1,
        on_late=on_late,
    )
    run = IntervalRun(
        node, Interval("script"), workers=2, budget_bytes=budget_bytes, row_format=IpcRowFormat()
    )
    model = ModelInterval(node)
    watermark = wall_time = worker = mark = 0
    for arrived, event_step, wall_step, fate, ahead in script:
        watermark, wall_time = watermark + event_step, wall_time + wall_step
        mark = max(mark, watermark + ahead)
        bundle = run.bundle(deliveries_of(arrived), watermark, wall_time)
        bundle = replace(bundle, plan=replace(bundle.plan, percentile_watermarks={50: mark}))
        attempt, worker = run_with_fate(run, bundle, worker, fate)
        expected = model.process(arrived, watermark, wall_time, {50: mark})
        assert_same_bundle(attempt.result, expected, model)
        assert_same_rows(run, model)


@settings(max_examples=150, deadline=None)
@given(script=st.lists(bundles, max_size=6))
def test_bundles_agree_with_the_model(script: list[Any]) -> None:
    """Order, timers, failures, duplicates and every outcome of a task."""
    check_against_model(Script(), script, budget_bytes=1 << 20)


@settings(max_examples=100, deadline=None)
@given(script=st.lists(bundles, max_size=6))
def test_batch_hook_agrees_with_the_model(script: list[Any]) -> None:
    """It overrides process_records, with another codec."""
    check_against_model(BatchScript(), script, budget_bytes=1 << 20)


@settings(max_examples=100, deadline=None)
@given(script=st.lists(bundles, max_size=6))
def test_dropped_late_records_change_only_ids(script: list[Any]) -> None:
    """Each counts once, however often it is redelivered."""
    check_against_model(Script(), script, budget_bytes=1 << 20, on_late="drop")


@settings(max_examples=100, deadline=None)
@given(script=st.lists(bundles, max_size=6), budget_bytes=st.sampled_from([0, 600, 1_500]))
def test_small_cache_changes_nothing(script: list[Any], budget_bytes: int) -> None:
    """Evicted rows are read back."""
    check_against_model(Script(), script, budget_bytes)
