"""The nodes of a pipeline's graph: injectors, computations and sinks, as the user declared them.

Weak productions: delivered before the checkpoint that would make them durable (MillWheel §6.1.3).

A computation with ``productions="weak"`` delivers its productions within the superstep that made them: its
streams are *fused* with their consumers. The consumers' effects are part of the same commit, so the store
loses and repeats nothing. In exchange, consumers' code may see records that are not durable yet.

`fusion` decides which streams are fused.

A fused production that is stored anyway is *addressed*: its stream names the consumer that it still waits for.
``visits@cities`` waits only for the computation ``cities``, which was too slow to receive it within its
superstep; ``visits@`` waits for sinks only.

Names that the engine keeps for itself, and the interval that a pipeline's driver owns.
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
"""When a production is delivered: once its checkpoint is durable, or before."""

_MARK: Final = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakStreams:
    """How a computation's productions are delivered within a superstep.

    Attributes:
        fused: the streams whose productions reach their consumers before the commit.
        kept: the fused streams whose productions are also written to the producer's rows, for a sink
            or for a consumer in another task.
    """

    fused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


STRONG: Final = WeakStreams()
"""Every production waits for its checkpoint."""


def addressed(stream: str, consumer: str = "") -> str:
    """The stream under which a fused production is kept for one computation, or for sinks only.

    Example:
        >>> addressed("visits", "cities")
        'visits@cities'
    """
    return f"{stream}{_MARK}{consumer}"


def is_addressed(stream: str) -> bool:
    """Whether a stream holds fused productions that are stored for one consumer or for sinks."""
    return _MARK in stream


OnError: TypeAlias = Literal["dead_letter", "stop"]
"""What happens to a record whose code raises at every retry: it becomes a dead letter, or the run stops."""


OnLate: TypeAlias = Literal["process", "drop"]
"""What happens to a record behind the low watermark: user code processes it, or it is only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A stream that a computation consumes, and how its records' keys are derived.

    Attributes:
        stream: its name.
        key: how keys are derived; ``None`` keeps the record's own.
        feedback: whether what comes back on it from the computation itself holds the watermark not back.
    """

    stream: str
    key: KeyExtractor = None
    feedback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputationNode:
    """A declared computation; `ComputationOptions` explains what is not said here.

    Attributes:
        name: the partition of its rows, and its table in SQL.
        computation: the user's code; one object, shared by all keys.
        subscriptions: the streams that it consumes.
        produces: the streams that it may produce to.
        exactly_once: whether records with ids are deduplicated.
        on_error: what happens to a record whose code raises at every retry.
        retries: how many times a failing record is tried again.
        intervals: how many key intervals to start with; ``None`` lets the runner choose.
        on_late: what happens to records behind the input low watermark, for all streams or by stream.
            They are counted in either case.
        productions: when productions are delivered (docs/design/004-weak-productions.md).
        user_code_timeout_ms: the time limit of the code's work on one key of a bundle; ``None``: no limit.
        renamed_from: the name under which the store may have its rows.
        prefix: what the names of its composite begin with; empty outside of composites.
        time_sorted: whether records wait until they can be given in the order of their event times.
        cycle: the way on which its own output watermark holds its input watermark back: computations, the first
            and the last of which is this one. Empty unless there is such a cycle; `Pipeline.check` finds it.
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
        """The streams that it reads from committed rows, including those addressed to it."""
        streams = [subscription.stream for subscription in self.subscriptions]
        return (*streams, *(addressed(stream, self.name) for stream in streams))

    @property
    def production_names(self) -> Mapping[str, str]:
        """The streams that it may produce to, by the names that its code says: those in its composite, or whole."""
        whole = {stream: stream for stream in self.produces}
        return whole | {stream.removeprefix(self.prefix): stream for stream in self.produces}

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentile watermarks below 100 that the code declares, greatest first."""
        return declared_percentiles(self.computation.percentiles, self.name)

    @property
    def counters(self) -> tuple[str, ...]:
        """The counters that the code declares."""
        return declared_counters(self.computation.counters, self.name)

    def drops_late(self, stream: str) -> bool:
        """Whether late records of a stream are dropped."""
        word = self.on_late if isinstance(self.on_late, str) else self.on_late.get(stream)
        return word == "drop"

    @property
    def horizon_us(self) -> int:
        """How far the output watermark lags behind the input's, in microseconds."""
        return horizon_us(self.computation.late_data_horizon)

    def rank(self, stream: str) -> int:
        """The place of a stream among those that it consumes."""
        return next((rank for rank, own in enumerate(self.subscriptions) if own.stream == stream), 0)

    def subscription(self, stream: str) -> Subscription | None:
        """The subscription to ``stream``; ``None`` without one."""
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
"""Reserved name of the injected stream on which signals from outside reach the windowed steps that wait for them."""


def control_interval(pipeline: str) -> Interval:
    """The interval that the driver of a pipeline itself owns.

    Every superstep's commit touches it, so a commit without any other row is fenced too.
    """
    return Interval(DEAD_LETTERS, f"{pipeline}/", f"{pipeline}0")
