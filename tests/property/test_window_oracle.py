"""Windows against an oracle without an engine: the same panes everywhere (I6 to I8; R20 to R22).

``MILLPOND_ORACLE_EXAMPLES=20000`` sets the number of examples of each test; a plain run of the tests has few.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.types import TIME_MAX_US
from tests.oracle_examples import EXAMPLES, examples, in_shares
from tests.oracles.trigger import TriggerSpec, percentiles_of, waits_in_event_time
from tests.oracles.window import Arrival, OraclePane, WindowOracle, WindowSpec
from tests.oracles.window_runs import LocalWindowRun, SparkWindowRun, arrived, phases_of
from tests.oracles.window_scripts import (
    Move,
    Scene,
    cut,
    endless_triggers,
    row_formats,
    scenes,
    scripts,
    together,
    window_fns,
    window_specs,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOREVER_US = 1_000_000_000
_SPARK_STEPS = 12
_SPARK_EXAMPLES = int(os.environ.get("MILLPOND_ORACLE_SPARK_EXAMPLES", "2"))
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

# Thousands of examples need no deadline.
pytestmark = [pytest.mark.slow, *([pytest.mark.timeout(0)] if EXAMPLES else [])]

generated = settings(
    deadline=None,
    derandomize=settings().derandomize and not EXAMPLES,
    suppress_health_check=_SLOW,
    max_examples=examples(settings().max_examples),
)

# Two steps per example on average make 200, the goal table's number.
many = settings(generated, max_examples=examples(100))

Shown = tuple[list[list[OraclePane]], int]
"""The panes after each move and at the end, and the numbers of elements that were too late."""


def kept_by(specs: Iterable[WindowSpec]) -> set[int]:
    """Return the percentiles that a pipeline of these steps maintains."""
    return set[int]().union(*(percentiles_of(spec.trigger) for spec in specs))


def by_oracle(
    spec: WindowSpec, moves: Sequence[Move], kept: Iterable[int] | None = None, *, by_ingress: bool = False
) -> Shown:
    """Return the oracle's output."""
    phases = phases_of(spec, {arrival.key for arrival in fed(moves)})
    oracle, shown = WindowOracle(spec, kept=kept, phases=phases, by_ingress=by_ingress), []
    for move in [*moves, Move("watermark", TIME_MAX_US)]:
        seen = len(oracle.panes)
        if move.kind == "feed":
            oracle.feed(move.argument)
        elif move.kind == "watermark":
            oracle.move_watermark(move.argument)
        elif move.kind == "mark":
            percentile, at = move.argument
            oracle.move_watermark(at, percentile)
        elif move.kind == "wall":
            oracle.move_wall(move.argument)
        elif move.kind == "signal":
            oracle.signal(move.argument)
        shown.append(sorted(oracle.panes[seen:]))
    return shown, oracle.dropped


def by_run(
    run: LocalWindowRun | SparkWindowRun, specs: Sequence[WindowSpec], moves: Sequence[Move]
) -> list[Shown]:
    """Return a runner's output, step by step."""
    shown: list[list[list[OraclePane]]] = [[] for _ in specs]
    kept = kept_by(specs)
    for move in [*moves, Move("watermark", None)]:
        if move.kind == "feed":
            run.inject(arrived(move.argument))
        elif move.kind == "watermark":
            run.advance_watermark(move.argument)
        elif move.kind == "mark":
            percentile, at = move.argument
            if percentile in kept:
                run.advance_watermarks({percentile: at})
        elif move.kind == "wall":
            run.advance_clock(move.argument)
        elif move.kind == "signal":
            run.give_signal(move.argument)
        else:
            run.restart()
        for step, panes in zip(shown, run.shown(), strict=True):
            step.append(panes)
    drops = run.drops()
    run.close()
    return list(zip(shown, drops, strict=True))


Standing = Counter[tuple[str, tuple[int, int], tuple[int, ...]]]
"""Keys, windows and values: emitted panes less retracted ones."""


