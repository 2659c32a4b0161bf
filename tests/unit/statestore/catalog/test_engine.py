"""Connections to the catalog's database, and translation of its errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from millpond.statestore.catalog import catalog as catalog_module
from millpond.statestore.catalog import engine
from millpond.statestore.catalog.catalog import Catalog, HorizonKind
from millpond.statestore.catalog.engine import (
    _COMPILED,
    CODE_VERSIONS,
    FILES_MAX,
    METADATA,
    HeldError,
    connect,
    default_catalog_url,
    replace_row,
    writing,
)
from millpond.statestore.errors import ConflictError, InternalError, UnavailableError
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock


class ReleasingClock(ManualClock):
    def __init__(self, other: sqlite3.Connection) -> None:
        super().__init__(0)
        self.other = other

    def sleep_ms(self, duration_ms: float) -> None:
        super().sleep_ms(duration_ms)
        if self.now_us() > 50_000 and self.other.in_transaction:
            self.other.execute("ROLLBACK")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE something (x)")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def test_opening_waits_for_another_writer(tmp_path: Path, other: sqlite3.Connection) -> None:
    clock = ReleasingClock(other)
    connect(default_catalog_url(str(tmp_path)), clock, create=True).dispose()

    assert clock.now_us() == 60_000
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as fresh:
        assert fresh.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_opening_gives_up_after_bounded_time(tmp_path: Path, other: sqlite3.Connection) -> None:
    clock = ManualClock(0)
    with pytest.raises(UnavailableError, match="busy"):
        connect(default_catalog_url(str(tmp_path)), clock, create=True)

    assert clock.now_us() < 10_000_000
    assert other.in_transaction


def test_held_file_is_left_for_the_next(tmp_path: Path, other: sqlite3.Connection) -> None:
    """Whoever comes later finds the newest file, also when the first is free again."""
    url = default_catalog_url(str(tmp_path))
    with Catalog.open(url, ManualClock(0), store_id="pond") as catalog:
        catalog.publish_horizon("reader", TableVersion(1))
        assert other.in_transaction
    other.execute("ROLLBACK")
    with Catalog.open(url, ManualClock(0), store_id="pond", read_only=True) as catalog:
        assert [each.holder for each in catalog.horizons()] == ["reader"]
    assert (tmp_path / "catalog.sqlite.2").exists()


def test_held_file_is_copied_with_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector may trust the copy as it trusted the file, because no pin of a reader is lost."""
    url = default_catalog_url(str(tmp_path))
    with Catalog.open(url, ManualClock(5), store_id="pond") as catalog:
        catalog.publish_horizon("reader", TableVersion(1))
    monkeypatch.setitem(engine._SQLITE_ARGUMENTS, "timeout", 0)
    monkeypatch.setattr(engine, "_BUSY_TIMEOUT_MS", 0)
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with Catalog.open(url, ManualClock(9), store_id="pond") as catalog:
            with pytest.raises(ConflictError, match="an older version is still needed"):
                catalog.publish_horizon("gc", TableVersion(2), HorizonKind.COLLECTOR)
            assert catalog.created_us == 5
            assert [each.holder for each in catalog.horizons()] == ["reader"]


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not work, each call begins one file at most, up to a bound."""
    tried: list[str] = []

    def held(url: str, *_: object, **__: object) -> None:
        path = Path(url.removeprefix("sqlite:///"))
        path.touch()
        tried.append(path.name)
        raise HeldError("held")

    monkeypatch.setattr(catalog_module, "connect", held)
    for _ in range(20):
        with pytest.raises(UnavailableError):
            Catalog.open(default_catalog_url(str(tmp_path)))

    assert tried[:3] == ["catalog.sqlite", "catalog.sqlite.2", "catalog.sqlite.2"]
    assert len(list(tmp_path.iterdir())) == FILES_MAX


def test_schema_violation_is_internal_error(tmp_path: Path) -> None:
    database = connect(default_catalog_url(str(tmp_path)), ManualClock(0), create=True)
    with writing(database) as connection:
        METADATA.create_all(connection)
    with pytest.raises(InternalError, match="refused"), writing(database) as connection:
        replace_row(
            connection,
            CODE_VERSIONS,
            {"computation": "x", "code_version": 1, "code_hash": None, "recorded_us": 1},
        )
    database.dispose()


def test_statement_is_compiled_once_per_process(tmp_path: Path) -> None:
    compiled = []
    for name in ("first", "second", "third"):
        with Catalog.open(f"sqlite:///{tmp_path / name}") as catalog:
            catalog.publish_horizon("reader", TableVersion(1))
            assert len(catalog.horizons()) == 1
        # Its answers are right either way, so only the engine's own cache can tell.
        compiled.append(len(_COMPILED))

    assert compiled[0] > 0
    assert compiled[0] == compiled[1] == compiled[2]


def test_error_names_catalog_not_dialect(tmp_path: Path) -> None:
    """SQLAlchemy has its own name for our dialect."""
    url = f"sqlite:///{tmp_path}/missing/catalog.sqlite"
    with pytest.raises(UnavailableError) as refused:
        Catalog.open(url)

    assert refused.value.details["url"] == url
