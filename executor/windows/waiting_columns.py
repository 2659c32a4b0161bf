"""Windows that only wait for their end, of all keys of a bundle at once, as columns of whole numbers.

What `WaitingWindows` does for one key, with arrays in place of JSON: elements are grouped by key and window, the groups are
added to the windows that are open, and ended windows give their panes. Rows, timers and panes are written by Arrow,
the same to the byte. A bundle in which anything else happens is left to the turns of single keys, and so is a row that
these columns would not write as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.column_rows import (
    ColumnChange,
    ColumnRows,
    KeyedRecords,
    StoredRows,
)
from millpond.executor.computation.key_numbers import KeyNumbers
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
    WideSumError,
    cells_of,
    column_of,
    combining,
)
from millpond.executor.windows.combiners import CombineFn
from millpond.executor.windows.key_windows import DROPPED, EXPIRY, Finish
from millpond.executor.windows.strategy import Accumulation, WindowingStrategy
from millpond.executor.windows.waiting_windows import END, ShownPanes
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
_ENDED: Final = ',"index":1,"nonspeculative_index":1,"has_ended":true}'


@dataclass(frozen=True, slots=True)
class WindowArrays:
    """Windows of keys, each of which is known by its number, the ``owner``.

    An ended window has no ``news``, and a ``total`` only where panes accumulate.
    """

    owner: _Index
    start: _Index
    end: _Index
    news: _Index
    total: Accumulators
    is_open: _Mask

    def at(self, chosen: _Index | _Mask) -> WindowArrays:
        return WindowArrays(
            self.owner[chosen],
            self.start[chosen],
            self.end[chosen],
            self.news[chosen],
            self.total[chosen],
            self.is_open[chosen],
        )

    def owned_by(self, owner: _Index) -> WindowArrays:
        return WindowArrays(owner, self.start, self.end, self.news, self.total, self.is_open)

    def with_others(self, others: WindowArrays) -> WindowArrays:
        return WindowArrays(
            np.concatenate([self.owner, others.owner]),
            np.concatenate([self.start, others.start]),
            np.concatenate([self.end, others.end]),
            np.concatenate([self.news, others.news]),
            np.concatenate([self.total, others.total]),
            np.concatenate([self.is_open, others.is_open]),
        )


def in_order(former: WindowArrays, arrived: WindowArrays) -> tuple[WindowArrays, _Mask]:
    """Return all windows by owner and start, a former one before its arrived part, and which have arrived."""
    both = former.with_others(arrived)
    order = np.lexsort((both.start, both.owner))
    return both.at(order), order >= len(former.owner)


def _no_windows(totals: Accumulators) -> WindowArrays:
    none = np.empty(0, np.int64)
    return WindowArrays(none, none, none, none, totals, np.empty(0, np.bool_))


class WaitingColumns(ColumnRows):
    """The rows of keys of one interval whose windows only wait."""

    def __init__(
        self, strategy: WindowingStrategy, combine: CombineFn, stream: str, finish: Finish | None
    ) -> None:
        self._strategy = strategy
        self._combine = combine
        self._stream = stream
        self._finish = finish
        self._measure(strategy.window_fn)
        self._lateness_us = strategy.allowed_lateness_us + 1
        self._accumulates = strategy.accumulation is Accumulation.ACCUMULATING
        self._keys: KeyNumbers = KeyNumbers()
        self._column: AccumulatorColumn = column_of(combine)
        self._has_types = False
        self._has_wide_sums = False
        self._hold(_no_windows(self._column.of([])))

    def _measure(self, window_fn: Any) -> None:
        self._size_us = duration_us(window_fn.size)
        self._period_us = duration_us(getattr(window_fn, "period", window_fn.size))
        self._offset_us = duration_us(window_fn.offset) % self._period_us

    def _hold(self, windows: WindowArrays) -> None:
        self._windows = windows
        self._has_windows = np.zeros(len(self._keys), np.bool_)
        self._has_windows[windows.owner] = True
        at = np.where(windows.is_open, windows.end, windows.end + self._lateness_us)
        self._next_at = int(at.min()) if len(at) else None
        output_at = self._output_at(windows)
        self._held_at = int(output_at.min()) if len(at) else None
        self._at = at

    def _output_at(self, windows: WindowArrays) -> _Index:
        late_at = np.minimum(windows.end + self._lateness_us, INSTANT_MAX_US)
        return np.where(windows.is_open, windows.end - 1, late_at)

    # ------------------------------------------------------------- rows of keys

    def __len__(self) -> int:
        return len(self._windows.owner)

    @property
    def size_bytes(self) -> int:
        return self._column.window_bytes * len(self) + self._keys.size_bytes + self._has_windows.nbytes

    @property
    def next_at(self) -> int | None:
        return self._next_at

    @property
    def held_at(self) -> int | None:
        return self._held_at

    def due_keys(self, watermark: int) -> pa.StringArray:
        if self._next_at is None or self._next_at > watermark:
            return pa.array([], pa.string())
        is_due = np.zeros(len(self._keys), np.bool_)
        is_due[self._windows.owner[self._at <= watermark]] = True
        return self._keys.names(np.flatnonzero(is_due))

    def among(self, keys: Sequence[str]) -> list[str]:
        return self._keys.among(keys, self._has_windows)

    @property
    def keys(self) -> list[str]:
        keys: list[str] = self._keys.names(np.flatnonzero(self._has_windows)).to_pylist()
        return keys

    def take(self, keys: Sequence[str]) -> StoredRows:
        """Remove and return the rows of keys that are all here."""
        return self._stored(keys, self._remove(keys))

    def _remove(self, keys: Sequence[str]) -> WindowArrays:
        """Remove the windows of these keys; return them by the keys' places, in order of place and start."""
        is_taken, taken = self._owned(self._numbers_of(keys))
        self._hold(self._windows.at(~is_taken))
        return taken.at(np.lexsort((taken.start, taken.owner)))

    def _stored(
        self, keys: Sequence[str], windows: WindowArrays, column: AccumulatorColumn | None = None
    ) -> StoredRows:
        written = self._written(windows, len(keys), column=column)
        tags, _, at, output_at = written.timers.flatten().flatten()
        bounds = written.timers.offsets.to_pylist()
        all_timers = [
            Timer(tag, TimeDomain.EVENT, fires_at, produces_at)
            for tag, fires_at, produces_at in zip(
                tags.to_pylist(),
                at.view(pa.int64()).to_pylist(),
                output_at.view(pa.int64()).to_pylist(),
                strict=True,
            )
        ]
        timers: dict[str, Timers] = {
            key: tuple(all_timers[bounds[place] : bounds[place + 1]]) for place, key in enumerate(keys)
        }
        return StoredRows(written.states.to_pylist(), timers)

    def take_up(
        self, keys: Sequence[str], states: Sequence[StoredState | None], timers: Sequence[Timers]
    ) -> list[str]:
        owner: list[int] = []
        rows: list[tuple[int, int, int, Any, bool]] = []
        for place, state in enumerate(states):
            found = self._parsed(state)
            owner += [place] * len(found)
            rows += found
        if not rows:
            return []
        starts, ends, news, totals, opens = zip(*rows, strict=True)
        windows = WindowArrays(
            np.array(owner, np.int64),
            np.array(starts, np.int64),
            np.array(ends, np.int64),
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

    def _parsed(self, state: StoredState | None) -> list[tuple[int, int, int, Any, bool]]:
        """Return bounds, news, total and openness of the windows of a state; nothing for other states."""
        found: list[tuple[int, int, int, Any, bool]] = []
        try:
            for fields in orjson.loads(state)["windows"] if type(state) is str else ():
                (start, end), news, total = fields["window"], fields.get("news", 0), fields.get("accumulator")
                are_numbers = all(
                    type(number) is int and abs(number) <= TIME_MAX_US for number in (start, end, news)
                )
                if not (are_numbers and self._is_own(start, end)):
                    return []
                if not ("accumulator" not in fields or self._column.holds(total)):
                    return []
                found.append((start, end, news, total, "news" in fields))
        except (ValueError, LookupError, TypeError, AttributeError):
            return []
        return found

    def _is_own(self, start: int, end: int) -> bool:
        """Return True for the bounds of a window that the step's window function can assign."""
        return end - start == self._size_us and not (start - self._offset_us) % self._period_us

    def _numbers_of(self, keys: pa.StringArray | Sequence[str]) -> _Index:
        numbers = self._keys.of(keys)
        if len(self._has_windows) < len(self._keys):
            more = np.zeros(len(self._keys) - len(self._has_windows), np.bool_)
            self._has_windows = np.concatenate([self._has_windows, more])
        return numbers

    def _forget_keys_without_windows(self) -> None:
        kept = np.flatnonzero(self._has_windows)
        if not self._keys.has_many_besides(len(kept)):
            return
        number = np.full(len(self._keys), -1, np.int64)
        number[kept] = np.arange(len(kept))
        self._keys.keep(kept)
        self._hold(self._windows.owned_by(number[self._windows.owner]))

    # ------------------------------------------------------------- a bundle

    def change(self, records: KeyedRecords, clocks: Clocks) -> ColumnChange | None:
        try:
            return self._changed(records, clocks)
        except WideSumError:
            self._has_wide_sums = True
            return None
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
        keys, key_column = records.keys, records.key_column
        if len(places) < len(keys):
            keys = [keys[place] for place in places.tolist()]
            key_column = key_column.take(pa.array(places))
        count, watermark = len(keys), clocks.watermark
        numbers = self._numbers_of(key_column)
        former = self._owned(numbers)[1]
        windows, is_new = self._merged(former, arrived, watermark)
        is_ending = windows.is_open & (windows.end <= watermark)
        is_expiring = windows.end + self._lateness_us <= watermark
        has_new_timers = np.zeros(count, np.bool_)
        has_new_timers[windows.owner[is_new | is_ending | is_expiring]] = True
        productions, owners = self._panes(windows.at(is_ending), key_column, clocks)
        kept = ~is_expiring
        after = WindowArrays(
            windows.owner[kept],
            windows.start[kept],
            windows.end[kept],
            np.where(is_ending, 0, windows.news)[kept],
            (windows.total if self._accumulates else self._column.without(windows.total, is_ending))[kept],
            (windows.is_open & ~is_ending)[kept],
        )
        written = self._written(after, count, has_new_timers)
        changed, has_state = has_new_timers.copy(), np.zeros(count, np.bool_)
        changed[arrived.owner] = True
        has_state[after.owner] = True
        return ColumnChange(
            places=places,
            states=written.states if changed.all() else pc.if_else(pa.array(changed), written.states, None),
            timers=written.timers,
            holds=written.holds,
            changed=changed,
            deleted=changed & ~has_state,
            productions=productions,
            owners=owners,
            fired=int(is_ending.sum()) + int(is_expiring.sum()),
            counters={DROPPED: dropped} if dropped else {},
            former=(self._column, former),
            after=(numbers, after),
        )

    def _arrived(self, records: KeyedRecords, watermark: int) -> tuple[_Index, WindowArrays, int] | None:
        """Return the places of the keys that are here, what arrived for their windows, and the number of dropped elements."""
        keys, sources, elsewhere = records.keys, records.sources, records.elsewhere
        owners = np.repeat(np.arange(len(keys)), np.diff(records.bounds))
        assigned = self._assigned(owners, records.at[sources])
        if assigned is None:
            return None
        cells, is_null = records.added
        owner, starts, chosen = assigned
        ends = self._ends(starts)
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
        self._leave_odd(is_here, keys, owner[is_live], starts[is_live], watermark)
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
        return np.flatnonzero(is_here), self._grouped(owner, starts, cells, sources[chosen]), dropped

    def _leave_odd(
        self, is_here: _Mask, keys: Sequence[str], owner: _Index, starts: _Index, watermark: int
    ) -> None:
        """Take the mark off keys for whose elements the window function has rules that columns have not."""

    def _is_apart(self, starts: _Index) -> _Mask:
        """Return which elements of a key begin another window than the one before, in order of the starts."""
        apart: _Mask = starts[1:] != starts[:-1]
        return apart

    def _grouped(self, owner: _Index, start: _Index, cells: Any, sources: _Index) -> WindowArrays:
        """Return the windows of elements, with the number and the sum of their cells."""
        column = self._column
        if not len(owner):
            return _no_windows(column.of([]))
        is_same = owner[1:] == owner[:-1]
        if not bool(((owner[1:] > owner[:-1]) | (is_same & (start[1:] >= start[:-1]))).all()):
            order = np.lexsort((start, owner))
            owner, start, sources = owner[order], start[order], sources[order]
            is_same = owner[1:] == owner[:-1]
        firsts = np.flatnonzero(np.concatenate([[True], ~is_same | self._is_apart(start)]))
        nexts = np.append(firsts[1:], len(owner))
        return WindowArrays(
            owner[firsts],
            start[firsts],
            self._ends(start[nexts - 1]),
            nexts - firsts,
            column.grouped(cells, sources, firsts),
            np.ones(len(firsts), np.bool_),
        )

    def _merged(
        self,
        former: WindowArrays,
        arrived: WindowArrays,
        watermark: int,  # noqa: ARG002 - of windows that grow
    ) -> tuple[WindowArrays, _Mask]:
        """Add arrived elements to windows that are open; return all windows in order, and which are new."""
        if not len(former.owner) and not len(arrived.owner):
            return arrived, np.empty(0, np.bool_)
        both, is_arrived = in_order(former, arrived)
        windows, firsts = self._joined(both, is_arrived, both.start[1:] == both.start[:-1], both.end)
        return windows, is_arrived[firsts]

    def _joined(
        self, both: WindowArrays, is_arrived: _Mask, is_more: _Mask, ends: _Index
    ) -> tuple[WindowArrays, _Index]:
        """Join windows in order, each to the one before where ``is_more`` and their owner is one.

        Return the windows, which end where their last part has its entry of ``ends``, and the places of their first parts.
        """
        is_first = np.concatenate([[True], ~(is_more & (both.owner[1:] == both.owner[:-1]))])
        firsts = np.flatnonzero(is_first)
        return WindowArrays(
            both.owner[firsts],
            both.start[firsts],
            ends[np.append(firsts[1:], len(ends)) - 1],
            np.add.reduceat(both.news, firsts),
            self._column.merged(both.total, is_arrived, firsts),
            both.is_open[firsts],
        ), firsts

    def _owned(self, numbers: _Index) -> tuple[_Mask, WindowArrays]:
        """Return which windows belong to keys of these numbers, and these windows, by the numbers' places."""
        place = np.full(len(self._keys), -1, np.int64)
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
        column, windows = former
        return self._stored(keys, windows.at(np.lexsort((windows.start, windows.owner))), column)

    def added(self, values: Values, times: _Index) -> _Added | None:
        """Return what each value adds, and which are for turns; ``None`` where the columns do not hold them."""
        if self._has_types:
            return None
        if not len(values):
            return (), None
        cells = cells_of(values, self._combine, times)
        if cells is None:
            return None
        if not len(self):
            # The type of the values decides, and may be another one each time that all windows have closed.
            self._column = column_of(self._combine, cells, is_wide=self._has_wide_sums)
            self._hold(_no_windows(self._column.of([])))
        elif self._has_wide_sums:
            self._column, total = self._column.widened(self._windows.total)
            self._hold(replace(self._windows, total=total))
        return self._column.added(cells, self._windows.total)

    def _assigned(self, owner: _Index, times: _Index) -> tuple[_Index, _Index, _Index] | None:
        """Return the owner, the start and the place of the element for each window of each element.

        ``None`` if an element is in no window, or only a turn can find its window.
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

    def _ends(self, starts: _Index) -> _Index:
        """Return the ends of windows that `_assigned` has just assigned."""
        return starts + self._size_us

    def _panes(
        self, windows: WindowArrays, keys: pa.StringArray, clocks: Clocks
    ) -> tuple[pa.StructArray, _Index]:
        """Return the panes of windows, and their owners."""
        shown = ShownPanes(self._strategy, clocks, self._finish)
        if self._finish is None:
            spans = self._spans(windows)
            ends = '],"at":', spans.lasts, f',"pane":{shown.json}}}'
            texts = pc.binary_join_element_wise(
                '{"value":',
                self._column.results(windows.total),
                spans.texts(',"window":[', spans.starts, ",", spans.ends, *ends),
                "",
            )
        else:
            windows, texts = self._finished(windows, keys, shown)
        count = len(windows.owner)
        panes = pa.StructArray.from_arrays(
            [
                pa.repeat(self._stream, count),
                keys.take(pa.array(windows.owner)),
                texts,
                pa.nulls(count, pa.binary()),
                pa.array(windows.end - 1).view(TIMESTAMP),
            ],
            fields=list(PRODUCTION_TYPE),
        )
        return panes, windows.owner

    def _finished(
        self, windows: WindowArrays, keys: pa.StringArray, shown: ShownPanes
    ) -> tuple[WindowArrays, pa.StringArray]:
        """Call the function of results for each window; return the envelopes, and the window of each."""
        starts, ends = windows.start.tolist(), windows.end.tolist()
        values, names = self._column.values(windows.total), keys.take(pa.array(windows.owner)).to_pylist()
        with combining():
            of_windows = [
                shown.texts(key, value, start, end)
                for key, value, start, end in zip(names, values, starts, ends, strict=True)
            ]
        counts = np.fromiter(map(len, of_windows), np.int64, len(of_windows))
        chosen = np.repeat(np.arange(len(of_windows)), counts)
        return windows.at(chosen), pa.array(chain.from_iterable(of_windows), pa.string())

    # ------------------------------------------------------------- rows as text

    def _spans(self, windows: WindowArrays) -> Spans:
        """Return the distinct spans of windows."""
        return Spans.of(windows.start, self._size_us, self._period_us)

    def _written(
        self,
        windows: WindowArrays,
        count: int,
        has_timers: _Mask | None = None,
        column: AccumulatorColumn | None = None,
    ) -> _WrittenRows:
        """Write the rows of ``count`` owners, whose windows are in order of owner and start; without the timers of some.

        ``column`` is the column of their accumulators, if it has been replaced.
        """
        output_at = self._output_at(windows)
        spans = self._spans(windows)
        windows_of = np.bincount(windows.owner, minlength=count).astype(np.int64)
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(windows_of)])
        has_windows = windows_of > 0
        holds = np.zeros(count, np.int64)
        if len(output_at):
            holds[has_windows] = np.minimum.reduceat(output_at, bounds[:-1][has_windows])
        return _WrittenRows(
            _cut(self._window_texts(windows, spans, bounds, column or self._column), bounds),
            self._timers(windows, spans, output_at, count, has_timers),
            pa.array(holds, mask=~has_windows).view(TIMESTAMP),
        )

    def _window_texts(
        self, windows: WindowArrays, spans: Spans, bounds: _Index, column: AccumulatorColumn
    ) -> pa.StringArray:
        """Write each window as its row has it: the texts of a row's windows, one after the other, are its state."""
        count = len(windows.owner)
        is_first, is_last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        has_windows = bounds[1:] > bounds[:-1]
        is_first[bounds[:-1][has_windows]] = 1
        is_last[bounds[1:][has_windows] - 1] = 1
        # Of few distinct windows, so most of the text is written once for all.
        window = ('{"window":[', spans.starts, ",", spans.ends)
        begins = spans.texts(*window, '],"accumulator":', beginnings=("", '{"windows":['), chosen=is_first)
        timers = (f',"is_held":true,"timers":{{"{END}":', spans.ends, "}}")
        closes = spans.texts(*timers, endings=(",", "]}"), chosen=is_last)
        totals = column.texts(windows.total)
        texts = pc.binary_join_element_wise(begins, totals, _news(windows.news), closes, "")
        if windows.is_open.all():
            return texts
        begins = spans.texts(*window, "]", beginnings=("", '{"windows":['), chosen=is_first)
        total = (',"accumulator":', totals) if self._accumulates else ()
        closes = pa.array([_ENDED + ",", _ENDED + "]}"]).take(pa.array(is_last))
        ended = pc.binary_join_element_wise(begins, *total, closes, "")
        return pc.if_else(pa.array(windows.is_open), texts, ended)

    def _timers(
        self, windows: WindowArrays, spans: Spans, output_at: _Index, count: int, chosen: _Mask | None
    ) -> pa.ListArray:
        """Write the timers of the chosen owners, or of all; null for the others."""
        which = spans.which
        if chosen is None:
            chosen = np.ones(count, np.bool_)
        elif not chosen.all():
            is_chosen = chosen[windows.owner]
            windows, which, output_at = windows.at(is_chosen), which[is_chosen], output_at[is_chosen]
        ends, is_open = windows.end, windows.is_open
        # An open window has two timers, of its end and of its expiry; an ended one has the second.
        last = np.cumsum(1 + is_open) - 1
        first = last[is_open] - 1
        length = int(last[-1]) + 1 if len(last) else 0
        at, tag, is_expiry = np.empty(length, np.int64), np.empty(length, np.int64), np.ones(length, np.bool_)
        at[last], tag[last] = ends + self._lateness_us, which + len(spans.starts)
        at[first], tag[first], is_expiry[first] = ends[is_open], which[is_open], False
        owners, holds_at = np.repeat(windows.owner, 1 + is_open), np.repeat(output_at, 1 + is_open)
        # Of timers at one time the end's comes first, because "~" is greater than a digit.
        later = at[1:] - at[:-1] - (is_expiry[:-1] & ~is_expiry[1:])
        if not ((owners[1:] > owners[:-1]) | (later >= 0)).all():
            order = np.lexsort((is_expiry, at, owners))
            at, tag, holds_at = at[order], tag[order], holds_at[order]
        span = pc.binary_join_element_wise(spans.starts, "/", spans.ends, "")
        tags = pa.concat_arrays(
            [
                pc.binary_join_element_wise(span, f"|{END}", ""),
                pc.binary_join_element_wise(EXPIRY, span, ""),
            ]
        )
        values = pa.StructArray.from_arrays(
            [
                tags.take(pa.array(tag)),
                pa.repeat(_EVENT, length),
                pa.array(at).view(TIMESTAMP),
                pa.array(holds_at).view(TIMESTAMP),
            ],
            fields=list(TIMER_TYPE),
        )
        counts = np.bincount(owners, minlength=count).astype(np.int64)
        return lists_of(values, counts, ROW_SCHEMA.field("timers").type, pa.array(~chosen))


@dataclass(frozen=True, slots=True)
class _WrittenRows:
    states: pa.StringArray
    timers: pa.ListArray
    holds: pa.Array


@dataclass(frozen=True, slots=True)
class Spans:
    """The distinct spans of windows of one size, as text; ``which`` has each window's."""

    which: _Index
    starts: pa.StringArray
    ends: pa.StringArray
    lasts: pa.StringArray

    @staticmethod
    def of(start: _Index, size_us: int, period_us: int) -> Spans:
        """Find the spans of windows that begin a multiple of the period apart."""
        first = int(start.min()) if len(start) else 0
        which = (start - first) // period_us
        span = int(which.max()) + 1 if len(start) else 0
        if span <= len(start):
            # Mostly close together: then no sort is needed, and a span without a window costs little.
            distinct = first + np.arange(span) * period_us
        else:
            distinct, which = np.unique(start, return_inverse=True)
        return Spans.between(which, distinct, distinct + size_us)

    @staticmethod
    def between(which: _Index, starts: _Index, ends: _Index) -> Spans:
        return Spans(which, *(_text(times) for times in (starts, ends, ends - 1)))

    def texts(
        self,
        *parts: pa.StringArray | str,
        beginnings: Sequence[str] = ("",),
        endings: Sequence[str] = ("",),
        chosen: _Index | None = None,
    ) -> pa.StringArray:
        """Join parts for each window, between a beginning and an ending, of which ``chosen`` has the number."""
        texts = [
            pc.binary_join_element_wise(before, *parts, after, "")
            for before in beginnings
            for after in endings
        ]
        which = self.which if chosen is None else self.which + chosen * len(self.starts)
        return pa.concat_arrays(texts).take(pa.array(which))


def _news(news: _Index) -> pa.StringArray:
    """Write the number of news of each window, as a field of its state."""
    most = int(news.max()) if len(news) else 0
    if most > len(news):
        return pc.binary_join_element_wise(',"news":', _text(news), "")
    numbers = pc.binary_join_element_wise(',"news":', _text(np.arange(most + 1)), "")
    return numbers.take(pa.array(news))


def _cut(texts: pa.StringArray, bounds: _Index) -> pa.StringArray:
    """Return the texts between bounds, joined without a copy; null where there is none."""
    if not len(texts):
        return pa.nulls(len(bounds) - 1, pa.string())
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :]
    is_some = bounds[1:] > bounds[:-1]
    validity = None if is_some.all() else pa.py_buffer(np.packbits(is_some, bitorder="little").tobytes())
    return pa.Array.from_buffers(
        pa.string(), len(bounds) - 1, [validity, pa.py_buffer(offsets[bounds].tobytes()), texts.buffers()[2]]
    )


def _text(numbers: _Index) -> pa.StringArray:
    return pa.array(numbers).cast(pa.string())
