"""The context of a hook: the operations of user code, for exactly one key (MillWheel §5.1).

Productions are collected column by column, in order of emission (§6.1.2). Counters add up all keys
over the pipeline's life: an addition counts if and only if its superstep commits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, TypeAlias

import pyarrow as pa

from millpond.executor.computation.records import InputTime
from millpond.executor.computation.state import AddedState, State, floor_of
from millpond.executor.computation.timers import KeyTimers, Timer
from millpond.executor.computation.values import checked_text
from millpond.executor.time.clocks import EXACT, Clocks
from millpond.executor.time.instants import Moment, to_micros
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.key_text import KeyValue, decode_key, encode_key, key_of_text
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.state_schema import SchemaCodec, StateCells
from millpond.statestore.rows.value_text import PLAIN_MARK, TYPED_MARK, PlainObject, encode_value
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

AMOUNT_MAX: Final = 2**40
"""The most that one call may add: sums are 64-bit positions of the table that never fall."""

COUNTERS_MAX: Final = 32


def declared_counters(declared: object, computation: str) -> tuple[str, ...]:
    """Return the counters that a computation declares, or refuse malformed names and more than `COUNTERS_MAX`."""
    if not isinstance(declared, tuple | list | frozenset | set):
        raise InvalidError("counters must be a tuple of names", computation=computation, found=declared)
    for name in declared:
        if not isinstance(name, str) or not name:
            raise InvalidError("a counter's name must be text", computation=computation, found=name)
    if len(declared) > COUNTERS_MAX:
        raise InvalidError("too many counters", computation=computation, counters_max=COUNTERS_MAX)
    return tuple(declared)


@dataclass(slots=True)
class Counters:
    """The additions of one bundle; `truncate` rolls back a failing hook's additions."""

    _entries: list[tuple[str, int]] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, amount: int) -> None:
        self._entries.append((name, amount))

    def has(self, name: str, since: int) -> bool:
        """Return True if a counter has risen after the first ``since`` additions since `settle`."""
        return any(added == name and amount for added, amount in self._entries[since:])

    def truncate(self, length: int) -> None:
        del self._entries[length:]

    def settle(self) -> None:
        if self._entries:
            for name, amount in self._entries:
                self._sums[name] += amount
            self._entries.clear()

    def sums(self) -> Mapping[str, int]:
        self.settle()
        return dict(self._sums)


