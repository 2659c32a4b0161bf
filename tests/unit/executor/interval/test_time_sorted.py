"""Records that wait in their key's row for the order of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, RecordColumns
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import PythonValues
from millpond.executor.interval.key_executor import waiting_columns, waiting_timer
from millpond.executor.interval.row_cache import timers_weight, waiting_weight
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.time.watermark_policies import BoundedDisorder, ManualWatermark
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.value_text import PlainObject
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

NOON = datetime(2020, 1, 1, 12, tzinfo=UTC)


class Seen(Computation):
    """A list of all inputs in order, which are also forwarded."""

    def process_record(self, context: Context, record: Record) -> None:
        mark = "late" if record.late else "record"
        context.state.set([*context.state.get([]), [mark, record.value["n"], record.at]])
        context.produce("seen", record.value["n"])
        if "timer" in record.value:
            context.set_timer(record.at + record.value["timer"], tag="t", output_at=record.at)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), ["timer", context.oldest_at, timer.at]])


class Kept(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        count, late = context.state.get([0, 0])
        context.state.set([count + 1, late + record.late])


class Pond:
    """A pipeline on the local runner, in memory, step by step."""

    def __init__(self, make: Callable[[], Pipeline], **options: Any) -> None:
        self.clock = ManualClock()
        self.store = Store.in_memory(clock=self.clock, rng=SeededRng(1))
        self._options = options
        self.start(make)

    def start(self, make: Callable[[], Pipeline]) -> None:
        runner = LocalRunner(self.store, clock=self.clock, progress=False, **self._options)
        self.run: LocalRun = runner.start(make(), stepping=True)

    def inject(self, *rows: dict[str, Any], to: int | None = None) -> None:
        self.run.inject("s", list(rows))
        self.run.step()
        if to is not None:
            self.run.advance_watermark("s", to)
        self.run.run_until_quiet()

    def state(self, name: str = "seen", key: str = "k") -> Any:
        rows = {row["key"]: row["state"] for row in self.store.rows_view(name).to_arrow().to_pylist()}
        return None if rows.get(key) is None else orjson.loads(rows[key])

    def counts(self, name: str = "seen") -> dict[str, int]:
        return dict(self.run.summary().totals.by_computation.get(name, {}))


def row(n: int, at: int, **fields: Any) -> dict[str, Any]:
    return {"k": "k", "t": at, "n": n, **fields}


def one(
    computation: Computation | None = None, *, time_sorted: bool = True, **options: Any
) -> Callable[[], Pipeline]:
    def make() -> Pipeline:
        pipeline = Pipeline("one")
        stream = pipeline.inject("s", key="k", at="t", watermark=ManualWatermark())
        stream.apply(computation or Seen(), name="seen", time_sorted=time_sorted, **options)
        return pipeline

    return make


words = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.datetimes(timezones=st.sampled_from([None, UTC]))
    | st.sampled_from([{"$": ["date", "2020-01-01"]}, {"$": 1}, {"types": {}}]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=3)
    ),
    max_leaves=8,
)


class TestEntry:
    """A record stored among the timers of its key."""

    @given(words, st.none() | st.binary(max_size=4), st.integers(0, 10**15))
    def test_waiting_record_survives_a_round_trip(self, value: Any, record_id: bytes | None, at: int) -> None:
        """The value keeps its types."""
        columns = RecordColumns(
            at=[at],
            streams=["s"],
            sources=[0],
            values=PythonValues([value]),
            ids=pa.array([record_id], pa.binary()),
            watermark=0,
        )
        entry = waiting_timer(columns, 0, superstep=3, lag_us=7)
        again = waiting_columns([entry])

        assert (entry.domain, entry.at, entry.output_at, entry.holds) == (
            TimeDomain.RECORD,
            at + 1,
            at - 7,
            True,
        )
        assert repr(again.value(0)) == repr(value) or _same(again.value(0), value)
        assert (again.at, again.streams, again.scoped_id(0)) == ([at], ["s"], record_id)

    @pytest.mark.parametrize("moment", [7, NOON])
    def test_waiting_row_that_looks_like_a_pane_stays_a_row(self, moment: Any) -> None:
        value = PlainObject({"value": 1, "window": [0, 1], "at": moment, "pane": {}})
        columns = RecordColumns(
            at=[5], streams=["s"], sources=[0], values=PythonValues([value]), ids=None, watermark=0
        )
        again = waiting_columns([waiting_timer(columns, 0, superstep=3, lag_us=0)]).value(0)

        assert (type(again), again) == (PlainObject, value)

    def test_unreadable_waiting_record_is_a_data_error(self) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            waiting_columns([Timer("{", TimeDomain.RECORD, 1, 0)])

    def test_weight_of_a_waiting_record_includes_its_tag(self) -> None:
        """A timer's tag is short, so its weight is a constant."""
        timers = (Timer("x" * 1_000, TimeDomain.RECORD, 1, 0), Timer("tag", TimeDomain.EVENT, 1, 0))

        assert waiting_weight(timers) - timers_weight(timers) == 1_000