def net(panes: Iterable[OraclePane]) -> Standing:
    """Return the panes that remain after all retractions; only an emitted pane may be retracted."""
    standing: Standing = Counter()
    for pane in panes:
        standing[(pane.key, pane.window, pane.values)] += -1 if pane.is_retraction else 1
    assert min(standing.values(), default=0) >= 0
    return +standing


def last(panes: Iterable[OraclePane]) -> Standing:
    """Return the last pane of each window."""
    newest: dict[tuple[str, tuple[int, int]], OraclePane] = {}
    for pane in panes:
        identity = (pane.key, pane.window)
        if not pane.is_retraction and (identity not in newest or newest[identity].index < pane.index):
            newest[identity] = pane
    return Counter((pane.key, pane.window, pane.values) for pane in newest.values())


def grouped(window_fn: tuple[Any, ...], arrivals: Sequence[Arrival]) -> Standing:
    """Group all elements into their final windows, as a batch would."""
    spec = WindowSpec(window_fn=window_fn, trigger=("Default",))
    shown, _ = by_oracle(spec, [Move("feed", arrivals)])
    return last(shown[-1])


def played(spec: WindowSpec, moves: Sequence[Move], row_format: RowFormat) -> list[OraclePane]:
    """Return all panes of the local runner."""
    [(shown, dropped)] = by_run(LocalWindowRun([spec], row_format=row_format), [spec], moves)
    assert dropped == 0
    return [pane for panes in shown for pane in panes]


def fed(moves: Sequence[Move]) -> list[Arrival]:
    """Return all elements of a script."""
    return [arrival for move in moves if move.kind == "feed" for arrival in move.argument]


@st.composite
def cases(draw: st.DrawFn, *, steps: int, moves_max: int) -> tuple[Scene, list[WindowSpec], list[Move]]:
    """A scene, steps, and a script whose input is cut into random pieces."""
    scene = draw(scenes())
    specs = draw(st.lists(window_specs(scene), min_size=1 if steps < _SPARK_STEPS else steps, max_size=steps))
    return scene, specs, cut(draw, draw(scripts(scene=scene, moves_max=moves_max)))


def between_times(shown: Shown, moves: Sequence[Move]) -> Shown:
    """Return the panes of consecutive pieces of input together, sorted."""
    merged: list[list[OraclePane]] = []
    before = ""
    for move, panes in zip([*moves, Move("end")], shown[0], strict=True):
        if before == move.kind == "feed":
            merged[-1] = sorted(merged[-1] + panes)
        else:
            merged.append(panes)
        before = move.kind
    return merged, shown[1]


def told(spec: WindowSpec, moves: Sequence[Move], kept: Iterable[int], *, by_ingress: bool) -> Shown:
    """Return the oracle's panes of cut input; it sees the whole if triggers are asked after each element.

    Arrival itself moves time. Elements moved to another time see that, as do triggers that wait from the
    first element on, so their pieces differ from the whole.
    """
    sees_arrival = by_ingress and (bool(spec.shift) or waits_in_event_time(spec.trigger))
    is_whole = spec.asked == "element" and not sees_arrival
    pieces = together(moves) if is_whole else moves
    return between_times(by_oracle(spec, pieces, kept, by_ingress=by_ingress), pieces)


@in_shares
@given(case=cases(steps=3, moves_max=12), row_format=row_formats())
@many
def test_local_runner_equals_the_oracle_however_input_is_cut(
    case: tuple[Scene, list[WindowSpec], list[Move]], row_format: RowFormat
) -> None:
    """Windows are by calendar, unaligned, shifted, or by arrival."""
    scene, specs, moves = case
    kept = kept_by(specs)
    expected = [told(spec, moves, kept, by_ingress=scene.by_ingress) for spec in specs]
    run = LocalWindowRun(specs, by_ingress=scene.by_ingress, row_format=row_format)
    shown = by_run(run, specs, moves)

    assert [between_times(one, moves) for one in shown] == expected


@in_shares
@given(specs=st.lists(window_specs(), min_size=1, max_size=3), moves=scripts(), row_format=row_formats())
@many
def test_local_runner_equals_the_oracle(
    specs: list[WindowSpec], moves: list[Move], row_format: RowFormat
) -> None:
    """Values, indices, timings, times and drops are compared after every move."""
    kept = kept_by(specs)
    expected = [by_oracle(spec, moves, kept) for spec in specs]

    assert by_run(LocalWindowRun(specs, row_format=row_format), specs, moves) == expected


