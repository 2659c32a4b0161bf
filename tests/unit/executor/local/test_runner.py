"""The local runner."""

from __future__ import annotations

import threading
from collections import Counter

import orjson
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.time.watermark_policies import (
    BoundedDisorder,
    IngressTime,
    ManualWatermark,
    ObservedPercentile,
)
from millpond.executor.windows.combiners import Count
from millpond.executor.windows.pipeline import Pipeline as WindowedPipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.errors import FencedError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Collect(Computation):
    def __init__(self, output: str | None = None) -> None:
        self.output = output

    def process_record(self, context, record):
        context.state.set([*(context.state.get() or []), record.value["n"]])
        if self.output is not None:
            context.produce(self.output, record.value)


class CountDown(Computation):
    """A countdown by productions to itself."""

    def process_record(self, context, record):
        context.state.set([*(context.state.get() or []), record.value["n"]])
        if record.value["n"] > 0:
            context.produce("again", {"n": record.value["n"] - 1})


class Alarm(Computation):
    """A list of the timers that fired, each ten microseconds after its record."""

    def __init__(self, domain: str) -> None:
        self.domain = domain

    def process_record(self, context, record):
        at = record.at if self.domain == "event" else context.wall_time
        context.set_timer(at + 10, tag=str(record.value["n"]), domain=self.domain)

    def process_timer(self, context, timer):
        context.state.set([*(context.state.get() or []), int(timer.tag)])
        context.produce("alarm", {"n": int(timer.tag)})


class Late(Computation):
    def process_record(self, context, record):
        context.state.set([*(context.state.get() or []), record.late])


class Picky(Computation):
    def process_record(self, context, record):
        context.state.set([*(context.state.get() or []), record.value["n"]])
        if record.value["n"] == 13:
            raise ValueError("thirteen")


RUNG = threading.Event()


class Ring(Computation):
    def process_record(self, context, record):
        RUNG.set()


class Pond:
    """A store in memory whose runs move only when stepped."""

    def __init__(self, objects=None, **options: object) -> None:
        self.clock = ManualClock()
        self.disk = MemoryObjects() if objects is None else objects
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)
        self.options = options

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def runner(self) -> LocalRunner:
        return LocalRunner(self.store(), clock=self.clock, rng=self.rng, progress=False, **self.options)

    def start(self, pipeline: EnginePipeline) -> LocalRun:
        return self.runner().start(pipeline, stepping=True)

    def states(self, computation: str) -> dict[str, object]:
        rows = self.store().rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: orjson.loads(row["state"]) for row in rows if row["state"]}

    def letters(self) -> list[dict[str, object]]:
        return list(self.states(DEAD_LETTERS).values())


def rows(*numbers: int, **fields: object) -> list[dict[str, object]]:
    return [{"k": "a", "at": number, "n": number, **fields} for number in numbers]


def injected(**options: object) -> tuple[EnginePipeline, object]:
    pipeline = EnginePipeline("p")
    return pipeline, pipeline.inject("in", key="k", at="at", **options)


def a_chain(**options: object) -> EnginePipeline:
    """Chain ``first`` and ``second`` after the stream ``in``."""
    pipeline, stream = injected(**options)
    stream.apply(Collect("mid"), name="first", produces="mid").apply(Collect(), name="second")
    return pipeline


