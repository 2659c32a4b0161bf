"""Windows that only wait for their end, of all keys of a bundle at once, as columns of whole numbers.

What `WaitingWindows` does for one key, with arrays in place of JSON: elements are grouped by key and window, the groups are
added to the windows that are open, and ended windows give their panes. Rows, timers and panes are written by Arrow,
the same to the byte. A bundle in which anything else happens is left to the turns of single keys, and so is a row that
these columns would not write as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import ColumnChange, ColumnRows, KeyedRecords, StoredRows
from millpond.executor.computation.state import StoredState
from millpond.executor.computation.timers import Timer, Timers
from millpond.executor.computation.values import Values
from millpond.executor.time.clocks import EXACT, Clocks, timer_clock_name
from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US
from millpond.executor.windows.accumulator_columns import (
    AccumulatorColumn,
    Accumulators,
    CombinerError,
    TypedAccumulatorError,
    column_of,
    has_column,
)
from millpond.executor.windows.combiners import CombineFn
from millpond.executor.windows.key_windows import DROPPED, EXPIRY
from millpond.executor.windows.strategy import Accumulation, WindowingStrategy
from millpond.executor.windows.waiting_windows import END, more_than_waiting, on_time_pane
from millpond.executor.windows.window_fns import FixedWindows, SlidingWindows
from millpond.statestore.durations import duration_us
from millpond.statestore.rows.row import (
    PRODUCTION_TYPE,
    ROW_SCHEMA,
    TIMER_TYPE,
    TIMESTAMP,
    TimeDomain,
    lists_of,
)
from millpond.statestore.types import TIME_MAX_US

_Index = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_Added: TypeAlias = tuple[Any, _Mask | None]

_WAITING: Final = ["window", "accumulator", "news", "is_held", "timers"]
_EVENT: Final = timer_clock_name(TimeDomain.EVENT, EXACT, holds=True)
_NAMES_MIN: Final = 1_024
# An estimate of a key's memory, with the objects that it becomes when it leaves.
_KEY_BYTES: Final = 160


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of keys, each of which is known by its number, the ``owner``.

    An ended window has no ``news``, and a ``total`` only where panes accumulate.
    """

    owner: _Index
    start: _Index
    news: _Index
    total: Accumulators
    is_open: _Mask

    def at(self, chosen: _Index | _Mask) -> _Windows:
        return _Windows(
            self.owner[chosen],
            self.start[chosen],
            self.news[chosen],
            self.total[chosen],
            self.is_open[chosen],
        )

    def owned_by(self, owner: _Index) -> _Windows:
        return _Windows(owner, self.start, self.news, self.total, self.is_open)

    def with_others(self, others: _Windows) -> _Windows:
        return _Windows(
            np.concatenate([self.owner, others.owner]),
            np.concatenate([self.start, others.start]),
            np.concatenate([self.news, others.news]),
            np.concatenate([self.total, others.total]),
            np.concatenate([self.is_open, others.is_open]),
        )


def _no_windows(totals: Accumulators) -> _Windows:
    none = np.empty(0, np.int64)
    return _Windows(none, none, none, totals, np.empty(0, np.bool_))


def waiting_columns(strategy: WindowingStrategy, combine: CombineFn, stream: str) -> WaitingColumns | None:
    """Return columns for the windows of a step; ``None`` if its windows or combiner are not for columns."""
    is_for_columns = more_than_waiting(strategy) is None and not_in_columns(strategy, combine) is None
    return WaitingColumns(strategy, combine, stream) if is_for_columns else None


def not_in_columns(strategy: WindowingStrategy, combine: CombineFn) -> str | None:
    """Return why windows that only wait are no columns; ``None`` if they are."""
    if type(strategy.window_fn) not in (FixedWindows, SlidingWindows):
        return f"{type(strategy.window_fn).__name__} begin at times of their keys"
    return None if has_column(combine) else f"{type(combine).__name__} of these arguments is no column"


