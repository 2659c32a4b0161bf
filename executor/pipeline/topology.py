"""
The topology: a pipeline after it has been checked, frozen (MillWheel §3, §4.3).

Runners, tasks and the watermark authority read it and never change it. Streams are edges with
names: any number of computations may produce to one, any number may subscribe to it, each with
its own key extractor, and cycles are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from millpond.executor.computation.counters import declared_counters
from millpond.executor.event_time.clocks import EXACT, declared_percentiles
from millpond.executor.event_time.late_data_horizon import horizon_us
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.pipeline.key_extractor import KeyExtractor
from millpond.executor.pipeline.positions import stream_number
from millpond.executor.pipeline.weak import (
    ProductionMode,
    WeakStreams,
    addressed,
    fused_order,
    fused_streams,
    is_addressed,
)
from millpond.executor.superstep.dead_letter import DEAD_LETTERS
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from millpond.executor.computation.computation import Computation
    from millpond.executor.sinks.sink import Sink

__all__ = [
    "ComputationNode",
    "Consumer",
    "FieldExtractor",
    "InjectorNode",
    "OnError",
    "OnLate",
    "SinkNode",
    "Subscription",
    "Topology",
]

OnError: TypeAlias = Literal["dead_letter", "stop"]
"""What becomes of a record whose code keeps raising: kept as a dead letter, or the run stops."""

OnLate: TypeAlias = Literal["process", "drop"]
"""What becomes of a record behind the low watermark: user code gets it, or it is only counted."""

FieldExtractor: TypeAlias = str | Callable[[Any], Any]
"""How an injector gets key, time or id: a column's name, or a function of the row as a ``dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorNode:
    """
    Where one stream of outside records enters.

    Attributes:
        stream: the stream it feeds; also the name of its input for the runners.
        key: how a record's key is got; must give text.
        at: how its event time is got: microseconds, a time with a zone, or ISO text; or the time
            of arrival.
        id: how the id is got under which the publisher repeats it; ``None``: it never does.
        watermark: how the low watermark follows from the records.
        idle_after_us: silence after which the stream no longer holds anybody back; ``None``: never.
        members: the senders that are expected; the watermark is that of the last of them.
        member: how the sender of a record is got.
        skew_limit_us: how far its watermark may be ahead of the slowest computation; ``None``: as
            far as it likes.
    """

    stream: str
    key: FieldExtractor
    at: FieldExtractor | IngressTime
    id: FieldExtractor | None
    watermark: WatermarkPolicy
    idle_after_us: int | None = None
    members: tuple[str, ...] = ()
    member: FieldExtractor | None = None
    skew_limit_us: int | None = None

    def check_member(self, member: str | None) -> None:
        """
        Refuse a member that is not expected.

        Raises:
            InvalidError: names it.
        """
        if member is not None and member not in self.members:
            raise InvalidError(
                "no such member is expected", stream=self.stream, member=member, members=list(self.members)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """
    One stream that a computation consumes, and how it gets its keys there.
    """

    stream: str
    key: KeyExtractor = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationNode:
    """
    A computation in its place.

    Attributes:
        name: partition of its rows, and its table in SQL.
        computation: the user's code; one object, shared by all keys.
        subscriptions: what it consumes.
        produces: the streams that it may produce to.
        exactly_once: whether records with ids are deduplicated.
        on_error: what becomes of a record whose code keeps raising.
        retries: how often such a record is tried again first.
        intervals: how many key intervals to start with; ``None`` lets the runner choose.
        on_late: what becomes of records behind the input low watermark; they are counted either way.
            One word for all, or a word for each stream, ``process`` if it has none.
        productions: ``strong`` delivers a production once it is durable; ``weak`` delivers it within
            the superstep that made it (MillWheel §6.1.3, docs/design/004-weak-productions.md).
        user_code_timeout_ms: how long its code may take for all that a bundle has for one key; code
            that hangs is interrupted and treated as if it had raised. ``None``: as long as it likes.
    """

    name: str
    computation: Computation
    subscriptions: tuple[Subscription, ...]
    produces: tuple[str, ...] = ()
    exactly_once: bool = True
    on_error: OnError = "dead_letter"
    retries: int = 2
    intervals: int | None = None
    on_late: OnLate | Mapping[str, OnLate] = "process"
    productions: ProductionMode = "strong"
    user_code_timeout_ms: float | None = None

    @property
    def inbox(self) -> tuple[str, ...]:
        """
        The streams that it reads from committed rows, those that are addressed to it included.
        """
        streams = [subscription.stream for subscription in self.subscriptions]
        return (*streams, *(addressed(stream, self.name) for stream in streams))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """
        The percentile watermarks below 100 that the code asks for, the greatest first.
        """
        return declared_percentiles(self.computation.percentiles, self.name)

    @property
    def counters(self) -> tuple[str, ...]:
        """
        What the code counts.
        """
        return declared_counters(self.computation.counters, self.name)

    def drops_late(self, stream: str) -> bool:
        """
        Whether late records of a stream are kept from the code.
        """
        word = self.on_late if isinstance(self.on_late, str) else self.on_late.get(stream)
        return word == "drop"

    @property
    def horizon_us(self) -> int:
        """
        By how much the output watermark stays behind the input's.
        """
        return horizon_us(self.computation.late_data_horizon)

    def subscription(self, stream: str) -> Subscription | None:
        """
        How it consumes ``stream``; ``None`` when it does not.
        """
        return next((found for found in self.subscriptions if found.stream == stream), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkNode:
    """
    A stream on its way out.
    """

    name: str
    stream: str
    sink: Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """
    A computation, and the subscription through which it consumes one stream.
    """

    computation: ComputationNode
    subscription: Subscription


@dataclass(frozen=True, kw_only=True)
class Topology:
    """
    A checked pipeline; made by `Pipeline.check` only, so whoever holds one need not check again.

    Attributes:
        name: the pipeline's.
        injectors: by the stream that each feeds.
        computations: by name.
        sinks: by name.
    """

    name: str
    injectors: Mapping[str, InjectorNode]
    computations: Mapping[str, ComputationNode]
    sinks: Mapping[str, SinkNode]

    def consumers_of(self, stream: str) -> tuple[Consumer, ...]:
        """
        The computations that subscribe to ``stream``, in the order of their declaration.
        """
        return self._consumers.get(stream, ())

    def readers_of(self, streams: Iterable[str]) -> frozenset[str]:
        """
        The names of the computations that subscribe to any of ``streams``.
        """
        found = (consumer for stream in streams for consumer in self.consumers_of(stream))
        return frozenset(consumer.computation.name for consumer in found)

    def id_scope(self, computation: str, stream: str, bare: int | None = None) -> bytes:
        """
        What goes before the record ids of ``stream`` in the rows of ``computation``.

        Ids are a publisher's own: where a computation gets records with ids from several
        injectors, the same id of two streams names two records. Of the first such stream
        ids are kept as they came.

        Args:
            computation: the consumer.
            stream: the injected stream.
            bare: `stream_number` of the first stream, once it has been chosen; it stays so.
        """
        first = self.bare_stream(computation)
        chosen = bare if bare is not None or first is None else stream_number(first)
        return b"" if chosen in (None, stream_number(stream)) else f"{stream}\0".encode()

    def bare_stream(self, computation: str) -> str | None:
        """
        The first stream with record ids that a computation subscribes to.
        """
        subscriptions = self.computation(computation).subscriptions
        return next((s.stream for s in subscriptions if self._has_ids(s.stream)), None)

    def _has_ids(self, stream: str) -> bool:
        injector = self.injectors.get(stream)
        return injector is not None and injector.id is not None

    def producers_of(self, stream: str) -> tuple[ComputationNode, ...]:
        """
        The computations that may produce to ``stream``; for dead letters, all of them.
        """
        if stream == DEAD_LETTERS:
            return tuple(self.computations.values())
        return self._producers.get(stream, ())

    def sinks_of(self, stream: str) -> tuple[SinkNode, ...]:
        """
        The sinks that ``stream`` flows into.
        """
        return self._sinks.get(stream, ())

    @cached_property
    def fused(self) -> Mapping[str, frozenset[str]]:
        """
        The streams that each computation's weak productions are delivered on within their superstep.
        """
        found = fused_streams(self.computations, self.injectors)
        return {name: streams for name, streams in found.items() if streams}

    @cached_property
    def fused_order(self) -> tuple[str, ...]:
        """
        The computations so that each comes after those whose fused streams it consumes.
        """
        return fused_order(self.computations, self.fused)

    def waves(self, planned: Collection[str]) -> tuple[tuple[str, ...], ...]:
        """
        In which order computations run that have work, with those that weak productions may give some.

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
        return tuple(tuple(n for n, level in levels.items() if level == each) for each in range(count))

    def weak_streams(self, computation: str, *, keep_all: bool = False) -> WeakStreams:
        """
        What becomes of a computation's productions within a superstep.

        Args:
            computation: its name.
            keep_all: whether they are written to its rows even if no sink wants them.
        """
        fused = self.fused.get(computation, frozenset())
        kept = fused if keep_all else frozenset(stream for stream in fused if self.sinks_of(stream))
        return WeakStreams(fused=fused, kept=kept)

    @property
    def injected_streams(self) -> tuple[str, ...]:
        """
        The streams that outside records enter on.
        """
        return tuple(self.injectors)

    @cached_property
    def percentiles(self) -> tuple[float, ...]:
        """
        The percentile watermarks below 100 that any computation asks for, the greatest first.
        """
        found = {each for node in self.computations.values() for each in node.percentiles}
        return tuple(sorted(found, reverse=True))

    def percentile(self, percentile: float) -> float:
        """
        The percentile, if it is 100 or any computation asks for it.

        Raises:
            InvalidError: nobody does.
        """
        if percentile == EXACT or percentile in self.percentiles:
            return float(percentile)
        raise InvalidError(
            "nobody asks for this percentile of the watermark",
            pipeline=self.name,
            percentile=percentile,
            percentiles=list(self.percentiles),
        )

    @cached_property
    def wanted_streams(self) -> frozenset[str]:
        """
        The streams that somebody consumes or that flow into a sink; productions to others end nowhere.
        """
        return frozenset(stream for stream in self.wanted_addresses if not is_addressed(stream))

    @cached_property
    def wanted_addresses(self) -> frozenset[str]:
        """
        The same, with what rows keep for one consumer or for sinks only (`millpond.executor.pipeline.weak`).
        """
        return frozenset(self._consumers) | frozenset(self._sinks)

    def computation(self, name: str) -> ComputationNode:
        """
        The computation called ``name``.

        Raises:
            InvalidError: there is none.
        """
        if name not in self.computations:
            raise InvalidError("the pipeline has no such computation", pipeline=self.name, computation=name)
        return self.computations[name]

    def injector(self, stream: str) -> InjectorNode:
        """
        The injector that feeds ``stream``.

        Raises:
            InvalidError: there is none.
        """
        if stream not in self.injectors:
            raise InvalidError(
                "no injector feeds this stream",
                pipeline=self.name,
                stream=stream,
                injected=sorted(self.injectors),
            )
        return self.injectors[stream]

    @cached_property
    def _consumers(self) -> Mapping[str, tuple[Consumer, ...]]:
        found: dict[str, tuple[Consumer, ...]] = {}
        for node in self.computations.values():
            for subscription in node.subscriptions:
                consumer = Consumer(computation=node, subscription=subscription)
                found[subscription.stream] = (*found.get(subscription.stream, ()), consumer)
                found[addressed(subscription.stream, node.name)] = (consumer,)
        return found

    @cached_property
    def _producers(self) -> Mapping[str, tuple[ComputationNode, ...]]:
        found: dict[str, tuple[ComputationNode, ...]] = {}
        for node in self.computations.values():
            for stream in node.produces:
                found[stream] = (*found.get(stream, ()), node)
        return found

    @cached_property
    def _sinks(self) -> Mapping[str, tuple[SinkNode, ...]]:
        found: dict[str, tuple[SinkNode, ...]] = {}
        for sink in self.sinks.values():
            found[sink.stream] = (*found.get(sink.stream, ()), sink)
            found[addressed(sink.stream)] = found[sink.stream]
        return found
