"""The semantics of an interval in plain Python: slow, obvious, and importable.

`ModelInterval` defines what one computation does with bundles of records: which of them are
duplicates, in which order hooks run, what a hook may do, and what remains when one raises. It keeps
everything in dicts and encodes at every step, so nothing in it can be stale. The interval processor
and the runners are compared with it.

Per bundle and key, in key order: due timers by (time, domain, percentile, tag), each of which may make
others due; then records by (time, arrival); then the timers that these made due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.time.clocks import EXACT, slack_us
from millpond.executor.time.instants import Moment, to_micros
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

if TYPE_CHECKING:
    from millpond.executor.computation.context import Context
    from millpond.executor.computation.records import Records
    from millpond.executor.pipeline.nodes import ComputationNode

_FIRINGS_MAX = 100_000
_NEVER = -(2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A record for delivery to a key."""

    stream: str
    key: str
    value: Any
    at: int
    id: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProduction:
    """A produced record, with its value as the consumer decodes it."""

    stream: str
    key: str
    value: Any
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLetter:
    """A record (or, without a stream, a timer) whose code failed in every attempt."""

    stream: str
    key: str
    at: int


@dataclass(slots=True)
class ModelRow:
    """A key's row: encoded state, timers by (tag, domain), consumed ids."""

    state: str | bytes | None = None
    timers: dict[tuple[str, TimeDomain], Timer] = field(default_factory=dict)
    ids: set[bytes] = field(default_factory=set)

    def copy(self) -> ModelRow:
        return ModelRow(self.state, dict(self.timers), set(self.ids))

    def holds(self) -> list[int]:
        """Return the times at which the state holds the watermark."""
        return [timer.at for timer in self.timers.values() if timer.domain is TimeDomain.HOLD]

    @property
    def is_empty(self) -> bool:
        """Return True if readers see no row: neither state nor timers."""
        return self.state is None and not self.timers


@dataclass(slots=True, kw_only=True)
class ModelBundle:
    """The result of a bundle."""

    productions: list[ModelProduction] = field(default_factory=list)
    dead_letters: list[ModelLetter] = field(default_factory=list)
    records: int = 0
    late: int = 0
    dropped: int = 0
    duplicates: int = 0
    timers: int = 0
    keys: int = 0


class ModelInterval:
    """One computation's rows, for all keys or some.

    Args:
        node: the computation in its topology.
    """

    def __init__(self, node: ComputationNode) -> None:
        self.node = node
        self._rows: dict[str, ModelRow] = {}

    def process(
        self,
        records: Iterable[ModelRecord],
        watermark: int,
        wall_time: int,
        marks: Mapping[float, int] | None = None,
    ) -> ModelBundle:
        """Process a bundle.

        Args:
            records: in order of arrival.
            watermark: the input low watermark.
            wall_time: the wall time.
            marks: the percentile watermarks.

        Raises:
            InvalidError: the code failed and failures stop the pipeline, or timers never end.
        """
        bundle = ModelBundle()
        clocks = {TimeDomain.EVENT: watermark, TimeDomain.WALL: wall_time, TimeDomain.HOLD: _NEVER}
        rows = {key: row.copy() for key, row in self._rows.items()}
        accepted = self._punctual(self._without_duplicates(rows, records, bundle), watermark, bundle)
        due = {key for key, row in rows.items() if _first_due(row, clocks, marks or {}) is not None}
        for key in sorted({record.key for record in accepted} | due):
            arrived = sorted((r for r in accepted if r.key == key), key=lambda record: record.at)
            turn = _Turn(self.node, key, rows.setdefault(key, ModelRow()), clocks, bundle, marks or {})
            turn.run(arrived)
            bundle.keys += 1
        self._rows = rows
        return bundle

    def rows(self) -> dict[str, ModelRow]:
        """Return the visible rows."""
        return {key: row for key, row in self._rows.items() if not row.is_empty}

    def consumed_ids(self) -> set[tuple[str, bytes]]:
        """Return every (key, record id) whose effect has happened."""
        return {(key, id_) for key, row in self._rows.items() for id_ in row.ids}

    def next_at(self, domain: TimeDomain) -> int | None:
        """Return the earliest pending firing time in a domain."""
        return min(
            (t.at for t in self._timers() if t.domain is domain and t.percentile == EXACT), default=None
        )

    def hold(self) -> int | None:
        """Return the least output time that a pending timer holds; ``None`` without such a timer."""
        return min((t.output_at for t in self._timers() if t.holds), default=None)

    def next_mark(self, percentile: float) -> int | None:
        """Return the earliest pending firing time among timers of a percentile watermark."""
        return min((t.at for t in self._timers() if t.percentile == percentile), default=None)

    def hold_mark(self, percentile: float) -> int | None:
        """Return the least output time, ignoring at most ``100 - percentile`` percent of the keys."""
        held = [[t.output_at for t in row.timers.values() if t.holds] for row in self._rows.values()]
        owed = sorted(min(times) for times in held if times)
        left_out = min(int(len(owed) * (EXACT - percentile) / EXACT), len(owed) - 1)
        return owed[left_out] if owed else None

    def _timers(self) -> Iterator[Timer]:
        for row in self._rows.values():
            yield from row.timers.values()

    def _without_duplicates(
        self, rows: dict[str, ModelRow], records: Iterable[ModelRecord], bundle: ModelBundle
    ) -> list[ModelRecord]:
        accepted = []
        for record in records:
            if self.node.exactly_once and record.id is not None:
                ids = rows.setdefault(record.key, ModelRow()).ids
                if record.id in ids:
                    bundle.duplicates += 1
                    continue
                ids.add(record.id)
            accepted.append(record)
        return accepted

    def _punctual(
        self, accepted: list[ModelRecord], watermark: int, bundle: ModelBundle
    ) -> list[ModelRecord]:
        if self.node.on_late == "process":
            return accepted
        for record in accepted:
            if record.at < watermark:
                bundle.records += 1
                bundle.late += 1
                bundle.dropped += 1
        return [record for record in accepted if record.at >= watermark]


