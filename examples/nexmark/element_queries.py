"""Queries on single bids: no state, and still exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

import pyarrow as pa

import millpond as mp
from examples.nexmark.events import day_of, minute_of
from examples.nexmark.query import Query, Row, Streams, fields

_BID: Final = ("auction", "bidder", "price")
_WANTED_AUCTIONS: Final = frozenset({1007, 1020, 2001, 2019, 2087})
_CHANNEL_IDS: Final = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
_CHANNEL_ID: Final = re.compile(r"[?&]channel_id=([^&]*)")
_MICROS_PER_HOUR: Final = 3_600_000_000


def in_euro(price: int) -> str:
    """A price in the other currency, exactly, with three decimals.

    Example:
        >>> in_euro(1001)
        '908.908'
    """
    whole, rest = divmod(price * 908, 1_000)
    return f"{whole}.{rest:03}"


def _pass_through(bid: Row) -> Iterable[Row]:
    yield fields(*_BID, "date_time")(bid)


def _currency(bid: Row) -> Iterable[Row]:
    yield {**fields("auction", "bidder", "date_time")(bid), "price_eur": in_euro(bid["price"])}


def _selection(bid: Row) -> Iterable[Row]:
    if bid["auction"] in _WANTED_AUCTIONS:
        yield fields("auction", "price")(bid)


def _log(bid: Row) -> Iterable[Row]:
    at = bid["date_time"]
    yield {**fields(*_BID, "date_time")(bid), "date": day_of(at), "time": minute_of(at)}


def _calculation(bid: Row) -> Iterable[Row]:
    if not 1_000_000_000 < bid["price"] * 908 < 50_000_000_000:
        return
    hour = bid["date_time"] // _MICROS_PER_HOUR % 24
    kind = "dayTime" if 8 <= hour <= 18 else "nightTime" if hour <= 6 or hour >= 20 else "otherTime"
    yield {
        **fields("auction", "bidder", "date_time")(bid),
        "price_eur": in_euro(bid["price"]),
        "bid_time_type": kind,
        "c_counts": bid["extra"].count("c"),
    }


def _channel_id(bid: Row) -> Iterable[Row]:
    known = _CHANNEL_IDS.get(bid["channel"].lower())
    found = _CHANNEL_ID.search(bid["url"])
    if known is not None or found is not None:
        channel_id = known if known is not None or found is None else found[1]
        yield {**fields(*_BID, "channel")(bid), "channel_id": channel_id}


def _directories(bid: Row) -> Iterable[Row]:
    parts = bid["url"].split("/")
    yield {**fields(*_BID, "channel")(bid), "dir1": parts[3], "dir2": parts[4], "dir3": parts[5]}


def _of_bids(function: Callable[[Row], Iterable[Row]]) -> Callable[[Streams, str], mp.DataflowStream]:
    def build(streams: Streams, name: str) -> mp.DataflowStream:
        return streams["bids"].flat_map(function, name=name)

    return build


QUERIES: Final = (
    Query(
        name="q0",
        title="pass through: every bid",
        operator="`flat_map`",
        columns=(*_BID, "date_time"),
        inputs=("bids",),
        build=_of_bids(_pass_through),
    ),
    Query(
        name="q1",
        title="currency conversion: prices in euro",
        operator="`flat_map`",
        columns=("auction", "bidder", "price_eur", "date_time"),
        inputs=("bids",),
        build=_of_bids(_currency),
    ),
    Query(
        name="q2",
        title="selection: bids on five auctions",
        operator="`flat_map` that leaves out",
        columns=("auction", "price"),
        inputs=("bids",),
        build=_of_bids(_selection),
    ),
    Query(
        name="q10",
        title="log to files: every bid with day and minute, in a table of its own",
        operator="`flat_map`, `DeltaSink` with a schema",
        columns=(*_BID, "date_time", "date", "time"),
        inputs=("bids",),
        build=_of_bids(_log),
        schema=pa.schema(
            [
                *((name, pa.int64()) for name in (*_BID, "date_time")),
                ("date", pa.string()),
                ("time", pa.string()),
            ]
        ),
    ),
    Query(
        name="q14",
        title="calculation: middling prices, time of day, letters c",
        operator="`flat_map`",
        columns=("auction", "bidder", "price_eur", "bid_time_type", "date_time", "c_counts"),
        inputs=("bids",),
        build=_of_bids(_calculation),
    ),
    Query(
        name="q21",
        title="channel id: by name, or from the url",
        operator="`flat_map`",
        columns=(*_BID, "channel", "channel_id"),
        inputs=("bids",),
        build=_of_bids(_channel_id),
    ),
    Query(
        name="q22",
        title="url directories: three parts of the path",
        operator="`flat_map`",
        columns=(*_BID, "channel", "dir1", "dir2", "dir3"),
        inputs=("bids",),
        build=_of_bids(_directories),
    ),
)
