"""The topology: a checked, frozen pipeline (MillWheel §3, §4.3), its cycles and its fused streams.

Streams are edges with names: any number of computations may produce to one or subscribe to it, and cycles are
allowed. Every edge holds the watermark except a declared *feedback*. Around a cycle of holding edges a
watermark would wait for itself; a feedback cuts the cycle. It does not hold for records that may still come,
but for records on their way.

A weak stream is not fused, and so is delivered like a strong one, if its records could return to their
producer by weak productions (a superstep would never end), or if a consumer also takes outside records (they
come before anything is produced).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter

from millpond.executor.inputs.extraction import InjectorNode
from millpond.executor.pipeline.nodes import (
    DEAD_LETTERS,
    LATE,
    SIGNALS,
    Backfill,
    ComputationNode,
    SinkNode,
    Subscription,
    WeakStreams,
    addressed,
    is_addressed,
)
from millpond.executor.time.clocks import EXACT
from millpond.statestore.app_ids import pipeline_number
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.record_ids import ID_SLACK_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A computation, and the subscription through which it consumes one stream."""

    computation: ComputationNode
    subscription: Subscription


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A checked pipeline; only `Pipeline.check` creates one, so it needs no further check.

    Attributes:
        name: the pipeline's name; in a run the store's name for it, which is its first.
        injectors: the injectors, by the stream that each feeds.
        drop: former computations whose rows are removed.
        retire: former computations whose rows stay.
        composites: the computations of each composite, by its name.
        backfills: each computation's backfill, by computation and stream.
        renamed_from: the name under which the store may know it.
        declared_name: the name in the code, where the store knows it by another.
    """

    name: str
    injectors: Mapping[str, InjectorNode]
    computations: Mapping[str, ComputationNode]
    sinks: Mapping[str, SinkNode]
    drop: frozenset[str] = frozenset()
    retire: frozenset[str] = frozenset()
    composites: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backfills: Mapping[str, Mapping[str, Backfill]] = field(default_factory=dict)
    renamed_from: str | None = None
    declared_name: str = ""

    @property
    def title(self) -> str:
        """The name in the code."""
        return self.declared_name or self.name

    def consumers_of(self, stream: str) -> tuple[Consumer, ...]:
        """Return the computations that subscribe to ``stream``, in the order of their declaration."""
        return self.consumers.get(stream, ())

    def readers_of(self, streams: Iterable[str]) -> frozenset[str]:
        """Return the names of the computations that subscribe to any of ``streams``."""
        consumers = (consumer for stream in streams for consumer in self.consumers_of(stream))
        return frozenset(consumer.computation.name for consumer in consumers)

    def reached_from(self, streams: Iterable[str]) -> frozenset[str]:
        """Return the names of the computations that records of ``streams`` reach, directly or through others."""
        return frozenset(
            _closure(self.readers_of(streams), lambda name: self.readers_of(self.computations[name].produces))
        )

    def sampled_by(self, streams: Iterable[str]) -> frozenset[str]:
        """Return the computations whose keys ``streams`` sample; signals sample none, having no windows to find."""
        return self.readers_of(stream for stream in streams if stream != SIGNALS)

    def id_scope(self, computation: str, stream: str, bare: int | None = None) -> bytes:
        """Return the prefix of the record ids of ``stream`` in the rows of ``computation``.

        Ids are unique per publisher: in a computation with several streams with ids, the same id on two
        streams identifies two records. The ids of the first such stream have no prefix; ``bare`` is its recorded
        number, which never changes.
        """
        # The recorded stream wins: stored ids stay valid when the code subscribes to the streams in another order.
        first = self.bare_stream(computation)
        chosen = bare if bare is not None or first is None else pipeline_number(first)
        return b"" if chosen in (None, pipeline_number(stream)) else f"{stream}\0".encode()

    def bare_stream(self, computation: str) -> str | None:
        """Return the first stream with record ids that a computation subscribes to."""
        subscriptions = self.computation(computation).subscriptions
        return next((s.stream for s in subscriptions if self._has_ids(s.stream)), None)

    def id_slack_us(self, computation: str) -> int:
        """Return how long the senders of any stream of a computation may repeat a record, in microseconds."""
        streams = (s.stream for s in self.computation(computation).subscriptions)
        slacks = (self.injectors[stream].id_slack_us for stream in streams if self._has_ids(stream))
        return max(slacks, default=ID_SLACK_US)

    def _has_ids(self, stream: str) -> bool:
        injector = self.injectors.get(stream)
        return injector is not None and injector.id is not None

    def producers_of(self, stream: str) -> tuple[ComputationNode, ...]:
        """Return the computations that may produce to ``stream``; for dead letters, all of them."""
        if stream == DEAD_LETTERS:
            return tuple(self.computations.values())
        return self._producers.get(stream, ())

    def sinks_of(self, stream: str) -> tuple[SinkNode, ...]:
        """Return the sinks of ``stream``."""
        return self.sinks_by_stream.get(stream, ())

    @cached_property
    def sorts(self) -> bool:
        """True if any computation gets its records in order of event time."""
        return any(node.time_sorted for node in self.computations.values())

    @cached_property
    def sets_timers(self) -> bool:
        """True if any user code has timers."""
        return any(node.sets_timers for node in self.computations.values())

    @cached_property
    def has_feedback(self) -> bool:
        """True if records may return to a computation whose watermark does not wait for them."""
        return any(one.feedback for node in self.computations.values() for one in node.subscriptions)

    @cached_property
    def has_unbounded_horizon(self) -> bool:
        """True if a computation may produce at any time before the watermark, and its productions are never late."""
        return any(node.computation.late_data_horizon == "unbounded" for node in self.computations.values())

    @cached_property
    def former_names(self) -> Mapping[str, str]:
        """The renamed computations: former name to name."""
        nodes = self.computations.values()
        return {node.renamed_from: node.name for node in nodes if node.renamed_from is not None}

    def current_stream(self, stream: str) -> str:
        """Return the current name of a stream from before a computation, its producer or consumer, was renamed."""
        former = self.former_names
        if not former:
            return stream
        name, mark, consumer = stream.partition(addressed(""))
        producer = name.removesuffix(LATE)
        renamed = former.get(producer)
        if renamed is not None:
            now = renamed + name[len(producer) :]
            is_known = name in self._producers or name in self.injectors
            name = now if now in self.computations[renamed].produces and not is_known else name
        return f"{name}{mark}{former.get(consumer, consumer)}"

    @cached_property
    def fused(self) -> Mapping[str, frozenset[str]]:
        """The streams of each computation whose weak productions are delivered within their superstep."""
        fused = {
            name: frozenset(stream for stream in node.produces if self._is_fused(name, stream))
            for name, node in self.computations.items()
            if node.productions == "weak"
        }
        return {name: streams for name, streams in fused.items() if streams}

    def _is_fused(self, producer: str, stream: str) -> bool:
        readers = self.readers_of([stream])
        inputs = {own.stream for name in readers for own in self.computations[name].subscriptions}
        # A record that could return by weak productions would keep its superstep from ever ending.
        returns = producer in _closure(readers, self._weakly_fed)
        return bool(readers) and not returns and inputs.isdisjoint(self.injectors)

    def _weakly_fed(self, name: str) -> frozenset[str]:
        node = self.computations[name]
        return self.readers_of(node.produces) if node.productions == "weak" else frozenset()

    @cached_property
    def fused_order(self) -> tuple[str, ...]:
        """The computations, each after those whose fused streams it consumes."""
        sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(sorted(self.computations), ()))
        for producer in sorted(self.fused):
            for stream in sorted(self.fused[producer]):
                for consumer in self.consumers_of(stream):
                    sorter.add(consumer.computation.name, producer)
        return tuple(sorter.static_order())

    def waves(self, planned: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """Return the computations with work, or with weak productions to come, in groups that may run at once.

        Each group comes after the groups that feed it; ``planned`` already have work.
        """
        levels: dict[str, int] = {}
        for name in self.fused_order:
            feeders = [
                level
                for producer, level in levels.items()
                if any(self.computations[name].subscription(s) for s in self.fused.get(producer, ()))
            ]
            if feeders or name in planned:
                levels[name] = 1 + max(feeders, default=-1)
        count = 1 + max(levels.values(), default=-1)
        return tuple(tuple(n for n, level in levels.items() if level == wave) for wave in range(count))

    def weak_streams(self, computation: str, *, keep_all: bool = False) -> WeakStreams:
        """Return how productions are delivered within a superstep; ``keep_all`` writes them also without a sink."""
        fused = self.fused.get(computation, frozenset())
        kept = fused if keep_all else frozenset(stream for stream in fused if self.sinks_of(stream))
        return WeakStreams(fused=fused, kept=kept)

    @cached_property
    def percentiles(self) -> tuple[float, ...]:
        """The percentile watermarks below 100 that any computation declares, greatest first."""
        declared = {percentile for node in self.computations.values() for percentile in node.percentiles}
        return tuple(sorted(declared, reverse=True))

    def percentile(self, percentile: float) -> float:
        """Return the percentile as a ``float``, or refuse one below 100 that no computation declares."""
        if percentile == EXACT or percentile in self.percentiles:
            return float(percentile)
        raise InvalidError(
            "no computation declares this percentile of the watermark",
            pipeline=self.name,
            percentile=percentile,
            percentiles=list(self.percentiles),
        )

    @cached_property
    def wanted_streams(self) -> frozenset[str]:
        """The streams that a computation or a sink consumes; productions to others are dropped."""
        return frozenset(
            stream for stream in (*self.consumers, *self.sinks_by_stream) if not is_addressed(stream)
        )

    def computation(self, name: str) -> ComputationNode:
        """Return the computation called ``name``, or refuse an unknown name."""
        if name not in self.computations:
            raise InvalidError(
                f"the pipeline has no such computation{did_you_mean(name, self.computations)}",
                pipeline=self.name,
                computation=name,
                computations=sorted(self.computations),
            )
        return self.computations[name]

    def injector(self, stream: str) -> InjectorNode:
        """Return the injector that feeds ``stream``, or refuse a stream without one."""
        if stream not in self.injectors:
            raise InvalidError(
                f"no injector feeds this stream{did_you_mean(stream, self.injectors)}",
                pipeline=self.name,
                stream=stream,
                injected=sorted(self.injectors),
            )
        return self.injectors[stream]

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Consumer, ...]]:
        """The subscribers of each stream that has any, addressed streams included."""
        consumers: dict[str, tuple[Consumer, ...]] = {}
        for node in self.computations.values():
            for subscription in node.subscriptions:
                consumer = Consumer(computation=node, subscription=subscription)
                consumers[subscription.stream] = (*consumers.get(subscription.stream, ()), consumer)
                consumers[addressed(subscription.stream, node.name)] = (consumer,)
        return consumers

    @cached_property
    def _producers(self) -> Mapping[str, tuple[ComputationNode, ...]]:
        producers: dict[str, tuple[ComputationNode, ...]] = {}
        for node in self.computations.values():
            for stream in node.produces:
                producers[stream] = (*producers.get(stream, ()), node)
        return producers

    @cached_property
    def sinks_by_stream(self) -> Mapping[str, tuple[SinkNode, ...]]:
        """The sinks of each stream that has any, addressed streams included."""
        sinks: dict[str, tuple[SinkNode, ...]] = {}
        for sink in self.sinks.values():
            sinks[sink.stream] = (*sinks.get(sink.stream, ()), sink)
            sinks[addressed(sink.stream)] = sinks[sink.stream]
        return sinks


Cycle = tuple[tuple[str, str], ...]
"""The way around: each computation with the stream on which it reaches the next one."""

_Edges = Mapping[str, tuple[tuple[str, str], ...]]


def holding_edges(topology: Topology) -> _Edges:
    """Return, for each computation, the streams and consumers whose input watermark its output watermark bounds."""
    behind = {
        name: _reached(topology, node)
        for name, node in topology.computations.items()
        if any(subscription.feedback for subscription in node.subscriptions)
    }
    return {
        name: tuple(
            (stream, consumer)
            for stream, consumer, is_feedback in _edges(topology, node)
            if not (is_feedback and name in behind[consumer])
        )
        for name, node in topology.computations.items()
    }


def bounded_by_injectors(topology: Topology) -> set[str]:
    """Return the computations whose input watermark an injector bounds, directly or through other outputs."""
    edges = holding_edges(topology)
    # An unreadable outside record becomes a dead letter before any computation sees it.
    start = topology.readers_of([*topology.injectors, DEAD_LETTERS])
    return _closure(start, lambda name: (consumer for _, consumer in edges[name]))


def comes_back(topology: Topology, node: ComputationNode, stream: str) -> bool:
    """Return True if a computation that ``node`` reaches, such as ``node`` itself, produces to ``stream``."""
    reached = _reached(topology, node)
    return any(producer.name in reached for producer in topology.producers_of(stream))


def cycle_of(edges: _Edges, name: str) -> Cycle:
    """Return the shortest way from a computation back to itself along holding edges; empty without a cycle."""
    ways: dict[str, Cycle] = {name: ()}
    fresh = [name]
    # The list grows while it is read, by each computation at most once.
    for here in fresh:
        for stream, consumer in edges[here]:
            way = (*ways[here], (here, stream))
            if consumer == name:
                return way
            if consumer not in ways:
                ways[consumer] = way
                fresh.append(consumer)
    return ()


def is_in_cycle(topology: Topology, node: ComputationNode) -> bool:
    """Return True if records may return to a computation, on a feedback or another way."""
    return any(
        node.name in _reached(topology, topology.computations[consumer])
        for _, consumer, _ in _edges(topology, node)
    )


def _reached(topology: Topology, node: ComputationNode) -> set[str]:
    """Return the computations that records may reach from ``node``, including ``node``."""
    nodes = topology.computations
    return _closure([node.name], lambda name: (consumer for _, consumer, _ in _edges(topology, nodes[name])))


def _closure(start: Iterable[str], following: Callable[[str], Iterable[str]]) -> set[str]:
    reached = set(start)
    fresh = list(reached)
    while fresh:
        more = {name for name in following(fresh.pop()) if name not in reached}
        reached |= more
        fresh += more
    return reached


def _edges(topology: Topology, node: ComputationNode) -> Iterator[tuple[str, str, bool]]:
    # Any computation can produce dead letters, so each is an input of the computations that consume them.
    for stream in (*node.produces, DEAD_LETTERS):
        for consumer in topology.consumers_of(stream):
            yield stream, consumer.computation.name, consumer.subscription.feedback