class _Turn:
    """A key's turn: all hooks at once or, if one raises, again with each hook by itself."""

    def __init__(
        self,
        node: ComputationNode,
        key: str,
        row: ModelRow,
        clocks: dict[TimeDomain, int],
        bundle: ModelBundle,
        marks: Mapping[float, int],
    ) -> None:
        self.marks = marks
        self.node = node
        self.key = key
        self.row = row
        self.owed_at_start = [timer.output_at for timer in row.timers.values() if timer.holds]
        self.clocks = clocks
        self.bundle = bundle
        self.productions: list[ModelProduction] = []
        self.letters: list[ModelLetter] = []
        self.fired = 0

    def run(self, arrived: Sequence[ModelRecord]) -> None:
        """Run the turn and add its results to the bundle."""
        at_start = self.row.copy()
        limit = _FIRINGS_MAX + len(at_start.timers) + len(arrived)
        try:
            self._all(arrived, limit, self._plainly, [arrived] if arrived else [])
        except Exception:  # noqa: BLE001 - whatever user code raises
            self._restore(at_start, 0)
            self.fired = 0
            self._all(arrived, limit, self._with_tries, [[record] for record in arrived])
        self.bundle.productions += self.productions
        self.bundle.dead_letters += self.letters
        self.bundle.records += len(arrived)
        self.bundle.late += sum(record.at < self.clocks[TimeDomain.EVENT] for record in arrived)
        self.bundle.timers += self.fired

    def _all(
        self,
        arrived: Sequence[ModelRecord],
        limit: int,
        attempt: Callable[[Callable[[], None], ModelLetter], None],
        calls: Sequence[Sequence[ModelRecord]],
    ) -> None:
        self._fire(limit, attempt)
        for records in calls:
            letter = ModelLetter(stream=records[0].stream, key=self.key, at=records[0].at)
            attempt(lambda records=records: self._records_hook(records), letter)  # type: ignore[misc]
        if arrived:
            self._fire(limit, attempt)

    def _fire(self, limit: int, attempt: Callable[[Callable[[], None], ModelLetter], None]) -> None:
        while (timer := _first_due(self.row, self.clocks, self.marks)) is not None:
            del self.row.timers[(timer.tag, timer.domain)]
            self.fired += 1
            if self.fired > limit:
                raise InvalidError("timers never end", key=self.key)
            letter = ModelLetter(stream="", key=self.key, at=timer.output_at)
            attempt(lambda timer=timer: self._timer_hook(timer), letter)  # type: ignore[misc]

    def _plainly(self, hook: Callable[[], None], letter: ModelLetter) -> None:
        hook()

    def _with_tries(self, hook: Callable[[], None], letter: ModelLetter) -> None:
        before, produced = self.row.copy(), len(self.productions)
        raised: Exception | None = None
        for _ in range(1 + self.node.retries):
            try:
                return hook()
            except Exception as error:  # noqa: BLE001
                self._restore(before, produced)
                raised = error
        if self.node.on_error == "stop":
            raise InvalidError("user code failed", key=self.key) from raised
        self.letters.append(letter)
        return None

    def _restore(self, row: ModelRow, produced: int) -> None:
        self.row.state = row.state
        self.row.timers = dict(row.timers)
        del self.productions[produced:]

    def _timer_hook(self, timer: Timer) -> None:
        reached = self.clocks[TimeDomain.EVENT]
        if not timer.holds and timer.output_at < reached and reached != TIME_MAX_US:
            timer = Timer(timer.tag, timer.domain, timer.at, reached, timer.percentile, holds=False)
        context = _ModelContext(self, timer.output_at)
        # A timer holds its output time only.
        context.slack_us = (
            slack_us(self.node.computation.late_data_horizon) if not self.node.horizon_us else 0
        )
        self.node.computation.process_timer(cast("Context", context), timer)

    def _records_hook(self, arrived: Sequence[ModelRecord]) -> None:
        watermark = self.clocks[TimeDomain.EVENT]
        context = _ModelContext(self, arrived[-1].at, arrived[0].at)
        records = _ModelRecords(
            Record(r.key, r.value, EventTimeMicros(r.at), r.stream, r.at < watermark, r.id) for r in arrived
        )
        records.context = context
        self.node.computation.process_records(cast("Context", context), cast("Records", records))


