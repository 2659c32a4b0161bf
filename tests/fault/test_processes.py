"""Killed and stopped processes on three ZooKeepers, checked against a history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.history import Checked
from millpond.testing.processes.scenarios import (
    IN_A_LEDGER,
    Ground,
    exits_at_failpoints,
    lost_members,
    lost_quorum,
    random_kills,
    settle,
    stopped_owners,
)
from millpond.testing.processes.worker import Nest
from millpond.testing.servers.s3_server import S3Server
from millpond.testing.servers.zookeeper import Ensemble

pytestmark = [pytest.mark.fault, pytest.mark.zookeeper, pytest.mark.slow]

CLOCK: Final = SystemClock()
KILLS: Final = int(os.environ.get("MILLPOND_KILLS", "200"))
TAKEOVERS: Final = 20
LANES: Final = 4
MEMBERS_LOST: Final = 8
QUORUMS_LOST: Final = 2
QUORUM_AWAY_MS: Final = 3_000


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    with Ensemble(tmp_path_factory.mktemp("ensemble") / "data", CLOCK) as members:
        yield members


@pytest.fixture(scope="module")
def nest() -> Iterator[Nest]:
    """Forks the workers."""
    with Nest() as nest:
        yield nest


@pytest.fixture
def ground(tmp_path: Path, members: Ensemble, nest: Nest, fault_report: FaultReport) -> Iterator[Ground]:
    """A store for this test; a violation fails the test."""
    members.start()
    ground = new_ground(tmp_path, members, nest)
    yield ground
    fault_report.add(ground.report)


def new_ground(folder: Path, members: Ensemble, nest: Nest, **options: object) -> Ground:
    return Ground(
        folder=folder,
        ensemble=members,
        nest=nest,
        clock=CLOCK,
        rng=SystemRng(),
        report=FaultReport(),
        options=options,
    )


def in_lanes(ground: Ground, run: Callable[[Ground, int], object]) -> list[Checked]:
    """Divide the work over several stores in parallel, and add up the results."""
    grounds = [new_ground(ground.folder / str(lane), ground.ensemble, ground.nest) for lane in range(LANES)]

    def one(lane: int) -> Checked:
        run(grounds[lane], lane)
        return settle(grounds[lane])

    with ThreadPoolExecutor(LANES) as lanes:
        checked = list(lanes.map(one, range(LANES)))
    for lane_ground in grounds:
        ground.report.add(lane_ground.report)
    return checked


def test_random_kills_lose_and_repeat_nothing(ground: Ground, s3_bucket: str, s3_server: S3Server) -> None:
    """Acknowledged records are in order; also on S3."""

    def kill(lane_ground: Ground, lane: int) -> None:
        if lane == 0:
            lane_ground.url, lane_ground.storage_options = f"{s3_bucket}/pond", s3_server.options
        random_kills(lane_ground, KILLS // LANES)

    checked = in_lanes(ground, kill)

    assert ground.report.violations == ()
    assert all(result.takeovers > KILLS // LANES // 8 for result in checked)
    assert all(result.acknowledged > KILLS // LANES // 8 for result in checked)


def test_ends_at_failpoints_lose_and_repeat_nothing(ground: Ground) -> None:
    """A process ends between any two durable steps."""
    in_lanes(ground, lambda lane_ground, lane: exits_at_failpoints(lane_ground, IN_A_LEDGER[lane::LANES]))

    assert ground.report.violations == ()
    assert ground.report.trials("R2") == len(IN_A_LEDGER)


def test_resumed_former_owners_are_fenced(ground: Ground) -> None:
    """An owner is stopped past its session, at rest or within a commit."""
    in_lanes(ground, lambda lane_ground, _: stopped_owners(lane_ground, TAKEOVERS // LANES))

    assert ground.report.violations == ()
    assert ground.report.number("zombies") == ground.report.number("zombies_fenced") == TAKEOVERS
    assert ground.report.number("zombie_commits_accepted") == 0


def test_worker_outlives_members_of_the_ensemble(ground: Ground) -> None:
    lost_members(ground, MEMBERS_LOST)
    settle(ground)

    assert ground.report.violations == ()


def test_nothing_is_acknowledged_without_a_quorum(ground: Ground) -> None:
    """The process continues by itself once a quorum is back."""
    lost_quorum(ground, times=QUORUMS_LOST, away_ms=QUORUM_AWAY_MS)
    settle(ground)

    assert ground.report.violations == ()


def test_canary_former_owners_write_without_the_fence(ground: Ground) -> None:
    unfenced = new_ground(ground.folder / "unfenced", ground.ensemble, ground.nest, fenced=False)
    unfenced.patience_ms = 5_000
    stopped_owners(unfenced, 1)
    checked = settle(unfenced)

    assert checked.zombie_commits > 0
    assert unfenced.report.violations
