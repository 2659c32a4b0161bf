"""Time has the same semantics on both runners: policies, silence, members, late records, restarts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.letter_retries import retry_dead_letters
from millpond.executor.time.watermark_policies import (
    BoundedDisorder,
    MarkColumn,
    Monotone,
    ObservedPercentile,
    UserWatermark,
)
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline as WindowedPipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.types import TIME_MIN_US
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_US = 1_800_000_000_000_000
MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
Open = Callable[[Callable[[], EnginePipeline]], Any]


class Times(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.at])


class BothTimes(Computation):
    """The times of the records, and those in their values, after the start."""

    def process_record(self, context: Context, record: Record) -> None:
        times = [record.at - START_US, record.value["t"] - START_US]
        context.state.set([*context.state.get([]), times])


def rows(*at: int, host: str = "a", key: str = "k") -> list[dict[str, Any]]:
    return [{"k": key, "t": START_US + seconds, "host": host, "id": f"{host}{seconds}"} for seconds in at]


def one_stream(**options: Any) -> Callable[[], EnginePipeline]:
    late = options.pop("on_late", "process")

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("time")
        pipeline.inject("s", key="k", at="t", id="id", **options).apply(Times(), name="c", on_late=late)
        return pipeline

    return make


def two_streams() -> EnginePipeline:
    pipeline = EnginePipeline("time")
    for name in ("s", "other"):
        pipeline.inject(name, key="k", at="t", watermark=Monotone(), idle_after="1s")
    pipeline.add(Times(), name="c", subscribes={"s": None, "other": None})
    return pipeline


class Alarms(Computation):
    """Fires ten seconds after the last record."""

    def process_record(self, context: Context, record: Record) -> None:
        context.set_timer(record.at + 10_000_000, tag="silent")

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), timer.at])


class Panes(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["window"][0] - START_US])


def silent_streams() -> EnginePipeline:
    pipeline = WindowedPipeline("time")
    for name in ("s", "other"):
        pipeline.inject(name, key="k", at="t", at_unit="us", watermark=Monotone(), idle_after="1s")
    pipeline.add(Alarms(), name="alarms", subscribes={"s": None, "other": None})
    pipeline.stream("s").window(FixedWindows("5s")).combine(Count(), name="counts").apply(
        Panes(), name="panes"
    )
    return pipeline


class Keeper(Computation):
    """Holds the watermark at its first record until a row releases it; forwards every record."""

    def process_record(self, context: Context, record: Record) -> None:
        if record.value["host"] == "release":
            context.produce("kept", {"held": context.state.held_at}, at=context.state.held_at)
            context.state.release()
        elif context.state.held_at is None:
            context.state.hold(record.at)
        context.state.set(record.at)


class Tiers(Computation):
    """Waits for its records' times at two percentiles and at the low watermark."""

    percentiles = (80, 99)

    def process_record(self, context: Context, record: Record) -> None:
        if record.value["host"] == "wait":
            for percentile in (80, 99, 100):
                context.set_timer(record.at, tag=f"{percentile}", percentile=percentile)

    def process_timer(self, context: Context, timer: Timer) -> None:
        seen = [int(timer.percentile), context.watermark_at(timer.percentile) >= timer.at]
        context.state.set([*context.state.get([]), seen])


class Patience(Computation):
    """Forwards records, and produces the key an hour of wall time later.

    Args:
        holds: the argument for its timers.
    """

    def __init__(self, holds: bool | None) -> None:
        self.holds = holds

    def process_record(self, context: Context, record: Record) -> None:
        context.produce("seen", record.value, at=record.at)
        context.set_timer(context.wall_time + HOUR_US, domain="wall", holds=self.holds)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce("seen", {"host": "timer"}, at=timer.output_at)


def patient(holds: bool | None) -> Callable[[], EnginePipeline]:
    """Return a computation with wall timers, and a consumer that drops late records."""

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("time")
        stream = pipeline.inject("s", key="k", at="t", watermark=Monotone())
        seen = stream.apply(Patience(holds), name="patient", produces="seen")
        seen.apply(Times(), name="c", on_late="drop")
        return pipeline

    return make


def tiers() -> EnginePipeline:
    """A stream with an hour of disorder, and a computation that uses lower percentiles."""
    pipeline = EnginePipeline("time")
    pipeline.inject("s", key="k", at="t", watermark=BoundedDisorder("1h")).apply(Tiers(), name="c")
    return pipeline


