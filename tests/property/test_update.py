"""Updates of a running pipeline, compared with stopping and starting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.report import Totals
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.verification import verify_store
from tests.fixtures.case_player import CasePlayer
from tests.fixtures.pipelines import Case, Node, cases, graphs

Graph = tuple[tuple[Node, ...], bool]
_NAMES = tuple(f"c{number}" for number in range(4))


class Player(CasePlayer):
    """Plays a case twice, and changes its computations after given steps.

    With ``has_updates`` the run is updated; otherwise it is stopped and started.
    """

    def __init__(self, case: Case, *, has_updates: bool) -> None:
        self.has_updates = has_updates
        compaction = CompactionPolicy(fan_in=3, files_max=5)
        super().__init__(case, UpkeepPolicy(compaction=compaction, retention="0s", collect_every=6))
        self.watermarks: list[dict[str, int]] = []
        self.refused: list[int] = []

    def pipeline(self) -> EnginePipeline:
        names = _NAMES[len(self.case.nodes) :]
        return self.case.pipeline(retire=names)

    def play(self, changes: Mapping[int, Graph]) -> None:
        for number, step in enumerate((*self.case.steps, *self.case.steps)):
            self.take(step)
            if number in changes:
                nodes, back_edge = changes[number]
                self.change(number, replace(self.case, nodes=nodes, back_edge=back_edge))
            self.watermarks.append(
                {name: self.run.watermark(name) for name in self.run.topology.computations}
            )
        self.finish()

    def change(self, number: int, case: Case) -> None:
        former, self.case = self.case, case
        try:
            self.pipeline().check()
            if self.has_updates:
                self.run.update(self.pipeline())
            else:
                self.restart()
        except InvalidError:
            self.refused.append(number)
            self.case = former
            if not self.run.is_active:
                self.store.close()
                self.open()

    def rows(self) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Return the visible rows without sequencers and commit numbers, which legitimately differ."""
        return {
            name: {
                row["key"]: (
                    row["state"],
                    row["state_bytes"],
                    str(row["timers"]),
                    row["hold"],
                    row["superstep"],
                )
                for row in self.store.rows_view(name).to_arrow().to_pylist()
            }
            for name in (*_NAMES, "dead_letters")
        }

    def totals(self) -> Totals:
        return self.run.summary().totals


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=30
)
@given(case=cases(), changes=st.dictionaries(st.integers(0, 7), graphs(), min_size=1, max_size=4))
def test_update_equals_a_restart(case: Case, changes: dict[int, Graph]) -> None:
    """Counts and watermarks are compared too; both refuse the same pipelines, and the store is sound."""
    updated, restarted = Player(case, has_updates=True), Player(case, has_updates=False)

    updated.play(changes)
    restarted.play(changes)

    event(f"refused: {len(updated.refused)} of {len(changes)}")
    assert updated.refused == restarted.refused
    assert updated.watermarks == restarted.watermarks
    assert updated.rows() == restarted.rows()
    assert updated.totals() == restarted.totals()
    assert updated.opened == 1
    assert not verify_store(updated.disk).findings
