"""``millpond diff``: the differences between two stores, such as a replay and its original."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.opening import StoreAt, store_argument, version_in
from millpond.cli.terminal.options import json_option, number, option, several
from millpond.cli.terminal.output import note, print_json, print_rows, print_table
from millpond.cli.terminal.queries import allow_files_option, told_of_query
from millpond.executor.replay.difference import StoreDifference, compare_stores
from millpond.statestore.errors import MillpondError
from millpond.statestore.store import Store

_LIMIT: Final = 20
_DIFFERENT: Final = 1
_TROUBLE: Final = 3


@command(
    "millpond fork pond as_it_was",
    "millpond diff as_it_was pond",
    Example(
        "millpond diff pond_of_today pond --version 3 --computation window_counter", exit_code=_DIFFERENT
    ),
    Example(
        'millpond diff pond_of_today pond --version 3 --sql "select kind, count(*) from rows group by kind"',
        exit_code=_DIFFERENT,
    ),
    exit_codes={
        0: "no difference",
        _DIFFERENT: "they differ",
        _TROUBLE: "an error, of a store, the data or a service",
    },
)
@click.argument("new")
@store_argument
@option(
    "--version=N|NAME",
    "The version of STORE: its number, or a savepoint. By default the one that a replay went up to, or the newest.",
)
@option("--new-version=N|NAME", "The version of NEW; the newest by default.")
@several("--computation=NAME computations", "Only this one, and no sinks; may be repeated.")
@number("--limit", "Show so many rows of each.", _LIMIT, least=0)
@option("--sql=QUERY query", "Query the differences instead: the tables rows and sink_rows.")
@allow_files_option
@json_option("One JSON object: counts, then a line for each row that differs.")
def diff(
    new: str,
    store: StoreAt,
    version: str | None,
    new_version: str | None,
    computations: tuple[str, ...],
    limit: int,
    query: str | None,
    *,
    allow_files: bool,
    as_json: bool,
) -> None:
    """Compare the keys, states and timers of NEW and STORE, and of a replay its sinks as well.

    Each row that differs is in both stores (changed), in NEW alone (added) or in STORE alone (missing).
    With --sql the table rows has computation, key, kind, parts, state, other_state, timers and other_timers, where
    other is STORE's; sink_rows has sink, kind and row.
    """
    try:
        with StoreAt(new, store.storage_options).to_read() as one, store.to_read() as other:
            difference = compare_stores(
                one,
                other,
                version=_version(one, new_version),
                other_version=_version(other, version),
                computations=computations or None,
            )
    except MillpondError as error:
        # Another code than for a difference, so that a script does not mistake an error for one.
        note(f"Error: {error}")
        raise SystemExit(_TROUBLE) from error
    if query is not None:
        with told_of_query(("rows", "sink_rows")):
            connection = difference.to_duckdb(allow_files=allow_files).execute(query)
            names = [name for name, *_ in connection.description or ()]
            rows = [tuple(row) for row in connection.fetchall()]
        print_rows((dict(zip(names, row, strict=True)) for row in rows), names, rows, as_json=as_json)
    elif as_json:
        counts = {
            "equal": difference.is_empty,
            "version": difference.version,
            "other_version": difference.other_version,
            "computations": [asdict(part) for part in difference.computations],
            "sinks": [asdict(part) for part in difference.sinks],
        }
        print_json([counts])
        print_json(difference.rows.slice(0, limit).to_pylist())
        print_json(difference.sink_rows.slice(0, limit).to_pylist())
    else:
        _print(difference, limit)
    raise SystemExit(0 if difference.is_empty else _DIFFERENT)


def _version(store: Store, named: str | None) -> int | None:
    return None if named is None else version_in(store.savepoints(), named)


def _print(difference: StoreDifference, limit: int) -> None:
    cells = [("computation", *asdict(part).values()) for part in difference.computations]
    cells += [("sink", *asdict(part).values()) for part in difference.sinks]
    print_table("", ("", "name", "equal", "changed", "added", "missing"), cells)
    if difference.rows.num_rows:
        shown = difference.rows.slice(0, limit).to_pylist()
        print_table(
            _title("rows", difference.rows.num_rows, limit),
            ("computation", "key", "", "state", "other state", "timers", "other timers"),
            [
                (
                    row["computation"], row["key"], row["parts"] or row["kind"], row["state"], row["other_state"],
                    *((row["timers"], row["other_timers"]) if "timers" in row["parts"] else (None, None)),
                )
                for row in shown
            ],
        )  # fmt: skip
    if difference.sink_rows.num_rows:
        shown = difference.sink_rows.slice(0, limit).to_pylist()
        print_table(
            _title("sink rows", difference.sink_rows.num_rows, limit),
            ("sink", "", "row"),
            [(row["sink"], row["kind"], row["row"]) for row in shown],
        )
    if difference.is_empty:
        click.echo("no difference")


def _title(what: str, count: int, limit: int) -> str:
    return f"{what}, the first {limit:,} of {count:,}" if count > limit else what
