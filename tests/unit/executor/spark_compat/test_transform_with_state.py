"""Spark's stateful processors on the local runner."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import Row

from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark_compat.transform_with_state import TransformWithState
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

SECOND_MS = 1_000


class Told(StatefulProcessor):
    """A processor that calls ``declare`` in ``init``, and ``act`` with the fields of each row. Results of
    ``act`` are yielded.
    """

    def __init__(
        self,
        declare: Callable[[Any, StatefulProcessorHandle], object] = lambda _, __: None,
        act: Callable[[Any, Mapping[str, Any]], object] = lambda _, __: None,
    ) -> None:
        self._declare = declare
        self._act = act

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self._declare(self, handle)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        for row in rows:
            answer = self._act(self, row.asDict())
            if answer is not None:
                yield Row(seen=str(answer))

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[Row]:
        yield Row(seen=f"timer {key!r} {expiredTimerInfo.getExpiryTimeInMs()}")


class Bench:
    """A processor on a store in memory, with a manual clock."""

    def __init__(
        self, processor: StatefulProcessor, time_mode: str = "ProcessingTime", **options: Any
    ) -> None:
        self.clock = ManualClock()
        pipeline = EnginePipeline("p")
        stream = pipeline.inject("in", key="k", at=IngressTime())
        stream.apply(
            TransformWithState(processor, "seen string", time_mode),
            name="c",
            **{"on_error": "stop", **options},
        )
        self.store = Store.in_memory(clock=self.clock, rng=SeededRng(1))
        runner = LocalRunner(
            self.store, clock=self.clock, rng=SeededRng("r"), progress=False, dead_letter_limit=None
        )
        self.run = runner.start(pipeline, stepping=True)

    def now_ms(self) -> int:
        return self.clock.now_us() // 1_000

    def take(self, *rows: Mapping[str, Any]) -> None:
        if rows:
            self.run.inject("in", [{"k": "a", **row} for row in rows])
        self.run.run_until_quiet()

    def state(self, computation: str = "c") -> Any:
        rows = self.store.rows_view(computation).to_arrow().to_pylist()
        return None if not rows or rows[0]["state"] is None else orjson.loads(rows[0]["state"])


def _limited(processor: Any, handle: StatefulProcessorHandle) -> None:
    processor.value = handle.getValueState("value", "n int", 10 * SECOND_MS)
    processor.list = handle.getListState("list", "n int", 20 * SECOND_MS)
    processor.map = handle.getMapState("map", "k int", "n int", 30 * SECOND_MS)


SEEN: list[Any] = []


def _look(processor: Any, row: Mapping[str, Any]) -> None:
    if row["do"] == "set":
        processor.value.update((row["n"],))
        processor.list.appendValue((row["n"],))
        processor.map.updateValue((row["n"],), (row["n"],))
    exists = (processor.value.exists(), processor.list.exists(), processor.map.exists())
    found = (processor.value.get(), list(processor.list.get()), dict(processor.map.iterator()))
    SEEN.append((exists, found, processor.map.getValue((1,)), processor.map.containsKey((1,))))


def test_expired_values_elements_and_entries_are_hidden() -> None:
    """Each has its own time to live, counted from its last change."""
    bench = Bench(Told(_limited, _look))
    SEEN.clear()

    bench.take({"do": "set", "n": 1})
    bench.clock.advance_ms(9_999)
    bench.take({"do": "look", "n": 0})
    bench.clock.advance_ms(5_000)
    bench.take({"do": "set", "n": 2})
    bench.clock.advance_ms(9_999)
    bench.take({"do": "look", "n": 0})
    bench.clock.advance_ms(6_000)
    bench.take({"do": "look", "n": 0})

    everything = (True, True, True)
    assert [
        (everything, ((1,), [(1,)], {(1,): (1,)}), (1,), True),
        (everything, ((1,), [(1,)], {(1,): (1,)}), (1,), True),
        (everything, ((2,), [(1,), (2,)], {(1,): (1,), (2,): (2,)}), (1,), True),
        (everything, ((2,), [(2,)], {(1,): (1,), (2,): (2,)}), (1,), True),
        ((False, True, True), (None, [(2,)], {(2,): (2,)}), None, False),
    ] == SEEN


def test_expired_state_of_an_idle_key_is_deleted() -> None:
    bench = Bench(Told(_limited, _look))
    bench.take({"do": "set", "n": 1})
    left = []

    for _ in range(3):
        bench.clock.advance_ms(10_000)
        bench.take()
        left.append(sorted(bench.state() or ()))

    assert left == [["list", "map"], ["map"], []]


def test_wall_timer_fires_in_its_millisecond() -> None:
    bench = Bench(Told(act=lambda processor, row: processor.handle.registerTimer(row["at"])))
    sunk: list[str] = []
    at = bench.now_ms() + 5_000
    bench.take({"at": at})
    bench.clock.advance_ms(4_999)
    bench.take()
    sunk.append(str(bench.run.summary().totals.timers))
    bench.clock.advance_ms(1)
    bench.take()

    assert [*sunk, str(bench.run.summary().totals.timers)] == ["0", "1"]


def _counting(processor: Any, handle: StatefulProcessorHandle) -> None:
    processor.count = handle.getValueState("count", "n int")


def _count_or_fail(processor: Any, row: Mapping[str, Any]) -> int:
    (count,) = processor.count.get() or (0,)
    processor.count.update((count + 1,))
    if row["n"] < 0:
        raise ValueError("a negative number")
    return int(count)


def test_failing_call_makes_dead_letters_of_its_keys_rows() -> None:
    """None of them has an effect; rows of other keys do."""
    bench = Bench(Told(_counting, _count_or_fail), on_error="dead_letter")

    bench.take({"n": 1}, {"n": 2})
    bench.take({"n": 3}, {"n": -1}, {"k": "b", "n": 4})

    totals = bench.run.summary().totals
    assert bench.state() == {"count": {"n": 2}}
    assert totals.dead_letters == 2


@pytest.mark.parametrize(
    ("declare", "time_mode", "reason"),
    [
        (lambda _, handle: handle.getValueState("v", "n intt"), "None", "cannot parse the schema"),
        (lambda _, handle: handle.getValueState("v", "n int", 5), "None", "ProcessingTime"),
        (lambda _, handle: handle.getValueState("v", "n int", 5), "EventTime", "ProcessingTime"),
        (lambda _, handle: handle.getValueState("v", "n int", 0), "ProcessingTime", "must be positive"),
        (
            lambda _, handle: [handle.getValueState("v", "n int"), handle.getListState("v", "n int")],
            "None",
            "must be unique",
        ),
        (lambda _, handle: handle.registerTimer(5), "ProcessingTime", "belong to a key"),
        (lambda _, handle: handle.getValueState("v", "n int").get(), "None", "belong to a key"),
        (lambda _, __: None, "Sometimes", "time_mode must be"),
    ],
)
def test_invalid_declaration_is_refused_when_constructed(
    declare: Callable[[Any, StatefulProcessorHandle], object], time_mode: str, reason: str
) -> None:
    with pytest.raises(InvalidError, match=reason):
        TransformWithState(Told(declare), "seen string", time_mode)


@pytest.mark.parametrize(
    ("act", "time_mode", "reason"),
    [
        (lambda processor, _: processor.handle.registerTimer(5), "None", "time mode"),
        (lambda processor, _: list(processor.handle.listTimers()), "None", "time mode"),
        (lambda processor, _: processor.handle.getValueState("late", "n int"), "None", "declared in init"),
        (lambda processor, _: processor.handle.deleteIfExists("count"), "None", "in init"),
        (lambda processor, _: processor.count.update(None), "None", "one value for each field"),
        (lambda processor, _: processor.count.update((1.5,)), "None", "field 'n'"),
        (lambda processor, _: processor.list.put([]), "None", "at least one value"),
    ],
)
def test_invalid_call_ends_the_run(
    act: Callable[[Any, Mapping[str, Any]], object], time_mode: str, reason: str
) -> None:
    def declare(processor: Any, handle: StatefulProcessorHandle) -> None:
        _counting(processor, handle)
        processor.list = handle.getListState("list", "n int")

    bench = Bench(Told(declare, act), time_mode)

    with pytest.raises(InvalidError, match=reason):
        bench.take({"n": 1})


def test_deleted_variable_is_removed_when_its_key_is_processed() -> None:
    bench = Bench(Told(_counting, _count_or_fail))
    bench.take({"n": 1})
    bench.run.stop()

    def declare(processor: Any, handle: StatefulProcessorHandle) -> None:
        handle.deleteIfExists("count")
        processor.other = handle.getValueState("other", "n int")

    pipeline = EnginePipeline("p")
    computation = TransformWithState(
        Told(declare, lambda processor, _: processor.other.update((7,))), "seen string", "ProcessingTime"
    )
    pipeline.inject("in", key="k", at=IngressTime()).apply(computation, name="c")
    bench.run = LocalRunner(bench.store, clock=bench.clock, rng=SeededRng("s"), progress=False).start(
        pipeline, stepping=True
    )
    bench.take({"n": 1})

    assert bench.state() == {"other": {"n": 7}}


def test_use_of_a_variable_that_init_has_deleted_raises_sparks_error() -> None:
    """Spark's code may catch it, as its own tests do."""

    def declare(processor: Any, handle: StatefulProcessorHandle) -> None:
        processor.gone = [
            handle.getValueState("value", "n int"),
            handle.getListState("list", "n int"),
            handle.getMapState("map", "k int", "n int"),
        ]
        for name in ("value", "list", "map"):
            handle.deleteIfExists(name)

    def act(processor: Any, _row: Mapping[str, Any]) -> None:
        value, items, mapping = processor.gone
        uses = [value.exists, value.get, lambda: value.update((1,)), value.clear, items.exists, items.get]
        uses += [lambda: items.put([(1,)]), mapping.exists, mapping.keys, lambda: mapping.getValue((1,))]
        for use in uses:
            with pytest.raises(PySparkRuntimeError, match="state exists: init has deleted"):
                use()

    bench = Bench(Told(declare, act))
    bench.take({"n": 1})

    assert bench.state() is None


class Counter(StatefulProcessor):
    """A count of the calls of ``init`` and ``close``, in class attributes."""

    began = 0
    ended = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n int")
        Counter.began += 1

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        return iter(())

    def close(self) -> None:
        Counter.ended += 1


def test_every_init_has_a_close() -> None:
    """``init`` runs for each bundle, and once when the computation is declared."""
    bench = Bench(Counter())

    bench.take({"n": 1})
    bench.take({"n": 1}, {"k": "b", "n": 2})

    assert Counter.began == Counter.ended >= 3


def test_computation_survives_pickling() -> None:
    """The pickle has the declarations, but nothing of a bundle."""
    computation = pickle.loads(pickle.dumps(TransformWithState(Counter(), "seen string")))

    assert computation.variables == ("count",)
