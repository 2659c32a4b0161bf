"""Migrations of the catalog's schema, with Alembic.

`upgrade` migrates a database to the newest revision in one transaction: a process that
is killed midway leaves the old revision, and the next process that opens the catalog starts
from there. Processes that open a catalog concurrently wait for each other. No ``alembic.ini``
is needed.

A new catalog gets the tables as the code describes them, without Alembic: to import it alone
takes ten times as long as to make them. A test holds the outcome of the steps to that of this shortcut.

Released revisions are never edited; add a new one to ``versions/`` and update `HEAD`.
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
"""The newest revision of this release."""

VERSION_TABLE: Final = "millpond_catalog_version"
"""Table that holds a database's revision; the catalog may share a database with other applications."""

_REVISIONS: Final = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""That table as Alembic makes it."""

_ADVISORY_LOCK: Final = 0x6D696C6C706F6E64  # "millpond"
_ALEMBIC_IS_GLOBAL: Final = threading.Lock()


def current_revision(connection: Connection) -> str | None:
    """The revision of a database; ``None`` for a database without a catalog."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant
    ).scalar_one_or_none()
    return revision


def upgrade(connection: Connection) -> None:
    """Bring the database to `HEAD` within the caller's transaction.

    The transaction must already hold the write lock (SQLite: ``BEGIN IMMEDIATE``),
    so that the second of two processes finds the migration done.

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
    """Take a database through the steps from its revision to `HEAD`.

    Args:
        connection: in a transaction that holds the write lock.
        current: its revision; ``None`` for an empty database.

    Raises:
        InvalidError: the revision is of a newer release.
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
    """Alembic's configuration for a connection that is already open."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
