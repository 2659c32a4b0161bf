"""
The public pipeline: the engine's pipeline with streams that have windowing methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from millpond.dataflow.step.element_wise import PaneKey
from millpond.dataflow.step.windowed_computation import WindowedComputation
from millpond.dataflow.stream import DataflowStream
from millpond.executor.pipeline.nodes import Subscription
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.signals import with_signals
from millpond.executor.pipeline.topology import Topology

__all__ = ["Pipeline"]


class Pipeline(EnginePipeline[DataflowStream]):
    """
    A graph of injectors, computations, windowed steps and sinks, connected by named streams.

    Args:
        name: the pipeline's name, under which the store keeps the pipeline's input positions.

    Example:
        >>> pipeline = Pipeline("zeitgeist")
        >>> queries = pipeline.inject("queries", key="query", at="time")
        >>> queries.window(FixedWindows("1s")).combine(Count(), name="counts")
        Stream('counts' of 'zeitgeist')
    """

    stream_class = DataflowStream

    def check(self, inputs: Iterable[str] | None = None) -> Topology:
        """
        Validate everything that can be known before a run, and freeze the topology.

        See the engine's ``Pipeline.check``. A stream that only an injector feeds has no panes: a key given
        as a string is resolved as a column, not row by row, and a function sees the row as it is.
        """
        topology = EnginePipeline.check(self, inputs)
        computations = {
            name: replace(
                node,
                subscriptions=tuple(_of_rows(topology, subscription) for subscription in node.subscriptions),
            )
            for name, node in topology.computations.items()
        }
        waiting = {
            name: node.computation.signals
            for name, node in computations.items()
            if isinstance(node.computation, WindowedComputation) and node.computation.signals
        }
        return with_signals(replace(topology, computations=computations), waiting)


def _of_rows(topology: Topology, subscription: Subscription) -> Subscription:
    key, stream = subscription.key, subscription.stream
    if stream in topology.injectors and isinstance(key, PaneKey):
        return replace(subscription, key=key.extractor)
    return subscription
