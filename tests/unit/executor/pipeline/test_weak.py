"""Weak productions and the order of computations in a superstep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.nodes import addressed, is_addressed
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import InvalidError
from tests.fixtures.pipelines import Case, cases


def chain(*modes: str) -> EnginePipeline:
    """Chain ``in`` → ``c0`` → ``c1`` → …, each with its mode; ``c0`` produces ``s0``, and so on."""
    pipeline = EnginePipeline("p")
    stream = pipeline.inject("in", key="k", at="t")
    for number, mode in enumerate(modes):
        stream = stream.apply(Computation(), name=f"c{number}", produces=f"s{number}", productions=mode)
    return pipeline


def test_only_weak_productions_with_a_consumer_are_fused():
    topology = chain("weak", "strong", "weak", "weak").check()

    assert topology.fused == {"c0": {"s0"}, "c2": {"s2"}}


def test_weak_productions_in_a_cycle_are_not_fused():
    """A record could otherwise return to its producer within the superstep."""
    pipeline = chain("weak", "weak", "weak")
    pipeline.add(Computation(), name="back", subscribes={"s2": None}, produces=("again",), productions="weak")
    pipeline.add(Computation(), name="c9", subscribes={"again": None, "s0": None}, produces=("s1b",))

    assert pipeline.check().fused == {"c0": {"s0"}, "c1": {"s1"}, "c2": {"s2"}, "back": {"again"}}

    looped = chain("weak", "weak")
    looped.add(
        Computation(),
        name="loop",
        subscribes={"s1": None, "round": None},
        produces=("round",),
        productions="weak",
    )

    assert looped.check().fused == {"c0": {"s0"}, "c1": {"s1"}}


def test_stream_to_a_consumer_of_outside_records_is_not_fused():
    pipeline = chain("weak")
    pipeline.add(Computation(), name="join", subscribes={"s0": None, "in": None})

    assert pipeline.check().fused == {}


def test_consumers_run_after_their_weak_producers():
    """A computation without work is in no wave."""
    pipeline = chain("weak", "weak", "strong")
    pipeline.add(Computation(), name="a", subscribes={"s1": None, "s2": None})
    topology = pipeline.check()
    order = topology.fused_order

    assert order.index("c0") < order.index("c1") < order.index("a")
    assert [set(wave) for wave in topology.waves({"c0"})] == [{"c0"}, {"c1"}, {"a", "c2"}]
    assert [set(wave) for wave in topology.waves({"c2", "a"})] == [{"a", "c2"}]
    assert topology.waves(()) == ()


def test_rows_keep_weak_productions_for_sinks_only(tmp_path):
    """On Spark, where tasks hand them on, rows keep all."""
    pipeline = chain("weak", "weak", "strong")
    pipeline.stream("s1").sink("out", DeltaSink(str(tmp_path)))
    topology = pipeline.check()

    assert topology.weak_streams("c0").kept == frozenset()
    assert topology.weak_streams("c1").kept == {"s1"}
    assert topology.weak_streams("c0", keep_all=True).kept == {"s0"}
    assert topology.weak_streams("c2").fused == frozenset()


def test_addressed_stream_names_its_reader():
    """The reader is one consumer or the sinks, and no stream's own name is an address."""
    pipeline = chain("weak", "strong", "strong")
    pipeline.add(Computation(), name="other", subscribes={"s0": None})
    topology = pipeline.check()

    assert topology.readers_of([addressed("s0", "c1")]) == {"c1"}
    assert topology.readers_of(["s0"]) == {"c1", "other"}
    assert topology.readers_of([addressed("s0")]) == frozenset()
    assert is_addressed(addressed("s0"))
    assert not is_addressed("s0")


def test_unknown_mode_of_productions_is_refused():
    with pytest.raises(InvalidError, match="strong or weak"):
        chain("weakly")


@given(case=cases(steps_max=1, rows_max=1))
@settings(max_examples=200, deadline=None)
def test_computation_is_in_one_wave_after_all_its_feeders(case: Case) -> None:
    """This bounds the waves of a superstep by the number of computations."""
    topology = case.pipeline().check()

    for planned in (set(topology.computations), {"c0"}, set[str]()):
        waves = topology.waves(planned)
        ran = [name for wave in waves for name in wave]
        assert len(set(ran)) == len(ran) <= len(topology.computations)
        for number, wave in enumerate(waves):
            before = {name for earlier in waves[:number] for name in earlier}
            for name in wave:
                streams = {one.stream for one in topology.computations[name].subscriptions}
                feeders = {feeder for feeder in ran if streams & topology.fused.get(feeder, frozenset())}
                assert feeders <= before


def test_renamed_computation_keeps_its_streams():
    """A stream that still exists under the former name is not renamed."""
    pipeline = EnginePipeline("p")
    first = pipeline.inject("in", key="k", at="t").apply(Computation(), name="new", renamed_from="old")
    first.apply(Computation(), name="total", renamed_from="sum", produces=("sum", "sums"))
    topology = pipeline.check()

    stored = ("old", "old@sum", "old@", "sums@old", "sum", "in", "other@total")
    assert [topology.current_stream(stream) for stream in stored] == [
        "new",
        "new@total",
        "new@",
        "sums@new",
        "sum",
        "in",
        "other@total",
    ]
