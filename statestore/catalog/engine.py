"""The catalog's database: connections, transactions, tables, and translation of errors.

SQLite gets write-ahead logging and a busy timeout, so that readers never wait and two writers wait for each other. Every
writing transaction takes the write lock at its start, so that none fails half way for lack of it; on PostgreSQL that is
an advisory lock. Other databases run with their defaults.

A process that is stopped inside a transaction holds SQLite's lock until it continues or ends, so the catalog then goes
on in a further file: ``catalog.sqlite.2``. Only the newest one counts.

A new catalog gets the tables below, an old one the steps of the migrations; a test compares both.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import LRUCache

from millpond.statestore.errors import DataError, InternalError, InvalidError, UnavailableError
from millpond.statestore.objects.system_files import ForeignFileError, SystemFiles, is_file
from millpond.statestore.types import Clock

_WRITES: Final = "millpond_writes"
_WRITE_LOCK: Final = 0x63617461  # "cata"
_BUSY_TIMEOUT_MS: Final = 30_000
_SQLITE_ARGUMENTS: Final[dict[str, Any]] = {"check_same_thread": False, "timeout": _BUSY_TIMEOUT_MS / 1_000}
# SQLite's own files next to a database, which it opens and deletes by name.
_COMPANIONS: Final = ("-wal", "-shm", "-journal")
# A rollback journal that ends with it names a "super-journal", any file at all, which SQLite then deletes. Only a
# transaction over several databases, which we never make, writes one.
_SUPER_JOURNAL: Final = bytes.fromhex("d9d505f920a163d7")
# Bounds for a database that somebody else may have made: of a value, and of the steps of a transaction. A thousandth of
# each is enough for a catalog.
_VALUE_BYTES_MAX: Final = 1 << 26
_STEPS_AT_ONCE: Final = 1_000_000
_STEPS_MAX: Final = 200
_COLUMN: Final = r'"?\w+"?(?: (?:BIGINT|FLOAT|INTEGER|TEXT|VARCHAR\(\d+\)))?(?: NOT NULL)?'
_KEY: Final = r'(?:CONSTRAINT "?\w+"? )?PRIMARY KEY \([\w", ]+\)'
# The statements that have made the tables and indexes of every version.
_PLAIN: Final = re.compile(
    rf'CREATE TABLE "?\w+"? \(\s*(?:{_KEY}|{_COLUMN})(?:,\s*(?:{_KEY}|{_COLUMN}))*\s*\)'
    r'|CREATE INDEX "?\w+"? ON "?\w+"? \([\w", ]+\)'
)
_OWN_PREFIX: Final = "millpond_"
_REMOVE_IT: Final = "remove it, and it is rebuilt from the log"
_WAL_ATTEMPTS: Final = 250
_WAL_PAUSE_MS: Final = 20
FILES_MAX: Final = 16
"""The most files of a catalog; each but the last was held by a process that stood still."""

_COMPILED_MAX: Final = 500
_COMPILED: Final[LRUCache[Any, Any]] = LRUCache(_COMPILED_MAX)
_ALIKE: Final = "sqlite.alike"
_DRIVERS: Final = ("sqlite", "sqlite+pysqlite")


class AlikeSQLite(SQLiteDialect_pysqlite):
    """SQLAlchemy's dialect for SQLite, with all instances equal, since they compile a statement alike.

    SQLAlchemy caches compiled statements by dialect, and each engine makes a dialect. Compiling the statements of a start
    again for each store took a quarter of the processor time of a small run.
    """

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


registry.register(_ALIKE, __name__, AlikeSQLite.__name__)


class HeldError(UnavailableError):
    """Another process holds a SQLite file's lock for far longer than any transaction takes."""