class TestTopologies:
    def test_consumers_of_one_stream_extract_their_own_keys(self):
        pond = Pond()
        pipeline, stream = injected()
        mid = stream.apply(Collect("mid"), name="by_own_key", produces="mid")
        stream.apply(Collect(), name="by_city", key="city")
        mid.apply(Collect(), name="by_parity", key=lambda value: "odd" if value["n"] % 2 else "even")
        mid.apply(Collect(), name="by_city_again", key="city")
        run = pond.start(pipeline)

        run.inject("in", [*rows(1, 2, city="Oslo"), *rows(3, city="Bergen")])
        run.run_until_quiet()

        assert pond.states("by_own_key") == {"a": [1, 2, 3]}
        assert pond.states("by_city") == pond.states("by_city_again") == {"Oslo": [1, 2], "Bergen": [3]}
        assert pond.states("by_parity") == {"odd": [1, 3], "even": [2]}

    def test_computation_gets_produced_and_injected_streams(self):
        pond = Pond()
        pipeline, stream = injected()
        other = pipeline.inject("other", key="k", at="at")
        for name, source in (("left", stream), ("right", other)):
            source.apply(Collect("merged"), name=name, produces="merged")
        pipeline.add(Collect(), name="all", subscribes={"merged": None, "other": None})
        run = pond.start(pipeline)

        run.inject("in", rows(1))
        run.inject("other", rows(2))
        run.run_until_quiet()

        assert sorted(pond.states("all")["a"]) == [1, 2, 2]

    def test_cycle_takes_one_superstep_a_turn_until_quiet(self):
        pond = Pond()
        pipeline, _ = injected()
        pipeline.add(CountDown(), name="loop", subscribes={"in": None, "again": None}, produces=["again"])
        run = pond.start(pipeline)

        run.inject("in", rows(4))

        assert run.run_until_quiet()
        assert pond.states("loop") == {"a": [4, 3, 2, 1, 0]}
        assert run.summary().supersteps == 5

    def test_run_until_quiet_gives_up_after_supersteps_max(self):
        pipeline, _ = injected()
        pipeline.add(CountDown(), name="loop", subscribes={"in": None, "again": None}, produces=["again"])
        run = Pond().start(pipeline)
        run.inject("in", rows(1_000_000))

        assert not run.run_until_quiet(supersteps_max=10)

    def test_keys_of_several_intervals_are_processed_once(self):
        pond = Pond(intervals=3)
        run = pond.start(a_chain())

        run.inject("in", [{"k": f"key-{n % 10}", "at": n, "n": n} for n in range(100)])
        run.run_until_quiet()

        assert pond.states("first") == {f"key-{n}": list(range(n, 100, 10)) for n in range(10)}
        assert pond.states("second") == pond.states("first")
        known = map(Interval.from_app_id, pond.store().snapshot().txns)
        assert len([one for one in known if one is not None and one.computation == "first"]) == 3


class TestSupersteps:
    def test_injections_between_commits_make_one_bundle(self):
        run = Pond().start(a_chain())
        for number in range(50):
            run.inject("in", rows(number))

        report = run.step()

        assert (report.records, report.productions) == (50, 50)
        assert run.step().records == 50
        assert run.step() is None

    def test_injected_record_waits_for_a_step(self):
        run = Pond().start(a_chain())

        receipt = run.inject("in", rows(1))

        assert not receipt.wait(timeout="0s")
        run.step()
        assert receipt.is_durable

    def test_strong_productions_are_delivered_after_their_commit(self):
        pond = Pond()
        run = pond.start(a_chain())
        run.inject("in", rows(1))

        run.step()

        assert pond.states("first") == {"a": [1]}
        assert pond.states("second") == {}

    def test_large_injection_is_split_over_supersteps(self, monkeypatch):
        """One receipt covers all pieces."""
        for module in ("run", "worker"):
            monkeypatch.setattr(f"millpond.executor.local.{module}.BUNDLE_RECORDS_MAX", 200)
        pond = Pond()
        run = pond.start(a_chain())
        table = pa.table({"k": [f"{n % 100}" for n in range(300)], "at": range(300), "n": [1] * 300})

        receipt = run.inject("in", table)
        run.step()
        assert not receipt.is_durable
        run.run_until_quiet()

        assert receipt.is_durable
        assert [len(seen) for seen in pond.states("second").values()] == [3] * 100


