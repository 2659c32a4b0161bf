"""The three kinds of events of an auction site: registrations, auctions and bids.

Events are Arrow tables, one a kind. Times are whole microseconds since 1970 UTC. Keys in Millpond are text, so
each table has the ids that it is grouped by as text too, in the columns ``…_key``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from examples.shared_data import need, shared_data

Events: TypeAlias = Mapping[str, pa.Table]
"""Tables by `KINDS`."""

KINDS: Final = ("persons", "auctions", "bids")
"""The streams."""

KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "persons": {"person_key": "id"},
    "auctions": {"auction_key": "id", "seller_key": "seller"},
    "bids": {"auction_key": "auction", "bidder_key": "bidder"},
}
"""The text columns of each kind, and the ids that they are made of; the first is the stream's own key."""

DATA: Final = Path(__file__).with_name("data")
"""2,000 generated events, and DuckDB's answers to the queries on them."""

ANSWERS: Final = "answers.json.gz"
"""The file of DuckDB's answers; published ones are in ``expected.json``."""

PUBLISHED: Final = shared_data("nexmark")
"""110 published events with published answers, if they are next to the checkout."""

_TIMES: Final = ("date_time", "expires")
_FILES: Final = {"persons": "person", "auctions": "auction", "bids": "bid"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def load_events(folder: Path) -> Events:
    """Read ``person``, ``auction`` and ``bid``: as ``.parquet`` where the folder has that, else as ``.jsonl``.

    Raises:
        FileNotFoundError: one of them is not there.
    """
    return {kind: with_keys(kind, _with_micros(_read(folder / _FILES[kind]))) for kind in KINDS}


def _read(path: Path) -> pa.Table:
    parquet = path.with_suffix(".parquet")
    return pq.read_table(parquet) if parquet.exists() else pj.read_json(need(path.with_suffix(".jsonl")))


def with_keys(kind: str, table: pa.Table) -> pa.Table:
    """The table with its key columns."""
    for name, source in KEYS[kind].items():
        table = table.append_column(name, table.column(source).cast(pa.string()))
    return table


def _with_micros(table: pa.Table) -> pa.Table:
    for name in _TIMES:
        if name in table.column_names:
            column = table.column(name)
            if pa.types.is_string(column.type):
                column = pc.cast(column, pa.timestamp("us"))
            micros = column.cast(pa.timestamp("us")).cast(pa.int64())
            table = table.set_column(table.column_names.index(name), name, micros)
    return table


def text_of(at: int) -> str:
    """A time as the expected answers write it.

    Example:
        >>> text_of(1_436_918_400_005_000)
        '2015-07-15 00:00:00.005'
    """
    return f"{_moment(at):%Y-%m-%d %H:%M:%S}.{at // 1_000 % 1_000:03}"


def day_of(at: int) -> str:
    """The day of a time, in UTC."""
    return f"{_moment(at):%Y-%m-%d}"


def minute_of(at: int) -> str:
    """Hour and minute of a time, in UTC."""
    return f"{_moment(at):%H:%M}"


def _moment(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)
