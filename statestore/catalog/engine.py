"""The catalog's database: connections, transactions, and translation of its errors.

SQLite gets write-ahead logging and a busy timeout, so that readers never wait and two
writers wait for each other; every writing transaction takes the write lock at its start,
so none fails half way for lack of it. On PostgreSQL that lock is an advisory one. Other
databases run with their defaults.

The tables of the catalog, as SQLAlchemy needs them for queries.

A new catalog gets these tables, an old one the steps of the migrations; a test holds both ways
to the same schema. Data about commits is derived from the log
(`millpond.statestore.catalog.entries`), so every table except ``code_versions``,
``horizons`` and the operator's notes can be refilled after a loss.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    bindparam,
    create_engine,
    event,
    exc,
    func,
    make_url,
    select,
)
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import URL
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import LRUCache

from millpond.statestore.errors import DataError, InternalError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.types import Clock

_WRITES: Final = "millpond_writes"
_WRITE_LOCK: Final = 0x63617461  # "cata"
_BUSY_TIMEOUT_MS: Final = 30_000
_SQLITE_ARGUMENTS: Final[dict[str, Any]] = {"check_same_thread": False, "timeout": _BUSY_TIMEOUT_MS / 1_000}
_WAL_ATTEMPTS: Final = 250
_WAL_PAUSE_MS: Final = 20
_COMPILED_MAX: Final = 500
_COMPILED: Final[LRUCache[Any, Any]] = LRUCache(_COMPILED_MAX)
_ALIKE: Final = "sqlite.alike"
_DRIVERS: Final = ("sqlite", "sqlite+pysqlite")


class AlikeSQLite(SQLiteDialect_pysqlite):
    """SQLAlchemy's dialect for SQLite, all of whose instances are equal, since they compile a statement alike.

    What is compiled is kept by dialect, and each engine makes its own. A store's catalog is an engine, and to compile
    the statements of a run's start again for each was a quarter of the processor time of a small run.
    """

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        """Whether it is one of these."""
        return type(other) is type(self)

    def __hash__(self) -> int:
        """That of all of these."""
        return hash(type(self))


registry.register(_ALIKE, __name__, AlikeSQLite.__name__)


def default_catalog_url(folder: str) -> str:
    """The default URL of the catalog of a store in ``folder``.

    Example:
        >>> default_catalog_url("/data/pond")
        'sqlite:////data/pond/catalog.sqlite'
    """
    path = str(Path(folder).absolute() / "catalog.sqlite")
    return URL.create("sqlite", database=path).render_as_string(hide_password=False)


def connect(url: str, clock: Clock, *, create: bool) -> Engine:
    """An engine on a database that answers.

    Args:
        url: any SQLAlchemy URL.
        clock: waits between attempts.
        create: whether to create a missing SQLite file, and to open it for writing.

    Raises:
        InvalidError: not a URL, or its driver is not installed.
        UnavailableError: the database does not answer.
    """
    parsed = _parsed(url)
    try:
        engine = _sqlite_engine(parsed, create=create) if _is_sqlite(parsed) else create_engine(parsed)
    except (exc.ArgumentError, ImportError) as error:
        raise InvalidError("the catalog's database cannot be used", url=_without_password(parsed)) from error
    try:
        _check_connection(engine, clock, create=create)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that sees one state of the catalog."""
    with _translated(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that holds the write lock from its first statement."""
    with (
        _translated(engine),
        engine.connect().execution_options(**{_WRITES: True}) as connection,
        connection.begin(),
    ):
        if connection.dialect.name == "postgresql":
            # Two writers that find the same row missing would both insert it.
            connection.execute(select(func.pg_advisory_xact_lock(_WRITE_LOCK)))
        yield connection


def replace_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows, replacing those with the same primary key; works on every database."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key.columns]
    same_key = [table.c[name] == bindparam(f"old_{name}") for name in keys]
    connection.execute(
        table.delete().where(*same_key), [{f"old_{name}": row[name] for name in keys} for row in rows]
    )
    connection.execute(table.insert(), [dict(row) for row in rows])


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except exc.ArgumentError as error:
        raise InvalidError("not a database URL") from error


def _without_password(url: URL) -> str:
    shown = url.set(drivername=url.get_backend_name()) if _is_sqlite(url) else url
    return shown.render_as_string(hide_password=True)


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _sqlite_engine(url: URL, *, create: bool) -> Engine:
    in_memory = url.database in (None, "", ":memory:")
    options: dict[str, Any] = {"poolclass": QueuePool}
    if in_memory:
        # With a single connection all threads share one in-memory database.
        options |= {"pool_size": 1, "max_overflow": 0}
    if create or in_memory:
        options["connect_args"] = _SQLITE_ARGUMENTS
    else:
        read_only = Path(str(url.database)).absolute().as_uri() + "?mode=ro"
        options["creator"] = lambda: sqlite3.connect(read_only, uri=True, **_SQLITE_ARGUMENTS)
    if url.drivername in _DRIVERS:
        url = url.set(drivername=_ALIKE.replace(".", "+"))
        options["execution_options"] = {"compiled_cache": _COMPILED}
    engine = create_engine(url, **options)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(dbapi_connection: Any, _record: object) -> None:
    # The driver must not begin transactions of its own; _begin_sqlite does.
    dbapi_connection.isolation_level = None
    dbapi_connection.execute("PRAGMA synchronous = NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_connection(engine: Engine, clock: Clock, *, create: bool) -> None:
    with _translated(engine), engine.connect() as connection:
        if engine.dialect.name == "sqlite" and create:
            _use_write_ahead_log(connection.connection.dbapi_connection, clock)


def _use_write_ahead_log(raw: Any, clock: Clock) -> None:
    # SQLite does not always honour its busy timeout for this statement, so wait here.
    raw.execute("PRAGMA busy_timeout = 0")
    for attempt in range(1, _WAL_ATTEMPTS + 1):
        try:
            raw.execute("PRAGMA journal_mode = WAL").fetchall()
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or attempt == _WAL_ATTEMPTS:
                raise UnavailableError("the catalog is busy", attempts=attempt) from error
            clock.sleep_ms(_WAL_PAUSE_MS)
    raw.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        raise _to_millpond_error(error, _without_password(engine.url)) from error


def _to_millpond_error(error: Exception, url: str) -> MillpondError:
    unavailable = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, sqlite3.OperationalError)
    if isinstance(error, unavailable):
        return UnavailableError("the catalog does not answer", url=url)
    if type(error) in {exc.DatabaseError, sqlite3.DatabaseError}:
        return DataError("the catalog is damaged: remove it, and it is rebuilt from the log", url=url)
    return InternalError("the catalog refused a statement", url=url)


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
