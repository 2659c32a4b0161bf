"""The catalog's database: connections, transactions, and translation of its errors.

SQLite gets write-ahead logging and a busy timeout, so that readers never wait and two
writers wait for each other; every writing transaction takes the write lock at its start,
so none fails half way for lack of it. On PostgreSQL that lock is an advisory one. Other
databases run with their defaults.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, Table, bindparam, create_engine, event, exc, func, make_url, select
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
