"""Options of an embedded computation."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.pipeline.nodes import DEAD_LETTERS, ComputationOptions
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import SparkRunnerOptions
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.foreach_batch import INPUT, ForeachBatchOptions, foreach_batch
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.statestore.errors import InvalidError


def embedded(tmp_path: Path, **options: Any) -> Topology:
    arguments: dict[str, Any] = {"key": "k", "at": "t", "name": "c", **options}
    return foreach_batch(tmp_path / "pond", Computation(), **arguments)._embedded.pipeline.check()


def test_foreach_batch_has_the_options_of_stream_computation_and_runner() -> None:
    own = set(signature(foreach_batch).parameters) | {"self", "name"}
    of_stream = set(signature(EnginePipeline.inject).parameters)
    of_computation = set(ComputationOptions.__annotations__)
    wanted = of_stream | of_computation | set(SparkRunnerOptions.__annotations__)

    assert wanted - own == set(ForeachBatchOptions.__annotations__)


def test_options_reach_the_stream_and_the_computation(tmp_path: Path) -> None:
    topology = embedded(
        tmp_path,
        produces=["spikes", "calm"],
        on_error="stop",
        retries=0,
        at_unit="ms",
        idle_after="5s",
        dead_letter_limit=DeadLetterLimit(share=0.5),
    )
    node, injector = topology.computations["c"], topology.injectors[INPUT]

    assert (node.produces, node.on_error, node.retries) == (("spikes", "calm"), "stop", 0)
    assert (injector.times.unit, injector.idle_after_us) == ("ms", 5_000_000)


def test_sink_may_map_streams_to_sinks(tmp_path: Path) -> None:
    """A single sink belongs to the first stream."""
    sinks = {
        name: DeltaSink(str(tmp_path / name), pa.schema([("key", pa.string())])) for name in ("a", "b", "c")
    }
    one = embedded(tmp_path, sink=sinks["c"])
    several = embedded(
        tmp_path, produces=["a", "b"], sink={"a": sinks["a"], "b": sinks["b"], DEAD_LETTERS: sinks["c"]}
    )

    assert {name: node.stream for name, node in one.sinks.items()} == {"c": "c"}
    assert {name: node.stream for name, node in several.sinks.items()} == {
        "c": "a",
        "c.b": "b",
        "c.dead_letters": "dead_letters",
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_eror": "stop"}, "no such option; did you mean 'on_error'\\? option=`on_eror`"),
        ({"on_error": "ignore"}, "on_error must be dead_letter or stop"),
        ({"sink": {"elsewhere": DeltaSink("x")}}, "unknown stream.*`elsewhere`"),
        ({"checkpoint_location": "s3://bucket/checkpoints"}, "the query has its own checkpoint"),
        ({"dead_letter_limit": 0.5}, "dead_letter_limit must be a DeadLetterLimit instance or None"),
    ],
)
def test_mistakes_are_refused_before_the_query_starts(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidError, match=words):
        embedded(tmp_path, **options)


@pytest.mark.parametrize("limit", [{"share": 1.5}, {"share": -0.1}, {"share": True}, {"records_min": 0}])
def test_invalid_dead_letter_limits_are_refused(limit: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=r"share of a dead letter limit|records_min"):
        DeadLetterLimit(**limit)