@in_shares
@given(
    window_fn=window_fns(),
    trigger=endless_triggers(),
    moves=scripts(),
    row_format=row_formats(),
    data=st.data(),
)
@generated
def test_final_values_do_not_depend_on_the_order_of_arrival(
    window_fn: tuple[Any, ...],
    trigger: TriggerSpec,
    moves: list[Move],
    row_format: RowFormat,
    data: st.DataObject,
) -> None:
    """Standing panes equal a batch's."""
    spec = WindowSpec(window_fn=window_fn, trigger=trigger, mode="retracting", lateness=_FOREVER_US)
    shuffled = shuffle(moves, data)
    expected = grouped(window_fn, fed(moves))

    assert net(played(spec, moves, row_format)) == expected
    assert net(played(spec, shuffled, row_format)) == expected


@in_shares
@given(window_fn=window_fns(), trigger=endless_triggers(), moves=scripts(), row_format=row_formats())
@generated
def test_panes_less_retractions_equal_the_last_panes(
    window_fn: tuple[Any, ...], trigger: TriggerSpec, moves: list[Move], row_format: RowFormat
) -> None:
    """Merged windows add up to nothing."""
    panes = played(
        WindowSpec(window_fn=window_fn, trigger=trigger, mode="retracting", lateness=_FOREVER_US),
        moves,
        row_format,
    )
    standing, newest = net(panes), last(panes)

    assert not standing - newest
    assert standing == newest if window_fn[0] != "Sessions" else len(standing) <= len(newest)


@in_shares
@given(
    window_fn=window_fns(with_sessions=False),
    trigger=endless_triggers(),
    moves=scripts(),
    row_format=row_formats(),
)
@generated
def test_discarding_panes_add_up_to_the_accumulated_pane(
    window_fn: tuple[Any, ...], trigger: TriggerSpec, moves: list[Move], row_format: RowFormat
) -> None:
    modes = [
        WindowSpec(window_fn=window_fn, trigger=trigger, mode=mode, lateness=_FOREVER_US)
        for mode in ("discarding", "accumulating")
    ]
    (parts, _), (wholes, _) = by_run(LocalWindowRun(modes, row_format=row_format), modes, moves)
    summed: defaultdict[tuple[str, tuple[int, int]], list[int]] = defaultdict(list)
    for pane in (pane for panes in parts for pane in panes):
        summed[(pane.key, pane.window)] += pane.values

    accumulated = last(pane for panes in wholes for pane in panes)
    assert accumulated == Counter((*identity, tuple(sorted(values))) for identity, values in summed.items())


@pytest.mark.spark
@given(case=cases(steps=_SPARK_STEPS, moves_max=6))
@settings(
    deadline=None,
    max_examples=_SPARK_EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=_SLOW,
)
def test_spark_equals_the_oracle(
    case: tuple[Scene, list[WindowSpec], list[Move]], spark: SparkSession
) -> None:
    """One run on Spark has many generated steps."""
    scene, specs, moves = case
    kept = kept_by(specs)
    expected = [told(spec, moves, kept, by_ingress=scene.by_ingress) for spec in specs]
    shown = by_run(SparkWindowRun(specs, spark, by_ingress=scene.by_ingress), specs, moves)

    assert [between_times(one, moves) for one in shown] == expected


def shuffle(moves: Sequence[Move], data: st.DataObject) -> list[Move]:
    """Return the same elements and advances of time, in another order and other bundles."""
    elements = data.draw(st.permutations(fed(moves)))
    shuffled: list[Move] = []
    for move in [*moves, Move("feed", ())]:
        if move.kind != "feed":
            shuffled.append(move)
        elif elements:
            count = data.draw(st.integers(1, len(elements)))
            shuffled.append(Move("feed", tuple(elements[:count])))
            elements = elements[count:]
    return [*shuffled, Move("feed", tuple(elements))] if elements else shuffled
