"""Splits and merges of a running pipeline, for any computations and restarts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.superstep.report import Totals
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.testing.fixtures.cuts import random_cut
from millpond.testing.fixtures.determinism import SeededRng
from tests.fixtures.case_player import CasePlayer
from tests.fixtures.pipelines import Case, cases


class Player(CasePlayer):
    """Plays a case twice, so that every record is redelivered, and cuts keys after given steps."""

    def __init__(self, case: Case, fan_in: int) -> None:
        compaction = CompactionPolicy(fan_in=fan_in, files_max=fan_in + 2)
        super().__init__(case, UpkeepPolicy(compaction=compaction, retention="0s", collect_every=6))
        self.kinds: list[str] = []

    def play(self, cuts: Iterable[int] = (), restarts: frozenset[int] = frozenset()) -> None:
        seeds = dict(enumerate(cuts))
        for number, step in enumerate((*self.case.steps, *self.case.steps)):
            self.take(step)
            if number in seeds:
                self.cut(seeds[number])
            if number in restarts:
                self.restart()
        self.finish()

    def cut(self, seed: int) -> None:
        rng = SeededRng(f"cut{seed}")
        coordinator = self.run._worker.coordinator
        cut = random_cut(
            coordinator, self.store, lambda low, high: low + int(rng.random() * (high - low + 1))
        )
        if cut is not None:
            self.kinds.append(cut.kind)
            coordinator.recut(cut)

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
            for name in [*(f"c{number}" for number in range(len(self.case.nodes))), "dead_letters"]
        }

    def totals(self) -> Totals:
        return self.run.summary().totals

    def live(self, computation: str) -> list[Interval]:
        return list(self.store.committer.snapshot.live_intervals(computation))


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=30
)
@given(
    case=cases(),
    cuts=st.lists(st.integers(0, 10**6), max_size=12),
    restarts=st.frozensets(st.integers(0, 8), max_size=3),
    fan_in=st.integers(2, 6),
)
def test_cuts_change_no_answer(case: Case, cuts: list[int], restarts: frozenset[int], fan_in: int) -> None:
    whole, cut = Player(case, fan_in), Player(case, fan_in)

    whole.play()
    cut.play(cuts, restarts)

    assert cut.rows() == whole.rows()
    assert cut.totals() == whole.totals()
    assert not verify_store(cut.disk).findings


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=15
)
@given(case=cases(), cuts=st.lists(st.integers(0, 10**6), min_size=4, max_size=12))
def test_each_key_lies_in_one_interval(case: Case, cuts: list[int]) -> None:
    player = Player(case, 3)

    player.play(cuts)

    for number in range(len(case.nodes)):
        live = player.live(f"c{number}")
        assert all(left.high == right.low for left, right in pairwise(live))
        assert not live or (live[0].low, live[-1].high) == ("", None)