class WaitingColumns(ColumnRows):
    """The rows of keys of one interval whose windows only wait."""

    def __init__(self, strategy: WindowingStrategy, combine: CombineFn, stream: str) -> None:
        self._strategy = strategy
        self._combine = combine
        self._stream = stream
        window_fn: Any = strategy.window_fn
        self._size_us = duration_us(window_fn.size)
        self._period_us = duration_us(getattr(window_fn, "period", window_fn.size))
        self._offset_us = duration_us(window_fn.offset) % self._period_us
        self._lateness_us = strategy.allowed_lateness_us + 1
        self._accumulates = strategy.accumulation is Accumulation.ACCUMULATING
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._column: AccumulatorColumn = column_of(combine)
        self._has_types = False
        self._hold(_no_windows(self._column.of([])))

    def _hold(self, windows: _Windows) -> None:
        self._windows = windows
        self._has_windows = np.zeros(len(self._names), np.bool_)
        self._has_windows[windows.owner] = True
        ends = windows.start + self._size_us
        at = np.where(windows.is_open, ends, ends + self._lateness_us)
        self._next_at = int(at.min()) if len(at) else None
        output_at = self._output_at(windows, ends)
        self._held_at = int(output_at.min()) if len(at) else None
        self._at = at

    def _output_at(self, windows: _Windows, ends: _Index) -> _Index:
        return np.where(windows.is_open, ends - 1, np.minimum(ends + self._lateness_us, INSTANT_MAX_US))

    # ------------------------------------------------------------- rows of keys

    def __len__(self) -> int:
        return len(self._windows.owner)

    @property
    def size_bytes(self) -> int:
        return self._column.window_bytes * len(self) + _KEY_BYTES * int(self._has_windows.sum())

    @property
    def next_at(self) -> int | None:
        return self._next_at

    @property
    def held_at(self) -> int | None:
        return self._held_at

    def due_keys(self, watermark: int) -> set[str]:
        if self._next_at is None or self._next_at > watermark:
            return set()
        due = np.unique(self._windows.owner[self._at <= watermark])
        return {self._names[number] for number in due.tolist()}

    def among(self, keys: Sequence[str]) -> list[str]:
        numbers, holds = self._numbers, self._has_windows
        return [key for key in keys if (number := numbers.get(key)) is not None and holds[number]]

    @property
    def keys(self) -> list[str]:
        return [self._names[number] for number in np.flatnonzero(self._has_windows).tolist()]

    def take(self, keys: Sequence[str]) -> StoredRows:
        """Remove and return the rows of keys that are all here."""
        return self._stored(keys, self._remove(keys))

    def _remove(self, keys: Sequence[str]) -> _Windows:
        """Remove the windows of these keys; return them by the keys' places, in order of place and start."""
        is_taken, taken = self._owned(self._numbers_of(keys))
        self._hold(self._windows.at(~is_taken))
        return taken.at(np.lexsort((taken.start, taken.owner)))

    def _stored(self, keys: Sequence[str], windows: _Windows) -> StoredRows:
        written = self._written(windows, len(keys))
        tags, _, at, output_at = written.timers.flatten().flatten()
        ends = np.cumsum(written.timer_counts).tolist()
        all_timers = [
            Timer(tag, TimeDomain.EVENT, fires_at, produces_at)
            for tag, fires_at, produces_at in zip(
                tags.to_pylist(),
                at.view(pa.int64()).to_pylist(),
                output_at.view(pa.int64()).to_pylist(),
                strict=True,
            )
        ]
        starts = [0, *ends]
        timers: dict[str, Timers] = {
            key: tuple(all_timers[starts[place] : ends[place]]) for place, key in enumerate(keys)
        }
        return StoredRows(written.states.to_pylist(), timers)

    def take_up(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Sequence[Timers]
    ) -> list[str]:
        owner: list[int] = []
        rows: list[tuple[int, int, Any, bool]] = []
        for place, state in enumerate(states):
            found = self._parsed(state)
            owner += [place] * len(found)
            rows += found
        if not rows:
            return []
        starts, news, totals, opens = zip(*rows, strict=True)
        windows = _Windows(
            np.array(owner, np.int64),
            np.array(starts, np.int64),
            np.array(news, np.int64),
            self._column.of(totals),
            np.array(opens, np.bool_),
        )
        # A row goes to the columns only if they would write it so: other code or another lateness may have written it.
        try:
            stored = self._stored(keys, windows)
        except (TypedAccumulatorError, CombinerError):
            return []
        is_same = [
            state == mine and own == stored.timers[key]
            for key, state, mine, own in zip(keys, states, stored.states, timers, strict=True)
        ]
        if not all(is_same):
            windows = windows.at(np.array(is_same, np.bool_)[windows.owner])
        self._hold(self._windows.with_others(windows.owned_by(self._numbers_of(keys)[windows.owner])))
        return [key for key, same in zip(keys, is_same, strict=True) if same]

    def _parsed(self, state: StoredState | None) -> list[tuple[int, int, Any, bool]]:
        """Return start, news, total and openness of the windows of a state; nothing for one that is not for columns."""
        found: list[tuple[int, int, Any, bool]] = []
        try:
            for fields in orjson.loads(state)["windows"] if type(state) is str else ():
                start, news, total = fields["window"][0], fields.get("news", 0), fields.get("accumulator")
                are_numbers = all(
                    type(number) is int and abs(number) <= TIME_MAX_US for number in (start, news)
                )
                if not are_numbers or not ("accumulator" not in fields or self._column.holds(total)):
                    return []
                found.append((start, news, total, "news" in fields))
        except (ValueError, LookupError, TypeError, AttributeError):
            return []
        return found

    def _numbers_of(self, keys: Sequence[str]) -> _Index:
        numbers, names = self._numbers, self._names
        found = np.fromiter(map(numbers.get, keys, repeat(-1)), np.int64, len(keys))
        for place in np.flatnonzero(found < 0).tolist():
            found[place] = numbers[keys[place]] = len(names)
            names.append(keys[place])
        if len(self._has_windows) < len(names):
            self._has_windows = np.concatenate(
                [self._has_windows, np.zeros(len(names) - len(self._has_windows), np.bool_)]
            )
        return found

    def _forget_keys_without_windows(self) -> None:
        kept = np.flatnonzero(self._has_windows)
        if len(self._names) <= 2 * len(kept) + _NAMES_MIN:
            return
        number = np.full(len(self._names), -1, np.int64)
        number[kept] = np.arange(len(kept))
        self._names = [self._names[old] for old in kept.tolist()]
        self._numbers = {name: new for new, name in enumerate(self._names)}
        self._hold(self._windows.owned_by(number[self._windows.owner]))

    # ------------------------------------------------------------- a bundle

    def change(self, records: KeyedRecords, clocks: Clocks) -> ColumnChange | None:
        try:
            return self._changed(records, clocks)
        except TypedAccumulatorError:
            # It would happen again and again.
            self._has_types = True
            return None
        except CombinerError:
            # It raises again in a turn, which makes a dead letter of it.
            return None

    def _changed(self, records: KeyedRecords, clocks: Clocks) -> ColumnChange | None:
        # Not later: the numbers of the change's keys must last until it is applied.
        self._forget_keys_without_windows()
        found = self._arrived(records, clocks.watermark)
        if found is None:
            return None
        places, arrived, dropped = found
        keys = records.keys
        if len(places) < len(keys):
            keys = [keys[place] for place in places.tolist()]
        count, watermark, size_us = len(keys), clocks.watermark, self._size_us
        numbers = self._numbers_of(keys)
        former = self._owned(numbers)[1]
        windows, is_new = _merged(former, arrived, self._column)
        ends = windows.start + size_us
        is_ending = windows.is_open & (ends <= watermark)
        is_expiring = ends + self._lateness_us <= watermark
        has_new_timers = np.zeros(count, np.bool_)
        has_new_timers[windows.owner[is_new | is_ending | is_expiring]] = True
        panes = windows.at(is_ending)
        kept = ~is_expiring
        after = _Windows(
            windows.owner[kept],
            windows.start[kept],
            np.where(is_ending, 0, windows.news)[kept],
            (windows.total if self._accumulates else self._column.without(windows.total, is_ending))[kept],
            (windows.is_open & ~is_ending)[kept],
        )
        written = self._written(after, count)
        changed, has_state = has_new_timers.copy(), np.zeros(count, np.bool_)
        changed[arrived.owner] = True
        has_state[after.owner] = True
        return ColumnChange(
            places=places,
            states=written.states if changed.all() else pc.if_else(pa.array(changed), written.states, None),
            timers=written.timers_where(has_new_timers),
            holds=written.holds,
            changed=changed,
            deleted=changed & ~has_state,
            productions=self._panes(panes, keys, clocks),
            owners=panes.owner,
            fired=int(is_ending.sum()) + int(is_expiring.sum()),
            counters={DROPPED: dropped} if dropped else {},
            former=former,
            after=(numbers, after),
        )

    def _arrived(self, records: KeyedRecords, watermark: int) -> tuple[_Index, _Windows, int] | None:
        """Return the places of the keys that are here, what arrived for their windows, and the number of dropped elements."""
        keys, sources, elsewhere = records.keys, records.sources, records.elsewhere
        owners = np.repeat(np.arange(len(keys)), np.diff(records.bounds))
        assigned = self._assigned(owners, records.at[sources])
        if assigned is None:
            return None
        cells, is_null = records.added
        owner, starts, chosen = assigned
        ends = starts + self._size_us
        if len(starts) and (
            int(starts.min()) < INSTANT_MIN_US or int(ends.max()) + self._lateness_us > INSTANT_MAX_US
        ):
            return None
        is_live = ends + self._lateness_us > watermark
        is_here = np.ones(len(keys), np.bool_)
        if elsewhere:
            is_here = np.fromiter((key not in elsewhere for key in keys), np.bool_, len(keys))
        # An element of a window that has ended and not expired makes a late pane.
        is_here[owner[is_live & (ends <= watermark)]] = False
        if is_null is not None:
            is_here[owner[is_null[sources[chosen]]]] = False
        if not is_here.any():
            return None
        dropped = 0
        if not (is_live.all() and is_here.all()):
            is_own = is_here[owner]
            is_live &= is_own
            dropped = len(np.unique(chosen[is_own])) - len(np.unique(chosen[is_live]))
            owner, starts, chosen = (np.cumsum(is_here) - 1)[owner[is_live]], starts[is_live], chosen[is_live]
        return np.flatnonzero(is_here), _grouped(owner, starts, cells, sources[chosen], self._column), dropped

    def _owned(self, numbers: _Index) -> tuple[_Mask, _Windows]:
        """Return which windows belong to keys of these numbers, and these windows, by the numbers' places."""
        place = np.full(len(self._names), -1, np.int64)
        place[numbers] = np.arange(len(numbers))
        places = place[self._windows.owner]
        is_owned = places >= 0
        return is_owned, self._windows.at(is_owned).owned_by(places[is_owned])

    def apply(self, change: ColumnChange) -> None:
        numbers, after = change.after
        is_owned, _ = self._owned(numbers)
        self._hold(self._windows.at(~is_owned).with_others(after.owned_by(numbers[after.owner])))

    def undo(self, keys: Sequence[str], former: Any) -> StoredRows:
        self._remove(keys)
        return self._stored(keys, former.at(np.lexsort((former.start, former.owner))))

    def added(self, values: Values) -> _Added | None:
        """Return what each value adds, and which are for turns; ``None`` where the columns do not hold them."""
        if self._has_types:
            return None
        if not len(values):
            return (), None
        if not len(self):
            # The column's type decides, and may be another one each time that all windows have closed.
            self._column = column_of(self._combine, values)
            self._hold(_no_windows(self._column.of([])))
        return self._column.cells(values, self._windows.total)

    def _assigned(self, owner: _Index, times: _Index) -> tuple[_Index, _Index, _Index] | None:
        """Return the owner, the start and the place of the element for each window of each element.

        ``None`` if an element is in no window.
        """
        last = times - (times - self._offset_us) % self._period_us
        places = np.arange(len(times))
        if self._period_us == self._size_us:
            return owner, last, places
        counts = -((times - self._size_us - last) // self._period_us)
        if len(counts) and not counts.min():
            return None
        repeated = np.repeat(places, counts)
        back = np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)
        return owner[repeated], last[repeated] - back * self._period_us, repeated

    def _panes(self, windows: _Windows, keys: Sequence[str], clocks: Clocks) -> pa.StructArray:
        count = len(windows.owner)
        ends = windows.start + self._size_us
        pane = orjson.dumps(on_time_pane(self._strategy, clocks)).decode()
        at = pa.array(ends - 1)
        texts = pc.binary_join_element_wise(
            '{"value":',
            self._column.results(windows.total),
            ',"window":[',
            _text(windows.start),
            ",",
            _text(ends),
            '],"at":',
            at.cast(pa.string()),
            f',"pane":{pane}}}',
            "",
        )
        return pa.StructArray.from_arrays(
            [
                pa.array([self._stream] * count, pa.string()),
                pa.array(list(map(keys.__getitem__, windows.owner.tolist())), pa.string()),
                texts,
                pa.nulls(count, pa.binary()),
                at.view(TIMESTAMP),
            ],
            fields=list(PRODUCTION_TYPE),
        )

    # ------------------------------------------------------------- rows as text

    def _written(self, windows: _Windows, count: int) -> _WrittenRows:
        """Write the rows of ``count`` owners, whose windows are in order of owner and start."""
        ends = windows.start + self._size_us
        start_text, end_text = _text(windows.start), _text(ends)
        total_text = self._column.texts(windows.total)
        texts = pc.binary_join_element_wise(
            '{"window":[',
            start_text,
            ",",
            end_text,
            '],"accumulator":',
            total_text,
            ',"news":',
            _text(windows.news),
            f',"is_held":true,"timers":{{"{END}":',
            end_text,
            "}}",
            "",
        )
        if not windows.is_open.all():
            total = [',"accumulator":', total_text] if self._accumulates else []
            ended = pc.binary_join_element_wise(
                '{"window":[',
                start_text,
                ",",
                end_text,
                "]",
                *total,
                ',"index":1,"nonspeculative_index":1,"has_ended":true}',
                "",
            )
            texts = pc.if_else(pa.array(windows.is_open), texts, ended)
        counts = np.bincount(windows.owner, minlength=count).astype(np.int64)
        lists = lists_of(texts, counts, pa.list_(pa.string()), pa.array(counts == 0))
        states = pc.binary_join_element_wise('{"windows":[', pc.binary_join(lists, ","), "]}", "")
        return _WrittenRows(states, *self._written_timers(windows, ends, start_text, end_text, count))

    def _written_timers(
        self, windows: _Windows, ends: _Index, start_text: pa.Array, end_text: pa.Array, count: int
    ) -> tuple[pa.StructArray, _Index, pa.Array]:
        expiry_tags = pc.binary_join_element_wise(EXPIRY, start_text, "/", end_text, "")
        output_at = self._output_at(windows, ends)
        opens = np.flatnonzero(windows.is_open)
        chosen = pa.array(opens)
        end_tags = pc.binary_join_element_wise(
            start_text.take(chosen), "/", end_text.take(chosen), f"|{END}", ""
        )
        owner = np.concatenate([windows.owner[opens], windows.owner])
        at = np.concatenate([ends[opens], ends + self._lateness_us])
        # Of timers at one time the end's comes first, because "~" is greater than a digit: the sort is stable.
        order = np.lexsort((at, owner))
        tags = pa.concat_arrays([end_tags, expiry_tags]).take(pa.array(order))
        values = pa.StructArray.from_arrays(
            [
                tags,
                pa.DictionaryArray.from_arrays(
                    pa.array(np.zeros(len(order), np.int32)), pa.array([_EVENT])
                ).cast(pa.string()),
                pa.array(at[order]).view(TIMESTAMP),
                pa.array(np.concatenate([output_at[opens], output_at])[order]).view(TIMESTAMP),
            ],
            fields=list(TIMER_TYPE),
        )
        holds = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(holds, windows.owner, output_at)
        none = holds == np.iinfo(np.int64).max
        return (
            values,
            np.bincount(owner, minlength=count).astype(np.int64),
            pa.array(holds, mask=none).view(TIMESTAMP),
        )


