"""The nodes of a pipeline's graph: injectors, computations and sinks, as the user declared them.

A computation with weak productions delivers them within the superstep that made them (MillWheel §6.1.3): its
streams are *fused* with their consumers. All effects are part of one commit, so nothing is lost or repeated,
but consumers may see records that are not durable yet. A fused production that is stored anyway is
*addressed*: ``visits@cities`` waits only for the computation ``cities``, which was too slow for the
superstep, and ``visits@`` waits for sinks only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, TypedDict

import pyarrow as pa

from millpond.executor.computation.computation import Computation, Drain, Way
from millpond.executor.computation.context import declared_counters
from millpond.executor.computation.state import CombiningState, StateLayout
from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.sinks.sink import Sink
from millpond.executor.time.clocks import declared_percentiles, horizon_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.state_schema import SchemaCodec

ProductionMode: TypeAlias = Literal["strong", "weak"]
"""When a production is delivered: ``"strong"``: once its checkpoint is durable; ``"weak"``: before."""

_MARK: Final = "@"

LATE: Final = ".late"
"""The end of the name of a windowed step's stream of records that came too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakStreams:
    """How a computation's productions are delivered within a superstep.

    Consumers get the productions of ``fused`` streams before the commit. Those of ``kept`` streams are also written
    to the producer's rows, for a sink or for a consumer in another task.
    """

    fused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


STRONG: Final = WeakStreams()


def addressed(stream: str, consumer: str = "") -> str:
    """Return the stream under which a fused production is kept for one computation, or for sinks only."""
    return f"{stream}{_MARK}{consumer}"


def is_addressed(stream: str) -> bool:
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


@dataclass(frozen=True, kw_only=True)
class ComputationNode:
    """A declared computation; `ComputationOptions` explains its options.

    Attributes:
        schemas: the schemas of the values that it produces, by stream.
        prefix: the prefix of its composite's names; empty outside of composites.
        cycle: the shortest cycle in which its output watermark holds its input watermark back: computation
            names that begin and end with this one. Empty without such a cycle; `Pipeline.check` fills it in.
    """

    name: str
    computation: Computation
    subscriptions: tuple[Subscription, ...]
    produces: tuple[str, ...] = ()
    schemas: Mapping[str, SchemaCodec] = field(default_factory=dict)
    exactly_once: bool = True
    on_error: OnError = "dead_letter"
    retries: int = 2
    intervals: int | None = None
    on_late: OnLate | Mapping[str, OnLate] = "process"
    productions: ProductionMode = "strong"
    user_code_timeout: str | timedelta | None = None
    renamed_from: str | None = None
    prefix: str = ""
    time_sorted: bool = False
    drain: Drain = "last_event"
    cycle: tuple[str, ...] = ()

    @cached_property
    def inbox(self) -> tuple[str, ...]:
        """The streams that it reads from committed rows, including streams addressed to it."""
        streams = [subscription.stream for subscription in self.subscriptions]
        return (*streams, *(addressed(stream, self.name) for stream in streams))

    @cached_property
    def production_names(self) -> Mapping[str, str]:
        """The streams that it may produce to, by every name that its code may use: within its composite, or whole."""
        whole = {stream: stream for stream in self.produces}
        return whole | {stream.removeprefix(self.prefix): stream for stream in self.produces}

    @cached_property
    def sets_timers(self) -> bool:
        """True for user code with timers; the timers of windows follow from elements."""
        code = self.computation
        return type(code).process_timer is not Computation.process_timer and not code.fingerprint

    @cached_property
    def percentiles(self) -> tuple[float, ...]:
        """The percentile watermarks below 100 that the code declares, greatest first."""
        return declared_percentiles(self.computation.percentiles, self.name)

    @cached_property
    def counters(self) -> tuple[str, ...]:
        return declared_counters(self.computation.counters, self.name)

    def drops_late(self, stream: str) -> bool:
        word = self.on_late if isinstance(self.on_late, str) else self.on_late.get(stream)
        return word == "drop"

    @cached_property
    def horizon_us(self) -> int:
        """Lag of the output watermark behind the input's, in microseconds."""
        return horizon_us(self.computation.late_data_horizon)

    def rank(self, stream: str) -> int:
        return next((rank for rank, own in enumerate(self.subscriptions) if own.stream == stream), 0)

    def subscription(self, stream: str) -> Subscription | None:
        return next((own for own in self.subscriptions if own.stream == stream), None)


def way_of(node: ComputationNode) -> Way:
    """Return how a computation runs with its options."""
    way = node.computation.way()
    if way.name in ("hooks", "table"):
        adds = StateLayout.of(node.computation).adds
        return replace(way, because=f"{way.because}; its state is added to, not read") if adds else way
    if node.user_code_timeout is not None:
        return Way("hooks", "user_code_timeout limits the code")
    if node.cycle:
        return Way("hooks", "the step is in a cycle")
    if node.time_sorted:
        return Way("hooks", "its records wait for the order of time")
    return way


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkNode:
    name: str
    stream: str
    sink: Sink


