"""Windows that only wait for their end: columns and short turns give the rows, to the byte, that the hooks give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.column_rows import KeyedRecords
from millpond.executor.computation.values import ArrowValues, JsonValues, PythonValues, Values
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.processor import IntervalProcessor
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.interval.soft_state import BUDGET_BYTES
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.calendar_columns import CalendarColumns
from millpond.executor.windows.combiners import (
    ArgMax,
    CombineFields,
    CombineFn,
    Count,
    CountDistinct,
    Last,
    Max,
    Mean,
    Min,
    Quantiles,
    StdDev,
    Sum,
    ToList,
    ToSet,
)
from millpond.executor.windows.key_windows import Finish
from millpond.executor.windows.pane import Pane
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.time_triggers import AfterWatermark, Default
from millpond.executor.windows.waiting_columns import WaitingColumns
from millpond.executor.windows.waiting_windows import WaitingWindows
from millpond.executor.windows.window import Element, Window
from millpond.executor.windows.window_fns import (
    CalendarWindows,
    FixedWindows,
    Sessions,
    SlidingWindows,
    UnalignedFixedWindows,
)
from millpond.executor.windows.windowed_computation import WindowedComputation
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import change_envelope
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.statestore.rows.value_text import encode_value
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros, WallTimeMicros
from tests.fixtures.interval_run import IntervalRun

_KEYS = ["", "a", "é"]
_COMBINERS: list[CombineFn] = [
    Count(),
    Sum("v"),
    Mean("v"),
    Max("v"),
    ToList("v"),
    CountDistinct("v"),
    Quantiles("v"),
    Count("v"),
    StdDev("v"),
    ToSet("v"),
    Last("v"),
    ArgMax("v", by="v"),
    CombineFields({"n": Count(), "total": Sum("v")}),
    Sum(lambda value: value["v"]),
]
_COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "ints": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5)),
    "small ints": (pa.int32(), st.integers(-2, 5)),
    "floats": (pa.float64(), st.floats()),
    "prices": (pa.float64(), st.integers(-999, 999).map(lambda cents: cents / 100) | st.just(-0.0)),
    "decimals": (pa.decimal128(20, 2), st.integers(-999, 999).map(lambda cents: Decimal(cents) / 100)),
    "texts": (pa.string(), st.sampled_from(["", "x", "\U0001f986"])),
    "times": (pa.timestamp("us"), st.integers(-(2**62), 2**62) | st.integers(0, 9)),
    "lists": (pa.list_(pa.int64()), st.lists(st.integers(0, 3), max_size=2)),
}


def _one_row(key: str, value: Any, window: Window, pane: Pane) -> list[Any]:
    return [{"key": key, "value": value, "start": window.start, "timing": str(pane.timing)}]


def _odd_rows(key: str, value: Any, window: Window, pane: Pane) -> list[Any]:
    """Raise for a key, have no result for another, and two with types for the third; change what they get."""
    if isinstance(value, list):
        value.append(7)
    elif isinstance(value, dict):
        value["more"] = pane.index
    if key == "a":
        raise ValueError(f"odd: {value}")
    return [Decimal(window.start), value] if key else []


_finishes = st.sampled_from([None, None, _one_row, _odd_rows])

_in_columns = st.builds(
    WindowingStrategy,
    window_fn=st.sampled_from(
        [
            FixedWindows("5us"),
            FixedWindows("3us", "2us"),
            SlidingWindows("6us", "3us"),
            SlidingWindows("2us", "3us"),
            Sessions("2us"),
            Sessions("4us"),
        ]
    ),
    accumulation=st.sampled_from(["discarding", "accumulating"]),
    allowed_lateness=st.sampled_from([0, "3us"]),
    asked=st.sampled_from(["element", "bundle"]),
)
_strategies = st.builds(
    WindowingStrategy,
    window_fn=st.sampled_from(
        [
            FixedWindows("5us"),
            FixedWindows("5us", "2us"),
            SlidingWindows("6us", "3us"),
            SlidingWindows("2us", "5us"),
            UnalignedFixedWindows("4us"),
        ]
    ),
    trigger=st.sampled_from([*[Default()] * 9, AfterWatermark()]),
    accumulation=st.sampled_from([*["discarding", "accumulating"] * 5, "retracting"]),
    allowed_lateness=st.sampled_from([0, "3us"]),
    closing=st.sampled_from([*["if_non_empty"] * 9, "always"]),
    asked=st.sampled_from(["element", "bundle"]),
)


@st.composite
def _deliveries(
    draw: st.DrawFn,
    *,
    kinds: Sequence[str] = tuple(sorted(_COLUMNS)),
    at: st.SearchStrategy[int],
    arrow: st.SearchStrategy[bool],
) -> Deliveries:
    kind, cells = _COLUMNS[draw(st.sampled_from(kinds))]
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(_KEYS),
                at,
                st.none() | cells if draw(st.booleans()) else cells,
            ),
            max_size=6,
        )
    )
    column = pa.array([row[2] for row in rows], kind)
    values: Values
    if draw(arrow):
        values = ArrowValues(pa.table({"v": column, "other": list(range(len(rows)))}))
    elif kind in (pa.int64(), pa.string()) or (kind != pa.timestamp("us") and draw(st.booleans())):
        own_at = rows[1][1] if len(rows) > 1 and draw(st.booleans()) else 3
        pane = orjson.dumps(
            change_envelope({"v": 1}, own_at, is_retraction=draw(st.sampled_from([False, False, True])))
        ).decode()
        odd = draw(st.sampled_from(['{"w":1}', "7", "null", '{"v":1}', '{"v":2}', '{"v":3.5}', pane, pane]))
        texts = [encode_value({"v": cell}) for cell in column.to_pylist()]
        values = JsonValues(
            pa.array([odd if number == 1 else text for number, text in enumerate(texts)], pa.string())
        )
    else:
        values = PythonValues([{"v": cell} for cell in range(len(rows))])
    ids = pa.array([str(row[1]).encode() for row in rows], pa.binary()) if draw(st.booleans()) else None
    return Deliveries(
        stream="in",
        keys=pa.array([row[0] for row in rows], pa.string()),
        at=np.array([row[1] for row in rows], np.int64),
        values=values,
        ids=ids,
    )


_Script = Sequence[tuple[list[Deliveries], int, bool, str]]
_FATES = ["committed", "committed", "committed", "lost", "failed"]


# Bundles: deliveries, the step of the watermark, whether the other worker runs it, and its first fate.
_scripts = st.lists(
    st.tuples(
        st.lists(_deliveries(at=st.integers(0, 25), arrow=st.booleans()), max_size=2),
        st.integers(0, 8),
        st.booleans(),
        st.sampled_from(_FATES),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def _scripts_in_columns(draw: st.DrawFn) -> _Script:
    """Draw bundles of columns, few of whose records are for windows that have ended."""
    script, watermark = [], 0
    for _ in range(draw(st.integers(1, 8))):
        step = draw(st.integers(0, 4))
        watermark += step
        delivery = _deliveries(
            kinds=[
                *["small ints"] * 6,
                *["prices"] * 4,
                *["floats"] * 3,
                "ints",
                "texts",
                "decimals",
                "lists",
            ],
            at=st.sampled_from([watermark + more for more in (1, 3, 4, 8, 0, -1, -20)]),
            arrow=st.booleans(),
        )
        deliveries = draw(st.lists(delivery, max_size=2))
        script.append((deliveries, step, draw(st.booleans()), draw(st.sampled_from(_FATES))))
    return script


def _node(strategy: WindowingStrategy, combine: CombineFn, finish: Finish | None) -> ComputationNode:
    return ComputationNode(
        name="c",
        computation=WindowedComputation(strategy, combine, "panes", finish=finish),
        subscriptions=(),
        produces=("panes",),
        retries=0,
    )


def _results(
    strategy: WindowingStrategy,
    combine: CombineFn,
    script: _Script,
    later: str = "0us",
    budget_bytes: int = BUDGET_BYTES,
    finish: Finish | None = None,
) -> list[BundleResult]:
    """Run bundles on two workers, of which one has code with another lateness."""
    run = IntervalRun(_node(strategy, combine, finish), Interval("c"), 2, budget_bytes, IpcRowFormat())
    other = _node(replace(strategy, allowed_lateness=later), combine, finish)
    run._workers[1].processor = IntervalProcessor(other, run.interval, run.soft_state(1))
    watermark, results = 0, []
    for deliveries, step, is_moved, fate in [*script, ([], TIME_MAX_US, False, "committed")]:
        watermark = min(watermark + step, TIME_MAX_US)
        if fate == "lost":
            run.attempt(run.bundle(deliveries, watermark, wall_time=7), int(is_moved))
        elif fate == "failed":
            run.soft_state(int(is_moved)).synchronise(run.files)
            run.process_only(run.bundle(deliveries, watermark, wall_time=7), int(is_moved))
        results.append(run.step(deliveries, watermark, wall_time=7, worker=int(is_moved)))
    return results


@contextmanager
def _noted(kind: type[WaitingWindows | WaitingColumns], name: str) -> Iterator[list[bool]]:
    """Note of each call whether it goes the way of the class."""
    taken: list[bool] = []
    method = getattr(kind, name)

    def noted(self: object, *arguments: Any) -> Any:
        result = method(self, *arguments)
        taken.append(result is not None)
        return result

    with patch.object(kind, name, noted):
        yield taken


_NO_COLUMNS = patch.object(WaitingColumns, "change", lambda *_: None)
_NO_TURNS = patch.object(WaitingWindows, "turn", lambda *_: None)


def _shares(name: str, taken: Sequence[bool]) -> str:
    return f"{name}: {'some' if True in taken else 'none'}, others: {'some' if False in taken else 'none'}"


@settings(max_examples=100, deadline=None)
@given(
    strategy=_strategies,
    combine=st.sampled_from(_COMBINERS),
    script=_scripts,
    later=st.sampled_from(["0us", "3us", "9us"]),
    finish=_finishes,
)
def test_short_turns_give_the_rows_of_the_hooks(
    strategy: WindowingStrategy, combine: CombineFn, script: _Script, later: str, finish: Finish | None
) -> None:
    """Late elements, panes of another step, odd values, redelivered ids and moved workers included."""
    with _NO_COLUMNS, _noted(WaitingWindows, "turn") as taken:
        short = _results(strategy, combine, script, later, finish=finish)
    event(_shares("short turns", taken))
    with _NO_COLUMNS, _NO_TURNS:
        _check_equal(short, _results(strategy, combine, script, later, finish=finish))


@settings(max_examples=150, deadline=None)
@given(
    strategy=_in_columns,
    combine=st.sampled_from(
        [
            Count(),
            Sum("v"),
            Count("v"),
            Mean("v"),
            Max("v"),
            Min("v"),
            StdDev("v"),
            Last("v"),
            CombineFields({"n": Count(), "total": Sum("v"), "mean": Mean("v")}),
            CombineFields({'"é"': Sum("v"), "window": Max("v")}),
        ]
    ),
    script=_scripts_in_columns(),
    later=st.sampled_from(["0us", "0us", "3us"]),
    budget_bytes=st.sampled_from([BUDGET_BYTES, BUDGET_BYTES, 3_000]),
    finish=_finishes,
)
def test_columns_give_the_rows_of_single_keys(
    strategy: WindowingStrategy,
    combine: CombineFn,
    script: _Script,
    later: str,
    budget_bytes: int,
    finish: Finish | None,
) -> None:
    """Bundles in columns and bundles of turns follow on each other, rows are evicted, and bundles are undone."""
    with _noted(WaitingColumns, "change") as taken:
        columns = _results(strategy, combine, script, later, budget_bytes, finish)
    event(_shares("bundles in columns", taken))
    with _NO_COLUMNS, _NO_TURNS:
        _check_equal(columns, _results(strategy, combine, script, later, budget_bytes, finish))


_QUARTER_DAY_US = 21_600_000_000


@settings(max_examples=60, deadline=None)
@given(
    strategy=st.builds(
        WindowingStrategy,
        window_fn=st.sampled_from(
            [
                CalendarWindows.days(),
                CalendarWindows.days(2, zone="America/New_York"),
                CalendarWindows.weeks(zone="Asia/Kolkata"),
            ]
        ),
        accumulation=st.sampled_from(["discarding", "accumulating"]),
        allowed_lateness=st.sampled_from([0, "18h"]),
    ),
    combine=st.sampled_from([Count(), Sum("v"), Mean("v"), Max("v")]),
    script=_scripts_in_columns(),
    finish=_finishes,
)
def test_calendar_windows_in_columns_give_the_rows_of_the_hooks(
    strategy: WindowingStrategy, combine: CombineFn, script: _Script, finish: Finish | None
) -> None:
    slow = [
        (
            [replace(delivery, at=delivery.at * _QUARTER_DAY_US) for delivery in deliveries],
            step * _QUARTER_DAY_US,
            is_moved,
            fate,
        )
        for deliveries, step, is_moved, fate in script
    ]
    with _noted(CalendarColumns, "change") as taken:
        columns = _results(strategy, combine, slow, finish=finish)
    event(_shares("bundles in columns", taken))
    with _NO_COLUMNS:
        _check_equal(columns, _results(strategy, combine, slow, finish=finish))


@cache
def _midnights_before_changes(zone: str) -> list[int]:
    """Return the midnights, in seconds, of some days on which the clocks of a zone change, and of a day without."""
    found = [1_780_000_000]
    for year in (1988, 2006, 2018):
        days = [datetime(year, 1, 1, tzinfo=ZoneInfo(zone)) + timedelta(number) for number in range(365)]
        found += [
            round(day.timestamp())
            for day, following in pairwise(days)
            if day.utcoffset() != following.utcoffset()
        ]
    return found


@st.composite
def _near_a_change_of_clocks(draw: st.DrawFn, zone: str) -> list[int]:
    midnight = draw(st.sampled_from(_midnights_before_changes(zone)))
    seconds = draw(st.lists(st.integers(-3_600, 7_200), min_size=1, max_size=20))
    return [(midnight + second) * 1_000_000 for second in seconds]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_calendar_columns_assign_the_windows_of_their_function(data: st.DataObject) -> None:
    """In St John's, clocks went back from 00:01 to 23:01 until 2011, so times after a midnight are of the day before."""
    zone = data.draw(st.sampled_from(["America/St_Johns", "America/Sao_Paulo", "UTC"]))
    unit, count = (
        data.draw(st.sampled_from(["days", "days", "weeks", "months"])),
        data.draw(st.integers(1, 2)),
    )
    window_fn = CalendarWindows(unit, count, zone)
    columns = CalendarColumns(WindowingStrategy(window_fn=window_fn), Count(), "panes", None)
    for _ in range(2):
        times = data.draw(_near_a_change_of_clocks(zone))
        found = columns._assigned(np.zeros(len(times), np.int64), np.array(times))
        event(f"found: {found is not None}")
        if found is not None:
            expected = [window_fn.assign(Element(None, at, "k"))[0] for at in times]
            assert list(zip(found[1], columns._ends(found[1]), strict=True)) == expected


