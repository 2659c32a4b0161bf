"""A pipeline whose rows show loss, duplication and order at a glance.

Every record has a unique number, and its only effect is that the number is appended to its key's
list (Elle's method). So one read of the rows shows if each record had its effect exactly once, and in
which order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import Sink
from millpond.statestore.store import Store

LEDGER = "ledger"
"""Name of the computation, of its pipeline and of the stream that it produces."""

ROWS = "rows"
"""Name of the injected stream."""

START_US = 1_700_000_000_000_000
"""Event time of the record number 0."""


class Ledger(Computation):
    """Appends each record's number to its key's list, and produces the number."""

    def process_record(self, context: Context, record: Record) -> None:
        """Append and produce."""
        number = record.value["n"]
        context.state.set([*context.state.get([]), number])
        context.produce(LEDGER, {"n": number})


def ledger_pipeline(
    sink: Sink | None = None, *, computation: Computation | None = None, id_slack: str = "3h"
) -> EnginePipeline:
    """The stream ``rows`` (fields ``k``, ``t``, ``id``, ``n``) into one `Ledger`, and its productions into ``sink``."""
    pipeline = EnginePipeline(LEDGER)
    rows = pipeline.inject(ROWS, key="k", at="t", id="id", id_slack=id_slack)
    stream = rows.apply(computation or Ledger(), name=LEDGER)
    if sink is not None:
        stream.sink("numbers", sink)
    return pipeline


def numbered(numbers: Iterable[int], *, keys: int = 5) -> list[dict[str, Any]]:
    """One row for each number, a second apart, spread over ``keys`` keys."""
    return [
        {"k": f"k{number % keys}", "t": START_US + number * 1_000_000, "id": f"{number}", "n": number}
        for number in numbers
    ]


def written(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The ledger's expected contents if each of ``rows`` had its effect once, in the order of their times."""
    lists: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: (row["k"], row["t"])):
        lists.setdefault(row["k"], []).append(row["n"])
    return lists


def ledger_of(store: Store, version: int | None = None) -> dict[str, list[int]]:
    """The ledger's contents: numbers by key."""
    codec = Ledger.codec
    table = store.rows_view(LEDGER, version).to_arrow().select(["key", "state"])
    return {row["key"]: codec.decode(row["state"]) for row in table.to_pylist()}
