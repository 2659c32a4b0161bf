"""Declaration and checks of pipelines."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.nodes import DEAD_LETTERS, is_addressed
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import Sink
from millpond.executor.time.watermark_policies import BoundedDisorder, IngressTime, WatermarkPolicy
from millpond.statestore.errors import InvalidError


class Pass(Computation):
    def process_record(self, context, record):
        pass


@dataclass(frozen=True)
class Place:
    """A sink that only has a place."""

    identity: str

    def open(self, store_id, pipeline, name):
        raise NotImplementedError


def a_pipeline() -> EnginePipeline:
    pipeline = EnginePipeline("p")
    pipeline.inject("queries", key="query", at="time")
    return pipeline


def refused(pipeline: EnginePipeline, *texts: str, inputs=None) -> None:
    with pytest.raises(InvalidError) as caught:
        pipeline.check(inputs)
    for text in texts:
        assert text in str(caught.value)


class TestTopology:
    def test_topology_finds_all_parts_of_a_chain_by_name(self):
        pipeline = EnginePipeline("zeitgeist")
        queries = pipeline.inject(
            "queries", key="query", at="time", id="id", watermark=BoundedDisorder("30s")
        )
        counts = queries.apply(Pass(), name="counter", key="city", retries=5, intervals=4)
        counts.apply(Pass(), name="detector").sink("spikes", Place("out/spikes"))

        topology = pipeline.check(inputs={"queries"})

        assert topology.name == "zeitgeist"
        assert topology.injector("queries").id == "id"
        assert topology.computation("counter").subscription("queries").key == "city"
        assert (topology.computation("counter").retries, topology.computation("counter").intervals) == (5, 4)
        assert topology.computation("counter").subscription("elsewhere") is None
        assert [c.computation.name for c in topology.consumers_of("counter")] == ["detector"]
        assert [node.name for node in topology.producers_of("detector")] == ["detector"]
        assert [node.name for node in topology.sinks_of("detector")] == ["spikes"]
        plain = {stream for stream in topology.wanted_streams if not is_addressed(stream)}
        assert plain == {"queries", "counter", "detector"}

    def test_consumers_of_one_stream_have_their_own_extractors(self):
        pipeline = a_pipeline()
        queries = pipeline.stream("queries")
        queries.apply(Pass(), name="by_city", key="city")
        queries.apply(Pass(), name="by_length", key=lambda value: str(len(value["query"])))
        queries.apply(Pass(), name="by_query")

        consumers = pipeline.check().consumers_of("queries")

        assert [c.computation.name for c in consumers] == ["by_city", "by_length", "by_query"]
        assert consumers[0].subscription.key == "city"
        assert consumers[2].subscription.key is None

    def test_several_computations_may_produce_to_one_stream(self):
        pipeline = a_pipeline()
        for name in ("a", "b"):
            pipeline.stream("queries").apply(Pass(), name=name, produces="merged")

        assert [node.name for node in pipeline.check().producers_of("merged")] == ["a", "b"]

    def test_cycles_are_allowed(self):
        """A stream may be named before it exists."""
        pipeline = a_pipeline()
        made = pipeline.add(
            Pass(), name="loop", subscribes={"queries": None, "again": None}, produces=["again", "out"]
        )
        made["out"].apply(Pass(), name="after")

        assert set(pipeline.check().computations) == {"loop", "after"}

    def test_dead_letters_may_be_consumed_and_kept(self):
        """Every computation produces to the reserved stream."""
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Pass(), name="counter")
        dead = pipeline.stream(DEAD_LETTERS)
        dead.apply(Pass(), name="mourner")
        dead.sink(DEAD_LETTERS, Place("out/dead"))

        topology = pipeline.check()

        assert [node.name for node in topology.producers_of(DEAD_LETTERS)] == ["counter", "mourner"]

    def test_apply_names_its_output_after_the_computation_by_default(self):
        """Of several outputs the first is returned."""
        queries = a_pipeline().stream("queries")

        assert queries.apply(Pass(), name="a").name == "a"
        assert queries.apply(Pass(), name="b", produces="x").name == "x"
        assert queries.apply(Pass(), name="c", produces=["y", "z"]).name == "y"
        with pytest.raises(InvalidError, match="computation=`d`"):
            queries.apply(Pass(), name="d", produces=[])

    def test_topology_survives_pickling(self):
        """Tasks on other machines need its nodes."""
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Pass(), name="counter")

        copy = pickle.loads(pickle.dumps(pipeline.check()))

        assert list(copy.computations) == ["counter"]
        assert len(copy.consumers_of("queries")) == 1

    def test_unknown_computation_or_injector_is_named(self):
        topology = a_pipeline().check()

        with pytest.raises(InvalidError, match="computation=`missing`"):
            topology.computation("missing")
        with pytest.raises(InvalidError, match="stream=`nowhere`"):
            topology.injector("nowhere")


class TestDeclarations:
    @pytest.mark.parametrize("name", ["", "a b", "a/b", "1st", "ø", "x" * 101, "-a", None, 5, DEAD_LETTERS])
    def test_invalid_names_are_refused_everywhere(self, name):
        """A name must be valid as a table, a folder and a ZooKeeper node."""
        pipeline = a_pipeline()
        with pytest.raises(InvalidError, match="name"):
            EnginePipeline(name)
        with pytest.raises(InvalidError, match="name"):
            pipeline.inject(name, key="k", at="t")
        with pytest.raises(InvalidError, match="name"):
            pipeline.add(Pass(), name=name, subscribes={"queries": None})
        with pytest.raises(InvalidError, match="name"):
            pipeline.add(Pass(), name="fine", subscribes={"queries": None}, produces=[name])

    def test_members_of_a_protocol_that_are_left_out_are_refused(self):
        pipeline = EnginePipeline("p")
        with pytest.raises(
            InvalidError, match="watermark must define start: that of WatermarkPolicy is empty"
        ):
            pipeline.inject("a", key="k", at="t", watermark=type("Mine", (WatermarkPolicy,), {})())
        queries = pipeline.inject("queries", key="k", at="t")
        with pytest.raises(InvalidError, match="sink must define open: that of Sink is empty"):
            queries.sink("s", type("Mine", (Sink,), {"identity": "x"})())

    @pytest.mark.parametrize("name", ["", "a b", None])
    def test_invalid_names_of_sinks_and_references_are_refused(self, name):
        pipeline = a_pipeline()
        with pytest.raises(InvalidError, match="sink's name"):
            pipeline.stream("queries").sink(name, Place("x"))
        with pytest.raises(InvalidError, match="stream's name"):
            pipeline.stream(name)
        with pytest.raises(InvalidError, match="stream's name"):
            pipeline.add(Pass(), name="a", subscribes={name: None})

    def test_duplicate_names_are_refused(self):
        pipeline = a_pipeline()
        queries = pipeline.stream("queries")
        queries.apply(Pass(), name="a")
        queries.sink("s", Place("x"))

        with pytest.raises(InvalidError, match="computation=`a`"):
            queries.apply(Pass(), name="a")
        with pytest.raises(InvalidError, match="stream=`queries`"):
            pipeline.inject("queries", key="k", at="t")
        with pytest.raises(InvalidError, match="sink=`s`"):
            queries.sink("s", Place("y"))
        with pytest.raises(InvalidError, match="computation=`b`"):
            pipeline.add(Pass(), name="b", subscribes={"queries": None}, produces=["x", "x"])

    @pytest.mark.parametrize("computation", [Pass, object(), None, lambda context, record: None])
    def test_value_that_is_not_a_computation_is_refused(self, computation):
        with pytest.raises(InvalidError, match="computation=`counter`"):
            a_pipeline().stream("queries").apply(computation, name="counter")

    @pytest.mark.parametrize("key", [5, "", [], ["city", None]])
    def test_key_extractor_of_the_wrong_type_is_refused(self, key):
        with pytest.raises(InvalidError, match="computation=`counter` stream=`queries`"):
            a_pipeline().stream("queries").apply(Pass(), name="counter", key=key)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"key": None, "at": "t"},
            {"key": "", "at": "t"},
            {"key": "k", "at": 5},
            {"key": "k", "at": "t", "id": 5},
            {"key": "k", "at": "t", "watermark": "30s"},
            {"key": "k", "at": "t", "watermark": BoundedDisorder},
        ],
    )
    def test_injector_with_invalid_arguments_is_refused(self, arguments):
        with pytest.raises(InvalidError, match="stream=`s`"):
            EnginePipeline("p").inject("s", **arguments)

    @pytest.mark.parametrize(
        "arguments",
        [{"watermark": BoundedDisorder("1s")}, {"idle_after": "1s"}, {"skew_limit": "1s"}],
        ids=lambda arguments: next(iter(arguments)),
    )
    def test_ingress_time_excludes_other_watermark_options(self, arguments):
        with pytest.raises(InvalidError, match="has its own watermark"):
            EnginePipeline("p").inject("s", key="k", at=IngressTime(), **arguments)

    @pytest.mark.parametrize(
        "options",
        [
            {"retries": -1},
            {"retries": True},
            {"intervals": 0},
            {"intervals": 1.5},
            {"on_error": "ignore"},
            {"exactly_once": "yes"},
            {"colour": "red"},
        ],
    )
    def test_invalid_and_unknown_options_are_refused(self, options):
        with pytest.raises(InvalidError, match="computation=`counter`"):
            a_pipeline().stream("queries").apply(Pass(), name="counter", **options)

    @pytest.mark.parametrize("subscribes", [{}, ["queries"], "queries"])
    def test_subscribes_must_be_a_non_empty_mapping(self, subscribes):
        with pytest.raises(InvalidError, match="computation=`counter`"):
            a_pipeline().add(Pass(), name="counter", subscribes=subscribes)

    def test_produces_must_be_a_list(self):
        """Text would be read as a list of letters."""
        with pytest.raises(InvalidError, match="produces=`out`"):
            a_pipeline().add(Pass(), name="counter", subscribes={"queries": None}, produces="out")

    @pytest.mark.parametrize("sink", [None, "out/spikes", Place])
    def test_value_that_is_not_a_sink_is_refused(self, sink):
        with pytest.raises(InvalidError, match="sink=`s`"):
            a_pipeline().stream("queries").sink("s", sink)


class TestHooks:
    @pytest.mark.parametrize("hook", ["process_record", "process_records", "process_timer"])
    @pytest.mark.parametrize("kind", ["generator", "async", "async generator"])
    def test_hooks_whose_body_would_never_run_are_refused(self, hook, kind):
        """A generator or a coroutine would silently do nothing."""

        def generator(self, context, record):
            yield record

        async def coroutine(self, context, record):
            context.state.set(record)

        async def async_generator(self, context, record):
            yield record

        body = {"generator": generator, "async": coroutine, "async generator": async_generator}[kind]
        wrong = type("Wrong", (Computation,), {hook: body})()

        with pytest.raises(InvalidError, match=f"would never run.*computation=`c` hook=`{hook}`"):
            EnginePipeline("p").inject("in", key="k", at="t").apply(wrong, name="c")


class TestCheck:
    def test_unknown_stream_is_named_with_its_consumer_and_a_suggestion(self):
        pipeline = a_pipeline()
        pipeline.stream("querys").apply(Pass(), name="counter")

        refused(pipeline, "stream=`querys`", "computation=`counter`", "'queries'")

    def test_sink_of_an_unknown_stream_is_refused(self):
        """The sink would stay empty."""
        pipeline = a_pipeline()
        pipeline.stream("nothing").sink("s", Place("x"))

        refused(pipeline, "stream=`nothing`", "sink=`s`")

    def test_injected_stream_cannot_be_produced_to(self):
        """Its low watermark would be undefined."""
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Pass(), name="counter", produces="queries")

        refused(pipeline, "injected", "stream=`queries`", "computation=`counter`")

    def test_pipeline_without_injectors_is_refused(self):
        """Such a pipeline could never do anything."""
        refused(EnginePipeline("empty"), "no injector", "pipeline=`empty`")

    def test_cycle_without_input_is_refused(self):
        """No outside record could reach it."""
        pipeline = a_pipeline()
        pipeline.add(Pass(), name="island", subscribes={"loop": None}, produces=["loop"])

        refused(pipeline, "computation=`island`")

    def test_late_data_horizon_in_a_cycle_is_refused(self):
        """Each round would move the watermark further back."""

        class Back(Pass):
            late_data_horizon = "1s"

        pipeline = a_pipeline()
        pipeline.add(Back(), name="back", subscribes={"queries": None, "loop": None}, produces=["there"])
        pipeline.add(Pass(), name="forth", subscribes={"there": None}, produces=["loop"])

        refused(pipeline, "late_data_horizon", "computation=`back`")

    def test_invalid_late_data_horizon_is_refused_when_declared(self):
        for horizon in ("-1us", 1, "soon"):
            back = Pass()
            back.late_data_horizon = horizon
            with pytest.raises(InvalidError):
                a_pipeline().stream("queries").apply(back, name="back")

    def test_names_that_differ_by_case_only_are_refused(self):
        """SQL engines ignore case."""
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Pass(), name="counter")
        pipeline.stream("queries").apply(Pass(), name="Counter")

        refused(pipeline, "`counter`", "`Counter`")

    def test_two_sinks_cannot_share_a_place(self):
        pipeline = a_pipeline()
        counts = pipeline.stream("queries").apply(Pass(), name="counter")
        counts.sink("s1", Place("out")).sink("s2", Place("out"))

        refused(pipeline, "first=`s1`", "second=`s2`", "`out`")

    def test_sink_of_an_injected_stream_is_refused(self):
        """Outside records are durable only as effects of a computation."""
        pipeline = a_pipeline()
        pipeline.stream("queries").sink("s", Place("out"))

        refused(pipeline, "sink=`s`", "stream=`queries`")

    def test_inputs_and_injectors_must_agree(self):
        pipeline = a_pipeline()

        refused(pipeline, "no injector", "input=`clicks`", inputs=["queries", "clicks"])
        refused(pipeline, "no input", "stream=`queries`", inputs=[])


class TestPickling:
    def test_unpicklable_attribute_is_named(self):
        holder = Pass()
        holder.fine = 1
        holder.lock = threading.Lock()
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(holder, name="counter")

        refused(pipeline, "computation=`counter`", "attribute=`lock`", "type=`Pass`")

    def test_method_with_an_unpicklable_closure_is_named(self):
        """A class made in a function is pickled with the variables that its methods use."""
        lock = threading.Lock()

        class Holding(Computation):
            def process_record(self, context, record):
                lock.acquire()

        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Holding(), name="counter")

        refused(pipeline, "computation=`counter`", "attribute=`process_record`")

    def test_unpicklable_computation_is_named(self):
        """No single attribute is to blame."""

        class Stubborn(Computation):
            def __reduce__(self) -> str:
                raise TypeError("not me")

        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Stubborn(), name="counter")

        refused(pipeline, "computation=`counter`", "not me")

    def test_unpicklable_extractors_are_named(self):
        lock = threading.Lock()
        pipeline = a_pipeline()
        pipeline.stream("queries").apply(Pass(), name="counter", key=lambda value: str(lock))
        refused(pipeline, "computation=`counter`", "stream=`queries`")

        other = EnginePipeline("other")
        other.inject("s", key="k", at=lambda row: lock)
        refused(other, "stream=`s`", "argument=`at`")