def test_a_midnight_that_comes_twice_is_left_to_turns() -> None:
    window_fn = CalendarWindows.days(zone="America/St_Johns")
    columns = CalendarColumns(WindowingStrategy(window_fn=window_fn), Count(), "panes", None)
    # 7 November 2010, 00:00:30 and 23:30 of the day before, half an hour later.
    zone = ZoneInfo("America/St_Johns")
    first = round(datetime(2010, 11, 7, 0, 0, 30, tzinfo=zone).timestamp()) * 1_000_000
    again = round(datetime(2010, 11, 6, 23, 30, fold=1, tzinfo=zone).timestamp()) * 1_000_000
    assert first < again

    assert columns._assigned(np.zeros(2, np.int64), np.array([first, again])) is None
    assert columns._assigned(np.zeros(1, np.int64), np.array([first + 86_400_000_000 * 2])) is not None


def _check_equal(results: Sequence[BundleResult], others: Sequence[BundleResult]) -> None:
    for one, other in zip(results, others, strict=True):
        assert (one.updates is None) == (other.updates is None)
        if one.updates is not None:
            assert one.updates.to_pylist() == other.updates.to_pylist()
        assert one.statistics == other.statistics
        assert (one.pending, one.productions) == (other.pending, other.productions)
        assert [letter.error for letter in one.dead_letters] == [
            letter.error for letter in other.dead_letters
        ]


