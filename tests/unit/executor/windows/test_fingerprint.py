"""Library steps whose declaration changes while their windows are open."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any

import pytest

import millpond as mp
from millpond.executor.maintenance.offline_upgrade import upgrade_offline
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.executor.windows.strategy import described
from millpond.executor.windows.stream import DataflowStream
from millpond.statestore.app_ids import AppId, recorded_word
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

SECOND = 1_000_000


class Longest(mp.CombineFn):
    """A combiner of a user, whose parameter is an attribute."""

    can_uncombine = False

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def create(self) -> str:
        return ""

    def add(self, accumulator: str, value: Any) -> str:
        return max(accumulator, value["w"], key=len)

    def merge(self, accumulators: Any) -> str:
        return max(accumulators, key=len)


class LongestAgain(Longest):
    version = 2


@dataclass(frozen=True)
class Shifts(mp.FixedWindows):
    """Windows of a user."""

    zone: str = "UTC"


class Ticks(mp.FixedWindows):
    """Windows of a user, who keeps a number."""

    def __init__(self, size: mp.Duration) -> None:
        super().__init__(size)
        object.__setattr__(self, "size", self._size_us)


class Keep(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([*context.state.get([]), record.value["value"]])


def row(second: int) -> dict[str, Any]:
    return {"k": "x", "t": second * SECOND, "v": 5, "w": "word"}


class Pond:
    """A store in memory, and a step ``w`` on it whose code changes."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.rng = ManualClock(), SeededRng(7)

    def store(self) -> mp.Store:
        return mp.Store.in_memory(
            objects=self.objects, registry=self.registry, clock=self.clock, rng=self.rng
        )

    def start(self, pipeline: mp.Pipeline) -> mp.LocalRun:
        runner = mp.LocalRunner(self.store(), clock=self.clock, rng=self.rng, progress=False)
        return runner.start(pipeline, stepping=True)

    def run(self, pipeline: mp.Pipeline, *at: int, watermark: int | None = None) -> Snapshot:
        with self.start(pipeline) as run:
            if at:
                run.inject("a", [row(second) for second in at])
                run.run_until_quiet()
            if watermark is not None:
                for stream in pipeline.check().injectors:
                    run.advance_watermark(stream, watermark * SECOND)
                run.run_until_quiet()
        return load(Log(self.objects))

    def panes(self) -> list[Any]:
        rows = self.store().rows_view("out").to_arrow().column("state").to_pylist()
        return [value for row in rows for value in json.loads(row)]


def source(drop: tuple[str, ...] = ()) -> tuple[mp.Pipeline, DataflowStream]:
    pipeline = mp.Pipeline("p", drop=drop)
    return pipeline, pipeline.inject("a", key="k", at="t", watermark=mp.ManualWatermark())


def step(
    combine: Any = None,
    windows: mp.WindowFn | None = None,
    *,
    name: str = "w",
    drop: tuple[str, ...] = (),
    renamed_from: str | None = None,
    **options: Any,
) -> mp.Pipeline:
    pipeline, stream = source(drop)
    windowed = stream.window(windows or mp.FixedWindows("10s"), **options)
    panes = windowed.combine(combine or mp.Count(), name=name, renamed_from=renamed_from)
    panes.apply(Keep(), name="out")
    return pipeline


def grouped(*tags: str, of: str | None = None, swap: bool = False) -> mp.Pipeline:
    pipeline, stream = source()
    other = pipeline.inject("b", key="k", at="t", watermark=mp.ManualWatermark())
    streams = dict(zip(tags, (other, stream) if swap else (stream, other), strict=True))
    strategy = mp.windows.WindowingStrategy(window_fn=mp.FixedWindows("10s"))
    mp.co_group(streams, strategy, name="w", of=None if of is None else {tags[0]: of}).apply(
        Keep(), name="out"
    )
    return pipeline


def top(count: int = 2, combine: mp.CombineFn | None = None) -> mp.Pipeline:
    pipeline, stream = source()
    stream.window(mp.FixedWindows("10s")).top(count, combine or mp.Count(), name="w").apply(
        Keep(), name="out"
    )
    return pipeline


def part(name: str, value: Any) -> Any:
    return value[name]


def all_elements() -> mp.Pipeline:
    pipeline, stream = source()
    windowed = stream.window(mp.FixedWindows("10s"))
    windowed.process_windows(lambda elements, *_: [len(elements)], name="w").apply(Keep(), name="out")
    return pipeline