DEAD_LETTERS = "dead_letters"
"""Reserved name of the computation, and of the stream, that hold dead letters."""


SIGNALS = "window_signals"
"""Reserved name of the injected stream that carries outside signals to the windowed steps."""


def control_interval(pipeline: str) -> Interval:
    """Return the interval that a pipeline's driver owns: every commit touches it, so that each one is fenced."""
    return Interval(DEAD_LETTERS, f"{pipeline}/", f"{pipeline}0")


INPUT: Final = "input"
"""The backfill from the rows of the runner's bounded input that are consumed already."""

Backfill: TypeAlias = Any
"""Rows as a runner takes them, the path of a Parquet file, ``"input"``, or a mapping from streams to these."""


def backfill_by_stream(computation: str, given: Backfill, streams: Sequence[str]) -> Mapping[str, Backfill]:
    if isinstance(given, Mapping):
        if not given or (unknown := sorted(set(map(str, given)) - set(streams))):
            raise InvalidError(
                "a backfill must be rows, or map streams that the computation consumes to rows",
                computation=computation,
                streams=list(streams),
                given=list(given) if not given else unknown,
            )
        return dict(given)
    if len(streams) > 1:
        raise InvalidError(
            "the computation consumes several streams: map each to its backfill",
            computation=computation,
            streams=list(streams),
        )
    return {streams[0]: given}


ValueSchema: TypeAlias = pa.Schema | pa.StructType | None
"""The schema of the values of a stream; ``None`` for values of any type of the model."""

StateSchema: TypeAlias = pa.Schema | pa.StructType | CombiningState | type
"""What the states of a computation are: rows with a schema, sums to which code only adds, or objects of a class."""


class ComputationOptions(TypedDict, total=False):
    """The optional settings of a computation, for `Pipeline.add`, `Stream.apply` and every windowed step.

    Example:
        ``stream.apply(Counter(), name="counts", retries=0, on_error="stop")``
    """

    exactly_once: bool
    """Deduplicate records that carry an id; ``True`` by default (MillWheel §6.1.1)."""

    on_error: OnError
    """The fate of a record whose code still raises after all ``retries``: ``"dead_letter"``, the default, unless the
    runner's ``dead_letter_limit`` is exceeded; or ``"stop"``, which ends the run."""

    retries: int
    """The number of times that a failing record is retried before ``on_error`` applies; 2 by default."""

    intervals: int | None
    """The number of key intervals at the first input, by default the runner's choice; it cannot change later."""

    on_late: OnLate | Mapping[str, OnLate]
    """The fate of a record behind the input low watermark: ``"process"``, the default, or ``"drop"``, which only
    counts it. A mapping sets it by stream; streams outside the mapping are processed."""

    productions: ProductionMode
    """``"strong"``, the default, delivers a production once it is durable; ``"weak"`` in its superstep (§6.1.3)."""

    user_code_timeout: str | timedelta | None
    """The time limit, as ``"30s"``, for the code's work on one key of a bundle, or for one call of ``process_table``. Code
    that exceeds the limit is interrupted, which counts as an exception. ``None``, the default, sets no limit.
    """

    time_sorted: bool
    """Keep a key's records in its row until the low watermark has passed them, then pass them in order of
    event time with the key's event timers between them, so that the result does not depend on how the input
    is cut. ``False`` unless given here or by the computation's class (docs/how-to/order.md).
    """

    drain: Drain
    """What timers do when all input has ended. With ``"last_event"``, the default, an event timer that fires after the
    last event of the input sets no other event timer, so timers that renew themselves come to an end. With ``"all"``
    they may, for chains that end by themselves; 100,000 firings of a key after the last event are refused.
    """

    feedback: Collection[str]
    """The consumed streams on which the computation's own output returns, through any number of others,
    without holding its watermark back. Without a feedback, a windowed step in a cycle, or a timer that holds
    an earlier time than its own, would wait for itself. A returning record is late if the watermark passed
    its time before it was produced.
    """

    backfill: Backfill | None
    """The past records that the computation gets before anything else, if it has never run in this store:
    rows, as the stream's injector reads them, or ``"input"``, the rows of the runner's bounded input that
    were consumed before it joined. For a computation with several streams, a mapping from streams to these
    (docs/how-to/backfill.md).
    """

    renamed_from: str | None
    """The computation's former name. Its rows, timers, record ids and watermarks in the store move to the new
    name when the pipeline opens. The option may stay in the code afterwards.
    """