@pytest.mark.parametrize("finish", [None, _one_row])
def test_most_turns_are_short_and_most_bundles_in_columns(finish: Finish | None) -> None:
    """Otherwise the comparisons above would compare a way with itself."""
    table = pa.table({"v": range(100)})
    delivery = Deliveries(
        stream="in", keys=pa.array(["k"] * 100), at=np.arange(100), values=ArrowValues(table), ids=None
    )
    for combine, window_fn, way in (
        (Sum("v"), FixedWindows("10us"), _noted(WaitingColumns, "change")),
        (Sum("v"), Sessions("10us"), _noted(WaitingColumns, "change")),
        (
            CombineFields({"n": Count(), "total": Sum("v")}),
            FixedWindows("10us"),
            _noted(WaitingColumns, "change"),
        ),
        (ToList("v"), FixedWindows("10us"), _noted(WaitingWindows, "turn")),
    ):
        with way as taken:
            _results(
                WindowingStrategy(window_fn=window_fn),
                combine,
                [([delivery], 0, False, "committed")],
                finish=finish,
            )
        assert taken == [True, True]


@pytest.mark.parametrize("combine", [Sum("v"), ToList("v")])
def test_panes_of_another_step_are_elements(combine: CombineFn) -> None:
    """All but those of windows that ended long before their records."""
    texts = [orjson.dumps(change_envelope({"v": at}, at, is_retraction=False)).decode() for at in range(100)]
    delivery = Deliveries(
        stream="in",
        keys=pa.array(["k"] * 100),
        at=np.arange(100),
        values=JsonValues(pa.array(texts)),
        ids=None,
    )
    script = [([delivery], 0, False, "committed")]
    strategy = WindowingStrategy(window_fn=FixedWindows("10us"))

    def way() -> AbstractContextManager[list[bool]]:
        return _noted(WaitingColumns, "change") if combine == Sum("v") else _noted(WaitingWindows, "turn")

    with way() as taken:
        quick = _results(strategy, combine, script)
    with _NO_COLUMNS, _NO_TURNS:
        _check_equal(quick, _results(strategy, combine, script))

    assert taken == [True, True]
    late = replace(delivery, at=np.full(100, 99))
    with way() as taken:
        _results(strategy, combine, [([late], 0, False, "committed")])
    assert taken[0] is False


