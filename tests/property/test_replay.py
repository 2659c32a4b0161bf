"""Replays with the same code, from any version and whatever had moved the original's clocks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.local.rows import source_of
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.replay.replay import ReplayClock, plan_replay, repeat_supersteps
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.history.fork import fork_table
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import SeededRng
from tests.fixtures.case_player import CasePlayer
from tests.fixtures.pipelines import Case, cases

Rows = dict[str, list[tuple[Any, ...]]]


def contents(store: Store, case: Case) -> Rows:
    """Return the visible rows and dead letters without sequencers and commit numbers."""
    names = [*(f"c{number}" for number in range(len(case.nodes))), "dead_letters"]
    return {
        name: [
            (row["key"], row["state"], row["state_bytes"], str(row["timers"]), row["hold"], row["superstep"])
            for row in store.rows_view(name).to_arrow().to_pylist()
        ]
        for name in names
    }


@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None, max_examples=30
)
@given(case=cases(), from_step=st.integers(0, 10**6), restarts=st.sets(st.integers(0, 12)))
def test_replay_of_the_same_code_gives_the_same_result(
    case: Case, from_step: int, restarts: set[int]
) -> None:
    """The original may have been restarted."""
    upkeep = UpkeepPolicy(compaction=CompactionPolicy(fan_in=3, files_max=5), retention="1d")
    player = CasePlayer(case, upkeep)
    versions = [player.store.snapshot().version]
    for number, step in enumerate(case.steps):
        if number in restarts:
            player.restart()
        player.take(step)
        versions.append(player.store.snapshot().version)
    player.finish()
    expected, totals = contents(player.store, case), player.run.summary().totals
    player.run.stop()

    version = versions[from_step % len(versions)]
    first, last = player.store.snapshot(version), player.store.snapshot()
    disk, registry = MemoryObjects("replay"), MemoryRegistry()
    fork_table(player.disk, disk, disk.url, TableVersion(version), player.clock, SeededRng("fork"))
    plan = plan_replay(Log(player.disk), first, last, case.pipeline().check(), recorded=True)
    given_rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in case.steps:
        if step.stream is not None:
            given_rows[step.stream] += step.rows
    with Store.in_memory(objects=disk, registry=registry, clock=player.clock, rng=SeededRng("s")) as store:
        wall = ReplayClock(player.clock, player.clock.now_us())
        runner = LocalRunner(
            store, clock=wall, rng=SeededRng("r"), progress=False, dead_letter_limit=None, intervals=2
        )
        run = runner.start(case.pipeline(), stepping=True)
        inputs = {f"in{number}": given_rows[f"in{number}"] for number in range(len(case.injectors))}
        parts = plan.parts(
            run.topology,
            {stream: source_of(run.read_rows(stream, rows)) for stream, rows in inputs.items()},
            since_version=False,
        )
        repeat_supersteps(run, plan.supersteps, parts, store.snapshot(), wall)

        assert contents(store, case) == expected
        assert run.summary().totals == totals
        run.stop()
