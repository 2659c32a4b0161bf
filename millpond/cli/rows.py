"""``millpond rows`` and ``sql``: the rows of a store, by computation or by query."""

from __future__ import annotations

import base64
import csv
import datetime as dt
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any, Final, cast

import click
import duckdb
import pyarrow as pa

from millpond.cli.completion import complete_computation
from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.opening import StoreAt, check_computation, store_argument, version_option
from millpond.cli.terminal.options import json_option, number, option, several
from millpond.cli.terminal.output import note, print_json, print_table, time_text
from millpond.cli.terminal.queries import allow_files_option, told_of_query
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import is_typed
from millpond.statestore.view import RowsView, connect
from millpond.statestore.visible import visible, visible_json

_TABLE_ROWS: Final = 100
_COLUMNS: Final = ("timers", "hold", "superstep")
_STRING_OR_NUMBER: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_NO_NUMBERS: Final = {"NaN": '"nan"', "Infinity": '"inf"', "-Infinity": '"-inf"'}
_EXTRAS: Final = {"record_ids": "ids", "productions": "undelivered"}


@command(
    "millpond rows pond window_counter",
    "millpond rows pond window_counter --key EWR --key JFK",
    "millpond rows pond window_counter --key EWR --version 12",
    Example(
        """millpond rows pond cards --key '["no", 4711]'""",
        not_run="a computation whose keys are made of a text and a number",
    ),
    "millpond rows pond window_counter --json | jq .state.count",
)
@store_argument
@click.argument("computation", shell_complete=complete_computation)
@several("--key=K keys", "Only this key's row; may be repeated. A typed key is a JSON list of its values.")
@version_option
@json_option("One JSON object per line, with every field.")
@number("--limit", "At most N rows; 0 for all.", least=0)
def rows(
    store: StoreAt,
    computation: str,
    keys: tuple[str, ...],
    version: str | None,
    limit: int | None,
    *,
    as_json: bool,
) -> None:
    """Show the rows of COMPUTATION in STORE: one per key, sorted by key.

    A row has the key's state as the computation's codec wrote it (JSON by default), its pending timers,
    the time at which it holds the watermark back (hold), and the superstep that last changed it. Where code
    has declared a state_version, the row has the version of its state. It also has the ids of records that it has
    consumed, and productions that wait for their delivery: the table counts them, --json shows them. A key may have
    nothing else.
    Where keys are made of columns of other types, or of several, the table shows their values in place of the key, and
    --json both. --key takes them as a JSON list, or the text of the key. The same applies to states with declared
    columns, such as the state variables of a processor of Spark.
    With --key only files that can hold the key are read, and each of those is read whole.
    A table shows the first 100 rows by default; --json shows all rows.
    """
    with store.reading(version) as (opened, snapshot):
        check_computation(snapshot, computation)
        view = RowsView.of(snapshot, opened.objects, computation)
        texts = [_key_text(view, key) for key in keys]
        table = view.to_arrow(texts or None, whole=True)
    bound = limit if limit is not None else (0 if as_json else _TABLE_ROWS)
    shown = table.slice(0, bound) if bound else table
    if as_json:
        print_json(_json_row(row) for row in _rows(shown, view))
    else:
        title = f"{computation} at version {snapshot.version}"
        listed = list(_rows(shown, view))
        extras = [name for name in _EXTRAS if any(row[name] for row in listed)]
        # Shown only where there are any, because most computations declare no version.
        numbers = ["state_version"] if any(row["state_version"] for row in listed) else []
        typed = {
            source: [column.field.name for column in view.shown if column.source == source]
            for source in ("key", "state")
        }
        columns = (*(typed["key"] or ["key"]), *(typed["state"] or ["state"]), *_COLUMNS, *numbers)
        cells = (
            (*_cells(row, **typed), *(row[name] for name in numbers), *(len(row[name]) for name in extras))
            for row in listed
        )
        print_table(title, (*columns, *(_EXTRAS[name] for name in extras)), cells)
    if shown.num_rows < table.num_rows:
        note(f"{table.num_rows - shown.num_rows:,} more rows; --limit 0 shows all")


def _key_text(view: RowsView, given: str) -> str:
    """Return the stored text of a key, which may be given as a JSON list, or as its only value, where keys are typed."""
    if not view.key_columns or is_typed(given):
        return given
    try:
        values = json.loads(given, parse_float=str) if given.startswith("[") else [given]
    except ValueError as cause:
        raise InvalidError(
            "the key is no JSON list", key=given, columns=[column.name for column in view.key_columns]
        ) from cause
    return view.key_of(values)


def _rows(table: pa.Table, view: RowsView) -> Iterator[dict[str, Any]]:
    typed = [column.field for column in view.shown]
    texts = [
        [_value_text(value, field.type) for value in table.column(field.name).to_pylist()] for field in typed
    ]
    names = [field.name for field in typed]
    table = table.drop_columns(names)
    # Times as numbers, because Python's datetime does not cover the ends of time.
    columns = [column.cast(_with_numbers(column.type)) for column in table.columns]
    rows = pa.table(columns, names=table.column_names).to_pylist()
    for place, row in enumerate(rows):
        lists = {
            name: [
                {part: time_text(value) if part.endswith("at") else value for part, value in each.items()}
                for each in row[name]
            ]
            for name in ("timers", *_EXTRAS)
        }
        values = {name: column[place] for name, column in zip(names, texts, strict=True)}
        yield {"key": row.pop("key"), **values, **row, **lists, "hold": time_text(row["hold"])}