class TestTime:
    def test_event_timers_fire_in_order_once_the_watermark_passes(self):
        """The watermark lags by the bound on disorder."""
        pond = Pond()
        pipeline, stream = injected(watermark=BoundedDisorder("20us"))
        stream.apply(Alarm("event"), name="alarm").apply(Collect(), name="after")
        run = pond.start(pipeline)

        run.inject("in", rows(30, 20, 25))
        run.run_until_quiet()
        assert pond.states("alarm") == {}
        run.inject("in", rows(56))
        run.run_until_quiet()

        assert run.watermark("alarm") == 36
        assert pond.states("alarm") == {"a": [20, 25]}
        assert pond.states("after") == {"a": [20, 25]}

    def test_advanced_watermark_fires_timers_and_makes_records_late(self):
        pond = Pond()
        pipeline, stream = injected(watermark=ManualWatermark())
        stream.apply(Alarm("event"), name="alarm")
        stream.apply(Late(), name="late")
        run = pond.start(pipeline)

        run.inject("in", rows(30))
        run.advance_watermark("in", 40)
        run.inject("in", rows(35, 45))
        run.run_until_quiet()

        assert pond.states("late") == {"a": [False, True, False]}
        assert pond.states("alarm") == {"a": [30]}

    def test_finished_input_fires_every_event_timer(self):
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Alarm("event"), name="alarm")
        run = pond.start(pipeline)
        run.inject("in", rows(10**9))

        run.finish("in")
        run.run_until_quiet()

        assert pond.states("alarm") == {"a": [10**9]}
        assert run.summary().watermark == TIME_MAX_US

    def test_wall_timers_fire_on_an_idle_stream(self):
        """The clock alone makes them due."""
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Alarm("wall"), name="alarm")
        run = pond.start(pipeline)
        run.inject("in", rows(1))
        run.run_until_quiet()
        assert run.step() is None

        pond.clock.advance_ms(1)

        assert run.step().timers == 1
        assert pond.states("alarm") == {"a": [1]}

    def test_slowest_input_holds_the_watermark(self):
        pipeline, _ = injected()
        pipeline.inject("other", key="k", at="at")
        pipeline.add(Collect(), name="join", subscribes={"in": None, "other": None})
        run = Pond().start(pipeline)

        run.inject("in", rows(100))
        run.run_until_quiet()
        assert run.watermark("join") == TIME_MIN_US
        run.inject("other", rows(70))
        run.run_until_quiet()

        assert run.watermark("join") == 70


class TestRestart:
    def test_undelivered_productions_are_delivered_once_after_a_restart(self):
        pond = Pond()
        run = pond.start(a_chain())
        run.inject("in", rows(1, 2))
        run.step()
        run.stop()

        again = pond.start(a_chain())
        again.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2]}
        assert again.summary().totals.records == 4

    def test_run_of_a_vanished_process_is_taken_over(self):
        """Such a process leaves only its commits."""
        pond = Pond()
        pond.start(a_chain()).inject("in", rows(9))
        run = pond.start(a_chain())
        run.inject("in", rows(1))
        run.step()

        again = pond.start(a_chain())
        again.run_until_quiet()

        assert pond.states("second") == {"a": [1]}

    @pytest.mark.parametrize("domain", ["event", "wall"])
    def test_pending_timer_fires_once_after_a_restart(self, domain):
        pond = Pond()
        pipeline, stream = injected(watermark=ManualWatermark())
        stream.apply(Alarm(domain), name="alarm")
        run = pond.start(pipeline)
        run.inject("in", rows(5))
        run.run_until_quiet()
        run.stop()
        pond.clock.advance_ms(1)

        again = pond.start(pipeline)
        again.advance_watermark("in", 50)
        again.run_until_quiet()

        assert pond.states("alarm") == {"a": [5]}
        assert again.summary().totals.timers == 1

    def test_watermark_does_not_fall_after_a_restart(self):
        """A manual watermark is durable once its receipt is."""
        pond = Pond()
        run = pond.start(a_chain(watermark=ManualWatermark()))
        run.inject("in", rows(1))
        receipt = run.advance_watermark("in", 50)
        run.run_until_quiet()
        assert receipt.is_durable
        run.stop()

        assert pond.start(a_chain(watermark=ManualWatermark())).watermark("second") == 50

    def test_restart_after_every_superstep_changes_no_result(self):
        pond = Pond()
        pipeline, _ = injected(id="n")
        pipeline.add(CountDown(), name="loop", subscribes={"in": None, "again": None}, produces=["again"])
        run = pond.start(pipeline)
        run.inject("in", rows(5))
        for _ in range(8):
            run.step()
            run.stop()
            run = pond.start(pipeline)
            run.inject("in", rows(5))

        run.run_until_quiet()

        assert pond.states("loop") == {"a": [5, 4, 3, 2, 1, 0]}


