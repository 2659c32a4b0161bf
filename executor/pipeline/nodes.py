"""The nodes of a pipeline's graph: injectors, computations and sinks, as the user declared them.

A computation with weak productions delivers them within the superstep that made them (MillWheel §6.1.3): its
streams are *fused* with their consumers. All effects are part of one commit, so nothing is lost or repeated,
but consumers may see records that are not durable yet. A fused production that is stored anyway is
*addressed*: ``visits@cities`` waits only for the computation ``cities``, which was too slow for the
superstep, and ``visits@`` waits for sinks only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import declared_counters
from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.sinks.sink import Sink
from millpond.executor.time.clocks import declared_percentiles, horizon_us
from millpond.statestore.interval import Interval

ProductionMode: TypeAlias = Literal["strong", "weak"]
"""When a production is delivered: ``"strong"``: once its checkpoint is durable; ``"weak"``: before."""

_MARK: Final = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakStreams:
    """How a computation's productions are delivered within a superstep.

    Attributes:
        fused: the streams whose productions reach their consumers before the commit.
        kept: the fused streams whose productions are also written to the producer's rows, for a sink or for a
            consumer in another task.
    """

    fused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


STRONG: Final = WeakStreams()


def addressed(stream: str, consumer: str = "") -> str:
    """Return the stream under which a fused production is kept for one computation, or for sinks only."""
    return f"{stream}{_MARK}{consumer}"


def is_addressed(stream: str) -> bool:
    """Return True for a stream of fused productions that are stored for one consumer or for sinks."""
    return _MARK in stream


OnError: TypeAlias = Literal["dead_letter", "stop"]
"""The fate of a record whose code raises at every retry: it becomes a dead letter, or the run stops."""


OnLate: TypeAlias = Literal["process", "drop"]
"""The fate of a record behind the low watermark: user code processes it, or it is only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A stream that a computation consumes; a ``key`` of ``None`` keeps the record's key.

    Records that return on a ``feedback`` stream do not hold the computation's own watermark back.
    """

    stream: str
    key: KeyExtractor = None
    feedback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationNode:
    """A declared computation; `ComputationOptions` explains its options.

    Attributes:
        computation: the user's code; one object, shared by all keys.
        renamed_from: the name under which the store may have its rows.
        prefix: the prefix of its composite's names; empty outside of composites.
        cycle: the shortest cycle in which its output watermark holds its input watermark back: computation
            names that begin and end with this one. Empty without such a cycle; `Pipeline.check` fills it in.
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
    renamed_from: str | None = None
    prefix: str = ""
    time_sorted: bool = False
    cycle: tuple[str, ...] = ()

    @property
    def inbox(self) -> tuple[str, ...]:
        """The streams that it reads from committed rows, including streams addressed to it."""
        streams = [subscription.stream for subscription in self.subscriptions]
        return (*streams, *(addressed(stream, self.name) for stream in streams))

    @property
    def production_names(self) -> Mapping[str, str]:
        """The streams that it may produce to, by every name that its code may use: within its composite, or whole."""
        whole = {stream: stream for stream in self.produces}
        return whole | {stream.removeprefix(self.prefix): stream for stream in self.produces}

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentile watermarks below 100 that the code declares, greatest first."""
        return declared_percentiles(self.computation.percentiles, self.name)

    @property
    def counters(self) -> tuple[str, ...]:
        return declared_counters(self.computation.counters, self.name)

    def drops_late(self, stream: str) -> bool:
        word = self.on_late if isinstance(self.on_late, str) else self.on_late.get(stream)
        return word == "drop"

    @property
    def horizon_us(self) -> int:
        """Lag of the output watermark behind the input's, in microseconds."""
        return horizon_us(self.computation.late_data_horizon)

    def rank(self, stream: str) -> int:
        """Return the place of a stream among the consumed streams."""
        return next((rank for rank, own in enumerate(self.subscriptions) if own.stream == stream), 0)

    def subscription(self, stream: str) -> Subscription | None:
        return next((own for own in self.subscriptions if own.stream == stream), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkNode:
    """A declared sink and the stream that it writes."""

    name: str
    stream: str
    sink: Sink


DEAD_LETTERS = "dead_letters"
"""Reserved name of the computation, and of the stream, that hold dead letters."""


SIGNALS = "window_signals"
"""Reserved name of the injected stream that carries outside signals to the windowed steps."""


def control_interval(pipeline: str) -> Interval:
    """Return the interval that the driver of a pipeline owns.

    Every superstep's commit touches it, so that a commit without any other row is fenced too.
    """
    return Interval(DEAD_LETTERS, f"{pipeline}/", f"{pipeline}0")
