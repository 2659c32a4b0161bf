"""A key's persistent state, as user code sees it (MillWheel §4.4), and the event times that it holds (§5.2).

State is kept by value: `State.set` encodes the given object and `State.get` decodes it, so results never
depend on how records are bundled. Flat values of numbers and text give the same result by a copy and are
encoded once, at the end of the key's turn in the bundle.

While a state holds a time, the computation's output watermark does not pass it. Holds are stored among the
key's timers, in the same atomic row update as the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar, cast

import pyarrow as pa

from millpond.executor.computation.records import InputTime
from millpond.executor.computation.timers import KeyTimers, Timer
from millpond.executor.computation.values import checked_text
from millpond.executor.time.clocks import EXACT
from millpond.executor.time.instants import Moment, to_micros
from millpond.statestore.durations import INT64_MAX
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.codec import Codec
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.state_schema import AddendCodec, SchemaCodec, StateCells, struct_of
from millpond.statestore.rows.value_text import has_utf8
from millpond.statestore.types import TIME_MIN_US

Encoded: TypeAlias = str | bytes | StateCells
"""State as the row stores it, depending on the codec: text, bytes, or the cells of a schema."""


@dataclass(frozen=True, slots=True)
class CombiningState:
    """A state of sums to which code only adds, for ``state=`` of `Pipeline.add` (Beam's combining state, MillWheel §6.1.2).

    Code calls ``context.state.add``, or ``groups.add_states`` for whole columns, and cannot read the state: each update of a
    key is written without a read of its row, and no row is kept in memory. Views, SQL and compactions add the updates up.
    Such a computation has no timers.

    Attributes:
        schema: the sums, each a nullable int64. A field to which nothing was added is null.

    Example::

        class Volumes(mp.Computation):
            def process_record(self, context, record):
                context.state.add({"trades": 1, "volume": record.value["volume"]})

        sums = mp.types.CombiningState(pa.schema([("trades", pa.int64()), ("volume", pa.int64())]))
        trades.apply(Volumes(), name="volumes", key="symbol", state=sums)
    """

    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How a computation stores its states: their version, and their column if they have a schema.

    If it ``adds``, the column has addends instead, and no states are read.
    """

    version: int = 0
    column: pa.Field | None = None
    adds: bool = False

    @staticmethod
    def of(computation: Any) -> StateLayout:
        """Return the layout of the states of a `Computation`, which rests on this module."""
        codec = computation.codec
        return StateLayout(
            computation.state_version,
            codec.column if isinstance(codec, SchemaCodec) else None,
            isinstance(codec, AddendCodec),
        )

    def arrays(self, states: Sequence[Encoded | None]) -> dict[str, pa.Array]:
        """Return the columns of a row update that these states fill, one entry for each, null for ``None``."""
        column = self.column
        if column is not None:
            cells = cast("Sequence[StateCells | None]", states)
            return {column.name: struct_of(cells, column.type)}
        if bytes in map(type, states):
            return {"state_bytes": pa.array(states, pa.binary())}
        return {"state": pa.array(states, pa.string())}


@dataclass(frozen=True, slots=True)
class FormerState:
    """A state that code of another ``state_version`` wrote, with that version's encoding.

    ``upgraded`` is the state in today's codec; ``None`` until code has asked for it.
    """

    encoded: Encoded
    version: int
    upgraded: Encoded | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return size_of_states([self.encoded] if self.upgraded is None else [self.encoded, self.upgraded])


StoredState: TypeAlias = Encoded | FormerState
"""A state of the current version, or of an earlier one."""

CELL_BYTES: Final = 40
_CONTAINERS: Final = frozenset({dict, list, set})
_SIZED: Final = frozenset({str, bytes, list, dict})


def size_of_states(states: Iterable[StoredState]) -> int:
    """Estimate the cost of states in memory, in bytes."""
    own = list(states)
    if tuple not in set(map(type, own)):
        return sum(map(len, own))
    cells = [state for state in own if type(state) is tuple]
    size = sum(len(state) for state in own if type(state) is not tuple)
    for column in zip_longest(*cells):
        size += CELL_BYTES * len(column)
        if not _SIZED.isdisjoint(set(map(type, column))):
            # A part of a list or map counts as a cell.
            size += sum(
                len(cell) * (CELL_BYTES if type(cell) in _CONTAINERS else 1)
                for cell in column
                if type(cell) in _SIZED
            )
    return size


def floor_of(timers: KeyTimers, input_time: InputTime) -> int:
    """Return the earliest time to produce at: the input's less its slack, or a time that a hold or timer holds."""
    owed, floor = timers.owed_at(), max(TIME_MIN_US, input_time.floor_at - input_time.slack_us)
    return floor if owed is None else min(owed, floor)


ADD_ONLY: Final = "code only adds to a combining state: use state= with a plain schema for a state that code reads, sets, deletes or holds"
COMBINING_ONLY: Final = (
    "only a combining state can be added to: give the computation state=mp.types.CombiningState(schema)"
)
_UNREAD: Final = object()

# A codec returns objects of exactly these types unchanged, and code cannot change them. Any other object goes
# through the codec immediately: it may hold a tuple, which comes back as a list, or be changed after `set`.
_IMMUTABLE: Final = frozenset({str, int, float, bool, type(None), bytes})


class OpenState(Protocol):
    """A state object that hooks change in place during the key's whole turn in the bundle; see `State.open`."""

    def to_json(self) -> Any:
        """Return the value to store; ``None`` deletes the key's state."""


OpenStateT = TypeVar("OpenStateT", bound=OpenState)


class State:
    """The state of the current key, as ``context.state`` (MillWheel §4.4).

    Example:
        ``context.state.set(context.state.get(0) + 1)``
    """

    __slots__ = (
        "_codec",
        "_encoded",
        "_encodes_at_once",
        "_input",
        "_is_live",
        "_lent",
        "_lent_before",
        "_opened",
        "_timers",
        "_value",
        "is_watched",
        "refuse_use",
    )

    def __init__(self, codec: Codec, timers: KeyTimers, input_time: InputTime) -> None:
        self._codec = codec
        # What does not fit a schema is to be refused by `set`, not at the end of the turn.
        self._encodes_at_once = isinstance(codec, SchemaCodec)
        self._timers = timers
        self._input = input_time
        self.is_watched: bool = False
        self.refuse_use: Callable[[str], NoReturn] = _refuse
        self._reset()

    def _reset(self) -> None:
        self._encoded: Encoded | None = None
        self._value: Any = _UNREAD
        self._is_live = False
        self._opened: OpenState | None = None
        # The last object that code got or set and may still change; a default also as it was, if that is watched.
        self._lent: Any = None
        self._lent_before: Any = None

    def get(self, default: Any = None) -> Any:
        """Return the state, or ``default`` if the key has none.

        Each call returns another object. You may modify it, but only `set` saves the modification; a warning names a
        computation that modifies its state in place and does not set it.
        """
        value = self._value
        if value is not _UNREAD:
            if type(value) in _IMMUTABLE:
                return value
            self._lent = value = value.copy()
            return value
        if self._opened is not None:
            self.settle()
        if self._encoded is None:
            if type(default) in _CONTAINERS:
                self._lent, self._lent_before = default, deepcopy(default) if self.is_watched else None
            return default
        value = self._codec.decode(self._encoded)  # type: ignore[arg-type]  # only a `SchemaCodec` is given cells
        if type(value) in _IMMUTABLE:
            self._value = value
        else:
            self._lent = value
        return value

    def set(self, value: Any) -> None:
        """Replace the state with the value in its present form; to change it later, call `set` again.

        `get` returns the codec's version of the value, with lists for tuples. A container is copied or encoded each
        time: for a large state that many records of a bundle change, use `open`, or set it once in
        ``process_records``. With a schema, a value that does not fit is refused at once; a number or text that another
        codec refuses fails the current record or timer when its hook or the key's turn ends.
        """
        self._lent = value
        if self._encodes_at_once:
            self._encoded = self._codec.encode(value)
            self._value, self._is_live = _UNREAD, False
        elif type(value) in _IMMUTABLE:
            self._value, self._is_live = value, True
        elif _is_flat(value):
            self._value, self._is_live = value.copy(), True
        else:
            self._encoded = checked_encoding(self._codec, self._codec.encode(value))
            self._value, self._is_live = _UNREAD, False
        self._opened = None

    def add(self, value: Any) -> None:  # noqa: ARG002 - of a `CombiningState`
        """Add a dict of whole numbers to the fields of a `CombiningState`; a field that is left out adds nothing."""
        self.refuse_use(COMBINING_ONLY)

    def delete(self) -> None:
        """Delete the state and all its holds; from now on `get` returns its default."""
        for timer in self._timers.pending(TimeDomain.HOLD):
            self._timers.delete(timer.tag, TimeDomain.HOLD)
        self._reset()

    def open(self, make: Callable[[Any], OpenStateT]) -> OpenStateT:
        """Return the state as an object that hooks change in place, made and stored once per turn of the key.

        ``make`` gets the stored value (``None`` for a key without state). All hooks of the key's turn in the bundle
        get the same object, and changes in it are kept without `set`. Calling `get`, `set` or `delete` ends its use.
        """
        opened = self._opened
        if opened is None:
            opened = make(self.get())
            self._value, self._is_live, self._opened, self._lent = _UNREAD, False, opened, None
        return cast(OpenStateT, opened)

    def hold(self, at: Moment, tag: str = "") -> None:
        """Hold the computation's output watermark at ``at`` until the hold called ``tag`` is released or replaced.

        The key may produce at a held time, however late its input is by then; the time must not be before
        ``context.oldest_at``. No consumer's watermark passes that time meanwhile, so a hold that is never released
        stops every downstream timer and window that waits for a later event time.
        """
        moment = to_micros(at)
        if moment < floor_of(self._timers, self._input):
            raise InvalidError(
                "a hold must not be before the input", input_at=self._input.floor_at, at=moment
            )
        self._timers.set(Timer(checked_text(tag, "hold's tag"), TimeDomain.HOLD, moment, moment, EXACT))

    def release(self, tag: str = "") -> None:
        """Release the hold called ``tag``; does nothing if there is none."""
        self._timers.delete(checked_text(tag, "hold's tag"), TimeDomain.HOLD)

    @property
    def held_at(self) -> int | None:
        """The earliest time that the state holds, in microseconds; ``None`` without a hold."""
        return min((timer.at for timer in self._timers.pending(TimeDomain.HOLD)), default=None)

    def settle(self) -> StoredState | None:
        """Encode the current value, at the end of the key's turn, for the engine; ``None`` without state."""
        if self._opened is not None:
            self._value, self._opened = self._opened.to_json(), None
            self._is_live = self._value is not None
            if not self._is_live:
                self._encoded, self._value = None, _UNREAD
        if self._is_live:
            self._encoded = checked_encoding(self._codec, self._codec.encode(self._value))
            self._value = _UNREAD
            self._is_live = False
        return self._encoded

    def is_changed_in_place(self) -> bool:
        """Return True if code has changed the state that it got or set last, and has not set it, in a settled turn."""
        lent, encoded = self._lent, self._encoded
        if lent is None or type(lent) in _IMMUTABLE:
            return False
        if encoded is None:
            return self._lent_before is not None and bool(lent != self._lent_before)
        try:
            now = self._codec.encode(lent)
            # An earlier encoder may have written the same state in another way.
            again = self._codec.decode(encoded)  # type: ignore[arg-type]  # only a `SchemaCodec` is given cells
            return now != encoded and now != self._codec.encode(again)
        except Exception:  # noqa: BLE001 - code may have put anything into its copy, and it is not to be stored
            return True


class KeyState(State):
    """The engine's side of `State`: one object for all keys of a bundle."""

    __slots__ = ()

    def bind(self, stored: StoredState | None) -> None:
        # Not `_reset`: this runs for each key, and a call costs as much as the assignments.
        self._encoded = stored  # type: ignore[assignment]  # only `UpgradingState` is given former ones
        self._value = _UNREAD
        self._is_live = False
        self._opened = None
        self._lent = None


_Addend: TypeAlias = tuple[int | None, ...]


class AddedState(KeyState):
    """`KeyState` of a computation with a `CombiningState`: what the key's turn in the bundle adds."""

    __slots__ = ()

    def add(self, value: Any) -> None:
        cells = cast("_Addend", self._codec.encode(value))
        before = cast("_Addend | None", self._encoded)
        if before is not None:
            cells = tuple(map(_sum, before, cells))
            if any(cell is not None and not -INT64_MAX - 1 <= cell <= INT64_MAX for cell in cells):
                raise InvalidError("the sum of what a bundle adds does not fit into 64 bits", added=value)
        self._encoded = cells

    def get(self, default: Any = None) -> NoReturn:  # noqa: ARG002 - refused
        self._refuse_all_but_add()

    def set(self, value: Any) -> NoReturn:  # noqa: ARG002 - refused
        self._refuse_all_but_add()

    def delete(self) -> NoReturn:
        self._refuse_all_but_add()

    def open(self, make: Callable[[Any], OpenStateT]) -> NoReturn:  # noqa: ARG002 - refused
        self._refuse_all_but_add()

    def hold(self, at: Moment, tag: str = "") -> NoReturn:  # noqa: ARG002 - refused
        self._refuse_all_but_add()

    def _refuse_all_but_add(self) -> NoReturn:
        self.refuse_use(ADD_ONLY)


def key_state(codec: Codec, timers: KeyTimers, input_time: InputTime) -> KeyState:
    return (AddedState if isinstance(codec, AddendCodec) else KeyState)(codec, timers, input_time)


def _refuse(reason: str) -> NoReturn:
    raise InvalidError(reason)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _is_flat(value: Any) -> bool:
    """Return True for a list or dict of nothing but immutable parts, which a codec returns unchanged."""
    kind = type(value)
    if kind is dict:
        return _IMMUTABLE.issuperset(map(type, value.values())) and _IMMUTABLE.issuperset(map(type, value))
    return kind is list and _IMMUTABLE.issuperset(map(type, value))


def checked_encoding(codec: Codec, encoded: Encoded) -> Encoded:
    """Return a codec's output, or refuse output that does not match ``is_text`` or has no UTF-8 form."""
    if isinstance(encoded, str):
        fits = codec.is_text and (encoded.isascii() or has_utf8(encoded))
    elif isinstance(encoded, tuple):
        fits = isinstance(codec, SchemaCodec)
    else:
        fits = isinstance(encoded, bytes) and not codec.is_text
    if fits:
        return encoded
    raise InvalidError(
        "a codec must give text that has a UTF-8 form, or bytes, as its is_text says",
        codec=codec.name,
        type=type(encoded).__name__,
    )
