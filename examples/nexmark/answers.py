"""Answers: the rows in the sinks after all retractions, and the expected rows."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import millpond as mp
from examples.nexmark.events import ANSWERS, text_of
from examples.nexmark.query import Query
from examples.shared_data import need

Bag: TypeAlias = Counter[tuple[Any, ...]]
"""Rows and their multiplicity; order is irrelevant."""

_TIMES: Final = frozenset(
    {
        *("date_time", "bid_date_time", "auction_date_time", "expires"),
        *("window_start", "window_end", "starttime", "endtime"),
    }
)
_DECIMALS: Final = 6


def read_answer(query: Query, folder: Path) -> Bag:
    """The rows of a query's Delta table after all retractions.

    Raises:
        ValueError: a retraction matches no row.
    """
    if not (folder / query.name / "_delta_log").is_dir():
        return Counter()
    table = mp.read_table(folder / query.name)
    if query.schema is not None:
        return Counter(shown(query, row) for row in table.to_pylist())
    bag: Bag = Counter()
    for text in table.column("value").to_pylist():
        value = json.loads(text)
        is_pane = "pane" in value
        row = shown(query, value["value"] if is_pane else value)
        bag[row] += -1 if is_pane and value["pane"]["is_retraction"] else 1
    if any(count < 0 for count in bag.values()):
        raise ValueError(f"{query.name}: more rows were taken back than shown")
    return +bag


def shown(query: Query, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row as people read it and as the expected answers write it: times as text, six decimals."""
    return tuple(_cell(name, row[name]) for name in query.columns)


def _cell(name: str, cell: Any) -> Any:
    if name in _TIMES:
        return text_of(cell)
    return round(cell, _DECIMALS) if isinstance(cell, float) else cell


def expected_answers(folder: Path) -> dict[str, Bag]:
    """The answers of a folder, by query: DuckDB's, or else the published ones."""
    if not (folder / ANSWERS).exists():
        return _published(folder)
    found = json.loads(gzip.decompress((folder / ANSWERS).read_bytes()))
    return {name: bag_of(answer["rows"]) for name, answer in found.items()}


def _published(folder: Path) -> dict[str, Bag]:
    """Return the answers in ``expected.json``, and q13's, which follows from q0's."""
    found = json.loads(need(folder / "expected.json").read_text(encoding="utf-8"))["queries"]
    answers = {name: bag_of(query["rows"]) for name, query in found.items()}
    with_side = ([*row, str(row[0] % 10_000)] for row in found["q0"]["rows"])
    by_event_time = answers.pop("extra_bids_per_bidder_per_10s")
    return {**answers, "q12_event_time": by_event_time, "q13": bag_of(with_side)}


def bag_of(rows: Iterable[Iterable[Any]]) -> Bag:
    """Rows without their order, numbers to six decimals."""
    return Counter(
        tuple(round(cell, _DECIMALS) if isinstance(cell, float) else cell for cell in row) for row in rows
    )


def differences(answer: Bag, expected: Bag) -> list[str]:
    """Missing and surplus rows, one line each; empty if the answers are equal."""
    missing, surplus = expected - answer, answer - expected
    return [
        *(f"missing {count} x {row}" for row, count in missing.items()),
        *(f"too much {count} x {row}" for row, count in surplus.items()),
    ]
