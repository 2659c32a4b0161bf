"""Low watermarks: bounds on the timestamps of records still to come (MillWheel §4.5, §7.2).

For a computation C that subscribes to the streams s::

    input(C)  = min over s:  injected  the injector's watermark
                             produced  the oldest undelivered production on s,
                                       and output(P) of every P that produces to s
    output(C) = min(input(C) - how far C may produce below its input,
                    the oldest hold of any of C's intervals)

In a cycle the definition is recursive and its *greatest* solution is meant: no computation waits for a record
that no undelivered production, hold or injector can still cause. It follows that inside a cycle a timer that
holds the watermark before its own firing time never fires: it would wait for its own effect. So windows and such
timers are refused there, unless an edge of the cycle is a feedback: there ``output(P)`` does not bound the input.

A published watermark never falls. Where a late record lowers a solution, the published value stays until the
solution has caught up, and records before the published value are late.

Conditions: what the outside told a superstep, apart from its records.

They are part of each superstep's commit. With them, and the same records, a replay runs the superstep as it was: at
the same wall time, under the same watermarks of its inputs, whatever clocks, silence and callers had to do with them.

The interval map of low watermark holds of one computation (MillWheel §7.2).

Every interval's owner reports what its rows still owe. The map covers what it has heard of:
a report replaces exactly the keys that it is about, so intervals may split and merge, and a
part from which nothing new has come counts with its last value. A former owner, known by its
lower sequencer, is refused. A report and the minimum cost O(log n), at 500,000 intervals too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from millpond.executor.pipeline.nodes import DEAD_LETTERS, ComputationNode
from millpond.executor.pipeline.topology import Topology, holding_edges
from millpond.executor.time.clocks import PercentileTimes, held_back
from millpond.statestore.errors import DataError, FencedError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, Sequencer, WallTimeMicros

if TYPE_CHECKING:
    from millpond.statestore.log.action import JsonValue


_SLACK: Final = 64
"""Dead heap entries that are always tolerated; beyond it, at most as many as there are live ones."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The keys from some low bound up to ``high``, and what was last said of them."""

    high: str | None
    sequencer: Sequencer
    hold: EventTimeMicros