class TestDeadLetters:
    def test_raising_record_becomes_a_dead_letter_and_others_count(self):
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Picky(), name="picky", retries=1)
        run = pond.start(pipeline)

        run.inject("in", rows(12, 13, 14))
        run.run_until_quiet()

        assert pond.states("picky") == {"a": [12, 14]}
        [letter] = pond.letters()
        assert (letter["computation"], letter["stream"], letter["key"]) == ("picky", "in", "a")
        assert "thirteen" in letter["error"]

    def test_unreadable_rows_become_dead_letters_with_reasons(self):
        pond = Pond()
        run = pond.start(a_chain())

        run.inject("in", [{"k": None, "at": 1, "n": 1}, {"k": "a", "at": "soon", "n": 2}, "what", *rows(4)])
        run.run_until_quiet()

        assert pond.states("second") == {"a": [4]}
        reasons = sorted(letter["error"] for letter in pond.letters())
        assert len(reasons) == 3
        assert any("null" in reason for reason in reasons)
        assert any("ISO" in reason for reason in reasons)
        assert run.summary().totals.injected == 1

    def test_productions_without_a_key_become_dead_letters(self):
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Collect("mid"), name="first", produces="mid").apply(Collect(), name="second", key="city")
        run = pond.start(pipeline)

        run.inject("in", [*rows(1), *rows(2, city="Oslo")])
        run.run_until_quiet()

        assert pond.states("second") == {"Oslo": [2]}
        assert [letter["computation"] for letter in pond.letters()] == ["second"]

    def test_dead_letters_can_be_subscribed_to(self):
        class Mourner(Computation):
            def process_record(self, context, record):
                context.state.set(record.value["error"])

        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Picky(), name="picky", retries=0)
        pipeline.stream(DEAD_LETTERS).apply(Mourner(), name="mourner", key="key")
        run = pond.start(pipeline)

        run.inject("in", rows(13))
        run.run_until_quiet()

        assert "thirteen" in pond.states("mourner")["a"]

    def test_on_error_stop_ends_the_run_and_reverts_the_bundle(self):
        """Each caller that steps, injects or waits gets the error."""
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Picky(), name="picky", on_error="stop", retries=0)
        run = pond.start(pipeline)
        receipt = run.inject("in", rows(12, 13))

        for call in (run.step, receipt.wait, lambda: run.inject("in", rows(1)), run.run_until_quiet):
            with pytest.raises(InvalidError, match="picky"):
                call()

        assert not run.is_active
        assert pond.states("picky") == {}


class TestDuplicates:
    def test_duplicate_counts_once_in_and_across_bundles_and_restarts(self):
        pond = Pond()
        run = pond.start(a_chain(id="n"))
        run.inject("in", rows(1, 1, 2))
        run.run_until_quiet()
        run.inject("in", rows(2, 3))
        run.run_until_quiet()
        run.stop()

        again = pond.start(a_chain(id="n"))
        again.inject("in", rows(3, 1, 4))
        again.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2, 3, 4]}
        assert again.summary().totals.duplicates == 4

    def test_duplicates_count_without_exactly_once(self):
        pond = Pond()
        pipeline, stream = injected(id="n")
        stream.apply(Collect(), name="all", exactly_once=False)
        run = pond.start(pipeline)

        run.inject("in", rows(1, 1))
        run.run_until_quiet()

        assert pond.states("all") == {"a": [1, 1]}


class TestSinks:
    def test_sink_gets_each_production_once_across_restarts(self, tmp_path):
        """Some stops come right after a commit."""
        pond = Pond()

        def pipeline() -> EnginePipeline:
            made = a_chain(id="n")
            made.stream("mid").sink("out", DeltaSink(str(tmp_path / "out")))
            return made

        run = pond.start(pipeline())
        for number in range(6):
            run.inject("in", rows(number))
            run.step()
            if number % 2:
                run.stop()
                run = pond.start(pipeline())
                run.inject("in", rows(number))
        run.run_until_quiet()
        run.stop()

        values = DeltaTable(tmp_path / "out").to_pyarrow_table().column("at").cast(pa.int64()).to_pylist()
        assert sorted(values) == list(range(6))

    def test_table_of_a_sink_keeps_few_files_and_log_entries(self, tmp_path):
        """Upkeep runs in a thread beside the deliveries; what is due at the end is done at the close."""
        pipeline = a_chain(id="n")
        pipeline.stream("mid").sink("out", DeltaSink(str(tmp_path / "out")))
        with LocalRunner(Pond().store(), progress=False).start(pipeline) as run:
            for number in range(50):
                run.inject("in", rows(number)).wait()
            run.run_until_quiet()
        table = DeltaTable(tmp_path / "out")
        values = table.to_pyarrow_table().column("at").cast(pa.int64()).to_pylist()
        checkpoints = [
            int(path.name[:20]) for path in (tmp_path / "out/_delta_log").glob("*.checkpoint.parquet")
        ]

        assert sorted(values) == list(range(50))
        assert len(table.file_uris()) <= 40
        assert table.version() - max(checkpoints) <= 20

    def test_value_that_a_sink_refuses_ends_the_run(self, tmp_path):
        """The record must not be lost."""
        pipeline = a_chain()
        schema = pa.schema([("n", pa.string())])
        pipeline.stream("mid").sink("out", DeltaSink(str(tmp_path / "out"), schema))
        run = Pond().start(pipeline)
        run.inject("in", rows(1))

        with pytest.raises(InvalidError, match="sink=`out` column=`n`"):
            run.run_until_quiet()


