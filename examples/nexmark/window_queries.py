"""Queries with windows of event time (sliding, tumbling, sessions), and one with windows of wall time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import millpond as mp
from examples.nexmark.query import TEN_SECONDS, Query, Row, Streams, everything, fields


@dataclass(frozen=True)
class Highest(mp.CombineFn):
    """All elements with the greatest value of a field.

    Args:
        of: the field.
        is_list: elements are lists of such elements, so that partial answers can be combined further.
    """

    of: str
    is_list: bool = False

    can_uncombine = False

    def create(self) -> list[Row]:
        return []

    def add(self, accumulator: list[Row], value: Any) -> list[Row]:
        return self.merge([accumulator, value if self.is_list else [value]])

    def merge(self, accumulators: Sequence[list[Row]]) -> list[Row]:
        found = [each for one in accumulators for each in one]
        best = max((each[self.of] for each in found), default=None)
        return [each for each in found if each[self.of] == best]


@dataclass(frozen=True)
class CountAndSum(mp.CombineFn):
    """Number of prices, and their sum."""

    def create(self) -> list[int]:
        return [0, 0]

    def add(self, accumulator: list[int], value: int) -> list[int]:
        return [accumulator[0] + 1, accumulator[1] + value]

    def merge(self, accumulators: Sequence[list[int]]) -> list[int]:
        return [sum(one[0] for one in accumulators), sum(one[1] for one in accumulators)]

    def uncombine(self, accumulator: list[int], value: int) -> list[int]:
        return [accumulator[0] - 1, accumulator[1] - value]

    def extract(self, accumulator: list[int]) -> Row:
        return {"bid_count": accumulator[0], "price_sum": accumulator[1]}


def _each(rows: Iterable[Row]) -> Iterable[Row]:
    return rows


def _hottest(streams: Streams, name: str) -> mp.DataflowStream:
    """Count by auction and window, then compare the counts of a window: the panes of one window end at one instant."""
    counts = (
        streams["bids"]
        .window(mp.SlidingWindows("10s", "2s"))
        .combine(
            mp.Count(),
            name=f"{name}_counts",
            key="auction_key",
            result=lambda auction, count, window: {
                "window_start": window.start,
                "window_end": window.end,
                "auction": int(auction),
                "num": count,
            },
        )
    )
    return counts.window(mp.FixedWindows("2s")).combine(
        Highest("num"), name=f"{name}_hottest", key=everything
    )


def _hot_items(streams: Streams, name: str) -> mp.DataflowStream:
    return _hottest(streams, name).flat_map(lambda rows: map(fields("auction", "num"), rows), name=name)


def _hot_items_with_windows(streams: Streams, name: str) -> mp.DataflowStream:
    return _hottest(streams, name).flat_map(_each, name=name)


def _highest_bid(streams: Streams, name: str) -> mp.DataflowStream:
    """Combine the highest bids of each auction first, to reduce the work of the step over all auctions."""
    kept = fields("auction", "price", "bidder", "date_time")
    by_auction = (
        streams["bids"]
        .window(mp.FixedWindows("10s"), of=kept)
        .combine(Highest("price"), name=f"{name}_by_auction", key="auction_key")
    )
    highest = by_auction.window(mp.FixedWindows("10s")).combine(
        Highest("price", is_list=True), name=f"{name}_highest", key=everything
    )
    return highest.flat_map(_each, name=name)


def _new_users(streams: Streams, name: str) -> mp.DataflowStream:
    both = mp.co_group(
        {"persons": streams["persons"], "auctions": streams["auctions"]},
        mp.windows.WindowingStrategy(window_fn=mp.FixedWindows("10s")),
        name=f"{name}_both",
        keys={"persons": "person_key", "auctions": "seller_key"},
        of={"persons": fields("id", "name", "date_time"), "auctions": "id"},
    )

    def sellers(group: Row) -> Iterable[Row]:
        for person in group["persons"] if group["auctions"] else ():
            yield {
                "person_id": person["id"],
                "name": person["name"],
                "window_start": person["date_time"] - person["date_time"] % TEN_SECONDS,
            }

    return both.flat_map(sellers, name=name)


def _sessions(streams: Streams, name: str) -> mp.DataflowStream:
    return (
        streams["bids"]
        .window(mp.Sessions("10s"))
        .combine(
            mp.Count(),
            name=name,
            key="bidder_key",
            result=lambda bidder, count, session: {
                "bidder": int(bidder),
                "bid_count": count,
                "starttime": session.start,
                "endtime": session.end,
            },
        )
    )


def _by_the_clock(streams: Streams, name: str) -> mp.DataflowStream:
    """Emit the bids since the last tick of a wall clock that ticks every ten seconds."""
    trigger = mp.Repeatedly(mp.AtPeriod(0, "10s", "wall"))
    return (
        streams["bids"]
        .window(mp.GlobalWindows(), trigger=trigger, accumulation="discarding")
        .combine(
            mp.Count(),
            name=name,
            key="bidder_key",
            result=lambda bidder, count, _: {"bidder": int(bidder), "bid_count": count},
        )
    )


def _by_event_time(streams: Streams, name: str) -> mp.DataflowStream:
    def row(bidder: str, found: Row, window: mp.Window) -> Row:
        return {"window_start": window.start, "bidder": int(bidder), **found}

    windowed = streams["bids"].window(mp.FixedWindows("10s"), of="price")
    return windowed.combine(CountAndSum(), name=name, key="bidder_key", result=row)


QUERIES: Final = (
    Query(
        name="q5",
        title="hot items: the auctions with most bids in the last 10 s, every 2 s",
        operator="`SlidingWindows`, `Count`; windowed again, own `CombineFn`",
        columns=("auction", "num"),
        inputs=("bids",),
        build=_hot_items,
    ),
    Query(
        name="q5_with_windows",
        title="the same with the windows",
        operator="as q5",
        columns=("window_start", "window_end", "auction", "num"),
        inputs=("bids",),
        build=_hot_items_with_windows,
    ),
    Query(
        name="q7",
        title="highest bid: the highest bids of every 10 s",
        operator="`FixedWindows`, own `CombineFn`; windowed again",
        columns=("auction", "price", "bidder", "date_time"),
        inputs=("bids",),
        build=_highest_bid,
    ),
    Query(
        name="q8",
        title="monitor new users: who registered and opened an auction in the same 10 s",
        operator="`co_group` on `FixedWindows`",
        columns=("person_id", "name", "window_start"),
        inputs=("persons", "auctions"),
        build=_new_users,
    ),
    Query(
        name="q11",
        title="user sessions: bids of a bidder without a pause of 10 s",
        operator="`Sessions`, `Count`",
        columns=("bidder", "bid_count", "starttime", "endtime"),
        inputs=("bids",),
        build=_sessions,
    ),
    Query(
        name="q12",
        title="by the clock: bids of a bidder in every 10 s of wall time",
        operator="`GlobalWindows`, `Repeatedly(AtPeriod(0, '10s', 'wall'))`",
        columns=("bidder", "bid_count"),
        inputs=("bids",),
        build=_by_the_clock,
    ),
    Query(
        name="q12_event_time",
        title="the same by event time, with the sum of prices",
        operator="`FixedWindows`, own `CombineFn`",
        columns=("window_start", "bidder", "bid_count", "price_sum"),
        inputs=("bids",),
        build=_by_event_time,
    ),
)
