"""
Migrations of the catalog's schema, with Alembic.

`upgrade` migrates a database to the newest revision in one transaction: a process that
is killed midway leaves the old revision, and the next process that opens the catalog starts
from there. Processes that open a catalog concurrently wait for each other. No ``alembic.ini``
is needed, and Alembic is not imported when there is nothing to do.

Released revisions are never edited; add a new one to ``versions/`` and update `HEAD`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import inspect, text

from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy.engine import Connection

__all__ = ["HEAD", "VERSION_TABLE", "alembic_config", "current_revision", "upgrade"]

HEAD: Final = "0001"
"""The newest revision of this release."""

VERSION_TABLE: Final = "millpond_catalog_version"
"""Table that holds a database's revision; the catalog may share a database with other applications."""

_ADVISORY_LOCK: Final = 0x6D696C6C706F6E64  # "millpond"
_ALEMBIC_IS_GLOBAL: Final = threading.Lock()


def current_revision(connection: Connection) -> str | None:
    """
    The revision of a database; ``None`` for a database without a catalog.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant
    ).scalar_one_or_none()
    return revision


def upgrade(connection: Connection) -> None:
    """
    Migrate the database to `HEAD` within the caller's transaction.

    The transaction must already hold the write lock (SQLite: ``BEGIN IMMEDIATE``),
    so that the second of two processes finds the migration done.

    Raises:
        InvalidError: the schema is newer than this release.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
    current = current_revision(connection)
    if current == HEAD:
        return
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
    """
    Alembic's configuration for a connection that is already open.
    """
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
