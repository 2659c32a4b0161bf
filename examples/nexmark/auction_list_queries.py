"""Queries that list auctions by their bids: outer, semi and anti joins that follow every change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import millpond as mp
from examples.nexmark.query import Query, Row, Streams, everything, fields, live
from examples.nexmark.top_queries import bid_counts, with_auctions

_MANY: Final = 20
_INPUTS: Final = ("auctions", "bids")
_AUCTION: Final = ("auction_id", "item_name")


@dataclass(frozen=True)
class AtLeastAverage(mp.CombineFn):
    """The elements ``{"auction": …, "bid_count": …}`` with at least the average count.

    The average is rounded down. The accumulator has the counts of all auctions under one key, as the query requires.
    """

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], value: Row) -> dict[str, int]:
        return self._changed(accumulator, value["auction"], value["bid_count"])

    def uncombine(self, accumulator: dict[str, int], value: Row) -> dict[str, int]:
        return self._changed(accumulator, value["auction"], -value["bid_count"])

    def _changed(self, accumulator: dict[str, int], auction: str, by: int) -> dict[str, int]:
        count = accumulator.get(auction, 0) + by
        if count:
            accumulator[auction] = count
        else:
            accumulator.pop(auction, None)
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, int]]) -> dict[str, int]:
        merged: dict[str, int] = {}
        for accumulator in accumulators:
            for auction, count in accumulator.items():
                self._changed(merged, auction, count)
        return merged

    def extract(self, accumulator: dict[str, int]) -> list[Row]:
        average = sum(accumulator.values()) // len(accumulator) if accumulator else 0
        return [
            {"auction": auction, "bid_count": count}
            for auction, count in sorted(accumulator.items())
            if count >= average
        ]


def _highest(streams: Streams, name: str) -> mp.DataflowStream:
    highest = live(streams["bids"], of=fields("price")).combine(
        mp.Max("price"),
        name=f"{name}_highest",
        key="auction_key",
        result=lambda auction, price, _: {"auction": auction, "price": price},
    )

    def joined(auction: Row, found: list[Row]) -> Iterable[Row]:
        yield {**auction, "current_highest_bid": found[0]["price"] if found else None}

    return with_auctions(streams, highest, name, joined)


def _popular(streams: Streams, name: str) -> mp.DataflowStream:
    counts = bid_counts(streams, f"{name}_counts")
    popular = (
        live(counts)
        .combine(AtLeastAverage(), name=f"{name}_chosen", key=everything)
        .flat_map(lambda chosen: chosen, name=f"{name}_each")
    )
    return with_auctions(
        streams,
        popular,
        name,
        lambda auction, found: [{**auction, "bid_count": one["bid_count"]} for one in found],
    )


def _where(streams: Streams, name: str, wanted: Any) -> mp.DataflowStream:
    return bid_counts(streams, f"{name}_counts").flat_map(
        lambda one: [{"auction": one["auction"]}] if wanted(one["bid_count"]) else [], name=f"{name}_wanted"
    )


def _with_many(streams: Streams, name: str) -> mp.DataflowStream:
    many = _where(streams, name, lambda count: count >= _MANY)
    return with_auctions(streams, many, name, lambda auction, found: [auction] if found else [])


def _without_few(streams: Streams, name: str) -> mp.DataflowStream:
    few = _where(streams, name, lambda count: count < _MANY)
    return with_auctions(streams, few, name, lambda auction, found: [] if found else [auction])


QUERIES: Final = (
    Query(
        name="q101",
        title="highest bid per auction, none where there is no bid",
        operator="`Max`, `co_group` as outer join, retractions through both",
        columns=(*_AUCTION, "current_highest_bid"),
        inputs=_INPUTS,
        build=_highest,
    ),
    Query(
        name="q102",
        title="auctions with at least the average number of bids",
        operator="`Count`, own `CombineFn` with `uncombine`, `co_group`",
        columns=(*_AUCTION, "bid_count"),
        inputs=_INPUTS,
        build=_popular,
    ),
    Query(
        name="q103",
        title="auctions with 20 bids or more",
        operator="`Count`, `co_group` as semi join",
        columns=_AUCTION,
        inputs=_INPUTS,
        build=_with_many,
    ),
    Query(
        name="q104",
        title="auctions that do not have fewer than 20 bids, but perhaps none",
        operator="`Count`, `co_group` as anti join, retracting rows",
        columns=_AUCTION,
        inputs=_INPUTS,
        build=_without_few,
    ),
)
