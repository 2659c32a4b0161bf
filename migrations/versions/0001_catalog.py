"""The first revision of the catalog."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from millpond.statestore.errors import InvalidError

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    _create_topology()
    _create_positions()
    _create_journals()
    _create_pins()


def downgrade() -> None:
    """Refuse: an older release would not understand newer data."""
    raise InvalidError("the catalog is rebuilt from the log, not downgraded")


def _create_topology() -> None:
    op.create_table(
        "store",
        sa.Column("id", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("store_id", sa.Text()),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_store"),
    )
    op.create_table(
        "computations",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("code_version", sa.Integer(), nullable=False),
        sa.Column("code_hash", sa.Text(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.Column("retired_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("name", name="pk_computations"),
    )
    op.create_table(
        "code_versions",
        sa.Column("computation", sa.Text(), nullable=False),
        sa.Column("code_version", sa.Integer(), nullable=False),
        sa.Column("code_hash", sa.Text(), nullable=False),
        sa.Column("recorded_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("computation", "code_version", name="pk_code_versions"),
    )
    op.create_table(
        "streams",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("producers", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("pipeline", "name", name="pk_streams"),
    )
    op.create_table(
        "subscriptions",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("consumer", sa.Text(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("key_extractor", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("pipeline", "consumer", "stream", name="pk_subscriptions"),
    )


def _create_positions() -> None:
    op.create_table(
        "intervals",
        sa.Column("app_id", sa.Text(), nullable=False),
        sa.Column("computation", sa.Text(), nullable=False),
        sa.Column("low", sa.Text(), nullable=False),
        sa.Column("high", sa.Text()),
        sa.Column("sequencer", sa.BigInteger(), nullable=False),
        sa.Column("commit_number", sa.BigInteger(), nullable=False),
        sa.Column("opened_version", sa.BigInteger()),
        sa.Column("closed_version", sa.BigInteger()),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("input_watermark_us", sa.BigInteger()),
        sa.Column("output_watermark_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("app_id", name="pk_intervals"),
    )
    op.create_index("ix_intervals_computation", "intervals", ["computation"])
    op.create_table(
        "leases",
        sa.Column("app_id", sa.Text(), nullable=False),
        sa.Column("sequencer", sa.BigInteger(), nullable=False),
        sa.Column("opened_version", sa.BigInteger()),
        sa.Column("closed_version", sa.BigInteger()),
        sa.PrimaryKeyConstraint("app_id", "sequencer", name="pk_leases"),
    )
    op.create_table(
        "input_positions",
        sa.Column("app_id", sa.Text(), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("app_id", name="pk_input_positions"),
    )


def _create_journals() -> None:
    op.create_table(
        "watermarks",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("superstep", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("input_us", sa.BigInteger()),
        sa.Column("output_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("pipeline", "superstep", "subject", name="pk_watermarks"),
    )
    op.create_index("ix_watermarks_version", "watermarks", ["version"])
    op.create_table(
        "supersteps",
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("superstep", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("late", sa.BigInteger(), nullable=False),
        sa.Column("duplicates", sa.BigInteger(), nullable=False),
        sa.Column("dead_letters", sa.BigInteger(), nullable=False),
        sa.Column("commit_ms", sa.Float()),
        sa.Column("wall_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("pipeline", "superstep", name="pk_supersteps"),
    )
    op.create_index("ix_supersteps_version", "supersteps", ["version"])


def _create_pins() -> None:
    op.create_table(
        "savepoints",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("released_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("name", name="pk_savepoints"),
    )
    op.create_table(
        "horizons",
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("published_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger()),
        sa.PrimaryKeyConstraint("holder", name="pk_horizons"),
    )
