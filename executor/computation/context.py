"""
The context of a hook: everything user code may do, for exactly one key (MillWheel §5.1).
"""

from __future__ import annotations

from typing import Any, Final, Literal, NoReturn, Protocol, TypeAlias

from millpond.executor.computation.counters import AMOUNT_MAX, Counters
from millpond.executor.computation.holds import Holds
from millpond.executor.computation.key_timers import KeyTimers
from millpond.executor.computation.productions import Productions
from millpond.executor.computation.record_columns import InputTime
from millpond.executor.computation.state import State
from millpond.executor.computation.timer import Timer
from millpond.executor.event_time.clocks import EXACT, Clocks
from millpond.executor.event_time.instants import Moment, to_micros
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

__all__ = ["Context", "DomainName"]

DomainName: TypeAlias = TimeDomain | Literal["event", "wall"]
"""A time domain, or its name."""

_EVENT: Final = TimeDomain.EVENT
_DOMAINS: Final[dict[str, TimeDomain]] = {each.value: each for each in (TimeDomain.EVENT, TimeDomain.WALL)}


class _Producer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def produces(self) -> Any: ...
    @property
    def percentiles(self) -> Any: ...
    @property
    def counters(self) -> Any: ...


class Context:
    """
    State, timers and productions of one key; valid only until the hook returns.

    Times are microseconds since 1970 UTC, or ``datetime`` objects with an offset.

    Attributes:
        key: the key that the hook runs for.
        state: its persistent state.
        watermark: the computation's input low watermark; records below it are late.
        wall_time: the wall time of the superstep, the same for all its hooks.
    """

    __slots__ = (
        "_clocks",
        "_counters",
        "_declared_counters",
        "_holds",
        "_input",
        "_name",
        "_percentiles",
        "_produces",
        "_productions",
        "_timers",
        "key",
        "state",
        "wall_time",
        "watermark",
    )

    def __init__(
        self,
        node: _Producer,
        state: State,
        timers: KeyTimers,
        productions: Productions,
        input_time: InputTime,
        clocks: Clocks,
        holds: Holds,
        counters: Counters | None = None,
    ) -> None:
        self._name = node.name
        self._produces = frozenset(node.produces)
        self._percentiles = frozenset(node.percentiles)
        self._clocks = clocks
        self._holds = holds
        self._counters = Counters() if counters is None else counters
        self._declared_counters = frozenset(node.counters)
        self._timers = timers
        self._productions = productions
        self._input = input_time
        self.key = ""
        self.state = state
        self.watermark = EventTimeMicros(clocks.watermark)
        self.wall_time = WallTimeMicros(clocks.wall_time)

    @property
    def oldest_at(self) -> EventTimeMicros:
        """
        The oldest time that may be produced at: that of the input, or one that the key owes already.

        For records it is older by the computation's ``late_data_horizon``.

        A key owes the output times of its pending timers and what its state holds; those that it
        owed when its turn began count until the turn ends.
        """
        return EventTimeMicros(self._holds.floor())

    def watermark_at(self, percentile: float) -> EventTimeMicros:
        """
        The input watermark of a share of the records: about so many percent are in up to here.

        Args:
            percentile: 100, the low watermark itself, or one of the computation's ``percentiles``.

        Raises:
            InvalidError: the computation does not declare it.
        """
        return EventTimeMicros(self._clocks.of(_EVENT, self._declared(percentile)))

    def _declared(self, percentile: float) -> float:
        if percentile == EXACT or percentile in self._percentiles:
            return float(percentile)
        raise InvalidError(
            "the computation does not declare this percentile in percentiles",
            computation=self._name,
            percentile=percentile,
        )

    def set_timer(
        self,
        at: Moment,
        tag: str = "",
        domain: DomainName = "event",
        output_at: Moment | None = None,
        percentile: float = EXACT,
    ) -> None:
        """
        Have ``process_timer`` called once the domain's clock reaches ``at``.

        It replaces the pending timer of the same tag and domain. A time that has passed
        already fires in this very bundle.

        Args:
            at: when to fire.
            tag: the timer's name within key and domain.
            domain: ``"event"`` waits for the low watermark, ``"wall"`` for the wall time.
            output_at: event time of what the timer will produce, which holds the low
                watermark back. By default ``at`` for an event timer (or the input's time,
                if that is later) and the input's time for a wall timer.
            percentile: in event time, the watermark to wait for: 100 or one of the computation's
                ``percentiles``. At most ``100 - percentile`` percent of the records before
                ``at`` are still to come when it fires, and they are not late.

        Raises:
            InvalidError: not a time, an unknown domain, a percentile that is not declared, or
                ``output_at`` below `oldest_at`.
        """
        moment = at if type(at) is int else to_micros(at)
        known = _DOMAINS.get(domain) or self._unknown(domain)
        if percentile != EXACT:
            percentile = self._declared_event(percentile, known)
        input_time = self._input
        if output_at is not None:
            output = self._not_below(input_time.floor_at, to_micros(output_at), "output_at")
        elif known is _EVENT:
            output = max(input_time.floor_at, moment)
        else:
            output = input_time.at
        timers = self._timers
        # Windows set the same timer with every record: what is pending has been checked before.
        if not timers.has(tag, known, moment, output, percentile):
            timers.set(Timer(_text(tag, "timer tag"), known, to_micros(moment), output, percentile))

    def delete_timer(self, tag: str = "", domain: DomainName = "event") -> None:
        """
        Remove a pending timer, if there is one.
        """
        self._timers.delete(tag, _DOMAINS.get(domain) or self._unknown(domain))

    def produce(self, stream: str, value: Any, key: str | None = None, at: Moment | None = None) -> None:
        """
        Send a record to all consumers of ``stream``, once this bundle is durable.

        Args:
            stream: one of the streams that the computation was declared to produce.
            value: what JSON can carry, or bytes.
            key: the record's own key; this key unless given.
            at: its event time; that of the record or timer at hand unless given.

        Raises:
            InvalidError: an undeclared stream, or a time below `oldest_at` (§4.5).
        """
        if stream not in self._produces:
            raise InvalidError(
                "the computation does not declare this stream in produces",
                computation=self._name,
                stream=stream,
            )
        input_time = self._input
        moment = input_time.at if at is None else self._not_below(input_time.floor_at, to_micros(at), "at")
        own_key = self.key if key is None else _text(key, "production key")
        self._productions.append(stream, own_key, value, moment)

    def count(self, counter: str, amount: int = 1) -> None:
        """
        Add to a counter of the computation, over all its keys; see ``by_computation`` in `Totals`.

        Like state it counts exactly once: what a failing hook has counted is taken back.

        Args:
            counter: one of the computation's ``counters``.
            amount: how much, up to 2**40. Counters only rise; what falls again is counted by another one.

        Raises:
            InvalidError: the computation does not declare it, or the amount is none that can be counted.
        """
        if counter not in self._declared_counters:
            raise InvalidError(
                "the computation does not declare this counter in counters",
                computation=self._name,
                counter=counter,
            )
        if type(amount) is not int or not 0 <= amount <= AMOUNT_MAX:
            raise InvalidError(
                "a counter counts whole numbers, and only rises",
                computation=self._name,
                counter=counter,
                amount=amount,
                amount_max=AMOUNT_MAX,
            )
        self._counters.add(counter, amount)

    def _declared_event(self, percentile: float, domain: TimeDomain) -> float:
        if domain is _EVENT:
            return self._declared(percentile)
        raise InvalidError("only event time has percentiles", computation=self._name, percentile=percentile)

    def _unknown(self, domain: str) -> NoReturn:
        raise InvalidError("a timer's domain is event or wall", domain=domain)

    def _not_below(self, floor: int, moment: int, name: str) -> int:
        if moment >= floor or moment >= self._holds.floor():
            return moment
        raise InvalidError(
            "a time may not be below that of the input",
            computation=self._name,
            input_at=floor,
            **{name: moment},
        )


def _text(text: str, role: str) -> str:
    if not isinstance(text, str):
        raise InvalidError(f"a {role} is text", type=type(text).__name__)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise InvalidError(f"a {role} needs a UTF-8 form", text=ascii(text)) from cause
    return text
