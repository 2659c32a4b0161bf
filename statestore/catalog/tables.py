"""The tables of the catalog, as SQLAlchemy needs them for queries.

A new catalog gets these tables, an old one the steps of the migrations; a test holds both ways
to the same schema. Data about commits is derived from the log
(`millpond.statestore.catalog.facts`), so every table except ``code_versions``,
``horizons`` and the operator's notes can be refilled after a loss.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

METADATA: Final = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s"}
)
"""All tables of the catalog; constraints have the same names on every database."""

STORE: Final = Table(
    "store",
    METADATA,
    Column("id", Integer, nullable=False, autoincrement=False),
    Column("store_id", Text),
    Column("created_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("id"),
)
"""One row: the store that the catalog belongs to, and the time of its creation."""

COMPUTATIONS: Final = Table(
    "computations",
    METADATA,
    Column("name", Text, nullable=False),
    Column("pipeline", Text, nullable=False),
    Column("code_version", Integer, nullable=False),
    Column("code_hash", Text, nullable=False),
    Column("codec", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("recorded_us", BigInteger, nullable=False),
    Column("retired_us", BigInteger),
    PrimaryKeyConstraint("name"),
)
"""Every computation that a pipeline has declared; ``options`` is a JSON object."""

CODE_VERSIONS: Final = Table(
    "code_versions",
    METADATA,
    Column("computation", Text, nullable=False),
    Column("code_version", Integer, nullable=False),
    Column("code_hash", Text, nullable=False),
    Column("recorded_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("computation", "code_version"),
)
"""The last code versions of each computation."""

STREAMS: Final = Table(
    "streams",
    METADATA,
    Column("pipeline", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("producers", Text, nullable=False),
    PrimaryKeyConstraint("pipeline", "name"),
)
"""The named edges of each pipeline; ``producers`` is a JSON list of names."""

SUBSCRIPTIONS: Final = Table(
    "subscriptions",
    METADATA,
    Column("pipeline", Text, nullable=False),
    Column("consumer", Text, nullable=False),
    Column("stream", Text, nullable=False),
    Column("key_extractor", Text, nullable=False),
    PrimaryKeyConstraint("pipeline", "consumer", "stream"),
)
"""Who reads which stream, and how it gets its key (MillWheel §4.2)."""

INTERVALS: Final = Table(
    "intervals",
    METADATA,
    Column("app_id", Text, nullable=False),
    Column("computation", Text, nullable=False),
    Column("low", Text, nullable=False),
    Column("high", Text),
    Column("sequencer", BigInteger, nullable=False),
    Column("commit_number", BigInteger, nullable=False),
    Column("opened_version", BigInteger),
    Column("closed_version", BigInteger),
    Column("version", BigInteger, nullable=False),
    Column("input_watermark_us", BigInteger),
    Column("output_watermark_us", BigInteger),
    PrimaryKeyConstraint("app_id"),
    Index("ix_intervals_computation", "computation"),
)
"""Every interval that was ever owned, with its owner's last commit and last watermarks."""

LEASES: Final = Table(
    "leases",
    METADATA,
    Column("app_id", Text, nullable=False),
    Column("sequencer", BigInteger, nullable=False),
    Column("opened_version", BigInteger),
    Column("closed_version", BigInteger),
    PrimaryKeyConstraint("app_id", "sequencer"),
)
"""The last owners of each interval, with the range of table versions that each one wrote."""

WATERMARKS: Final = Table(
    "watermarks",
    METADATA,
    Column("pipeline", Text, nullable=False),
    Column("superstep", BigInteger, nullable=False),
    Column("subject", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("input_us", BigInteger),
    Column("output_us", BigInteger),
    PrimaryKeyConstraint("pipeline", "superstep", "subject"),
    Index("ix_watermarks_version", "version"),
)
"""Journal of low watermarks; a subject is the app id of an interval, computation or injector."""

INPUT_POSITIONS: Final = Table(
    "input_positions",
    METADATA,
    Column("app_id", Text, nullable=False),
    Column("pipeline", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("source_id", Text, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    PrimaryKeyConstraint("app_id"),
)
"""The consumed position of each external source."""

SAVEPOINTS: Final = Table(
    "savepoints",
    METADATA,
    Column("name", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("note", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("released_us", BigInteger),
    PrimaryKeyConstraint("name"),
)
"""Named table versions that garbage collection keeps."""

HORIZONS: Final = Table(
    "horizons",
    METADATA,
    Column("holder", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("published_us", BigInteger, nullable=False),
    Column("expires_us", BigInteger),
    PrimaryKeyConstraint("holder"),
)
"""Versions that readers still need, and versions that collectors leave readable (architecture, section 9)."""

SUPERSTEPS: Final = Table(
    "supersteps",
    METADATA,
    Column("pipeline", Text, nullable=False),
    Column("superstep", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("records", BigInteger, nullable=False),
    Column("late", BigInteger, nullable=False),
    Column("duplicates", BigInteger, nullable=False),
    Column("dead_letters", BigInteger, nullable=False),
    Column("commit_ms", Float),
    Column("wall_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("pipeline", "superstep"),
    Index("ix_supersteps_version", "version"),
)
"""Journal of supersteps."""
