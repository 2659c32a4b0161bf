"""What a hook may do through its context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record, Records
from millpond.executor.computation.timers import Timer
from millpond.executor.computation.values import JsonValues, PythonValues
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.codec import BytesCodec, Codec, JsonCodec
from millpond.statestore.rows.key_text import encode_key
from tests.fixtures.interval_run import IntervalRun

Hook = Callable[[Context, Any], None]


class Hooks(Computation):
    def __init__(self, record: Hook, timer: Hook | None = None, codec: Codec | None = None) -> None:
        self._record = record
        self._timer = timer
        self.codec = codec or JsonCodec()

    def process_record(self, context: Context, record: Record) -> None:
        self._record(context, record)

    def process_timer(self, context: Context, timer: Timer) -> None:
        if self._timer is not None:
            self._timer(context, timer)


def run_of(computation: Computation) -> IntervalRun:
    node = ComputationNode(
        name="c", computation=computation, subscriptions=(), produces=("out", "more"), retries=0
    )
    return IntervalRun(node, Interval("c"))


def records_at(*times: int, key: str = "k") -> list[Deliveries]:
    keys = pa.array([key] * len(times), pa.string())
    return [Deliveries(stream="in", keys=keys, at=np.array(times), values=PythonValues(list(times)))]


def produced(result: BundleResult) -> list[dict[str, Any]]:
    if result.updates is None:
        return []
    lists = result.updates.column("productions").to_pylist()
    return [production for productions in lists for production in productions or []]


def errors_of(hook: Hook) -> list[str]:
    """Return the errors of the dead letters."""
    return [letter.error for letter in run_of(Hooks(hook)).step(records_at(100)).dead_letters]


class TestState:
    def test_state_lasts_from_set_to_delete_across_bundles(self) -> None:
        seen: list[Any] = []

        def hook(context: Context, record: Record) -> None:
            seen.append(context.state.get("none"))
            if record.value == 3:
                context.state.delete()
                seen.append(context.state.get("gone"))
            else:
                context.state.set(record.value)

        run = run_of(Hooks(hook))
        for times in ((1, 2), (3, 4), (5,)):
            run.step(records_at(*times))

        assert seen == ["none", 1, 2, "gone", "none", 4]

    def test_state_of_none_differs_from_no_state(self) -> None:
        seen: list[Any] = []

        def hook(context: Context, record: Record) -> None:
            seen.append(context.state.get("default"))
            context.state.set(None)

        run = run_of(Hooks(hook))
        run.step(records_at(1))
        run.step(records_at(2))

        assert seen == ["default", None]

    def test_change_of_a_returned_state_is_lost_without_set(self) -> None:
        seen: list[Any] = []

        def hook(context: Context, record: Record) -> None:
            state = context.state.get([])
            seen.append(list(state))
            if record.at == 1:
                context.state.set([0])
            state.append(record.at)

        run = run_of(Hooks(hook))
        run.step(records_at(1))
        run.step(records_at(2, 3))
        run.step(records_at(4))

        assert seen == [[], [0], [0], [0]]

    def test_state_reads_the_same_within_a_bundle_and_after_it(self) -> None:
        """JSON has no tuples, so a tuple reads as a list at the next record."""
        seen: list[Any] = []

        def hook(context: Context, record: Record) -> None:
            seen.append(context.state.get())
            context.state.set((record.at,))

        run = run_of(Hooks(hook))
        run.step(records_at(1, 2))
        run.step(records_at(3))

        assert seen == [None, [1], [2]]

    def test_state_of_a_bytes_codec_is_stored_in_state_bytes(self) -> None:
        seen: list[Any] = []

        def hook(context: Context, record: Record) -> None:
            seen.append(context.state.get(b""))
            context.state.set(context.state.get(b"") + b"\xff")

        run = run_of(Hooks(hook, codec=BytesCodec()))
        result = run.step(records_at(1))
        run.step(records_at(2))

        assert result.updates is not None
        assert result.updates.select(["state", "state_bytes"]).to_pylist() == [
            {"state": None, "state_bytes": b"\xff"}
        ]
        assert seen == [b"", b"\xff"]

    def test_codec_must_encode_to_the_type_it_declares(self) -> None:
        class Wrong(BytesCodec):
            def encode(self, value: Any) -> Any:
                return value

        class Surrogate(JsonCodec):
            def encode(self, value: Any) -> str:
                return "\ud800"

        for codec in (Wrong(), Surrogate()):
            result = run_of(Hooks(lambda c, _: c.state.set("x"), codec=codec)).step(records_at(1))

            assert result.updates is None
            assert "as its is_text says" in result.dead_letters[0].error


class TestProduce:
    def test_production_defaults_to_the_records_key_and_time(self) -> None:
        def hook(context: Context, record: Record) -> None:
            context.produce("out", {"n": 1})
            context.produce("more", b"\x00", key="other", at=record.at + 1)

        first, second = produced(run_of(Hooks(hook)).step(records_at(7)))

        at = datetime(1970, 1, 1, 0, 0, 0, 7, tzinfo=UTC)
        assert first == {"stream": "out", "key": "k", "value": '{"n":1}', "value_bytes": None, "at": at}
        assert second == {
            "stream": "more",
            "key": "other",
            "value": None,
            "value_bytes": b"\x00",
            "at": at.replace(microsecond=8),
        }

    def test_production_key_may_be_a_tuple(self) -> None:
        def hook(context: Context, record: Record) -> None:
            context.produce("out", list(context.key_values), key=("no", record.at))

        key = encode_key((None, 4711))
        (production,) = produced(run_of(Hooks(hook)).step(records_at(7, key=key)))
        (plain,) = produced(run_of(Hooks(hook)).step(records_at(7, key="k")))

        assert (production["key"], production["value"]) == (encode_key(("no", 7)), "[null,4711]")
        assert plain["value"] == '["k"]'

    def test_timers_production_defaults_to_its_output_time(self) -> None:
        hooks = Hooks(
            lambda c, r: c.set_timer(r.at + 5, output_at=r.at + 9), lambda c, _: c.produce("out", None)
        )
        productions = produced(run_of(hooks).step(records_at(1), watermark=6))

        assert [production["at"].microsecond for production in productions] == [10]

    def test_produced_value_is_encoded_at_once(self) -> None:
        """A later change of the object must not reach the consumer."""

        def hook(context: Context, record: Record) -> None:
            value = [1]
            context.produce("out", value)
            value.append(2)

        assert [p["value"] for p in produced(run_of(Hooks(hook)).step(records_at(1)))] == ["[1]"]

    @pytest.mark.parametrize(
        ("hook", "reason"),
        [
            (lambda c, r: c.produce("out", 1, at=r.at - 1), "must not be before the input"),
            (lambda c, _: c.produce("out", object()), "values cannot have"),
            (lambda c, _: c.produce("out", 1, key=5), "production key must be text"),
            (lambda c, _: c.produce("out", 1, key=([],)), "no values of this type"),
            (lambda c, _: c.produce("out", 1, key="\ud800"), "UTF-8"),
            (lambda c, _: c.produce("out", 1, at=2**63), "64 bits"),
            (lambda c, _: c.set_timer(datetime(2013, 2, 8)), "has no time zone"),  # noqa: DTZ001
            (lambda c, _: c.set_timer(2**63), "64 bits"),
            (lambda c, _: c.set_timer(1, domain="lunar"), "event or wall"),
            (lambda c, _: c.delete_timer(domain="lunar"), "event or wall"),
            (lambda c, _: c.set_timer(1, tag=1), "timer tag must be text"),
            (lambda c, _: c.set_timer(1, tag="\ud800"), "UTF-8"),
            (lambda c, r: c.set_timer(500, output_at=r.at - 1), "must not be before the input"),
        ],
    )
    def test_invalid_arguments_make_dead_letters(self, hook: Hook, reason: str) -> None:
        (error,) = errors_of(hook)

        assert reason in error

    @pytest.mark.parametrize("is_caught", [False, True])
    def test_undeclared_stream_in_the_code_stops_the_run(self, is_caught: bool) -> None:
        """A misspelt stream is no record's fault, so no dead letter results even if the code catches the
        error.
        """

        def hook(context: Context, _: Record) -> None:
            with suppress(InvalidError) if is_caught else nullcontext():
                context.produce("nowhere", 1)

        with pytest.raises(InvalidError, match=r"does not declare this stream.*`nowhere`.*\['more', 'out'\]"):
            run_of(Hooks(hook)).step(records_at(1))

    def test_undeclared_stream_named_by_a_record_makes_a_dead_letter(self) -> None:
        """Code that routes by a field must survive one bad record."""
        run = run_of(Hooks(lambda c, r: c.produce(r.value["to"], 1)))
        values = JsonValues(pa.array(['{"to":"nowhere"}', '{"to":"out"}']))
        result = run.step(
            [Deliveries(stream="in", keys=pa.array(["k", "k"]), at=np.array([1, 2]), values=values)]
        )

        assert [letter.value for letter in result.dead_letters] == ['{"to":"nowhere"}']
        assert [p["value"] for p in produced(result)] == ["1"]


class TestTimers:
    def test_default_output_times(self) -> None:
        """A timer in the past and a wall timer hold the input's time."""

        def hook(context: Context, record: Record) -> None:
            context.set_timer(record.at + 50, "later")
            context.set_timer(record.at - 50, "past")
            context.set_timer(5_000, "wall", "wall")

        run = run_of(Hooks(hook))
        updates = run.step(records_at(100), watermark=10).updates

        assert updates is not None
        (timers,) = updates.column("timers").to_pylist()
        assert [(t["tag"], t["at"].microsecond, t["output_at"].microsecond) for t in timers] == [
            ("past", 50, 100),
            ("later", 150, 150),
            ("wall", 5_000, 100),
        ]

    def test_timer_can_be_set_to_a_datetime(self) -> None:
        at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
        result = run_of(Hooks(lambda c, _: c.set_timer(at))).step(records_at(1))

        assert result.pending.next_event_timer == 1_000_000

    def test_context_shows_the_bundles_clocks(self) -> None:
        seen: list[Any] = []
        hooks = Hooks(lambda c, r: seen.append((c.watermark, c.wall_time, r.late)))
        result = run_of(hooks).step(records_at(4, 5), watermark=5, wall_time=77)

        assert seen == [(5, 77, True), (5, 77, False)]
        assert result.statistics.late == 1


class TestRecordsTogether:
    def test_production_time_follows_the_iteration_over_records(self) -> None:
        """After the iteration the default is the newest time; the floor is the oldest."""

        class Together(Computation):
            def process_records(self, context: Context, records: Records) -> None:
                for _ in records:
                    context.produce("out", "each")
                context.produce("out", "all")
                context.produce("out", "oldest", at=records[0].at)

        productions = produced(run_of(Together()).step(records_at(3, 1, 2)))

        assert [(p["value"], p["at"].microsecond) for p in productions] == [
            ('"each"', 1),
            ('"each"', 2),
            ('"each"', 3),
            ('"all"', 3),
            ('"oldest"', 1),
        ]

    def test_missing_hook_makes_dead_letters(self) -> None:
        class Nothing(Computation):
            pass

        class Sets(Computation):
            def process_record(self, context: Context, record: Record) -> None:
                context.set_timer(record.at)

        (record_letter,) = run_of(Nothing()).step(records_at(1)).dead_letters
        (timer_letter,) = run_of(Sets()).step(records_at(1), watermark=2).dead_letters

        assert "has no process_record" in record_letter.error
        assert "has no process_timer" in timer_letter.error
        assert (record_letter.stream, timer_letter.stream) == ("in", "")
