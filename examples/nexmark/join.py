"""A join without windows: facts and the one row that they are joined to may arrive in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import millpond as mp
from examples.nexmark.query import Row


class Join(mp.Computation):
    """Join every fact to the row of its key. Rows are kept for later facts; facts are kept until their row arrives.

    Args:
        row_stream: the stream of each key's single row; records of other streams are facts.
        output: the stream of joined rows.
        row: selects the part of a row to keep.
        fact: selects the part of a fact to keep.
        joined: takes a fact and the row, and returns rows of the answer.
    """

    def __init__(
        self,
        row_stream: str,
        output: str,
        *,
        row: Callable[[Row], Any],
        fact: Callable[[Row], Any],
        joined: Callable[[Any, Any], Iterable[Row]],
    ) -> None:
        self.row_stream = row_stream
        self.output = output
        self.row = row
        self.fact = fact
        self.joined = joined

    def process_records(self, context: mp.Context, records: mp.Records) -> None:
        """Read and write the state once for all records of the key."""
        state: Row = context.state.get({})
        row, waiting = state.get("row"), state.get("waiting", [])
        for record in records:
            if record.stream == self.row_stream:
                row, facts, waiting = self.row(record.value), waiting, []
            else:
                facts = [self.fact(record.value)]
            if row is None:
                waiting += facts
                continue
            for fact in facts:
                for answer in self.joined(fact, row):
                    context.produce(self.output, answer)
        context.state.set({"waiting": waiting} if row is None else {"row": row})
