"""All queries, by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Final

from examples.nexmark import (
    auction_list_queries,
    auction_queries,
    element_queries,
    join_queries,
    statistics_queries,
    top_queries,
    window_queries,
)
from examples.nexmark.query import Query


def _number(query: Query) -> tuple[int, str]:
    digits, _, variant = query.name.removeprefix("q").partition("_")
    return int(digits), variant


QUERIES: Final[Mapping[str, Query]] = MappingProxyType(
    {
        query.name: query
        for query in sorted(
            chain(
                element_queries.QUERIES,
                window_queries.QUERIES,
                join_queries.QUERIES,
                auction_queries.QUERIES,
                statistics_queries.QUERIES,
                top_queries.QUERIES,
                auction_list_queries.QUERIES,
            ),
            key=_number,
        )
    }
)
"""In the order of their numbers."""
