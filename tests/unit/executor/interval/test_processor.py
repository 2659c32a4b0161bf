"""Bundles in, row updates out: order, failures and duplicates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import numpy as np
import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import JsonValues, PythonValues
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.key_executor import FIRINGS_MAX
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.pipeline.nodes import ComputationNode, OnLate
from millpond.statestore.errors import InternalError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import ROW_SCHEMA
from tests.fixtures.interval_run import IntervalRun

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Log(Computation):
    """A log in the state; the values "fail", "timer:<at>" and "delete" are commands."""

    def process_record(self, context: Context, record: Record) -> None:
        self._log(context, record.value)
        word, _, argument = str(record.value).partition(":")
        if word == "fail":
            context.produce("out", "lost")
            context.set_timer(1, "lost")
            raise ValueError(record.value)
        if word == "timer":
            context.set_timer(int(argument), argument)
        if word == "delete":
            context.state.delete()

    def process_timer(self, context: Context, timer: Timer) -> None:
        self._log(context, f"fired {timer.tag}")
        if timer.tag == "13":
            raise ValueError(timer.tag)

    def _log(self, context: Context, entry: Any) -> None:
        context.state.set([*context.state.get([]), entry])


class LogTogether(Log):
    """The same log, of all records at once."""

    def process_records(self, context: Context, records: Records) -> None:
        self._log(context, len(records))
        for record in records:
            self.process_record(context, record)


def run_of(
    computation: Computation,
    on_error: Literal["dead_letter", "stop"] = "dead_letter",
    *,
    exactly_once: bool = True,
    retries: int = 2,
    workers: int = 1,
    on_late: OnLate = "process",
) -> IntervalRun:
    node = ComputationNode(
        name="log",
        computation=computation,
        subscriptions=(),
        produces=("out",),
        on_error=on_error,
        exactly_once=exactly_once,
        retries=retries,
        on_late=on_late,
    )
    return IntervalRun(node, Interval("log"), workers)


def delivery(
    *records: tuple[str, int, Any], stream: str = "in", ids: list[bytes | None] | None = None
) -> Deliveries:
    return Deliveries(
        stream=stream,
        keys=pa.array([key for key, _, _ in records], pa.string()),
        at=np.array([at for _, at, _ in records], np.int64),
        values=PythonValues([value for _, _, value in records]),
        ids=None if ids is None else pa.array(ids, pa.binary()),
    )


def states(run: IntervalRun) -> dict[str, Any]:
    rows = run.rows().select(["key", "state"]).to_pylist()
    return {row["key"]: row["state"] and orjson.loads(row["state"]) for row in rows}


def updates_of(result: BundleResult) -> list[dict[str, Any]]:
    return [] if result.updates is None else result.updates.to_pylist()


class TestOrder:
    def test_records_are_processed_by_time_then_arrival_across_streams(self) -> None:
        run = run_of(Log())
        run.step(
            [
                delivery(("k", 2, "a"), ("j", 9, "x"), ("k", 1, "b")),
                delivery(("k", 1, "c"), ("k", 2, "d"), stream="other"),
            ]
        )

        assert states(run) == {"j": ["x"], "k": ["b", "c", "a", "d"]}

    def test_due_timers_precede_records_and_new_timers_follow(self) -> None:
        run = run_of(Log())
        run.step([delivery(("k", 1, "timer:30"), ("k", 2, "timer:20"), ("k", 3, "timer:40"))])
        result = run.step([delivery(("k", 5, "x"), ("k", 6, "timer:25"))], watermark=30)

        assert states(run)["k"][3:] == ["fired 20", "fired 30", "x", "timer:25", "fired 25"]
        assert (result.statistics.timers, result.pending.next_event_timer, result.pending.hold) == (3, 40, 40)

    def test_key_without_records_runs_for_its_due_timer(self) -> None:
        run = run_of(Log())
        run.step([delivery(("a", 1, "timer:10"), ("b", 1, "timer:20"))])
        result = run.step(watermark=10)

        assert states(run) == {"a": ["timer:10", "fired 10"], "b": ["timer:20"]}
        assert result.statistics.keys == 1

    def test_updates_are_sorted_by_the_utf8_bytes_of_keys(self) -> None:
        """Bytes sort in the order of code points."""
        keys = ["é", "z", "", "\uffff", "\U0001f986", "Z"]
        result = run_of(Log()).step([delivery(*((key, 1, "x") for key in keys))])

        assert [row["key"] for row in updates_of(result)] == sorted(keys)

    def test_due_timer_deleted_in_the_bundle_does_not_fire(self) -> None:
        class Deletes(Log):
            def process_timer(self, context: Context, timer: Timer) -> None:
                super().process_timer(context, timer)
                context.delete_timer("20")

        run = run_of(Deletes())
        run.step([delivery(("k", 1, "timer:10"), ("k", 1, "timer:20"))])
        run.step(watermark=50)

        assert states(run)["k"][2:] == ["fired 10"]

    def test_replaced_due_timer_fires_at_its_new_time_only(self) -> None:
        class Moves(Log):
            def process_timer(self, context: Context, timer: Timer) -> None:
                super().process_timer(context, timer)
                if timer.at < 20:
                    context.set_timer(90, "20")

        run = run_of(Moves())
        run.step([delivery(("k", 1, "timer:10"), ("k", 1, "timer:20"))])
        early = run.step(watermark=50)
        late = run.step(watermark=90)

        assert (early.statistics.timers, early.pending.next_event_timer, late.statistics.timers) == (1, 90, 1)
        assert states(run)["k"][2:] == ["fired 10", "fired 20"]

    def test_endlessly_reset_timer_is_an_error(self) -> None:
        class Forever(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.set_timer(record.at)

            def process_timer(self, context: Context, timer: Timer) -> None:
                context.set_timer(timer.at)

        run = run_of(Forever())
        with pytest.raises(InvalidError, match=r"keep setting timers.*computation=`log` key=`k`"):
            run.step([delivery(("k", 1, 0))], watermark=5)
        assert FIRINGS_MAX == 100_000


class TestFailures:
    @pytest.mark.parametrize("computation", [Log(), LogTogether()])
    def test_failing_record_is_rolled_back_alone(self, computation: Computation) -> None:
        run = run_of(computation)
        result = run.step([delivery(("j", 1, "z"), ("k", 1, "a"), ("k", 2, "fail"), ("k", 3, "timer:90"))])

        assert [entry for entry in states(run)["k"] if entry != 1] == ["a", "timer:90"]
        assert [entry for entry in states(run)["j"] if entry != 1] == ["z"]
        assert (result.pending.next_event_timer, result.productions) == (90, ())
        (letter,) = result.dead_letters
        assert (letter.computation, letter.stream, letter.key, letter.value, letter.at, letter.error) == (
            "log",
            "in",
            "k",
            '"fail"',
            2,
            "ValueError: fail",
        )
        assert "process_record" in letter.diagnostics

    def test_failing_timer_is_consumed_and_makes_a_letter(self) -> None:
        run = run_of(Log())
        run.step([delivery(("k", 1, "timer:13"), ("k", 1, "timer:14"))])
        result = run.step(watermark=20)

        assert states(run) == {"k": ["timer:13", "timer:14", "fired 14"]}
        assert [(d.stream, d.key, d.at) for d in result.dead_letters] == [("", "k", 13)]
        assert orjson.loads(result.dead_letters[0].value)["tag"] == "13"
        assert (result.statistics.timers, result.pending.next_event_timer) == (2, None)

    def test_unencodable_state_fails_the_record_that_set_it(self) -> None:
        class Sets(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.state.set({"bad": object()} if record.value == "bad" else record.value)

        run = run_of(Sets())
        result = run.step([delivery(("k", 1, "good"), ("k", 2, "bad"))])

        assert states(run) == {"k": "good"}
        assert "part=`value.bad` type=`object`" in result.dead_letters[0].error

    @pytest.mark.parametrize(("retries", "outcome"), [(0, []), (1, []), (2, ["x"])])
    def test_record_is_tried_once_and_retried_as_configured(self, retries: int, outcome: list[str]) -> None:
        """The first run of the whole turn is one more call."""
        calls = []

        class Flaky(Log):
            def process_record(self, context: Context, record: Record) -> None:
                calls.append(record.value)
                super().process_record(context, record)
                if len(calls) < 4:
                    raise OSError("not yet")

        run = run_of(Flaky(), retries=retries)
        result = run.step([delivery(("k", 1, "x"))])

        assert len(calls) == 2 + retries
        assert (states(run).get("k", []), len(result.dead_letters)) == (outcome, 0 if outcome else 1)

    def test_on_error_stop_names_the_record(self) -> None:
        """The user's exception is the cause, and the soft state is unchanged."""
        run = run_of(Log(), "stop")
        run.step([delivery(("k", 1, "timer:10"))])
        with pytest.raises(InvalidError, match="computation=`log` key=`k` stream=`in`") as caught:
            run.attempt(run.bundle([delivery(("k", 2, "fail"), ("a", 1, "x"))], watermark=15))

        assert isinstance(caught.value.__cause__, ValueError)
        result = run.step(watermark=15)
        assert (states(run), result.statistics.timers) == ({"k": ["timer:10", "fired 10"]}, 1)

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_interrupts_make_no_dead_letter(self, interrupt: type[BaseException]) -> None:
        class Interrupted(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                raise interrupt

        with pytest.raises(interrupt):
            run_of(Interrupted()).step([delivery(("k", 1, 0))])

    def test_unreadable_value_makes_a_letter(self) -> None:
        broken = Deliveries(
            stream="in",
            keys=pa.array(["k", "k"]),
            at=np.array([1, 2]),
            values=JsonValues(pa.array(["{", '"b"'])),
        )
        run = run_of(Log())
        result = run.step([broken])

        assert states(run) == {"k": ["b"]}
        assert result.dead_letters[0].value.startswith('"<unreadable: ')
        assert result.dead_letters[0].value_types == {"": "unreadable"}

    def test_long_exception_makes_a_bounded_letter(self) -> None:
        class Verbose(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                raise ValueError("x" * 100_000 + "\nsecond line")

        (letter,) = run_of(Verbose()).step([delivery(("k", 1, 0))]).dead_letters

        assert (len(letter.error) <= 1_000, "\n" in letter.error, len(letter.diagnostics) <= 8_000) == (
            True,
            False,
            True,
        )


class TestDuplicates:
    def test_first_of_equal_ids_in_a_bundle_counts(self) -> None:
        """Other keys may have the same id."""
        run = run_of(Log())
        result = run.step(
            [
                delivery(("k", 5, "a"), ("k", 1, "b"), ("j", 1, "c"), ids=[b"1", b"1", b"1"]),
                delivery(("k", 1, "d"), ("k", 2, "e"), stream="other", ids=[b"1", b"2"]),
            ]
        )

        assert states(run) == {"j": ["c"], "k": ["e", "a"]}
        assert (result.statistics.records, result.statistics.duplicates) == (3, 2)

    def test_consumed_id_is_dropped_by_every_worker(self) -> None:
        """The other worker must read the ids from files."""
        run = run_of(Log(), workers=2)
        run.step([delivery(("k", 1, "a"), ids=[b"1"])])
        for worker in (0, 1, 0):
            result = run.step([delivery(("k", 2, "again"), ("j", 2, "new"), ids=[b"1", b"1"])], worker=worker)

        assert states(run) == {"j": ["new"], "k": ["a"]}
        assert (result.statistics.records, result.statistics.keys, result.updates) == (0, 0, None)

    def test_duplicate_of_a_dead_letter_is_dropped(self) -> None:
        """A record that failed for good has been consumed."""
        run = run_of(Log())
        first = run.step([delivery(("k", 1, "fail"), ids=[b"1"])])
        second = run.step([delivery(("k", 1, "fail"), ids=[b"1"])])

        assert (len(first.dead_letters), second.dead_letters) == (1, ())
        assert [row["record_ids"] for row in updates_of(first)] == [
            [{"id": b"1", "at": EPOCH + timedelta(microseconds=1), "arrived_at": EPOCH}]
        ]

    def test_duplicates_of_a_dropped_late_record_count_as_duplicates(self) -> None:
        run = run_of(Log(), on_late="drop", workers=2)
        late, fresh = ("k", 1, "late"), ("j", 9, "fresh")
        first = run.step([delivery(late, fresh, late, ids=[b"1", b"1", b"1"])], watermark=5)
        others = [run.step([delivery(late, ids=[b"1"])], watermark=5, worker=worker) for worker in (1, 0, 1)]

        assert states(run) == {"j": ["fresh"]}
        assert (first.statistics.dropped, first.statistics.duplicates, first.statistics.keys) == (1, 1, 1)
        assert [(r.statistics.dropped, r.statistics.duplicates) for r in others] == [(0, 1)] * 3

    def test_id_is_stored_with_the_bundles_arrival_time(self) -> None:
        """The wall time is rounded up to the minute; a dropped record's id is stored too."""
        run = run_of(Log(), on_late="drop")
        result = run.step(
            [delivery(("k", 1, "late"), ("k", 9, "fresh"), ids=[b"1", b"2"])],
            watermark=5,
            wall_time=61_000_000,
        )

        assert updates_of(result)[0]["record_ids"] == [
            {
                "id": id_,
                "at": EPOCH + timedelta(microseconds=at),
                "arrived_at": EPOCH + timedelta(minutes=2),
            }
            for id_, at in ((b"1", 1), (b"2", 9))
        ]

    def test_records_without_ids_are_never_duplicates(self) -> None:
        """Null ids are not written either."""
        run = run_of(Log())
        result = run.step([delivery(("k", 1, "a"), ("k", 1, "b"), ("k", 2, "c"), ids=[None, None, b"1"])])

        assert states(run) == {"k": ["a", "b", "c"]}
        assert [len(row["record_ids"]) for row in updates_of(result)] == [1]

    def test_disabled_exactly_once_ignores_ids(self) -> None:
        run = run_of(Log(), exactly_once=False)
        for _ in range(2):
            result = run.step([delivery(("k", 1, "a"), ids=[b"1"])])

        assert states(run) == {"k": ["a", "a"]}
        assert [row["record_ids"] for row in updates_of(result)] == [None]


class TestUpdates:
    def test_unchanged_row_is_not_written(self) -> None:
        """The code reads the state, then sets the same state and timer again."""

        class Same(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.state.set(context.state.get({"n": 1}))
                context.set_timer(100, "t")

        run = run_of(Same())
        run.step([delivery(("k", 1, 0))])
        result = run.step([delivery(("k", 1, 0))])

        assert (result.updates, result.pending.next_event_timer, result.pending.hold) == (None, 100, 100)
        assert result.statistics.records == 1

    def test_update_contains_only_changed_columns(self) -> None:
        """The hold is always written."""
        run = run_of(Log())
        run.step([delivery(("k", 1, "timer:50"))])
        (update,) = updates_of(run.step([delivery(("k", 2, "x"))]))

        assert update["state"] == '["timer:50","x"]'
        assert (update["timers"], update["productions"], update["deleted"]) == (None, None, False)
        assert update["hold"].microsecond == 50
        assert (update["sequencer"], update["commit_number"], update["superstep"]) == (1, 2, 2)

    def test_tombstone_of_a_deleted_state_keeps_the_timers(self) -> None:
        """Readers would otherwise drop the timers with the state."""
        run = run_of(Log())
        run.step([delivery(("k", 1, "timer:50"))])
        (update,) = updates_of(run.step([delivery(("k", 2, "delete"))]))

        assert (update["deleted"], update["state"], [t["tag"] for t in update["timers"]]) == (
            True,
            None,
            ["50"],
        )
        assert states(run) == {"k": None}

    def test_row_without_state_is_deleted_with_its_last_timer(self) -> None:
        class OnlyTimers(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.set_timer(5)

            def process_timer(self, context: Context, timer: Timer) -> None:
                context.produce("out", "fired")

        run = run_of(OnlyTimers())
        run.step([delivery(("k", 1, 0))])
        result = run.step(watermark=9)

        assert [(row["deleted"], row["timers"]) for row in updates_of(result)] == [(True, [])]
        assert (run.rows().num_rows, result.pending.hold) == (0, None)
        assert [(p.stream, p.count, p.oldest_at) for p in result.productions] == [("out", 1, 5)]

    def test_productions_are_written_in_order_and_counted_by_stream(self) -> None:
        class Twice(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.produce("out", record.value, at=record.at + 10)
                context.produce("out", -record.value)

        result = run_of(Twice()).step([delivery(("b", 3, 3), ("a", 4, 4), ("b", 1, 1))])

        values = {row["key"]: [p["value"] for p in row["productions"]] for row in updates_of(result)}
        assert values == {"a": ["4", "-4"], "b": ["1", "-1", "3", "-3"]}
        assert [(p.stream, p.count, p.oldest_at) for p in result.productions] == [("out", 6, 1)]

    def test_update_table_has_the_schema_of_row_files(self) -> None:
        result = run_of(Log()).step([delivery(("k", 1, "timer:9"), ids=[b"1"])])

        assert result.updates is not None
        assert result.updates.schema == ROW_SCHEMA

    def test_key_of_another_interval_is_an_internal_error(self) -> None:
        node = ComputationNode(name="log", computation=Log(), subscriptions=())
        run = IntervalRun(node, Interval("log", "b", "d"))
        with pytest.raises(InternalError, match="every key of a bundle lies in the interval"):
            run.step([delivery(("d", 1, "x"))])

    def test_empty_bundle_writes_nothing(self) -> None:
        run = run_of(Log())

        for deliveries in ([], [delivery()], [delivery(ids=[])]):
            result = run.step(deliveries, watermark=5)
            assert (result.updates, result.statistics.keys, result.pending.hold) == (None, 0, None)


def test_times_at_both_ends_of_the_range_are_sorted() -> None:
    """The packed sort key must not overflow."""
    least, greatest = -(2**63), 2**63 - 1
    run = run_of(Log())
    run.step([delivery(("k", greatest, "c"), ("k", least, "a"), ("k", 0, "b"))], watermark=least)

    assert states(run) == {"k": ["a", "b", "c"]}