def _same(one: Any, other: Any) -> bool:
    """Compare values; NaN equals NaN, and instants need equal times and offsets."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


class TestOrder:
    """The order in which the code gets records and timers."""

    def test_records_wait_for_the_watermark_and_follow_its_order(self) -> None:
        """At equal times the timer precedes the record."""
        pond = Pond(one())
        pond.inject(row(1, 30), row(2, 10, timer=15), to=20)
        pond.inject(row(3, 25), row(4, 20), to=25)
        assert pond.state() == [["record", 2, 10], ["record", 4, 20], ["timer", 10, 25]]

        pond.run.finish("s")
        pond.run.run_until_quiet()

        assert pond.state()[3:] == [["record", 3, 25], ["record", 1, 30]]
        assert pond.counts() == {"waited": 4, "resumed": 4}

    def test_hold_of_a_waiting_record_does_not_lower_oldest_at(self) -> None:
        """The start of a turn must be invisible to the code."""
        pond = Pond(one())
        pond.inject(row(1, 0), row(2, 10, timer=1), row(3, 10, timer=5), to=100)

        assert pond.state() == [["record", 1, 0], ["record", 2, 10], ["record", 3, 10], ["timer", 10, 15]]

    def test_late_record_is_processed_at_once_and_marked_late(self) -> None:
        pond = Pond(one())
        pond.inject(row(1, 10), row(2, 50), to=30)
        pond.inject(row(3, 20))

        assert pond.state() == [["record", 1, 10], ["late", 3, 20]]
        assert pond.counts() == {"waited": 2, "resumed": 1, "late": 1}

    def test_late_record_is_dropped_and_counted_with_on_late_drop(self) -> None:
        pond = Pond(one(on_late="drop"))
        pond.inject(row(1, 10), to=30)
        pond.inject(row(2, 20), row(3, 40), to=50)

        assert pond.state() == [["record", 1, 10], ["record", 3, 40]]
        assert pond.counts() == {"waited": 2, "resumed": 2, "late": 1, "dropped": 1}

    def test_waiting_record_holds_the_output_watermark(self) -> None:
        """Otherwise its productions would be late."""

        def make() -> Pipeline:
            pipeline = Pipeline("two")
            stream = pipeline.inject("s", key="k", at="t", watermark=ManualWatermark())
            seen = stream.apply(Seen(), name="seen", time_sorted=True)
            seen.apply(Kept(), name="kept")
            return pipeline

        pond = Pond(make)
        pond.inject(row(1, 40), to=40)
        assert (pond.run.watermark("seen"), pond.run.watermark("kept")) == (40, 40)
        pond.run.advance_watermark("s", 90)
        pond.run.step()
        pond.run.run_until_quiet()

        assert pond.state("kept") == [1, 0]
        assert pond.run.watermark("kept") == 90

    def test_wall_timer_fires_while_records_wait(self) -> None:
        """Wall timers are not part of the order of event times."""

        class Woken(Seen):
            def process_record(self, context: Context, record: Record) -> None:
                context.set_timer(context.wall_time + 1_000_000, domain="wall")
                super().process_record(context, record)

        pond = Pond(one(Woken()))
        pond.inject(row(1, 10), to=20)
        pond.inject(row(2, 30))
        pond.clock.advance_ms(2_000)
        pond.run.run_until_quiet()

        assert [kind for kind, *_ in pond.state()] == ["record", "timer"]

    def test_windowed_step_can_be_time_sorted(self) -> None:
        def make() -> Pipeline:
            pipeline = Pipeline("windows")
            stream = pipeline.inject("s", key="k", at="t", watermark=ManualWatermark())
            counts = stream.window(FixedWindows("10us")).combine(Count(), name="counts", time_sorted=True)
            counts.apply(Panes(), name="seen")
            return pipeline

        pond = Pond(make)
        pond.inject(row(1, 12), row(2, 3), row(3, 5), to=8)
        pond.inject(row(4, 9), row(5, 11), to=30)

        assert pond.state() == [3, 2]


class Panes(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


class TestSurroundings:
    """Failures, limits, restarts and changes of the program."""

    def test_record_that_cannot_be_stored_becomes_a_dead_letter(self) -> None:
        """A set has no stored form, so the record cannot wait."""
        pond = Pond(one())
        pond.inject(row(1, 10), row(2, 11, odd={1, 2}), row(3, 12), to=20)

        assert pond.state() == [["record", 1, 10], ["record", 3, 12]]
        assert pond.counts() == {"waited": 2, "resumed": 2, "dead_letters": 1}

    def test_failing_waiting_record_becomes_a_dead_letter(self) -> None:
        class Fails(Seen):
            def process_record(self, context: Context, record: Record) -> None:
                if record.value["n"] == 2:
                    raise ValueError(record.value)
                super().process_record(context, record)

        pond = Pond(one(Fails(), retries=0))
        pond.inject(row(1, 10), row(2, 11), row(3, 12), to=20)

        (letter,) = pond.store.rows_view("dead_letters").to_arrow().to_pylist()
        told = orjson.loads(letter["state"])
        assert pond.state() == [["record", 1, 10], ["record", 3, 12]]
        assert (told["stream"], orjson.loads(told["value"])["n"]) == ("s", 2)

    def test_waiting_records_above_waiting_max_end_the_run(self) -> None:
        class Few(Seen):
            waiting_max = 2

        pond = Pond(one(Few()))
        pond.inject(row(1, 10), row(2, 11))
        with pytest.raises(InvalidError, match="key=`k` waiting=`3` waiting_max=`2`"):
            pond.inject(row(3, 12))

    def test_waiting_records_survive_eviction_and_restart(self) -> None:
        pond = Pond(one(), cache_mib=0)
        pond.inject(row(1, 30), row(2, 10), to=5)
        pond.run.stop()
        pond.start(one())
        pond.inject(row(3, 20), to=40)

        assert pond.state() == [["record", 2, 10], ["record", 3, 20], ["record", 1, 30]]

    def test_equal_waiting_records_are_kept_apart(self) -> None:
        pond = Pond(one())
        pond.inject(row(1, 10), row(1, 10))
        pond.inject(row(1, 10), to=20)

        assert pond.state() == [["record", 1, 10]] * 3

    def test_waiting_records_are_processed_after_time_sorted_is_removed(self) -> None:
        """They still wait for the watermark."""
        pond = Pond(one())
        pond.inject(row(1, 10), row(1, 10), row(2, 30))
        pond.run.stop()
        pond.start(one(time_sorted=False))
        pond.inject(row(3, 40), to=20)

        assert pond.state() == [["record", 3, 40], ["record", 1, 10], ["record", 1, 10]]

    def test_run_without_finish_leaves_records_waiting_for_the_next(self) -> None:
        def make() -> Pipeline:
            pipeline = Pipeline("daily")
            stream = pipeline.inject("s", key="k", at="t", watermark=BoundedDisorder("10us"))
            stream.apply(Seen(), name="seen", time_sorted=True)
            return pipeline

        store = Store.in_memory(clock=ManualClock(), rng=SeededRng(1))
        today = [row(1, 30), row(2, 20), row(3, 5)]
        first = LocalRunner(store, progress=False).run(make(), {"s": today}, finish=False)
        again = LocalRunner(store, progress=False).run(make(), {"s": [*today, row(4, 25)]})

        (kept,) = store.rows_view("seen").to_arrow().to_pylist()
        assert first.totals.by_computation["seen"] == {"waited": 3, "resumed": 1}
        assert [number for _, number, _ in orjson.loads(kept["state"])] == [3, 2, 4, 1]
        assert again.run.late == 0

    def test_weak_productions_wait_in_a_row_of_the_same_commit(self) -> None:
        def make() -> Pipeline:
            pipeline = Pipeline("weak")
            stream = pipeline.inject("s", key="k", at="t", watermark=ManualWatermark())
            passed = stream.flat_map(lambda value: [value], name="passed", productions="weak")
            passed.apply(Seen(), name="seen", time_sorted=True)
            return pipeline

        pond = Pond(make)
        pond.inject(row(1, 30), row(2, 10), to=20)
        pond.inject(row(3, 25), to=40)

        assert pond.state() == [["record", 2, 10], ["record", 3, 25], ["record", 1, 30]]


class TestDeclaration:
    """Declarations that are refused before the run."""

    def test_time_sorted_in_a_cycle_is_refused(self) -> None:
        """A waiting record would hold the watermark that it waits for."""
        pipeline = Pipeline("cycle")
        stream = pipeline.inject("s", key="k", at="t")
        pipeline.add(
            Seen(),
            name="seen",
            subscribes={stream.name: None, "again": None},
            produces=["seen"],
            time_sorted=True,
        )
        pipeline.add(Kept(), name="kept", subscribes={"seen": None}, produces=["again"])

        with pytest.raises(InvalidError, match=r"in a cycle cannot be time_sorted.* computation=`seen`"):
            pipeline.check()

    def test_time_sorted_and_in_order_of_arrival_exclude_each_other(self) -> None:
        class Both(Seen):
            time_sorted = True
            in_order_of_arrival = True

        with pytest.raises(InvalidError, match="in_order_of_arrival and time_sorted cannot be combined"):
            one(Both())()

    def test_time_sorted_of_the_class_is_the_default(self) -> None:
        class Sorted(Seen):
            time_sorted = True

        pipeline = Pipeline("p")
        stream = pipeline.inject("s", key="k", at="t")
        stream.apply(Sorted(), name="a")
        stream.apply(Sorted(), name="b", time_sorted=False)
        stream.apply(Seen(), name="c")
        nodes = pipeline.check().computations

        assert [nodes[name].time_sorted for name in "abc"] == [True, False, False]

    @pytest.mark.parametrize("value", [None, 1, "yes"])
    def test_time_sorted_must_be_true_or_false(self, value: Any) -> None:
        with pytest.raises(InvalidError, match="time_sorted must be true or false"):
            one(time_sorted=value)()
