"""Mistakes in code, in its state, and in the objects that it captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, Does, counting, run, run_code


@pytest.mark.mistake("code-raises")
def test_code_that_fails_for_every_record(told: Told) -> None:
    """The run stops before it commits a hundred dead letters, with the first one's error."""
    with told.by_error("counter", "queries", "cat", "KeyError: 'user'"):
        run_code(lambda _, record: record.value["user"], ROWS * 100)


@pytest.mark.mistake("code-raises-and-stops")
def test_code_that_fails_where_errors_stop(told: Told) -> None:
    with told.by_error("counter", "queries", "cat", "ZeroDivisionError"):
        run_code(lambda *_: 1 / 0, on_error="stop")


@pytest.mark.mistake("state-a-set")
def test_state_that_is_not_json(told: Told) -> None:
    with told.by_error("counter", "cat", "value.seen", "set"):
        run_code(lambda context, _: context.state.set({"seen": {1, 2}}), on_error="stop")


@pytest.mark.mistake("production-a-set")
def test_production_of_no_value(told: Told) -> None:
    with told.by_error("counter", "cat", "set"):
        run_code(lambda context, _: context.produce("counter", {1, 2}), on_error="stop")


@pytest.mark.mistake("flat-map-of-one-value")
def test_dict_in_place_of_a_list(told: Told) -> None:
    """Its field names would be the records."""
    pipeline = mp.Pipeline("searches")
    queries = pipeline.inject("queries", key="query", at="at")
    queries.flat_map(lambda row: {"n": row["query"]}, name="counter")

    with told.by_error("counter", "queries", "dict"):
        run(pipeline, ROWS * 100)


@dataclass
class Visits:
    count: int


class Keeps(mp.Computation):
    codec = mp.ModelCodec(Visits)

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(Visits(count="two"))  # type: ignore[arg-type]


@pytest.mark.mistake("state-not-of-its-model")
def test_state_refused_by_its_model(told: Told) -> None:
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(Keeps(), name="counter", on_error="stop")

    with told.by_error("counter", "Visits", "count"):
        run(pipeline, ROWS)


@pytest.mark.mistake("state-and-codec")
def test_schema_of_a_state_that_has_a_codec(told: Told) -> None:
    stream = mp.Pipeline("searches").inject("queries", key="query", at="at")

    with told.by_error("counter"):
        stream.apply(Keeps(), name="counter", state=pa.schema([("count", pa.int64())]))


@pytest.mark.mistake("schema-of-a-time-without-a-zone")
def test_schema_with_a_type_that_the_table_lacks(told: Told) -> None:
    with told.by_error("counter", "state.seen", "timestamp[us]"):
        counting(state=pa.schema([("seen", pa.timestamp("us"))]))


@pytest.mark.mistake("production-with-a-misspelt-field")
def test_field_that_the_schema_of_a_stream_lacks(told: Told) -> None:
    code = Does(lambda context, _: context.produce("visits", {"usr": 1}))
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(
        code, name="counter", produces={"visits": pa.schema([("user", pa.int64())])}, on_error="stop"
    )

    with told.by_error("counter", "cat", "value.usr", "user"):
        run(pipeline, ROWS)


class Tables(mp.Computation):
    """Calls a function for each table."""

    def __init__(self, what: Callable[[mp.types.TableContext, mp.types.KeyGroups], object]) -> None:
        self.what = what

    def process_table(
        self, context: mp.types.TableContext, table: pa.Table, groups: mp.types.KeyGroups
    ) -> None:
        self.what(context, groups)


