"""Composites: functions from streams to streams."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Split(mp.Computation):
    """A split into even and odd numbers, whose streams have the composite's names."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.produce("odd" if record.value["number"] % 2 else "even", record.value)


class Tally(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + 1)


class Halve(mp.Computation):
    """The odd part of a number, computed in a cycle."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        number = record.value["number"]
        stream = "done" if number % 2 else "again"
        context.produce(stream, {"number": number if number % 2 else number // 2})


def parted(numbers: mp.DataflowStream) -> tuple[mp.DataflowStream, mp.DataflowStream]:
    """Count even and odd numbers."""
    streams = numbers.pipeline.add(
        Split(), name="split", subscribes={numbers.name: None}, produces=["even", "odd"]
    )
    even, odd = streams["even"], streams["odd"]
    even.apply(Tally(), name="evens")
    odd.apply(Tally(), name="odds")
    return even, odd


def halved(numbers: mp.DataflowStream) -> mp.DataflowStream:
    """Emit the odd part of each number, in a cycle."""
    again = numbers.pipeline.stream("again")
    produced = numbers.pipeline.add(
        Halve(),
        name="halve",
        subscribes={numbers.name: None, again.name: None},
        produces=["again", "done"],
    )
    return produced["done"]


def _numbers(pipeline: mp.Pipeline) -> mp.DataflowStream:
    return pipeline.inject("numbers", key="key", at="at", at_unit="us")


_ROWS = [{"key": "k", "at": number, "number": number} for number in range(1, 8)]


def _run(*pipelines: mp.Pipeline) -> mp.Store:
    """Run pipelines in turn on one store, the last one with all rows."""
    clock = ManualClock()
    store = mp.Store.in_memory(clock=clock, rng=SeededRng(1))
    for number, pipeline in enumerate(pipelines):
        runner = mp.LocalRunner(store, clock=clock, rng=SeededRng(2 + number), progress=False)
        rows = _ROWS if pipeline is pipelines[-1] else _ROWS[:4]
        runner.run(pipeline, {"numbers": rows}, finish=False)
    return store


def _states(store: mp.Store, *names: str) -> list[Any]:
    return [store.rows_view(name).to_arrow().to_pylist()[0]["state"] for name in names]


def test_names_of_steps_begin_with_their_composites() -> None:
    pipeline = mp.Pipeline("p")

    def both(numbers: mp.DataflowStream) -> mp.DataflowStream:
        even, _ = numbers.transform("parts", parted)
        return even.map(lambda value: value, name="same")

    same = pipeline.transform("outer", both, _numbers(pipeline))
    topology = pipeline.check()

    parts = ["outer.parts.split", "outer.parts.evens", "outer.parts.odds"]
    assert same.name == "outer.same"
    assert list(topology.computations) == [*parts, "outer.same"]
    assert topology.computations[parts[0]].produces == ("outer.parts.even", "outer.parts.odd")
    assert topology.composites == {"outer": (*parts, "outer.same"), "outer.parts": tuple(parts)}


def test_composite_applied_twice_has_separate_steps() -> None:
    """SQL and totals show both sets of steps."""
    pipeline = mp.Pipeline("p")
    numbers = _numbers(pipeline)
    _, odd = numbers.transform("first", parted)
    odd.transform("second", parted)
    store = _run(pipeline)

    assert _states(store, "first.evens", "first.odds", "second.odds") == ["3", "4", "4"]
    assert store.sql().sql('select state from "second.odds"').fetchall() == [("4",)]
    assert store.rows_view("second.evens").to_arrow().num_rows == 0


def test_composite_may_have_a_cycle_and_arguments() -> None:
    """Within a composite ``pipeline.stream`` names its own stream."""
    pipeline, shown = mp.Pipeline("p"), []

    def with_factor(numbers: mp.DataflowStream, factor: int, *, name: str) -> mp.DataflowStream:
        done = numbers.transform("halving", halved)
        shown.append((factor, name))
        return done.map(lambda value: value["number"] * factor, name=name)

    tripled = _numbers(pipeline).transform("tripling", with_factor, 3, name="tripled")
    tripled.apply(Sum(), name="sum")
    store = _run(pipeline)

    assert shown == [(3, "tripled")]
    assert _states(store, "sum") == [str(3 * (1 + 1 + 3 + 1 + 5 + 3 + 7))]


class Sum(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(context.state.get(0) + record.value)


def test_windows_and_joins_work_within_a_composite() -> None:
    pipeline = mp.Pipeline("p")

    def joined(numbers: mp.DataflowStream) -> mp.DataflowStream:
        even, odd = numbers.transform("parts", parted)
        strategy = mp.windows.WindowingStrategy(window_fn=mp.FixedWindows("100us"))
        both = mp.co_group({"even": even, "odd": odd}, strategy, name="both")
        sizes = both.map(lambda value: [len(value["even"]), len(value["odd"])], name="sizes")
        return sizes.window(mp.GlobalWindows()).combine(most=mp.Max(), name="most")

    most = _numbers(pipeline).transform("joining", joined)
    most.map(lambda value: value["most"], name="plain").apply(Last(), name="last")
    clock = ManualClock()
    store = mp.Store.in_memory(clock=clock, rng=SeededRng(1))
    mp.LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).run(pipeline, {"numbers": _ROWS})

    assert most.name == "joining.most"
    assert _states(store, "last") == ["[3,4]"]


class Last(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(record.value["value"])


def test_step_moves_into_a_composite_with_its_rows() -> None:
    """``renamed_from`` takes the full former name."""
    before, after = mp.Pipeline("p"), mp.Pipeline("p")
    _numbers(before).apply(Tally(), name="tally")
    _numbers(after).transform(
        "inner", lambda numbers: numbers.apply(Tally(), name="tally", renamed_from="tally")
    )
    store = _run(before, after)

    assert _states(store, "inner.tally") == ["7"]


def test_dead_letters_within_a_composite_come_from_the_whole_pipeline() -> None:
    """The name of the dead letters' stream gets no prefix."""
    pipeline = mp.Pipeline("p")
    _numbers(pipeline).apply(Tally(), name="tally")
    pipeline.transform(
        "repair", lambda: pipeline.stream(mp.DEAD_LETTERS).apply(Tally(), name="letters", key="key")
    )

    (subscription,) = pipeline.check().computations["repair.letters"].subscriptions
    assert subscription.stream == mp.DEAD_LETTERS


