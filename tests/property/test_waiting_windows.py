"""Turns of windows that only wait for their end: the short way gives the rows, to the byte, that the hooks give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa
from hypothesis import event, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.values import ArrowValues, JsonValues, PythonValues, Values
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.processor import IntervalProcessor
from millpond.executor.interval.row_update import BundleResult
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.windows.combiners import (
    ArgMax,
    CombineFields,
    CombineFn,
    Count,
    CountDistinct,
    Last,
    Max,
    Mean,
    Quantiles,
    StdDev,
    Sum,
    ToList,
    ToSet,
)
from millpond.executor.windows.strategy import WindowingStrategy
from millpond.executor.windows.time_triggers import AfterWatermark, Default
from millpond.executor.windows.waiting_windows import WaitingWindows
from millpond.executor.windows.window_fns import FixedWindows, SlidingWindows, UnalignedFixedWindows
from millpond.executor.windows.windowed_computation import WindowedComputation
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.statestore.types import TIME_MAX_US
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
    "floats": (pa.float64(), st.floats()),
    "decimals": (pa.decimal128(20, 2), st.integers(-999, 999).map(lambda cents: Decimal(cents) / 100)),
    "texts": (pa.string(), st.sampled_from(["", "x", "\U0001f986"])),
    "times": (pa.timestamp("us"), st.integers(-(2**62), 2**62) | st.integers(0, 9)),
    "lists": (pa.list_(pa.int64()), st.lists(st.integers(0, 3), max_size=2)),
}

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
def _deliveries(draw: st.DrawFn) -> Deliveries:
    kind, cells = _COLUMNS[draw(st.sampled_from(sorted(_COLUMNS)))]
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(_KEYS),
                st.integers(0, 25),
                st.none() | cells if draw(st.booleans()) else cells,
            ),
            max_size=6,
        )
    )
    column = pa.array([row[2] for row in rows], kind)
    values: Values
    if draw(st.booleans()):
        values = ArrowValues(pa.table({"v": column, "other": list(range(len(rows)))}))
    elif kind in (pa.int64(), pa.string()):
        odd = draw(st.sampled_from(['{"w":1}', "7", "null", '{"v":1}']))
        texts = [orjson.dumps({"v": cell}).decode() for cell in column.to_pylist()]
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


_scripts = st.lists(
    st.tuples(st.lists(_deliveries(), max_size=2), st.integers(0, 8), st.booleans()), min_size=1, max_size=6
)


def _node(strategy: WindowingStrategy, combine: CombineFn) -> ComputationNode:
    return ComputationNode(
        name="c",
        computation=WindowedComputation(strategy, combine, "panes"),
        subscriptions=(),
        produces=("panes",),
        retries=0,
    )


def _results(
    strategy: WindowingStrategy,
    combine: CombineFn,
    script: Sequence[tuple[list[Deliveries], int, bool]],
    later: str = "0us",
) -> list[BundleResult]:
    """Run bundles on two workers, of which one has code with another lateness."""
    run = IntervalRun(_node(strategy, combine), Interval("c"), workers=2, row_format=IpcRowFormat())
    other = _node(replace(strategy, allowed_lateness=later), combine)
    run._workers[1].processor = IntervalProcessor(other, run.interval, run.soft_state(1))
    watermark, results = 0, []
    for deliveries, step, is_moved in [*script, ([], TIME_MAX_US, False)]:
        watermark = min(watermark + step, TIME_MAX_US)
        results.append(run.step(deliveries, watermark, wall_time=7, worker=int(is_moved)))
    return results


@contextmanager
def _turns() -> Iterator[list[bool]]:
    """Note of each turn whether it takes the short way."""
    taken: list[bool] = []
    turn = WaitingWindows.turn

    def noted(self: WaitingWindows, *arguments: Any) -> Any:
        result = turn(self, *arguments)
        taken.append(result is not None)
        return result

    with patch.object(WaitingWindows, "turn", noted):
        yield taken


@settings(max_examples=100, deadline=None)
@given(
    strategy=_strategies,
    combine=st.sampled_from(_COMBINERS),
    script=_scripts,
    later=st.sampled_from(["0us", "3us", "9us"]),
)
def test_short_turns_give_the_rows_of_the_hooks(
    strategy: WindowingStrategy,
    combine: CombineFn,
    script: list[tuple[list[Deliveries], int, bool]],
    later: str,
) -> None:
    """Late elements, retracting panes, odd values, redelivered ids and moved workers included."""
    with _turns() as taken:
        short = _results(strategy, combine, script, later)
    with patch.object(WaitingWindows, "turn", lambda *_: None):
        long = _results(strategy, combine, script, later)

    event(
        f"short turns: {'some' if True in taken else 'none'}, long turns: {'some' if False in taken else 'none'}"
    )
    for one, other in zip(short, long, strict=True):
        assert (one.updates is None) == (other.updates is None)
        if one.updates is not None:
            assert one.updates.to_pylist() == other.updates.to_pylist()
        assert one.statistics == other.statistics
        assert (one.pending, one.productions) == (other.pending, other.productions)
        assert [letter.error for letter in one.dead_letters] == [
            letter.error for letter in other.dead_letters
        ]


def test_most_turns_are_short() -> None:
    """Otherwise the comparison above would compare the hooks with themselves."""
    table = pa.table({"v": range(100)})
    delivery = Deliveries(
        stream="in", keys=pa.array(["k"] * 100), at=np.arange(100), values=ArrowValues(table), ids=None
    )
    with _turns() as taken:
        _results(WindowingStrategy(window_fn=FixedWindows("10us")), Sum("v"), [([delivery], 0, False)])
    assert taken == [True, True]
