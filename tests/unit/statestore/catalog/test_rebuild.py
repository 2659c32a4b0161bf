"""The catalog from the log: losing it loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.entries import CommitFacts
from millpond.statestore.catalog.rebuild import facts_of, logged_commits
from millpond.statestore.log.action import CommitInfo, Other, Txn
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.log import Log
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion, WallTimeMicros
from millpond.testing.fixtures.commit_history import (
    ALL,
    DEFINITION,
    LEFT,
    RIGHT,
    CommitHistory,
    busy_history,
    everything,
    packed_fence,
)
from millpond.testing.fixtures.determinism import ManualClock

START_US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_US)


@pytest.fixture
def catalog(clock: ManualClock) -> Iterator[Catalog]:
    with Catalog.open("sqlite://", clock) as opened:
        yield opened


def test_losing_the_catalog_loses_nothing(catalog: Catalog, clock: ManualClock) -> None:
    """A catalog rebuilt from the log equals the one that was kept all the time."""
    log = busy_history()
    log.commit({AppId.SAVEPOINT.of("a"): 3, AppId.SAVEPOINT.of("b"): 4})
    log.commit({AppId.SAVEPOINT.of("b"): SAVEPOINT_RELEASED})
    for facts in log.commits:
        catalog.record_commits([facts])

    with Catalog.open("sqlite://", clock) as rebuilt:
        rebuilt.rebuild(log, reversed(log.commits))

        assert everything(rebuilt) == everything(catalog)


def test_rebuilding_a_whole_catalog_changes_nothing(catalog: Catalog) -> None:
    """Rebuilding twice, or without a loss, is the same as once."""
    log = busy_history()
    catalog.record_pipeline(DEFINITION)
    catalog.record_commits(log.commits)
    before = everything(catalog)
    catalog.rebuild(log, log.commits)
    catalog.rebuild(log, log.commits)

    assert everything(catalog) == before


def test_the_snapshot_speaks_for_commits_that_are_gone(catalog: Catalog, clock: ManualClock) -> None:
    """After log cleanup positions, owners and open intervals are all still there."""
    log = busy_history()
    catalog.record_commits(log.commits)
    with Catalog.open("sqlite://", clock) as rebuilt:
        rebuilt.rebuild(log, log.commits[-1:])

        fences = [(entry.interval, entry.fence) for entry in catalog.intervals()]
        assert [(entry.interval, entry.fence) for entry in rebuilt.intervals()] == fences
        assert rebuilt.input_positions() == catalog.input_positions()
        assert rebuilt.supersteps() == catalog.supersteps(limit=1)
        assert len(rebuilt.intervals(closed=True)) == 3


def test_an_empty_log_tail_is_enough(catalog: Catalog) -> None:
    """The snapshot alone gives the present state, and no journal."""
    log = busy_history()
    catalog.rebuild(log, ())

    assert [entry.interval for entry in catalog.intervals()] == [LEFT, RIGHT]
    assert [entry.opened_version for entry in catalog.intervals()] == [None, None]
    assert catalog.supersteps() == ()


def test_what_the_log_never_had_goes(catalog: Catalog) -> None:
    """CatalogRecorder entries above the log's newest version are dropped (the store was rolled back)."""
    log = busy_history()
    catalog.record_commits(log.commits)
    shorter = CommitHistory(log.commits[:4], {ALL.app_id: packed_fence(1, 2)})
    catalog.rebuild(shorter, log.commits)

    assert [entry.superstep for entry in catalog.supersteps()] == [2, 1]
    assert [entry.interval for entry in catalog.intervals()] == [ALL]


def test_a_newer_definition_stays(catalog: Catalog, clock: ManualClock) -> None:
    """A definition in an old commit does not replace one that was declared since."""
    clock.advance_ms(8_000)
    newer = replace(DEFINITION.computations[0], code_hash="a2")
    catalog.record_pipeline(replace(DEFINITION, computations=(newer,)))
    log = busy_history()
    catalog.rebuild(log, log.commits)

    assert [entry.code_hash for entry in catalog.computations()] == ["a2"]


def test_commit_files_say_the_same_as_commits(catalog: Catalog) -> None:
    """Facts read back from the commit files of a log are those of the commits that were made."""
    history = busy_history()
    log = Log(MemoryObjects())
    for facts in history.commits:
        info = CommitInfo(operation="X", timestamp_ms=facts.wall_us // 1_000, millpond=facts.metadata)
        txns = [Txn(app_id=app_id, version=version) for app_id, version in facts.txns.items()]
        log.put(facts.version, encode([info, *txns]))
    catalog.record_commits(history.commits)
    before = everything(catalog)
    catalog.rebuild(history, logged_commits(log, history.version, 100))

    assert everything(catalog) == before
    assert [facts.version for facts in logged_commits(log, history.version, 3)] == [7, 6, 5]
    assert [facts.version for facts in logged_commits(log, TableVersion(9), 3)] == []


def test_commits_of_others_say_nothing() -> None:
    """A commit without Millpond's fields has a time and no facts."""
    facts = facts_of(TableVersion(3), (CommitInfo(operation="OPTIMIZE", timestamp_ms=2), Other(name="cdc")))

    assert facts == CommitFacts(version=TableVersion(3), wall_us=WallTimeMicros(2_000))