@pytest.mark.parametrize("combine", [Sum("v"), CombineFields({"n": Count(), "total": Sum("v")})])
def test_sums_that_two_floats_do_not_hold_stay_in_columns(combine: CombineFn) -> None:
    """The bundle in which the first appears takes turns; after it the sums are objects, those that are open too."""

    def bundle(cells: Sequence[float], at: int) -> tuple[list[Deliveries], int, bool, str]:
        values = ArrowValues(pa.table({"v": cells}))
        keys = pa.array(["a", "b", "c"])
        delivery = Deliveries(stream="in", keys=keys, at=np.array([at] * 3), values=values, ids=None)
        return [delivery], 0, False, "committed"

    strategy = WindowingStrategy(window_fn=FixedWindows("10us"))
    script = [
        bundle([1.25, 1e-9, 0.5], 3),
        bundle([1e200, 1e200, 0.5], 4),
        bundle([1e-200, 2.0, 0.5], 5),
        bundle([-1e200, 1e-200, 0.5], 6),
    ]
    with _noted(WaitingColumns, "change") as taken:
        columns = _results(strategy, combine, script)
    with _NO_COLUMNS:
        _check_equal(columns, _results(strategy, combine, script))

    assert taken == [True, True, False, True, True]


def test_rows_that_columns_would_write_in_another_way_stay_rows() -> None:
    """Code with another lateness has set other timers; a row of it, or of other windows, is for turns of its own."""
    strategy = WindowingStrategy(window_fn=FixedWindows("10us"))
    columns = WaitingColumns(strategy, Count(), "panes", None)
    other = WaitingColumns(replace(strategy, allowed_lateness="5us"), Count(), "panes", None)
    shifted = WaitingColumns(
        replace(strategy, window_fn=FixedWindows("10us", offset="3us")), Count(), "panes", None
    )
    larger = WaitingColumns(replace(strategy, window_fn=FixedWindows("20us")), Count(), "panes", None)
    values = ArrowValues(pa.table({"v": [1, 2]}))
    keys, added = ["a", "b"], columns.added(values, np.array([3, 12]))
    records = KeyedRecords(
        keys, pa.array(keys), np.array([0, 1, 2]), np.array([3, 12]), np.array([0, 1]), added, ()
    )
    change = columns.change(records, Clocks(watermark=EventTimeMicros(0), wall_time=WallTimeMicros(0)))
    assert change is not None
    columns.apply(change)
    rows = columns.take(["a", "b"])
    timers = list(rows.timers.values())

    assert other.take_up(["a", "b"], rows.states, timers) == []
    assert shifted.take_up(["a", "b"], rows.states, timers) == []
    assert larger.take_up(["a", "b"], rows.states, timers) == []
    assert columns.take_up(["a", "b"], ['{"windows":[]}', rows.states[1]], timers) == ["b"]
    assert columns.keys == ["b"]


@pytest.mark.parametrize("budget_bytes", [4_000, 20_000, 60_000])
def test_windows_that_leave_the_columns_for_want_of_memory_are_found_again(budget_bytes: int) -> None:
    """They leave in parts, each of which is evicted before the next one leaves."""
    keys = pa.array([f"key {number:03}" for number in range(400)])
    delivery = Deliveries(
        stream="in",
        keys=keys,
        at=np.arange(400) % 10,
        values=ArrowValues(pa.table({"v": range(400)})),
        ids=None,
    )
    strategy = WindowingStrategy(window_fn=FixedWindows("10us"))
    node = _node(strategy, Count(), None)
    run = IntervalRun(node, Interval("c"), 1, budget_bytes, IpcRowFormat())
    for _ in range(3):
        run.step([delivery])
    is_evicted = run.soft_state().columns is None
    panes = run.step([], TIME_MAX_US).updates

    assert is_evicted is (budget_bytes < 60_000)
    assert panes is not None
    texts = [made["value"] for row in panes.column("productions").to_pylist() for made in row]
    assert [orjson.loads(text)["value"] for text in texts] == [3] * 400