def default_catalog_url(folder: str) -> str:
    """Return the default URL of the catalog of a store in ``folder``.

    Example:
        >>> default_catalog_url("/data/pond")
        'sqlite:////data/pond/catalog.sqlite'
    """
    path = str(Path(folder).absolute() / "catalog.sqlite")
    return sa.URL.create("sqlite", database=path).render_as_string(hide_password=False)


def file_url(url: str, number: int) -> str:
    """Return the URL of a catalog's file: those after the first have their number in the name.

    Example:
        >>> [file_url("sqlite:////data/pond/catalog.sqlite", number) for number in (1, 2)]
        ['sqlite:////data/pond/catalog.sqlite', 'sqlite:////data/pond/catalog.sqlite.2']
    """
    if number == 1:
        return url
    parsed = _parsed(url)
    return parsed.set(database=f"{parsed.database}.{number}").render_as_string(hide_password=False)


def newest_file(url: str) -> int:
    """Return the number of a catalog's newest file; 1 for any other database."""
    parsed, number = _parsed(url), 1
    while _has_files(parsed) and number < FILES_MAX and Path(f"{parsed.database}.{number + 1}").exists():
        number += 1
    return number


def connect(url: str, clock: Clock, *, create: bool) -> sa.Engine:
    """Connect to a database and check that it answers; ``create`` makes a missing SQLite file, and opens it for writing."""
    parsed = _parsed(url)
    try:
        engine = _sqlite_engine(parsed, create=create) if _is_sqlite(parsed) else sa.create_engine(parsed)
    except (exc.ArgumentError, ImportError) as error:
        raise InvalidError("the catalog's database cannot be used", url=_without_password(parsed)) from error
    try:
        _check_connection(engine, clock, create=create)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Begin a transaction that sees one state of the catalog."""
    with _translated(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Begin a transaction that holds the write lock from its first statement."""
    with (
        _translated(engine),
        engine.connect().execution_options(**{_WRITES: True}) as connection,
        connection.begin(),
    ):
        if connection.dialect.name == "postgresql":
            # Two writers that find the same row missing would both insert it.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITE_LOCK)))
        yield connection


def replace_row(connection: sa.Connection, table: sa.Table, row: Mapping[str, object]) -> None:
    """Insert a row, and replace one with the same primary key; works on every database."""
    same_key = [column == row[column.name] for column in table.primary_key.columns]
    connection.execute(table.delete().where(*same_key))
    connection.execute(table.insert(), dict(row))


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        # Without the cause, which may quote the URL.
        raise InvalidError(
            "the catalog must be a database URL, such as postgresql+psycopg://host/db"
        ) from None
    if "@" in (parsed.host or ""):
        # The driver would take the end of the password for the host, and show it.
        raise InvalidError("a catalog's URL must have at most one @: write %40 for one in the password")
    return parsed


def _without_password(url: sa.URL) -> str:
    shown = url.set(drivername=url.get_backend_name()) if _is_sqlite(url) else url
    return shown.render_as_string(hide_password=True)


