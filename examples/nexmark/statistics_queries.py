"""Queries that aggregate the bids of a day: numbers of bids, bidders and auctions, and prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import millpond as mp
from examples.nexmark.events import day_of, minute_of
from examples.nexmark.query import Query, Row, Streams, daily, everything

_RANKS: Final = ("rank1", "rank2", "rank3")
_DISTINCT: Final = {"bidders": "bidder", "auctions": "auction"}
_COUNTS: Final = (*(f"{what}_{of}" for of in ("bids", "bidders", "auctions") for what in ("total", *_RANKS)),)


def rank_of(price: int) -> str:
    """The rank of a price, one of three."""
    return "rank1" if price < 10_000 else "rank2" if price < 1_000_000 else "rank3"


@dataclass(frozen=True)
class BidStatistics(mp.CombineFn):
    """Numbers of bids, distinct bidders and distinct auctions, in total and by rank of the price; and the last time.

    Distinct counts are exact: the accumulator has every id once, with the ranks it occurred in as bits, so it
    grows with the ids of a day. `mp.windows.ApproximateCountDistinct` is bounded, and a few percent off.
    """

    can_uncombine = False

    def create(self) -> Row:
        return {"bids": [0, 0, 0], "bidders": {}, "auctions": {}, "last_at": 0}

    def add(self, accumulator: Row, value: Row) -> Row:
        rank = _RANKS.index(rank_of(value["price"]))
        accumulator["bids"][rank] += 1
        for kind, name in _DISTINCT.items():
            seen, one = accumulator[kind], str(value[name])
            seen[one] = seen.get(one, 0) | 1 << rank
        accumulator["last_at"] = max(accumulator["last_at"], value["date_time"])
        return accumulator

    def merge(self, accumulators: Sequence[Row]) -> Row:
        merged = self.create()
        for one in accumulators:
            merged["bids"] = [sum(counts) for counts in zip(merged["bids"], one["bids"], strict=True)]
            for kind in _DISTINCT:
                for name, ranks in one[kind].items():
                    merged[kind][name] = merged[kind].get(name, 0) | ranks
            merged["last_at"] = max(merged["last_at"], one["last_at"])
        return merged

    def extract(self, accumulator: Row) -> Row:
        bids = accumulator["bids"]
        row = {"total_bids": sum(bids), **dict(zip((f"{rank}_bids" for rank in _RANKS), bids, strict=True))}
        for kind in _DISTINCT:
            seen = accumulator[kind].values()
            row[f"total_{kind}"] = len(seen)
            for place, rank in enumerate(_RANKS):
                row[f"{rank}_{kind}"] = sum(ranks >> place & 1 for ranks in seen)
        return {**row, "minute": minute_of(accumulator["last_at"])}


@dataclass(frozen=True)
class PriceStatistics(mp.CombineFn):
    """Count by rank, least, greatest, mean and sum of prices."""

    can_uncombine = False

    def create(self) -> Row:
        return {"ranks": [0, 0, 0], "least": None, "greatest": None, "sum": 0}

    def add(self, accumulator: Row, value: Row) -> Row:
        price = value["price"]
        ranks = [0, 0, 0]
        ranks[_RANKS.index(rank_of(price))] = 1
        return self.merge([accumulator, {"ranks": ranks, "least": price, "greatest": price, "sum": price}])

    def merge(self, accumulators: Sequence[Row]) -> Row:
        full = [one for one in accumulators if one["least"] is not None]
        return {
            "ranks": [sum(one["ranks"][place] for one in full) for place in range(len(_RANKS))],
            "least": min((one["least"] for one in full), default=None),
            "greatest": max((one["greatest"] for one in full), default=None),
            "sum": sum(one["sum"] for one in full),
        }

    def extract(self, accumulator: Row) -> Row:
        total = sum(accumulator["ranks"])
        return {
            "total_bids": total,
            **dict(zip((f"{rank}_bids" for rank in _RANKS), accumulator["ranks"], strict=True)),
            "min_price": accumulator["least"],
            "max_price": accumulator["greatest"],
            "avg_price": accumulator["sum"] / total if total else None,
            "sum_price": accumulator["sum"],
        }


def _statistics(
    combine: mp.CombineFn, key: Any, own: Callable[[str], Row]
) -> Callable[[Streams, str], mp.DataflowStream]:
    def build(streams: Streams, name: str) -> mp.DataflowStream:
        return daily(streams["bids"]).combine(
            combine,
            name=name,
            key=key,
            result=lambda group, found, day: {**own(group), "day": day_of(day.start), **found},
        )

    return build


QUERIES: Final = (
    Query(
        name="q15",
        title="bidding statistics: bids, bidders and auctions of a day, by rank",
        operator="`FixedWindows('1d')` with early panes, own `CombineFn`, retracting",
        columns=("day", *_COUNTS),
        inputs=("bids",),
        build=_statistics(BidStatistics(), everything, lambda group: {}),
    ),
    Query(
        name="q16",
        title="channel statistics: the same for each channel, and its last minute",
        operator="`FixedWindows('1d')` with early panes, own `CombineFn`, retracting",
        columns=("channel", "day", "minute", *_COUNTS),
        inputs=("bids",),
        build=_statistics(BidStatistics(), "channel", lambda group: {"channel": group}),
    ),
    Query(
        name="q17",
        title="auction statistics: bids and prices of an auction by day",
        operator="`FixedWindows('1d')` with early panes, own `CombineFn`, retracting",
        columns=(
            *("auction", "day", "total_bids", "rank1_bids", "rank2_bids", "rank3_bids"),
            *("min_price", "max_price", "avg_price", "sum_price"),
        ),
        inputs=("bids",),
        build=_statistics(PriceStatistics(), "auction_key", lambda group: {"auction": int(group)}),
    ),
)