def keepers() -> EnginePipeline:
    """A keeper, and a computation that keeps the times of the forwarded records."""
    pipeline = EnginePipeline("time")
    stream = pipeline.inject("s", key="k", at="t", watermark=Monotone())
    stream.apply(Keeper(), name="keeper", produces="kept").apply(Times(), name="c")
    return pipeline


class Facts:
    """One test per fact; subclasses provide the runner."""

    def test_observed_percentile_survives_restarts(self, play: Open) -> None:
        """A restart neither loses nor lowers it."""
        run = play(one_stream(watermark=ObservedPercentile(100, records_min=3)))
        run.inject("s", rows(1_000))
        assert run.watermark("c") == TIME_MIN_US
        run.inject("s", rows(1_100, 950, 1_010))
        assert run.watermark("c") == START_US + 1_100 - 50

        run.restart()
        assert run.watermark("c") == START_US + 1_050
        run.inject("s", rows(1_060))

        assert run.watermark("c") == START_US + 1_050

    def test_users_policy_gets_oldest_and_newest_times(self, play: Open) -> None:
        run = play(one_stream(watermark=UserWatermark(lambda seen: seen.oldest_at)))

        run.inject("s", rows(30, 10, 20))

        assert run.watermark("c") == START_US + 10

    def test_sources_greatest_mark_moves_the_watermark(self, play: Open) -> None:
        """Times of records, and rows without a mark, have no effect."""
        run = play(one_stream(watermark=MarkColumn("created")))
        batch = [{**row, "created": START_US + mark} for row, mark in zip(rows(30, 10), (5, 8), strict=True)]

        run.inject("s", batch)
        assert run.watermark("c") == START_US + 8
        run.inject("s", [{**rows(500)[0], "created": START_US + 2}])

        assert run.watermark("c") == START_US + 8

    @pytest.mark.parametrize(
        ("on_ahead", "at"),
        [("dead_letter", "t"), ("clamp", "t"), ("clamp", lambda row: row["t"]), ("hold", "t")],
    )
    def test_times_ahead_of_their_arrival_move_no_watermark(self, play: Open, on_ahead: str, at: Any) -> None:
        """Neither beyond the limit of 10; the value keeps its own time, and a dead letter can be retried."""

        def make() -> EnginePipeline:
            pipeline = EnginePipeline("time")
            limit: dict[str, Any] = {"ahead_max": "10us", "on_ahead": on_ahead}
            stream = pipeline.inject("s", key="k", at=at, watermark=BoundedDisorder("5us"), **limit)
            stream.apply(BothTimes(), name="c", on_late="drop")
            return pipeline

        run = play(make)
        run.inject("s", rows(0, 500, 10))
        assert run.watermark("c") == START_US + 5
        run.inject("s", rows(6))
        letters = [json.loads(letter) for letter in run.states("dead_letters").values()]
        seen = [[0, 0], [10, 10], [6, 6]]
        if on_ahead == "clamp":
            seen.insert(1, [10, 500])
        elif on_ahead == "hold":
            seen.insert(2, [500, 500])
        else:
            assert [letter["error"].partition(":")[0] for letter in letters] == [
                "the time lies more than 10us ahead of the record's arrival"
            ]
            retry_dead_letters(run.store)
            run.clock.advance_ms(2_000)
            run.settle()
            seen.append([500, 500])
        run.clock.advance_ms(1_000)
        run.inject("s", rows(1_000))

        assert json.loads(run.states("c")["k"]) == [*seen, [1_000, 1_000]]
        assert (run.run.summary().run.dropped, len(letters)) == (0, int(on_ahead == "dead_letter"))

    def test_times_in_1970_are_counted_by_stream(self, play: Open) -> None:
        """Such as that of a clock that was never set; two consumers count a record once."""

        def make() -> EnginePipeline:
            pipeline = EnginePipeline("time")
            stream = pipeline.inject("s", key="k", at="t")
            stream.apply(Times(), name="c")
            stream.apply(Times(), name="d")
            return pipeline

        run = play(make)
        run.inject("s", rows(0, 7 - START_US))
        summary = run.run.summary()

        assert summary.times_in_1970 == {"s": 1}
        assert summary.problems[0].startswith("1 of s have times in 1970")

    def test_marks_ahead_of_their_arrival_are_clamped(self, play: Open) -> None:
        run = play(one_stream(watermark=MarkColumn("created"), ahead_max="10us"))

        run.inject("s", [{**row, "created": START_US + 500} for row in rows(0)])

        assert run.watermark("c") == START_US + 10

    def test_total_silence_lets_event_time_pass_with_the_clock(self, play: Open) -> None:
        """The stream that was heard last leads; alarms and last windows come, and nothing is committed before."""
        run = play(silent_streams)
        run.inject("s", rows(0))
        run.inject("other", rows(1_000_000))
        version = run.store.committer.refresh().version
        run.clock.advance_ms(999)
        run.settle()
        assert (run.states("alarms"), run.watermark("alarms")) == ({"k": None}, START_US)
        run.clock.advance_ms(1_000)
        run.settle()
        assert (run.states("alarms"), run.store.committer.refresh().version) == ({"k": None}, version)

        run.clock.advance_ms(9_001)
        run.settle()

        assert run.states("alarms") == {"k": f"[{START_US + 11_000_000}]"}
        assert run.states("panes") == {"k": "[0]"}
        assert run.watermark("alarms") == START_US + 11_000_000
        run.restart()
        assert run.watermark("alarms") == START_US + 11_000_000
        run.clock.advance_ms(2_000)
        run.settle()
        assert run.watermark("alarms") == START_US + 11_000_000
        run.inject("s", rows(12_000_000))
        assert run.watermark("alarms") == START_US + 13_000_000
        assert run.run.summary().totals.late == 2

    def test_late_records_are_dropped_if_declared(self, play: Open) -> None:
        """Each counts once however often it is redelivered; a record at the watermark is not late."""
        run = play(one_stream(watermark=BoundedDisorder(0), on_late="drop"))
        run.inject("s", rows(100))

        run.inject("s", rows(99, 100 + 1, 98))
        run.inject("s", [*rows(99, 101), {**rows(101)[0], "id": "again"}])
        counts = run.run.summary().run

        assert (counts.late, counts.dropped, counts.duplicates, counts.records) == (2, 2, 2, 5)
        assert run.states("c") == {"k": f"[{START_US + 100},{START_US + 101},{START_US + 101}]"}

    def test_late_records_are_processed_by_default(self, play: Open) -> None:
        run = play(one_stream(watermark=BoundedDisorder(0)))
        run.inject("s", rows(100))

        run.inject("s", rows(99))
        counts = run.run.summary().run

        assert (counts.late, counts.dropped) == (1, 0)
        assert run.states("c") == {"k": f"[{START_US + 100},{START_US + 99}]"}

    def test_late_policy_is_chosen_per_stream(self, play: Open) -> None:
        def make() -> EnginePipeline:
            pipeline = EnginePipeline("time")
            for name in ("s", "other"):
                pipeline.inject(name, key="k", at="t", watermark=Monotone())
            on_late: dict[str, Any] = {"s": "drop"}
            pipeline.add(Times(), name="c", subscribes={"s": None, "other": None}, on_late=on_late)
            return pipeline

        run = play(make)
        run.inject("s", rows(100))
        run.inject("other", rows(100))
        run.inject("s", rows(98))
        run.inject("other", rows(99))
        run.restart()
        run.inject("s", rows(97))
        totals = run.run.summary().totals

        assert totals.by_computation == {"c": {"late": 3, "dropped": 2}}
        assert (totals.late, totals.dropped) == (3, 2)
        assert run.states("c") == {"k": f"[{START_US + 100},{START_US + 100},{START_US + 99}]"}

    def test_records_too_late_for_a_window_are_counted(self, play: Open) -> None:
        """The count survives restarts, and is not part of the key's state."""

        def make() -> WindowedPipeline:
            pipeline = WindowedPipeline("time")
            stream = pipeline.inject("s", key="k", at="t", watermark=Monotone())
            stream.window(FixedWindows("10us")).combine(Count(), name="counts")
            return pipeline

        run = play(make)
        run.inject("s", rows(5, 30))
        run.inject("s", [*rows(6), *rows(7, key="other"), *rows(31)])
        run.restart()
        run.inject("s", rows(8, 60))
        totals = run.run.summary().totals

        assert totals.by_computation["counts"]["dropped"] == 3
        assert totals.dropped == 3
        assert "other" not in run.states("counts")

    def test_missing_member_holds_the_watermark(self, play: Open) -> None:
        run = play(one_stream(watermark=Monotone(), members=("a", "b", "c"), member="host"))
        run.inject("s", [*rows(100), *rows(40, host="b")])
        assert run.watermark("c") == TIME_MIN_US

        run.declare("s", "gone", "c")
        assert run.watermark("c") == START_US + 40
        run.declare("s", "expected", "c")
        run.inject("s", [*rows(200), *rows(300, host="b"), *rows(1, host="stranger")])
        assert run.watermark("c") == START_US + 40
        run.advance("s", START_US + 250, "c")

        assert run.watermark("c") == START_US + 200

    def test_declared_members_survive_restarts(self, play: Open) -> None:
        """A gone member stays gone, an idle one ends with its next record, a silent one holds again."""
        run = play(one_stream(watermark=Monotone(), members=("a", "b", "c"), member="host"))
        run.inject("s", [*rows(100), *rows(40, host="b")])
        run.declare("s", "gone", "c")
        run.declare("s", "idle", "b")
        run.restart()
        run.restart()
        run.inject("s", rows(200))
        assert run.watermark("c") == START_US + 200

        run.inject("s", rows(210, host="b"))
        run.restart()
        run.inject("s", rows(300))
        assert run.watermark("c") == START_US + 200

        run.declare("s", "expected", "c")
        run.inject("s", rows(320, host="b"))
        run.restart()
        run.inject("s", rows(400))
        assert run.watermark("c") == START_US + 200

    def test_idle_stream_stops_holding(self, play: Open) -> None:
        """Its own next record is late."""
        run = play(two_streams)
        run.inject("other", rows(10))
        run.inject("s", rows(100))
        assert run.watermark("c") == START_US + 10

        run.clock.advance_ms(900)
        run.inject("s", rows(200))
        assert run.watermark("c") == START_US + 10
        run.clock.advance_ms(100)
        run.settle()
        assert run.watermark("c") == START_US + 200

        run.restart()
        assert run.watermark("c") == START_US + 200
        run.inject("other", rows(20))

        assert run.run.summary().run.late == 1
        assert run.watermark("c") == START_US + 200

    @pytest.mark.parametrize(("holds", "reached"), [(None, 64), (False, 64), (True, 4)])
    def test_wall_timer_holds_the_watermark_only_if_declared(
        self, play: Open, holds: bool | None, reached: int
    ) -> None:
        """A timer an hour ahead leaves downstream at minute 64, or 4 if it holds."""
        run = play(patient(holds))
        run.inject("s", rows(4 * MINUTE_US, key="once"))
        run.inject("s", rows(64 * MINUTE_US))
        run.settle()
        run.restart()
        assert run.watermark("c") == START_US + reached * MINUTE_US

        run.inject("s", rows(65 * MINUTE_US))
        run.clock.advance_ms(HOUR_US / 1_000)
        run.settle()

        assert run.run.summary().totals.dropped == 0
        produced_at = 4 if holds else 65
        assert run.states("c")["once"] == str(
            [START_US + minute * MINUTE_US for minute in (4, produced_at)]
        ).replace(" ", "")

    def test_state_holds_downstream_watermarks(self, play: Open) -> None:
        """The hold survives restarts, and records produced at it are not late."""
        run = play(keepers)
        run.inject("s", rows(100))
        run.inject("s", rows(500))
        run.restart()
        run.inject("s", rows(900))
        assert run.watermark("keeper") == START_US + 900
        assert run.watermark("c") == START_US + 100

        run.inject("s", rows(950, host="release"))
        run.settle()

        assert run.states("c") == {"k": f"[{START_US + 100}]"}
        assert run.watermark("c") == START_US + 950
        assert run.run.summary().totals.late == 0

    def test_timers_may_wait_for_a_percentile(self, play: Open) -> None:
        """The low watermark fires last."""
        second = 1_000_000
        run = play(tiers)
        run.inject("s", rows(0))
        batch = [*rows(*range(90)), *[rows(number - 60 * second)[0] for number in range(10)]]
        run.inject("s", [*batch, *rows(1 * second, host="wait")])
        run.settle()
        assert run.states("c") == {"k": "[[80,true]]"}

        run.restart()
        run.inject("s", rows(2 * second))
        run.settle()
        assert run.states("c") == {"k": "[[80,true]]"}
        run.inject("s", [*rows(*[100 * second] * 100), *rows(*[40 * second] * 3)])
        run.inject("s", [*rows(*[100 * second] * 100), *rows(*[40 * second] * 3)])
        run.settle()
        assert run.states("c") == {"k": "[[80,true],[99,true]]"}
        run.advance("s", START_US + second)

        assert run.states("c") == {"k": "[[80,true],[99,true],[100,true]]"}


class TestLocalRunner(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US)) as start:
            yield start


class TestSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, lambda: ManualClock(START_US), spark) as start:
            yield start
