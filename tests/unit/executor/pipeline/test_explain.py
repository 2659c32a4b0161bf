"""`Pipeline.explain` tells the way that each step takes, and why it takes no faster one."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.executor.computation.records import RecordColumns
from millpond.executor.computation.values import PythonValues
from millpond.executor.time.clocks import Clocks
from millpond.executor.windows.windowed_computation import WindowedComputation

MINUTE = mp.FixedWindows("1m")
ROW = pa.schema([("k", pa.string()), ("n", pa.int64())])


class Tables(mp.Computation):
    def process_table(self, context, table, groups):
        """Do nothing."""


def test_steps_and_their_reasons():
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("rows", key="k", at="t")
    clean = rows.map(lambda row: row, name="clean", schema=ROW)
    clean.window(MINUTE).combine(mp.Sum("n"), name="sums", key="k")
    top = rows.window(MINUTE).combine(mp.TopN(3, of="n"), name="top")
    top.map(lambda pane: pane, name="same").window(mp.FixedWindows("1h")).combine(mp.Count(), name="counts")
    rows.map(lambda row: row, name="plain").window(MINUTE).combine(mp.Count(), name="plain_counts", key="k")
    rows.window(mp.Sessions("1m")).combine(mp.Count(), name="sessions")
    top.window(mp.Sessions("1m")).combine(mp.Count(), name="visits")
    rows.window(mp.Sessions("1m")).combine(mp.Max("n"), name="longest")
    rows.window(MINUTE).combine(mp.Count(), name="limited", user_code_timeout="1s")
    pipeline.add(Tables(), name="tables", subscribes={"rows": "k"})

    assert pipeline.explain().splitlines() == [
        "step           runs by       because                                values",
        "─" * 102,
        "clean          hooks         code of your own, once a record        rows: columns of tables and frames",
        "sums           columns                                              clean: columns",
        "top            short turns   TopN of these arguments is no column   rows: columns of tables and frames",
        "same           hooks         code of your own, once a record        top: panes",
        "counts         columns                                              same: panes",
        "plain          hooks         code of your own, once a record        rows: columns of tables and frames",
        "plain_counts   columns                                              plain: text",
        "sessions       columns                                              rows: columns of tables and frames",
        "visits         columns                                              top: panes",
        "longest        hooks         Max of sessions depends on order       rows: columns of tables and frames",
        "limited        hooks         user_code_timeout limits the code      rows: columns of tables and frames",
        "tables         table         code of your own, once a bundle        rows: columns of tables and frames",
    ]


STRATEGIES: list[dict[str, Any]] = [
    {},
    {"window_fn": mp.SlidingWindows("1m", "30s")},
    {"window_fn": mp.windows.UnalignedFixedWindows("1m")},
    {"window_fn": mp.Sessions("1m")},
    {"window_fn": mp.GlobalWindows()},
    {"trigger": mp.Repeatedly(mp.AfterCount(1))},
    {"accumulation": "accumulating"},
    {"accumulation": "retracting"},
    {"closing": "always"},
    {"of": "n"},
    {"timestamp_combiner": "OUTPUT_AT_EARLIEST"},
]
COMBINERS = [mp.Count(), mp.Sum("n"), mp.windows.Last("n"), mp.TopN(2, of="n"), mp.Sum(lambda row: row["n"])]


@pytest.mark.parametrize(("settings", "combiner"), [*itertools.product(STRATEGIES, COMBINERS)])
def test_the_way_is_the_one_that_the_engine_takes(settings, combiner):
    pipeline = mp.Pipeline("p")
    chosen = {"window_fn": MINUTE} | settings
    rows = pipeline.inject("rows", key="k", at="t")
    rows.window(chosen.pop("window_fn"), **chosen).combine(combiner, name="step")
    code = pipeline.check().computations["step"].computation
    assert isinstance(code, WindowedComputation)
    records = RecordColumns(at=[], streams=[], sources=[], values=PythonValues([]), ids=None, watermark=0)
    turns = code.quick_turns(Clocks(watermark=0, wall_time=0), records)
    columns = code.column_rows({"step": "step"})

    taken = "columns" if columns is not None else "hooks" if turns is None else "short turns"
    assert code.way().name == taken
    assert bool(code.way().because) == (taken != "columns")
