"""Which productions are delivered within their superstep, and in which order computations run then."""

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
    """``in`` → ``c0`` → ``c1`` → …, each with its mode; ``c0`` produces ``s0``, and so on."""
    pipeline = EnginePipeline("p")
    stream = pipeline.inject("in", key="k", at="t")
    for number, mode in enumerate(modes):
        stream = stream.apply(Computation(), name=f"c{number}", produces=f"s{number}", productions=mode)
    return pipeline


def test_only_weak_productions_with_a_consumer_are_fused():
    """Strong streams and streams without consumers wait for their checkpoint."""
    topology = chain("weak", "strong", "weak", "weak").check()

    assert topology.fused == {"c0": {"s0"}, "c2": {"s2"}}


def test_a_cycle_of_weak_productions_is_not_fused():
    """A stream by which records could come back to their producer in one superstep waits; others do not."""
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


def test_a_consumer_of_outside_records_is_not_fused():
    """A stream waits if one of its consumers takes outside records as well."""
    pipeline = chain("weak")
    pipeline.add(Computation(), name="join", subscribes={"s0": None, "in": None})

    assert pipeline.check().fused == {}


def test_consumers_come_after_those_whose_weak_productions_they_take():
    """The order and the waves follow the fused streams; who has nothing to do is in no wave."""
    pipeline = chain("weak", "weak", "strong")
    pipeline.add(Computation(), name="a", subscribes={"s1": None, "s2": None})
    topology = pipeline.check()
    order = topology.fused_order

    assert order.index("c0") < order.index("c1") < order.index("a")
    assert [set(wave) for wave in topology.waves({"c0"})] == [{"c0"}, {"c1"}, {"a", "c2"}]
    assert [set(wave) for wave in topology.waves({"c2", "a"})] == [{"a", "c2"}]
    assert topology.waves(()) == ()


def test_rows_keep_weak_productions_for_sinks_only(tmp_path):
    """Of fused streams those are kept that flow into a sink, or all where tasks hand them on."""
    pipeline = chain("weak", "weak", "strong")
    pipeline.stream("s1").sink("out", DeltaSink(str(tmp_path)))
    topology = pipeline.check()

    assert topology.weak_streams("c0").kept == frozenset()
    assert topology.weak_streams("c1").kept == {"s1"}
    assert topology.weak_streams("c0", keep_all=True).kept == {"s0"}
    assert topology.weak_streams("c2").fused == frozenset()


def test_an_address_names_who_waits():
    """One consumer, or the sinks, read what is kept for them; no stream's own name is an address."""
    pipeline = chain("weak", "strong", "strong")
    pipeline.add(Computation(), name="other", subscribes={"s0": None})
    topology = pipeline.check()

    assert topology.readers_of([addressed("s0", "c1")]) == {"c1"}
    assert topology.readers_of(["s0"]) == {"c1", "other"}
    assert topology.readers_of([addressed("s0")]) == frozenset()
    assert is_addressed(addressed("s0"))
    assert not is_addressed("s0")


def test_another_mode_is_refused():
    """Productions are strong or weak."""
    with pytest.raises(InvalidError, match="strong or weak"):
        chain("weakly")


@given(case=cases(steps_max=1, rows_max=1))
@settings(max_examples=200, deadline=None)
def test_a_superstep_has_a_bounded_number_of_waves(case: Case) -> None:
    """Each computation has one wave at most, after all that feed it weakly, so a superstep has no more waves than those."""
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


def test_a_renamed_computation_takes_its_streams_along():
    """Its own stream and its place as a consumer have its new name; a stream that is there under its name stays."""
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
