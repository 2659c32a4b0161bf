"""The topology: a pipeline after it has been checked, frozen (MillWheel §3, §4.3).

Runners, tasks and the watermark authority read it and never change it. Streams are edges with
names: any number of computations may produce to one, any number may subscribe to it, each with
its own key extractor, and cycles are allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from millpond.executor.event_time.clocks import EXACT
from millpond.executor.pipeline.backfill import Backfill
from millpond.executor.pipeline.fusion import fused_order, fused_streams
from millpond.executor.pipeline.injector_node import InjectorNode
from millpond.executor.pipeline.names import DEAD_LETTERS, SIGNALS
from millpond.executor.pipeline.nodes import ComputationNode, SinkNode, Subscription
from millpond.executor.pipeline.positions import stream_number
from millpond.executor.pipeline.weak import WeakStreams, addressed, is_addressed
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.id_retention import ID_SLACK_US


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A computation, and the subscription through which it consumes one stream."""

    computation: ComputationNode
    subscription: Subscription


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A checked pipeline; only `Pipeline.check` creates one, so it needs no further check.

    Attributes:
        name: the pipeline's name; in a run the one that the store knows it by, which is its first.
        injectors: the injectors, by the stream that each feeds.
        computations: the computations, by name.
        sinks: the sinks, by name.
        drop: computations that it no longer has, whose rows are removed.
        retire: computations that it no longer has, whose rows stay.
        composites: the computations of each composite, by its name.
        backfills: by computation, what each is given of its streams before their records, by stream.
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
        """The computations that subscribe to ``stream``, in the order of their declaration."""
        return self._consumers.get(stream, ())

    def readers_of(self, streams: Iterable[str]) -> frozenset[str]:
        """The names of the computations that subscribe to any of ``streams``."""
        consumers = (consumer for stream in streams for consumer in self.consumers_of(stream))
        return frozenset(consumer.computation.name for consumer in consumers)

    def reached_from(self, streams: Iterable[str]) -> frozenset[str]:
        """The names of the computations that records of ``streams`` reach, directly or through others."""
        reached: set[str] = set()
        fresh = [*streams]
        while fresh:
            for consumer in self.consumers_of(fresh.pop()):
                if consumer.computation.name not in reached:
                    reached.add(consumer.computation.name)
                    fresh.extend(consumer.computation.produces)
        return frozenset(reached)

    def sampled_by(self, streams: Iterable[str]) -> frozenset[str]:
        """The names of the computations whose keys are seen in ``streams``.

        A signal is no sample of a step's keys: it finds no windows where there are no intervals.
        """
        return self.readers_of(stream for stream in streams if stream != SIGNALS)

    def id_scope(self, computation: str, stream: str, bare: int | None = None) -> bytes:
        """The prefix of the record ids of ``stream`` in the rows of ``computation``.

        Ids are unique per publisher: where a computation consumes several streams with ids, the same id
        on two streams identifies two records. The ids of the first such stream have no prefix.

        Args:
            computation: the consumer.
            stream: the injected stream.
            bare: the `stream_number` of the first stream, once it has been recorded; it never changes.
        """
        first = self.bare_stream(computation)
        chosen = bare if bare is not None or first is None else stream_number(first)
        return b"" if chosen in (None, stream_number(stream)) else f"{stream}\0".encode()

    def bare_stream(self, computation: str) -> str | None:
        """The first stream with record ids that a computation subscribes to."""
        subscriptions = self.computation(computation).subscriptions
        return next((s.stream for s in subscriptions if self._has_ids(s.stream)), None)

    def id_slack_us(self, computation: str) -> int:
        """How long the senders of any stream that a computation subscribes to may repeat a record."""
        streams = (s.stream for s in self.computation(computation).subscriptions)
        slacks = (self.injectors[stream].id_slack_us for stream in streams if self._has_ids(stream))
        return max(slacks, default=ID_SLACK_US)

    def _has_ids(self, stream: str) -> bool:
        injector = self.injectors.get(stream)
        return injector is not None and injector.id is not None

    def producers_of(self, stream: str) -> tuple[ComputationNode, ...]:
        """The computations that may produce to ``stream``; for dead letters, all of them."""
        if stream == DEAD_LETTERS:
            return tuple(self.computations.values())
        return self._producers.get(stream, ())

    def sinks_of(self, stream: str) -> tuple[SinkNode, ...]:
        """The sinks that ``stream`` flows into."""
        return self._sinks.get(stream, ())

    @cached_property
    def sorts(self) -> bool:
        """Whether any computation gets its records in the order of time."""
        return any(node.time_sorted for node in self.computations.values())

    @cached_property
    def former_names(self) -> Mapping[str, str]:
        """The computations that have been renamed: former name to name."""
        nodes = self.computations.values()
        return {node.renamed_from: node.name for node in nodes if node.renamed_from is not None}

    def current_stream(self, stream: str) -> str:
        """The stream under which a production is delivered that was written before a computation was renamed.

        A computation's own stream is renamed with it, and so is a consumer that a stream is addressed to.
        """
        former = self.former_names
        if not former:
            return stream
        name, mark, consumer = stream.partition(addressed(""))
        renamed = former.get(name)
        if renamed is not None and renamed in self.computations[renamed].produces:
            name = name if name in self._producers or name in self.injectors else renamed
        return f"{name}{mark}{former.get(consumer, consumer)}"

    @cached_property
    def fused(self) -> Mapping[str, frozenset[str]]:
        """The streams that each computation's weak productions are delivered on within their superstep."""
        fused = fused_streams(self.computations, self.injectors)
        return {name: streams for name, streams in fused.items() if streams}

    @cached_property
    def fused_order(self) -> tuple[str, ...]:
        """The computations, each after those whose fused streams it consumes."""
        return fused_order(self.computations, self.fused)

    def waves(self, planned: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """The order in which computations run: those with work, and those that may receive weak productions.

        Args:
            planned: the computations with work of their own.

        Returns:
            Computations that may run at the same time; each after the ones before it.
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
        """How a computation's productions are delivered within a superstep.

        Args:
            computation: its name.
            keep_all: whether they are written to its rows even without a sink.
        """
        fused = self.fused.get(computation, frozenset())
        kept = fused if keep_all else frozenset(stream for stream in fused if self.sinks_of(stream))
        return WeakStreams(fused=fused, kept=kept)

    @cached_property
    def percentiles(self) -> tuple[float, ...]:
        """The percentile watermarks below 100 that any computation declares, greatest first."""
        declared = {percentile for node in self.computations.values() for percentile in node.percentiles}
        return tuple(sorted(declared, reverse=True))

    def percentile(self, percentile: float) -> float:
        """The percentile as a ``float``, if it is 100 or any computation declares it.

        Raises:
            InvalidError: no computation declares it.
        """
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
        return frozenset(stream for stream in self.wanted_addresses if not is_addressed(stream))

    @cached_property
    def wanted_addresses(self) -> frozenset[str]:
        """`wanted_streams` and the addressed streams of fused productions (`millpond.executor.pipeline.weak`)."""
        return frozenset(self._consumers) | frozenset(self._sinks)

    def computation(self, name: str) -> ComputationNode:
        """The computation called ``name``.

        Raises:
            InvalidError: there is none.
        """
        if name not in self.computations:
            raise InvalidError(
                f"the pipeline has no such computation{did_you_mean(name, self.computations)}",
                pipeline=self.name,
                computation=name,
                computations=sorted(self.computations),
            )
        return self.computations[name]

    def injector(self, stream: str) -> InjectorNode:
        """The injector that feeds ``stream``.

        Raises:
            InvalidError: there is none.
        """
        if stream not in self.injectors:
            raise InvalidError(
                f"no injector feeds this stream{did_you_mean(stream, self.injectors)}",
                pipeline=self.name,
                stream=stream,
                injected=sorted(self.injectors),
            )
        return self.injectors[stream]

    @cached_property
    def _consumers(self) -> Mapping[str, tuple[Consumer, ...]]:
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
    def _sinks(self) -> Mapping[str, tuple[SinkNode, ...]]:
        sinks: dict[str, tuple[SinkNode, ...]] = {}
        for sink in self.sinks.values():
            sinks[sink.stream] = (*sinks.get(sink.stream, ()), sink)
            sinks[addressed(sink.stream)] = sinks[sink.stream]
        return sinks
