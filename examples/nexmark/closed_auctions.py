"""Closed auctions: the best bid of each, produced by an event timer when no further bid can arrive.

A bid counts if its time lies between the auction's begin and end, both included. So

- the auction closes one microsecond after its end, by the watermark, and never by the clock on the wall;
- a bid whose auction has not come waits until the watermark has passed the bid's own time: an auction that
  would still come then begins after the bid, and the bid would not count. What waits is bounded by disorder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import millpond as mp
from examples.nexmark.query import Row, Streams, fields

Rank = Callable[[Row], Any]
"""The rank of a bid: the greatest wins."""

_CLOSE: Final = "close"
_FORGET: Final = "forget"
_AUCTION: Final = fields(
    "id", "item_name", "description", "initial_bid", "reserve", "date_time", "expires", "seller", "category"
)
_BID: Final = fields("auction", "bidder", "price", "date_time")


def BY_HIGHEST(bid: Row) -> Any:  # noqa: N802 - a constant that is a function
    """The highest price, then the earliest."""
    return bid["price"], -bid["date_time"]


def BY_LOWEST(bid: Row) -> Any:  # noqa: N802
    """The lowest price, then the earliest."""
    return -bid["price"], -bid["date_time"]


class ClosedAuctions(mp.Computation):
    """Key: auction. Produces ``{"auction": …, "bid": …}`` once, when the auction has closed and has a bid.

    Args:
        auctions: the stream of auctions; records of other streams are bids.
        output: the stream of closed auctions.
        rank: decides which bid wins.
    """

    def __init__(self, auctions: str, output: str, rank: Rank) -> None:
        self.auctions = auctions
        self.output = output
        self.rank = rank

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """Store the auction and its bids, in any order."""
        state: Row = context.state.get({})
        auction, best, waiting = state.get("auction"), state.get("best"), state.get("waiting", [])
        for record in records:
            if record.stream != self.auctions:
                bids = [_BID(record.value)]
            else:
                auction, bids, waiting = _AUCTION(record.value), waiting, []
                context.delete_timer(_FORGET)
                context.set_timer(auction["expires"] + 1, _CLOSE)
            if auction is None:
                waiting += bids
                continue
            for bid in bids:
                if auction["date_time"] <= bid["date_time"] <= auction["expires"]:
                    best = bid if best is None else max(best, bid, key=self.rank)
        if auction is None:
            context.set_timer(max(bid["date_time"] for bid in waiting) + 1, _FORGET)
            context.state.set({"waiting": waiting})
        else:
            context.state.set({"auction": auction, "best": best})

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """Produce the winner, or drop bids whose auction can no longer arrive."""
        state = context.state.get()
        if timer.tag == _CLOSE and state["best"] is not None:
            context.produce(self.output, {"auction": state["auction"], "bid": state["best"]})
        context.state.delete()


def closed_auctions(streams: Streams, name: str, rank: Rank = BY_HIGHEST) -> mp.DataflowStream:
    """Add the step to the pipeline."""
    auctions, bids = streams["auctions"], streams["bids"]
    made = auctions.pipeline.add(
        ClosedAuctions(auctions.name, name, rank),
        name=name,
        subscribes={auctions.name: "auction_key", bids.name: "auction_key"},
        produces=(name,),
    )
    return made[name]
