"""
Schema of the catalog, step by step, with Alembic.

`upgrade` brings a database to the newest step, in one transaction: a process that
is killed on the way leaves the step before, and the next one to open goes on from
there. Two that open at once wait for each other. No ``alembic.ini`` is needed, and
Alembic is not even imported when there is nothing to do.

Steps are never edited once released; a new one goes to ``versions/`` and into `HEAD`.
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
"""The newest step that this release knows."""

VERSION_TABLE: Final = "millpond_catalog_version"
"""Where a database says at which step it is; the catalog may share a database with others."""

_ADVISORY_LOCK: Final = 0x6D696C6C706F6E64  # "millpond"
_ALEMBIC_IS_GLOBAL: Final = threading.Lock()


def current_revision(connection: Connection) -> str | None:
    """
    The step that a database is at; ``None`` for one without a catalog.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(
        text(f"SELECT version_num FROM {VERSION_TABLE}")  # noqa: S608 - a constant
    ).scalar_one_or_none()
    return revision


def upgrade(connection: Connection) -> None:
    """
    Bring the database to `HEAD` within the caller's transaction.

    The transaction must already hold the right to write (SQLite: ``BEGIN IMMEDIATE``),
    so that of two processes the second finds the work done.

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
    What Alembic needs to know, for a connection that is already open.
    """
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