class _ModelRecords(list[Record]):
    """A key's records; iterating advances the context's input time."""

    context: _ModelContext

    def __iter__(self) -> Iterator[Record]:
        for record in super().__iter__():
            self.context.input_at = record.at
            yield record
        self.context.input_at = self[-1].at

    def one_by_one(self) -> Iterator[Record]:
        """Yield the records as separate inputs."""
        for record in super().__iter__():
            self.context.input_at = self.context.floor_at = record.at
            yield record


class _ModelContext:
    """The operations of `millpond.executor.computation.context.Context`, applied immediately."""

    def __init__(self, turn: _Turn, input_at: int, floor_at: int | None = None) -> None:
        self.key = turn.key
        self.watermark = turn.clocks[TimeDomain.EVENT]
        self.wall_time = turn.clocks[TimeDomain.WALL]
        self.state = _ModelState(turn, self)
        self.input_at = input_at
        self.floor_at = input_at if floor_at is None else floor_at
        self.slack_us = slack_us(turn.node.computation.late_data_horizon)
        self._turn = turn

    @property
    def oldest_at(self) -> int:
        pending = [t.output_at for t in self._turn.row.timers.values() if t.holds]
        owed = [*self._turn.owed_at_start, *pending]
        return min([max(TIME_MIN_US, self.floor_at - self.slack_us), *owed])

    def watermark_at(self, percentile: float) -> int:
        return self.watermark if percentile == EXACT else self._turn.marks[percentile]

    def set_timer(
        self,
        at: Moment,
        tag: str = "",
        domain: str = "event",
        output_at: Moment | None = None,
        percentile: float = EXACT,
        holds: bool | None = None,
    ) -> None:
        known, moment = TimeDomain(domain), to_micros(at)
        if output_at is not None:
            output = to_micros(output_at)
        else:
            output = max(moment, self.floor_at) if known is TimeDomain.EVENT else self.input_at
        if output < self.oldest_at:
            raise InvalidError("output_at below the input")
        does_hold = known is TimeDomain.EVENT or output_at is not None if holds is None else holds
        self._turn.row.timers[(tag, known)] = Timer(tag, known, moment, output, percentile, does_hold)

    def delete_timer(self, tag: str = "", domain: str = "event") -> None:
        self._turn.row.timers.pop((tag, TimeDomain(domain)), None)

    def produce(self, stream: str, value: Any, key: str | None = None, at: Moment | None = None) -> None:
        moment = self.input_at if at is None else to_micros(at)
        if stream not in self._turn.node.produces:
            raise InvalidError("undeclared stream", stream=stream)
        if at is not None and moment < self.oldest_at:
            raise InvalidError("at below the input")
        codec = JsonCodec()
        received = value if isinstance(value, bytes) else codec.decode(codec.encode(value))
        own_key = self.key if key is None else key
        self._turn.productions.append(ModelProduction(stream=stream, key=own_key, value=received, at=moment))


class _ModelState:
    """A state that is encoded at every set and decoded at every get."""

    def __init__(self, turn: _Turn, context: _ModelContext) -> None:
        self._turn = turn
        self._context = context

    @property
    def held_at(self) -> int | None:
        return min(self._turn.row.holds(), default=None)

    def hold(self, at: Moment, tag: str = "") -> None:
        moment = to_micros(at)
        if moment < self._context.oldest_at:
            raise InvalidError("a hold below the input")
        self._turn.row.timers[(tag, TimeDomain.HOLD)] = Timer(tag, TimeDomain.HOLD, moment, moment)

    def release(self, tag: str = "") -> None:
        self._turn.row.timers.pop((tag, TimeDomain.HOLD), None)

    def get(self, default: Any = None) -> Any:
        encoded = self._turn.row.state
        return default if encoded is None else self._turn.node.computation.codec.decode(encoded)

    def set(self, value: Any) -> None:
        self._turn.row.state = self._turn.node.computation.codec.encode(value)

    def delete(self) -> None:
        row = self._turn.row
        row.state = None
        row.timers = {name: timer for name, timer in row.timers.items() if name[1] is not TimeDomain.HOLD}


def _first_due(row: ModelRow, clocks: Mapping[TimeDomain, int], marks: Mapping[float, int]) -> Timer | None:
    due = [
        timer
        for timer in row.timers.values()
        if timer.at <= (clocks[timer.domain] if timer.percentile == EXACT else marks[timer.percentile])
    ]
    return min(due, key=lambda timer: (timer.at, timer.domain, timer.percentile, timer.tag), default=None)
