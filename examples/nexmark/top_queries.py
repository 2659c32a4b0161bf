"""Queries for the last or the best bids: rankings that follow every change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import millpond as mp
from examples.nexmark.query import LIVE, Query, Row, Streams, everything, fields, live

_BID: Final = ("auction", "bidder", "price", "channel", "url", "date_time", "extra")
_PLACES: Final = 10
_AUCTIONS_MAX: Final = 1_000


def _ranked(best: list[list[Any]]) -> Iterable[Row]:
    for place, (_, _, bid) in enumerate(best, start=1):
        yield {**dict(zip(_BID, bid, strict=True)), "rank_number": place}


def _values(bid: Row) -> list[Any]:
    return [bid[name] for name in _BID]


def _last_bid(streams: Streams, name: str) -> mp.DataflowStream:
    latest = live(streams["bids"]).combine(
        mp.Min(lambda bid: [-bid["date_time"], bid["extra"], _values(bid)]),
        name=f"{name}_last",
        key=lambda bid: f"{bid['bidder']} {bid['auction']}",
    )
    return latest.map(lambda found: dict(zip(_BID, found[2], strict=True)), name=name)


def _top_ten(streams: Streams, name: str) -> mp.DataflowStream:
    best = live(streams["bids"]).combine(
        mp.TopN(_PLACES, lambda bid: [bid["price"], -bid["date_time"], _values(bid)]),
        name=f"{name}_best",
        key="auction_key",
    )
    return best.flat_map(_ranked, name=name)


def bid_counts(streams: Streams, name: str) -> mp.DataflowStream:
    """The number of bids of each auction: ``{"auction": …, "bid_count": …}``."""
    return live(streams["bids"], of=fields("auction")).combine(
        mp.Count(),
        name=name,
        key="auction_key",
        result=lambda auction, count, _: {"auction": auction, "bid_count": count},
    )


def with_auctions(streams: Streams, found: mp.DataflowStream, name: str, joined: Any) -> mp.DataflowStream:
    """Join results about auctions to the auctions.

    Args:
        streams: the streams.
        found: values with an auction's id as text in ``auction``; they may be revised.
        name: the name of the answer.
        joined: takes an auction and the list of its results, and returns rows.
    """
    both = mp.co_group(
        {"auctions": streams["auctions"], "found": found},
        LIVE,
        name=f"{name}_both",
        keys={"auctions": "auction_key", "found": "auction"},
        of={"auctions": fields("id", "item_name")},
    )

    def rows(group: Row) -> Iterable[Row]:
        for auction in group["auctions"]:
            yield from joined(
                {"auction_id": auction["id"], "item_name": auction["item_name"]}, group["found"]
            )

    return both.flat_map(rows, name=name)


def _busiest(streams: Streams, name: str) -> mp.DataflowStream:
    counted = with_auctions(
        streams,
        bid_counts(streams, f"{name}_counts"),
        f"{name}_counted",
        lambda auction, found: [{**auction, "bid_count": one["bid_count"]} for one in found],
    )
    best = live(counted).combine(
        mp.TopN(
            _AUCTIONS_MAX,
            lambda row: [row["bid_count"], -row["auction_id"], row["item_name"]],
            retractable=True,
        ),
        name=f"{name}_best",
        key=everything,
    )
    return best.flat_map(
        lambda rows: [
            {"auction_id": -auction, "item_name": item, "bid_count": count} for count, auction, item in rows
        ],
        name=name,
    )


QUERIES: Final = (
    Query(
        name="q18",
        title="find last bid: of each bidder on each auction",
        operator="`Min`, live and retracting",
        columns=_BID,
        inputs=("bids",),
        build=_last_bid,
    ),
    Query(
        name="q19",
        title="auction top 10 price: the ten highest bids of each auction",
        operator="`TopN`, live and retracting; `flat_map`",
        columns=(*_BID, "rank_number"),
        inputs=("bids",),
        build=_top_ten,
    ),
    Query(
        name="q105",
        title="bid count per auction: the thousand with most bids",
        operator="`Count`, `co_group`, `TopN(retractable=True)`, retractions through all three",
        columns=("auction_id", "item_name", "bid_count"),
        inputs=("auctions", "bids"),
        build=_busiest,
    ),
)
