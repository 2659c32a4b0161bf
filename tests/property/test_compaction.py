"""Compactions, restarts and collections change no answer, and remove no file that is still needed (I8, I10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.superstep.report import Totals
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.app_ids import AppId
from millpond.statestore.history.verification import verify_store
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import load
from millpond.statestore.types import TableVersion
from tests.fixtures.case_player import CasePlayer
from tests.fixtures.pipelines import Case, cases

Rows = dict[str, dict[str, tuple[Any, ...]]]

_PLAIN = UpkeepPolicy(compaction=CompactionPolicy(fan_in=10**6, files_max=10**6), collect_every=10**9)


@dataclass(frozen=True, slots=True)
class Fate:
    """The maintenance and restarts of a run.

    Attributes are the policy of compaction and collection, the steps followed by a restart, and the step
    followed by a savepoint.
    """

    policy: UpkeepPolicy
    restarts: frozenset[int]
    savepoint: int


@st.composite
def fates(draw: st.DrawFn) -> Fate:
    compactions = CompactionPolicy(
        fan_in=draw(st.integers(2, 4)),
        files_max=draw(st.integers(2, 6)),
        small_bytes=draw(st.sampled_from([1, 4_000, 1 << 16])),
        garbage_ratio=draw(st.sampled_from([0.1, 1.0, 5.0])),
    )
    return Fate(
        policy=UpkeepPolicy(
            compaction=compactions,
            retention=draw(st.sampled_from(["0s", "5m"])),
            collect_every=draw(st.integers(2, 12)),
        ),
        restarts=draw(st.frozensets(st.integers(0, 40)) | st.just(frozenset(range(100)))),
        savepoint=draw(st.integers(0, 10)),
    )


class Player(CasePlayer):
    def __init__(self, case: Case, fate: Fate, policy: UpkeepPolicy) -> None:
        super().__init__(case, policy)
        self.fate = fate
        self.saved: tuple[TableVersion, Rows] | None = None

    def play(self) -> None:
        # Play the script twice: the second time every record is a duplicate.
        for number, step in enumerate((*self.case.steps, *self.case.steps)):
            self.take(step)
            if number == self.fate.savepoint:
                self.save()
            if number in self.fate.restarts:
                self.restart()
        self.finish()

    def save(self) -> None:
        version = self.store.committer.snapshot.version
        self.store.committer.commit(
            CommitRequest(kind="savepoint", positions={AppId.SAVEPOINT.of("mine"): version})
        )
        self.saved = version, self.rows(version)

    def rows(self, version: TableVersion | None = None) -> Rows:
        """Return the visible rows without sequencers and commit numbers, which legitimately differ."""
        rows: Rows = {}
        for name in [*(f"c{number}" for number in range(len(self.case.nodes))), "dead_letters"]:
            table = self.store.rows_view(name, version).to_arrow()
            rows[name] = {
                row["key"]: (
                    row["state"],
                    row["state_bytes"],
                    str(row["timers"]),
                    row["hold"],
                    row["superstep"],
                )
                for row in table.to_pylist()
            }
        return rows

    def totals(self) -> Totals:
        return self.run.summary().totals


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=25
)
@given(case=cases(), fate=fates())
def test_compactions_restarts_and_collections_change_no_answer(case: Case, fate: Fate) -> None:
    """A savepoint stays readable."""
    compacted, plain = Player(case, fate, fate.policy), Player(case, fate, _PLAIN)
    compacted.play()
    plain.play()

    assert compacted.rows() == plain.rows()
    assert compacted.totals() == plain.totals()
    if compacted.saved is not None:
        version, rows = compacted.saved
        assert compacted.rows(version) == rows
    assert verify_store(compacted.disk).findings == ()
    assert load(compacted.store.log).txns == compacted.store.committer.snapshot.txns