@dataclass(slots=True)
class Productions:
    """The columns of produced records; values are encoded immediately, so later changes do not affect them."""

    streams: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    blobs: list[bytes | None] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    # The places of values with a schema, and their cells, by their field in memory.
    typed: dict[pa.Field, tuple[list[int], list[StateCells]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.at)

    def append(self, stream: str, key: str, value: Any, at: int) -> None:
        is_bytes = isinstance(value, bytes)
        text = None if is_bytes else encode_value(value)
        # Within a store only: an object with the fields of a pane must not be taken for one.
        if type(value) is PlainObject and text is not None and not text.startswith(TYPED_MARK):
            text = f"{PLAIN_MARK}{text}"
        self.streams.append(stream)
        self.keys.append(key)
        self.texts.append(text)
        self.blobs.append(value if is_bytes else None)
        self.at.append(at)

    def append_cells(self, stream: str, key: str, value: Any, at: int, codec: SchemaCodec) -> None:
        """Append a value of a stream with a schema; raise `InvalidError` if it does not fit."""
        cells = codec.encode(value)
        places, rows = self.typed.setdefault(codec.produced, ([], []))
        places.append(len(self.at))
        rows.append(cells)
        self.streams.append(stream)
        self.keys.append(key)
        self.texts.append(None)
        self.blobs.append(None)
        self.at.append(at)

    def cells(self) -> Iterator[tuple[pa.Field, list[StateCells | None]]]:
        """Yield each field of values with a schema, with an entry for each production."""
        for produced, (places, rows) in self.typed.items():
            if len(rows) == len(self.at):
                yield produced, list(rows)
            elif rows:
                spread: list[StateCells | None] = [None] * len(self.at)
                for place, cells in zip(places, rows, strict=True):
                    spread[place] = cells
                yield produced, spread

    def append_text(self, stream: str, key: str, text: str, at: int) -> None:
        """Append a value that has been encoded."""
        self.streams.append(stream)
        self.keys.append(key)
        self.texts.append(text)
        self.blobs.append(None)
        self.at.append(at)

    def truncate(self, count: int) -> None:
        for column in (self.streams, self.keys, self.texts, self.blobs, self.at):
            del column[count:]
        for places, rows in self.typed.values():
            kept = bisect_left(places, count)
            del places[kept:], rows[kept:]


DomainName: TypeAlias = TimeDomain | Literal["event", "wall"]
"""The domain of a timer: `TimeDomain`, or its name ``"event"`` or ``"wall"``."""

_EVENT: Final = TimeDomain.EVENT
_DOMAINS: Final[dict[str, TimeDomain]] = {
    domain.value: domain for domain in (TimeDomain.EVENT, TimeDomain.WALL)
}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A use of a name that the program does not declare, which ends the run; ``None`` if no name is wrong."""

    name: object
    error: InvalidError


class Context:
    """State, timers and productions of one key; valid until the hook returns (MillWheel §4.2, §5.1).

    Returned times are microseconds since 1970 UTC. Time arguments are microseconds or ``datetime`` objects
    with an offset.

    Attributes:
        key: the key that the hook runs for, as text; `key_values` has the values of a typed key.
        state: the key's persistent state.
        watermark: the computation's input low watermark; a record before it is late. With ``time_sorted`` it
            is the time of the record or timer, because everything earlier has been passed to the code.
        late_before: records before this time are late: the watermark, or with ``in_micro_batches`` about the
            watermark of the superstep before.
        wall_time: the wall time of the superstep, the same for all its hooks.
        mistake: for the engine: the first use of an undeclared name. It ends the run even if the code catches
            the exception.
    """

    __slots__ = (
        "_clocks",
        "_counters",
        "_cycle",
        "_declared_counters",
        "_has_timers",
        "_input",
        "_name",
        "_percentiles",
        "_produces",
        "_productions",
        "_schemas",
        "_timers",
        "key",
        "late_before",
        "mistake",
        "state",
        "wall_time",
        "watermark",
    )

    def __init__(
        self,
        node: Any,
        state: State,
        timers: KeyTimers,
        productions: Productions,
        input_time: InputTime,
        clocks: Clocks,
        counters: Counters,
    ) -> None:
        # A `ComputationNode`, which rests on this module.
        self._name: str = node.name
        self._produces = dict(node.production_names)
        self._schemas: Mapping[str, SchemaCodec] = node.schemas
        self._cycle: tuple[str, ...] = node.cycle
        self._percentiles = frozenset(node.percentiles)
        self._clocks = clocks
        self._counters = counters
        self._declared_counters = frozenset(node.counters)
        self._timers = timers
        self._productions = productions
        self._input = input_time
        self.key: str = ""
        self.mistake: Mistake | None = None
        self.state: State = state
        state.refuse_use = self.refuse_use
        self._has_timers = not isinstance(state, AddedState)
        self.watermark: EventTimeMicros = EventTimeMicros(clocks.watermark)
        self.late_before: EventTimeMicros = self.watermark
        self.wall_time: WallTimeMicros = WallTimeMicros(clocks.wall_time)

    @property
    def oldest_at(self) -> EventTimeMicros:
        """The earliest event time that the hook may produce at.

        It is the time of the input, less the computation's ``late_data_horizon`` for records, or an earlier
        time that already holds the output watermark: the ``output_at`` of a pending timer with ``holds``, or
        a hold of the state, also one that has been released since the key's turn in the bundle began.
        """
        return EventTimeMicros(floor_of(self._timers, self._input))

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that the computation may produce to, as declared."""
        return tuple(self._produces)

    def watermark_at(self, percentile: float) -> EventTimeMicros:
        """Return the watermark, in microseconds, before which about ``percentile`` percent of the records have come.

        The percentile is 100, for the low watermark, or declared in the computation's ``percentiles`` (MillWheel §7.2).
        """
        if percentile == EXACT:
            return self.watermark
        return EventTimeMicros(self._clocks.of(_EVENT, self._declared(percentile)))

    def _declared(self, percentile: float) -> float:
        if percentile != EXACT and percentile not in self._percentiles:
            self._refuse("percentile", "percentiles", percentile, self._percentiles)
        return float(percentile)

    def set_timer(
        self,
        at: Moment,
        tag: str = "",
        domain: DomainName = "event",
        output_at: Moment | None = None,
        percentile: float = EXACT,
        *,
        holds: bool | None = None,
    ) -> None:
        """Set a timer: ``process_timer`` runs once the domain's clock reaches ``at`` (MillWheel §4.6).

        The timer replaces a pending one of the same tag and domain. If ``at`` has already passed, the timer fires in
        the current bundle. In a cycle without a ``feedback``, an event timer that holds an ``output_at`` before
        ``at`` would wait for itself, so it is refused and ends the run.

        Args:
            at: when to fire.
            tag: the timer's name, unique within key and domain.
            domain: ``"event"`` waits for the low watermark, ``"wall"`` for the wall time.
            output_at: the event time of the timer's productions, not before `oldest_at`. By default ``at`` for an event
                timer (or the input's time, if that is later) and the input's time for a wall timer.
            percentile: in the event domain, the watermark to wait for: 100 or one of the computation's
                ``percentiles``. When the timer fires, at most ``100 - percentile`` percent of the records
                before ``at`` are still to come, and those are not late.
            holds: keep the output watermark at ``output_at`` until the timer has fired, so that its
                productions are on time at ``output_at`` (MillWheel §5.2). A timer that does not hold delays
                nothing downstream; if the input watermark has passed ``output_at`` when it fires, its
                productions have the time of that watermark instead, and are on time too. By default event
                timers hold, which never delays anything beyond ``at``, and wall timers hold only with an
                ``output_at``.

        Example:
            ``context.set_timer(record.at + 60_000_000, tag="flush")``
        """
        moment = at if type(at) is int else to_micros(at)
        known = _DOMAINS.get(domain) or self._unknown(domain)
        if percentile != EXACT:
            if known is not _EVENT:
                raise InvalidError(
                    "only event time has percentiles", computation=self._name, percentile=percentile
                )
            percentile = self._declared(percentile)
        input_time = self._input
        if output_at is not None:
            output = self._not_below(input_time.floor_at, to_micros(output_at), "output_at")
        elif known is _EVENT:
            output = max(input_time.floor_at, moment)
        else:
            output = input_time.at
        if holds is None:
            holds = known is _EVENT or output_at is not None
        elif type(holds) is not bool:
            raise InvalidError("holds must be true or false", computation=self._name, holds=holds)
        timers = self._timers
        # Windows set the same timer with every record: skip the checks that a pending timer has passed.
        if not timers.has((tag, known, moment, output, percentile, holds)):
            if not self._has_timers:
                self.refuse_use(
                    "a computation with a combining state has no timers, because its rows are not read"
                )
            if self._cycle and holds and known is _EVENT and output < moment:
                self._refuse_in_cycle(tag, moment, output)
            timers.set(
                Timer(checked_text(tag, "timer tag"), known, to_micros(moment), output, percentile, holds)
            )

    def timer_at(
        self, tag: str = "", domain: DomainName = "event"
    ) -> EventTimeMicros | WallTimeMicros | None:
        """Return when a pending timer fires, in microseconds, or ``None``; name it as for `set_timer`."""
        if type(tag) is not str:
            checked_text(tag, "timer tag")
        at = self._timers.pending_at(tag, _DOMAINS.get(domain) or self._unknown(domain))
        return None if at is None else EventTimeMicros(at)

    def timers(self, domain: DomainName = "event") -> list[Timer]:
        """Return the key's pending timers of a domain, ``"event"`` or ``"wall"``, in the order of their times."""
        known = _DOMAINS.get(domain) or self._unknown(domain)
        return sorted(self._timers.pending(known), key=lambda timer: (timer.at, timer.tag))

    def delete_timer(self, tag: str = "", domain: DomainName = "event") -> None:
        """Delete a pending timer, named as for `set_timer`; does nothing if there is none."""
        if type(tag) is not str:
            checked_text(tag, "timer tag")
        self._timers.delete(tag, _DOMAINS.get(domain) or self._unknown(domain))

    @property
    def key_values(self) -> tuple[Any, ...]:
        """The values of the key; of a plain key, a tuple of its text.

        Example:
            ``country, card = context.key_values``
        """
        return decode_key(self.key)

    def produce(
        self,
        stream: str,
        value: Any,
        key: str | tuple[KeyValue, ...] | None = None,
        at: Moment | None = None,
    ) -> None:
        """Produce a record to all consumers of ``stream``; it is delivered once, when this bundle is durable.

        Weak productions are delivered earlier; see ``productions`` of `ComputationOptions`.

        Args:
            stream: one of the streams in the computation's ``produces``; any other ends the run.
            value: a value of the types that `JsonCodec` lists, or ``bytes``; a dict of the fields of the schema that
                ``produces`` gives the stream.
            key: the record's key; by default the current key. A tuple makes a typed key, equal to columns
                with these values: a whole number is no decimal, and no float. The text of a typed key is that key.
            at: the event time, not before `oldest_at` (MillWheel §4.5); by default that of the current record or timer.
        """
        whole_name = self._produces.get(stream)
        if whole_name is None:
            self._refuse("stream", "produces", stream, self._produces)
        input_time = self._input
        moment = input_time.at if at is None else self._not_below(input_time.floor_at, to_micros(at), "at")
        if key is None:
            own_key = self.key
        else:
            own_key = (
                encode_key(key)
                if isinstance(key, tuple)
                else key_of_text(checked_text(key, "production key"))
            )
        codec = self._schemas.get(whole_name)
        if codec is None:
            self._productions.append(whole_name, own_key, value, moment)
        else:
            self._productions.append_cells(whole_name, own_key, value, moment, codec)

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter of the computation, summed over all its keys; see ``by_computation`` of `Totals`.

        Counters are exactly-once, as state is: the additions of a failing hook are rolled back. The counter must be
        among the computation's ``counters``; any other ends the run. A counter only rises: the amount is a whole
        number from 0 to 2**40, so count decreases in a second counter.
        """
        if counter not in self._declared_counters:
            self._refuse("counter", "counters", counter, self._declared_counters)
        if type(amount) is not int or not 0 <= amount <= AMOUNT_MAX:
            raise InvalidError(
                "the amount of a counter must be a whole number from 0 to amount_max",
                computation=self._name,
                counter=counter,
                amount=amount,
                amount_max=AMOUNT_MAX,
            )
        self._counters.add(counter, amount)

    def typed_stream(self, stream: str) -> tuple[str, SchemaCodec]:
        """Return a stream's whole name and the schema of its values, for the engine; a stream without one ends the run."""
        whole_name = self._produces.get(stream)
        if whole_name is None:
            self._refuse("stream", "produces", stream, self._produces)
        codec = self._schemas.get(whole_name)
        if codec is None:
            self.refuse_use(
                "process_table produces columns, so the stream needs a schema: give it one in produces",
                stream=stream,
            )
        return whole_name, codec

    def refuse_use(self, reason: str, **details: object) -> NoReturn:
        """Raise an error that ends the run even if the code catches it, for the engine."""
        self._end_run(Mistake(None, InvalidError(reason, computation=self._name, **details)))

    def _refuse(self, what: str, where: str, name: object, declared: Collection[object]) -> NoReturn:
        error = InvalidError(
            f"the computation does not declare this {what} in {where}{did_you_mean(name, declared)}",
            computation=self._name,
            **{what: name, "declared": sorted(declared, key=str)},
        )
        self._end_run(Mistake(name, error))

    def _refuse_in_cycle(self, tag: str, at: int, output_at: int) -> NoReturn:
        error = InvalidError(
            "an event timer that holds the watermark before its own time would never fire in a cycle: "
            "set it with holds=False, or declare the way back as a feedback",
            computation=self._name,
            cycle=list(self._cycle),
            tag=tag,
            at=at,
            output_at=output_at,
        )
        self._end_run(Mistake(None, error))

    def _end_run(self, mistake: Mistake) -> NoReturn:
        # The first mistake counts: code may catch the exception and go wrong elsewhere because of it.
        self.mistake = self.mistake or mistake
        raise mistake.error

    def _unknown(self, domain: str) -> NoReturn:
        raise InvalidError("a timer's domain must be event or wall", computation=self._name, domain=domain)

    def _not_below(self, floor: int, moment: int, name: str) -> int:
        if moment >= floor or moment >= floor_of(self._timers, self._input):
            return moment
        raise InvalidError(
            "a time must not be before the input's: use a later one, or declare a late_data_horizon",
            computation=self._name,
            input_at=floor,
            **{name: moment},
        )