class IntervalMap:
    """Last known holds of a computation's intervals."""

    __slots__ = ("_heap", "_lows", "_pieces")

    def __init__(self) -> None:
        self._pieces: dict[str, _Piece] = {}
        self._lows: list[str] = []
        self._heap: list[tuple[EventTimeMicros, str]] = []

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def least(self) -> EventTimeMicros:
        """The oldest hold of all; after all time when nothing is owed."""
        while self._heap:
            hold, low = self._heap[0]
            piece = self._pieces.get(low)
            if piece is not None and piece.hold == hold:
                return hold
            heapq.heappop(self._heap)
        return TIME_MAX_US

    def expect(self, intervals: Iterable[Interval]) -> None:
        """Name intervals from which a report must come before the watermark may move on."""
        for interval in sorted(intervals):
            if not self._overlapped(interval):
                self._replace(interval, _Piece(interval.high, Sequencer(0), TIME_MIN_US))

    def report(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """Take in what an interval's owner says that it owes; ``None`` is nothing.

        Raises:
            FencedError: the reporter is no longer the owner of some of these keys.
        """
        piece = _Piece(interval.high, sequencer, TIME_MAX_US if hold is None else hold)
        known = self._pieces.get(interval.low)
        if known is None or known.high != interval.high:
            self._replace(interval, piece)
            return
        _check_sequencer(interval, piece, known)
        self._pieces[interval.low] = piece
        if piece.hold != known.hold:
            self._remember(interval.low, piece)

    def _replace(self, interval: Interval, piece: _Piece) -> None:
        overlapped = self._overlapped(interval)
        for low in overlapped:
            _check_sequencer(interval, piece, self._pieces[low])
        for low in overlapped:
            self._carve(low, interval)
        self._insert(interval.low, piece)

    def _overlapped(self, interval: Interval) -> list[str]:
        first = max(bisect_right(self._lows, interval.low) - 1, 0)
        last = len(self._lows) if interval.high is None else bisect_left(self._lows, interval.high)
        return [low for low in self._lows[first:last] if _is_below(interval.low, self._pieces[low].high)]

    def _carve(self, low: str, interval: Interval) -> None:
        """Leave of a piece only what lies outside ``interval``."""
        piece = self._pieces.pop(low)
        self._lows.pop(bisect_left(self._lows, low))
        if low < interval.low:
            self._insert(low, _Piece(interval.low, piece.sequencer, piece.hold))
        if interval.high is not None and _is_below(interval.high, piece.high):
            self._insert(interval.high, piece)

    def _insert(self, low: str, piece: _Piece) -> None:
        self._pieces[low] = piece
        insort(self._lows, low)
        self._remember(low, piece)

    def _remember(self, low: str, piece: _Piece) -> None:
        if piece.hold != TIME_MAX_US:
            heapq.heappush(self._heap, (piece.hold, low))
        if len(self._heap) > 2 * len(self._pieces) + _SLACK:
            self._heap = [(p.hold, low) for low, p in self._pieces.items() if p.hold != TIME_MAX_US]
            heapq.heapify(self._heap)


def _is_below(key: str, high: str | None) -> bool:
    return high is None or key < high


def _check_sequencer(interval: Interval, piece: _Piece, known: _Piece) -> None:
    if piece.sequencer < known.sequencer:
        raise FencedError(
            "a former owner reports a watermark",
            interval=interval.app_id,
            sequencer=piece.sequencer,
            newest=known.sequencer,
        )


def solve_inputs(
    consumers: Mapping[str, Sequence[str]],
    bases: Mapping[str, EventTimeMicros],
    holds: Mapping[str, EventTimeMicros],
    horizons: Mapping[str, int] | None = None,
) -> dict[str, EventTimeMicros]:
    """The greatest input watermarks that satisfy all equations, by computation.

    No computation can lower the least output of all, so that output is final; visiting computations in
    order of their outputs settles each edge once, cycles included (Dijkstra's argument). Only a horizon can
    lower an output again, and no cycle contains one, so the loop ends.

    Args:
        consumers: the computations that consume the streams of each computation.
        bases: the bound of each computation's input apart from its producers.
        holds: the bound of each computation's output apart from its input.
        horizons: how far a computation's output lags behind its input, where it does.

    Example:
        >>> solve_inputs({"a": ["b"], "b": ["a"]}, {"a": 7, "b": 9}, {"a": 8, "b": 5})
        {'a': 5, 'b': 5}
    """
    inputs, behind = dict(bases), horizons or {}

    def output_of(name: str) -> EventTimeMicros:
        return min(held_back(inputs[name], behind.get(name, 0)), holds[name])

    outputs = {name: output_of(name) for name in inputs}
    heap = [(output, name) for name, output in outputs.items()]
    heapq.heapify(heap)
    while heap:
        output, name = heapq.heappop(heap)
        if output > outputs[name]:
            continue
        for consumer in consumers.get(name, ()):
            if output < inputs[consumer]:
                inputs[consumer] = output
                if (lower := output_of(consumer)) < outputs[consumer]:
                    outputs[consumer] = lower
                    heapq.heappush(heap, (lower, consumer))
    return inputs


class WatermarkAuthority:
    """The low watermarks of all computations of one pipeline.

    It receives the journaled watermarks at the start, then the watermarks of injectors, the holds of intervals,
    the oldest undelivered productions and the idle injectors. A read after a change solves the equations. It
    is used by one thread at a time.

    Args:
        topology: the checked pipeline.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._consumers = _consumers(topology)
        self._injected = dict.fromkeys(topology.injectors, TIME_MIN_US)
        self._horizons = {name: node.horizon_us for name, node in topology.computations.items()}
        self._idle: frozenset[str] = frozenset()
        self._intervals = {name: IntervalMap() for name in topology.computations}
        self._held_back: dict[str, EventTimeMicros] = {}
        self._undelivered: Mapping[str, EventTimeMicros] = {}
        self._inputs = dict.fromkeys(topology.computations, TIME_MIN_US)
        self._outputs = dict.fromkeys(topology.computations, TIME_MIN_US)
        self._changed = True

    # -- updates -------------------------------------------------------------------

    def restore(self, inputs: Mapping[str, EventTimeMicros]) -> None:
        """Restore journaled input watermarks, by computation: published watermarks start from them.

        Computations that the pipeline no longer has are ignored.
        """
        for name, at in inputs.items():
            if name in self._inputs:
                self._inputs[name] = max(self._inputs[name], at)

    def expect(self, intervals: Iterable[Interval]) -> None:
        """Add intervals; a computation's output watermark stays until each of its intervals has reported."""
        for interval in intervals:
            self._map_of(interval).expect([interval])
        self._changed = True

    def update_injector(self, stream: str, watermark: EventTimeMicros) -> None:
        """Raise an injector's low watermark; a lower value has no effect.

        Raises:
            InvalidError: no injector feeds this stream.
        """
        known = self._injected.get(stream)
        if known is None:
            raise InvalidError("no injector feeds this stream", stream=stream)
        if watermark > known:
            self._injected[stream] = watermark
            self._changed = True

    def set_idle(self, streams: Iterable[str]) -> None:
        """Replace the set of idle injected streams, which do not hold back the watermark while others advance."""
        idle = frozenset(streams)
        if idle != self._idle:
            self._idle = idle
            self._changed = True

    def hold_back(self, computation: str, at: EventTimeMicros | None) -> None:
        """Hold a computation's input watermark back, while it is given what lies before the records of its streams.

        Args:
            computation: its name.
            at: no earlier record is still to come; ``None`` ends it.
        """
        if at is None:
            self._held_back.pop(computation, None)
        else:
            self._held_back[computation] = at
        self._changed = True

    def update_interval(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """Replace the oldest output time that an interval holds; ``None`` if it holds none.

        Raises:
            FencedError: the sequencer belongs to a former owner.
            InvalidError: the pipeline has no such computation.
        """
        self._map_of(interval).report(interval, sequencer, hold)
        self._changed = True

    def set_undelivered(self, oldest: Mapping[str, EventTimeMicros]) -> None:
        """Replace the oldest event time of the committed, unconsumed productions of every stream that has some."""
        self._undelivered = dict(oldest)
        self._changed = True

    def _map_of(self, interval: Interval) -> IntervalMap:
        holds = self._intervals.get(interval.computation)
        if holds is None:
            raise InvalidError("the pipeline has no such computation", computation=interval.computation)
        return holds

    # -- reads ---------------------------------------------------------------------

    @property
    def idle(self) -> frozenset[str]:
        """The idle injected streams."""
        return self._idle

    def injector_watermark(self, stream: str) -> EventTimeMicros:
        """The low watermark of an injected stream."""
        return self._injected[stream]

    def input_watermark(self, computation: str) -> EventTimeMicros:
        """The lower bound of the times of records that may still reach ``computation``; it never falls."""
        self._solve()
        return self._inputs[computation]

    def settled(self, computation: str, injected: Mapping[str, EventTimeMicros]) -> EventTimeMicros | None:
        """The input watermark that a computation will have at least, once its injected streams have these.

        Returns:
            ``None`` where it consumes what other computations produce: what these will produce is not known; and
            where it is held back.
        """
        streams = [own.stream for own in self._topology.computations[computation].subscriptions]
        if computation in self._held_back or not all(stream in self._injected for stream in streams):
            return None
        bounds = [max(self._injector_bound(name), injected.get(name, TIME_MIN_US)) for name in streams]
        return max(self.input_watermark(computation), EventTimeMicros(min(bounds)))

    def output_watermark(self, computation: str) -> EventTimeMicros:
        """The lower bound of the times that ``computation`` may still produce at; it never falls."""
        self._solve()
        return self._outputs[computation]

    def input_watermarks(self) -> dict[str, EventTimeMicros]:
        """All input watermarks, by computation, for the journal from which `restore` continues."""
        self._solve()
        return dict(self._inputs)

    def _solve(self) -> None:
        if not self._changed:
            return
        holds = {name: intervals.least for name, intervals in self._intervals.items()}
        bases = {name: self._base(node) for name, node in self._topology.computations.items()}
        bases |= {name: min(bases[name], at) for name, at in self._held_back.items()}
        for name, solved in solve_inputs(self._consumers, bases, holds, self._horizons).items():
            self._inputs[name] = max(self._inputs[name], solved)
            # A hold behind the published input comes from late records and binds as it is.
            output = min(held_back(solved, self._horizons[name]), holds[name])
            self._outputs[name] = max(self._outputs[name], output)
        self._changed = False

    def _base(self, node: ComputationNode) -> EventTimeMicros:
        undelivered = (self._undelivered[stream] for stream in node.inbox if stream in self._undelivered)
        outside = (self._outside_bound(subscription.stream) for subscription in node.subscriptions)
        return min([*undelivered, *outside])

    def _outside_bound(self, stream: str) -> EventTimeMicros:
        """The bound of outside records on a stream; the end of time for a stream that computations produce."""
        if stream in self._injected:
            return self._injector_bound(stream)
        if stream == DEAD_LETTERS:
            # An unreadable outside record becomes a dead letter before any computation sees it.
            return min(map(self._injector_bound, self._injected), default=TIME_MAX_US)
        return TIME_MAX_US

    def _injector_bound(self, stream: str) -> EventTimeMicros:
        """An injector's watermark; while it is idle and behind, that of the slowest active injector."""
        own = self._injected[stream]
        if stream not in self._idle:
            return own
        others = [at for name, at in self._injected.items() if name not in self._idle]
        # An ended input does not tell how far the others are.
        return max(own, min((at for at in others if at != TIME_MAX_US), default=own))


def _consumers(topology: Topology) -> dict[str, tuple[str, ...]]:
    edges = holding_edges(topology)
    return {name: tuple(dict.fromkeys(consumer for _, consumer in own)) for name, own in edges.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a superstep met.

    Attributes:
        wall_time: when it was planned.
        watermarks: by injected stream, its watermarks by percentile, that of 100 among them.
        idle: the injected streams that were idle.
        stamps: by injected stream, the event time that records of it got if they carry none.
    """

    wall_time: WallTimeMicros
    watermarks: Mapping[str, PercentileTimes] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    stamps: Mapping[str, EventTimeMicros] = field(default_factory=dict)

    def stamped(self, stamps: Mapping[str, EventTimeMicros | None]) -> Conditions:
        """The same with the stamps of arrival, ``None`` for records that carry their own time."""
        return replace(self, stamps={stream: at for stream, at in stamps.items() if at is not None})

    def to_json(self) -> dict[str, JsonValue]:
        """The form that a commit has.

        Example:
            >>> Conditions(wall_time=5, watermarks={"clicks": {100.0: 3}}).to_json()
            {'wall_time': 5, 'watermarks': {'clicks': {'100.0': 3}}}
        """
        fields: dict[str, JsonValue] = {
            "wall_time": self.wall_time,
            "watermarks": {
                stream: {repr(percentile): int(at) for percentile, at in marks.items()}
                for stream, marks in self.watermarks.items()
            },
        }
        if self.idle:
            fields["idle"] = list(self.idle)
        if self.stamps:
            fields["stamps"] = {stream: int(at) for stream, at in self.stamps.items()}
        return fields

    @staticmethod
    def from_json(fields: Any) -> Conditions:
        """Read what `to_json` gave.

        Raises:
            DataError: it is something else.
        """
        try:
            return Conditions(
                wall_time=WallTimeMicros(fields["wall_time"]),
                watermarks={
                    stream: {float(percentile): EventTimeMicros(at) for percentile, at in marks.items()}
                    for stream, marks in fields["watermarks"].items()
                },
                idle=tuple(fields.get("idle", ())),
                stamps={stream: EventTimeMicros(at) for stream, at in fields.get("stamps", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "a commit does not say under which conditions its superstep ran", cause=error
            ) from error
