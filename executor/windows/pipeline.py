"""The public pipeline: the engine's pipeline with streams that have windowing methods."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from millpond.executor.inputs.keys import PaneKey
from millpond.executor.pipeline.nodes import ComputationNode, Subscription
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.signals import with_signals
from millpond.executor.pipeline.topology import Topology
from millpond.executor.sinks.columns import PANE_COLUMNS
from millpond.executor.sinks.sink import WINDOW_KEYS, DeltaSink
from millpond.executor.windows.combiners import CombineFields
from millpond.executor.windows.strategy import Accumulation
from millpond.executor.windows.stream import DataflowStream, OfWindow, passes_values_on
from millpond.executor.windows.windowed_computation import (
    ElementWise,
    TimestampShift,
    WindowedComputation,
)
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pathlib import Path

    from millpond.executor.spark.foreach_batch import ForeachBatch, PipelineBatchOptions
    from millpond.statestore.store import Store


class Pipeline(EnginePipeline[DataflowStream]):
    """A graph of injectors, computations, windowed steps and sinks, connected by named streams.

    The store keeps the pipeline's input positions under its name. `EnginePipeline` explains the arguments.

    Example:
        >>> pipeline = Pipeline("zeitgeist")
        >>> queries = pipeline.inject("queries", key="query", at="time")
        >>> queries.window(FixedWindows("1s")).combine(Count(), name="counts")
        Stream('counts' of 'zeitgeist')
    """

    stream_class = DataflowStream

    def check(self, inputs: Iterable[str] | None = None) -> Topology:
        """Validate the pipeline as far as possible before a run, and freeze the topology.

        See the engine's ``Pipeline.check``. A stream that only an injector feeds has no panes: a key given
        as a string is resolved as a column, not row by row, and a function receives the whole row.
        """
        topology = EnginePipeline.check(self, inputs)
        computations = {
            name: replace(
                node,
                subscriptions=tuple(_of_rows(topology, subscription) for subscription in node.subscriptions),
            )
            for name, node in topology.computations.items()
        }
        computations = {name: _with_whole_panes(topology, node) for name, node in computations.items()}
        for node in computations.values():
            _refuse_hidden_fields(topology, node)
        waiting = {
            name: node.computation.signals
            for name, node in computations.items()
            if isinstance(node.computation, WindowedComputation) and node.computation.signals
        }
        return with_signals(replace(topology, computations=computations), waiting)

    def foreach_batch(
        self, store: Store | str | Path, *, into: str, **options: Unpack[PipelineBatchOptions]
    ) -> ForeachBatch:
        """Return the ``foreachBatch`` function of your streaming query that feeds an injected stream.

        A pipeline with several injected streams needs a function and a query for each. The functions of this
        object and one store share one run: the leases, the supersteps, the options. A stream with other input,
        or none, needs no function, but a stream without event time holds back the steps after it. Close one of the
        functions when the queries have ended.

        Where `inject` names no watermark, the stream takes the delay from the query's ``withWatermark`` on the
        column ``at``. A ``withWatermark`` on another column gives no event time, which causes a warning.

        Args:
            store: path of the store, created if it does not exist, or an open store, which stays open.
            into: the injected stream.
            options: the options of `SparkRunner`, ``tick`` among them. Give each once, or the same in each call.

        Example::

            with pipeline.foreach_batch("pond", into="payments") as payments:
                frame.writeStream.foreachBatch(payments).trigger(availableNow=True).start().awaitTermination()
        """
        # Imported here, because it imports PySpark.
        from millpond.executor.spark.foreach_batch import stream_function

        return stream_function(self, store, into, options)


def _with_whole_panes(topology: Topology, node: ComputationNode) -> ComputationNode:
    """Return the step with an accumulation that suits its sinks, where none is given.

    A late pane of only the late elements would replace the whole in an upserted table.
    """
    code = node.computation
    if not isinstance(code, WindowedComputation) or code.strategy.is_accumulation_given:
        return node
    upserts, others, replaces_rows = _readers_of_panes(topology, [node.production_names[code.stream]])
    # A merged window is another row, so the rows of its sources must be retracted.
    replaces_rows &= not code.strategy.window_fn.is_merging and not isinstance(code.finish, OfWindow)
    accumulation = Accumulation.ACCUMULATING if replaces_rows else Accumulation.RETRACTING
    if not upserts or code.strategy.accumulation is accumulation:
        return node
    if others:
        raise InvalidError(
            "an upsert sink needs panes of all elements so far, and others may add up panes of the elements since the "
            'last: give accumulation="retracting" or "accumulating" to the window, or "discarding" if the last part is '
            "to replace the others",
            computation=node.name,
            sink=upserts[0],
            others=others,
        )
    whole = copy(code)
    whole.strategy = replace(code.strategy, accumulation=accumulation)
    return replace(node, computation=whole)


def _readers_of_panes(topology: Topology, produced: Iterable[str]) -> tuple[list[str], list[str], bool]:
    """Return the upsert sinks and the other readers of panes, also behind steps that pass each pane on.

    And True if a pane has the rows of the pane before it in every upsert. Otherwise rows would be left behind: of
    results that a function makes no more, of another key, or of another value of a field among the sink's keys.
    """
    streams = list(produced)
    upserts: list[str] = []
    others: list[str] = []
    replaces_rows = True
    # The list grows while it is read, by each stream at most once.
    for stream in streams:
        for sink in topology.sinks_of(stream):
            if isinstance(sink.sink, DeltaSink) and sink.sink.mode == "upsert":
                upserts.append(sink.name)
                keys = sink.sink.keys or ()
                replaces_rows &= set(WINDOW_KEYS).issuperset((keys,) if isinstance(keys, str) else keys)
            else:
                others.append(sink.name)
        for consumer in topology.consumers_of(stream):
            node, code = consumer.computation, consumer.computation.computation
            if isinstance(code, ElementWise | TimestampShift):
                streams += [one for one in node.produces if one not in streams]
                replaces_rows &= code.is_one_to_one and consumer.subscription.key is None
            else:
                others.append(node.name)
    return upserts, others, replaces_rows


def _refuse_hidden_fields(topology: Topology, node: ComputationNode) -> None:
    """Refuse combined fields whose column in a sink is of the record or the pane.

    The column would show the key, the time or the window in silence, and an upsert could not tell windows apart.
    """
    code = node.computation
    if not isinstance(code, WindowedComputation) or code.finish is not None:
        return
    fields = code.combine.fields.keys() if isinstance(code.combine, CombineFields) else set()
    # The list grows while it is read, by each stream at most once.
    streams = [node.production_names[code.stream]] if fields & PANE_COLUMNS else []
    for stream in streams:
        for sink in topology.sinks_of(stream):
            schema = sink.sink.schema if isinstance(sink.sink, DeltaSink) else None
            if schema is not None and (hidden := sorted(fields & PANE_COLUMNS & set(schema.names))):
                raise InvalidError(
                    "a combined field has the name of a column that the sink takes from the record or its window: name "
                    "the field and its column otherwise, or leave the column out of the schema",
                    computation=node.name,
                    sink=sink.name,
                    columns=hidden,
                )
        for consumer in topology.consumers_of(stream):
            if passes_values_on(consumer.computation.computation):
                streams += [one for one in consumer.computation.produces if one not in streams]


def _of_rows(topology: Topology, subscription: Subscription) -> Subscription:
    key, stream = subscription.key, subscription.stream
    if stream in topology.injectors and isinstance(key, PaneKey):
        return replace(subscription, key=key.extractor)
    return subscription
