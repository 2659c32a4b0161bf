"""Queries that join events by id, however far apart in time they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

import millpond as mp
from examples.nexmark.join import Join
from examples.nexmark.query import Query, Row, Streams, fields

SIDE_ROWS: Final = 10_000

_STATES: Final = frozenset({"or", "id", "ca"})
_CATEGORY: Final = 10
_BID: Final = ("auction", "bidder", "price")
_ITEM: Final = ("item_name", "description", "initial_bid", "reserve", "expires", "seller", "category")


def side_input() -> pa.Table:
    """The bounded table of q13: key i, value i, for i from 0 to 9,999."""
    numbers = pa.array(range(SIDE_ROWS), pa.int64()).cast(pa.string())
    times = pa.array([0] * SIDE_ROWS, pa.int64())
    return pa.table({"side_key": numbers, "value": numbers, "date_time": times})


def _local_items(streams: Streams, name: str) -> mp.DataflowStream:
    def suggested(auction: Row, person: Row) -> Iterable[Row]:
        if person["state"].lower() in _STATES:
            yield {**person, "auction_id": auction["id"]}

    wanted = streams["auctions"].flat_map(
        lambda auction: [fields("id", "seller_key")(auction)] if auction["category"] == _CATEGORY else [],
        name=f"{name}_wanted",
    )
    join = Join(
        streams["persons"].name,
        name,
        row=fields("name", "city", "state"),
        fact=fields("id"),
        joined=suggested,
    )
    subscribes = {streams["persons"].name: "person_key", wanted.name: "seller_key"}
    return streams["persons"].pipeline.add(join, name=name, subscribes=subscribes, produces=(name,))[name]


def _side_input(streams: Streams, name: str) -> mp.DataflowStream:
    join = Join(
        streams["side"].name,
        name,
        row=fields("value"),
        fact=fields(*_BID, "date_time"),
        joined=lambda bid, side: ({**bid, **side},),
    )
    subscribes = {
        streams["side"].name: "side_key",
        streams["bids"].name: lambda bid: str(bid["auction"] % SIDE_ROWS),
    }
    return streams["bids"].pipeline.add(join, name=name, subscribes=subscribes, produces=(name,))[name]


def _expanded(streams: Streams, name: str) -> mp.DataflowStream:
    def joined(bid: Row, auction: Row) -> Iterable[Row]:
        if auction["category"] == _CATEGORY:
            yield {**bid, **auction}

    join = Join(
        streams["auctions"].name,
        name,
        row=lambda auction: {
            **fields(*_ITEM)(auction),
            "auction_date_time": auction["date_time"],
            "auction_extra": auction["extra"],
        },
        fact=lambda bid: {
            **fields(*_BID, "channel", "url")(bid),
            "bid_date_time": bid["date_time"],
            "bid_extra": bid["extra"],
        },
        joined=joined,
    )
    subscribes = {streams["auctions"].name: "auction_key", streams["bids"].name: "auction_key"}
    return streams["bids"].pipeline.add(join, name=name, subscribes=subscribes, produces=(name,))[name]


QUERIES: Final = (
    Query(
        name="q3",
        title="local item suggestion: auctions of category 10 with sellers in three states",
        operator="`flat_map`, a `Computation` that joins by state",
        columns=("name", "city", "state", "auction_id"),
        inputs=("persons", "auctions"),
        build=_local_items,
    ),
    Query(
        name="q13",
        title="bounded side input: every bid with a value from a table of 10,000",
        operator="a `Computation` that joins by state",
        columns=(*_BID, "date_time", "value"),
        inputs=("bids", "side"),
        build=_side_input,
    ),
    Query(
        name="q20",
        title="expand bid with auction: bids and their auctions of category 10",
        operator="a `Computation` that joins by state",
        columns=(
            *_BID,
            *("channel", "url", "bid_date_time", "bid_extra", "item_name", "description", "initial_bid"),
            *("reserve", "auction_date_time", "expires", "seller", "category", "auction_extra"),
        ),
        inputs=("auctions", "bids"),
        build=_expanded,
    ),
)
