"""The end of a bounded input on both runners: timers that renew themselves, and cycles with windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson
import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

import millpond as mp
from millpond.executor.interval import key_executor
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from tests.fixtures.feedback import pages, pages_by_day

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECOND = 1_000_000
ROWS = [{"k": "x", "t": 0}, {"k": "y", "t": 10 * SECOND}]
Run = Callable[..., Store]


class Beat(mp.Computation):
    """Keeps the seconds at which its timer fired, which sets itself again."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.set_timer(record.at + SECOND)

    def process_timer(self, context: mp.Context, timer: mp.types.Timer) -> None:
        context.state.set([*context.state.get([]), timer.at // SECOND])
        context.set_timer(timer.at + SECOND)


class Steps(Beat):
    """Sets its timer again twice."""

    def process_timer(self, context: mp.Context, timer: mp.types.Timer) -> None:
        context.state.set([*context.state.get([]), timer.at // SECOND])
        if len(context.state.get()) < 3:
            context.set_timer(timer.at + 60 * SECOND)


class Forever(Beat):
    def process_timer(self, context: mp.Context, timer: mp.types.Timer) -> None:
        context.set_timer(timer.at + SECOND)


class Processor(StatefulProcessor):
    """The same beat as a processor of Spark."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.beats = handle.getValueState("beats", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        self.handle.registerTimer(min(row.t for row in rows) // 1_000 + 1_000)
        yield from ()

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Row]:
        self.beats.update(((self.beats.get()[0] if self.beats.exists() else 0) + 1,))
        self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 1_000)
        yield from ()

    def close(self) -> None:
        pass


def group_beat(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Set a timeout one second after the last one."""
    beats, at = state.getOption or (0, 0)
    if not state.hasTimedOut:
        at = min(int(frame.t.min()) for frame in frames) // 1_000
    state.update((beats + state.hasTimedOut, at + 1_000))
    state.setTimeoutTimestamp(at + 1_000)
    yield from ()


def pipeline_of(computation: mp.Computation, **options: Any) -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    stream = pipeline.inject("s", key=["k"], at="t", at_unit="us", watermark=mp.BoundedDisorder("3s"))
    stream.apply(computation, name="b", **options)
    stream.window(mp.FixedWindows("4s")).combine(mp.Count(), name="w").apply(Panes(), name="panes")
    return pipeline


class Panes(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.value["window"][0] // SECOND])


def states(store: Store, name: str) -> dict[str, Any]:
    rows = store.rows_view(name).to_arrow().to_pylist()
    return {mp.decode_key(row["key"])[0]: orjson.loads(row["state"]) for row in rows if row["state"]}


@contextmanager
def running(runner: Callable[[Store], Any], spark: SparkSession | None = None) -> Iterator[Run]:
    """Yield a function that runs a pipeline over bounded rows, each in a store of its own, and returns the store."""
    with ExitStack() as stack:

        def run(pipeline: mp.Pipeline, inputs: Mapping[str, Any]) -> Store:
            folder = stack.enter_context(TemporaryDirectory())
            store = stack.enter_context(Store.open(f"{folder}/pond"))
            if spark is not None:
                inputs = {name: spark.createDataFrame(rows) for name, rows in inputs.items()}
            runner(store).run(pipeline, inputs)
            return store

        yield run


class Facts:
    def test_renewing_timer_ends_after_the_last_event(self, run: Run) -> None:
        """It fires up to the last event of all keys, and once after it; windows end as always."""
        store = run(pipeline_of(Beat()), {"s": ROWS})

        assert states(store, "b") == {"x": [*range(1, 12)], "y": [11]}
        assert states(store, "panes") == {"x": [0], "y": [8]}
        assert store.rows_view("b").to_arrow().column("timers").to_pylist() == [[], []]

    @pytest.mark.parametrize(("drain", "fired"), [("last_event", 1), ("all", 3)])
    def test_chain_of_timers_ends_where_it_is_told(self, run: Run, drain: Any, fired: int) -> None:
        store = run(pipeline_of(Steps(), drain=drain), {"s": ROWS[1:]})

        assert len(states(store, "b")["y"]) == fired

    def test_renewing_timers_of_sparks_operators_end(self, run: Run) -> None:
        group = mp.spark.ApplyInPandasWithState(
            group_beat, "k string", "beats long, at long", GroupStateTimeout.EventTimeTimeout
        )
        processor = mp.spark.TransformWithState(Processor(), "k string", "EventTime")
        # Spark's timeouts come a moment after their time, so the tenth is after the last event.
        for computation, fired in ((processor, 11), (group, 10)):
            store = run(pipeline_of(computation), {"s": ROWS})

            beats = store.rows_view("b").to_arrow().column("beats").to_pylist()
            assert [beat["n"] if isinstance(beat, dict) else beat for beat in beats] == [fired, 1]

    def test_cycle_with_windows_runs_until_it_is_empty(self, run: Run) -> None:
        """Each day's pane makes a page of the next day, which is counted there."""
        store = run(partial(pages_by_day, feedback=True)(), {"pages": pages(1)})

        seen = [orjson.loads(row["state"]) for row in store.rows_view("seen").to_arrow().to_pylist()]
        assert seen == [[[0, 1], [1, 1], [2, 1]]]


class TestLocal(Facts):
    @pytest.fixture
    def run(self, tmp_path: Path, zookeeper_hosts: str) -> Iterator[Run]:
        with running(lambda store: mp.LocalRunner(store, progress=False)) as run:
            yield run

    def test_endless_timers_with_drain_all_are_refused(self, run: Run, monkeypatch: Any) -> None:
        monkeypatch.setattr(key_executor, "FIRINGS_MAX", 100)
        with pytest.raises(InvalidError, match="after the last event: leave out drain"):
            run(pipeline_of(Forever(), drain="all"), {"s": ROWS[:1]})

    def test_beat_over_a_long_silence_is_run(self, run: Run, monkeypatch: Any) -> None:
        """The bound is on firings without progress, and the silence ends a piece of the input."""
        monkeypatch.setattr(key_executor, "FIRINGS_MAX", 100)
        store = run(pipeline_of(Beat()), {"s": [{"k": "x", "t": at * SECOND} for at in (0, 5_000)]})

        assert states(store, "b") == {"x": [*range(1, 5_002)]}

    def test_last_event_survives_a_restart(self, tmp_path: Path) -> None:
        """The run that ends the input reads no record, and the watermark is seconds behind."""
        with Store.in_memory() as store:
            runner = mp.LocalRunner(store, progress=False)
            runner.run(pipeline_of(Beat()), {"s": ROWS}, finish=False)
            assert states(store, "b") == {"x": [*range(1, 8)]}
            runner.run(pipeline_of(Beat()), {"s": ROWS})

            assert states(store, "b") == {"x": [*range(1, 12)], "y": [11]}

    @pytest.mark.parametrize("recorded", [True, False])
    def test_replay_ends_likewise(self, tmp_path: Path, zookeeper_hosts: str, recorded: bool) -> None:
        cases = {"beat": (lambda: pipeline_of(Beat()), {"s": ROWS}, "b")}
        cases["cycle"] = (partial(pages_by_day, feedback=True), {"pages": pages(1)}, "seen")
        for name, (make, rows, computation) in cases.items():
            with Store.open(tmp_path / name, zookeeper_hosts) as store:
                mp.LocalRunner(store, progress=False).run(make(), rows)
                copy = tmp_path / f"{name}_{recorded}"
                mp.replay(store, copy, make(), rows, version=0, recorded=recorded, zookeeper=zookeeper_hosts)
                with Store.open(copy, read_only=True) as other:
                    kept, again = (one.rows_view(computation).to_arrow() for one in (store, other))
                assert kept["state"].to_pylist() == again["state"].to_pylist()

    def test_endless_cycle_is_refused(self, run: Run, monkeypatch: Any) -> None:
        monkeypatch.setattr("millpond.executor.run.run._STEPS_MAX", 20)
        monkeypatch.setattr("tests.fixtures.feedback.DAYS_MAX", 1_000)
        with pytest.raises(InvalidError, match="long after the last event"):
            run(pages_by_day(feedback=True), {"pages": pages(1)})


class TestSpark(Facts):
    @pytest.fixture
    def run(self, spark: SparkSession) -> Iterator[Run]:
        def on_spark(store: Store) -> Any:
            return mp.SparkRunner(store, spark=spark, progress=False, intervals=1)

        with running(on_spark, spark) as run:
            yield run