C, S = mp.Count, mp.Sum
REFUSED: dict[str, tuple[mp.Pipeline, mp.Pipeline, str, str]] = {
    "windows": (step(), step(windows=mp.FixedWindows("5s")), "FixedWindows(10s)", "FixedWindows(5s)"),
    "kind of windows": (step(), step(windows=mp.Sessions("10s")), "FixedWindows(10s)", "Sessions(10s)"),
    "offset": (step(), step(windows=mp.FixedWindows("10s", "2s")), "FixedWindows(10s)", "FixedWindows(10s, offset=2s)"),
    "windows of a user": (
        step(windows=Shifts("10s", zone="Europe/Oslo")), step(windows=Shifts("10s")),
        "Shifts(10s, zone='Europe/Oslo')", "Shifts(10s)",
    ),
    "trigger": (
        step(trigger=mp.AfterWatermark(early=mp.AfterCount(20))), step(trigger=mp.AfterWatermark()),
        "AfterWatermark(early=AfterCount(20))", "AfterWatermark()",
    ),
    "accumulation": (step(), step(accumulation="accumulating"), "discarding", "accumulating"),
    "incremental": (step(), step(incremental=True), "discarding", "discarding, incremental"),
    "times": (step(), step(timestamp_combiner="OUTPUT_AT_EARLIEST"), "OUTPUT_AT_EOW", "OUTPUT_AT_EARLIEST"),
    "combiner": (step(), step(S("v")), "Count()", "Sum(of='v')"),
    "column": (step(S("v")), step(S("u")), "Sum(of='v')", "Sum(of='u')"),
    "part of the value": (step(of="v"), step(of="u"), "'v'", "'u'"),
    "several": (step(), step({"n": C(), "s": S("v")}), "Count()", "Count(), Sum(of='v')"),
    "field": (step({"n": C(), "s": S("v")}), step({"n": C(), "s": mp.Max("v")}), "Sum(of='v')", "Max(of='v')"),
    "all fields": (step({"n": C()}), step({"s": S("v")}), "Count()", "Sum(of='v')"),
    "getter": (step(S(itemgetter("v"))), step(S(itemgetter("u"))), "Sum(of=operator.itemgetter('v'))", "Sum(of=operator.itemgetter('u'))"),
    "partial function": (
        step(S(partial(part, "v"))), step(S(partial(part, "u"))),
        "Sum(of=partial(part, ['v'], {}))", "Sum(of=partial(part, ['u'], {}))",
    ),
    "last": (step(mp.LastN(3)), step(mp.LastN(3, S("v"))), "LastN(3, combine=ToList())", "LastN(3, combine=Sum(of='v'))"),
    "values": (step(), step(C("v")), "Count()", "Count(of='v')"),
    "set": (step(mp.CountDistinct("v")), step(mp.windows.ToSet("v")), "CountDistinct(of='v')", "ToSet(of='v')"),
    "latest": (step(mp.windows.Last("v")), step(mp.windows.Last("v", retractable=True)), "Last(of='v')", "Last(of='v', retractable=True)"),
    "greatest": (step(mp.ArgMax("w", by="v")), step(mp.windows.ArgMin("w", by="v")), "ArgMax('w', 'v')", "ArgMin('w', 'v')"),
    "deviation": (
        step(mp.StdDev("v")), step(mp.StdDev("v", population=True)), "StdDev(of='v')", "StdDev(of='v', population=True)",
    ),
    "NaN": (step(mp.Max("v")), step(mp.Max("v", nan_is_greatest=True)), "Max(of='v')", "Max(of='v', nan_is_greatest=True)"),
    "combiner of a user": (step(Longest()), step(Longest(3)), "Longest()", "Longest(least=3)"),
    "its version": (step(LongestAgain()), step(Longest()), "LongestAgain() version 2", "Longest()"),
    "co_group": (grouped("a", "b"), grouped("a", "c"), "co_group{a: None, b: None}", "co_group{a: None, c: None}"),
    "its values": (grouped("a", "b"), grouped("a", "b", of="v"), "co_group{a: None, b: None}", "co_group{a: 'v', b: None}"),
    "top": (top(), top(combine=S("v")), "Count()", "Sum(of='v')"),
    "all elements": (all_elements(), step(), "ToList()", "Count()"),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_another_declaration_over_open_windows_is_refused(change: str) -> None:
    """The error names both; what was refused leaves no trace, so that the former code continues."""
    first, second, was, now = REFUSED[change]
    pond = Pond()
    before = pond.run(first, *range(8))

    with pytest.raises(mp.InvalidError, match="run that code until no window is open") as caught:
        pond.run(second, 9)

    assert (caught.value.details["stored"], caught.value.details["declared"]) == (was, now)
    assert load(Log(pond.objects)).version == before.version
    pond.run(first, 9, watermark=100)
    assert pond.panes()


LAMBDA = lambda value: value["v"]  # noqa: E731 - a function without a name
ALLOWED: dict[str, tuple[mp.Pipeline, mp.Pipeline, list[Any]]] = {
    "the same in other units": (step(), step(windows=mp.FixedWindows(timedelta(seconds=10), "0m")), [9]),
    "the same default": (step(), step(trigger=mp.Default(), accumulation=mp.windows.Accumulation.DISCARDING), [9]),
    "the same function": (step(S(LAMBDA)), step(S(lambda value: value["v"])), [45]),
    "retracting is incremental": (
        step(accumulation="retracting"), step(accumulation="retracting", incremental=True), [9],
    ),
    "lateness": (step(allowed_lateness="1s"), step(allowed_lateness="2s"), [9]),
    "closing": (step(), step(closing="always", emit_empty_on_time=False, asked="bundle"), [9, 0]),
    "a field more": (step({"n": C()}), step({"n": C(), "s": S("v")}), [{"n": 9, "s": 5}]),
    "a field less": (step({"n": C(), "s": S("v")}), step({"n": C()}), [{"n": 9}]),
    "co_group in another order": (grouped("a", "b"), grouped("b", "a", swap=True), [{"a": [*map(row, [*range(8), 9])], "b": []}]),
}  # fmt: skip


@pytest.mark.parametrize("change", ALLOWED)
def test_equal_and_harmless_declarations_continue_open_windows(change: str) -> None:
    first, second, panes = ALLOWED[change]
    pond = Pond()
    pond.run(first, *range(8))
    pond.run(second, 9, watermark=100)

    assert pond.panes() == panes


def test_field_that_comes_back_as_another_is_refused() -> None:
    """A window that nothing touched meanwhile still holds the field of the first code."""
    pond = Pond()
    pond.run(step({"n": C(), "s": S("v")}), 1)
    pond.run(step({"n": C()}))

    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step({"n": C(), "s": mp.Max("v")}), 2)


