"""One suite for every database that may hold a catalog: SQLite in memory and in files, and a PostgreSQL server."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from millpond import migrations
from millpond.statestore.app_ids import AppId
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import METADATA, connect, writing
from millpond.statestore.catalog.entries import (
    CommitFacts,
    ComputationDefinition,
    HorizonKind,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
)
from millpond.statestore.errors import ConflictError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import pack_fence
from millpond.statestore.system import SystemClock
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion, WallTimeMicros


@pytest.fixture(params=["memory", "file", "other file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return "sqlite://"
    if request.param == "postgresql":
        database: str = request.getfixturevalue("postgresql_database")
        return database
    return f"sqlite:///{tmp_path / request.param}.db"


def superstep(number: int, intervals: tuple[Interval, ...], sequencer: int = 1) -> CommitFacts:
    fence = pack_fence(Sequencer(sequencer), CommitNumber(number))
    txns = {interval.app_id: fence for interval in intervals}
    txns |= {AppId.SUPERSTEP.of("p"): number, AppId.INPUT.of("p", "in/put", "ü"): number}
    marks = {interval.app_id: number for interval in intervals}
    return CommitFacts(
        version=TableVersion(number),
        wall_us=WallTimeMicros(number),
        txns=txns,
        metadata={"records": 2**40, "watermarks": marks},
    )


def test_a_pipeline_is_read_back(url: str) -> None:
    """Declared topology comes back as it was, with any text in it."""
    definition = PipelineDefinition(
        name="p",
        computations=(ComputationDefinition(name="ü % ' \U0001f600", code_hash="1", options={"a": [1]}),),
        streams=(StreamDefinition(name="s", producers=("a", "b")),),
        subscriptions=(SubscriptionDefinition(consumer="c", stream="s", key_extractor="lambda r: r"),),
    )
    with Catalog.open(url) as catalog:
        catalog.record_pipeline(definition)
        catalog.record_pipeline(definition)

        assert [each.options for each in catalog.computations()] == [{"a": [1]}]
        assert catalog.streams("p") == definition.streams
        assert catalog.subscriptions("p") == definition.subscriptions


def test_the_steps_of_the_migrations_make_the_same_catalog(url: str) -> None:
    """What older releases made and this one migrates has the tables that a new catalog has."""
    engine = connect(url, SystemClock(), create=True)
    options = {"version_table": migrations.VERSION_TABLE, "compare_type": True}
    try:
        with writing(engine) as connection:
            migrations.migrate(connection, None)
            context = MigrationContext.configure(connection, opts=options)

            assert migrations.current_revision(connection) == migrations.HEAD
            assert list(compare_metadata(context, METADATA)) == []
    finally:
        engine.dispose()


def test_commits_are_read_back(url: str) -> None:
    """Intervals, positions and journals come back in key and time order, large numbers whole."""
    low, high = Interval("c", "", "Z"), Interval("c", "Z", "ü")
    with Catalog.open(url) as catalog:
        catalog.record_commits([superstep(1, (Interval("c"),))])
        for number in (2, 3):
            catalog.record_commits([superstep(number, (high, low, Interval("c", "ü")), sequencer=2)])

        assert [each.interval for each in catalog.intervals()] == [low, high, Interval("c", "ü")]
        assert [each.superstep for each in catalog.supersteps()] == [3, 2, 1]
        assert catalog.supersteps()[0].records == 2**40
        (position,) = catalog.input_positions()
        assert (position.input, position.source_id, position.position) == ("in/put", "ü", 3)


def test_pins_exclude_each_other(url: str) -> None:
    """Readers and collectors are refused what contradicts the other side."""
    with Catalog.open(url) as catalog:
        catalog.publish_horizon("reader", TableVersion(5), lifetime_ms=60_000)
        with pytest.raises(ConflictError):
            catalog.publish_horizon("gc", TableVersion(6), HorizonKind.COLLECTOR)
        catalog.publish_horizon("gc", TableVersion(5), HorizonKind.COLLECTOR)
        with pytest.raises(ConflictError):
            catalog.publish_horizon("late reader", TableVersion(4), lifetime_ms=60_000)


def test_threads_share_a_catalog(url: str) -> None:
    """Threads record through one catalog at once, and nothing is lost."""
    with closing(Catalog.open(url)) as catalog:
        threads = [
            threading.Thread(target=catalog.record_commits, args=([superstep(number, (Interval("c"),))],))
            for number in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [each.superstep for each in catalog.supersteps()] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert [each.version for each in catalog.intervals()] == [8]
