"""The generator: an endless stream of an auction site's events by Nexmark's rules, equal for equal seeds.

Of fifty consecutive events one is a person, three are auctions and 46 are bids. Event number n is a function of the
seed and n alone: numbers are drawn in blocks of 50,000 events, each from a generator that is seeded with its number,
so any process can generate any part of the stream, in any order.

Rules and constants come from nexmark/nexmark (Apache-2.0), restated in the shared file
``generator_and_queries.json``. Unlike the original, this generator does not add the first person's id to a bidder twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from examples.nexmark.events import KINDS, Events, with_keys
from examples.nexmark.texts import Texts

BLOCK: Final = 50_000
"""Events that are drawn together; a multiple of the fifty after which kinds repeat."""

_PERSONS, _AUCTIONS, _BIDS = 1, 3, 46
_ROUND: Final = _PERSONS + _AUCTIONS + _BIDS
_FIRST_ID: Final = 1_000
_FIRST_CATEGORY: Final = 10
_CATEGORIES: Final = 5
_HUNDRED: Final = 100
_ID_LEAD: Final = 10
_SHUFFLE: Final = 953
_BASE_MS: Final = 1_436_918_400_000
"""15 July 2015, as in the data that comes with the example."""

_Numbers = npt.NDArray[np.int64]
_Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A stream of events.

    Attributes:
        seed: chooses the stream.
        rate: events a second of event time, all kinds together.
        out_of_order: events come shuffled in groups of so many; 1 is in order.
        hot_auction_ratio: one bid of so many goes to any auction, the others to the hot one.
        hot_bidder_ratio: the same for bidders.
        hot_seller_ratio: the same for sellers.
        auctions_in_flight: how many of the newest auctions get bids.
        active_people: how many of the newest people do anything.
        base_ms: time of the first event, in milliseconds since 1970 UTC.
    """

    seed: int = 1
    rate: float = 10_000
    out_of_order: int = 1
    hot_auction_ratio: int = 2
    hot_bidder_ratio: int = 4
    hot_seller_ratio: int = 4
    auctions_in_flight: int = 100
    active_people: int = 1_000
    base_ms: int = _BASE_MS

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError("the rate is events a second, more than none")
        if self.out_of_order < 1 or BLOCK % self.out_of_order:
            raise ValueError(f"events are shuffled in groups whose size divides {BLOCK}")

    def events(self, count: int, first: int = 0) -> Events:
        """``count`` events from event number ``first`` on."""
        return joined(list(self.pieces(count, first)))

    def pieces(self, count: int, first: int = 0) -> Iterator[Events]:
        """The same events in pieces of at most `BLOCK`, so that memory does not grow with ``count``."""
        last = first + count
        for block in range(first // BLOCK, -(-last // BLOCK)):
            start = block * BLOCK
            yield self._block(block, max(first - start, 0), min(last - start, BLOCK))

    def at_ms(self, number: _Numbers) -> _Numbers:
        """Event times in milliseconds."""
        micros = np.floor(number * (1e6 / self.rate) / 1_000).astype(np.int64)
        return self.base_ms + micros

    def _block(self, block: int, start: int, stop: int) -> Events:
        place = np.arange(BLOCK, dtype=np.int64)
        group = self.out_of_order
        number = block * BLOCK + place // group * group + place * _SHUFFLE % group
        texts = Texts.of(self.seed)
        found: dict[str, pa.Table] = {}
        makers = (self._persons, self._auctions, self._bids)
        kind = np.searchsorted([_PERSONS, _PERSONS + _AUCTIONS], number % _ROUND, side="right")
        wanted = (place >= start) & (place < stop)
        for code, (name, make) in enumerate(zip(KINDS, makers, strict=True)):
            is_kind = kind == code
            # Draw the whole block, so that a cut does not change the remaining events.
            table = make(np.random.default_rng([self.seed, block, code]), number[is_kind], texts)
            if stop - start < BLOCK:
                table = table.filter(pa.array(wanted[is_kind]))
            found[name] = with_keys(name, table)
        return found

    # -- ids -------------------------------------------------------------------------------

    def _last_person(self, number: _Numbers) -> _Numbers:
        return number // _ROUND

    def _last_auction(self, number: _Numbers) -> _Numbers:
        place = number % _ROUND
        in_round = np.clip(place - _PERSONS, -1, _AUCTIONS - 1)
        return number // _ROUND * _AUCTIONS + in_round

    def _any_person(self, random: _Random, number: _Numbers) -> _Numbers:
        people = self._last_person(number) + 1
        active = np.minimum(people, self.active_people)
        return people - active + random.integers(0, active + _ID_LEAD)

    def _any_auction(self, random: _Random, number: _Numbers) -> _Numbers:
        newest = np.maximum(self._last_auction(number), 0)
        oldest = np.maximum(newest - self.auctions_in_flight, 0)
        return oldest + random.integers(0, newest - oldest + 1 + _ID_LEAD)

    # -- kinds -----------------------------------------------------------------------------

    def _persons(self, random: _Random, number: _Numbers, texts: Texts) -> pa.Table:
        return pa.table(
            {
                "id": self._last_person(number) + _FIRST_ID,
                **texts.persons(random, len(number)),
                "date_time": self.at_ms(number) * 1_000,
            }
        )

    def _auctions(self, random: _Random, number: _Numbers, texts: Texts) -> pa.Table:
        count = len(number)
        at_ms = self.at_ms(number)
        is_hot = random.integers(0, self.hot_seller_ratio, count) > 0
        hot = self._last_person(number) // _HUNDRED * _HUNDRED
        initial = _prices(random, count)
        ahead = self.at_ms(number + self.auctions_in_flight * _ROUND // _AUCTIONS) - at_ms
        length = 1 + random.integers(0, np.maximum(ahead * 2, 1))
        item, description, extra = texts.auctions(random, count)
        return pa.table(
            {
                "id": self._last_auction(number) + _FIRST_ID,
                "item_name": item,
                "description": description,
                "initial_bid": initial,
                "reserve": initial + _prices(random, count),
                "date_time": at_ms * 1_000,
                "expires": (at_ms + length) * 1_000,
                "seller": np.where(is_hot, hot, self._any_person(random, number)) + _FIRST_ID,
                "category": _FIRST_CATEGORY + random.integers(0, _CATEGORIES, count),
                "extra": extra,
            }
        )

    def _bids(self, random: _Random, number: _Numbers, texts: Texts) -> pa.Table:
        count = len(number)
        is_hot_auction = random.integers(0, self.hot_auction_ratio, count) > 0
        hot_auction = np.maximum(self._last_auction(number), 0) // _HUNDRED * _HUNDRED
        is_hot_bidder = random.integers(0, self.hot_bidder_ratio, count) > 0
        hot_bidder = self._last_person(number) // _HUNDRED * _HUNDRED + 1
        auction = np.where(is_hot_auction, hot_auction, self._any_auction(random, number))
        bidder = np.where(is_hot_bidder, hot_bidder, self._any_person(random, number))
        channel, url, extra = texts.bids(random, count)
        return pa.table(
            {
                "auction": auction + _FIRST_ID,
                "bidder": bidder + _FIRST_ID,
                "price": _prices(random, count),
                "channel": channel,
                "url": url,
                "date_time": self.at_ms(number) * 1_000,
                "extra": extra,
            }
        )


def _prices(random: _Random, count: int) -> _Numbers:
    return np.round(100 * 10 ** (6 * random.random(count))).astype(np.int64)


def joined(pieces: list[Events]) -> Events:
    """Pieces of a stream as one."""
    return {kind: pa.concat_tables([piece[kind] for piece in pieces]).combine_chunks() for kind in KINDS}