class TestBounded:
    def test_no_record_of_a_bounded_input_is_late(self):
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Late(), name="late")
        stream.apply(Alarm("event"), name="alarm")

        summary = pond.runner().run(pipeline, {"in": rows(3, 1, 2)})

        assert pond.states("late") == {"a": [False, False, False]}
        assert pond.states("alarm") == {"a": [1, 2, 3]}
        assert (summary.run.injected, summary.watermark) == (3, TIME_MAX_US)

    @pytest.mark.parametrize(
        "given",
        [
            pa.table({"k": ["a", "a"], "at": [1, 2], "n": [1, 2]}),
            pa.record_batch({"k": ["a", "a"], "at": [1, 2], "n": [1, 2]}),
            pd.DataFrame({"k": ["a", "a"], "at": [1, 2], "n": [1, 2]}, index=[7, 8]),
            rows(1, 2),
            (row for row in rows(1, 2)),
        ],
        ids=["table", "batch", "pandas", "list", "generator"],
    )
    def test_inputs_of_every_form_are_equal(self, given):
        pond = Pond()

        pond.runner().run(a_chain(), {"in": given})

        assert pond.states("second") == {"a": [1, 2]}

    def test_killed_run_is_resumed_by_running_it_again(self, monkeypatch):
        """The consumed rows are skipped."""
        monkeypatch.setattr("millpond.executor.local.bounded.BUNDLE_RECORDS_MAX", 200)
        pond = Pond()
        numbers = list(range(500))
        table = pa.table({"k": [f"{n % 101}" for n in numbers], "at": numbers, "n": numbers})
        objects = FaultyObjects(pond.disk)
        pond.disk = objects
        interrupted = pond.runner()
        puts = iter(range(100))

        def kill(operation: str, path: str) -> None:
            if operation == "put_if_absent" and next(puts) == 6:
                raise KeyboardInterrupt

        objects.before = kill
        with pytest.raises(KeyboardInterrupt):
            interrupted.run(a_chain(), {"in": table})
        objects.before = None

        summary = pond.runner().run(a_chain(), {"in": table})

        assert 0 < summary.run.injected < 500
        assert summary.totals.injected == 500
        assert pond.states("second") == {str(k): list(range(k, 500, 101)) for k in range(101)}
        assert pond.runner().run(a_chain(), {"in": table}).run.injected == 0

    def test_run_without_new_rows_that_fires_timers_has_processed_something(self, caplog):
        """The second run ends the input, so the alarm of the first one's only row rings; the third has nothing to do."""
        pond = Pond()

        def run(*, finish: bool = True) -> tuple[int, bool]:
            pipeline, stream = injected()
            stream.apply(Alarm("event"), name="alarm")
            caplog.clear()
            summary = pond.runner().run(pipeline, {"in": rows(1)}, finish=finish)
            return summary.run.timers, "nothing was processed" in caplog.text

        assert [run(finish=False), run(), run()] == [(0, False), (1, False), (0, True)]

    def test_times_in_1970_are_counted_once(self):
        """Before the first and after the last of them, and again where the watermark follows consumed rows."""
        pond, year_us = Pond(), 365 * 86_400_000_000
        pipeline, stream = injected(watermark=BoundedDisorder("1d"))
        stream.apply(Collect(), name="first")
        stream.apply(Collect(), name="second")
        given = rows(-1, 0, year_us - 1, year_us)

        first = pond.runner().run(pipeline, {"in": given}, finish=False)
        second = pond.runner().run(pipeline, {"in": given})

        assert (first.times_in_1970, second.times_in_1970) == ({"in": 2}, {})
        assert "2 of in have times in 1970" in " ".join(first.problems)

    @pytest.mark.parametrize(
        ("options", "dropped", "letters"),
        [
            ({"watermark": BoundedDisorder("2h")}, 3 * 8 * 49, 0),
            ({"watermark": BoundedDisorder("2h"), "ahead_max": "10m"}, 0, 4 * 12),
            ({"watermark": BoundedDisorder("2h"), "ahead_max": "10m", "on_ahead": "clamp"}, 0, 0),
            ({"watermark": BoundedDisorder("2h"), "ahead_max": "10m", "on_ahead": "hold"}, 0, 0),
            ({"watermark": ObservedPercentile(95)}, 0, 0),
        ],
        ids=["unbounded", "dead_letter", "clamp", "hold", "percentile"],
    )
    def test_device_that_is_a_day_ahead_drops_no_other_readings(self, options, dropped, letters):
        """Four nights of 50 devices, each run when its 12 hours are over; without a bound, eight of the next are lost."""
        hour_us = 3_600_000_000
        pond, fleet, summed = Pond(), list[dict[str, object]](), Counter[str]()
        pond.clock = ManualClock(-12 * hour_us)
        for night in range(4):
            for hour in range(24 * night, 24 * night + 12):
                times = [hour * hour_us + 24 * hour_us * (device == 0) for device in range(50)]
                fleet += [{"k": f"d{device}", "at": at} for device, at in enumerate(times)]
            pond.clock.advance_ms(24 * hour_us // 1_000)
            pipeline = WindowedPipeline("fleet")
            readings = pipeline.inject("readings", key="k", at="at", **options)
            readings.window(FixedWindows("1h")).combine(Count(), name="hourly")
            run = pond.runner().run(pipeline, {"readings": list(fleet)}, finish=False).run
            summed.update(dropped=run.dropped, letters=run.dead_letters)

        assert (summed["dropped"], summed["letters"]) == (dropped, letters)

    @pytest.mark.parametrize(("others", "warns"), [(2, True), (190, True), (200, False)])
    def test_share_of_dropped_records_is_that_of_the_step_that_drops_them(self, caplog, others, warns):
        """Neither the records of steps in front of it nor a small input hide the two that come too late."""
        pond = Pond()
        pipeline = WindowedPipeline("p")
        stream = pipeline.inject("in", key="k", at="at", watermark=BoundedDisorder("0s"))
        for step in range(3):
            stream = stream.map(lambda value: value, name=f"step{step}")
        stream.window(FixedWindows("1s")).combine(Count(), name="counts")

        with pond.runner().start(pipeline, stepping=True) as run:
            for given in (rows(*[9_000_000] * others), rows(1, 2)):
                run.inject("in", given)
                run.run_until_quiet()

        assert run.summary().run.by_computation["counts"]["dropped"] == 2
        assert ("more than one in a hundred" in caplog.text) == warns

    @pytest.mark.parametrize("on_ahead", ["clamp", "hold"])
    def test_record_ahead_in_a_bounded_input_is_not_late(self, monkeypatch, on_ahead):
        """Its own time is the only one that remains, so it must not become the watermark."""
        monkeypatch.setattr("millpond.executor.local.bounded.BUNDLE_RECORDS_MAX", 2)
        pond = Pond()
        pipeline, stream = injected(ahead_max="10us", on_ahead=on_ahead)
        stream.apply(Late(), name="late")
        stream.apply(Collect(), name="times", time_sorted=True)
        start = pond.clock.now_us()

        pond.runner().run(pipeline, {"in": rows(*(start + ahead for ahead in (1, 2, 3, 500, 600, 700)))})

        assert pond.states("late") == {"a": [False] * 6}
        assert len(pond.states("times")["a"]) == 6

    def test_limit_ahead_of_arrival_is_checked(self):
        with pytest.raises(
            InvalidError,
            match=r"no such choice; did you mean 'clamp'.*choices=`\['dead_letter', 'clamp', 'hold'\]`",
        ):
            injected(ahead_max="10m", on_ahead="clamps")
        with pytest.raises(InvalidError, match="ahead_max must be positive"):
            injected(ahead_max="0s")
        with pytest.raises(InvalidError, match="skew_limit or ahead_max"):
            EnginePipeline("p").inject("in", key="k", at=IngressTime(), ahead_max="10m")

    def test_input_shorter_than_consumed_is_refused(self):
        """The store must have consumed a different input."""
        pond = Pond()
        pond.runner().run(a_chain(), {"in": rows(1, 2, 3)})

        with pytest.raises(InvalidError, match="rows=`1` consumed=`3`"):
            pond.runner().run(a_chain(), {"in": rows(1)})

    def test_inputs_that_do_not_match_the_pipeline_are_refused(self):
        runner = Pond().runner()

        with pytest.raises(InvalidError, match="input=`other`"):
            runner.run(a_chain(), {"in": [], "other": []})
        with pytest.raises(InvalidError, match="stream=`in`"):
            runner.run(a_chain(), {})
        with pytest.raises(InvalidError, match="column=`k`"):
            runner.run(a_chain(), {"in": pa.table({"at": [1]})})
        with pytest.raises(InvalidError, match="type=`int`"):
            runner.run(a_chain(), {"in": 5})
        with pytest.raises(InvalidError, match="DataFrame"):
            runner.run(a_chain(), {"in": pd.DataFrame({"k": ["a", 1]})})

    def test_empty_input_is_accepted(self):
        assert Pond().runner().run(a_chain(), {"in": []}).totals.injected == 0


class WakingClock(ManualClock):
    """A clock that calls an action after a number of sleeps."""

    def __init__(self, sleeps: int) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.action = lambda: None

    def sleep_ms(self, duration_ms: float) -> None:
        super().sleep_ms(duration_ms)
        self.sleeps -= 1
        if self.sleeps == 0:
            self.action()


class TestFailures:
    def test_run_that_lost_its_leases_is_fenced(self):
        """The newest owner continues, and every caller of the former one gets the error."""
        pond = Pond()
        first = pond.start(a_chain())
        first.inject("in", rows(1))
        first.step()
        second = pond.start(a_chain())
        receipt = first.inject("in", rows(99))

        for call in (first.step, receipt.wait, lambda: first.inject("in", rows(1))):
            with pytest.raises(FencedError):
                call()
        second.run_until_quiet()

        assert pond.states("second") == {"a": [1]}

    def test_run_pauses_while_leases_are_suspended(self):
        pond = Pond()
        pond.clock = WakingClock(20)
        store = pond.store()
        run = LocalRunner(store, clock=pond.clock, rng=pond.rng, progress=False).start(
            a_chain(), stepping=True
        )
        run.inject("in", rows(1))
        run.run_until_quiet()
        store.leases.suspend()
        pond.clock.action = store.leases.resume

        run.inject("in", rows(2))
        run.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2]}
        assert pond.clock.slept_ms

    def test_run_ends_when_leases_stay_suspended_beyond_pause_timeout(self):
        pond = Pond(pause_timeout="1s")
        store = pond.store()
        runner = LocalRunner(store, clock=pond.clock, rng=pond.rng, progress=False, pause_timeout="1s")
        run = runner.start(a_chain(), stepping=True)
        run.inject("in", rows(1))
        store.leases.suspend()

        with pytest.raises(UnavailableError):
            run.run_until_quiet()

    def test_files_are_written_again_after_the_store_refused_them(self):
        objects = FaultyObjects(MemoryObjects())
        pond = Pond(objects)
        run = pond.start(a_chain())
        run.inject("in", rows(1))
        run.run_until_quiet()
        objects.plan(Fault.REFUSED, "put_if_absent", within="computation=", times=3)

        run.inject("in", rows(2))
        run.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2]}

    def test_commit_with_a_lost_reply_counts_once(self):
        """The committer finds its own commit by reading back."""
        objects = FaultyObjects(MemoryObjects())
        pond = Pond(objects)
        run = pond.start(a_chain())
        run.inject("in", rows(1))
        run.run_until_quiet()
        objects.plan(Fault.LOST, "put_if_absent", within="_delta_log", times=3)

        run.inject("in", rows(2))
        run.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2]}

    def test_pipelines_on_one_table_do_not_disturb_each_other(self):
        pond = Pond()
        run = pond.start(a_chain())
        run.inject("in", rows(1))
        run.run_until_quiet()
        other = EnginePipeline("other")
        other.inject("x", key="k", at="at").apply(Collect(), name="third")
        neighbour = pond.start(other)
        neighbour.inject("x", rows(7))
        neighbour.run_until_quiet()

        run.inject("in", rows(2))
        run.run_until_quiet()

        assert pond.states("second") == {"a": [1, 2]}
        assert pond.states("third") == {"a": [7]}

    def test_invalid_call_is_refused_without_ending_the_run(self):
        pond = Pond()
        run = pond.start(a_chain())

        with pytest.raises(InvalidError, match="column=`k`"):
            run.inject("in", pa.table({"at": [1]}))
        with pytest.raises(InvalidError, match="stream=`nowhere`"):
            run.inject("nowhere", [])
        with pytest.raises(InvalidError, match="stream=`nowhere`"):
            run.finish("nowhere")
        with pytest.raises(InvalidError, match="time"):
            run.advance_watermark("in", "tomorrow")
        with pytest.raises(InvalidError, match="computation=`missing`"):
            run.watermark("missing")

        run.inject("in", rows(1))
        run.run_until_quiet()
        assert pond.states("second") == {"a": [1]}

    def test_options_of_zero_are_refused(self):
        with pytest.raises(InvalidError, match="intervals"):
            LocalRunner("nowhere", intervals=0)
        with pytest.raises(InvalidError, match="intake_records_max"):
            LocalRunner("nowhere", intake_records_max=0)