@pytest.mark.parametrize("change", ["combiner", "windows", "trigger", "several"])
def test_closed_windows_allow_any_change_back_and_forth(change: str) -> None:
    first, second, _, _ = REFUSED[change]
    pond = Pond()
    pond.run(first, 1, watermark=100)
    pond.run(second, 101, 102, watermark=200)
    pond.run(first, 201, watermark=300)

    assert len(pond.panes()) == 3


def test_drop_under_another_name_starts_anew() -> None:
    pond = Pond()
    pond.run(step(), *range(8))
    pond.run(step(S("v"), name="sums", drop=("w",)), 9, watermark=100)

    assert pond.panes() == [5]


def upgrade(windows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    assert version == 0
    return [{**window, "accumulator": window["accumulator"] * 5} for window in windows]


def test_upgrade_continues_open_windows_with_another_combiner() -> None:
    pond = Pond()
    pond.run(step(), *range(8))
    second = step(S("v"), state_version=1, upgrade_state=upgrade)
    pond.run(second, 9)
    pond.run(second, watermark=100)

    assert pond.panes() == [45]
    with pytest.raises(mp.InvalidError, match="newer code"):
        pond.run(step())


def test_offline_upgrade_converts_windows_of_keys_without_further_elements() -> None:
    pond = Pond()
    pond.run(step(), *range(8))
    second = step(S("v"), state_version=1, upgrade_state=upgrade)

    (done,) = upgrade_offline(pond.store(), second.check(), pond.clock, pond.rng)

    assert (done.computation, done.rows, done.failed) == ("w", 1, 0)
    pond.run(second, watermark=100)
    assert pond.panes() == [40]


def to_halves(windows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """Put the elements of each window into its first half."""
    halves = []
    for window in windows:
        start, end = window["window"]
        halves.append({**window, "window": [start, (start + end) // 2], "timers": {}})
    return halves


@pytest.mark.parametrize("elements", [(), (9,)])
def test_upgrade_to_other_windows_sets_their_timers(elements: tuple[int, ...]) -> None:
    """The timer of the former window, or the next element, finds no window any more; the new ones still end."""
    pond = Pond()
    pond.run(step(), *range(8))
    second = step(windows=mp.FixedWindows("5s"), state_version=1, upgrade_state=to_halves)
    pond.run(second, *elements)
    pond.run(second, watermark=100)
    pond.run(second, watermark=101)

    assert pond.panes() == [8, 1][: 1 + len(elements)]


@pytest.mark.parametrize("wrong", [None, 3, [{}], [{"window": [2, 1]}], [{"window": [1, 2], "size": 3}]])
def test_upgrade_that_returns_no_windows_fails_the_record(wrong: Any) -> None:
    pond = Pond()
    pond.run(step(), 1)
    second = step(S("v"), state_version=1, upgrade_state=lambda *_: wrong)

    with pytest.raises(mp.InvalidError, match=r"windows in the form that it got|non-empty windows"):
        pond.run(second, *[9] * 200)


@pytest.mark.parametrize("given", [{"state_version": 1}, {"upgrade_state": upgrade}])
def test_version_and_upgrade_are_given_together(given: dict[str, Any]) -> None:
    with pytest.raises(mp.InvalidError, match="must be given together"):
        step(**given)


def test_step_replaced_by_own_code_is_refused() -> None:
    pond = Pond()
    pond.run(step(), 1)
    pipeline, stream = source()
    stream.apply(Keep(), name="w").apply(Keep(), name="out")

    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(pipeline, 2)


def test_own_code_replaced_by_a_step_is_refused() -> None:
    pond = Pond()
    pipeline, stream = source()
    stream.window(mp.FixedWindows("10s")).combine(mp.Count(), name="n").apply(Keep(), name="w")
    pond.run(pipeline, 1, watermark=100)
    pipeline, stream = source(drop=("n",))
    stream.window(mp.FixedWindows("10s")).combine(mp.Count(), name="w").apply(Keep(), name="out")

    with pytest.raises(mp.InvalidError, match=r"states are those of other code.*stored=`code of your own`"):
        pond.run(pipeline, 101)


def test_renamed_step_keeps_its_fingerprint() -> None:
    pond = Pond()
    pond.run(step(), *range(8))

    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step(S("v"), name="sums", renamed_from="w"))
    pond.run(step(name="counts", renamed_from="w"))
    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step(S("v"), name="counts", renamed_from="w"))
    pond.run(step(name="counts"), 9, watermark=100)
    assert pond.panes() == [9]


def test_changed_step_is_refused_while_the_pipeline_runs() -> None:
    pond = Pond()
    with pond.start(step()) as run:
        run.inject("a", [{"k": "x", "t": SECOND}])
        run.run_until_quiet()
        with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
            run.update(step(S("v")))
        run.advance_watermark("a", 100 * SECOND)
        run.run_until_quiet()
        run.update(step(S("v")))
        run.inject("a", [{"k": "x", "t": 101 * SECOND, "v": 5}])
        run.run_until_quiet()
    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step())


def word(snapshot: Snapshot) -> str | None:
    return recorded_word(snapshot.txns, AppId.FINGERPRINT, "w")


def test_store_without_a_fingerprint_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pond = Pond()
    with monkeypatch.context() as patch:
        patch.setattr("millpond.executor.ownership.evolution._fingerprint_record", lambda *_: {})
        assert word(pond.run(step(), *range(8))) is None

    after = pond.run(step(S("v")))

    assert json.loads(word(after) or "") == {
        "windows": "FixedWindows(10s)",
        "trigger": "Default()",
        "accumulation": "discarding",
        "timestamp_combiner": "OUTPUT_AT_EOW",
        "combine": "Sum(of='v')",
    }
    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step())


def test_rewind_reverts_the_fingerprint() -> None:
    pond = Pond()
    before = pond.run(step(), *range(8))
    pond.run(step(), watermark=100)
    pond.run(step(S("v")), 101)
    leases = MemoryLeases(pond.registry, pond.clock, writer_id="r")
    repair_store(
        pond.objects, plan_rewind(pond.objects, before.version, None), leases, pond.clock, SeededRng(9)
    )

    with pytest.raises(mp.InvalidError, match="open windows are those of other code"):
        pond.run(step(S("v")))
    assert word(pond.run(step(), 9, watermark=100)) == word(before)


def test_description_names_what_is_declared() -> None:
    declared: list[object] = [
        mp.SlidingWindows("1h", "60s"), mp.CalendarWindows.weeks(zone="Europe/Oslo"), mp.Quantiles("v", at=(0.5, 0.9)),
        mp.AtPeriod(0, "90s", "stream_time"), mp.AfterProcessingTime("1m"), mp.windows.WatermarkPercentile(90.0),
        mp.AfterEach(mp.AfterCount(1), mp.windows.OrFinally(mp.Default(), mp.AfterSignal("go"))), S(len), {1.0, 2}, Ticks("10s"),
        mp.FixedWindows(timedelta(seconds=10)), mp.FixedWindows("10000ms", 0),
    ]  # fmt: skip
    assert [described(one) for one in declared] == [
        "SlidingWindows(1h, 1m)", "CalendarWindows('weeks', zone='Europe/Oslo')", "Quantiles(of='v', at=[0.5, 0.9])",
        "AtPeriod(0, 1m30s, domain='event')", "AfterProcessingTime(delay=1m)", "WatermarkPercentile(percentile=90)",
        "AfterEach(AfterCount(1), OrFinally(Default(), AfterSignal('go')))", "Sum(of=len)", "[1, 2]", "Ticks(10s)",
        "FixedWindows(10s)", "FixedWindows(10s)",
    ]  # fmt: skip
