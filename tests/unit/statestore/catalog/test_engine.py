"""Connections to the catalog's database, and translation of its errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import (
    _COMPILED,
    CODE_VERSIONS,
    METADATA,
    connect,
    default_catalog_url,
    replace_row,
    writing,
)
from millpond.statestore.errors import InternalError, UnavailableError
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


def test_schema_violation_is_internal_error(tmp_path: Path) -> None:
    engine = connect(default_catalog_url(str(tmp_path)), ManualClock(0), create=True)
    with writing(engine) as connection:
        METADATA.create_all(connection)
    with pytest.raises(InternalError, match="refused"), writing(engine) as connection:
        replace_row(
            connection,
            CODE_VERSIONS,
            {"computation": "x", "code_version": 1, "code_hash": None, "recorded_us": 1},
        )
    engine.dispose()


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
