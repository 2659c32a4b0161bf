"""``millpond sql``: SQL queries over a store, run by DuckDB."""

from __future__ import annotations

import csv
import sys
from typing import cast

import click
import duckdb

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_read, snapshot_to_read, store_argument, version_option
from millpond.cli.terminal.output import print_table
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.view import connect

_FORMATS = click.Choice(["table", "json", "csv"])


@click.command(
    cls=TeachingCommand,
    examples=(
        'millpond sql pond "show tables"',
        "millpond sql pond \"select key, state ->> 'count' from window_counter\"",
        'millpond sql pond "select count(*) from window_counter" --version 12',
        'millpond sql pond "select key, unnest(timers) from alarm" --json',
        'millpond sql pond "from dead_letters" --format csv > letters.csv',
        'millpond sql pond "select key, count(*) from record_ids.alarm group by key"',
    ),
)
@store_argument
@click.argument("query")
@version_option
@click.option("--format", "shape", type=_FORMATS, default="table", help="How to print the answer.")
@click.option("--json", "shape", flag_value="json", help="The same as --format json.")
def sql(store: str, query: str, storage_options: tuple[str, ...], version: str | None, shape: str) -> None:
    """Query STORE in SQL (DuckDB's dialect).

    Each computation is a table of that name with exactly one row per key: key, state, state_bytes,
    timers, hold, superstep, sequencer, commit_number, record_ids, productions (the undelivered ones). The
    tables record_ids.NAME and productions.NAME have one row per id and per production. All tables show the same version of the store, so
    joins are consistent. State is JSON text by default: state ->> 'field' extracts a field.
    Times are in UTC. Names with special characters go in double quotes.
    """
    with (
        open_to_read(store, storage_options) as opened,
        snapshot_to_read(opened, version) as snapshot,
        connect(snapshot, opened.objects) as connection,
    ):
        try:
            _answer(connection, query, shape)
        except duckdb.Error as error:
            raise _refusal(error, snapshot) from error


def _answer(connection: duckdb.DuckDBPyConnection, query: str, shape: str) -> None:
    # Statements without a result, such as `set`, return None, which the library's types omit.
    relation = cast(duckdb.DuckDBPyRelation | None, connection.sql(query))
    if relation is None:
        return
    if shape == "json":
        for (line,) in relation.project(f"to_json(struct_pack({_fields(relation)}))::varchar").fetchall():
            click.echo(line)
        return
    # As text, because Python's datetime does not cover the ends of time.
    rows = relation.project("columns(*)::varchar").fetchall()
    if shape == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(relation.columns)
        writer.writerows(rows)
    else:
        print_table("", relation.columns, rows)


def _fields(relation: duckdb.DuckDBPyRelation) -> str:
    quoted = (_quote(column) for column in relation.columns)
    return ", ".join(f"{column} := {column}" for column in quoted)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _refusal(error: duckdb.Error, snapshot: Snapshot) -> InvalidError:
    reason, _, more = str(error).strip().partition("\n")
    refused = InvalidError(
        f"the query was refused: {reason}", tables=", ".join(snapshot.computations) or "none has rows yet"
    )
    if more.strip():
        refused.add_note(more.strip("\n"))
    return refused