def test_error_within_a_composite_names_the_full_step() -> None:
    """A declaration after the error is outside of the composite again."""
    pipeline = mp.Pipeline("p")
    numbers = _numbers(pipeline)
    with pytest.raises(mp.InvalidError, match=r"outer\.tally"):
        numbers.transform("outer", lambda stream: stream.apply(Tally(), name="tally", retries=-1))

    assert numbers.apply(Tally(), name="tally").name == "tally"


def _twice(pipeline: mp.Pipeline) -> None:
    for _ in range(2):
        pipeline.transform("one", lambda: None)


def _after_a_step(pipeline: mp.Pipeline) -> None:
    _numbers(pipeline).apply(Tally(), name="one")
    pipeline.transform("one", lambda: None)


def _before_a_step(pipeline: mp.Pipeline) -> None:
    pipeline.transform("one", lambda: None)
    _numbers(pipeline).apply(Tally(), name="one")


@pytest.mark.parametrize(
    "declare",
    [
        _twice,
        _after_a_step,
        _before_a_step,
        lambda pipeline: pipeline.transform("a/b", lambda: None),
        lambda pipeline: pipeline.transform("", lambda: None),
        lambda pipeline: pipeline.transform("one", "no function"),
        lambda pipeline: pipeline.transform("x" * 60, lambda: pipeline.transform("y" * 60, lambda: None)),
    ],
)
def test_malformed_composite_is_refused(declare: Any) -> None:
    with pytest.raises(mp.InvalidError):
        declare(mp.Pipeline("p"))


def test_feedback_and_union_within_a_composite_get_its_prefix() -> None:
    pipeline = mp.Pipeline("p")

    def around(numbers: mp.DataflowStream) -> mp.DataflowStream:
        produced = numbers.pipeline.add(
            Halve(),
            name="halve",
            subscribes={numbers.name: None, numbers.pipeline.stream("again").name: None},
            produces=["again", "done"],
            feedback=["again"],
        )
        return produced["done"].union(numbers, name="all")

    together = _numbers(pipeline).transform("halving", around)
    together.apply(Tally(), name="tally")

    (again,) = [one for one in pipeline.check().computations["halving.halve"].subscriptions if one.feedback]
    assert (together.name, again.stream) == ("halving.all", "halving.again")
    assert _states(_run(pipeline), "tally") == ["14"]
