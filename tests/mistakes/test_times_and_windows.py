"""Mistakes with event time, watermarks, windows and triggers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import DAY_US, ROWS, Does, counting, run, run_code

MINUTE_US = 60_000_000


def at_times(times: list[Any]) -> list[dict[str, Any]]:
    """Return over a hundred rows, so that a run of only unreadable ones stops."""
    return [{"query": "cat", "at": time} for time in times * 100]


@pytest.mark.mistake("time-without-zone")
def test_local_time_as_text(told: Told) -> None:
    """Its moment depends on the zone, which is not guessed."""
    with told.by_error("counter", "queries", "2024-05-01 12:00:00", "at_zone"):
        run(counting(), at_times(["2024-05-01 12:00:00"]))


@pytest.mark.mistake("time-naive")
def test_datetimes_without_a_zone(told: Told) -> None:
    """Pandas makes such columns."""
    table = pa.table({"query": ["cat"], "at": [datetime(2024, 5, 1, 12)]})  # noqa: DTZ001 - it is the mistake

    with told.by_error("column=`at`", "timestamp[us]", "at_zone"):
        run(counting(), table)


@pytest.mark.mistake("time-no-text-of-a-time")
def test_date_not_in_iso_format(told: Told) -> None:
    with told.by_error("counter", "queries", "01.05.2024"):
        run(counting(), at_times(["01.05.2024 12:00"]))


@pytest.mark.mistake("time-of-no-type")
def test_time_column_of_another_type(told: Told) -> None:
    with told.by_error("column=`at`", "bool"):
        run(counting(), pa.table({"query": ["cat"], "at": [True]}))


@pytest.mark.mistake("time-in-float-seconds")
def test_time_column_of_floats(told: Told) -> None:
    """They are read with the unit that is said, to the microsecond."""
    with told.by_error("column=`at`", "double", 'at_unit="s"'):
        run(counting(), pa.table({"query": ["cat"], "at": [1.7e9]}))


@pytest.mark.mistake("time-null")
def test_null_times(told: Told) -> None:
    with told.by_error("counter", "queries", "the time is null"):
        run(counting(), at_times([None]))


@pytest.mark.mistake("time-in-milliseconds")
def test_milliseconds_for_microseconds(told: Told) -> None:
    """The magnitude of dates in this century reveals milliseconds."""
    with told.by_error("counter", "queries", str(DAY_US // 1_000), "at_unit"):
        run(counting(), at_times([DAY_US // 1_000]))


@pytest.mark.mistake("time-in-nanoseconds")
def test_nanoseconds_for_microseconds(told: Told) -> None:
    with told.by_error("counter", "queries", str(DAY_US * 1_000), "at_unit"):
        run(counting(), at_times([DAY_US * 1_000]))


@pytest.mark.mistake("time-in-seconds")
def test_seconds_for_microseconds(told: Told) -> None:
    with told.by_error("queries", str(DAY_US // 1_000_000), 'at_unit="s"'):
        run(counting(), at_times([DAY_US // 1_000_000 + second for second in range(10)]))


@pytest.mark.mistake("time-in-seconds-of-few")
def test_few_seconds_for_microseconds(told: Told) -> None:
    """They may be examples in 1970, so they are accepted with a warning."""
    with (
        told.by_warning("queries", str(DAY_US // 1_000_000), 'at_unit="s"'),
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(counting(), stepping=True) as running,
    ):
        running.inject_durably("queries", at_times([DAY_US // 1_000_000])[:9])


@pytest.mark.mistake("time-in-the-future")
def test_time_far_ahead_of_the_clock(told: Told) -> None:
    """The watermark follows it, so later records are late."""
    with (
        told.by_warning("queries", "2999-"),
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(counting(), stepping=True) as running,
    ):
        running.inject_durably("queries", at_times(["2999-01-01T00:00:00Z"]))


@pytest.mark.mistake("records-out-of-order")
def test_no_watermark_for_records_out_of_order(told: Told) -> None:
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")
    queries.window(mp.FixedWindows("1m")).combine(mp.Count(), name="counts")

    with (
        told.by_warning("queries", "counts", "BoundedDisorder("),
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as running,
    ):
        for at in (DAY_US + 60 * MINUTE_US, DAY_US):
            running.inject_durably("queries", [{"query": "cat", "at": at}])


@pytest.mark.mistake("clock-fast")
def test_one_fast_clock_among_many(told: Told) -> None:
    """Its records move the watermark by a day, so that the next ones of all others are late."""
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at", watermark=mp.BoundedDisorder("1m"))
    queries.window(mp.FixedWindows("1m")).combine(mp.Count(), name="counts")
    rows = [{"query": "cat", "at": DAY_US + 60 * MINUTE_US}] * 120

    with (
        told.by_warning("queries", "dropped=`120`", "records=`121`"),
        mp.Store.in_memory() as store,
        mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as running,
    ):
        running.inject_durably("queries", [{"query": "cat", "at": DAY_US + 25 * 60 * MINUTE_US}])
        running.inject_durably("queries", rows)


@pytest.mark.mistake("duration-in-words")
def test_duration_with_another_unit(told: Told) -> None:
    with told.by_error("10 minutes"):
        mp.BoundedDisorder("10 minutes")


@pytest.mark.mistake("lateness-negative")
def test_negative_allowed_lateness(told: Told) -> None:
    with told.by_error("-1m"):
        counting().stream("queries").window(mp.FixedWindows("1m"), allowed_lateness="-1m")


@pytest.mark.mistake("window-in-words")
def test_windows_as_text(told: Told) -> None:
    """A size alone does not determine the kind of window."""
    with told.by_error("1 hour", "FixedWindows('1h')"):
        counting().stream("queries").window("1 hour")  # type: ignore[arg-type]


@pytest.mark.mistake("window-of-no-size")
def test_windows_without_a_size(told: Told) -> None:
    with told.by_error("0s"):
        mp.FixedWindows("0s")


@pytest.mark.mistake("trigger-class")
def test_class_of_a_trigger(told: Told) -> None:
    with told.by_error("AfterWatermark"):
        counting().stream("queries").window(mp.FixedWindows("1m"), trigger=mp.AfterWatermark)  # type: ignore[arg-type]


@pytest.mark.mistake("trigger-of-no-count")
def test_trigger_after_zero_elements(told: Told) -> None:
    with told.by_error("value=`0`"):
        mp.AfterCount(0)


@pytest.mark.mistake("accumulation-misspelt")
def test_unknown_accumulation(told: Told) -> None:
    with told.by_error("accumulated", "'accumulating'"):
        counting().stream("queries").window(mp.FixedWindows("1m"), accumulation="accumulated")


def sets_a_timer(**options: Any) -> Callable[[mp.Context, mp.Record], None]:
    return lambda context, record: context.set_timer(record.at + MINUTE_US, **options)


@pytest.mark.mistake("timer-of-no-domain")
def test_timer_of_an_unknown_time(told: Told) -> None:
    with told.by_error("counter", "processing"):
        run_code(sets_a_timer(domain="processing"), on_error="stop")


@pytest.mark.mistake("timer-without-hook")
def test_timer_without_a_hook(told: Told) -> None:
    with told.by_error("counter", "Does", "process_timer"):
        run_code(sets_a_timer(), on_error="stop")


@pytest.mark.mistake("timer-at-a-naive-time")
def test_timer_at_a_time_without_a_zone(told: Told) -> None:
    when = datetime(2024, 5, 1) + timedelta(hours=1)  # noqa: DTZ001 - it is the mistake

    with told.by_error("counter", "2024-05-01"):
        run_code(lambda context, _: context.set_timer(when), on_error="stop")


@pytest.mark.mistake("produced-too-early")
def test_production_before_its_input(told: Told) -> None:
    """The watermark downstream may already have passed that time."""

    def earlier(context: mp.Context, record: mp.Record) -> None:
        context.produce("counter", 1, at=record.at - MINUTE_US)

    with told.by_error("counter", "late_data_horizon"):
        run_code(earlier, on_error="stop")


@pytest.mark.mistake("percentile-undeclared")
def test_undeclared_percentile(told: Told) -> None:
    with told.by_error("counter", "95"):
        run_code(lambda context, _: context.watermark_at(95))


@pytest.mark.mistake("nothing-injected")
def test_pipeline_without_an_injector(told: Told) -> None:
    pipeline = mp.Pipeline("searches")
    pipeline.stream("queries").apply(Does(), name="counter")

    with told.by_error("searches"):
        pipeline.check()


@pytest.mark.mistake("duration-without-unit")
def test_number_for_a_duration(told: Told) -> None:
    with told.by_error("61", "'61s'"):
        mp.FixedWindows(61)  # type: ignore[arg-type]


class MergingAlone(mp.FixedWindows):
    def merge(self, windows: Any) -> Any:
        return windows


@pytest.mark.mistake("merge-without-is-merging")
def test_merge_that_nothing_calls(told: Told) -> None:
    with told.by_error("MergingAlone", "is_merging=`False`"):
        mp.windows.WindowingStrategy(window_fn=MergingAlone("1h"))


@pytest.mark.mistake("combiner-of-no-column")
def test_combiner_of_a_column_that_no_row_has(told: Told) -> None:
    made = mp.Pipeline("searches")
    queries = made.inject("queries", key="query", at="at")
    queries.window(mp.FixedWindows("1h")).combine(mp.Mean("querys"), name="means")

    with told.by_error("means", "querys", "'query'"):
        run(made, ROWS * 100)


@pytest.mark.mistake("quantiles-of-nothing")
def test_quantiles_without_any(told: Told) -> None:
    with told.by_error("[]"):
        mp.Quantiles("n", at=[])  # type: ignore[arg-type]


@pytest.mark.mistake("flag-in-words")
def test_flag_as_text(told: Told) -> None:
    with told.by_error("no"):
        mp.windows.WindowingStrategy(emit_empty_on_time="no")  # type: ignore[arg-type]


@pytest.mark.mistake("trigger-class-within")
@pytest.mark.parametrize("within", [lambda one: mp.AfterWatermark(early=one), mp.Repeatedly, mp.AfterAll])
def test_class_of_a_trigger_within_another(told: Told, within: Any) -> None:
    with told.by_error("AfterCount"):
        within(mp.AfterCount)


@pytest.mark.mistake("two-columns-of-one-name")
def test_table_with_a_column_twice(told: Told) -> None:
    cells = [pa.array(["cat"]), pa.array([DAY_US]), pa.array([1]), pa.array([2])]
    with told.by_error("n"):
        run(counting(), pa.Table.from_arrays(cells, ["query", "at", "n", "n"]))
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"])
    with told.by_error("lines.item.n"):
        run(
            counting(),
            pa.table({"query": ["cat"], "at": [DAY_US], "lines": pa.ListArray.from_arrays([0, 1], struct)}),
        )


@pytest.mark.mistake("percentile-as-a-share")
def test_percentile_of_one(told: Told) -> None:
    with told.by_error("0.99", "99?"):
        mp.windows.WatermarkPercentile(0.99)


@pytest.mark.mistake("on-ahead-without-its-bound")
def test_clamp_without_a_bound(told: Told) -> None:
    with told.by_error("queries", "clamp"):
        mp.Pipeline("searches").inject("queries", key="query", at="at", on_ahead="clamp")


@pytest.mark.mistake("windows-with-gaps")
def test_windows_further_apart_than_they_are_long(told: Told) -> None:
    """Records in between are in no window, as in a sample."""
    queries = mp.Pipeline("searches").inject("queries", key="query", at="at")

    with told.by_warning("queries", "SlidingWindows(size='1h', period='2h'"):
        queries.window(mp.SlidingWindows("1h", "2h"))
