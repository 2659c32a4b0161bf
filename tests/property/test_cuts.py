"""Independence of panes from the cut of the input, for triggers asked after each element.

``MILLPOND_ORACLE_EXAMPLES=20000`` sets the number of generated scripts of each test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.oracle_examples import EXAMPLES, examples, in_shares
from tests.oracles.trigger import percentiles_of
from tests.oracles.window import OraclePane, WindowSpec
from tests.oracles.window_runs import LocalWindowRun, SparkWindowRun, arrived
from tests.oracles.window_scripts import (
    Move,
    cut,
    row_formats,
    scripts,
    together,
    window_specs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from millpond.statestore.rows.row_format import RowFormat

_SPARK_STEPS = 8
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

# Thousands of examples need no deadline.
pytestmark = [pytest.mark.timeout(0)] if EXAMPLES else []

_BY_ELEMENT = window_specs().map(lambda spec: replace(spec, asked="element"))
_SCRIPTS = scripts(with_restarts=False)

Panes = list[list[list[OraclePane]]]
"""The panes of each step, between one move of time and the next."""


def played(
    run: LocalWindowRun | SparkWindowRun, specs: Sequence[WindowSpec], moves: Sequence[Move]
) -> tuple[Panes, list[int]]:
    """Return the panes of a run between moves of time, and the number of late elements."""
    shown: Panes = []
    kept = set[int]().union(*(percentiles_of(spec.trigger) for spec in specs))
    for move in [*moves, Move("watermark", None)]:
        if move.kind == "feed":
            run.inject(arrived(move.argument))
        elif move.kind == "watermark":
            run.advance_watermark(move.argument)
        elif move.kind == "wall":
            run.advance_clock(move.argument)
        elif move.kind == "signal":
            run.give_signal(move.argument)
        elif move.argument[0] in kept:
            run.advance_watermarks(dict([move.argument]))
        since = run.shown()
        if shown and move.kind == "feed":
            shown[-1] = [sorted(before + more) for before, more in zip(shown[-1], since, strict=True)]
        else:
            shown.append(since)
    drops = run.drops()
    run.close()
    return shown, drops


@in_shares
@given(
    specs=st.lists(_BY_ELEMENT, min_size=1, max_size=3),
    moves=_SCRIPTS,
    row_format=row_formats(),
    data=st.data(),
)
@settings(
    deadline=None,
    derandomize=settings().derandomize and not EXAMPLES,
    suppress_health_check=_SLOW,
    max_examples=examples(max(settings().max_examples // 2, 1)),
)
def test_panes_do_not_depend_on_how_the_input_is_cut(
    specs: list[WindowSpec], moves: list[Move], row_format: RowFormat, data: st.DataObject
) -> None:
    """Elements come singly, in random pieces, or all at once between two moves of time."""
    expected = played(LocalWindowRun(specs, row_format=row_format), specs, together(moves))
    pieces = cut(data.draw, together(moves))

    assert played(LocalWindowRun(specs, row_format=row_format), specs, pieces) == expected


@pytest.mark.slow
@pytest.mark.spark
@given(
    specs=st.lists(_BY_ELEMENT, min_size=_SPARK_STEPS, max_size=_SPARK_STEPS), moves=_SCRIPTS, data=st.data()
)
@settings(
    deadline=None,
    max_examples=20 if EXAMPLES else 1,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=_SLOW,
)
def test_spark_equals_the_local_runner_for_another_cut(
    specs: list[WindowSpec], moves: list[Move], data: st.DataObject, spark: SparkSession
) -> None:
    expected = played(LocalWindowRun(specs), specs, together(moves))

    assert played(SparkWindowRun(specs, spark), specs, cut(data.draw, together(moves))) == expected