def _is_sqlite(url: sa.URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _has_files(url: sa.URL) -> bool:
    return _is_sqlite(url) and url.database not in (None, "", ":memory:")


def _sqlite_engine(url: sa.URL, *, create: bool) -> sa.Engine:
    in_memory = not _has_files(url)
    options: dict[str, Any] = {"poolclass": QueuePool}
    if in_memory:
        # With a single connection all threads share one in-memory database.
        options |= {"pool_size": 1, "max_overflow": 0}
    else:
        _check_files(str(url.database))
    if create or in_memory:
        options["connect_args"] = _SQLITE_ARGUMENTS
    else:
        read_only = Path(str(url.database)).absolute().as_uri() + "?mode=ro"
        options["creator"] = lambda: sqlite3.connect(read_only, uri=True, **_SQLITE_ARGUMENTS)
    if url.drivername in _DRIVERS:
        url = url.set(drivername=_ALIKE.replace(".", "+"))
        options["execution_options"] = {"compiled_cache": _COMPILED}
    engine = sa.create_engine(url, **options)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_files(database: str) -> None:
    """Refuse files that would lead SQLite out of the store's folder."""
    try:
        for suffix in ("", *_COMPANIONS):
            is_file(database + suffix)
        path = Path(database).absolute()
        tail = SystemFiles(str(path.parent)).read_tail(f"{path}-journal", len(_SUPER_JOURNAL)).data
        if tail == _SUPER_JOURNAL:
            raise DataError(f"the catalog's journal names another file: {_REMOVE_IT}", path=database)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ForeignFileError as error:
        raise DataError(
            f"the catalog must be a file, not a link, folder, FIFO or device: {_REMOVE_IT}",
            path=error.filename,
        ) from error


def _prepare_sqlite(dbapi_connection: Any, _record: object) -> None:
    # Keep the driver from beginning transactions, because _begin_sqlite does.
    dbapi_connection.isolation_level = None
    # Whoever made the file may have put code into its schema.
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = NORMAL"):
        dbapi_connection.execute(f"PRAGMA {setting}")
    dbapi_connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES_MAX)


def _begin_sqlite(connection: sa.Connection) -> None:
    _bound_steps(connection.connection.dbapi_connection)
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _bound_steps(raw: Any) -> None:
    """Interrupt the transaction that begins now when it takes far more steps than any of ours."""
    left = iter(range(_STEPS_MAX))
    raw.set_progress_handler(lambda: next(left, None) is None, _STEPS_AT_ONCE)


def _check_connection(engine: sa.Engine, clock: Clock, *, create: bool) -> None:
    with _translated(engine), engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            raw: Any = connection.connection.dbapi_connection
            if create:
                _use_write_ahead_log(raw, clock)
            # A trigger, a view or an expression would run whatever its maker chose.
            _bound_steps(raw)
            for table, name, text in raw.execute("SELECT tbl_name, name, sql FROM sqlite_master"):
                is_ours = table.lower() in METADATA.tables or table.lower().startswith(_OWN_PREFIX)
                if is_ours and text is not None and not _PLAIN.fullmatch(text):
                    raise DataError(
                        f"the catalog must have plain tables and indexes only: {_REMOVE_IT}",
                        url=_without_password(engine.url),
                        name=name,
                    )


def _use_write_ahead_log(raw: Any, clock: Clock) -> None:
    # SQLite does not always honour its busy timeout for this statement, so wait here.
    raw.execute("PRAGMA busy_timeout = 0")
    for attempt in range(1, _WAL_ATTEMPTS + 1):
        try:
            raw.execute("PRAGMA journal_mode = WAL").fetchall()
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise UnavailableError("the catalog is busy", attempts=attempt) from error
            if attempt == _WAL_ATTEMPTS:
                raise HeldError("the catalog is busy", attempts=attempt) from error
            clock.sleep_ms(_WAL_PAUSE_MS)
    raw.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")


@contextmanager
def _translated(engine: sa.Engine) -> Iterator[None]:
    unavailable = (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, sqlite3.OperationalError)
    try:
        yield
    except UnicodeDecodeError as error:
        # SQLite quotes what it has read in its own errors, and the driver cannot decode that.
        raise DataError(f"the catalog is damaged: {_REMOVE_IT}", url=_without_password(engine.url)) from error
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        url = _without_password(engine.url)
        if "interrupted" in str(error):
            raise DataError(f"the catalog takes too long to read: {_REMOVE_IT}", url=url) from error
        if "database is locked" in str(error):
            raise HeldError("the catalog's lock is held by another process", url=url) from error
        if isinstance(error, unavailable):
            raise UnavailableError("the catalog does not answer", url=url) from error
        if type(error) in {exc.DatabaseError, sqlite3.DatabaseError}:
            raise DataError(f"the catalog is damaged: {_REMOVE_IT}", url=url) from error
        raise InternalError("the catalog refused a statement", url=url) from error