def _value_text(value: Any, kind: pa.DataType) -> Any:
    """Convert a value of a typed column for JSON: types that JSON lacks become text, maps without text keys pairs."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value_text(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_value_text(one, kind.value_type) for one in value]
    if pa.types.is_map(kind):
        pairs = [(_value_text(key, kind.key_type), _value_text(one, kind.item_type)) for key, one in value]
        return dict(pairs) if pa.types.is_string(kind.key_type) else pairs
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, dt.date):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _with_numbers(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.int64()
    if pa.types.is_list(type_):
        return pa.list_(_with_numbers(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_with_numbers(field.type)) for field in type_])
    return type_


def _json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    ids = [{**each, **_id_texts(each["id"])} for each in row["record_ids"]]
    productions = [
        {**each, "value": _decoded(each["value"]), "value_bytes": _base64(each["value_bytes"])}
        for each in row["productions"]
    ]
    state = {"state": _decoded(row["state"]), "state_bytes": _base64(row["state_bytes"])}
    return {**row, **state, "record_ids": ids, "productions": productions}


def _id_texts(id_: bytes) -> dict[str, str | None]:
    try:
        return {"id": id_.decode(), "id_bytes": None}
    except UnicodeDecodeError:
        return {"id": None, "id_bytes": _base64(id_)}


def _decoded(state: str | None) -> object:
    try:
        return None if state is None else json.loads(state)
    except (ValueError, RecursionError):
        return state


def _base64(state_bytes: bytes | None) -> str | None:
    return None if state_bytes is None else base64.b64encode(state_bytes).decode()


def _cells(row: Mapping[str, Any], key: Sequence[str], state: Sequence[str]) -> tuple[object, ...]:
    in_bytes = row["state_bytes"]
    timers = [
        (f"{timer['tag']}: " if timer["tag"] else "") + f"{timer['at']} ({timer['domain']})"
        for timer in row["timers"]
    ]
    keys = [_typed_cell(row[name]) for name in key] or [row["key"]]
    whole = row["state"] if in_bytes is None else f"base64 {_base64(in_bytes)}"
    states = [None if row[name] is None else _typed_cell(row[name]) for name in state] or [whole]
    return *keys, *states, timers, row["hold"], row["superstep"]


def _typed_cell(value: Any) -> str:
    # As JSON, so that numbers have no separators, and null differs from an empty text.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@command(
    'millpond sql pond "show tables"',
    "millpond sql pond \"select key, state ->> 'count' from window_counter\"",
    'millpond sql pond "select count(*) from window_counter" --version 12',
    'millpond sql pond "select key, unnest(timers) from alarm" --json',
    'millpond sql pond "from dead_letters" --format csv > letters.csv',
    'millpond sql pond "select key, count(*) from record_ids.alarm group by key"',
)
@store_argument
@click.argument("query")
@version_option
@option(
    "--format shape",
    "How to print the answer.",
    show_default=False,
    choices=["table", "json", "csv"],
    default="table",
)
@click.option("--json", "shape", flag_value="json", help="The same as --format json.")
@allow_files_option
def sql(store: StoreAt, query: str, version: str | None, shape: str, *, allow_files: bool) -> None:
    """Query STORE in SQL (DuckDB's dialect).

    Each computation is a table of that name with exactly one row per key: key, state, state_bytes,
    timers, hold, superstep, sequencer, commit_number, record_ids, productions (the undelivered ones). The
    tables record_ids.NAME and productions.NAME have one row per id and per production. All tables show the same version
    of the store, so joins are consistent. State is JSON text by default: state ->> 'field' extracts a field.
    Times are in UTC. Names with special characters go in double quotes. A query reaches nothing but these tables, unless
    --allow-files.
    """
    with (
        store.reading(version) as (opened, snapshot),
        connect(snapshot, opened.objects, allow_files=allow_files) as connection,
        told_of_query(snapshot.computations),
    ):
        _answer(connection, query, shape)


def _refuse_repeated(columns: Sequence[str]) -> None:
    # DuckDB's names do not tell small letters from capitals.
    counts = Counter(column.lower() for column in columns)
    if repeated := [column for column in columns if counts[column.lower()] > 1]:
        raise InvalidError(
            "a JSON object has each name once: give the columns different names (`select a.state as before`)",
            columns=repeated,
        )


def _as_json(found: re.Match[str]) -> str:
    """Write what DuckDB takes for numbers, but JSON does not, as text, like states (docs/design/024-types.md)."""
    return _NO_NUMBERS.get(found[0], found[0])


def _answer(connection: duckdb.DuckDBPyConnection, query: str, shape: str) -> None:
    for statement in connection.extract_statements(query)[:-1]:
        # DuckDB would answer only the last one.
        if statement.type == duckdb.StatementType.SELECT:
            raise InvalidError(
                "the query has several statements with a result: give one", first=statement.query
            )
    # Statements without a result, such as `set`, return None, which the library's types omit.
    relation = cast(duckdb.DuckDBPyRelation | None, connection.sql(query))
    if relation is None:
        return
    if shape == "json":
        _refuse_repeated(relation.columns)
        quoted = ('"' + name.replace('"', '""') + '"' for name in relation.columns)
        fields = ", ".join(f"{column} := {column}" for column in quoted)
        for (line,) in relation.project(f"to_json(struct_pack({fields}))::varchar").fetchall():
            click.echo(visible_json(_STRING_OR_NUMBER.sub(_as_json, line)))
        return
    # As text, because Python's datetime does not cover the ends of time.
    rows = relation.project("columns(*)::varchar").fetchall()
    if shape == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(relation.columns)
        if sys.stdout.isatty():  # a file gets the values as they are
            rows = [tuple(value if value is None else visible(value) for value in row) for row in rows]
        writer.writerows(rows)
    else:
        print_table("", relation.columns, rows)
