"""The PostgreSQL server of the tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from millpond.statestore.errors import UnavailableError
from millpond.statestore.system import SystemClock
from tests.servers.postgresql import PostgreSQL, find_programs


def asked(url: str, statement: str) -> list[str]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return [str(row[0]) for row in connection.execute(text(statement))]


def test_programs_are_found() -> None:
    assert all(os.access(find_programs() / name, os.X_OK) for name in ("initdb", "postgres"))


def test_each_database_is_empty(postgresql: PostgreSQL) -> None:
    first, second = postgresql.make_database("first"), postgresql.make_database("second")
    with create_engine(first, poolclass=NullPool).begin() as connection:
        connection.execute(text("CREATE TABLE facts (number integer)"))
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"

    assert asked(first, tables) == ["facts"]
    assert asked(second, tables) == []


def test_server_listens_on_no_port(postgresql: PostgreSQL) -> None:
    """Only this machine reaches it, through its socket."""
    assert asked(postgresql.url("postgres"), "SHOW listen_addresses") == [""]


def test_server_ends_with_its_context() -> None:
    """A client is still connected."""
    with PostgreSQL(SystemClock()) as server:
        process_id, url = server.process_id, make_url(server.url("postgres"))
        engine = create_engine(url)
        connection = engine.connect()

        assert connection.execute(text("SELECT 1")).scalar() == 1
    connection.invalidate()
    connection.close()
    engine.dispose()

    assert process_id is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert not Path(str(url.query["host"])).exists()
    assert server.process_id is None


def test_failed_start_raises_with_output() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Root's server runs as another user, who must reach the program.
        Path(folder).chmod(0o755)
        program = Path(folder) / "initdb"
        program.write_text("#!/bin/sh\necho no room for a cluster\nexit 1\n")
        program.chmod(0o755)
        server = PostgreSQL(SystemClock(), Path(folder))

        with pytest.raises(UnavailableError, match="initdb") as refused:
            server.start()
    assert refused.value.__notes__ == ["no room for a cluster\n"]
    assert server.process_id is None