@dataclass(frozen=True, slots=True)
class _WrittenRows:
    states: pa.StringArray
    timer_values: pa.StructArray
    timer_counts: _Index
    holds: pa.Array

    @property
    def timers(self) -> pa.ListArray:
        return self.timers_where(np.ones(len(self.timer_counts), np.bool_))

    def timers_where(self, chosen: _Mask) -> pa.ListArray:
        """Return the timers of the chosen owners, and null for the others."""
        values, counts = self.timer_values, self.timer_counts
        if not chosen.all():
            values = values.filter(pa.array(np.repeat(chosen, counts)))
            counts = np.where(chosen, counts, 0)
        return lists_of(values, counts, ROW_SCHEMA.field("timers").type, pa.array(~chosen))


def _text(numbers: _Index) -> pa.StringArray:
    return pa.array(numbers).cast(pa.string())


def _grouped(
    owner: _Index, start: _Index, cells: Any, sources: _Index, column: AccumulatorColumn
) -> _Windows:
    """Return a window for each owner and start, with the number of its cells and what they add."""
    if not len(owner):
        return _no_windows(column.of([]))
    is_same = owner[1:] == owner[:-1]
    if not bool(((owner[1:] > owner[:-1]) | (is_same & (start[1:] >= start[:-1]))).all()):
        order = np.lexsort((start, owner))
        owner, start, sources = owner[order], start[order], sources[order]
        is_same = owner[1:] == owner[:-1]
    firsts = np.flatnonzero(np.concatenate([[True], ~is_same | (start[1:] != start[:-1])]))
    return _Windows(
        owner[firsts],
        start[firsts],
        np.diff(np.append(firsts, len(owner))),
        column.grouped(cells, sources, firsts),
        np.ones(len(firsts), np.bool_),
    )


def _merged(former: _Windows, arrived: _Windows, column: AccumulatorColumn) -> tuple[_Windows, _Mask]:
    """Add arrived elements to windows that are open; return all windows in order, and which are new."""
    both = former.with_others(arrived)
    if not len(both.owner):
        return both, np.empty(0, np.bool_)
    # Stable: a window stands before what arrived for it.
    order = np.lexsort((both.start, both.owner))
    both = both.at(order)
    is_arrived = order >= len(former.owner)
    is_more = np.concatenate(
        [[False], (both.owner[1:] == both.owner[:-1]) & (both.start[1:] == both.start[:-1])]
    )
    firsts = np.flatnonzero(~is_more)
    return (
        _Windows(
            both.owner[firsts],
            both.start[firsts],
            np.add.reduceat(both.news, firsts),
            column.merged(both.total, is_arrived, firsts),
            both.is_open[firsts],
        ),
        is_arrived[firsts],
    )
