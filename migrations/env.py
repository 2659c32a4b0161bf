"""Alembic's entry point, on the connection that `millpond.migrations` passes."""

from __future__ import annotations

from alembic import context

from millpond.migrations import VERSION_TABLE
from millpond.statestore.catalog.engine import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
