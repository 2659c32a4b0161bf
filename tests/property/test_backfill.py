"""Backfills with any records and any cut: a computation that joins ends like one present from the start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.computations import SECOND_US, Count, Window

pytestmark = pytest.mark.slow

START_US = 1_700_000_000 * SECOND_US
# Leave out computations whose records move timers: the watermark decides which records a timer precedes.
JOINING = {"count": Count, "window": Window}


class Kept(mp.Computation):
    """Keeps all its inputs as a bag."""

    def process_record(self, context, record):
        value = record.value
        shown = [value["window"], value["value"]] if "pane" in value else [record.at, value]
        context.state.set(sorted([*context.state.get([]), json.dumps(shown, sort_keys=True)]))


def pipeline(*, joins: bool, ids: bool, backfill: Any = None) -> mp.Pipeline:
    """Return a computation from the start, and with ``joins`` others and collectors of their productions."""
    made = mp.Pipeline("p")
    stream = made.inject("in", key="k", at="at", id="id" if ids else None, watermark=mp.BoundedDisorder("5s"))
    stream.apply(Count(("old",)), name="old")
    for name, kind in JOINING.items() if joins else ():
        stream.apply(kind((name,)), name=name, backfill=backfill).apply(Kept(), name=f"kept_{name}")
    if joins:
        windows = stream.window(mp.FixedWindows("10s")).combine(mp.Sum("n"), name="sums", backfill=backfill)
        windows.apply(Kept(), name="kept_sums")
    return made


def ends(runs: list[tuple[mp.Pipeline, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Return the rows of the joining computations after these runs of one store."""
    with (
        mp.Store.in_memory(clock=ManualClock(), rng=SeededRng(1)) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Give the history in several pieces, so that its watermark has to move.
        patch.setattr("millpond.executor.local.worker.BUNDLE_RECORDS_MAX", 4)
        for number, (made, rows) in enumerate(runs, 1):
            runner = mp.LocalRunner(store, progress=False, upkeep=None, rng=SeededRng(number))
            runner.run(made, {"in": rows}, finish=number == len(runs))
        return {
            name: [
                (row["key"], row["state"], row["state_bytes"], row["timers"])
                for row in store.rows_view(name).to_arrow().to_pylist()
            ]
            for joined in (*JOINING, "sums")
            for name in (joined, f"kept_{joined}")
        }


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    """Return records with unique times, at most five seconds out of order, and how many precede the cut."""
    times = sorted(draw(st.lists(st.integers(0, 120_000), min_size=1, max_size=40, unique=True)))
    rows = [
        {
            "k": draw(st.sampled_from("abc")),
            "at": START_US + at * 1_000,
            "id": str(at),
            "n": draw(st.integers(0, 9)),
        }
        for at in times
    ]
    shaken = sorted(rows, key=lambda row: row["at"] + draw(st.integers(0, 4)) * SECOND_US)
    return shaken, draw(st.integers(0, len(rows)))


@given(inputs(), st.sampled_from(["input", "rows", "ids"]), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_joining_computation_ends_like_one_from_the_start(
    case: tuple[list[dict[str, Any]], int], how: str, random: Any
) -> None:
    """The history's rows are in any order, and duplicates have ids."""
    rows, cut = case
    ids = how == "ids"
    whole = pipeline(joins=True, ids=ids)
    history: Any = "input"
    if how != "input":
        history = rows[: cut + (5 if ids else 0)]
        random.shuffle(history)

    joined = ends(
        [
            (pipeline(joins=False, ids=ids), rows[:cut]),
            (pipeline(joins=True, ids=ids, backfill=history), rows),
        ]
    )

    started = ends([(whole, rows[:cut]), (whole, rows)])
    # History is sorted by time and live records are sorted by bundle, so a different record may be the
    # third, which produces.
    for kept in (joined, started):
        del kept["kept_count"]
    assert joined == started
