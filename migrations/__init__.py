"""Migrations of the catalog's schema, with Alembic.

`upgrade` migrates a database in one transaction, so the next process restarts a killed migration. Processes that open a
catalog concurrently wait for each other. A new catalog gets the tables directly, because importing Alembic takes ten
times as long as creating them; a test compares both ways. Released revisions are never edited: add a new one to
``versions/`` and update `HEAD`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, inspect, text

from millpond.statestore.catalog.engine import METADATA
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy.engine import Connection

HEAD: Final = "0001"

VERSION_TABLE: Final = "millpond_catalog_version"
"""The table with a database's revision; the catalog may share a database with other applications."""

_REVISIONS: Final = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)

_ADVISORY_LOCK: Final = 0x6D696C6C706F6E64  # "millpond"
_ALEMBIC_IS_GLOBAL: Final = threading.Lock()


def current_revision(connection: Connection) -> str | None:
    """Return the revision of a database; ``None`` for a database without a catalog."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant
    ).scalar_one_or_none()
    return revision


def upgrade(connection: Connection) -> None:
    """Bring the database to `HEAD` within the caller's transaction.

    The transaction must already hold the write lock (SQLite: ``BEGIN IMMEDIATE``), so that the second of two
    processes finds the migration done.

    Raises:
        InvalidError: the schema is newer than this release.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
    current = current_revision(connection)
    if current is None:
        METADATA.create_all(connection, checkfirst=False)
        _REVISIONS.create(connection, checkfirst=False)
        connection.execute(_REVISIONS.insert(), {"version_num": HEAD})
    elif current != HEAD:
        migrate(connection, current)


def migrate(connection: Connection, current: str | None) -> None:
    """Apply Alembic's steps from the revision ``current`` (``None``: an empty database) to `HEAD`.

    The caller's transaction holds the write lock.
    """
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config(connection)
    known = {step.revision for step in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise InvalidError(
            "the catalog was written by a newer millpond: upgrade, or open with another catalog",
            revision=current,
            known=HEAD,
        )
    with _ALEMBIC_IS_GLOBAL:
        command.upgrade(config, HEAD)


def alembic_config(connection: Connection) -> Config:
    """Configure Alembic for an open connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
