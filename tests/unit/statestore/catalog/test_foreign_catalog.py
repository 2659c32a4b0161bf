"""Catalogs written by somebody else."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from millpond.statestore.catalog import engine
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.errors import DataError
from millpond.statestore.types import TableVersion

_ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
_COLUMNS = "holder, kind, version, published_us, expires_us"
_SLOW = f"length({'hex(' * 12}zeroblob(1000){')' * 12})"
_SCHEMAS = {
    "trigger": "create trigger t after insert on horizons begin "
    "delete from store where id in (select a.version from horizons a, horizons b, horizons c); end",
    "view": f"drop table horizons; create view Horizons({_COLUMNS}) as select *, 1, 1, 1, 1 from ({_ENDLESS})",
    "virtual table": f"drop table horizons; create virtual table horizons using fts5({_COLUMNS})",
    "computed column": f"alter table horizons add column slow as ({_SLOW})",
    "check": f"drop table horizons; create table horizons({_COLUMNS}, check ({_SLOW} > 1))",
    "default": f"drop table horizons; create table horizons({_COLUMNS}, more default ({_SLOW}))",
    "index of an expression": f"create index i on horizons (({_SLOW}))",
    "partial index": f"create index i on horizons (holder) where {_SLOW} > 1",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Catalog.open(default_catalog_url(str(tmp_path))) as catalog:
        catalog.publish_horizon("reader", TableVersion(1))
    return tmp_path / "catalog.sqlite"


def refused(path: Path, match: str) -> None:
    for read_only in (True, False):
        with pytest.raises(DataError, match=match):
            Catalog.open(default_catalog_url(str(path.parent)), read_only=read_only)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _fifo(path: Path, _target: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, _target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("place", [_link, _fifo, _folder])
def test_catalog_must_be_regular_file(
    path: Path, tmp_path: Path, suffix: str, place: Callable[[Path, Path], None]
) -> None:
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("create table bookmarks (url text)")
    before = other.read_bytes()
    companion = path.with_name(path.name + suffix)
    companion.unlink(missing_ok=True)
    place(companion, other)

    refused(path, "must be a file")
    assert other.read_bytes() == before


def test_dangling_link_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").symlink_to(tmp_path / "new")

    refused(tmp_path / "catalog.sqlite", "must be a file")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", _SCHEMAS)
def test_catalog_with_code_is_refused(path: Path, kind: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_SCHEMAS[kind])

    refused(path, "must have plain tables")


def test_journal_naming_another_file_deletes_nothing(path: Path, tmp_path: Path) -> None:
    """After a rollback SQLite deletes the "super-journal" that the journal names."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"a file of the user")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = delete")
        connection.execute("pragma cache_size = 1")
        connection.execute("begin immediate")
        connection.execute(f"insert into horizons({_COLUMNS}) values ('{'x' * 100_000}', 'reader', 1, 1, 1)")
        hot = path.with_name("hot")
        shutil.copy(f"{path}-journal", hot)
        connection.execute("rollback")
    name = str(victim).encode()
    size, checksum = len(name).to_bytes(4, "big"), sum(name).to_bytes(4, "big")
    with hot.open("r+b") as journal:
        journal.seek(0, os.SEEK_END)
        magic = bytes.fromhex("d9d505f920a163d7")
        journal.write((0x40000000 // 4096 + 1).to_bytes(4, "big") + name + size + checksum + magic)
    hot.rename(f"{path}-journal")

    refused(path, "names another file")
    assert victim.exists()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("select * from store").fetchall()
    assert not victim.exists(), "SQLite alone deletes it"


def test_catalog_needing_too_many_steps_is_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain tables can hold more rows than any of ours."""
    many = ",".join(f"('{number}', 'reader', 1, 1, null)" for number in range(3_000))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"insert into horizons values {many}")
        connection.commit()
    monkeypatch.setattr(engine, "_STEPS_AT_ONCE", 100)

    opened = Catalog.open(default_catalog_url(str(path.parent)))
    with opened as catalog, pytest.raises(DataError, match="takes too long"):
        catalog.horizons()
