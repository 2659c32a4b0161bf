"""
The pipeline: what the user declares, before it is checked and frozen (MillWheel §3).

Declarations are refused at their own line when that line alone shows the mistake; what needs
the whole picture is refused by `Pipeline.check`, which every runner calls before it starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Unpack, get_args

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.counters import declared_counters
from millpond.executor.event_time.clocks import declared_percentiles
from millpond.executor.event_time.duration import Duration, duration_us
from millpond.executor.event_time.late_data_horizon import horizon_us
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policies import MarkColumn
from millpond.executor.injectors.policy import BoundedDisorder, WatermarkPolicy
from millpond.executor.pipeline.checks import check_inputs, check_name, check_topology
from millpond.executor.pipeline.key_extractor import KeyExtractor, check_key_extractor
from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.pipeline.nodes import (
    ComputationNode,
    FieldExtractor,
    InjectorNode,
    OnError,
    OnLate,
    SinkNode,
    Subscription,
)
from millpond.executor.pipeline.stream import ComputationOptions, Stream
from millpond.executor.pipeline.topology import Topology
from millpond.executor.pipeline.weak import ProductionMode
from millpond.executor.sinks.sink import Sink
from millpond.statestore.errors import InvalidError

__all__ = ["DEAD_LETTERS", "EnginePipeline"]

_NO_DISORDER: Final = BoundedDisorder("0s")
_OPTIONS: Final = frozenset(ComputationOptions.__annotations__)


class EnginePipeline:
    """
    A graph of injectors, computations and sinks, joined by named streams.

    Args:
        name: the pipeline's name; its positions in the store are kept under it, so a pipeline
            that is renamed starts anew.

    Example:
        >>> pipeline = Pipeline("zeitgeist")
        >>> pipeline.inject("queries", key="query", at="time", watermark=BoundedDisorder("30s"))
        Stream('queries' of 'zeitgeist')

    Raises:
        InvalidError: the name is empty or has bad characters.
    """

    stream_class: type[Stream] = Stream
    """What streams are made of; a layer above replaces it in a subclass to add its own verbs."""

    def __init__(self, name: str) -> None:
        self.name = check_name("pipeline", name)
        self._injectors: dict[str, InjectorNode] = {}
        self._computations: dict[str, ComputationNode] = {}
        self._sinks: dict[str, SinkNode] = {}

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}, computations={list(self._computations)})"

    def inject(
        self,
        name: str,
        *,
        key: FieldExtractor,
        at: FieldExtractor | IngressTime,
        id: FieldExtractor | None = None,  # noqa: A002 - the word of the paper and of the users
        watermark: WatermarkPolicy = _NO_DISORDER,
        idle_after: Duration | None = None,
        members: Sequence[str] = (),
        member: FieldExtractor | None = None,
        skew_limit: Duration | None = None,
    ) -> Stream:
        """
        Let outside records in on a stream.

        Args:
            name: the stream, and the name under which runners are given its input.
            key: a column's name, or a function of the row as a ``dict``; must give text.
            at: the event time, likewise: microseconds, a time with a zone, or ISO text; or
                ``IngressTime()``, the time of arrival, which brings its own watermark.
            id: the id under which the publisher may repeat a record, likewise; ``None``
                means that every record counts, also one that comes twice.
            watermark: how the low watermark follows from the records.
            idle_after: how long the stream, or one of its members, may be silent before it holds
                nobody back any more; what it brings after that may be late. ``None``: for ever.
            members: the senders that are expected. The watermark is the least of theirs, so one
                that is missing or silent holds it, until it is idle or declared gone. What
                others send is taken in and moves nothing.
            member: how the sender of a row is got: a column's name or a function of the row.
            skew_limit: the stream waits while its watermark is further than this ahead of the
                slowest computation, so that what waits for a slow stream does not fill memory
                and state. A stream that never comes makes it wait for ever, unless that one is
                idle or gone. Bounded runs (``run``) know no limit: they wait for nobody.

        Raises:
            InvalidError: the name is bad or taken, or an argument is of the wrong type.
        """
        check_name("stream", name)
        if name in self._injectors:
            raise InvalidError("two injectors feed one stream", stream=name)
        _check_field("key", key, name)
        if isinstance(at, IngressTime):
            _check_ingress(name, watermark, idle_after, members, skew_limit)
            watermark = at
        else:
            _check_field("at", at, name)
        if id is not None:
            _check_field("id", id, name)
        if inspect.isclass(watermark) or not isinstance(watermark, WatermarkPolicy):
            raise InvalidError("the watermark is no watermark policy", stream=name, watermark=watermark)
        _check_members(name, members, member)
        if members and isinstance(watermark, MarkColumn):
            raise InvalidError(
                "a stream goes by its source's marks or by its members, not by both", stream=name
            )
        self._injectors[name] = InjectorNode(
            stream=name,
            key=key,
            at=at,
            id=id,
            watermark=watermark,
            idle_after_us=None if idle_after is None else _positive(name, "idle_after", idle_after),
            members=tuple(members),
            member=member,
            skew_limit_us=None if skew_limit is None else _positive(name, "skew_limit", skew_limit),
        )
        return self.stream(name)

    def add(
        self,
        computation: Computation,
        *,
        name: str,
        subscribes: Mapping[str, KeyExtractor],
        produces: Sequence[str] = (),
        **options: Unpack[ComputationOptions],
    ) -> dict[str, Stream]:
        """
        Add a computation with any number of streams on both sides.

        Args:
            computation: the user's code.
            name: its name, and its table in SQL.
            subscribes: stream → how the key is got there.
            produces: the streams that it may produce to.
            options: `ComputationOptions`.

        Returns:
            The streams that it produces to, by name.

        Raises:
            InvalidError: the declaration cannot be right; the error names the culprit.
        """
        check_name("computation", name)
        if name in self._computations:
            raise InvalidError("two computations have one name", computation=name)
        _check_computation(name, computation)
        declared_percentiles(computation.percentiles, name)
        horizon_us(computation.late_data_horizon)
        declared_counters(computation.counters, name)
        _check_on_late(name, options.get("on_late", "process"), subscribes)
        self._computations[name] = ComputationNode(
            name=name,
            computation=computation,
            subscriptions=_subscriptions(name, subscribes),
            produces=_productions(name, produces),
            **_checked_options(name, options),
        )
        return {stream: self.stream(stream) for stream in produces}

    def add_sink(self, name: str, stream: str, sink: Sink) -> None:
        """
        Let a stream flow into a sink; `Stream.sink` is the shorter way.

        Raises:
            InvalidError: the name is bad or taken, or ``sink`` is no sink.
        """
        check_name("sink", name, reserved=frozenset())
        if name in self._sinks:
            raise InvalidError("two sinks have one name", sink=name)
        if inspect.isclass(sink) or not isinstance(sink, Sink):
            raise InvalidError("the sink is no sink", sink=name, type=_type_name(sink))
        self._sinks[name] = SinkNode(name=name, stream=stream, sink=sink)

    def stream(self, name: str) -> Stream:
        """
        The stream called ``name``, also one that is declared later: this is how cycles are drawn.

        Raises:
            InvalidError: the name is empty or has bad characters.
        """
        check_name("stream", name, reserved=frozenset())
        return self.stream_class(self, name)

    def check(self, inputs: Iterable[str] | None = None) -> Topology:
        """
        Check everything that can be known before running, and freeze the result.

        Args:
            inputs: names of the inputs that the runner was given; ``None`` leaves them unchecked.

        Raises:
            InvalidError: names the computation, stream, sink or input that is wrong.
        """
        topology = Topology(
            name=self.name,
            injectors=dict(self._injectors),
            computations=dict(self._computations),
            sinks=dict(self._sinks),
        )
        check_topology(topology)
        if inputs is not None:
            check_inputs(topology, inputs)
        return topology


def _check_field(argument: str, field: object, stream: str) -> None:
    if not (callable(field) or (isinstance(field, str) and field)):
        raise InvalidError(
            "an injector's argument is a column's name or a function of the row",
            stream=stream,
            argument=argument,
            type=_type_name(field),
        )


def _positive(stream: str, argument: str, duration: Duration) -> int:
    found = duration_us(duration)
    if found <= 0:
        raise InvalidError(f"{argument} is longer than nothing", stream=stream, value=duration)
    return found


def _check_ingress(
    stream: str,
    watermark: WatermarkPolicy,
    idle_after: Duration | None,
    members: Sequence[str],
    skew_limit: Duration | None,
) -> None:
    has_own = watermark is not _NO_DISORDER and not isinstance(watermark, IngressTime)
    if has_own or idle_after is not None or members or skew_limit is not None:
        raise InvalidError(
            "a stream by time of arrival has its own watermark, and holds nobody back: "
            "it takes no watermark, idle_after, members or skew_limit",
            stream=stream,
        )


def _check_members(stream: str, members: Sequence[str], member: FieldExtractor | None) -> None:
    if isinstance(members, str) or not all(isinstance(one, str) and one for one in members):
        raise InvalidError("members is a list of names", stream=stream, members=members)
    if len(set(members)) < len(members):
        raise InvalidError("a member is named twice", stream=stream, members=list(members))
    if bool(members) != (member is not None):
        raise InvalidError("members and member belong together", stream=stream)
    if member is not None:
        _check_field("member", member, stream)


def _check_computation(name: str, computation: object) -> None:
    if inspect.isclass(computation):
        raise InvalidError(
            "the computation is a class: give an instance", computation=name, type=computation.__qualname__
        )
    if not isinstance(computation, Computation):
        raise InvalidError("this is no Computation", computation=name, type=_type_name(computation))


def _subscriptions(name: str, subscribes: Mapping[str, KeyExtractor]) -> tuple[Subscription, ...]:
    if not isinstance(subscribes, Mapping):
        raise InvalidError(
            "subscribes maps streams to key extractors", computation=name, type=_type_name(subscribes)
        )
    if not subscribes:
        raise InvalidError("the computation subscribes to nothing", computation=name)
    for stream, key in subscribes.items():
        check_name("stream", stream, reserved=frozenset())
        check_key_extractor(key, computation=name, stream=stream)
    return tuple(Subscription(stream=stream, key=key) for stream, key in subscribes.items())


def _productions(name: str, produces: Sequence[str]) -> tuple[str, ...]:
    if isinstance(produces, str):
        raise InvalidError("produces is a list of stream names", computation=name, produces=produces)
    for stream in produces:
        check_name("stream", stream)
    if len(set(produces)) < len(produces):
        raise InvalidError("the computation names a stream twice", computation=name, produces=list(produces))
    return tuple(produces)


def _check_on_late(name: str, wanted: OnLate | Mapping[str, OnLate], streams: Iterable[str]) -> None:
    words = wanted.values() if isinstance(wanted, Mapping) else (wanted,)
    if not all(isinstance(word, str) and word in get_args(OnLate) for word in words):
        raise InvalidError("no such way to treat late records", computation=name, on_late=wanted)
    if isinstance(wanted, Mapping) and (unknown := sorted(wanted.keys() - set(streams))):
        raise InvalidError(
            "on_late names streams that the computation does not consume", computation=name, streams=unknown
        )


def _checked_options(name: str, options: ComputationOptions) -> ComputationOptions:
    for option in options:
        if option not in _OPTIONS:
            raise InvalidError("no such option", computation=name, option=option, options=sorted(_OPTIONS))
    if not isinstance(options.get("exactly_once", True), bool):
        raise InvalidError("exactly_once is true or false", computation=name)
    if options.get("on_error", "dead_letter") not in get_args(OnError):
        raise InvalidError("no such way to treat errors", computation=name, on_error=options["on_error"])
    if options.get("productions", "strong") not in get_args(ProductionMode):
        raise InvalidError(
            "productions are strong or weak", computation=name, productions=options["productions"]
        )
    timeout_ms = options.get("user_code_timeout_ms")
    if timeout_ms is not None and not (isinstance(timeout_ms, int | float) and timeout_ms > 0):
        raise InvalidError("user_code_timeout_ms is longer than nothing", computation=name, value=timeout_ms)
    _check_count(name, "retries", options.get("retries", 0), least=0)
    intervals = options.get("intervals")
    if intervals is not None:
        _check_count(name, "intervals", intervals, least=1)
    return options


def _check_count(name: str, option: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidError(f"{option} is a whole number of at least {least}", computation=name, value=value)


def _type_name(value: Any) -> str:
    return value.__qualname__ if inspect.isclass(value) else type(value).__qualname__
