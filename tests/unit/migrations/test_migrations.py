"""The migrations of the catalog's schema."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, event

from millpond import migrations
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import METADATA, connect, default_catalog_url, reading, writing
from millpond.statestore.errors import InvalidError
from millpond.statestore.system import SystemClock


@contextmanager
def engine_in(folder: Path) -> Iterator[Engine]:
    engine = connect(default_catalog_url(str(folder)), SystemClock(), create=True)
    yield engine
    engine.dispose()


def sqlite_in(folder: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(folder / "catalog.sqlite", isolation_level=None))


def tables_in(folder: Path) -> set[str]:
    with sqlite_in(folder) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def differences(connection: Connection) -> list[object]:
    options = {"version_table": migrations.VERSION_TABLE, "compare_type": True}
    context = MigrationContext.configure(connection, opts=options)
    return list(compare_metadata(context, METADATA))


def test_empty_database_gets_all_tables_and_revision(tmp_path: Path) -> None:
    Catalog.open(default_catalog_url(str(tmp_path))).close()

    assert tables_in(tmp_path) == {*METADATA.tables, migrations.VERSION_TABLE}
    with engine_in(tmp_path) as engine, reading(engine) as connection:
        assert migrations.current_revision(connection) == migrations.HEAD


def by_steps(connection: Connection) -> None:
    migrations.migrate(connection, None)


Way = Callable[[Connection], None]


@pytest.fixture(params=[migrations.upgrade, by_steps])
def way(request: pytest.FixtureRequest) -> Way:
    made: Way = request.param
    return made


@pytest.fixture
def engine(way: Way, tmp_path: Path) -> Iterator[Engine]:
    with engine_in(tmp_path) as engine:
        with writing(engine) as connection:
            way(connection)
        yield engine


def test_new_and_migrated_schemas_match_code(engine: Engine) -> None:
    with reading(engine) as connection:
        assert migrations.current_revision(connection) == migrations.HEAD
        assert differences(connection) == []


def test_comparison_finds_missing_column(engine: Engine) -> None:
    """Otherwise its silence would mean nothing."""
    with writing(engine) as connection:
        connection.exec_driver_sql("ALTER TABLE savepoints DROP COLUMN note")
        assert len(differences(connection)) == 1


def test_new_and_migrated_catalogs_have_equal_statements(tmp_path: Path) -> None:
    made = []
    for way in (migrations.upgrade, by_steps):
        folder = tmp_path / way.__name__
        folder.mkdir()
        with engine_in(folder) as engine, writing(engine) as connection:
            way(connection)
        with sqlite_in(folder) as database:
            made.append(set(database.execute("SELECT type, name, sql FROM sqlite_master")))

    assert len(made[0]) > len(METADATA.tables)
    assert made[0] == made[1]


def test_alembic_finds_revision_of_new_catalog(tmp_path: Path) -> None:
    """The steps of the next release begin there."""
    with engine_in(tmp_path) as engine, writing(engine) as connection:
        migrations.upgrade(connection)
        context = MigrationContext.configure(connection, opts={"version_table": migrations.VERSION_TABLE})

        assert context.get_current_revision() == migrations.HEAD


def test_head_is_last_step(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine, writing(engine) as connection:
        script = ScriptDirectory.from_config(migrations.alembic_config(connection))

    assert script.get_heads() == [migrations.HEAD]


def test_repeated_upgrade_changes_nothing(tmp_path: Path) -> None:
    Catalog.open(default_catalog_url(str(tmp_path))).close()
    statements: list[str] = []
    with engine_in(tmp_path) as engine:
        event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
        with writing(engine) as connection:
            migrations.upgrade(connection)

    assert all(statement.startswith(("BEGIN", "PRAGMA", "SELECT")) for statement in statements)


def test_killed_migration_resumes(way: Way, tmp_path: Path) -> None:
    origin, images = tmp_path / "origin", tmp_path / "images"
    origin.mkdir()

    def copy_files(*_call: object) -> None:
        image = images / f"{len(list(images.iterdir())) if images.exists() else 0:03}"
        # A killed process leaves the database and its log, but none of its memory.
        shutil.copytree(origin, image, ignore=shutil.ignore_patterns("*-shm"))

    with engine_in(origin) as engine:
        event.listen(engine, "after_cursor_execute", copy_files)
        with writing(engine) as connection:
            way(connection)

    assert len(list(images.iterdir())) > len(METADATA.tables)
    for image in sorted(images.iterdir()):
        assert tables_in(image) == set()
        with Catalog.open(default_catalog_url(str(image))) as catalog:
            assert catalog.computations() == ()
        assert tables_in(image) == tables_in(origin)


def test_failed_migration_leaves_previous_step(way: Way, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def fail(*call: object) -> None:
        if "supersteps" in str(call[2]):
            raise KilledError

    with engine_in(tmp_path) as engine:
        event.listen(engine, "before_cursor_execute", fail)
        with pytest.raises(KilledError), writing(engine) as connection:
            way(connection)

    assert tables_in(tmp_path) == set()


@pytest.mark.parametrize("read_only", [False, True])
def test_newer_schema_is_refused(tmp_path: Path, *, read_only: bool) -> None:
    url = default_catalog_url(str(tmp_path))
    Catalog.open(url).close()
    with sqlite_in(tmp_path) as database:
        database.execute(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '9999'")

    with pytest.raises(InvalidError, match=r"newer millpond|needs a migration"):
        Catalog.open(url, read_only=read_only)
    with sqlite_in(tmp_path) as database:
        assert database.execute(f"SELECT * FROM {migrations.VERSION_TABLE}").fetchall() == [("9999",)]


def test_read_only_open_does_not_migrate(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").touch()

    with pytest.raises(InvalidError, match="open the store for writing"):
        Catalog.open(default_catalog_url(str(tmp_path)), read_only=True)
    assert tables_in(tmp_path) == set()
