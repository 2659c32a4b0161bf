"""Table changes as input, in each form and any cut."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.local.runner import LocalRunner
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.changes import Step, changes_in, scores_of_teams, standing_sums

SIZE_US = 10


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    """Rows that are inserted, updated (team and time too) and deleted."""
    table: dict[str, dict[str, Any]] = {}
    steps: list[Step] = []
    for number in range(draw(st.integers(1, 25))):
        name = draw(st.sampled_from([*table, f"row{number}"]))
        before = table.pop(name, None)
        after = None
        if before is None or draw(st.booleans()):
            after = table[name] = {
                "id": name,
                "team": draw(st.sampled_from(["red", "blue", "green"])),
                "score": draw(st.integers(-50, 50)),
                "at": draw(st.integers(0, 40)),
            }
        steps.append((before, after))
    return steps


@given(
    steps=histories(),
    form=st.sampled_from(["debezium", "delta", "words"]),
    windowed=st.booleans(),
    as_table=st.booleans(),
    data=st.data(),
)
def test_windows_hold_the_sums_of_the_table(steps, form, windowed, as_table, data) -> None:
    """Updates may move a row to another key or window."""
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    pipeline = scores_of_teams(form, window_fn=FixedWindows(f"{SIZE_US}us") if windowed else None)
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    rows = changes_in(form, steps)
    while rows:
        count = data.draw(st.integers(1, len(rows)))
        piece, rows = rows[:count], rows[count:]
        run.inject("scores", pa.Table.from_pylist(piece) if as_table else piece)
        run.run_until_quiet()
    run.stop()

    shown = {
        row["key"]: orjson.loads(row["state"]) for row in store.rows_view("standing").to_arrow().to_pylist()
    }
    sums = {team: sorted(of_team.values()) for team, of_team in shown.items()}
    expected = standing_sums(steps, SIZE_US if windowed else None)
    assert not len(store.rows_view("dead_letters").to_arrow())
    assert sums == {team: sorted(of_team.values()) for team, of_team in expected.items()}