class TablesAndRecords(Tables):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Never called."""


COUNT = pa.schema([("count", pa.int64())])


def run_tables(
    what: Callable[[mp.types.TableContext, mp.types.KeyGroups], object], **options: Any
) -> mp.RunSummary:
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(Tables(what), name="counter", **options)
    return run(pipeline, ROWS)


@pytest.mark.mistake("table-beside-another-hook")
def test_code_with_two_hooks_for_records(told: Told) -> None:
    stream = mp.Pipeline("searches").inject("queries", key="query", at="at")

    with told.by_error("counter", "process_record"):
        stream.apply(TablesAndRecords(print), name="counter", state=COUNT)


@pytest.mark.mistake("table-in-order-of-time")
def test_table_of_records_that_wait_for_their_time(told: Told) -> None:
    with told.by_error("counter"):
        run_tables(print, state=COUNT, time_sorted=True)


@pytest.mark.mistake("table-without-a-schema")
def test_table_that_produces_to_a_stream_without_a_schema(told: Told) -> None:
    with told.by_error("counter", "visits"):
        run_tables(print, state=COUNT, produces=["visits"])


@pytest.mark.mistake("table-without-a-state-schema")
def test_table_that_sets_states_of_no_schema(told: Told) -> None:
    with told.by_error("counter"):
        run_tables(lambda _, groups: groups.set_states({"count": [1] * len(groups)}))


@pytest.mark.mistake("table-that-sets-a-timer")
def test_table_that_sets_a_timer(told: Told) -> None:
    with told.by_error("counter", "set_timer"):
        run_tables(lambda context, _: context.set_timer(0), state=COUNT)


@pytest.mark.mistake("table-with-a-column-of-another-type")
def test_table_with_states_that_do_not_fit(told: Told) -> None:
    with told.by_error("counter", "cat", "state.count", "string"):
        run_tables(
            lambda _, groups: groups.set_states({"count": ["1"] * len(groups)}), state=COUNT, on_error="stop"
        )


SUMS = mp.types.CombiningState(COUNT)


@pytest.mark.mistake("combining-state-read")
def test_sum_that_code_reads(told: Told) -> None:
    with told.by_error("counter"):
        run_tables(lambda _, groups: groups.state("count"), state=SUMS)


@pytest.mark.mistake("combining-state-with-a-timer")
def test_timer_beside_a_sum(told: Told) -> None:
    with told.by_error("counter"):
        run_code(lambda context, _: context.set_timer(0), state=SUMS)


@pytest.mark.mistake("combining-state-of-other-numbers")
def test_sum_of_floats(told: Told) -> None:
    with told.by_error("counter", "state.spent", "double"):
        counting(state=mp.types.CombiningState(pa.schema([("spent", pa.float64())])))


class Locked(Does):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.mistake("computation-does-not-pickle")
def test_lock_in_a_computation(told: Told) -> None:
    """The local runner refuses it too, because the same pipeline must run on Spark."""
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(Locked(), name="counter")

    with told.by_error("counter", "Locked", "attribute=`lock`"):
        pipeline.check()


@pytest.mark.mistake("lambda-does-not-pickle")
def test_lambda_with_a_lock(told: Told) -> None:
    """A function is pickled with its closure."""
    lock = threading.Lock()

    def key(row: dict[str, Any]) -> str:
        with lock:
            return str(row["query"])

    pipeline = counting()
    pipeline.stream("queries").apply(Does(), name="by_query", key=key)

    with told.by_error("by_query", "queries", "lock"):
        pipeline.check()


class Second(Does):
    state_version = 2

    def upgrade_state(self, state: Any, former: mp.State) -> Any:  # type: ignore[override]
        return state


class Raised(Does):
    state_version = 1


class Packed(Does):
    codec = mp.MsgpackCodec()


def of(computation: mp.Computation, **options: Any) -> mp.Pipeline:
    pipeline = mp.Pipeline("searches")
    pipeline.inject("queries", key="query", at="at").apply(computation, name="counter", **options)
    return pipeline


def then(first: mp.Pipeline, second: mp.Pipeline) -> None:
    """Run two pipelines in turn on one store."""
    with mp.Store.in_memory() as store:
        run(first, ROWS, store, finish=False)
        run(second, ROWS, store, finish=False)


@pytest.mark.mistake("state-version-back")
def test_lowered_state_version(told: Told) -> None:
    with told.by_error("counter", "stored=`2`", "state_version=`0`"):
        then(of(Second()), of(Does()))


@pytest.mark.mistake("state-version-without-upgrade")
def test_state_version_without_an_upgrade(told: Told) -> None:
    """Only user code can convert the former state."""
    with told.by_error("counter", "stored=`0`", "state_version=`1`"):
        then(of(Does()), of(Raised()))


@pytest.mark.mistake("codec-changed")
def test_changed_codec_of_existing_states(told: Told) -> None:
    """The stored bytes would be decoded wrongly."""
    with told.by_error("counter", "msgpack", "json"):
        then(of(Does()), of(Packed()))


@pytest.mark.mistake("open-windows-of-other-code")
def test_changed_step_with_open_windows(told: Told) -> None:
    def hourly(combine: mp.CombineFn) -> mp.Pipeline:
        made = mp.Pipeline("searches")
        queries = made.inject("queries", key="query", at="at", watermark=mp.ManualWatermark())
        queries.window(mp.FixedWindows("1h")).combine(combine, name="hourly")
        return made

    with told.by_error("hourly", "Count()", "Sum(of='n')"):
        then(hourly(mp.Count()), hourly(mp.Sum("n")))


class Adds(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.add({"count": 1})


@pytest.mark.mistake("sums-read-by-other-code")
def test_code_that_reads_what_was_a_sum(told: Told) -> None:
    with told.by_error("counter", "CombiningState, count: int64"):
        then(of(Adds(), state=SUMS), of(Does()))


@pytest.mark.mistake("sums-over-other-states")
def test_sum_over_states_of_another_form(told: Told) -> None:
    with told.by_error("counter"):
        then(of(Does()), of(Adds(), state=SUMS))


@pytest.mark.mistake("computation-renamed")
def test_renamed_computation(told: Told) -> None:
    with told.by_error("searches", "counter", "tally"):
        then(counting(), counting("tally"))


@pytest.mark.mistake("input-renamed")
def test_renamed_input(told: Told) -> None:
    """Its position belongs to the former name, so all rows would count again, unless it is another input."""

    def pipeline(stream: str, *retired: str) -> mp.Pipeline:
        made = mp.Pipeline("searches", retire=retired)
        made.inject(stream, key="query", at="at").apply(Does(), name="counter")
        return made

    with mp.Store.in_memory() as store:
        runner = mp.LocalRunner(store, progress=False)
        runner.run(pipeline("queries"), {"queries": ROWS}, finish=False)
        with told.by_error("searches", "queries", "lookups"):
            runner.run(pipeline("lookups"), {"lookups": ROWS}, finish=False)
        assert runner.run(pipeline("lookups", "queries"), {"lookups": ROWS}, finish=False).run.records == 2
        assert runner.run(pipeline("lookups"), {"lookups": ROWS}, finish=False).run.records == 0


@pytest.mark.mistake("attribute-misspelt")
def test_misspelt_attribute_of_a_computation(told: Told) -> None:
    class Sorts(Does):
        time_sortd = True

    with told.by_error("counter", "Sorts", "time_sortd"):
        mp.Pipeline("searches").inject("queries", key="query", at="at").apply(Sorts(), name="counter")


@pytest.mark.mistake("pipeline-renamed")
def test_renamed_pipeline(told: Told) -> None:
    """The computation's rows belong to the pipeline's former name."""
    with told.by_error("counter", "queries_2", "searches"):
        then(counting(), counting(pipeline="queries_2"))


@pytest.mark.mistake("key-of-another-kind")
def test_key_of_another_type_than_in_the_rows(told: Told) -> None:
    """No row would match."""
    with mp.Store.in_memory() as store, told.by_error("counter", "n"):
        run(counting(), ROWS, store, finish=False)
        other = mp.Pipeline("searches")
        other.inject("queries", key="n", at="at").apply(Does(), name="counter")
        run(other, [*ROWS, *ROWS], store, finish=False)


@pytest.mark.mistake("intervals-changed")
def test_changed_number_of_intervals(told: Told) -> None:
    """Keys are cut at the first input, and later by load."""
    with told.by_error("counter", "intervals=`2`", "stored=`1`"):
        then(counting(intervals=1), counting(intervals=2))


class Misspelt(mp.Computation):
    def process_recrod(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(1)


@pytest.mark.mistake("hook-misspelt")
def test_hook_with_a_misspelt_name(told: Told) -> None:
    with told.by_error("counter", "Misspelt", "process_recrod"):
        of(Misspelt())


def test_methods_that_only_look_like_hooks_are_allowed() -> None:
    class Helped(Does):
        def process_records_of_day(self) -> None: ...

        def process_record_s(self) -> None: ...

        def process_recordz(self) -> None: ...

    with pytest.raises(mp.InvalidError, match="'process_records'"):
        of(Helped())
    del Helped.process_record_s, Helped.process_recordz
    assert of(Helped()).check()


def in_place(context: mp.Context, record: mp.Record) -> None:
    context.state.get({"n": 0})["n"] += 1


def after_set(context: mp.Context, record: mp.Record) -> None:
    state = context.state.get() or {"seen": []}
    context.state.set(state)
    state["seen"].append(record.at)


def assigned(context: mp.Context, record: mp.Record) -> None:
    context.state = {"seen": [record.at]}  # type: ignore[assignment]


@pytest.mark.mistake("state-changed-in-place")
@pytest.mark.parametrize("code", [in_place, after_set, assigned])
def test_state_changed_in_place(told: Told, code: Any) -> None:
    """A copy may be changed, so this is no error; the change is lost."""
    with told.by_warning("counter", "cat"):
        run_code(code)


def read_only(context: mp.Context, record: mp.Record) -> None:
    state = context.state.get({"seen": [0.1, "ü"]})
    if record.at % 2 or not state:
        context.state.set({**state, "n": (1, 2)})


def set_after(context: mp.Context, record: mp.Record) -> None:
    state = context.state.get({"seen": []})
    state["seen"].append(record.at)
    context.state.set(state)


def deleted(context: mp.Context, record: mp.Record) -> None:
    state = context.state.get({"seen": []})
    state["seen"].append(record.at)
    context.state.set(state)
    state["seen"].append(record.at)
    context.state.delete()


@pytest.mark.parametrize("code", [read_only, set_after, deleted])
def test_states_that_are_set_or_only_read_cause_no_warning(
    code: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run_code(code, ROWS * 3)

    assert "changed in place" not in caplog.text


@pytest.mark.mistake("codec-class")
def test_codec_that_is_a_class(told: Told) -> None:
    class Packs(Does):
        codec = mp.MsgpackCodec

    stream = mp.Pipeline("searches").inject("queries", key="query", at="at")
    with told.by_error("counter", "MsgpackCodec"):
        stream.apply(Packs(), name="counter")


@pytest.mark.mistake("tag-a-number")
def test_hold_with_a_number_as_its_tag(told: Told) -> None:
    with told.by_error("counter", "int"):
        run_code(lambda context, record: context.state.hold(record.at + 1, tag=5), on_error="stop")  # type: ignore[arg-type]


@pytest.mark.mistake("function-not-callable")
def test_map_of_a_name(told: Told) -> None:
    stream = mp.Pipeline("searches").inject("queries", key="query", at="at")
    with told.by_error("upper", "str"):
        stream.map("upper", name="upper")  # type: ignore[arg-type]


@pytest.mark.mistake("key-of-a-step-not-a-name")
def test_key_of_a_windowed_step_as_a_number(told: Told) -> None:
    windows = mp.Pipeline("searches").inject("queries", key="query", at="at").window(mp.FixedWindows("1h"))
    with told.by_error("counts", "int"):
        windows.combine(mp.Count(), name="counts", key=5)  # type: ignore[arg-type]
