"""Queries about the final prices of auctions: timers close them, live steps aggregate the prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import millpond as mp
from examples.nexmark.closed_auctions import BY_HIGHEST, BY_LOWEST, Rank, closed_auctions
from examples.nexmark.query import Query, Row, Streams, everything, live

_PRECEDING: Final = 10


def _price(closed: Row) -> int:
    return int(closed["bid"]["price"])


def _average_by_category(streams: Streams, name: str) -> mp.DataflowStream:
    return live(closed_auctions(streams, f"{name}_closed")).combine(
        mp.Mean(_price),
        name=name,
        key=lambda closed: str(closed["auction"]["category"]),
        result=lambda category, mean, _: {"category": int(category), "avg_final": mean},
    )


def running_means(sales: Iterable[Row]) -> Iterable[Row]:
    """For each sale of a seller, by time, the mean price of it and of up to ten sales before it."""
    ordered = sorted(sales, key=lambda sale: (sale["date_time"], sale["auction"]))
    prices = [sale["price"] for sale in ordered]
    for place, sale in enumerate(ordered):
        window = prices[max(0, place - _PRECEDING) : place + 1]
        yield {"seller": sale["seller"], "avg": sum(window) / len(window)}


def _sale(closed: Row) -> Row:
    bid = closed["bid"]
    return {
        "seller": closed["auction"]["seller"],
        **{name: bid[name] for name in ("auction", "date_time", "price")},
    }


def _average_by_seller(rank: Rank) -> Callable[[Streams, str], mp.DataflowStream]:
    def build(streams: Streams, name: str) -> mp.DataflowStream:
        return live(closed_auctions(streams, f"{name}_closed", rank), of=_sale).process_windows(
            lambda sales, window, pane: running_means(sales),
            name=name,
            key=lambda closed: str(closed["auction"]["seller"]),
        )

    return build


def _winning_bids(streams: Streams, name: str) -> mp.DataflowStream:
    def row(closed: Row) -> Row:
        auction, bid = dict(closed["auction"]), dict(closed["bid"])
        auction["auction_date_time"] = auction.pop("date_time")
        bid["bid_date_time"] = bid.pop("date_time")
        return {**auction, **bid}

    return closed_auctions(streams, f"{name}_closed").map(row, name=name)


def _lowest_final(streams: Streams, name: str) -> mp.DataflowStream:
    return live(closed_auctions(streams, f"{name}_closed")).combine(
        mp.Min(_price),
        name=name,
        key=everything,
        result=lambda key, price, window: {"min_final": price},
    )


_INPUTS: Final = ("auctions", "bids")

QUERIES: Final = (
    Query(
        name="q4",
        title="average price for a category, of what auctions went for",
        operator="event timers; `Mean`, retracting",
        columns=("category", "avg_final"),
        inputs=_INPUTS,
        build=_average_by_category,
    ),
    Query(
        name="q6",
        title="average selling price by seller, over the last 11 sales",
        operator="event timers; `process_windows`, retracting",
        columns=("seller", "avg"),
        inputs=_INPUTS,
        build=_average_by_seller(BY_HIGHEST),
    ),
    Query(
        name="q6_group_top1",
        title="the same with the lowest bid of each auction (RisingWave's variant)",
        operator="event timers; `process_windows`, retracting",
        columns=("seller", "avg"),
        inputs=_INPUTS,
        build=_average_by_seller(BY_LOWEST),
    ),
    Query(
        name="q9",
        title="winning bids: each auction with its highest bid",
        operator="event timers; `map`",
        columns=(
            *("id", "item_name", "description", "initial_bid", "reserve", "auction_date_time", "expires"),
            *("seller", "category", "auction", "bidder", "price", "bid_date_time"),
        ),
        inputs=_INPUTS,
        build=_winning_bids,
    ),
    Query(
        name="q106",
        title="min of max: the lowest price that an auction went for",
        operator="event timers; `Min`, live",
        columns=("min_final",),
        inputs=_INPUTS,
        build=_lowest_final,
    ),
)
