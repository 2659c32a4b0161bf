"""Local runs that end their input, and runs that leave it open."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import IngressTime
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.faults.faulty_objects import FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Late(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), [record.value["n"], record.late]])
        context.produce("seen", record.value)


class Kept(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), record.value["n"]])


class Alarm(Computation):
    """Rings ten microseconds after the newest record."""

    def process_record(self, context: Context, record: Record) -> None:
        context.set_timer(record.at + 10)
        context.state.set([*context.state.get([]), [record.value["n"], record.late]])

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set([*context.state.get([]), timer.at])


class Pond:
    """A store in memory that outlives its runs."""

    def __init__(self) -> None:
        self.disk = FaultyObjects(MemoryObjects())
        self._registry = MemoryRegistry()
        self._clock, self._rng = ManualClock(), SeededRng(1)

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self._registry, clock=self._clock, rng=self._rng)

    def runner(self, **options: Any) -> LocalRunner:
        return LocalRunner(self.store(), clock=self._clock, rng=self._rng, progress=False, **options)

    def states(self, computation: str) -> dict[str, Any]:
        rows = self.store().rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: orjson.loads(row["state"]) for row in rows}


def pipeline(**options: Any) -> EnginePipeline:
    made = EnginePipeline("p")
    stream = made.inject("in", key="k", **{"at": "at", **options})
    stream.apply(Late(), name="late", produces="seen").apply(Kept(), name="kept")
    return made


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"k": "a", "at": number, "n": number} for number in numbers]


def test_run_without_finish_leaves_watermarks_to_their_policy() -> None:
    """Rows of one run never make each other late; rows of the next run may be late."""
    pond = Pond()

    first = pond.runner().run(pipeline(), {"in": rows(30, 1, 20)}, finish=False)
    second = pond.runner().run(pipeline(), {"in": rows(30, 1, 20, 29, 31)}, finish=False)

    assert (first.run.injected, first.run.late, first.ended, first.watermark) == (3, 0, (), 30)
    assert (second.run.injected, second.watermark) == (2, 31)
    late = dict(pond.states("late")["a"])
    assert late == {1: False, 20: False, 29: True, 30: False, 31: False}
    assert second.skipped == {"in": "3 of 5 rows were consumed before"}


@pytest.mark.parametrize("kill_at", range(3, 19, 3))
def test_killed_run_without_finish_is_resumed(kill_at: int) -> None:
    """State and watermark must equal those after an undisturbed run."""
    pond = Pond()
    numbers = [*range(30_000, 45_000), *range(30_000)]
    table = pa.table({"k": [f"{n // 50}" for n in numbers], "at": numbers, "n": numbers})
    puts = iter(range(1_000))

    def kill(operation: str, _path: str) -> None:
        if operation == "put_if_absent" and next(puts) == kill_at:
            raise KeyboardInterrupt

    runner = pond.runner()
    pond.disk.before = kill
    with contextlib.suppress(KeyboardInterrupt):
        runner.run(pipeline(), {"in": table}, finish=False)
    pond.disk.before = None
    summary = pond.runner().run(pipeline(), {"in": table}, finish=False)

    assert (summary.totals.injected, summary.totals.late, summary.watermark) == (45_000, 0, 44_999)
    kept = {key: sorted(of_key) for key, of_key in pond.states("kept").items()}
    assert kept == {str(k): list(range(k * 50, k * 50 + 50)) for k in range(900)}


def test_row_dropped_in_a_later_night_is_told_with_the_watermark_that_would_keep_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pond = Pond()
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(Kept(), name="kept", on_late="drop")

    for night in (rows(100), rows(100, 60)):
        pond.runner().run(made, {"in": night}, finish=False)

    assert caplog.text.count('BoundedDisorder("40us")) would have kept them') == 1


@pytest.mark.parametrize("finish", [True, False])
def test_run_that_silences_cut_stops_if_all_its_records_fail(finish: bool) -> None:
    """Each superstep has a single record, but their number is known to be more."""

    class Failing(Alarm):
        def process_record(self, context: Context, record: Record) -> None:
            raise KeyError("price")

    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(Failing(), name="failing")

    with pytest.raises(InvalidError, match=r"too many records.*price"):
        Pond().runner().run(made, {"in": rows(100, 200, 300)}, finish=finish)


def test_rows_with_ingress_time_are_never_late() -> None:
    """A row is stamped once, when it is first consumed."""
    pond = Pond()
    for count in (2, 4):
        summary = pond.runner().run(pipeline(at=IngressTime()), {"in": rows(*range(count))}, finish=False)
        assert (summary.totals.injected, summary.totals.late) == (count, 0)

    assert pond.states("kept") == {"a": [0, 1, 2, 3]}


def test_input_of_an_ended_stream_is_refused() -> None:
    """With ``accept_ended`` new rows are processed as late."""
    pond = Pond()
    assert pond.runner().run(pipeline(), {"in": rows(1, 2)}).ended == ("in",)

    with pytest.raises(
        InvalidError, match=r"the input has ended.*finish=False.*accept_ended=True.*input=`in`"
    ):
        pond.runner().run(pipeline(), {"in": rows(1, 2, 3)})
    with pytest.raises(InvalidError, match="the input has ended"):
        pond.runner().start(pipeline(), stepping=True).inject("in", rows(3))
    pond.runner(accept_ended=True).run(pipeline(), {"in": rows(1, 2, 3)})

    assert pond.states("late") == {"a": [[1, False], [2, False], [3, True]]}
