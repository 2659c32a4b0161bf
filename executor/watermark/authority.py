"""Low watermarks: bounds on the timestamps of records still to come (MillWheel §4.5, §7.2).

For a computation C that subscribes to the streams s::

    input(C)  = min over s:  injected  the injector's watermark
                             produced  the oldest undelivered production on s,
                                       and output(P) of every P that produces to s
    output(C) = min(input(C) - how far C may produce below its input,
                    the oldest hold of any of C's intervals)

In a cycle the *greatest* solution is meant: no computation waits for a record that no undelivered production, hold or
injector can still cause. So inside a cycle a timer that holds the watermark before its own firing time would wait for
its own effect. Windows and such timers are refused there, unless an edge of the cycle is a feedback: there
``output(P)`` does not bound the input.

A published watermark never falls. Where a late record lowers a solution, the published value stays until the
solution has caught up, and records before the published value are late.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.topology import Topology, holding_edges
from millpond.executor.time.clocks import PercentileTimes, held_back
from millpond.statestore.errors import DataError, FencedError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, Sequencer, WallTimeMicros

# Dead heap entries that are always tolerated; beyond it, at most as many as there are live ones.
_SLACK: Final = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """The last report on the keys from some low bound up to ``high``."""

    high: str | None
    sequencer: Sequencer
    hold: EventTimeMicros


class IntervalMap:
    """Last known low watermark holds of a computation's intervals (MillWheel §7.2).

    A report replaces exactly its own keys, so intervals may split and merge, and a part without a new report counts
    with its last value. A report and the minimum cost O(log n), at 500,000 intervals too.
    """

    __slots__ = ("_heap", "_lows", "_pieces")

    def __init__(self) -> None:
        self._pieces: dict[str, _Piece] = {}
        self._lows: list[str] = []
        self._heap: list[tuple[EventTimeMicros, str]] = []

    @property
    def least(self) -> EventTimeMicros:
        """The oldest hold of all; the end of time when nothing is owed."""
        while self._heap:
            hold, low = self._heap[0]
            piece = self._pieces.get(low)
            if piece is not None and piece.hold == hold:
                return hold
            heapq.heappop(self._heap)
        return TIME_MAX_US

    def report(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """Replace the hold of an interval; ``None`` if its rows owe nothing."""
        piece = _Piece(interval.high, sequencer, TIME_MAX_US if hold is None else hold)
        known = self._pieces.get(interval.low)
        if known is None or known.high != interval.high:
            self._replace(interval, piece)
            return
        if sequencer < known.sequencer:
            raise _fenced(interval, piece, known)
        self._pieces[interval.low] = piece
        if piece.hold != known.hold:
            self._remember(interval.low, piece)

    def _replace(self, interval: Interval, piece: _Piece) -> None:
        first = max(bisect_right(self._lows, interval.low) - 1, 0)
        last = len(self._lows) if interval.high is None else bisect_left(self._lows, interval.high)
        overlapped = [
            low for low in self._lows[first:last] if _is_below(interval.low, self._pieces[low].high)
        ]
        # All checks come first: a former owner must not carve any of the keys.
        for low in overlapped:
            if piece.sequencer < self._pieces[low].sequencer:
                raise _fenced(interval, piece, self._pieces[low])
        for low in overlapped:
            # The parts outside the interval stay.
            former = self._pieces.pop(low)
            self._lows.pop(bisect_left(self._lows, low))
            if low < interval.low:
                self._insert(low, _Piece(interval.low, former.sequencer, former.hold))
            if interval.high is not None and _is_below(interval.high, former.high):
                self._insert(interval.high, former)
        self._insert(interval.low, piece)

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


def _fenced(interval: Interval, piece: _Piece, known: _Piece) -> FencedError:
    return FencedError(
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
    """Return the greatest input watermarks that satisfy all equations, by computation.

    No computation can lower the least output of all, so that output is final; visiting computations in
    order of their outputs settles each edge once, cycles included (Dijkstra's argument). Only a horizon can
    lower an output again, and no cycle contains one, so the loop ends.

    ``bases`` bound each input apart from its producers, ``holds`` each output apart from its input; ``horizons`` are
    the lags of outputs behind inputs.
    """
    inputs, behind = dict(bases), horizons or {}

    def output_of(name: str) -> EventTimeMicros:
        horizon = behind.get(name, 0)
        return min(held_back(inputs[name], horizon) if horizon else inputs[name], holds[name])

    outputs = {}
    for name in inputs:
        outputs[name] = output_of(name)
    heap = list(zip(outputs.values(), outputs, strict=True))
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
    """The low watermarks of all computations of one pipeline; used by one thread at a time.

    It gets the journaled watermarks at the start, then the watermarks of injectors, the holds of intervals,
    the oldest undelivered productions and the injected streams that are ``idle``, which do not hold back the watermark
    while others advance. A read after a change solves the equations.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._consumers = {
            name: tuple(dict.fromkeys(consumer for _, consumer in edges))
            for name, edges in holding_edges(topology).items()
        }
        self.injected: dict[str, EventTimeMicros] = dict.fromkeys(topology.injectors, TIME_MIN_US)
        self.idle: frozenset[str] = frozenset()
        computations = topology.computations
        self._inboxes = {name: node.inbox for name, node in computations.items()}
        self._sources: dict[str, tuple[str, ...]] = {}
        for name, node in computations.items():
            streams = {subscription.stream for subscription in node.subscriptions}
            # An unreadable outside record becomes a dead letter before any computation sees it.
            bounds_all = DEAD_LETTERS in streams
            self._sources[name] = tuple(s for s in topology.injectors if bounds_all or s in streams)
        self._horizons = {name: node.horizon_us for name, node in computations.items()}
        self._intervals = {name: IntervalMap() for name in computations}
        self._held_back: dict[str, EventTimeMicros] = {}
        self._undelivered: Mapping[str, EventTimeMicros] = {}
        self._inputs = dict.fromkeys(computations, TIME_MIN_US)
        self._outputs = dict.fromkeys(computations, TIME_MIN_US)
        self._changed = True

    # -- updates -------------------------------------------------------------------

    def restore(self, inputs: Mapping[str, EventTimeMicros]) -> None:
        for name, at in inputs.items():
            if name in self._inputs:
                self._inputs[name] = max(self._inputs[name], at)

    def update_injector(self, stream: str, watermark: EventTimeMicros) -> None:
        """Raise an injector's low watermark; a lower value has no effect."""
        known = self.injected.get(stream)
        if known is None:
            raise InvalidError("no injector feeds this stream", stream=stream)
        if watermark > known:
            self.injected[stream] = watermark
            self._changed = True

    def set_idle(self, streams: Iterable[str]) -> None:
        idle = frozenset(streams)
        if idle != self.idle:
            self.idle = idle
            self._changed = True

    def hold_back(self, computation: str, at: EventTimeMicros | None) -> None:
        """Hold a computation's input watermark at ``at`` during its backfill; ``None`` ends the hold."""
        if at is None:
            self._held_back.pop(computation, None)
        else:
            self._held_back[computation] = at
        self._changed = True

    def update_interval(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """Replace the oldest output time that an interval holds; ``None`` if it holds none."""
        intervals = self._intervals.get(interval.computation)
        if intervals is None:
            raise InvalidError("the pipeline has no such computation", computation=interval.computation)
        intervals.report(interval, sequencer, hold)
        self._changed = True

    def set_undelivered(self, oldest: Mapping[str, EventTimeMicros]) -> None:
        """Replace the oldest event time of the committed, unconsumed productions of every stream that has some."""
        self._undelivered = dict(oldest)
        self._changed = True

    # -- reads ---------------------------------------------------------------------

    def input_watermark(self, computation: str) -> EventTimeMicros:
        """Return the lower bound of the times of records that may still reach ``computation``; it never falls."""
        if self._changed:
            self._solve()
        return self._inputs[computation]

    def settled(self, computation: str, injected: Mapping[str, EventTimeMicros]) -> EventTimeMicros | None:
        """Return a lower bound of an input watermark, once the injected streams have the watermarks ``injected``.

        It is ``None`` for a computation that is held back, or that consumes other computations' productions, whose
        times are unknown.
        """
        streams = [own.stream for own in self._topology.computations[computation].subscriptions]
        if computation in self._held_back or not all(stream in self.injected for stream in streams):
            return None
        bounds = [
            max(
                self._idle_bound(name) if name in self.idle else self.injected[name],
                injected.get(name, TIME_MIN_US),
            )
            for name in streams
        ]
        return max(self.input_watermark(computation), EventTimeMicros(min(bounds)))

    def output_watermarks(self) -> dict[str, EventTimeMicros]:
        """Return the lower bounds of the times that computations may still produce at; they never fall."""
        if self._changed:
            self._solve()
        return dict(self._outputs)

    def input_watermarks(self) -> dict[str, EventTimeMicros]:
        """Return all input watermarks, by computation, for the journal from which `restore` continues."""
        if self._changed:
            self._solve()
        return dict(self._inputs)

    def _solve(self) -> None:
        holds, bases = {}, {}
        for name, intervals in self._intervals.items():
            holds[name] = intervals.least
            # The bound of the input apart from its producers.
            base = self._held_back.get(name, TIME_MAX_US)
            for stream in self._inboxes[name]:
                base = min(base, self._undelivered.get(stream, TIME_MAX_US))
            for stream in self._sources[name]:
                bound = self._idle_bound(stream) if stream in self.idle else self.injected[stream]
                base = min(base, bound)
            bases[name] = base
        for name, solved in solve_inputs(self._consumers, bases, holds, self._horizons).items():
            # Published watermarks never fall (I7), even if a late record lowers the solution.
            self._inputs[name] = max(self._inputs[name], solved)
            # A hold behind the published input comes from a late record and binds unchanged.
            horizon = self._horizons[name]
            output = min(held_back(solved, horizon) if horizon else solved, holds[name])
            self._outputs[name] = max(self._outputs[name], output)
        self._changed = False

    def _idle_bound(self, stream: str) -> EventTimeMicros:
        """Return an idle injector's watermark, or the slowest active injector's while it is behind."""
        own = self.injected[stream]
        others = [at for name, at in self.injected.items() if name not in self.idle]
        # An ended input does not show how far the others are.
        return max(own, min((at for at in others if at != TIME_MAX_US), default=own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The outside circumstances of a superstep, apart from its records; part of its commit.

    With them and the same records, a replay repeats the superstep: at the same wall time, under the same watermarks of
    its inputs, whatever moved these.

    Attributes:
        watermarks: by injected stream, its watermarks by percentile, 100 included.
        stamps: by injected stream, the arrival of records whose times follow from it: that have no other, or that may lie
            ahead of it by a bound.
        drains: all input has ended, and event time passes by steps.
    """

    wall_time: WallTimeMicros
    watermarks: Mapping[str, PercentileTimes] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    stamps: Mapping[str, EventTimeMicros] = field(default_factory=dict)
    drains: bool = False

    def to_json(self) -> dict[str, JsonValue]:
        watermarks: dict[str, JsonValue] = {
            stream: {repr(percentile): int(at) for percentile, at in marks.items()}
            for stream, marks in self.watermarks.items()
        }
        fields: dict[str, JsonValue] = {"wall_time": self.wall_time, "watermarks": watermarks}
        if self.idle:
            fields["idle"] = list(self.idle)
        if self.drains:
            fields["drains"] = True
        if self.stamps:
            fields["stamps"] = {stream: int(at) for stream, at in self.stamps.items()}
        return fields

    @staticmethod
    def from_json(fields: Any) -> Conditions:
        try:
            return Conditions(
                wall_time=WallTimeMicros(fields["wall_time"]),
                watermarks={
                    stream: {float(percentile): EventTimeMicros(at) for percentile, at in marks.items()}
                    for stream, marks in fields["watermarks"].items()
                },
                idle=tuple(fields.get("idle", ())),
                drains=bool(fields.get("drains", False)),
                stamps={stream: EventTimeMicros(at) for stream, at in fields.get("stamps", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "a commit does not say under which conditions its superstep ran", cause=error
            ) from error