class TestStop:
    def test_stop_fails_uncommitted_receipts_and_releases_leases(self):
        pond = Pond()
        run = pond.start(a_chain())
        run.inject("in", rows(1))
        run.step()
        receipt = run.inject("in", rows(2))

        summary = run.stop()

        assert summary.totals.records == 1
        with pytest.raises(UnavailableError, match="stopped"):
            receipt.wait()
        with pytest.raises(InvalidError, match="stopped"):
            run.inject("in", rows(3))
        assert run.stop().totals == summary.totals
        assert not pond.registry.owners

    def test_run_is_stopped_at_the_end_of_a_with_block(self):
        pond = Pond()

        with pond.start(a_chain()) as run:
            assert run.is_active

        assert not run.is_active
        assert not pond.registry.owners

    def test_full_intake_refuses_at_once_in_stepping_mode(self):
        """No other thread would make room while the caller waits."""
        run = Pond(intake_records_max=2).start(a_chain())
        run.inject("in", rows(1, 2))

        with pytest.raises(UnavailableError, match="full"):
            run.inject("in", rows(3))


class TestThread:
    def test_threaded_run_processes_injected_rows(self):
        pond = Pond(intake_records_max=3)
        with pond.runner().start(a_chain()) as run:
            for number in range(20):
                run.inject("in", rows(number), timeout="1m")
            assert run.inject("in", rows(20)).wait(timeout="1m")
            assert run.run_until_quiet(timeout="1m")

            assert pond.states("second") == {"a": list(range(21))}
            with pytest.raises(InvalidError, match="stepping"):
                run.step()

    def test_wall_timer_wakes_an_idle_worker(self):
        RUNG.clear()
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Alarm("wall"), name="alarm").apply(Ring(), name="ring")
        with pond.runner().start(pipeline) as run:
            run.inject("in", rows(1))
            run.run_until_quiet(timeout="1m")
            assert not RUNG.is_set()

            pond.clock.advance_ms(1)

            assert RUNG.wait(60)

    def test_failure_of_the_worker_is_raised_by_every_call(self):
        pond = Pond()
        pipeline, stream = injected()
        stream.apply(Picky(), name="picky", on_error="stop", retries=0)
        run = pond.runner().start(pipeline)

        receipt = run.inject("in", rows(13))

        for call in (receipt.wait, run.run_until_quiet, lambda: run.inject("in", rows(1))):
            with pytest.raises(InvalidError, match="picky"):
                call()
        run.stop()
        assert not pond.registry.owners