METADATA: Final = sa.MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(table_name)s_%(column_0_name)s"}
)
"""All tables of the catalog; constraints have the same names on every database."""


def _texts(*names: str, nullable: bool = False) -> Iterator[sa.Column[str]]:
    return (sa.Column(name, sa.Text, nullable=nullable) for name in names)


def _numbers(*names: str, nullable: bool = False) -> Iterator[sa.Column[int]]:
    return (sa.Column(name, sa.BigInteger, nullable=nullable) for name in names)


def _table(
    name: str, key: tuple[str, ...], *columns: Iterable[sa.Column[Any]], index: str | None = None
) -> sa.Table:
    indexes = [] if index is None else [sa.Index(f"ix_{name}_{index}", index)]
    return sa.Table(name, METADATA, *chain(*columns), sa.PrimaryKeyConstraint(*key), *indexes)


STORE: Final = _table(
    "store",
    ("id",),
    [sa.Column("id", sa.Integer, nullable=False, autoincrement=False)],
    _texts("store_id", nullable=True),
    _numbers("created_us"),
)
"""One row: the store that the catalog belongs to, and the time of its creation."""

COMPUTATIONS: Final = _table(
    "computations",
    ("name",),
    _texts("name", "pipeline"),
    [sa.Column("code_version", sa.Integer, nullable=False)],
    _texts("code_hash", "codec", "options"),
    _numbers("recorded_us"),
    _numbers("retired_us", nullable=True),
)
"""Every computation that a pipeline has declared; ``options`` is a JSON object."""

CODE_VERSIONS: Final = _table(
    "code_versions",
    ("computation", "code_version"),
    _texts("computation"),
    [sa.Column("code_version", sa.Integer, nullable=False)],
    _texts("code_hash"),
    _numbers("recorded_us"),
)
"""The last code versions of each computation."""

HORIZONS: Final = _table(
    "horizons",
    ("holder",),
    _texts("holder", "kind"),
    _numbers("version", "published_us"),
    _numbers("expires_us", nullable=True),
)
"""Versions that readers need, and versions that collectors leave readable (architecture, section 9)."""

# Tables that only earlier versions fill, so that either version opens the other's catalog.
_table("streams", ("pipeline", "name"), _texts("pipeline", "name", "producers"))
_table(
    "subscriptions",
    ("pipeline", "consumer", "stream"),
    _texts("pipeline", "consumer", "stream", "key_extractor"),
)
_table(
    "intervals",
    ("app_id",),
    _texts("app_id", "computation", "low"),
    _texts("high", nullable=True),
    _numbers("sequencer", "commit_number"),
    _numbers("opened_version", "closed_version", nullable=True),
    _numbers("version"),
    _numbers("input_watermark_us", "output_watermark_us", nullable=True),
    index="computation",
)
_table(
    "leases",
    ("app_id", "sequencer"),
    _texts("app_id"),
    _numbers("sequencer"),
    _numbers("opened_version", "closed_version", nullable=True),
)
_table(
    "watermarks",
    ("pipeline", "superstep", "subject"),
    _texts("pipeline"),
    _numbers("superstep"),
    _texts("subject"),
    _numbers("version"),
    _numbers("input_us", "output_us", nullable=True),
    index="version",
)
_table(
    "input_positions",
    ("app_id",),
    _texts("app_id", "pipeline", "input", "source_id"),
    _numbers("position", "version"),
)
_table(
    "savepoints",
    ("name",),
    _texts("name"),
    _numbers("version"),
    _texts("note"),
    _numbers("created_us"),
    _numbers("released_us", nullable=True),
)
_table(
    "supersteps",
    ("pipeline", "superstep"),
    _texts("pipeline"),
    _numbers("superstep", "version", "records", "late", "duplicates", "dead_letters"),
    [sa.Column("commit_ms", sa.Float)],
    _numbers("wall_us"),
    index="version",
)
