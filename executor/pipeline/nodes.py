"""
The nodes of a pipeline's graph: injectors, computations and sinks, as the user declared them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.counters import declared_counters
from millpond.executor.event_time.clocks import declared_percentiles
from millpond.executor.event_time.late_data_horizon import horizon_us
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policy import WatermarkPolicy
from millpond.executor.pipeline.key_extractor import KeyExtractor
from millpond.executor.pipeline.weak import (
    ProductionMode,
    addressed,
)
from millpond.executor.sinks.sink import Sink
from millpond.statestore.errors import InvalidError

__all__ = [
    "ComputationNode",
    "FieldExtractor",
    "InjectorNode",
    "OnError",
    "OnLate",
    "SinkNode",
    "Subscription",
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
