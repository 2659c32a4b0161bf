"""The texts of generated events: names, cities, items, channels, and padding of the right length.

Texts are drawn into pools once per seed. Each event picks from the pools, so an event only costs drawing numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

HOT_CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")
CHANNELS: Final = 10_000
_STATES: Final = ("az", "ca", "id", "or", "wa", "wy")
_CITIES: Final = (
    *("phoenix", "los angeles", "san francisco", "boise", "portland"),
    *("bend", "redmond", "seattle", "kent", "cheyenne"),
)
_FIRST: Final = (
    "peter",
    "paul",
    "luke",
    "john",
    "saul",
    "vicky",
    "kate",
    "julie",
    "sarah",
    "deiter",
    "walter",
)
_LAST: Final = ("shultz", "abrams", "spencer", "white", "bartels", "walton", "smith", "jones", "noris")
_POOL: Final = 2_048
_LETTERS: Final = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_SPREAD: Final = 0.2
"""Filling is up to a fifth shorter or longer than on average."""

_PERSON_EXTRA: Final = 136
_AUCTION_EXTRA: Final = 388
_BID_EXTRA: Final = 68
_ITEM: Final = (3, 20)
_DESCRIPTION: Final = (3, 100)
_WITH_CHANNEL_ID: Final = 0.9

_Random = np.random.Generator
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The pools of one seed: Arrow arrays that events take from."""

    names: pa.Array
    emails: pa.Array
    cards: pa.Array
    cities: pa.Array
    states: pa.Array
    items: pa.Array
    descriptions: pa.Array
    person_extras: pa.Array
    auction_extras: pa.Array
    bid_extras: pa.Array
    channels: pa.Array
    urls: pa.Array

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, seed: int) -> Self:
        """The pools of a seed."""
        random = np.random.default_rng([seed, 2**32 - 1])
        channels, urls = _channels(random)
        return cls(
            names=pa.array([f"{first} {last}" for first in _FIRST for last in _LAST]),
            emails=_emails(random),
            cards=_cards(random),
            cities=pa.array(_CITIES),
            states=pa.array(_STATES),
            items=_words(random, *_ITEM),
            descriptions=_words(random, *_DESCRIPTION),
            person_extras=_filling(random, _PERSON_EXTRA),
            auction_extras=_filling(random, _AUCTION_EXTRA),
            bid_extras=_filling(random, _BID_EXTRA),
            channels=channels,
            urls=urls,
        )

    def persons(self, random: _Random, count: int) -> dict[str, pa.Array]:
        """The text columns of ``count`` people."""
        return {
            "name": _taken(random, self.names, count),
            "email_address": _taken(random, self.emails, count),
            "credit_card": _taken(random, self.cards, count),
            "city": _taken(random, self.cities, count),
            "state": _taken(random, self.states, count),
            "extra": _taken(random, self.person_extras, count),
        }

    def auctions(self, random: _Random, count: int) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Items, descriptions and filling of ``count`` auctions."""
        return (
            _taken(random, self.items, count),
            _taken(random, self.descriptions, count),
            _taken(random, self.auction_extras, count),
        )

    def bids(self, random: _Random, count: int) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Channels, urls and filling of ``count`` bids: half of them come through one of four hot channels."""
        hot, all_of_them = len(HOT_CHANNELS), len(HOT_CHANNELS) + CHANNELS
        is_hot = random.random(count) < 0.5
        chosen = np.where(is_hot, random.integers(0, hot, count), random.integers(hot, all_of_them, count))
        places = pa.array(chosen)
        return self.channels.take(places), self.urls.take(places), _taken(random, self.bid_extras, count)


def _taken(random: _Random, pool: pa.Array, count: int) -> pa.Array:
    return pool.take(pa.array(random.integers(0, len(pool), count)))


def _texts(random: _Random, lengths: _Numbers) -> list[str]:
    """Random texts of these lengths, out of one draw."""
    letters = random.choice(_LETTERS, int(lengths.sum())).tobytes().decode()
    ends = np.cumsum(lengths).tolist()
    return [letters[end - length : end] for length, end in zip(lengths.tolist(), ends, strict=True)]


def _words(random: _Random, shortest: int, longest: int) -> pa.Array:
    return pa.array(_texts(random, random.integers(shortest, longest + 1, _POOL)))


def _filling(random: _Random, average: int) -> pa.Array:
    return _words(random, round(average * (1 - _SPREAD)), round(average * (1 + _SPREAD)))


def _emails(random: _Random) -> pa.Array:
    names, hosts = _texts(random, np.full(_POOL, 7)), _texts(random, np.full(_POOL, 5))
    return pa.array([f"{name}@{host}.com" for name, host in zip(names, hosts, strict=True)])


def _cards(random: _Random) -> pa.Array:
    groups = random.integers(0, 10_000, (_POOL, 4)).tolist()
    return pa.array([" ".join(f"{group:04}" for group in card) for card in groups])


def _channels(random: _Random) -> tuple[pa.Array, pa.Array]:
    names = [*HOT_CHANNELS, *(f"channel-{number}" for number in range(CHANNELS))]
    folders = _texts(random, random.integers(3, 6, 3 * len(names)))
    has_id = random.random(CHANNELS) < _WITH_CHANNEL_ID
    ids = ["" for _ in HOT_CHANNELS]
    ids += [f"&channel_id={_reversed_bits(number)}" if has_id[number] else "" for number in range(CHANNELS)]
    urls = [
        f"https://www.nexmark.com/{'/'.join(folders[3 * place : 3 * place + 3])}/item.htm?query=1{suffix}"
        for place, suffix in enumerate(ids)
    ]
    return pa.array(names), pa.array(urls)


def _reversed_bits(number: int) -> int:
    """A number whose 32 bits are the other way round, without sign as Java's ``abs`` leaves it."""
    turned = int(f"{number:032b}"[::-1], 2)
    return turned if turned < 2**31 else 2**32 - turned
