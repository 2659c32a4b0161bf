"""One suite for every catalog database: SQLite in memory and in files, and PostgreSQL."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from millpond import migrations
from millpond.statestore.catalog.catalog import Catalog, HorizonKind
from millpond.statestore.catalog.engine import METADATA, connect, writing
from millpond.statestore.catalog.topology import ComputationDefinition, PipelineDefinition
from millpond.statestore.errors import ConflictError
from millpond.statestore.system import SystemClock
from millpond.statestore.types import TableVersion


@pytest.fixture(params=["memory", "file", "other file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return "sqlite://"
    if request.param == "postgresql":
        database: str = request.getfixturevalue("postgresql_database")
        return database
    return f"sqlite:///{tmp_path / request.param}.db"


def test_pipeline_is_read_back_with_any_text(url: str) -> None:
    definition = PipelineDefinition(
        name="p",
        computations=(ComputationDefinition(name="ü % ' \U0001f600", code_hash="1", options={"a": [1]}),),
    )
    with Catalog.open(url) as catalog:
        catalog.record_pipeline(definition)
        catalog.record_pipeline(definition)

        assert [each.options for each in catalog.computations()] == [{"a": [1]}]
        assert [each.name for each in catalog.computations()] == ["ü % ' \U0001f600"]
        assert [each.code_hash for each in catalog.code_versions("ü % ' \U0001f600")] == ["1"]


def test_migrated_catalog_has_the_tables_of_a_new_one(url: str) -> None:
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


def test_readers_and_collectors_exclude_each_other(url: str) -> None:
    with Catalog.open(url) as catalog:
        catalog.publish_horizon("reader", TableVersion(5), lifetime_ms=60_000)
        with pytest.raises(ConflictError):
            catalog.publish_horizon("gc", TableVersion(6), HorizonKind.COLLECTOR)
        catalog.publish_horizon("gc", TableVersion(5), HorizonKind.COLLECTOR)
        with pytest.raises(ConflictError):
            catalog.publish_horizon("late reader", TableVersion(4), lifetime_ms=60_000)


def test_threads_record_through_one_catalog_at_once(url: str) -> None:
    with closing(Catalog.open(url)) as catalog:
        threads = [
            threading.Thread(target=catalog.publish_horizon, args=(f"reader {number}", TableVersion(2**40)))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [each.holder for each in catalog.horizons()] == [f"reader {number}" for number in range(8)]
        assert {each.version for each in catalog.horizons()} == {2**40}
