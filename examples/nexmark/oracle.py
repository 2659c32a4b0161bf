"""``python -m examples.nexmark.oracle``: the answers again, by DuckDB, from SQL that shares nothing with the pipelines.

The events are made again as well: by the generator, from a seed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from examples.nexmark.events import ANSWERS, DATA, KEYS, KINDS, Events
from examples.nexmark.generator import Generator, joined

_TABLES: Final = {"persons": "person", "auctions": "auction", "bids": "bid"}
_TIMES: Final = ("date_time", "expires")
_HALF: Final = 1_000
_MIDNIGHT_MS: Final = 1_436_918_400_000  # 15 July 2015
_MORNING_MS: Final = _MIDNIGHT_MS + 8 * 3_600_000
_BEFORE_MS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The rows of a query, in an order that is the same every time."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


def fixed_events() -> Events:
    """2,000 events: 40 seconds around a midnight, and 40 seconds around eight in the morning.

    Days and the times of day of q14 change on the way, and auctions of the night have bids that come too late.
    """
    rate = 25.0
    night = Generator(seed=2015, rate=rate, out_of_order=10, base_ms=_MIDNIGHT_MS - _BEFORE_MS)
    passed_ms = round(_HALF / rate * 1_000)
    morning = Generator(seed=2015, rate=rate, out_of_order=10, base_ms=_MORNING_MS - _BEFORE_MS - passed_ms)
    return joined([night.events(_HALF), morning.events(_HALF, _HALF)])


def ask(tables: Mapping[str, pa.Table]) -> dict[str, Answer]:
    """What DuckDB answers to every query.

    Args:
        tables: events by kind, as `load_events` gives them.
    """
    with duckdb.connect() as connection:
        for kind, name in _TABLES.items():
            connection.register(name, _with_timestamps(tables[kind]))
        return {name: _answer(connection, sql) for name, sql in statements().items()}


def statements() -> dict[str, str]:
    """The queries of ``oracle.sql``, by name."""
    text = (DATA / "oracle.sql").read_text(encoding="utf-8")
    parts = re.split(r"^-- (q\w+)$", text, flags=re.MULTILINE)[1:]
    return {name: sql.strip().rstrip(";") for name, sql in zip(parts[::2], parts[1::2], strict=True)}


def _with_timestamps(table: pa.Table) -> pa.Table:
    for name in _TIMES:
        if name in table.column_names:
            column = table.column(name).cast(pa.timestamp("us"))
            table = table.set_column(table.column_names.index(name), name, column)
    return table


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> Answer:
    """The rows with times as text to the millisecond, sorted by all columns."""
    columns = [(row[0], row[1]) for row in connection.execute(f"DESCRIBE {sql}").fetchall()]
    shown = ", ".join(
        f"strftime({name}, '%Y-%m-%d %H:%M:%S.%g') AS {name}" if kind == "TIMESTAMP" else f'"{name}"'
        for name, kind in columns
    )
    rows = connection.execute(f"SELECT {shown} FROM ({sql}) ORDER BY ALL").fetchall()
    return Answer(columns=tuple(name for name, _ in columns), rows=[list(row) for row in rows])


def _write_events(events: Events, folder: Path) -> None:
    for kind in KINDS:
        # The key columns repeat the ids as text: who reads the files makes them.
        table = _with_timestamps(events[kind].drop_columns(list(KEYS[kind])))
        pq.write_table(table, folder / f"{_TABLES[kind]}.parquet", compression="zstd", compression_level=19)


def _write_answers(answers: Mapping[str, Answer], folder: Path) -> None:
    lines = (
        f"{json.dumps(name)}: {json.dumps({'columns': answer.columns, 'rows': answer.rows})}"
        for name, answer in answers.items()
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    # Without the time of writing: the same answers are the same bytes.
    (folder / ANSWERS).write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=DATA, show_default=True)
def main(out: Path) -> None:
    """Write events and answers."""
    events = fixed_events()
    answers = ask(events)
    out.mkdir(parents=True, exist_ok=True)
    _write_events(events, out)
    _write_answers(answers, out)
    for name, answer in answers.items():
        click.echo(f"{name}: {len(answer.rows):,} rows")
    click.echo(f"{sum(path.stat().st_size for path in out.iterdir()):,} bytes in {out}")


if __name__ == "__main__":
    main()
