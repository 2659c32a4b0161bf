"""Rewound and forked stores, which continue as if the later versions had never existed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.executor.superstep.report import Totals
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.fork import fork_table
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import SeededRng
from tests.fixtures.case_player import CasePlayer
from tests.fixtures.pipelines import Case, cases

Rows = dict[str, dict[str, tuple[Any, ...]]]


class Player(CasePlayer):
    """Compacts, and can return to its state after any step."""

    def __init__(self, case: Case, fan_in: int) -> None:
        compaction = CompactionPolicy(fan_in=fan_in, files_max=fan_in + 2)
        super().__init__(case, UpkeepPolicy(compaction=compaction, retention="1d", collect_every=6))
        self.after: list[tuple[TableVersion, int]] = []
        self.note()

    def note(self) -> None:
        """Record the version and the wall time after a step."""
        self.after.append((self.store.snapshot().version, self.clock.now_us()))

    def play(self, first: int = 0) -> None:
        for step in self.case.steps[first:]:
            self.take(step)
            self.note()

    def rewind(self, version: TableVersion, wall_us: int) -> None:
        self.run.stop()
        self.store.close()
        leases = MemoryLeases(self.registry, self.clock, writer_id=f"rewind{self.opened}")
        plan = plan_rewind(self.disk, version, leases.high_water.read())
        repair_store(self.disk, plan, leases, self.clock, SeededRng(f"w{self.opened}"))
        leases.close()
        self.clock.jump_ms((wall_us - self.clock.now_us()) / 1_000)
        self.open()

    def fork(self, version: TableVersion, wall_us: int) -> None:
        """Continue with a fork, while the original runs and collects garbage."""
        original = self.disk
        self.disk, self.registry = MemoryObjects("fork"), MemoryRegistry()
        fork_table(original, self.disk, self.disk.url, version, self.clock, SeededRng("fork"))
        for path in original.list("computation="):
            original.delete([path])
        self.clock.jump_ms((wall_us - self.clock.now_us()) / 1_000)
        self.open()

    def rows(self) -> Rows:
        """Return the visible rows without sequencers, commit numbers and supersteps, which rise."""
        return {f"c{number}": self._rows_of(f"c{number}") for number in range(len(self.case.nodes))}

    def _rows_of(self, computation: str) -> dict[str, tuple[Any, ...]]:
        return {
            row["key"]: (row["state"], row["state_bytes"], str(row["timers"]), row["hold"])
            for row in self.store.rows_view(computation).to_arrow().to_pylist()
        }

    def letters(self) -> list[str]:
        """Return the dead letters without their keys, which contain the superstep's number."""
        return sorted(str(state) for state, *_ in self._rows_of("dead_letters").values())

    def totals(self) -> Totals:
        return self.run.summary().totals


def check_goes_on(player: Player, back_to: int, go_back: Callable[[Player, TableVersion, int], None]) -> None:
    """Check that a store that went back ends the same once it gets the rest of the input again."""
    player.play()
    after = list(player.after)
    player.finish()
    rows, letters, totals = player.rows(), player.letters(), player.totals()
    player.run.stop()

    step = back_to % len(after)
    go_back(player, *after[step])
    player.play(first=step)
    player.finish()

    assert player.rows() == rows
    assert player.letters() == letters
    assert player.totals() == totals
    assert not verify_store(player.disk).findings


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=30
)
@given(case=cases(), back_to=st.integers(0, 10**6), fan_in=st.integers(2, 6))
def test_rewound_store_ends_the_same(case: Case, back_to: int, fan_in: int) -> None:
    check_goes_on(Player(case, fan_in), back_to, Player.rewind)


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=30
)
@given(case=cases(), back_to=st.integers(0, 10**6), fan_in=st.integers(2, 6))
def test_fork_ends_like_its_parent(case: Case, back_to: int, fan_in: int) -> None:
    """The parent's collectors may delete files meanwhile."""
    check_goes_on(Player(case, fan_in), back_to, Player.fork)


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=10
)
@given(case=cases(), back_to=st.integers(0, 10**6))
def test_rewind_can_be_rewound(case: Case, back_to: int) -> None:
    """The undone versions stay readable and unchanged."""
    player = Player(case, fan_in=3)
    player.play()
    last, wall_us = player.after[-1]
    rows = player.rows()

    player.rewind(*player.after[back_to % len(player.after)])
    assert load(Log(player.disk), last).version == last
    player.rewind(last, wall_us)
    assert player.rows() == rows
